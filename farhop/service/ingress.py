"""The way in, the same in both tiers: path, caller, body, and out of them the Request that the machine decides by.

Who may come in is the authenticator's to say (an API key, a hop token); everything after that is one code, so that
both tiers see the same prompt, chain and tokens. Never forwards anything itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from farhop.balance import outcome
from farhop.balance.machine import PromptTokenized, Request
from farhop.balance.model_facts import UNKNOWN_FACTS
from farhop.balance.prefix import chain
from farhop.identity import redirect_token
from farhop.identity.tenant_certificates import HEADER as CERTIFICATE
from farhop.relay import answers
from farhop.relay.formats import bodies, openai, paths
from farhop.relay.formats.field_guard import DEFAULT
from farhop.relay.formats.paths import Kind, PathRefusal
from farhop.relay.formats.prompt import NO_PREFERENCES
from farhop.relay.formats.transcript import continuation
from farhop.service.authenticator import Caller
from farhop.service.large_bodies import LARGE_BYTES, Job
from farhop.service.limits import WAIT_S
from farhop.service.request_telemetry import MODEL_CHARS_MAX, RequestContext
from farhop.service.routing_keys import VERSION_HEADER, soft_session
from farhop.service.tokenizer import INLINE_BYTES_MAX
from farhop.telemetry.release import release

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Event, HeaderMatch, Tokens
    from farhop.balance.model_facts import ModelFacts
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.relay.formats.field_guard import Guard
    from farhop.relay.formats.prompt import Prompt
    from farhop.relay.formats.transcript import Continuation
    from farhop.relay.http.exchange import Exchange
    from farhop.relay.http.head import Head
    from farhop.service.authenticator import Authenticator
    from farhop.service.clock import Clock
    from farhop.service.large_bodies import LargeBodyReader, ParsedBody
    from farhop.service.limits import Limiter
    from farhop.service.request_telemetry import RequestTelemetry
    from farhop.service.routing_keys import HeaderMatchReader, SessionReader
    from farhop.service.tokenizer import Tokenizers

_MODELS, _VERSION = Kind.MODELS, Kind.VERSION  # to look up an enum's member is a call, and each request asks for it
_BODILESS = (_MODELS, _VERSION)
_BESIDE_S = 0.05  # an engine takes longer for so long a prompt, and what is first to be sent goes first
_MODELS_SHOWN = 16


_LLM_D, _OBJECTIVE = b"x-llm-d-", b"x-gateway-inference-objective: "
_PROBES = (paths.HEALTH, paths.READY)
_NO_STORE = b"cache-control: no-store\r\n"


def _probed(head: Head, ready: Callable[[], bool]) -> Reply:
    """Whether this process lives, or whether work should be sent to it: nothing else is told to whoever asks."""
    if head.method not in (b"GET", b"HEAD"):
        return answers.refusal(outcome.METHOD_NOT_ALLOWED, "this path answers GET only", extra=b"allow: GET, HEAD\r\n")
    good = head.path == paths.HEALTH or ready()
    return answers.Reply(200 if good else 503, b"", outcome.SERVED, _NO_STORE, b"text/plain")


class Advisor(Protocol):
    """Who answers `POST /v1/route`."""

    def advise(self, request: Request, context: RequestContext, head: Head) -> Reply:
        """Where the request would go now. Nothing is sent."""


class ModelNames(Protocol):
    """Who knows names that stand for other models."""

    def resolved(self, request: Request, allowed: tuple[str, ...], canonical: bytes) -> Request | None:
        """The request for the model that it gets, as GlobalFlow.resolve, by its prompt's canonical text; None where its
        name is that. Raises bodies.BodyError."""

    def listed(self, tenant: str) -> dict[str, tuple[str, ...]]:
        """Names that stand for others when this tenant asks, and for which."""


class RequestCarrier(Protocol):
    """Who takes a request that is read, and has its machine decide: the relay, as far as an ingress needs it."""

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: Any,
        arrived_at: float = 0.0,
        continuation: Continuation | None = None,
        geo: str = "",
    ) -> None:
        """See relay.Relay."""

    def holds(self, request_id: str) -> bool:
        """Whether a request is here and was sent nowhere yet."""

    def react(self, event: Event, now: float | None = None) -> None:
        """Let the machine decide."""


class ArrivalObserver(Protocol):
    """Who wants to know from where requests come, once they are read."""

    def arrived(self, exchange: Exchange, caller: Caller, model: str) -> None:
        """A request of this caller for this model is here."""


class Ingress:
    """What a listener does with its requests (exchange.RequestHandler).

    `relay` is set once it exists: the two need one another. With an `advisor`, decisions alone may be asked for
    here, too. `guard` says what engines may be sent. `to_engines`: they are asked from here, so that what they
    answer is of use, as they hold it behind its prompt, and what they cache is kept apart. `wants_tokens`: whether
    a request's decision goes by its prompt's tokens; others go on at once, and of one that waits in line the
    machine is told when they are read. Bodies above LARGE_BYTES are read by `large`, where there is one. `signs`:
    the hash of what is sent on is wanted, too. `ready`, where clients come: whether work should be sent here.
    `anycast`: those of our addresses that other entries announce, too."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        telemetry: RequestTelemetry,
        clock: Clock,
        rng: Random,
        session: SessionReader | None = None,
        header_matches: HeaderMatchReader | None = None,
        tokenizers: Tokenizers | None = None,
        wants_tokens: Callable[[Request], bool] = lambda _: True,
        advisor: Advisor | None = None,
        guard: Guard = DEFAULT,
        large: LargeBodyReader | None = None,
        to_engines: bool = False,
        signs: bool = False,
        ready: Callable[[], bool] | None = None,
        anycast: frozenset[str] = frozenset(),
    ) -> None:
        self._ready, self.anycast = ready, anycast
        self._advisor, self._guard, self._to_engines, self._signs = advisor, guard, to_engines, signs
        self.asks_certificate = False  # whether tenants are known by their certificates, too
        self._authenticator, self._telemetry, self._clock, self._rng = authenticator, telemetry, clock, rng
        self._session, self._header_matches, self._tokenizers, self._large = session, header_matches, tokenizers, large
        self._wants_tokens = wants_tokens
        self.relay: RequestCarrier | None = None
        self.arrivals: ArrivalObserver | None = None
        self.names: ModelNames | None = None  # while there are names that stand for other models
        self.limits: Limiter | None = None  # what clients may use, where that is limited
        self.gate: Callable[[], Reply | None] | None = None  # why nobody is let in just now, where there can be a why

    def sign_bodies(self, signs: bool) -> None:
        """Whether tokens are bound to the bodies from now on."""
        self._signs = signs

    def head(self, exchange: Exchange) -> Reply | None:
        """Everything that can be said before the body is read."""
        if exchange.head.path in _PROBES and self._ready is not None:
            return _probed(exchange.head, self._ready)
        context = exchange.context = self._telemetry.begin()
        reply = self._judge(exchange, context)
        if reply is not None:
            self._telemetry.turned_away(context, reply.outcome, reply.status)
        else:
            exchange.on_abandoned = partial(self._telemetry.turned_away, context)
        return reply

    def _judge(self, exchange: Exchange, context: RequestContext) -> Reply | None:
        head = exchange.head
        if self.gate is not None and (closed := self.gate()) is not None:
            return closed
        if redirect_token.PARAMETER in head.target:
            head.target, token = redirect_token.parted(head.target)  # nobody behind us is to see it
            if token is not None:
                head.known[redirect_token.HEADER] = token
        if self._advisor is not None and head.path.startswith(paths.ROUTE):
            asked = paths.advised(head.path)
            if asked is not None:
                context.advised, head.path = True, asked
        kind = paths.KINDS.get((head.method, head.path)) or paths.classify(head.method, head.path)
        if context.advised and kind in _BODILESS:
            kind = PathRefusal(outcome.PATH_NOT_ALLOWED, "only inference paths have a route")
        if isinstance(kind, PathRefusal):
            extra = b"allow: " + kind.allow.encode() + b"\r\n" if kind.allow else b""
            return answers.refusal(kind.outcome, kind.detail, extra=extra)
        if head.known.get(b"content-encoding", b"identity") != b"identity":
            detail = "compressed request bodies are not read; send the body without `Content-Encoding`"
            return answers.refusal(outcome.MALFORMED_HTTP, detail)
        if self.asks_certificate and (certificate := exchange.certificate) is not None:
            head.known[CERTIFICATE] = certificate
        caller = self._authenticator.caller(head)
        for name in (b"authorization", b"x-api-key"):
            head.known.pop(name, None)  # it has said who asks: nobody needs to hold it any longer
        if not isinstance(caller, Caller):
            return caller
        context.kind, context.caller, exchange.tenant = kind, caller, caller.tenant
        self._telemetry.admitted(context, head, outside=not exchange.is_hop)
        if caller.attempt:
            self._telemetry.came(context, caller)
        context.decision_id = caller.decision_id or f"{self._rng.getrandbits(64):016x}"
        if not caller.recorded:
            self._telemetry.mute(context)
        return None

    def arrived(self, exchange: Exchange) -> None:
        """The body is here: answer from the view, or start relaying."""
        context: RequestContext = exchange.context
        exchange.on_abandoned = None
        try:
            reply = self._proceed(exchange, context)
        except Exception:
            self._telemetry.turned_away(context, outcome.INTERNAL, answers.status_of(outcome.INTERNAL))
            raise  # the connection answers it and has it logged
        if reply is not None:
            self._telemetry.turned_away(context, reply.outcome, reply.status)
            exchange.reply(reply)

    def _proceed(self, exchange: Exchange, context: RequestContext) -> Reply | None:
        """Start relaying, or say what to answer instead."""
        caller = context.caller
        kind = context.kind
        assert caller is not None  # `head` let it pass
        assert kind is not None
        assert self.relay is not None
        if self._large is not None and len(exchange.body) > LARGE_BYTES and kind not in _BODILESS:
            _ReadingApart(self, exchange, context).begin(self._large)
            return None
        if caller.body_hash and hashlib.sha256(exchange.body).digest() != caller.body_hash:
            return _other_body()
        if kind is _MODELS:
            return _model_list(self._listed(caller), exchange.head)
        if kind is _VERSION:
            return answers.Reply(200, msgspec.json.encode({"version": release()}), outcome.SERVED)
        try:
            head = exchange.head
            version = head.known.get(VERSION_HEADER)
            if exchange.body[:1] == bodies.BOM[:1]:
                exchange.body = bodies.without_bom(kind, exchange.body)
            prompt = bodies.read(
                kind, exchange.body, head.path, head.onward, self._guard, lambda: self._only_model(caller)
            )
        except bodies.BodyError as error:
            return answers.refusal(error.outcome, error.detail, param=error.param)
        asks = caller
        if prompt.preferences is not NO_PREFERENCES or _LLM_D in head.onward or _OBJECTIVE in head.onward:
            asking = self._with_preferences(context, caller, prompt, head.onward)
            if not isinstance(asking, Caller):
                return asking
            asks = asking
        request = self._request(asks, prompt, exchange.body, head.onward, version, self._clock.now())
        return self._understood(exchange, context, request, prompt)

    def _with_preferences(
        self, context: RequestContext, caller: Caller, prompt: Prompt, lines: bytes
    ) -> Caller | Reply:
        """Who asks, now that the body is read: from here on nothing is decided without what its preferences ask for."""
        asking = self._authenticator.with_preferences(caller, prompt.preferences, lines)
        if isinstance(asking, Caller):
            context.caller, context.law = asking, None  # it may stay within less
        return asking

    def _only_model(self, caller: Caller) -> str:
        """The model that is meant where none is named: the one there is; "" where there are several."""
        models = self._authenticator.models(caller)
        return next(iter(models)) if len(models) == 1 else ""

    def _understood(
        self, exchange: Exchange, context: RequestContext, request: Request, prompt: Prompt,
        onward: bytes | None = None, since: float = 0.0,
    ) -> Reply | None:  # fmt: skip
        """The request is read. `onward` is the body as it is sent on, if that is known; `since` as for `_start`."""
        kind, caller = context.kind, context.caller
        assert caller is not None
        assert kind is not None
        if caller.models and request.model not in caller.models:
            detail = f"this API key is not for this model; it is for {', '.join(caller.models[:_MODELS_SHOWN])}"
            return answers.refusal(outcome.KEY_SCOPE, detail, param="model")
        if context.recorded and self._telemetry.rule_may_differ(context, request.model):
            self._mute_unless_recorded(context, caller, request.model)
        if self.names is not None:
            try:
                found = self._renamed(self.names, caller, kind, request, prompt, exchange.body)
            except bodies.BodyError as error:
                return answers.refusal(error.outcome, error.detail, param=error.param)
            if found is not None:
                request, prompt, exchange.body = found
                if request.narrow != caller.narrow:  # a rule about the name binds what is recorded, too
                    caller = context.caller = replace(caller, narrow=request.narrow)
                    self._mute_unless_recorded(context, caller, request.model)
            if request.alias:
                onward, context.body_sha256 = None, b""  # both were of the body that came
                self._mute_unless_recorded(context, caller, request.model)
        if self.arrivals is not None:
            self.arrivals.arrived(exchange, caller, request.model)
        context.user = prompt.preferences.user
        if context.advised:
            assert self._advisor is not None
            return self._advisor.advise(request, context, exchange.head)
        if self.limits is not None and request.tenant in self.limits.tenants and not caller.charged:
            admitted = self.limits.admit(context, request, context.user)
            if isinstance(admitted, asyncio.Future):
                since = since or self._clock.now()
                go_on = partial(self._go_on, exchange, context, request, prompt, onward, since)
                _Borrowing(self, exchange, request, go_on).begin(self.limits, admitted)
                return None
            if admitted is not None:
                return admitted
        self._go_on(exchange, context, request, prompt, onward, since)
        return None

    def begin_anew(self, active: ActiveRequest, request: Request) -> None:
        """A request that nobody took for its model goes on for another that its name stands for, as if it had come for
        that: by that model's limits, and recorded only if its rule allows."""
        exchange, context = active.exchange, active.context
        caller = context.caller
        body = openai.renamed(active.body, request.model)
        # Its `body_hash` stays: what ended engines of one model is the same request to those of another.
        request = replace(request, body_bytes=len(body), chain=self._chain_anew(exchange, body))
        context.body_sha256 = b""  # it was of the body that came
        self._mute_unless_recorded(context, caller, request.model)

        def go_on() -> None:
            assert self.relay is not None
            self.relay.start(
                exchange, request, body, hide_usage=active.hide_usage, context=context, arrived_at=active.arrived_at,
                geo=active.geo,
            )  # fmt: skip

        admitted = None
        if context.reserved is not None and self.limits is not None:
            context.reserved.settle(None, outcome.NO_REGION, None)
            context.reserved = None
            admitted = self.limits.admit(context, request, context.user)
        if isinstance(admitted, asyncio.Future):
            assert self.limits is not None
            _Borrowing(self, exchange, request, go_on).begin(self.limits, admitted)
        elif admitted is not None:
            self._telemetry.turned_away(context, admitted.outcome, admitted.status)
            exchange.reply(admitted)
        else:
            go_on()

    def _chain_anew(self, exchange: Exchange, body: bytes) -> tuple[int, ...]:
        """Of a prompt that was read before, for another model: caches know it by the model. A large one is not read
        again, since all others would wait for it."""
        context: RequestContext = exchange.context
        caller, kind, head = context.caller, context.kind, exchange.head
        assert caller is not None
        assert kind is not None
        if len(body) > LARGE_BYTES:
            return ()
        try:
            prompt = bodies.read(kind, body, head.path, head.onward, self._guard, lambda: self._only_model(caller))
        except bodies.BodyError:
            return ()  # what may be asked for has been narrowed since: it was let in before
        return chain.chain(prompt.canonical, _seed(caller, prompt))

    def _mute_unless_recorded(self, context: RequestContext, caller: Caller, model: str) -> None:
        """A model may have a rule of its own about records, and its name is known only when the body is read."""
        if not self._authenticator.recorded(caller, model):
            self._telemetry.mute(context)

    def _renamed(
        self, names: ModelNames, caller: Caller, kind: Kind, request: Request, prompt: Prompt, body: bytes
    ) -> tuple[Request, Prompt, bytes] | None:
        """All of it for the model that its name stands for; None where it is for that already, and for no other in its
        place. Raises BodyError."""
        if caller.decision_id:
            return None  # it was sent here for this model, which another balancer chose
        found = names.resolved(request, caller.models, prompt.canonical)
        if found is None or found.model == request.model:
            return (found, prompt, body) if found is not None and bodies.renames(kind) else None
        if not bodies.renames(kind):
            detail = (
                f"`{request.model[:128]}` stands for other models, which this path cannot ask for; name a model itself"
            )
            raise bodies.BodyError(outcome.INVALID_FIELD, detail, "model")
        body = openai.renamed(body, found.model)
        prompt = replace(prompt, model=found.model, lacks_model=False)
        made = replace(
            found, body_bytes=len(body), chain=chain.chain(prompt.canonical, _seed(caller, prompt))
        )  # fmt: skip
        return made, prompt, body

    def _listed(self, caller: Caller) -> dict[str, ModelFacts]:
        """The models that the caller may use, and the names that stand for any of them, sorted."""
        offered = self._authenticator.models(caller)
        models = dict(offered)
        for name, others in self.names.listed(caller.tenant).items() if self.names is not None else ():
            mine = not caller.models or name in caller.models
            if mine and any(other in offered for other in others):
                models.setdefault(name, UNKNOWN_FACTS)  # they may differ in all that is said of them
        return dict(sorted(models.items()))

    def _go_on(
        self, exchange: Exchange, context: RequestContext, request: Request, prompt: Prompt, onward: bytes | None,
        since: float,
    ) -> None:  # fmt: skip
        """It may go on: its prompt's tokens are read, where they are of use."""
        kind, caller = context.kind, context.caller
        assert caller is not None
        assert kind is not None
        if self._tokenizers is None or not self._tokenizers.reads(kind, request.model):
            self._start(exchange, request, prompt, since, onward)
        elif not self._wants_tokens(request):
            body, salt = exchange.body, self._salt_kept(caller, kind, prompt)
            self._start(exchange, request, prompt, since, onward)
            if self.relay is not None and self.relay.holds(request.id):  # of what is on its way nobody needs them
                asyncio.get_running_loop().call_soon(self._read_beside, kind, request, body, salt)
        elif len(exchange.body) <= INLINE_BYTES_MAX:
            self._start(exchange, self.tokenized(caller, kind, request, prompt, exchange.body), prompt)
        else:
            body, salt = exchange.body, self._salt_kept(caller, kind, prompt)
            tokens = self._tokenizers.beginning(kind, request.model, body, salt)
            begun = request if tokens is None else replace(request, tokens=tokens)
            if tokens is None or self._wants_tokens(begun):
                _Reading(self, exchange, request, prompt, onward, since).begin(self._tokenizers, kind)
                return
            self._start(exchange, begun, prompt, since, onward)
            if not tokens.whole:  # its next turn begins with all of them, and what an engine counts is compared
                asyncio.get_running_loop().call_later(_BESIDE_S, self._read_beside, kind, request, body, salt)

    def _read_beside(self, kind: Kind, request: Request, body: bytes, salt: str) -> None:
        """Tell the machine the tokens of a prompt that it has, when they are read."""
        tokenizers, relay = self._tokenizers, self.relay
        assert tokenizers is not None
        assert relay is not None

        def read(tokens: Tokens | None) -> None:
            if tokens is not None:
                relay.react(PromptTokenized(request.id, tokens))

        if len(body) <= INLINE_BYTES_MAX:
            read(tokenizers.now(kind, request.model, body, salt))
        else:
            tokenizers.later(kind, request.model, body, salt, read, waits=False)

    def _start(
        self, exchange: Exchange, request: Request, prompt: Prompt, since: float = 0.0, onward: bytes | None = None
    ) -> None:
        """Start relaying; `since` when it would have begun, had its prompt not been read before, else 0."""
        assert self.relay is not None
        context: RequestContext = exchange.context
        assert context.caller is not None  # `head` let it pass
        assert context.kind is not None
        if self.anycast and exchange.local_host in self.anycast and redirect_token.HEADER not in exchange.head.known:
            request = replace(request, by_anycast=True)
        if prompt.hide_usage and not exchange.sees_answer:
            prompt, onward = replace(prompt, hide_usage=False), None  # the client would see what it did not ask for
        if onward is None:
            salt = openai.salt_of(context.kind, prompt, context.caller.hint_scope) if self._to_engines else ""
            onward = exchange.body
            if salt or prompt.hide_usage or prompt.lacks_model:
                onward = openai.change(onward, prompt, salt).of(onward)
        more = None
        if self._to_engines and prompt.answer is not None:
            # A chain's last node is the seed of what follows: only where there is none is the first asked.
            seed = 0 if request.chain else _seed(context.caller, prompt)
            more = continuation(prompt, request.chain, seed)
        self.relay.start(
            exchange,
            request,
            onward,
            hide_usage=prompt.hide_usage,
            context=context,
            arrived_at=since,
            continuation=more,
            geo="" if exchange.is_hop else prompt.preferences.geo,  # whom the client asked says it
        )

    def _salt_kept(self, caller: Caller, kind: Kind, prompt: Prompt) -> str:
        """The salt that engines keep their blocks by: none take one with Anthropic's messages."""
        return "" if kind is Kind.MESSAGES else self._salt(caller, kind, prompt)

    def _salt(self, caller: Caller, kind: Kind, prompt: Prompt) -> str:
        return openai.salt_of(kind, prompt, caller.hint_scope if self._to_engines else None)

    def tokenized(self, caller: Caller, kind: Kind, request: Request, prompt: Prompt, body: bytes) -> Request:
        """The request with its prompt's tokens, if they are to be had; at once, however long that takes."""
        if self._tokenizers is None or not self._tokenizers.reads(kind, request.model):
            return request
        tokens = self._tokenizers.now(kind, request.model, body, self._salt_kept(caller, kind, prompt))
        return replace(request, tokens=tokens) if tokens is not None else request

    def _broke(self, exchange: Exchange) -> None:
        """A bug, past the connection's own last line of defence."""
        reply = answers.refusal(outcome.INTERNAL, "the balancer failed on this request; it is logged")
        self._telemetry.turned_away(exchange.context, outcome.INTERNAL, reply.status)
        if exchange.is_open and not exchange.started:
            exchange.reply(reply)

    def compose(
        self,
        caller: Caller,
        kind: Kind,
        body: bytes,
        path: bytes = b"",
        headers: bytes = b"",
        version: bytes | None = None,
    ) -> tuple[Request, Prompt]:
        """The machine's Request for a body (as bodies.read takes it); `version` is the header that asks for one.

        Raises bodies.BodyError.
        """
        prompt = bodies.read(kind, body, path, headers, self._guard, lambda: self._only_model(caller))
        asking = self._authenticator.with_preferences(caller, prompt.preferences, headers)
        if not isinstance(asking, Caller):
            raise bodies.BodyError(asking.outcome, msgspec.json.decode(asking.body)["error"]["message"])
        caller = asking
        request = self._request(caller, prompt, body, headers, version, self._clock.now())
        found = self._renamed(self.names, caller, kind, request, prompt, body) if self.names is not None else None
        return (request, prompt) if found is None else found[:2]

    def _request(
        self, caller: Caller, prompt: Prompt, body: bytes, headers: bytes, version: bytes | None, arrived_at: float,
        session: bytes | None = None,
    ) -> Request:  # fmt: skip
        """The machine's Request; `session` is what the body's field for it says, if that was read before."""
        header_matches, hashed, soft = self._header_matches, 0, (0, 0)
        matches: tuple[HeaderMatch, ...] = ()
        if header_matches is not None and prompt.model in header_matches.wanted.by_model:
            matches = header_matches.header_matches(prompt.model, headers)
        if prompt.preferences is not NO_PREFERENCES or b"session" in headers:
            soft = soft_session(caller.tenant, headers, prompt.preferences)
        if self._session is not None and self._session.wanted():
            hashed = self._session.read(caller.tenant, body, headers, session)
        return Request(
            # Not the decision's id: a region may see one decision twice, after a failure on the way.
            id=f"{self._rng.getrandbits(64):016x}",
            tenant=caller.tenant,
            model=prompt.model,
            prompt_bytes=len(prompt.canonical) + prompt.opaque_bytes,
            body_bytes=len(body),
            body_hash=xxh3_64_intdigest(body),
            chain=chain.chain(prompt.canonical, _seed(caller, prompt)),
            deadline=arrived_at + caller.deadline_s,
            first_token_by=None if caller.ttft_s is None else arrived_at + caller.ttft_s,
            max_tokens=prompt.max_tokens,
            answers=prompt.answers,
            stream=prompt.stream,
            priority=caller.priority,
            key=caller.key,
            entry_region=caller.entry_region,
            issuer=caller.issuer,
            lawful=caller.lawful,
            narrow=caller.narrow,
            promised_ttft_ms=caller.promised_ttft_ms,
            waited_s=caller.waited_s,
            divisible=prompt.divisible,
            recomputed=prompt.recomputed,
            session=hashed,
            version="" if version is None or header_matches is None else header_matches.version(prompt.model, version),
            header_matches=matches,
            soft_session=soft[0],
            parent_session=soft[1],
        )


_ANTHROPIC = b"anthropic-version: "


class _Waiting:
    """A request that is read elsewhere: until it can be relayed."""

    def __init__(self, ingress: Ingress, exchange: Exchange) -> None:
        self._ingress, self._exchange = ingress, exchange
        self._future: asyncio.Future[Any] | None = None

    def client_left(self) -> None:
        """See exchange.ExchangeCallbacks."""
        self._give_up(outcome.CLIENT_LEFT, 0)

    def stopped(self) -> None:
        """See exchange.ExchangeCallbacks."""
        reply = answers.stopping()
        self._give_up(reply.outcome, reply.status)
        self._exchange.reply(reply)

    def _give_up(self, reason: Outcome, status: int) -> None:
        self._exchange.callbacks = None
        if self._future is not None:
            self._future.cancel()
        self._ingress._telemetry.turned_away(self._exchange.context, reason, status)

    def pause(self) -> None:
        """See exchange.ExchangeCallbacks. Nothing is written yet."""

    def resume(self) -> None:
        """See exchange.ExchangeCallbacks."""


class _ReadingApart(_Waiting):
    """A request whose body is large."""

    def __init__(self, ingress: Ingress, exchange: Exchange, context: RequestContext) -> None:
        super().__init__(ingress, exchange)
        self._context, self._since = context, ingress._clock.now()

    def begin(self, large: LargeBodyReader) -> None:
        """Have it read."""
        ingress, head, kind, caller = self._ingress, self._exchange.head, self._context.kind, self._context.caller
        assert caller is not None
        assert kind is not None
        guard, session = ingress._guard, ingress._session
        job = Job(
            kind,
            head.path,
            head.onward,
            tuple(guard.media_hosts),
            guard.refuses_unknown,
            caller.hint_scope if ingress._to_engines else None,
            bool(caller.body_hash),
            ingress._signs,
            session.field if session is not None else "",
            ingress._only_model(caller),
        )
        self._future = large.later(job, self._exchange.body)
        self._exchange.callbacks = self
        self._future.add_done_callback(self._over)

    def _over(self, future: asyncio.Future[ParsedBody]) -> None:
        if future.cancelled():
            return
        if self._exchange.callbacks is not self:
            future.exception()  # it is nobody's any more
            return
        self._exchange.callbacks = None
        try:
            reply = self._parsed(future.result())
        except Exception:
            self._ingress._broke(self._exchange)
            raise  # the loop's handler has it logged
        if reply is not None:
            self._ingress._telemetry.turned_away(self._context, reply.outcome, reply.status)
            self._exchange.reply(reply)

    def _parsed(self, parsed: ParsedBody) -> Reply | None:
        ingress, exchange, caller = self._ingress, self._exchange, self._context.caller
        assert caller is not None
        for name in parsed.unknown:
            ingress._guard.count(name)
        if caller.body_hash and parsed.sha256 != caller.body_hash:
            return _other_body()
        if parsed.prompt is None:
            refused = parsed.refusal()
            return answers.refusal(refused.outcome, refused.detail, param=refused.param)
        asking = ingress._with_preferences(self._context, caller, parsed.prompt, exchange.head.onward)
        if not isinstance(asking, Caller):
            return asking
        caller = asking
        head, body, self._context.body_sha256 = exchange.head, exchange.body, parsed.onward_sha256
        version = head.known.get(VERSION_HEADER)
        request = ingress._request(caller, parsed.prompt, body, head.onward, version, self._since, parsed.session)
        return ingress._understood(exchange, self._context, request, parsed.prompt, parsed.change.of(body), self._since)


class _Borrowing(_Waiting):
    """A request for which what is lent here is not enough."""

    def __init__(self, ingress: Ingress, exchange: Exchange, request: Request, go_on: Callable[[], None]) -> None:
        super().__init__(ingress, exchange)
        self._request, self._go_on = request, go_on
        self._until = ingress._clock.now() + WAIT_S

    def begin(self, limits: Limiter, future: asyncio.Future[None]) -> None:
        """Wait for more."""
        self._limits, self._future, self._exchange.callbacks = limits, future, self
        future.add_done_callback(self._lent)

    def _lent(self, future: asyncio.Future[None]) -> None:
        exchange, ingress = self._exchange, self._ingress
        if future.cancelled() or exchange.callbacks is not self:
            return
        context: RequestContext = exchange.context
        try:
            waits = ingress._clock.now() < self._until
            admitted = self._limits.admit(context, self._request, context.user, waits=waits)
            if isinstance(admitted, asyncio.Future):
                self.begin(self._limits, admitted)
                return
            exchange.callbacks = None
            if admitted is None:
                self._go_on()
            else:
                ingress._telemetry.turned_away(context, admitted.outcome, admitted.status)
                exchange.reply(admitted)
        except Exception:
            exchange.callbacks = None
            ingress._broke(exchange)
            raise  # the loop's handler has it logged


class _Reading(_Waiting):
    """A request whose prompt is being tokenized."""

    def __init__(
        self, ingress: Ingress, exchange: Exchange, request: Request, prompt: Prompt, onward: bytes | None = None,
        since: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(ingress, exchange)
        self._request, self._prompt, self._onward, self._since = request, prompt, onward, since

    def begin(self, tokenizers: Tokenizers, kind: Kind) -> None:
        """Start, now or when it is read."""
        exchange, model, self._since = self._exchange, self._request.model, self._since or self._ingress._clock.now()
        context: RequestContext = exchange.context
        assert context.caller is not None  # `head` let it pass
        salt = self._ingress._salt_kept(context.caller, kind, self._prompt)
        self._future = tokenizers.later(kind, model, exchange.body, salt, self._read)
        if self._future is None:
            self._ingress._start(exchange, self._request, self._prompt, onward=self._onward)
        else:
            exchange.callbacks = self

    def _read(self, tokens: Tokens | None) -> None:
        if self._exchange.callbacks is not self:
            return
        self._exchange.callbacks = None
        try:
            request = replace(self._request, tokens=tokens) if tokens is not None else self._request
            self._ingress._start(self._exchange, request, self._prompt, self._since, self._onward)
        except Exception:
            self._ingress._broke(self._exchange)
            raise  # the loop's handler has it logged


def _other_body() -> Reply:
    return answers.refusal(outcome.HOP_FORGED, "the hop token was signed for another body")


def _seed(caller: Caller, prompt: Prompt) -> int:
    if prompt.cache_salt or len(prompt.model) > MODEL_CHARS_MAX:
        return chain.seed_of(prompt.model, "", prompt.cache_salt, caller.hint_scope)
    return _unsalted_seed(prompt.model, caller.hint_scope)


@lru_cache(maxsize=1024)  # a salt is a secret, and a long name may be anything: neither is remembered
def _unsalted_seed(model: str, scope: str) -> int:
    return chain.seed_of(model, "", "", scope)


def _model_list(models: dict[str, ModelFacts], head: Head) -> Reply:
    data = [
        {"id": model, "object": "model", "created": 0, "owned_by": "farhop"}
        | {name: value for name, value in msgspec.structs.asdict(facts).items() if value}  # as engines word it
        for model, facts in models.items()
    ]
    document: dict[str, Any] = {"object": "list", "data": data}
    if head.onward.startswith(_ANTHROPIC) or b"\r\n" + _ANTHROPIC in head.onward:  # its SDK reads other members
        for one in data:
            one |= {"type": "model", "display_name": one["id"], "created_at": "1970-01-01T00:00:00Z"}
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        document |= {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return answers.Reply(200, msgspec.json.encode(document), outcome.SERVED)
