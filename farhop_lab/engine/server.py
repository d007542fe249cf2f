"""One replica's HTTP face: vLLM's paths, bodies, errors and habits over the emulated core.

Owns the request's edges (parse, answer, span, abort when the client leaves); tokens go straight from the driver to the
socket. Prompts and answers are never logged. Bounds: body size, requests waiting, bytes unsent to a slow client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import HttpVersion11, web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as _METRICS_TYPE

from farhop_lab.engine.api import Call, RefusedError, parse_chat, parse_completion
from farhop_lab.engine.core import EngineCore, EngineFullError
from farhop_lab.engine.driver import Driver
from farhop_lab.engine.kv_log import KvLog
from farhop_lab.engine.metrics import Exposition, Observations
from farhop_lab.engine.render import Answer
from farhop_lab.engine.sequence import Sequence, Voice
from farhop_lab.engine.tasks import Tasks
from farhop_lab.engine.ticket import StreamTicket, Ticket, Wait, WholeTicket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from opentelemetry.trace import Tracer

    from farhop_lab.engine.kv_publisher import KvPublisher
    from farhop_lab.engine.profiles import Profile
    from farhop_lab.engine.render import Rendering
    from farhop_lab.engine.sequence import Wanted
    from farhop_lab.engine.tokens import EngineTokenizer

BODY_BYTES_MAX = 16 * 2**20
REQUEST_ID_CHARS_MAX = 128
VERSION = "0.11.0"  # the vLLM whose manners these are
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class Replica:
    """One emulated engine on the running loop; `clock` gives monotonic seconds. Close it in the end."""

    def __init__(
        self,
        profile: Profile,
        voice: Voice,
        clock: Callable[[], float],
        *,
        tracer: Tracer | None = None,
        publisher: KvPublisher | None = None,
        tokenizer: EngineTokenizer | None = None,
    ) -> None:
        self.core = EngineCore(profile)
        self.observations = Observations()
        self.driver = Driver(self.core, asyncio.get_running_loop(), clock)
        self._publisher, self._tokenizer = publisher, tokenizer
        if publisher is not None:
            self.core.kv.log = KvLog(profile.block_tokens)
            self.driver.scheduled = self._tell
        self._clock = clock
        self.profile = profile
        self.voice = voice
        self._exposition = Exposition(self.core, self.observations, voice.model)
        self._started_at = int(time.time())
        self._serial = 0
        self._spans = None
        if tracer is not None:
            from farhop_lab.engine.tracing import RequestSpans  # OpenTelemetry is slow to import: only when wanted

            self._spans = RequestSpans(tracer)

    def application(self) -> web.Application:
        """The aiohttp application. Its runner must set `handler_cancellation`, or lost clients go unnoticed."""
        app = web.Application(middlewares=[shape_errors], client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        Tasks(self).add_routes(app.router)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        return app

    def close(self) -> None:
        """Stop the driver."""
        self.driver.close()
        if self._publisher is not None:
            self._publisher.close()

    def _tell(self) -> None:
        if self._publisher is not None and self.core.kv.log is not None:
            self._publisher.tell(self.core.kv.log)

    async def _reset(self, _: web.Request) -> web.Response:
        self.core.kv.reset()  # not while sequences run; vLLM answers 200 either way
        self._tell()
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat(await request.read()), "chatcmpl-")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion(await request.read()), "cmpl-")

    async def _answer(self, request: web.Request, call: Call, prefix: str) -> web.StreamResponse:
        request_id = self.request_id(request, prefix)
        answer = Answer(request_id, self.voice.model, int(time.time()), call.role)
        return await self.serve(request, call, answer, request_id)

    def request_id(self, request: web.Request, prefix: str) -> str:
        """A client may name its request, and two clients may choose the same name: the core has its own."""
        return prefix + (request.headers.get("X-Request-Id", "")[:REQUEST_ID_CHARS_MAX] or uuid.uuid4().hex)

    async def serve(self, request: web.Request, call: Call, answer: Rendering, request_id: str) -> web.StreamResponse:
        """Generate what is asked for, and render it as it comes or whole. RefusedError."""
        began_ns = time.time_ns()
        sequence = self._sequence(call.model, call.wanted)
        ticket, response = await self._ticket(request, call, sequence, answer)
        try:
            self.driver.submit(sequence, ticket)
            await ticket.done
            if isinstance(ticket, WholeTicket):
                return web.Response(body=answer.whole(ticket.text, sequence), content_type="application/json")
            await response.write_eof()
        finally:
            # The client left or the server stops, unless the sequence has ended: then there is nothing to abort.
            self.driver.abort(sequence.id)
            self._record(request, request_id, sequence, began_ns, ticket)
        return response

    async def compute(
        self, request: web.Request, model: str | None, wanted: list[Wanted], request_id: str
    ) -> list[tuple[Sequence, str]]:
        """Compute several prompts of one request side by side; each with its text. RefusedError."""
        began_ns = time.time_ns()
        sequences = [self._sequence(model, one) for one in wanted]
        tickets = [WholeTicket(self._wait(sequence)) for sequence in sequences]
        try:
            for sequence, ticket in zip(sequences, tickets, strict=True):
                self.driver.submit(sequence, ticket)
            for ticket in tickets:
                await ticket.done
        except EngineFullError as error:
            raise _too_many(str(error)) from None
        finally:
            for at, (sequence, ticket) in enumerate(zip(sequences, tickets, strict=True)):
                self.driver.abort(sequence.id)
                self._record(request, f"{request_id}-{at}", sequence, began_ns, ticket)
        return [(sequence, ticket.text) for sequence, ticket in zip(sequences, tickets, strict=True)]

    def _record(self, request: web.Request, request_id: str, sequence: Sequence, began_ns: int, ticket: Ticket) -> None:
        if self._spans is not None:
            self._spans.record(request.headers, request_id, self.voice.model, sequence, began_ns, ticket.ttft_s)

    def check_model(self, model: str | None) -> None:
        """RefusedError where it is not the one served here."""
        if model not in (None, self.voice.model):
            text = f"The model `{model}` does not exist."
            raise RefusedError(text, status=404, kind="NotFoundError", param="model")

    def _sequence(self, model: str | None, wanted: Wanted) -> Sequence:
        self.check_model(model)
        if self.core.full:
            raise _too_many("Too many requests are waiting.")
        if self._tokenizer is not None:
            wanted = self._tokenizer.tokenized(wanted)
        self._serial += 1
        try:
            return Sequence(str(self._serial), wanted, self.voice, self.profile)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _wait(self, sequence: Sequence) -> Wait:
        return Wait(sequence, asyncio.get_running_loop().create_future(), self.observations, self._clock())

    async def _ticket(
        self, request: web.Request, call: Call, sequence: Sequence, answer: Rendering
    ) -> tuple[Ticket, web.StreamResponse]:
        """The ticket to wait on; a stream's response has its head sent before any token is there, as vLLM does it."""
        wait = self._wait(sequence)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        if not call.stream:
            return WholeTicket(wait), response
        if request.version < HttpVersion11:
            raise RefusedError("stream: streaming needs HTTP/1.1 or newer", param="stream")
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left before its answer began")
        return StreamTicket(wait, answer, transport, include_usage=call.include_usage), response

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.voice.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "vllm",
            "root": self.voice.model,
            "parent": None,
            "max_model_len": self.profile.context_tokens,
            "permission": [],
        }
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposition.page(), headers={"Content-Type": _METRICS_TYPE})


def _too_many(text: str) -> RefusedError:
    return RefusedError(text, status=503, kind="ServiceUnavailableError")


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


@web.middleware
async def shape_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every refusal in vLLM's shape, aiohttp's own (404, 405, 413) included."""
    try:
        return await handler(request)
    except RefusedError as refusal:
        return web.Response(body=refusal.body(), status=refusal.status, content_type="application/json")
    except ConnectionError:  # the client left at the very moment its answer was written: nobody is there to read this
        return web.Response(status=499, reason="Client Closed Request")
    except web.HTTPException as error:
        shaped = RefusedError(_about(request, error.status, error.reason), status=error.status, kind=error.reason)
        kept = {"Allow": allow} if (allow := error.headers.get("Allow")) else None
        return web.Response(body=shaped.body(), status=error.status, headers=kept, content_type="application/json")


def _about(request: web.Request, status: int, reason: str) -> str:
    if status == web.HTTPRequestEntityTooLarge.status_code:
        return f"The request body is larger than {BODY_BYTES_MAX} bytes; send a shorter prompt."
    return f"{reason}: {request.method} {request.path}"
