"""What is seen of a request from outside its machine: spans, metrics, the decision record. The same in both tiers.

A tier hands in what to say of its decisions. Never changes a request, never holds a prompt; what a tenant's law keeps
from being recorded here is muted before anything is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Source
from farhop.telemetry import attributes as a
from farhop.telemetry import context
from farhop.telemetry.spans import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.attempt import AttemptRun
    from farhop.relay.head import Head
    from farhop.relay.pair import PrefillRun
    from farhop.relay.paths import Kind
    from farhop.relay.relay import Journey
    from farhop.shell.clock import Clock
    from farhop.shell.decisions import Decisions
    from farhop.shell.door import Caller
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from farhop.telemetry.spans import Span, Tracing

MODEL_CHARS_MAX = 128
_UNTRACED = RequestTrace(b"", None)
_WELL = (outcome.SERVED, outcome.REDIRECTED, outcome.ADVISED)


class Visit:
    """What the shell keeps of a request beside its journey: who, since when, and its open spans."""

    __slots__ = (
        "advised",
        "arrived_at",
        "attempts",
        "body_sha256",
        "caller",
        "decided",
        "decision_id",
        "journey",
        "kind",
        "over",
        "recorded",
        "relay_span",
        "since",
        "trace",
    )

    def __init__(self, trace: RequestTrace, now: float) -> None:
        self.trace, self.arrived_at, self.since = trace, now, now
        self.recorded = True
        self.over = False
        self.advised = False  # a decision is asked for, and nothing is to be sent
        self.decided: Any = None  # the last decision that has a span
        self.caller: Caller | None = None
        self.kind: Kind | None = None
        self.decision_id = ""
        self.body_sha256 = b""  # of the body as it is sent on, once it was wanted
        self.relay_span: Span | None = None
        self.journey: Journey | None = None  # once it has one, until it is over
        self.attempts: list[tuple[str, str]] = []  # (target, how it ended)


class Reasons(Protocol):
    """What a tier says of its decisions."""

    def attributes(self, decision: Any) -> dict[str, Value]:
        """Of it, what goes on the span."""

    def record(self, decision: Any) -> dict[str, Any]:
        """Of it, what `explain` shows."""

    def predicted_hit_tokens(self, decision: Any) -> float:
        """How much of the prompt was expected to be cached where it went."""

    def hit_source(self, decision: Any) -> str:
        """What that rested on: one of telemetry.metrics.HIT_SOURCES."""

    def predicted_ttft_ms(self, decision: Any) -> float | None:
        """How long the first token was expected to take from there."""


class Record(msgspec.Struct, frozen=True, eq=False):
    """A request that is over, as the decisions keep it: called, it is spelled out for `explain`.

    Of the request only this: the ring holds many records, and a chain or a stranger's long name is large. Few objects,
    since each is given back long after it was last touched.
    """

    decision_id: str
    traceparent: bytes
    at_ns: int
    tenant: str
    model: str
    prompt_bytes: int
    outcome: Outcome
    status: int
    ttft_ms: float | None
    duration_ms: float
    attempts: list[tuple[str, str]]
    usage: Usage | None
    decision: Any
    reasons: Reasons

    def __call__(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "decision": self.decision_id,
            "trace_id": context.trace_id(self.traceparent),
            "at_unix_ms": self.at_ns // 1_000_000,
            "tenant": self.tenant,
            "model": self.model,
            "prompt_bytes": self.prompt_bytes,
            "outcome": self.outcome.reason,
            "status": self.status,
            "ttft_ms": self.ttft_ms,
            "duration_ms": self.duration_ms,
            "attempts": [{"target": target, "outcome": how} for target, how in self.attempts],
            "usage": None
            if usage is None
            else {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "reasons": self.reasons.record(self.decision) if self.decision is not None else None,
        }


class Observer:
    """Sees every request of one tier. `name` is the root span's: `farhop.global`, `farhop.regional`. Of requests whose
    clients ask to have them traced, `traced_per_s_max` are; the others go by our own sampling."""

    def __init__(
        self,
        name: str,
        decide: str,
        tracing: Tracing,
        metrics: TierMetrics,
        decisions: Decisions,
        clock: Clock,
        rng: Random,
        reasons: Reasons,
        traced_per_s_max: float = 100.0,
    ) -> None:
        self._name, self._decide = name, decide
        self._asks_per_s, self._asks, self._asked_at = traced_per_s_max, traced_per_s_max, 0.0
        self._tracing, self._metrics, self._decisions = tracing, metrics, decisions
        self._clock, self._rng, self._reasons = clock, rng, reasons
        # Whether a request for this model may be recorded here by the law of now; the tier sets it.
        self.may_record: Callable[[Caller, str], bool] = lambda _caller, _model: True
        self._hops: dict[tuple[str, str], Visit] = {}  # by issuer and its name for the attempt: from head to end

    # -- before the journey

    def begin(self) -> Visit:
        """A head is here. Nothing is traced of those who are not let in."""
        self._metrics.begun()
        return Visit(_UNTRACED, self._clock.now())

    def admitted(self, visit: Visit, head: Head, *, outside: bool) -> None:
        """It is known who asks. Whoever comes from `outside` may have only so many requests traced by asking for it."""
        parent, known = head.known.get(b"traceparent"), head.known
        if parent is not None and outside and context.asks(parent) and not self._may_ask(visit.arrived_at):
            parent = context.unasked(parent)
        visit.trace = self._tracing.begin(
            parent, known.get(b"tracestate"), self._name, self._clock.wall_ns(visit.arrived_at), self._rng
        )

    def _may_ask(self, now: float) -> bool:
        """A bucket that holds a second's worth."""
        self._asks = min(self._asks_per_s, self._asks + (now - self._asked_at) * self._asks_per_s)
        self._asked_at = now
        if self._asks < 1.0:
            return False
        self._asks -= 1.0
        return True

    def came(self, visit: Visit, caller: Caller) -> None:
        """It is an attempt of another balancer, which may ask later whether it is here."""
        self._hops[caller.issuer, caller.attempt] = visit

    def quiet_s(self, issuer: str, attempt: str) -> float | None:
        """Seconds since something of this attempt's answer, or it, came to us; None if it is not here, or is over."""
        visit = self._hops.get((issuer, attempt))
        if visit is None:
            return None
        run = visit.journey.attempt if visit.journey is not None else None
        return self._clock.now() - (visit.arrived_at if run is None else run.heard_at)

    def mute(self, visit: Visit) -> None:
        """The law keeps records of this request away from here."""
        visit.recorded = False
        visit.trace.mute()

    def turned_away(self, visit: Visit, reason: Outcome, status: int) -> None:
        """Over before its journey: answered from the door, cut short while it was read, or left by its client."""
        if reason.source is Source.LAW:
            self.mute(visit)  # who may not be read here is not recorded here either
        self._finish(visit, reason, status, self._clock.now())

    def advised(self, visit: Visit, request: Request, decision: Any) -> None:
        """A decision was asked for; it is told and nothing else is done."""
        now = self._clock.now()
        if visit.trace.sampled:
            since_ns, now_ns = self._clock.wall_ns(visit.since), self._clock.wall_ns(now)
            visit.trace.child(self._decide, since_ns, now_ns, self._reasons.attributes(decision))
        self._keep(visit, request, decision, outcome.ADVISED, 200, now)

    # -- the journey

    def upstream_context(self, visit: Visit) -> bytes:
        """Trace context header lines for the attempt under way."""
        span = visit.relay_span or visit.trace
        state = visit.trace.tracestate
        tail = b"tracestate: " + state + b"\r\n" if state else b""
        return b"traceparent: " + span.traceparent + b"\r\n" + tail

    def forwarded(self, journey: Journey) -> None:
        """An attempt is on its way: the decision behind it is a span of its own, and so is the attempt."""
        visit: Visit = journey.context
        visit.journey = journey
        if visit.trace.sampled:
            self._decided(journey, visit, journey.forwarded_at)
            visit.relay_span = visit.trace.open("farhop.relay", self._clock.wall_ns(journey.forwarded_at))

    def _decided(self, journey: Journey, visit: Visit, now: float) -> None:
        """The spans of what led to a decision just taken: the wait in the queue, if any, and the decision itself."""
        now_ns = self._clock.wall_ns(now)
        if journey.hold_from is not None:
            visit.trace.child(f"{self._name}.queue", self._clock.wall_ns(journey.hold_from), now_ns)
            visit.since = now
            journey.hold_from = None
        if journey.reasons is not None and journey.reasons is not visit.decided:
            said = self._reasons.attributes(journey.reasons)
            visit.trace.child(self._decide, self._clock.wall_ns(visit.since), now_ns, said)
            visit.decided = journey.reasons

    def spilled(self, to: str) -> None:
        """An attempt went past a region that is hot or not fully returned to."""
        self._metrics.spilled(to)

    def versioned(self, journey: Journey, version: str, split: str, status: int) -> None:
        """A request that is over was served in this version of its model, which it got by this word of a split."""
        ttft_s = journey.began_at - journey.context.arrived_at if journey.began_at and journey.status < 400 else None
        self._metrics.versioned(version, split, status, ttft_s)

    def attempt_over(self, journey: Journey, attempt: AttemptRun | PrefillRun, reason: Outcome) -> None:
        """An attempt ended."""
        visit: Visit = journey.context
        target, span = attempt.target, visit.relay_span
        self._metrics.attempted(target, reason)
        visit.attempts.append((target, reason.reason))
        visit.relay_span = None
        if not visit.trace.sampled:
            return
        visit.since = self._clock.now()
        if span is None:
            return
        said: dict[str, Value] = {a.ATTEMPT: attempt.number, a.OUTCOME: reason.reason}
        if attempt.status:
            said[a.STATUS] = attempt.status
        failed = reason is not outcome.SERVED
        span.end(self._clock.wall_ns(visit.since), said, reason.reason if failed else None)

    def concluded(self, journey: Journey, reason: Outcome, status: int, usage: Usage | None) -> None:
        """The request is over."""
        visit: Visit = journey.context
        if visit.over:
            return
        now = self._clock.now()
        if visit.recorded and visit.caller is not None and not self.may_record(visit.caller, journey.request.model):
            self.mute(visit)  # the law changed while it was under way
        if usage is not None:
            self._metrics.used(usage)
            if usage.cached_tokens is not None and journey.reasons is not None:
                reasons, decision = self._reasons, journey.reasons
                predicted = reasons.predicted_hit_tokens(decision)
                self._metrics.prefix(reasons.hit_source(decision), predicted, usage.cached_tokens)
        if visit.trace.sampled:
            self._decided(journey, visit, now)  # one that sent it nowhere, or that a later one overtook
        ttft_ms = (journey.began_at - visit.arrived_at) * 1e3 if journey.began_at else None
        self._keep(visit, journey.request, journey.reasons, reason, status, now, usage, ttft_ms)
        self._finish(visit, reason, status, now, journey, usage)

    def _request_attributes(self, journey: Journey, usage: Usage | None) -> dict[str, Value]:
        request, visit = journey.request, journey.context
        said: dict[str, Value] = {
            a.OPERATION: visit.kind or "",
            a.REQUEST_MODEL: request.model,
            a.REQUEST_STREAM: request.stream,
            a.TENANT: request.tenant,
            a.DECISION: visit.decision_id,
            a.PROMPT_BYTES: request.prompt_bytes,
            a.ATTEMPTS: len(visit.attempts),
        }
        if usage is not None:
            said |= {a.INPUT_TOKENS: usage.prompt_tokens, a.OUTPUT_TOKENS: usage.completion_tokens}
            if usage.cached_tokens is not None:
                said[a.CACHED_TOKENS] = usage.cached_tokens
        return said

    def _finish(
        self,
        visit: Visit,
        reason: Outcome,
        status: int,
        now: float,
        journey: Journey | None = None,
        usage: Usage | None = None,
    ) -> None:
        if visit.over:
            return
        visit.over, visit.journey = True, None
        if visit.caller is not None and visit.caller.attempt:
            self._hops.pop((visit.caller.issuer, visit.caller.attempt), None)
        ttft_s = tpot_s = None
        target = ""
        # An engine's error comes fast: as a first token it would make a broken replica look quick.
        if journey is not None and journey.began_at and journey.status < 400:
            ttft_s = journey.began_at - visit.arrived_at
            target = journey.forward.target if journey.forward is not None else ""
            if journey.request.stream:  # an answer in one piece does not show its first token
                self._compare(journey)
                if usage is not None and usage.completion_tokens > 1 and reason is outcome.SERVED:
                    tpot_s = (now - journey.began_at) / (usage.completion_tokens - 1)
        self._metrics.finished(reason, status, now - visit.arrived_at, ttft_s, tpot_s, target)
        if not visit.trace.sampled:
            return
        said = self._request_attributes(journey, usage) if journey is not None else {}
        said |= {a.OUTCOME: reason.reason, a.STATUS: status}
        if ttft_s is not None:
            said[a.TTFT_MS] = ttft_s * 1e3
        visit.trace.end(self._clock.wall_ns(now), said, None if reason in _WELL else reason.reason)

    def _compare(self, journey: Journey) -> None:
        """The promise that the choice rested on against what came of it."""
        promised_ms = None if journey.reasons is None else self._reasons.predicted_ttft_ms(journey.reasons)
        if promised_ms is not None:
            self._metrics.promised(promised_ms, (journey.began_at - journey.forwarded_at) * 1e3)

    def _keep(
        self,
        visit: Visit,
        request: Request,
        decision: Any,
        reason: Outcome,
        status: int,
        now: float,
        usage: Usage | None = None,
        ttft_ms: float | None = None,
    ) -> None:
        if not visit.recorded:
            return
        arrived_at = visit.arrived_at
        # Of the request only this: the ring holds many records, and a chain or a stranger's long name is large.
        record = Record(
            decision_id=visit.decision_id,
            traceparent=visit.trace.traceparent,
            at_ns=self._clock.wall_ns(arrived_at),
            tenant=request.tenant,
            model=request.model[:MODEL_CHARS_MAX],
            prompt_bytes=request.prompt_bytes,
            outcome=reason,
            status=status,
            ttft_ms=ttft_ms,
            duration_ms=(now - arrived_at) * 1e3,
            attempts=visit.attempts,
            usage=usage,
            decision=decision,
            reasons=self._reasons,
        )
        self._decisions.put(visit.decision_id, record)


class ObservedTier:
    """The part of a relay's Tier that only watches. A tier adds the headers it writes."""

    def __init__(self, observer: Observer, log: Throttled) -> None:
        self.observer, self._log = observer, log

    def forwarded(self, journey: Journey) -> None:
        """See relay.Tier."""
        self.observer.forwarded(journey)

    def attempt_over(self, journey: Journey, attempt: AttemptRun | PrefillRun, reason: Outcome) -> None:
        """See relay.Tier."""
        self.observer.attempt_over(journey, attempt, reason)

    def concluded(self, journey: Journey, reason: Outcome, status: int, usage: Usage | None) -> None:
        """See relay.Tier."""
        self.observer.concluded(journey, reason, status, usage)

    def redirect_url(self, journey: Journey, base: str) -> str:  # noqa: ARG002 - a tier that redirects has its own
        """See relay.Tier."""
        return base

    def fault(self, journey: Journey | None, error: Exception) -> None:
        """A bug in the machine: its trace goes to the log, never to a client."""
        trace_id = journey.context.trace.trace_id if journey is not None else ""
        self._log.error("the machine failed", type(error).__name__, exc_info=error, trace_id=trace_id)
