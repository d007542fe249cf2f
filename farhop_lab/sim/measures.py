"""What a simulated run has shown: each request's record, each region's use over time, and violations.

Invariants: an arrival is concluded once, or counts as a violation; the digest covers all events given to machines and
all their commands, so equal digests mean equal runs. Bounded: beyond RECORDS_MAX requests only counts continue.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import xxhash

from farhop.balance import machine
from farhop.balance.outcome import SERVED, Source

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from farhop.balance.machine import Command, Event
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.timeline import Timeline

RECORDS_MAX = 2_000_000
LINES_MAX = 1_000_000
FIRST_VIOLATIONS_MAX = 100


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """One concluded request. Times are the timeline's seconds; `ttft_ms` is None if no first byte came. `region`
    answered it, "" if none did; `direct`: it came straight to its region, past the global tier. Tokens are as the
    engine counts them, 0 if the answer is incomplete; `cached_tokens` of the prompt's were in its cache.
    """

    id: str
    tenant: str
    entry: str
    region: str
    outcome: str
    arrived_at: float
    ended_at: float
    ttft_ms: float | None
    attempts: int
    direct: bool = False
    session: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0

    @property
    def served(self) -> bool:
        """Whether the answer is complete."""
        return self.outcome == SERVED.reason

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds between tokens; None for fewer than two tokens or an incomplete answer."""
        if not self.served or self.ttft_ms is None or self.answer_tokens < 2:
            return None
        return ((self.ended_at - self.arrived_at) * 1e3 - self.ttft_ms) / (self.answer_tokens - 1)


class OpenRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that is not concluded yet."""

    tenant: str
    entry: str
    arrived_at: float
    id: str = ""


class Use(msgspec.Struct, frozen=True, gc=False):
    """A region's use over an interval that ends at `at`: requests there over its slots, at the end and at the peak;
    above 1, requests wait.

    Of its engines, as last scraped (at most 0.5 s ago): requests waiting and running, the share of engines that have
    requests (`busy`), and the mean share of their KV caches in use.
    """

    at: float
    share: float
    peak: float
    waiting: int = 0
    running: int = 0
    busy: float = 0.0
    kv: float = 0.0


def use_of(at: float, share: float, peak: float, engines: Collection[tuple[int, int, float]]) -> Use:
    """A region's use; `engines` by their metrics (waiting, running, share of the KV cache)."""
    count = len(engines)
    if not count:
        return Use(at, share, peak)
    waiting = running = busy = 0
    kv = 0.0
    for waits, runs, used in engines:
        waiting += waits
        running += runs
        busy += waits + runs > 0
        kv += used
    return Use(at, share, peak, waiting, running, busy / count, kv / count)


class Journal:
    """All events and commands of all machines as one digest; with `keep`, also as lines."""

    def __init__(self, timeline: Timeline, *, keep: bool = False) -> None:
        self._timeline = timeline
        self._hash = xxhash.xxh3_64()
        self.lines: list[str] | None = [] if keep else None
        self.violations = 0
        self.first_violations: list[str] = []
        self.hushed = False

    def violations_only(self) -> None:
        """From now on record only violations: for runs of which only figures are needed."""
        self.hushed = True

    @property
    def digest(self) -> str:
        """16 hex digits."""
        return self._hash.hexdigest()

    def note(self, name: str, event: Event, commands: Sequence[Command]) -> None:
        """A machine got an event."""
        if self.hushed:
            return
        line = f"{self._timeline.now:.9f} {name} {_event(event)}" + "".join(f" > {_command(c)}" for c in commands)
        self._hash.update(line.encode())
        if self.lines is not None and len(self.lines) < LINES_MAX:
            self.lines.append(line)

    def violated(self, what: str) -> None:
        """Something happened that must never happen."""
        self.violations += 1
        if len(self.first_violations) < FIRST_VIOLATIONS_MAX:
            self.first_violations.append(f"{self._timeline.now:.3f} s: {what}")


def _event(event: Event) -> str:
    kind = type(event).__name__
    if isinstance(event, machine.RequestArrived):
        return f"{kind} {event.request.id} {event.request.tenant} {event.request.prompt_bytes}"
    if isinstance(event, machine.AttemptFailed | machine.AttemptRefused):
        return f"{kind} {event.id} {event.attempt} {event.outcome.reason}"
    values = [getattr(event, name) for name in _noted(type(event))]
    return " ".join([kind, *[str(value) for value in values if value is not None]])


@cache
def _noted(kind: type[Event]) -> tuple[str, ...]:
    """The fields of this kind of event that the digest covers."""
    return tuple(name for name in ("id", "attempt", "region", "target", "up", "ok") if hasattr(kind, name))


def _command(command: Command) -> str:
    kind = type(command).__name__
    if isinstance(command, machine.Forward):
        return f"{kind} {command.id} {command.attempt} {command.target}"
    if isinstance(command, machine.Answer):
        return f"{kind} {command.id} {command.outcome.reason}"
    if isinstance(command, machine.SetTimer):
        return f"{kind} {command.id} {command.at:.6f}"
    return f"{kind} {getattr(command, 'id', '')}"


class Measures:
    """See the module's head."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.arrived = 0
        self.concluded = 0
        self.records: list[RequestRecord] = []
        self.outcomes: Counter[str] = Counter()
        self.served: Counter[tuple[str, str]] = Counter()  # by (entry, region)
        self.refusals: Counter[tuple[str, str]] = Counter()  # refusals of a region to the global tier, by reason
        self.ejections: Counter[tuple[str, str]] = Counter()  # by (region, replica), for failed requests
        self.ejections_healthy = 0  # of those, of replicas without a fault
        self.use: dict[str, list[Use]] = {}
        self._open: dict[str, OpenRequest] = {}

    @property
    def violations(self) -> int:
        """How often each violation happened. `journal.first_violations` has the first ones."""
        return self.journal.violations

    @property
    def open(self) -> int:
        """The number of arrivals that are not concluded."""
        return len(self._open)

    def add_arrival(self, request_id: str, tenant: str = "", entry: str = "", at: float = 0.0) -> None:
        """A request arrived."""
        self.arrived += 1
        self._open[request_id] = OpenRequest(tenant, entry, at, request_id)

    def add_record(self, record: RequestRecord) -> None:
        """A request was concluded."""
        if record.id not in self._open:
            self.journal.violated(f"{record.id} was concluded twice, the second time as {record.outcome}")
            return
        del self._open[record.id]
        self.concluded += 1
        self.outcomes[record.outcome] += 1
        if record.region:
            self.served[record.entry, record.region] += 1
        if len(self.records) < RECORDS_MAX:
            self.records.append(record)

    def refused(self, region: str, outcome: Outcome) -> None:
        """A region refused a request to the global tier."""
        if outcome.source is not Source.CLIENT:
            self.refusals[region, outcome.reason] += 1

    def ejected(self, region: str, replica: str, *, times: int, healthy: bool) -> None:
        """A region ejected a replica for failed requests; `healthy`: it had no fault."""
        self.ejections[region, replica] += times
        self.ejections_healthy += times if healthy else 0

    # -- questions

    def unfinished(self) -> list[OpenRequest]:
        """The arrivals that are not concluded."""
        return list(self._open.values())

    def ttft_ms(self, tenant: str | None = None, since: float = 0.0) -> list[float]:
        """Times to the first byte, ascending, of requests that arrived at `since` or later."""
        return sorted(f.ttft_ms for f in self._of(tenant, since) if f.ttft_ms is not None)

    def _of(self, tenant: str | None, since: float) -> Iterator[RequestRecord]:
        return (f for f in self.records if f.arrived_at >= since and tenant in (None, f.tenant))

    def peak(self, region: str | None = None, since: float = 0.0) -> float:
        """The highest use of a region, or of all regions; 0 if nothing was measured."""
        measured = [self.use[region]] if region is not None else self.use.values()
        return max((use.peak for uses in measured for use in uses if use.at > since), default=0.0)


def quantile(ascending: Sequence[float], share: float) -> float:
    """The value that `share` (0..1) of a sorted sequence does not exceed (nearest rank). ValueError if it is empty."""
    if not ascending:
        raise ValueError("a quantile of nothing: measure something first")
    return ascending[min(len(ascending) - 1, max(0, -int(-share * len(ascending) // 1) - 1))]
