"""The way in, the same in both tiers: path, caller, body, and out of them the Request that the machine decides by.

Who may come in is the keeper's to say (an API key, a hop token); everything after that is one code, so that both tiers
see the same prompt, chain and tokens. Never forwards anything itself.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop.balance import chain, outcome
from farhop.balance.machine import Request
from farhop.relay import answers, bodies, openai, paths
from farhop.relay.paths import Kind, PathRefusal
from farhop.shell.observe import Visit

if TYPE_CHECKING:
    from random import Random

    from farhop.relay.answers import Reply
    from farhop.relay.head import Head
    from farhop.relay.inbound import Exchange
    from farhop.relay.prompt import Prompt
    from farhop.relay.relay import Relay
    from farhop.shell.clock import Clock
    from farhop.shell.observe import Observer
    from farhop.shell.session import SessionReader

NARROW_PLACES_MAX = 32
NARROW_BYTES_MAX = 1024
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Caller(msgspec.Struct, frozen=True):
    """Who asks, under which law, with how much time. `hint_scope` separates prefixes that may not be shared.

    `recorded`: whether spans and decisions of this caller may be kept here, whatever the model. `decision_id` comes
    with a hop token.
    """

    tenant: str
    deadline_s: float
    hint_scope: str
    recorded: bool
    priority: int = 0
    key: str = ""
    entry_region: str = ""
    issuer: str = ""
    decision_id: str = ""
    lawful: frozenset[str] | None = None
    narrow: tuple[tuple[str, ...], ...] = ()
    promised_ttft_ms: float | None = None


class Keeper(Protocol):
    """What a listener's tier knows of callers."""

    def caller(self, head: Head) -> Caller | Reply:
        """Who asks, or why they may not."""

    def models(self, caller: Caller) -> list[str]:
        """The models this caller may use."""

    def recorded(self, caller: Caller, model: str) -> bool:
        """Whether spans and decisions of a request for this model may be kept here."""


class Door:
    """A listener's gate. `relay` is set once it exists: the two need one another."""

    def __init__(
        self, keeper: Keeper, observer: Observer, clock: Clock, rng: Random, session: SessionReader | None = None
    ) -> None:
        self._keeper, self._observer, self._clock, self._rng, self._session = keeper, observer, clock, rng, session
        self.relay: Relay | None = None

    def head(self, exchange: Exchange) -> Reply | None:
        """Everything that can be said before the body is read."""
        visit = exchange.context = self._observer.begin(exchange.head)
        reply = self._judge(exchange.head, visit)
        if reply is not None:
            self._observer.turned_away(visit, reply.outcome, reply.status)
        else:
            exchange.on_abandoned = partial(self._observer.turned_away, visit)
        return reply

    def _judge(self, head: Head, visit: Visit) -> Reply | None:
        kind = paths.classify(head.method, head.path)
        if isinstance(kind, PathRefusal):
            extra = b"allow: " + kind.allow.encode() + b"\r\n" if kind.allow else b""
            return answers.refusal(kind.outcome, kind.detail, extra=extra)
        if head.get(b"content-encoding") not in (None, b"identity"):
            detail = "compressed request bodies are not read; send the body without `Content-Encoding`"
            return answers.refusal(outcome.MALFORMED_HTTP, detail)
        caller = self._keeper.caller(head)
        if not isinstance(caller, Caller):
            return caller
        visit.kind, visit.caller = kind, caller
        visit.decision_id = caller.decision_id or f"{self._rng.getrandbits(64):016x}"
        if not caller.recorded:
            self._observer.mute(visit)
        return None

    def arrived(self, exchange: Exchange) -> None:
        """The body is here: answer from the view, or start the journey."""
        visit: Visit = exchange.context
        try:
            reply = self._proceed(exchange, visit)
        except Exception:
            self._observer.turned_away(visit, outcome.INTERNAL, answers.status_of(outcome.INTERNAL))
            raise  # the connection answers it and has it logged
        if reply is not None:
            self._observer.turned_away(visit, reply.outcome, reply.status)
            exchange.reply(reply)

    def _proceed(self, exchange: Exchange, visit: Visit) -> Reply | None:
        """Start the journey, or say what to answer instead."""
        caller = visit.caller
        kind = visit.kind
        assert caller is not None  # `head` let it pass
        assert kind is not None
        assert self.relay is not None
        if kind is Kind.MODELS:
            return _model_list(self._keeper.models(caller))
        try:
            request, prompt = self.compose(caller, kind, exchange.body, exchange.head.path, exchange.head.onward)
        except bodies.BodyError as error:
            return answers.refusal(error.outcome, error.detail, param=error.param)
        # A model may have a rule of its own, and its name is known only now.
        if visit.recorded and not self._keeper.recorded(caller, request.model):
            self._observer.mute(visit)
        body = openai.ask_for_usage(exchange.body) if prompt.hide_usage else exchange.body
        self.relay.start(exchange, request, body, hide_usage=prompt.hide_usage, context=visit)
        return None

    def compose(
        self, caller: Caller, kind: Kind, body: bytes, path: bytes = b"", headers: bytes = b""
    ) -> tuple[Request, Prompt]:
        """The machine's Request for a body (as bodies.read takes it). Raises bodies.BodyError."""
        prompt = bodies.read(kind, body, path, headers)
        seed = chain.seed_of(prompt.model, "", prompt.cache_salt, caller.hint_scope)
        request = Request(
            # Not the decision's id: a region may see one decision twice, after a failure on the way.
            id=f"{self._rng.getrandbits(64):016x}",
            tenant=caller.tenant,
            model=prompt.model,
            prompt_bytes=len(prompt.canonical) + prompt.unspelled_bytes,
            body_bytes=len(body),
            chain=chain.chain(prompt.canonical, seed),
            deadline=self._clock.now() + caller.deadline_s,
            max_tokens=prompt.max_tokens,
            stream=prompt.stream,
            priority=caller.priority,
            key=caller.key,
            entry_region=caller.entry_region,
            issuer=caller.issuer,
            lawful=caller.lawful,
            narrow=caller.narrow,
            promised_ttft_ms=caller.promised_ttft_ms,
            divisible=prompt.divisible,
            session=self._session.read(caller.tenant, body, headers) if self._session is not None else 0,
        )
        return request, prompt


def narrow_of(value: bytes | None) -> tuple[str, ...] | None:
    """The places in an `x-farhop-allow` header; None if it is malformed or too much for a hop token to carry on."""
    if value is None:
        return ()
    places = tuple(place.strip(" \t") for place in value.decode("latin-1").split(","))
    fits = len(value) <= NARROW_BYTES_MAX and len(places) <= NARROW_PLACES_MAX
    return places if fits and all(map(_PLACE.fullmatch, places)) else None


def _model_list(models: list[str]) -> Reply:
    data = [{"id": model, "object": "model", "created": 0, "owned_by": "farhop"} for model in models]
    return answers.Reply(200, msgspec.json.encode({"object": "list", "data": data}), outcome.SERVED)
