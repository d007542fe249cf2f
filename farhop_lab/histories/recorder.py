"""Records the calls of machines and their results, at their driver. Never decides.

A history has the machine's genesis, and then one entry for each call: which (`names.CALLS`), when, its arguments and
its result. Calls that a machine makes on itself while it handles an event are not entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from farhop_lab.histories import names
from farhop_lab.histories.codec import Writer, dump, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

GENESIS, CALL, NOW = range(3)
GIVEN, CAME = 10, 30  # plus the call


class HistoryRecorder:
    """Records one history. After `calls_max` entries it records no more."""

    def __init__(
        self, name: str, genesis: tuple[Any, ...], made: Mapping[int, int] | None = None, calls_max: int = 1 << 62
    ) -> None:
        self.name, self.count, self._max = name, 0, calls_max
        self.flow: Any = None
        self._writer = Writer(names.TAGS, names.tag_of, made)
        self._writer.put(genesis, GENESIS)
        self._busy = False
        self._works = 0

    @property
    def taking(self) -> bool:
        """Whether the present call becomes an entry."""
        return not self._busy and self.count < self._max

    def call(self, call: int, now: float, given: Any) -> None:
        """A call begins. Its result follows in `came`."""
        self._writer.put(call, CALL)
        self._writer.put(now, NOW)
        self._writer.put(given, GIVEN + call)

    def came(self, call: int, what: Any) -> None:
        """The call's result: the entry is complete."""
        self._writer.put(what, CAME + call)
        self.count += 1

    def packed(self) -> list[Any]:
        """Plain data."""
        return [self.name, self.count, self._writer.packed()]

    # -- where drivers call machines

    def watch(self, flow: Any) -> Any:
        """Record the machine from now on; returns it."""
        self.flow, handle = flow, flow.handle

        def recorded(event: Any, now: float) -> Any:
            if not self.taking:
                return handle(event, now)
            self.call(names.HANDLE, now, event)
            self._busy = True
            try:
                commands = handle(event, now)
            finally:
                self._busy = False
            self.came(names.HANDLE, commands)
            return commands

        flow.handle = recorded
        if names.is_global(flow):
            flow.consider = self._considered(flow.consider)
        return flow

    def _considered(self, consider: Any) -> Any:
        """To ask what would be decided draws from the machine's random generator."""

        def recorded(
            request: Any, now: float, within: Any = None, without: Any = frozenset(), verdict: Any = None
        ) -> Any:
            if not self.taking:
                return consider(request, now, within, without, verdict)
            self.call(names.CONSIDER, now, (request, within, without))
            decision = consider(request, now, within, without, verdict)  # which only repeats the law
            self.came(names.CONSIDER, names.reasons_of(decision))
            return decision

        return recorded

    def work(self, call: int, now: float, given: Any, work: Iterator[None]) -> Iterator[None]:
        """Work done in steps, recorded step by step."""
        if not self.taking:
            yield from work
            return
        self.call(call, now, given)
        self.came(call, None)
        number, self._works = self._works, self._works + 1
        while True:
            taking = self.taking
            if taking:
                self.call(names.STEP, now, number)
            try:
                next(work)
            except StopIteration:
                came = names.DONE
            except names.Gap:
                if taking:
                    self.came(names.STEP, names.GAP)
                raise
            else:
                came = names.GOES_ON
            if taking:
                self.came(names.STEP, came)
            if came == names.DONE:
                return
            yield


class RecordingSession:
    """The machines that are recorded in this process, and their inputs besides events. `patches` must be in force while
    they are made and run. `report_every_s`: how often a report is kept for comparison.
    """

    def __init__(self, report_every_s: float = 1.0) -> None:
        self.recorders: list[HistoryRecorder] = []
        self._every_s = report_every_s
        self._by_trie: dict[int, HistoryRecorder] = {}
        self._by_flow: dict[int, HistoryRecorder] = {}
        self._reported: dict[int, float] = {}
        self._begun: dict[int, int] = {}

    def add(self, recorder: HistoryRecorder, flow: Any) -> Any:
        """Record this machine from now on; returns it."""
        self.recorders.append(recorder)
        self._by_flow[id(flow)] = recorder
        if names.is_global(flow):
            self._by_trie[id(flow.regions.trie)] = recorder
        return recorder.watch(flow)

    def patches(self) -> list[Any]:
        """Patches of the prefix streams and reports."""
        streams, reporter = names.KnownPrefixes, names.RegionReporter
        begin, adopt, tidy, build = streams.begin, streams.adopt, streams.tidy, reporter.build

        def recorder_of(prefixes: Any) -> HistoryRecorder | None:
            recorder = self._by_trie.get(id(prefixes._trie))
            return recorder if recorder is not None and recorder.taking else None

        def begun(prefixes: Any, name: tuple[str, str]) -> Any:
            stream, recorder = begin(prefixes, name), recorder_of(prefixes)
            if recorder is None:
                return stream
            recorder.call(names.BEGIN, 0.0, name)
            recorder.came(names.BEGIN, (stream.known_incarnation, stream.known_seq))
            number = self._begun.get(id(recorder), 0)
            self._begun[id(recorder)] = number + 1
            return _Stream(recorder, number, stream)

        def adopted(prefixes: Any, law_epoch: int, places: int = 0) -> None:
            recorder = recorder_of(prefixes)
            if recorder is not None:
                recorder.call(names.ADOPT, 0.0, law_epoch)
                recorder.came(names.ADOPT, None)
            adopt(prefixes, law_epoch, places)

        def tidied(prefixes: Any, now: float) -> Iterator[None]:
            recorder, work = recorder_of(prefixes), tidy(prefixes, now)
            return work if recorder is None else recorder.work(names.TIDY, now, None, work)

        def built(reporter: Any) -> Any:
            recorder, now = self._by_flow.get(id(reporter._flow)), reporter._clock()
            if recorder is None or not recorder.taking:
                return build(reporter)
            last = self._reported.get(id(reporter), 0.0)
            due = now >= last + self._every_s
            if not due and not names.reading_writes(recorder.flow, now):
                return build(reporter)
            self._reported[id(reporter)] = now if due else last
            recorder.call(names.REPORT, now, due)
            report = build(reporter)
            recorder.came(names.REPORT, names.reported(report) if due else None)
            return report

        return [
            patch.object(streams, "begin", begun),
            patch.object(streams, "adopt", adopted),
            patch.object(streams, "tidy", tidied),
            patch.object(reporter, "build", built),
        ]


class _Stream:
    def __init__(self, recorder: HistoryRecorder, number: int, stream: Any) -> None:
        self._recorder, self._number, self._stream = recorder, number, stream
        self.known_incarnation, self.known_seq = stream.known_incarnation, stream.known_seq

    def take(self, message: Any, content: Any = None) -> Iterator[None]:
        return self._recorder.work(names.TAKE, 0.0, (self._number, message), self._stream.take(message, content))

    def ended(self, now: float) -> None:
        if self._recorder.taking:
            self._recorder.call(names.ENDED, now, self._number)
            self._recorder.came(names.ENDED, None)
        self._stream.ended(now)


def write(path: Path, recorders: Iterable[HistoryRecorder]) -> None:
    """One file of histories, without those that have no entry."""
    path.write_bytes(dump([recorder.packed() for recorder in recorders if recorder.count]))


def read(path: Path) -> list[list[Any]]:
    """The name, number of entries, and entries (for a codec.Reader) of each."""
    return load(path.read_bytes())  # type: ignore[no-any-return]
