"""Observes requests from outside the machine: spans, metrics, the decision record. The same in both tiers.

Each tier supplies the description of its decisions. Never changes a request, never holds a prompt. Whatever a tenant's
law forbids to record here is removed before anything is recorded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop.balance import model_steps, outcome
from farhop.balance.machine import Usage
from farhop.balance.outcome import Source
from farhop.service.authentication.authenticator import Caller
from farhop.service.observability.decisions import DecisionRecord
from farhop.service.process.tasks import Tasks, in_turns
from farhop.telemetry import attributes as a
from farhop.telemetry import context as trace_context
from farhop.telemetry.spans import RequestTrace
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized
    from random import Random

    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest, Attempt
    from farhop.relay.formats.paths import Kind
    from farhop.relay.http.head import Head
    from farhop.service.authentication.authenticator import LawHolder
    from farhop.service.limits.limiter import Charge
    from farhop.service.observability.decisions import Decisions, Reasons
    from farhop.service.observability.workload_recorder import WorkloadRecorder
    from farhop.service.process.clock import Clock
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from farhop.telemetry.spans import Span, Tracing
    from topology.law import Law

MODEL_CHARS_MAX = 128
PROVIDER = "farhop"  # what clients' spans would name, too: the engines behind are not theirs to know
_UNTRACED = RequestTrace(b"", None)
_HINTS, _LOGGING = Scope.HINTS, Scope.LOGGING
# Verdicts of the law in one turn, each for the records of equal requests: one takes some 25 us.
_VERDICTS_A_TURN = 128
_WELL = (outcome.SERVED, outcome.REDIRECTED, outcome.ADVISED)


@lru_cache(maxsize=4096)  # each record keeps it: one for all is nothing for the collector to walk
def _attempted(target: str, how: str) -> tuple[tuple[str, str], ...]:
    return ((target, how),)


class Accounting(Protocol):
    """Records of requests that must not be lost (service.accounts)."""

    def forwarded(self, context: RequestContext) -> None:
        """The request was forwarded."""

    def turned_away(self, context: RequestContext, reason: Outcome, status: int, now: float) -> None:
        """A request is over for which no decision was made."""

    def concluded(
        self, context: RequestContext, active: ActiveRequest, reason: Outcome, status: int, usage: Usage | None,
        now: float,
    ) -> None:  # fmt: skip
        """A request is over for which a decision was made."""


class CacheUse(msgspec.Struct, frozen=True):
    """What became of a request whose route lets answers be given again: `outcome` is hit, shared (it read another's
    along), miss or bypass, `why` a reason where there is one. Of an answer that was another's: in which `region`
    it was made, for which `decision`, how old it is, and what of an engine's work it `saved`."""

    outcome: str
    why: str = ""
    region: str = ""
    decision: str = ""
    age_s: float = 0.0
    saved: Usage | None = None

    @property
    def header(self) -> str:
        """The value of the `x-farhop-cache` header."""
        return "hit" if self.outcome == "shared" else self.outcome


class RequestContext(msgspec.Struct, eq=False):
    """A client's request outside the relay: its caller, its times, its open spans."""

    trace: RequestTrace
    arrived_at: float
    since: float
    arrival_law: Law | None = None  # the law in force when its head came: no later one allows it more
    law: Law | None = None  # the law under which `recorded` was determined; None: determine it again
    recorded: bool = True
    over: bool = False
    advised: bool = False  # only a decision is asked for; nothing is sent
    host: bytes = b""  # our name as the client used it, if spans are recorded
    given: CacheUse | None = None  # set if answers may be reused
    decided: Any = None  # the last decision that has a span
    caller: Caller | None = None
    charge: Charge | None = None  # units taken from the tenant's limits
    kind: Kind | None = None
    decision_id: str = ""
    user: str = ""  # the user that its body names
    model: str = ""  # the model that it is for, which may have a rule about records; "" until its body is read
    law_epoch: int = 0  # of the law when it was last sent on; 0: not yet, or no accounts are kept
    body_sha256: bytes = b""  # of the body as it is sent on, if it was wanted
    unknown_fields: list[str] = []  # names of unknown fields in the body
    relay_span: Span | None = None
    active: ActiveRequest | None = None  # set while it is relayed
    attempts: tuple[tuple[str, str], ...] = ()  # (target, outcome) of each


def _turns(work: Iterator[None], judged: Sized) -> Iterator[None]:
    """The same in fewer steps, each of several verdicts."""
    until = _VERDICTS_A_TURN
    for _ in work:
        if len(judged) >= until:
            until = len(judged) + _VERDICTS_A_TURN
            yield


class RequestTelemetry:
    """Sees every request of one tier. `name` is the root span's (`farhop.global`, `farhop.regional`), `decide` that of
    a decision. Of requests whose clients ask for tracing, at most `traced_per_s_max` are traced; the others are sampled
    as configured here."""

    def __init__(
        self,
        name: str,
        decide: str,
        *,
        tracing: Tracing,
        metrics: TierMetrics,
        decisions: Decisions,
        clock: Clock,
        rng: Random,
        reasons: Reasons,
        traced_per_s_max: float = 100.0,
        recorder: WorkloadRecorder | None = None,
    ) -> None:
        """`recorder`: where the requests of clients are recorded for operators who ask for it."""
        self._name, self._decide = name, decide
        self._asks_per_s, self._asks, self._asked_at = traced_per_s_max, traced_per_s_max, 0.0
        self._tracing, self._metrics, self._decisions = tracing, metrics, decisions
        self._clock, self._rng, self._reasons = clock, rng, reasons
        # The tier sets the next three once its authenticator exists.
        # Whether a request for this model may be recorded here by the law of now.
        self.may_record: Callable[[Caller, str], bool] = lambda _caller, _model: True
        self.law_holder: LawHolder | None = None  # the holder of the law
        self.collector = ""  # the region where spans are sent; "": this one
        self._kept_law: Law | None = None  # the law in force at its last change
        self._tasks = Tasks()
        self.recorder = recorder
        self.accounts: Accounting | None = None  # where usage or audit is written, if it is; the tier sets it
        self.hops: dict[
            tuple[str, str], RequestContext
        ] = {}  # by issuer and its name for the attempt: from head to end

    async def close(self) -> None:
        """Stop what is done in turns."""
        await self._tasks.close()

    # -- before it is relayed

    def begin(self) -> RequestContext:
        """A request's head is here. Callers that are not admitted are not traced."""
        self._metrics.in_flight += 1
        now = self._clock.now()
        law = None if self.law_holder is None else self.law_holder.law
        return RequestContext(_UNTRACED, now, now, law, law)

    def rule_may_differ(self, context: RequestContext, model: str) -> bool:
        """Whether the verdict at its head, for any model, may not hold for this one, or not any more."""
        law = context.law
        return law is None or self.law_holder is None or law is not self.law_holder.law or model in law.bound_models

    def admitted(self, context: RequestContext, head: Head, *, outside: bool) -> None:
        """The caller is known. For callers from `outside`, only a limited number of requests is traced on demand."""
        parent, known = head.known.get(b"traceparent"), head.known
        if parent is not None and outside and trace_context.asks(parent) and not self._may_ask(context.arrived_at):
            parent = trace_context.unasked(parent)
        context.trace = self._tracing.begin(
            parent, known.get(b"tracestate"), self._name, self._clock.wall_ns(context.arrived_at), self._rng
        )
        if context.trace.sampled:
            context.host = known.get(b"host", b"")
            if self.collector and not self._may_leave(context, None):
                context.trace.mute()  # now, so that spans below have a parent that is exported

    def _may_leave(self, context: RequestContext, request: Request | None) -> bool:
        """Whether the law in force lets records of the request go to the collector; `request`: as its machine has
        it."""
        caller = context.caller
        if self.law_holder is None or caller is None:
            return False
        law = self.law_holder.law
        if request is not None:
            return self.collector in law.request_verdict(request, _LOGGING).lawful
        return self.collector in law.verdict(caller.tenant, context.model, _LOGGING, caller.narrow, caller.key).lawful

    def _may_ask(self, now: float) -> bool:
        """Whether one more trace on request is allowed: a token bucket that holds one second's worth."""
        self._asks = min(self._asks_per_s, self._asks + (now - self._asked_at) * self._asks_per_s)
        self._asked_at = now
        if self._asks < 1.0:
            return False
        self._asks -= 1.0
        return True

    def attempt_arrived(self, context: RequestContext, caller: Caller) -> None:
        """An attempt of another balancer arrived, which may ask later whether it is known here."""
        self.hops[caller.issuer, caller.attempt] = context

    def quiet_s(self, issuer: str, attempt: str) -> float | None:
        """Seconds since something of this attempt's answer, or it, came to us; None if it is not here, or is over."""
        context = self.hops.get((issuer, attempt))
        if context is None:
            return None
        run = context.active.attempt if context.active is not None else None
        return self._clock.now() - (context.arrived_at if run is None else run.last_activity_at)

    def mute(self, context: RequestContext) -> None:
        """The law forbids records of this request here: keep none."""
        context.recorded = False
        context.trace.mute()

    def law_changed(self) -> None:
        """Another law is in force, or more is known of the models it binds: drop what it does not allow to be kept
        here.
        """
        judged: dict[tuple[Any, ...], bool] = {}  # few, where clients do not narrow each request otherwise

        def may_stay(record: DecisionRecord) -> bool:
            asked = record.tenant, record.key, record.narrow, record.model, record.asked_for
            stays = judged.get(asked)
            if stays is None:
                caller = Caller(record.tenant, 0.0, "", recorded=True, key=record.key, narrow=record.narrow)
                models = (record.model, record.asked_for) if record.asked_for else (record.model,)
                stays = judged[asked] = all(self.may_record(caller, model) for model in models)
            return stays

        turns = _turns(self._decisions.forget_unless(may_stay), judged)
        for _ in turns:  # more than fit into this one
            self._tasks.start(in_turns(turns), "forget decisions")
            break
        if self.law_holder is None:
            return
        before, self._kept_law = self._kept_law, self.law_holder.law
        here = frozenset((self._metrics.process[1],))
        if before is None or not self._kept_law.widens(before, Scope.LOGGING, here):
            for narrowed in self._decisions.narrowed:
                narrowed()

    def _update_recorded(self, context: RequestContext, request: Request | None) -> None:
        """The law changed while the request was under way: keep records of it by the present law, which may have a rule
        about the model name that it used. None: its machine does not have it."""
        caller, model = context.caller, context.model
        if caller is None:
            return
        if request is not None:
            model = request.model
            if self.law_holder is not None and request.alias in self.law_holder.law.bound_models:
                narrow = model_steps.narrowed_by_name(request, self.law_holder.law)
                caller = context.caller = msgspec.structs.replace(caller, narrow=narrow)
        if context.recorded and not self.may_record(caller, model):
            self.mute(context)

    def may_note(self, active: ActiveRequest) -> bool:
        """Whether records of a request under way may be kept here by the law in force."""
        context: RequestContext = active.context
        if self.law_holder is None or context.law is not self.law_holder.law:
            self._update_recorded(context, active.request)
        return context.recorded

    def turned_away(self, context: RequestContext, reason: Outcome, status: int) -> None:
        """Over before it was relayed: answered by the ingress, cut short while it was read, or left by its client."""
        if self.law_holder is None or context.law is not self.law_holder.law:
            self._update_recorded(context, None)
        if self.accounts is not None and not context.over:
            self.accounts.turned_away(context, reason, status, self._clock.now())
        if reason.source is Source.LAW:
            self.mute(context)  # a caller that may not be read here is not recorded here either
        self._finish(context, reason, status, self._clock.now())

    def advised(self, context: RequestContext, request: Request, decision: Any) -> None:
        """A decision was asked for; it is answered, and nothing is sent."""
        now = self._clock.now()
        if self.collector and context.trace.sampled and not self._may_leave(context, request):
            context.trace.mute()
        if context.trace.sampled:
            since_ns, now_ns = self._clock.wall_ns(context.since), self._clock.wall_ns(now)
            context.trace.child(self._decide, since_ns, now_ns, self._reasons.attributes(decision))
        self._keep(context, request, decision, outcome.ADVISED, 200, now)

    # -- while it is relayed

    def upstream_context(self, context: RequestContext) -> bytes:
        """Trace context header lines for the attempt under way."""
        span = context.relay_span or context.trace
        state = context.trace.tracestate
        tail = b"tracestate: " + state + b"\r\n" if state else b""
        return b"traceparent: " + span.traceparent + b"\r\n" + tail

    def forwarded(self, active: ActiveRequest) -> None:
        """An attempt is on its way: the decision behind it is a span of its own, and so is the attempt."""
        context: RequestContext = active.context
        context.active = active
        if self.accounts is not None:
            self.accounts.forwarded(context)
        if context.trace.sampled:
            self._decided(active, context, active.forwarded_at)
            context.relay_span = context.trace.open("farhop.relay", self._clock.wall_ns(active.forwarded_at))

    def _decided(self, active: ActiveRequest, context: RequestContext, now: float) -> None:
        """The spans of what led to a decision just taken: the wait in the queue, if any, and the decision itself."""
        now_ns = self._clock.wall_ns(now)
        if active.hold_from is not None:
            context.trace.child(f"{self._name}.queue", self._clock.wall_ns(active.hold_from), now_ns)
            context.since = now
            active.hold_from = None
        if active.reasons is not None and active.reasons is not context.decided:
            attributes = self._reasons.attributes(active.reasons)
            context.trace.child(self._decide, self._clock.wall_ns(context.since), now_ns, attributes)
            context.decided = active.reasons

    def spilled(self, to: str) -> None:
        """An attempt went past a region that is hot or not fully returned to."""
        self._metrics.spilled(to)

    def versioned(self, active: ActiveRequest, version: str, split: str, status: int) -> None:
        """A request that is over was served in this version of its model, which it got by this word of a split."""
        ttft_s = active.began_at - active.context.arrived_at if active.began_at and active.status < 400 else None
        self._metrics.versioned(version, split, status, ttft_s)

    def attempt_over(self, active: ActiveRequest, attempt: Attempt, reason: Outcome) -> None:
        """An attempt ended."""
        context: RequestContext = active.context
        target, span = attempt.target, context.relay_span
        self._metrics.attempted(target, reason)
        context.attempts += _attempted(target, reason.reason)
        context.relay_span = None
        if not context.trace.sampled:
            return
        context.since = active.ended_at or self._clock.now()  # no later than what follows from its end
        if span is None:
            return
        attributes: dict[str, Value] = {a.ATTEMPT: attempt.number, a.OUTCOME: reason.reason}
        if attempt.status:
            attributes[a.STATUS] = attempt.status
        failed = reason is not outcome.SERVED
        span.end(self._clock.wall_ns(context.since), attributes, reason.reason if failed else None)

    def concluded(self, active: ActiveRequest, reason: Outcome, status: int, usage: Usage | None) -> None:
        """The request is over."""
        context: RequestContext = active.context
        if context.over:
            return
        now = active.ended_at or self._clock.now()
        if self.law_holder is None or context.law is not self.law_holder.law:
            self._update_recorded(context, active.request)
        if self.accounts is not None:
            self.accounts.concluded(context, active, reason, status, usage, now)
        if context.trace.sampled:
            self._decided(active, context, now)  # one that sent it nowhere, or that a later one overtook
        if self.recorder is not None and self.recorder.recordings and context.recorded and self._is_clients(context):
            self._record(self.recorder, active.request, context.arrived_at, now, usage)
        ttft_ms = (active.began_at - context.arrived_at) * 1e3 if active.began_at else None
        self._keep(context, active.request, active.reasons, reason, status, now, usage, ttft_ms)
        self._finish(context, reason, status, now, active, usage)

    def _record(
        self, recorder: WorkloadRecorder, request: Request, arrived_at: float, now: float, usage: Usage | None
    ) -> None:
        """Add it to the recordings under way. Its blocks only where the law allows hints of it: with a recording's salt
        one can look for a text among its fingerprints."""
        if (
            self.law_holder is not None
            and recorder.region not in self.law_holder.law.request_verdict(request, _HINTS).lawful
        ):
            request = msgspec.structs.replace(request, chain=())
        arrived_s, over_s = (self._clock.wall_ns(moment) / 1e9 for moment in (arrived_at, now))
        recorder.concluded(request, arrived_s, over_s, usage)

    @staticmethod
    def _is_clients(context: RequestContext) -> bool:
        """Whether the request came from a client. Another balancer's attempts are recorded by the entry."""
        return context.caller is not None and not context.caller.issuer

    def _request_attributes(self, active: ActiveRequest, usage: Usage | None) -> dict[str, Value]:
        request, context, head = active.request, active.context, active.exchange.head
        attributes: dict[str, Value] = {
            a.OPERATION: context.kind.operation if context.kind is not None else "",
            a.PROVIDER: PROVIDER,
            a.METHOD: head.method.decode("ascii"),
            a.PATH: head.path.decode("ascii", "replace"),
            a.REQUEST_MODEL: request.model,
            a.REQUEST_STREAM: request.stream,
            a.TENANT: request.tenant,
            a.DECISION: context.decision_id,
            a.PROMPT_BYTES: request.prompt_bytes,
            a.ATTEMPTS: len(context.attempts),
        }
        if request.max_tokens is not None:
            attributes[a.REQUEST_MAX_TOKENS] = request.max_tokens
        if host := context.host.decode("ascii", "replace"):
            name, _, port = host.rpartition(":")
            bare = not name or not port.isdigit()
            attributes[a.SERVER_ADDRESS] = host if bare else name
            if not bare:
                attributes[a.SERVER_PORT] = int(port)
        if usage is not None:
            attributes |= {a.INPUT_TOKENS: usage.prompt_tokens, a.OUTPUT_TOKENS: usage.completion_tokens}
            if usage.cached_tokens is not None:
                attributes[a.CACHED_TOKENS] = usage.cached_tokens
        return attributes

    def _finish(
        self,
        context: RequestContext,
        reason: Outcome,
        status: int,
        now: float,
        active: ActiveRequest | None = None,
        usage: Usage | None = None,
    ) -> None:
        if context.over:
            return
        context.over, context.active = True, None
        if context.charge is not None:
            context.charge.settle(active, reason, usage)
        if context.caller is not None and context.caller.attempt:
            self.hops.pop((context.caller.issuer, context.caller.attempt), None)
        ttft_s = tpot_s = None
        target = ""
        # An engine's error comes fast: as a first token it would make a broken replica look quick.
        # And an answer made for another request measures no speed.
        if active is not None and active.began_at and active.status < 400 and active.forward is not None:
            ttft_s = active.began_at - context.arrived_at
            target = active.forward.target if active.forward is not None else ""
            if active.request.stream:  # an answer in one piece does not show its first token
                self._compare(active)
                if usage is not None and usage.completion_tokens > 1 and reason is outcome.SERVED:
                    tpot_s = (now - active.began_at) / (usage.completion_tokens - 1)
        model = active.request.model if active is not None and active.forward is not None else ""
        hit = None
        if active is not None and active.reasons is not None and usage is not None and usage.cached_tokens is not None:
            hit = self._reasons.predicted_hit(active.reasons)
        self._metrics.finished(reason, status, now - context.arrived_at, ttft_s, tpot_s, target, model, usage, hit)
        if not context.trace.sampled:
            return
        if self.collector and not self._may_leave(context, active.request if active is not None else None):
            context.trace.mute()
            return
        attributes = self._request_attributes(active, usage) if active is not None else {}
        attributes |= {a.OUTCOME: reason.reason, a.STATUS: status}
        if context.given is not None:
            attributes[a.ANSWER_CACHE] = context.given.outcome
        if ttft_s is not None:
            attributes[a.TTFT_MS] = ttft_s * 1e3
        # OpenTelemetry's HTTP conventions: what a client did wrong is no error of the server's span.
        wrong = reason not in _WELL and not 400 <= status < 500
        context.trace.end(self._clock.wall_ns(now), attributes, reason.reason if wrong else None)

    def _compare(self, active: ActiveRequest) -> None:
        """The promise that the choice was based on, compared with the result."""
        promised_ms = None if active.reasons is None else self._reasons.predicted_ttft_ms(active.reasons)
        if promised_ms is not None:
            self._metrics.promised(promised_ms, (active.began_at - active.forwarded_at) * 1e3)

    def _keep(
        self,
        context: RequestContext,
        request: Request,
        decision: Any,
        reason: Outcome,
        status: int,
        now: float,
        usage: Usage | None = None,
        ttft_ms: float | None = None,
    ) -> None:
        if not context.recorded:
            return
        # Of the request only this: the ring holds many records, and a chain or a stranger's long name is large.
        record = DecisionRecord(
            decision_id=context.decision_id,
            traceparent=context.trace.traceparent,
            at=context.arrived_at,
            tenant=request.tenant,
            key=request.key,
            narrow=request.narrow,
            model=request.model[:MODEL_CHARS_MAX],
            asked_for=request.alias[:MODEL_CHARS_MAX],
            prompt_bytes=request.prompt_bytes,
            outcome=reason,
            status=status,
            ttft_ms=ttft_ms,
            duration_ms=(now - context.arrived_at) * 1e3,
            attempts=context.attempts,
            usage=usage,
            given=context.given,
            decision=decision,
            reasons=self._reasons,
            clock=self._clock,
        )
        self._decisions.put(context.decision_id, record)


class InstrumentedTier:
    """The part of a relay's Tier that only watches. A tier adds the headers it writes, and its own word on what else is
    to be noted where a request is `forwarded` or `concluded`: else they are the telemetry's."""

    attempt_over: Callable[[ActiveRequest, Attempt, Outcome], None]  # see relay.Tier

    def __init__(self, telemetry: RequestTelemetry, log: Throttled) -> None:
        self.telemetry, self._log = telemetry, log
        self.attempt_over = telemetry.attempt_over

    def redirect_url(self, active: ActiveRequest, base: str) -> str:  # noqa: ARG002 - a tier that redirects has its own
        """See relay.Tier."""
        return base

    def answer_tail(self, active: ActiveRequest) -> bytes:  # noqa: ARG002 - a tier that adds something has its own
        """See relay.Tier."""
        return b""

    def replaced(self, active: ActiveRequest, attempt: Attempt, trace: str) -> None:
        """See relay.Tier. Only where records of the request may be kept, and nothing of an error's own text."""
        context: RequestContext = active.context
        if self.telemetry.may_note(active):
            self._log.warning(
                "an engine's error was replaced before it reached the client",
                attempt.target,
                replica=attempt.target,
                status=attempt.status,
                trace=trace,
                decision=context.decision_id,
                trace_id=context.trace.trace_id,
            )

    def salt_unknown(self, active: ActiveRequest, attempt: Attempt) -> None:  # noqa: ARG002 - of the engine alone
        """See relay.Tier: what its operator must know, said now and then."""
        self._log.warning(
            "an engine refuses `cache_salt` and is asked without: there tenants may learn by timing what others asked",
            attempt.target,
            replica=attempt.target,
        )

    def fault(self, active: ActiveRequest | None, error: Exception) -> None:
        """A bug in the machine: its trace goes to the log, never to a client."""
        trace_id = active.context.trace.trace_id if active is not None else ""
        self._log.error("the state machine raised an error", type(error).__name__, exc_info=error, trace_id=trace_id)
