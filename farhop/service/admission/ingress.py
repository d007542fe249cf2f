"""The way into a balancer, the same in both tiers: path, caller, body, limits, and then the tier's machine decides.

The authenticator admits the caller (by an API key or a hop token), and the request reader reads the body. Rules that
need the body are enforced here: the models of a key, records, names of models, limits. Never forwards anything itself.

A request passes these methods, in order: `head` (all that needs no body); `arrived` and `_proceed` (the body is here);
for a large body `_read_apart` and `_parsed`, which read it in another process; `_understood` (the rules that need the
body); `_charge` (limits); `_read_tokens`; `_start`, which gives it to the relay. Each may answer it instead. A request
that has to wait between two of them is a `Waiting`.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.identity import redirect_token
from farhop.identity.hop_token import is_of
from farhop.identity.tenant_certificates import HEADER as CERTIFICATE
from farhop.relay import answers
from farhop.relay.formats import bodies, field_guard, model_list, openai, paths
from farhop.relay.formats.paths import Kind, PathRefusal
from farhop.relay.formats.transcript import answer_chain
from farhop.service.admission.large_bodies import LARGE_BYTES
from farhop.service.admission.prompt_tokens import RequestHolder
from farhop.service.admission.request_reader import RefusedError, other_body, seed_of
from farhop.service.admission.waiting import Waiting
from farhop.service.authentication.authenticator import Caller
from farhop.service.limits.limiter import WAIT_S
from farhop.telemetry.release import release

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Request
    from farhop.balance.model_facts import ModelFacts
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.relay.formats.prompt import Prompt
    from farhop.relay.formats.transcript import AnswerChain
    from farhop.relay.http.exchange import Exchange
    from farhop.relay.http.head import Head
    from farhop.service.admission.large_bodies import LargeBodyReader, ParsedBody
    from farhop.service.admission.prompt_tokens import PromptTokens
    from farhop.service.admission.request_reader import RequestReader
    from farhop.service.authentication.authenticator import Authenticator
    from farhop.service.limits.limiter import Limiter
    from farhop.service.observability.request_telemetry import RequestContext, RequestTelemetry
    from farhop.service.process.clock import Clock
    from topology.law import Law

_MODELS, _VERSION = Kind.MODELS, Kind.VERSION  # to look up an enum's member is a call, and each request asks for it
_BODILESS = (_MODELS, _VERSION)
_MODELS_SHOWN = 16
_PROBES = (*paths.HEALTH, *paths.READY)
_NO_STORE = b"cache-control: no-store\r\n"


def _probed(head: Head, ready: Callable[[], bool]) -> Reply:
    """Answer a probe for liveness or readiness, and nothing else, to any caller."""
    if head.method not in (b"GET", b"HEAD"):
        return answers.refusal(outcome.METHOD_NOT_ALLOWED, "this path answers GET only", extra=b"allow: GET, HEAD\r\n")
    good = head.path in paths.HEALTH or ready()
    return answers.Reply(200 if good else 503, b"", outcome.SERVED, _NO_STORE, b"text/plain")


def within_arrival_law(request: Request, arrival_law: Law, now: Law) -> Request:
    """The request within what the law allows that it came under, by what the law in force knows of models' bases. Its
    machine judges it by the law in force when it gets it: that is another if one came while its body was on the way, or
    while it waited (to be read, for quota, for another's answer)."""
    lawful = arrival_law.knowing(now.lineage).request_verdict(request).lawful
    return replace(request, lawful=lawful if request.lawful is None else lawful & request.lawful)


class Advisor(Protocol):
    """Answers `POST /v1/route`."""

    def advise(self, request: Request, context: RequestContext, head: Head) -> Reply:
        """Where the request would go now. Nothing is sent."""


class RequestCarrier(RequestHolder, Protocol):
    """Takes a request once it is read, and lets its machine decide: the part of the relay that an ingress uses."""

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: Any,
        arrived_at: float = 0.0,
        answer_chain: AnswerChain | None = None,
        geo: str = "",
    ) -> None:
        """See relay.Relay."""


class ArrivalObserver(Protocol):
    """Is notified of each request that was read."""

    def arrived(self, exchange: Exchange, caller: Caller, model: str) -> None:
        """A request of this caller for this model is here."""


class Ingress:
    """What a listener does with its requests (exchange.RequestHandler).

    `relay` is set once it exists: the two need one another. With an `advisor`, decisions alone may be asked for here,
    too. `arrivals` is told of each request that was read. `tokens`: prompts are read as tokens. `ready`, where clients
    come: whether work should be sent here. `anycast`: those of our addresses that other entries announce, too."""

    def __init__(
        self,
        authenticator: Authenticator,
        reader: RequestReader,
        *,
        telemetry: RequestTelemetry,
        clock: Clock,
        rng: Random,
        tokens: PromptTokens | None = None,
        advisor: Advisor | None = None,
        arrivals: ArrivalObserver | None = None,
        ready: Callable[[], bool] | None = None,
        anycast: frozenset[str] = frozenset(),
    ) -> None:
        self._authenticator, self.reader, self._tokens = authenticator, reader, tokens
        self._telemetry, self._clock, self._rng = telemetry, clock, rng
        self._advisor, self._ready, self._anycast = advisor, ready, anycast
        self.asks_certificate = False  # whether tenants are known by their certificates, too
        self.relay: RequestCarrier | None = None
        self._arrivals = arrivals
        self.limits: Limiter | None = None  # what clients may use, where that is limited
        self.gate: Callable[[], Reply | None] | None = None  # why no request is admitted now, if there can be a reason

    def compose(self, caller: Caller, kind: Kind, body: bytes, path: bytes) -> Request:
        """The Request that a body would be, its tokens read where they are of use. Raises RefusedError."""
        request, prompt = self.reader.compose(caller, kind, body, path)
        return request if self._tokens is None else self._tokens.now(caller, kind, request, prompt, body)

    def head(self, exchange: Exchange) -> Reply | None:
        """Everything that can be decided before the body is read."""
        if exchange.head.path in _PROBES and self._ready is not None:
            return _probed(exchange.head, self._ready)
        context = exchange.context = self._telemetry.begin()
        reply = self._check_head(exchange, context)
        if reply is not None:
            self._telemetry.turned_away(context, reply.outcome, reply.status)
        else:
            exchange.on_abandoned = partial(self._telemetry.turned_away, context)
        return reply

    def _check_head(self, exchange: Exchange, context: RequestContext) -> Reply | None:
        head = exchange.head
        if self.gate is not None and (closed := self.gate()) is not None:
            return closed
        if redirect_token.PARAMETER in head.target:
            head.target, token = redirect_token.split_token(head.target)  # nothing behind us may see it
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
        if b"?" in head.target and kind not in _BODILESS:
            try:
                field_guard.query(head.target)
            except bodies.BodyError as error:
                return answers.refusal(error.outcome, error.detail, param=error.param)
        if head.known.get(b"content-encoding", b"identity").lower() != b"identity":
            detail = "compressed request bodies are not read; send the body without `Content-Encoding`"
            return answers.refusal(outcome.MALFORMED_HTTP, detail)
        if b"x_farhop_allow" in head.known:  # to leave it out would widen what the client asked for
            detail = "`x_farhop_allow` is not read: the header's name is `x-farhop-allow`"
            return answers.refusal(outcome.INVALID_FIELD, detail, param="x_farhop_allow")
        if self.asks_certificate and (certificate := exchange.certificate) is not None:
            head.known[CERTIFICATE] = certificate
        caller = self._authenticator.caller(head)
        for name in (b"authorization", b"x-api-key"):
            head.known.pop(name, None)  # it has identified the caller, and is not needed any more
        if not isinstance(caller, Caller):
            return caller
        context.kind, context.caller, exchange.tenant = kind, caller, caller.tenant
        self._telemetry.admitted(context, head, outside=not exchange.is_hop)
        if caller.attempt:
            self._telemetry.attempt_arrived(context, caller)
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
        caller, kind, reader = context.caller, context.kind, self.reader
        assert caller is not None  # `head` let it pass
        assert kind is not None
        holder = self._telemetry.law_holder
        # The law of its head is not that of now: a body may be long on its way.
        if holder is not None and context.law is not holder.law and (shut := self._authenticator.shut_out(caller)):
            return shut
        if exchange.body[:1] == bodies.BOM[:1]:
            exchange.body = bodies.without_bom(kind, exchange.body)
        # Of the longest body this takes a millisecond.
        if caller.body_mac is not None and not is_of(caller.body_mac, exchange.body):
            return other_body()
        if reader.large is not None and len(exchange.body) > LARGE_BYTES and kind not in _BODILESS:
            self._read_apart(reader.large, exchange)
            return None
        if caller.body_hash and hashlib.sha256(exchange.body).digest() != caller.body_hash:
            return other_body()
        if kind is _MODELS:
            return self._models(reader.models(caller), exchange.head)
        if kind is _VERSION:
            return answers.Reply(200, msgspec.json.encode({"version": release()}), outcome.SERVED)
        try:
            request, prompt = reader.read(exchange)
        except RefusedError as refused:
            return refused.reply
        except bodies.HeavyError:
            assert reader.large is not None  # else all are read here
            self._read_apart(reader.large, exchange)
            return None
        return self._understood(exchange, context, request, prompt)

    def _read_apart(self, large: LargeBodyReader, exchange: Exchange) -> None:
        parsed = large.later(self.reader.job(exchange), exchange.body, exchange.tenant)
        Waiting(exchange, self._telemetry, parsed, partial(self._parsed, exchange, self._clock.now()))

    def _models(self, models: dict[str, ModelFacts], head: Head) -> Reply:
        """The answer with all models, or with the one that is asked for."""
        if not (model := paths.model_asked_about(head.path)):
            return answers.Reply(200, model_list.listed(models, head.onward), outcome.SERVED)
        if model not in models:
            detail = f"the model `{model[:128]}` is none of those that `GET /v1/models` lists"
            return answers.refusal(outcome.UNKNOWN_MODEL, detail, param="model")
        if paths.asks_readiness(head.path):
            return answers.Reply(200, model_list.ready(model), outcome.SERVED)
        return answers.Reply(200, model_list.described(model, models[model], head.onward), outcome.SERVED)

    def _parsed(self, exchange: Exchange, since: float, reading: asyncio.Future[ParsedBody]) -> Reply | None:
        """A large body is read: start relaying, or say what to answer instead."""
        parsed = reading.result()
        try:
            request, prompt = self.reader.read_apart(exchange, parsed, since)
        except RefusedError as refused:
            return refused.reply
        onward = parsed.change.of(exchange.body)
        return self._understood(exchange, exchange.context, request, prompt, onward, since)

    def _understood(
        self, exchange: Exchange, context: RequestContext, request: Request, prompt: Prompt,
        onward: bytes | None = None, since: float = 0.0,
    ) -> Reply | None:  # fmt: skip
        """The request is read. `onward` is the body as it is sent on, if that is known; `since` as for `_start`."""
        kind, caller = context.kind, context.caller
        assert caller is not None
        assert kind is not None
        lines = b"\r\n" + exchange.head.onward
        if bodies.AS_JSON not in lines or lines.count(b"\r\ncontent-type:") > 1:
            exchange.head.onward = bodies.told_as_json(kind, exchange.head.onward)
        context.model = request.model
        if caller.models and request.model not in caller.models:
            detail = f"this API key is not for this model; it is for {', '.join(caller.models[:_MODELS_SHOWN])}"
            return answers.refusal(outcome.KEY_SCOPE, detail, param="model")
        if context.recorded and self._telemetry.rule_may_differ(context, request.model):
            self._mute_unless_recorded(context, caller, request.model)
        if self.reader.names is not None:
            try:
                found = self.reader.renamed(self.reader.names, caller, kind, request, prompt, exchange.body)
            except RefusedError as refused:
                return refused.reply
            if found is not None:
                request, prompt, exchange.body = found
                if request.narrow != caller.narrow:  # a rule about the name binds what is recorded, too
                    caller = context.caller = replace(caller, narrow=request.narrow)
                    self._mute_unless_recorded(context, caller, request.model)
            if request.alias:
                onward, context.body_sha256 = None, b""  # both were of the body that came
                context.model = request.model
                self._mute_unless_recorded(context, caller, request.model)
        if context.unknown_fields:
            self.reader.count_unknown(context)
            context.unknown_fields = []  # up to 512 names, for as long as a stream is open
        if self._arrivals is not None:
            self._arrivals.arrived(exchange, caller, request.model)
        context.user = prompt.preferences.user
        if context.advised:
            assert self._advisor is not None
            return self._advisor.advise(request, context, exchange.head)
        proceed = self._start if self._tokens is None else self._read_tokens
        if self.limits is not None and request.tenant in self.limits.tenants and not caller.charged:
            return self._charge(
                self.limits, exchange, request, partial(proceed, exchange, request, prompt, onward), since
            )
        proceed(exchange, request, prompt, onward, since)
        return None

    def _charge(
        self, limits: Limiter, exchange: Exchange, request: Request, proceed: Callable[[float], None],
        since: float = 0.0, until: float | None = None,
    ) -> Reply | None:  # fmt: skip
        """Charge the request to its tenant's limits and continue, with `since` as for `_start`; or return the refusal.
        If the units lent here do not suffice, it waits for more, until `until`."""
        context: RequestContext = exchange.context
        waits = until is None or self._clock.now() < until
        admitted = limits.admit(context, request, context.user, waits=waits)
        if isinstance(admitted, asyncio.Future):
            now = self._clock.now()
            again = partial(self._charge, limits, exchange, request, proceed, since or now, until or now + WAIT_S)
            Waiting(exchange, self._telemetry, admitted, lambda _: again())
            return None
        if admitted is None:
            proceed(since)
        return admitted

    def restart_with_model(self, active: ActiveRequest, request: Request) -> None:
        """Start a request that no target takes for its model again, for another model that its name stands for: under
        that model's limits, and recorded only if that model's rule allows."""
        exchange, context = active.exchange, active.context
        caller = context.caller
        body = openai.renamed(active.body, request.model)
        # Its `body_hash` stays: what ended engines of one model is the same request to those of another.
        request = replace(request, body_bytes=len(body), chain=self.reader.chain_anew(exchange, body))
        context.body_sha256, context.model = b"", request.model  # it was of the body that came
        self._mute_unless_recorded(context, caller, request.model)
        holder = self._telemetry.law_holder
        if holder is not None and context.arrival_law is not None:  # of the others it was asked when the body was here
            request = within_arrival_law(request, context.arrival_law, holder.law)

        def proceed(_since: float) -> None:
            assert self.relay is not None
            self.relay.start(
                exchange, request, body, hide_usage=active.hide_usage, context=context, arrived_at=active.arrived_at,
                geo=active.geo,
            )  # fmt: skip

        if context.charge is not None:
            context.charge.settle(None, outcome.NO_REGION, None)
            context.charge = None
        # The other model's limits count though the first one's name had none.
        if self.limits is None or request.tenant not in self.limits.tenants or caller.charged:
            proceed(0.0)
            return
        refused = self._charge(self.limits, exchange, request, proceed)
        if refused is not None:
            self._telemetry.turned_away(context, refused.outcome, refused.status)
            exchange.reply(refused)

    def _mute_unless_recorded(self, context: RequestContext, caller: Caller, model: str) -> None:
        """A model may have a rule of its own about records, and its name is known only when the body is read."""
        if not self._authenticator.recorded(caller, model):
            self._telemetry.mute(context)

    def _read_tokens(
        self, exchange: Exchange, request: Request, prompt: Prompt, onward: bytes | None, since: float
    ) -> None:
        """As `_start`, after the prompt's tokens are known, if they are of use."""
        assert self._tokens is not None
        if not self._tokens.reads(exchange.context.kind, request.model):
            self._start(exchange, request, prompt, onward, since)
            return

        def start(request: Request, since: float) -> None:
            self._start(exchange, request, prompt, onward, since)

        assert self.relay is not None
        self._tokens.start_with_tokens(exchange, request, prompt, since, start, self.relay)

    def _start(self, exchange: Exchange, request: Request, prompt: Prompt, onward: bytes | None, since: float) -> None:
        """Start relaying. `since`: when the request began to wait (monotonic seconds) for its body to be read,
        for quota or for its tokens; 0: it did not. It counts as arrived then."""
        assert self.relay is not None
        context: RequestContext = exchange.context
        assert context.caller is not None  # `head` let it pass
        assert context.kind is not None
        holder, arrival_law = self._telemetry.law_holder, context.arrival_law
        if holder is not None and arrival_law is not None and arrival_law is not holder.law:
            request = within_arrival_law(request, arrival_law, holder.law)
        if self._anycast and exchange.local_host in self._anycast and redirect_token.HEADER not in exchange.head.known:
            request = replace(request, by_anycast=True)
        if prompt.hide_usage and not exchange.sees_answer:
            prompt, onward = replace(prompt, hide_usage=False), None  # the client would see what it did not ask for
        if onward is None:
            salt = openai.salt_of(context.kind, prompt, context.caller.hint_scope) if self.reader.to_engines else ""
            onward = exchange.body
            if salt or prompt.hide_usage or prompt.lacks_model:
                onward = openai.change(onward, prompt, salt).of(onward)
        more = None
        if self.reader.to_engines and prompt.answer is not None:
            # A chain's last node is the seed of what follows: only where there is none is the first asked.
            seed = 0 if request.chain else seed_of(context.caller, prompt)
            more = answer_chain(prompt, request.chain, seed)
        self.relay.start(
            exchange,
            request,
            onward,
            hide_usage=prompt.hide_usage,
            context=context,
            arrived_at=since,
            answer_chain=more,
            geo="" if exchange.is_hop else prompt.preferences.geo,  # whom the client asked says it
        )
