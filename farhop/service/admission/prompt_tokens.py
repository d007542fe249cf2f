"""When a prompt is tokenized: before its request goes on, if the decision depends on tokens; otherwise in parallel.

A short prompt is tokenized at once. Of a long prompt only the beginning is, and the whole only if the decision still
depends on tokens then; otherwise the machine is given the rest when it is ready. Never changes a body, never decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from farhop.balance.machine import PromptTokenized
from farhop.relay.formats import openai
from farhop.service.admission.waiting import Waiting
from farhop.service.tokenization.tokenizer import INLINE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Event, Request, Tokens
    from farhop.relay.formats.paths import Kind
    from farhop.relay.formats.prompt import Prompt
    from farhop.relay.http.exchange import Exchange
    from farhop.service.authentication.authenticator import Caller
    from farhop.service.observability.request_telemetry import RequestTelemetry
    from farhop.service.process.clock import Clock
    from farhop.service.tokenization.tokenizer import Tokenizers

_BESIDE_S = 0.05  # an engine takes longer for such a long prompt, and sending it comes first


class RequestHolder(Protocol):
    """Holds the requests in flight, and passes events to the state machine."""

    def holds(self, request_id: str) -> bool:
        """Whether a request is here and was sent nowhere yet."""

    def react(self, event: Event, now: float | None = None) -> None:
        """Pass an event to the state machine, and execute its commands."""


class PromptTokens:
    """Tokenizes prompts of requests to engines. `wanted`: whether a request's decision depends on its tokens."""

    def __init__(
        self, tokenizers: Tokenizers, wanted: Callable[[Request], bool], clock: Clock, telemetry: RequestTelemetry
    ) -> None:
        self._tokenizers, self.wanted, self._clock, self._telemetry = tokenizers, wanted, clock, telemetry

    def reads(self, kind: Kind, model: str) -> bool:
        """Whether prompts of this kind, for this model, are tokenized."""
        return self._tokenizers.reads(kind, model)

    def now(self, caller: Caller, kind: Kind, request: Request, prompt: Prompt, body: bytes) -> Request:
        """The request with its prompt's tokens, if the model has a tokenizer. Blocks until they are known."""
        if not self.reads(kind, request.model):
            return request
        return _with(
            request, self._tokenizers.now(kind, request.model, body, openai.salt_of(kind, prompt, caller.hint_scope))
        )

    def start_with_tokens(
        self, exchange: Exchange, request: Request, prompt: Prompt, since: float,
        start: Callable[[Request, float], None], holder: RequestHolder,
    ) -> None:  # fmt: skip
        """Start the request with the prompt tokens that its decision needs, now or when they are known. Call it only if
        `reads`.

        `since`: when the request would have started otherwise, 0 for now; `start(request, since)` starts it; `holder`
        is told tokens that become known after the start.
        """
        kind, model, body, loop = exchange.context.kind, request.model, exchange.body, asyncio.get_running_loop()
        salt = openai.salt_of(kind, prompt, exchange.context.caller.hint_scope)
        if not self.wanted(request):
            start(request, since)
            if holder.holds(request.id):  # not needed for requests already on their way
                loop.call_soon(self._read_beside, holder, kind, request, body, salt)
        elif len(body) <= INLINE_BYTES_MAX:
            start(_with(request, self._tokenizers.now(kind, model, body, salt)), since)
        else:
            beginning = self._tokenizers.beginning(kind, model, body, salt)
            begun = _with(request, beginning)
            if beginning is not None and not self.wanted(begun):
                start(begun, since)
                if not beginning.whole:  # its next turn begins with all of them, and an engine's count is compared
                    loop.call_later(_BESIDE_S, self._read_beside, holder, kind, request, body, salt)
            elif (tokens := self._tokenizers.later(kind, model, body, salt)) is None:
                start(request, since)
            else:
                since = since or self._clock.now()
                Waiting(exchange, self._telemetry, tokens, lambda read: start(_with(request, read.result()), since))

    def _read_beside(self, holder: RequestHolder, kind: Kind, request: Request, body: bytes, salt: str) -> None:
        """Give the machine the tokens of a prompt that it has, once they are read."""

        def tell(tokens: Tokens | None) -> None:
            if tokens is not None:
                holder.react(PromptTokenized(request.id, tokens))

        if len(body) <= INLINE_BYTES_MAX:
            tell(self._tokenizers.now(kind, request.model, body, salt))
        elif (tokens := self._tokenizers.later(kind, request.model, body, salt, waits=False)) is not None:
            tokens.add_done_callback(lambda read: None if read.cancelled() else tell(read.result()))


def _with(request: Request, tokens: Tokens | None) -> Request:
    return request if tokens is None else replace(request, tokens=tokens)
