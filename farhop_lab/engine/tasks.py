"""One replica's paths besides chats and completions: Messages, Responses, embeddings, rankings, audio, Triton.

Also the tokenizer's paths. Each takes the time of its prompts' prefill, in the same batch as all else. Never logs
requests.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web

from farhop_lab.engine.formats import messages, pooling, responses, sound, triton
from farhop_lab.engine.formats.api import RefusedError, parse_chats, refusal
from farhop_lab.engine.formats.render import Answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from farhop_lab.engine.core.profiles import Profile
    from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
    from farhop_lab.engine.formats.api import Call
    from farhop_lab.engine.formats.render import Rendering


class ReplicaServer(Protocol):
    """What the handlers need of the replica that they belong to."""

    text_model: TextModel
    profile: Profile

    def check_model(self, model: str | None) -> None:
        """RefusedError if it is not the one served here."""

    async def serve(self, request: web.Request, call: Call, answer: Rendering, request_id: str) -> web.StreamResponse:
        """Generate, and render as a stream or whole."""
        ...

    async def compute(
        self, request: web.Request, model: str | None, wanted: list[EngineRequest], request_id: str
    ) -> list[tuple[Sequence, str]]:
        """Compute several prompts of one request in parallel; each with its text."""
        ...

    def request_id(self, request: web.Request, prefix: str) -> str:
        """The request's id."""
        ...


class Tasks:
    """The handlers of one replica."""

    def __init__(self, server: ReplicaServer) -> None:
        self._server = server

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Under vLLM's and Triton's paths."""
        router.add_post("/v1/messages", self._messages)
        router.add_post("/v1/messages/count_tokens", self._count_tokens)
        router.add_post("/v1/responses", self._responses)
        router.add_post("/v1/chat/completions/batch", self._chat_batch)
        router.add_post("/generative_scoring", self._generative_scores)
        router.add_post("/v1/embeddings", self._embeddings)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            router.add_post(path, self._rerank)
        for path in ("/score", "/v1/score"):
            router.add_post(path, self._score)
        router.add_post("/tokenize", self._tokenize)
        router.add_post("/detokenize", self._detokenize)
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            router.add_post(path, self._transcribe)
        for path in ("/v2/models/{model}", f"/v2/models/{{model}}/versions/{triton.VERSION}"):
            router.add_post(path + "/infer", self._infer)
            router.add_post(path + "/generate", self._generate)
            router.add_post(path + "/generate_stream", self._generate_stream)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        try:
            call, request_id = messages.parse(await request.read()), self._server.request_id(request, "msg_")
            given = request_id, call.model or ""
            answer = messages.MessageAnswer(*given) if call.calls is None else messages.MessageCalls(*given, call.calls)
            return await self._server.serve(request, call, answer, request_id)
        except RefusedError as error:
            raise messages.AnthropicRefusedError(
                error.message, status=error.status, kind=error.kind, param=error.param
            ) from None

    async def _count_tokens(self, request: web.Request) -> web.Response:
        model, prompt = messages.counted(await request.read())
        self._server.check_model(model)
        return web.Response(body=messages.count(prompt), content_type="application/json")

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        call, request_id = responses.parse(await request.read()), self._server.request_id(request, "resp_")
        given = request_id, call.model or self._server.text_model.model, int(time.time())
        answer = responses.ResponseAnswer(*given) if call.calls is None else responses.ResponseCalls(*given, call.calls)
        return await self._server.serve(request, call, answer, request_id)

    async def _chat_batch(self, request: web.Request) -> web.Response:
        calls, request_id = parse_chats(await request.read()), self._server.request_id(request, "chatcmpl-")
        done = await self._server.compute(request, calls[0].model, [call.wanted for call in calls], request_id)
        answer = Answer(request_id, calls[0].model or self._server.text_model.model, int(time.time()), "assistant")
        return web.Response(
            body=answer.whole([(text, sequence) for sequence, text in done]), content_type="application/json"
        )

    async def _generative_scores(self, request: web.Request) -> web.Response:
        asked = pooling.parse_generative(await request.read())
        return await self._pooled(request, asked, "generative-scoring-", pooling.generative_scores)

    async def _embeddings(self, request: web.Request) -> web.Response:
        return await self._pooled(request, pooling.parse_embeddings(await request.read()), "embd-", pooling.embeddings)

    async def _rerank(self, request: web.Request) -> web.Response:
        return await self._pooled(request, pooling.parse_rerank(await request.read()), "rerank-", pooling.ranking)

    async def _score(self, request: web.Request) -> web.Response:
        return await self._pooled(request, pooling.parse_score(await request.read()), "score-", pooling.scores)

    async def _pooled(
        self,
        request: web.Request,
        asked: pooling.Pooled,
        prefix: str,
        render: Callable[[pooling.Pooled, dict[str, Any], int], dict[str, Any]],
    ) -> web.Response:
        request_id = self._server.request_id(request, prefix)
        done = await self._server.compute(request, asked.model, asked.wanted(), request_id)
        head = {"id": request_id, "created": int(time.time()), "model": self._server.text_model.model}
        return _json(render(asked, head, sum(sequence.prompt_tokens for sequence, _ in done)))

    async def _tokenize(self, request: web.Request) -> web.Response:
        model, answer = pooling.tokenize(await request.read(), self._server.profile.context_tokens)
        self._server.check_model(model)
        return _json(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        model, answer = pooling.detokenize(await request.read())
        self._server.check_model(model)
        return _json(answer)

    async def _transcribe(self, request: web.Request) -> web.Response:
        try:
            form = await request.post()
        except ValueError as error:
            raise RefusedError(f"The request body is not valid multipart/form-data: {error}") from None
        recording, fields = form.get("file"), {name: str(form.get(name, "")) for name in ("stream", "response_format")}
        if not isinstance(recording, web.FileField):
            raise refusal("file", "it is missing; give the sound as a file of the form")
        if fields["stream"].lower() in ("true", "1"):
            raise refusal("stream", "this engine does not stream transcriptions; leave it out")
        if fields["response_format"] not in ("", "json", "text"):
            raise refusal("response_format", "this engine writes json and text")
        data = recording.file.read()
        if not data:
            raise refusal("file", "it is empty")
        request_id = self._server.request_id(request, "trsc-")
        done = await self._server.compute(request, str(form.get("model")), sound.windows(data), request_id)
        answer = sound.transcription(data, [text for _, text in done])
        return web.Response(text=answer["text"]) if fields["response_format"] == "text" else _json(answer)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        return await _as_triton(self._inferred(request))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await _as_triton(self._generated(request, stream=False))

    async def _generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await _as_triton(self._generated(request, stream=True))

    async def _inferred(self, request: web.Request) -> web.StreamResponse:
        if "Inference-Header-Content-Length" in request.headers:
            raise refusal("inputs", "this engine does not take binary tensors; give their data as JSON")
        call, own_id = triton.parse_infer(await request.read(), request.match_info["model"])
        return await self._generation(request, call, triton.Inferred(self._server.text_model.model, own_id))

    async def _generated(self, request: web.Request, *, stream: bool) -> web.StreamResponse:
        call = triton.parse_generate(await request.read(), request.match_info["model"], stream=stream)
        return await self._generation(request, call, triton.Generated(self._server.text_model.model))

    async def _generation(self, request: web.Request, call: Call, answer: Rendering) -> web.StreamResponse:
        return await self._server.serve(request, call, answer, self._server.request_id(request, "gen-"))


async def _as_triton(answered: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    try:
        return await answered
    except RefusedError as error:
        raise triton.TritonRefusedError(error.message, status=error.status) from None


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
