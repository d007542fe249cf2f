"""One replica's HTTP server: vLLM's paths, bodies, errors and behaviour over the emulated core.

Handles the edges of a request (parse, answer, span, abort when the client leaves); tokens go straight from the driver
to the socket. Prompts and answers are never logged. Bounds: body size, requests waiting, bytes unsent to a slow client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import HttpVersion11, web
from msgspec.structs import replace
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as _METRICS_TYPE

from farhop_lab.engine.bootstrap import WAIT_S, BootstrapRooms
from farhop_lab.engine.core import faults
from farhop_lab.engine.core.faults import Faults
from farhop_lab.engine.core.held import TransferLink
from farhop_lab.engine.core.kv_log import KvLog
from farhop_lab.engine.core.scheduler import EngineCore, EngineFullError
from farhop_lab.engine.core.sequence import Sequence, TextModel
from farhop_lab.engine.driver import Driver
from farhop_lab.engine.formats.api import Call, RefusedError, decoded, parse_chat, parse_completion, spelled
from farhop_lab.engine.formats.logprobs import Logprobs
from farhop_lab.engine.formats.render import Answer, TokenIds, broken
from farhop_lab.engine.formats.tools import CallsAnswer
from farhop_lab.engine.metrics import Exposition, Observations
from farhop_lab.engine.tasks import Tasks
from farhop_lab.engine.ticket import StreamTicket, Ticket, Wait, WholeTicket
from farhop_lab.engine.transfer import Transfers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from opentelemetry.trace import Tracer

    from farhop_lab.engine.bootstrap import Mode
    from farhop_lab.engine.core.adapters import Adapters
    from farhop_lab.engine.core.profiles import Profile
    from farhop_lab.engine.core.sequence import EngineRequest
    from farhop_lab.engine.formats.render import Rendering
    from farhop_lab.engine.kv_publisher import KvPublisher
    from farhop_lab.engine.tokens import EngineTokenizer

BODY_BYTES_MAX = 16 * 2**20
REQUEST_ID_CHARS_MAX = 128
VERSION = "0.11.0"  # the version of vLLM that is emulated


class AdapterBody(msgspec.Struct):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter. The adapter's path does not matter here."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    lora_path: str = ""


_ADAPTER = msgspec.json.Decoder(AdapterBody)
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class Replica:
    """One emulated engine on the running loop; `clock` gives monotonic seconds. Close it in the end."""

    def __init__(
        self,
        profile: Profile,
        text_model: TextModel,
        clock: Callable[[], float],
        *,
        tracer: Tracer | None = None,
        adapters: Adapters | None = None,
        publisher: KvPublisher | None = None,
        tokenizer: EngineTokenizer | None = None,
        link: TransferLink | None = None,
        mode: Mode | None = None,
        kv_wait_s: float = WAIT_S,
    ) -> None:
        log = KvLog(profile.block_tokens) if publisher is not None else None
        self.core = EngineCore(profile, adapters=adapters, log=log)
        self.transfers = Transfers(self.core, link or TransferLink())
        self.rooms = BootstrapRooms(mode, self.core, link or TransferLink(), kv_wait_s) if mode is not None else None
        self.observations = Observations()
        self.faults = Faults(clock)
        self.driver = Driver(self.core, asyncio.get_running_loop(), clock, self.faults.stretch)
        self._publisher, self._tokenizer = publisher, tokenizer
        if publisher is not None:
            self.driver.scheduled = self._publish
        self._clock = clock
        self.profile = profile
        self.text_model = text_model
        self._exposition = Exposition(self.core, self.observations, text_model.model)
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
        self.transfers.add_routes(app.router)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        app.router.add_post("/lab/fault", self._fault)
        app.router.add_delete("/lab/fault", self._fault)
        return app

    def close(self) -> None:
        """Stop the driver."""
        self.driver.close()
        self.transfers.close()
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self) -> None:
        if self._publisher is not None and self.core.log is not None:
            self._publisher.publish_new(self.core.log)

    async def _reset(self, _: web.Request) -> web.Response:
        self.core.kv.reset()  # not while sequences run; vLLM answers 200 either way
        self._publish()
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat(await request.read()), "chatcmpl-")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion(await request.read()), "cmpl-")

    async def _answer(self, request: web.Request, call: Call, prefix: str) -> web.StreamResponse:
        request_id = self.request_id(request, prefix)
        token_ids = (
            TokenIds(self._tokenizer.piece_ids if self._tokenizer is not None else None) if call.token_ids else None
        )
        model = call.model or self.text_model.model
        logprobs = None if call.logprobs is None else Logprobs(call.logprobs, chat=call.role is not None)
        given = request_id, model, int(time.time()), call.role, 0, call.echo, token_ids, call.usage_each, logprobs
        answer = Answer(*given) if call.calls is None else CallsAnswer(*given, named=call.calls)
        return await self.serve(request, call, answer, request_id, [answer.beside(at) for at in range(1, call.n)])

    def request_id(self, request: web.Request, prefix: str) -> str:
        """A client may name its request, and two clients may choose the same name: the core has ids of its own."""
        return prefix + (request.headers.get("X-Request-Id", "")[:REQUEST_ID_CHARS_MAX] or uuid.uuid4().hex)

    async def serve(
        self, request: web.Request, call: Call, answer: Rendering, request_id: str, beside: Iterable[Rendering] = ()
    ) -> web.StreamResponse:
        """Generate, and render as a stream or whole. `beside` render further answers to the same prompt, all different.
        Raises RefusedError.
        """
        if self.rooms is None:
            return await self._generate(request, call, answer, request_id, beside)
        with self.rooms.entered(call) as ours:
            return await self._generate(request, ours, answer, request_id, beside)

    async def _generate(
        self, request: web.Request, call: Call, answer: Rendering, request_id: str, beside: Iterable[Rendering]
    ) -> web.StreamResponse:
        began_ns = time.time_ns()
        renderings = [answer, *beside]
        sequences = [self._sequence(call.model, call.wanted, at) for at in range(len(renderings))]
        await self._fetched(call, sequences[0])
        tickets, response = await self._tickets(request, call, sequences, renderings)
        try:
            for sequence, ticket in zip(sequences, tickets, strict=True):
                self.driver.submit(sequence, ticket)
            errors = [error for ticket in tickets if (error := await ticket.done)]
            if self.rooms is not None and not errors:
                errors = await self.rooms.handed_over(call, sequences[0])
            if errors and not call.stream:
                raise _broken(errors[0])
            if errors:  # a stream cannot take its 200 back: the error is its last event
                await response.write(broken(errors[0]))
            if not call.stream:
                if isinstance(answer, Answer):
                    answer.kv_transfer_params = self.transfers.offer(request, sequences[0])
                texts = [ticket.text for ticket in tickets if isinstance(ticket, WholeTicket)]
                document = answer.whole(list(zip(texts, sequences, strict=True)))
                return web.Response(body=document, content_type="application/json", headers=self._load(request))
            await response.write_eof()
        finally:
            # The client left or the server stops, unless the sequence has ended: then there is nothing to abort.
            for at, (sequence, ticket) in enumerate(zip(sequences, tickets, strict=True)):
                self.driver.abort(sequence.id)
                self.transfers.over(sequence)
                name = f"{request_id}-{at}" if at else request_id
                self._record(request, name, sequence, began_ns, ticket)
        return response

    def _load(self, request: web.Request) -> dict[str, str]:
        """ORCA's header, as vLLM adds it to whole answers if a client asks for it."""
        form, core = request.headers.get("Endpoint-Load-Metrics-Format", "").upper(), self.core
        metrics = {"kv_cache_usage_perc": core.kv.usage, "num_requests_waiting": core.waiting}
        if form == "TEXT":
            line = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        elif form == "JSON":
            line = msgspec.json.encode({"named_metrics": metrics}).decode()
        else:
            return {}
        return {"endpoint-load-metrics": f"{form} {line}"}

    async def _fetched(self, call: Call, sequence: Sequence) -> None:
        """Fetch what another engine computed of the prompt. Raises RefusedError."""
        if call.fetch is not None:
            await self.transfers.pull(call.fetch, sequence)
        if self.rooms is not None:
            await self.rooms.pull(call, sequence)
        self._check_room()

    async def compute(
        self, request: web.Request, model: str | None, wanted: list[EngineRequest], request_id: str
    ) -> list[tuple[Sequence, str]]:
        """Compute several prompts of one request in parallel; each with its text. Raises RefusedError."""
        if self.rooms is not None:
            raise self.rooms.roomless()
        began_ns = time.time_ns()
        sequences = [self._sequence(model, one) for one in wanted]
        tickets = [WholeTicket(self._wait(sequence)) for sequence in sequences]
        try:
            for sequence, ticket in zip(sequences, tickets, strict=True):
                self.driver.submit(sequence, ticket)
            for ticket in tickets:
                if error := await ticket.done:
                    raise _broken(error)
        except EngineFullError as error:
            raise _too_many(str(error)) from None
        finally:
            for at, (sequence, ticket) in enumerate(zip(sequences, tickets, strict=True)):
                self.driver.abort(sequence.id)
                self._record(request, f"{request_id}-{at}", sequence, began_ns, ticket)
        return [(sequence, ticket.text) for sequence, ticket in zip(sequences, tickets, strict=True)]

    def _record(self, request: web.Request, request_id: str, sequence: Sequence, began_ns: int, ticket: Ticket) -> None:
        if self._spans is not None:
            self._spans.record(request.headers, request_id, self.text_model.model, sequence, began_ns, ticket.ttft_s)

    def check_model(self, model: str | None) -> None:
        """RefusedError if it is not the one served here."""
        if model not in (None, self.text_model.model) and model not in self.core.adapters.names:
            text = f"The model `{model}` does not exist."
            raise RefusedError(text, status=404, kind="NotFoundError", param="model")

    def _check_room(self) -> None:
        """RefusedError if no request is accepted now."""
        if self.faults.refusal:
            raise _broken(self.faults.refusal)
        if self.core.full:
            raise _too_many("Too many requests are waiting.")

    def _sequence(self, model: str | None, wanted: EngineRequest, at: int = 0) -> Sequence:
        """`at`: which of several answers to the prompt, each of which is different."""
        self.check_model(model)
        self._check_room()
        if self._tokenizer is not None:
            wanted = self._tokenizer.tokenized(wanted)
        elif wanted.ids:
            wanted = spelled(wanted)
        self._serial += 1
        try:
            if model in self.core.adapters.names:
                wanted = replace(wanted, adapter=model)
            text_model = self.text_model if not at else replace(self.text_model, seed=self.text_model.seed + at)
            return Sequence(str(self._serial), wanted, text_model, self.profile)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _wait(self, sequence: Sequence) -> Wait:
        return Wait(sequence, asyncio.get_running_loop().create_future(), self.observations, self._clock())

    async def _tickets(
        self, request: web.Request, call: Call, sequences: list[Sequence], renderings: list[Rendering]
    ) -> tuple[Iterable[Ticket], web.StreamResponse]:
        """The tickets to wait on; the head of a stream's response is sent before the first token, as in vLLM."""
        waits = [self._wait(sequence) for sequence in sequences]
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        if not call.stream:
            gathered = [one.logprobs if isinstance(one, Answer) else None for one in renderings]
            return [WholeTicket(wait, one) for wait, one in zip(waits, gathered, strict=True)], response
        if request.version < HttpVersion11:
            raise RefusedError("stream: streaming needs HTTP/1.1 or newer", param="stream")
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left before its answer began")
        return [
            StreamTicket(wait, rendering, transport, include_usage=call.include_usage)
            for wait, rendering in zip(waits, renderings, strict=True)
        ], response

    async def _models(self, _: web.Request) -> web.Response:
        base = self.text_model.model
        adapters = [self._model(name, parent=base) for name in self.core.adapters.names]
        return _json({"object": "list", "data": [self._model(base), *adapters]})

    def _model(self, name: str, parent: str | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": self.profile.context_tokens if parent is None else None,
            "permission": [],
        }

    async def _load_adapter(self, request: web.Request) -> web.Response:
        name = decoded(_ADAPTER, await request.read()).lora_name
        if name == self.text_model.model or not self.core.adapters.register(name):
            text = f"The lora adapter '{name}' has already been loaded."
            raise RefusedError(text, kind="InvalidUserInput", param="lora_name")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = decoded(_ADAPTER, await request.read()).lora_name
        if not self.core.adapters.unregister(name):
            text = f"The lora adapter '{name}' cannot be found."
            raise RefusedError(text, status=404, kind="NotFoundError", param="lora_name")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.faults.healthy else 503)

    async def _fault(self, request: web.Request) -> web.Response:
        """The lab's own path: inject a fault (POST a Fault), or mend (DELETE)."""
        if request.method == "DELETE":
            self.faults.command(None)
            return web.Response()
        try:
            self.faults.command(faults.read(await request.read()))
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if self.faults.kind == "oom":
            self.driver.break_off(self.faults.refusal)
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposition.page(), headers={"Content-Type": _METRICS_TYPE})


def _broken(text: str) -> RefusedError:
    return RefusedError(text, status=500, kind="InternalServerError")


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
    except ConnectionError:  # the client left while its answer was written: nobody is there to read this
        return web.Response(status=499, reason="Client Closed Request")
    except web.HTTPException as error:
        shaped = RefusedError(_about(request, error.status, error.reason), status=error.status, kind=error.reason)
        kept = {"Allow": allow} if (allow := error.headers.get("Allow")) else None
        return web.Response(body=shaped.body(), status=error.status, headers=kept, content_type="application/json")


def _about(request: web.Request, status: int, reason: str) -> str:
    if status == web.HTTPRequestEntityTooLarge.status_code:
        return f"The request body is larger than {BODY_BYTES_MAX} bytes; send a shorter prompt."
    return f"{reason}: {request.method} {request.path}"
