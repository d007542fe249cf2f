"""The last decisions, kept for `farhop explain` in a bounded ring. Never holds a prompt or an answer."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop.telemetry import context as trace_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farhop.balance.machine import Usage
    from farhop.balance.outcome import Outcome
    from farhop.service.process.clock import Clock
    from farhop.telemetry.attributes import Value

DECISIONS_MAX = 10_000


class Reasons(Protocol):
    """Describes a tier's decisions."""

    def attributes(self, decision: Any) -> dict[str, Value]:
        """The attributes of the decision's span."""

    def record(self, decision: Any) -> dict[str, Any]:
        """The record of the decision that `explain` shows."""

    def predicted_hit(self, decision: Any) -> tuple[float, str]:
        """How many prompt tokens were expected to be cached at the chosen target, and the source of that figure: one of
        telemetry.metrics.HIT_SOURCES."""

    def predicted_ttft_ms(self, decision: Any) -> float | None:
        """How long the first token was expected to take from there."""


class DecisionRecord(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request that is over, as the decisions keep it: called, it is spelled out for `explain`.

    Of the request only this: the ring holds many records, and a chain or a stranger's long name is large. Few objects,
    since each is given back long after it was last touched.
    """

    decision_id: str
    traceparent: bytes
    at: float  # by the clock
    tenant: str
    key: str  # by its name in the law
    narrow: tuple[tuple[str, ...], ...]
    model: str
    asked_for: str  # the name that its client gave, if that stands for `model`; else empty
    prompt_bytes: int
    outcome: Outcome
    status: int
    ttft_ms: float | None
    duration_ms: float
    attempts: tuple[tuple[str, str], ...]
    usage: Usage | None
    given: Any  # request_telemetry.CacheUse, or None
    decision: Any
    reasons: Reasons
    clock: Clock

    def __call__(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "decision": self.decision_id,
            "trace_id": trace_context.trace_id(self.traceparent),
            "at_unix_ms": self.clock.wall_ns(self.at) // 1_000_000,
            "tenant": self.tenant,
            "model": self.model,
            "asked_for": self.asked_for or self.model,
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
            "answer_cache": None if self.given is None else msgspec.to_builtins(self.given),
            "reasons": self.reasons.record(self.decision) if self.decision is not None else None,
        }


class Decisions:
    """Records by decision id; the oldest is dropped first. A record is a function, called only when it is read.
    `narrowed` are called if the law allows fewer records here than before, for readers that keep what they read.
    `_doubtful` records are still to be checked by another law; none is read that may not stay.
    """

    __slots__ = ("_doubtful", "_may_stay", "_most", "_records", "narrowed")

    def __init__(self, most: int = DECISIONS_MAX) -> None:
        self._most = most
        self._records: OrderedDict[str, Callable[[], dict[str, Any]]] = OrderedDict()
        self._doubtful: dict[str, None] = {}
        self._may_stay: Callable[[Any], bool] = bool
        self.narrowed: list[Callable[[], None]] = []

    def put(self, decision_id: str, record: Callable[[], dict[str, Any]]) -> None:
        """Keep a record."""
        self._records[decision_id] = record
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def forget_unless(self, may_stay: Callable[[Any], bool]) -> Iterator[None]:
        """Keep no other records than those that may stay. They are judged one by one, as it is iterated; whoever reads
        one before has it judged first. What is unjudged when this is called again is forgotten: the law between
        may have forbidden it."""
        for name in self._doubtful:
            self._records.pop(name, None)
        self._doubtful, self._may_stay = dict.fromkeys(self._records), may_stay
        return self._judge_each(self._doubtful)

    def _judge_each(self, doubtful: dict[str, None]) -> Iterator[None]:
        while doubtful and doubtful is self._doubtful:
            self._recheck(doubtful.popitem()[0])
            yield

    def _recheck(self, name: str) -> None:
        self._doubtful.pop(name, None)
        record = self._records.get(name)
        if record is not None and not self._may_stay(record):
            del self._records[name]

    def _read(self, name: str) -> Callable[[], dict[str, Any]] | None:
        if name in self._doubtful:
            self._recheck(name)
        return self._records.get(name)

    def get(self, decision_id: str) -> dict[str, Any] | None:
        """The record as JSON-ready data; None if it is unknown or long ago."""
        record = self._read(decision_id)
        return record() if record is not None else None

    def last(self, most: int) -> list[dict[str, Any]]:
        """The newest records, newest first."""
        found = [self._read(name) for name in list(islice(reversed(self._records), most))]
        return [record() for record in found if record is not None]

    def newest(self, most: int) -> list[str]:
        """The newest decisions by id, the newest first; none of them is spelled out."""
        names = list(islice(reversed(self._records), most))
        return [name for name in names if self._read(name) is not None]

    def __len__(self) -> int:
        return len(self._records)
