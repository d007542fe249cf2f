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
from farhop.balance.machine import Request
from farhop.balance.model_facts import UNKNOWN_FACTS
from farhop.balance.prefix import chain
from farhop.identity import redirect_token
from farhop.identity.tenant_certificates import HEADER as CERTIFICATE
from farhop.relay import answers
from farhop.relay.formats import bodies, model_list, openai, paths
from farhop.relay.formats.field_guard import DEFAULT
from farhop.relay.formats.paths import Kind, PathRefusal
from farhop.relay.formats.prompt import NO_PREFERENCES
from farhop.relay.formats.transcript import continuation
from farhop.service.authenticator import Caller
from farhop.service.large_bodies import LARGE_BYTES, Job
from farhop.service.limits import WAIT_S
from farhop.service.prompt_tokens import RequestHolder
from farhop.service.request_telemetry import MODEL_CHARS_MAX, RequestContext
from farhop.service.routing_keys import VERSION_HEADER, soft_session
from farhop.service.waiting import Waiting
from farhop.telemetry.release import release

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import HeaderMatch
    from farhop.balance.model_facts import ModelFacts
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
    from farhop.service.prompt_tokens import PromptTokens
    from farhop.service.request_telemetry import RequestTelemetry
    from farhop.service.routing_keys import HeaderMatchReader, SessionReader

_MODELS, _VERSION = Kind.MODELS, Kind.VERSION  # to look up an enum's member is a call, and each request asks for it
_BODILESS = (_MODELS, _VERSION)
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


class RequestCarrier(RequestHolder, Protocol):
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


class ArrivalObserver(Protocol):
    """Who wants to know from where requests come, once they are read."""

    def arrived(self, exchange: Exchange, caller: Caller, model: str) -> None:
        """A request of this caller for this model is here."""


class Ingress:
    """What a listener does with its requests (exchange.RequestHandler).

    `relay` is set once it exists: the two need one another. With an `advisor`, decisions alone may be asked for
    here, too. `guard` says what engines may be sent. `to_engines`: they are asked from here, so that what they
    answer is of use, as they hold it behind its prompt, and what they cache is kept apart. Bodies above LARGE_BYTES
    are read by `large`, where there is one. `signs`: the hash of what is sent on is wanted, too. `ready`, where clients
    come: whether work should be sent here. `anycast`: those of our addresses that other entries announce, too."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        telemetry: RequestTelemetry,
        clock: Clock,
        rng: Random,
        session: SessionReader | None = None,
        header_matches: HeaderMatchReader | None = None,
        tokens: PromptTokens | None = None,
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
        self._session, self._header_matches, self._large = session, header_matches, large
        self.tokens = tokens
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
            parsed = self._large.later(self._job(exchange), exchange.body)
            Waiting(exchange, self._telemetry, parsed, partial(self._parsed, exchange, self._clock.now()))
            return None
        if caller.body_hash and hashlib.sha256(exchange.body).digest() != caller.body_hash:
            return _other_body()
        if kind is _MODELS:
            return answers.Reply(200, model_list.listed(self._listed(caller), exchange.head.onward), outcome.SERVED)
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

    def _job(self, exchange: Exchange) -> Job:
        """How a large body is to be read in the process for them."""
        head, context, guard = exchange.head, exchange.context, self._guard
        caller = context.caller
        return Job(
            context.kind,
            head.path,
            head.onward,
            tuple(guard.media_hosts),
            guard.refuses_unknown,
            caller.hint_scope if self._to_engines else None,
            bool(caller.body_hash),
            self._signs,
            self._session.field if self._session is not None else "",
            self._only_model(caller),
        )

    def _parsed(self, exchange: Exchange, since: float, reading: asyncio.Future[ParsedBody]) -> Reply | None:
        """A large body is read: start relaying, or say what to answer instead."""
        parsed, context, head, body = reading.result(), exchange.context, exchange.head, exchange.body
        caller = context.caller
        for name in parsed.unknown:
            self._guard.count(name)
        if caller.body_hash and parsed.sha256 != caller.body_hash:
            return _other_body()
        if parsed.prompt is None:
            refused = parsed.refusal()
            return answers.refusal(refused.outcome, refused.detail, param=refused.param)
        asking = self._with_preferences(context, caller, parsed.prompt, head.onward)
        if not isinstance(asking, Caller):
            return asking
        context.body_sha256 = parsed.onward_sha256
        version = head.known.get(VERSION_HEADER)
        request = self._request(asking, parsed.prompt, body, head.onward, version, since, parsed.session)
        return self._understood(exchange, context, request, parsed.prompt, parsed.change.of(body), since)

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
            go_on = partial(self._go_on, exchange, request, prompt, onward)
            return self._charge(self.limits, exchange, request, go_on, since)
        self._go_on(exchange, request, prompt, onward, since)
        return None

    def _charge(
        self, limits: Limiter, exchange: Exchange, request: Request, go_on: Callable[[float], None], since: float = 0.0,
        until: float | None = None,
    ) -> Reply | None:  # fmt: skip
        """Take what it may use off its tenant's limits and have it go on, with `since` as for `_start`; or say why it
        may not. Where what is lent here is not enough it waits for more, `until` then."""
        context: RequestContext = exchange.context
        waits = until is None or self._clock.now() < until
        admitted = limits.admit(context, request, context.user, waits=waits)
        if isinstance(admitted, asyncio.Future):
            now = self._clock.now()
            again = partial(self._charge, limits, exchange, request, go_on, since or now, until or now + WAIT_S)
            Waiting(exchange, self._telemetry, admitted, lambda _: again())
            return None
        if admitted is None:
            go_on(since)
        return admitted

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

        def go_on(_since: float) -> None:
            assert self.relay is not None
            self.relay.start(
                exchange, request, body, hide_usage=active.hide_usage, context=context, arrived_at=active.arrived_at,
                geo=active.geo,
            )  # fmt: skip

        if context.reserved is None or self.limits is None:
            go_on(0.0)
            return
        context.reserved.settle(None, outcome.NO_REGION, None)
        context.reserved = None
        refused = self._charge(self.limits, exchange, request, go_on)
        if refused is not None:
            self._telemetry.turned_away(context, refused.outcome, refused.status)
            exchange.reply(refused)

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

    def _go_on(self, exchange: Exchange, request: Request, prompt: Prompt, onward: bytes | None, since: float) -> None:
        """It may go on: its prompt's tokens are read, where they are of use."""
        if self.tokens is None or not self.tokens.reads(exchange.context.kind, request.model):
            self._start(exchange, request, prompt, since, onward)
            return

        def start(request: Request, since: float) -> None:
            self._start(exchange, request, prompt, since, onward)

        assert self.relay is not None
        self.tokens.go_on(exchange, request, prompt, since, start, self.relay)

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


def _other_body() -> Reply:
    return answers.refusal(outcome.HOP_FORGED, "the hop token was signed for another body")


def _seed(caller: Caller, prompt: Prompt) -> int:
    if prompt.cache_salt or len(prompt.model) > MODEL_CHARS_MAX:
        return chain.seed_of(prompt.model, "", prompt.cache_salt, caller.hint_scope)
    return _unsalted_seed(prompt.model, caller.hint_scope)


@lru_cache(maxsize=1024)  # a salt is a secret, and a long name may be anything: neither is remembered
def _unsalted_seed(model: str, scope: str) -> int:
    return chain.seed_of(model, "", "", scope)
