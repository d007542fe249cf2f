"""Streams to a global balancer which prefixes this region has cached: a snapshot in slices, then changes, sent at once
or, if there are many, together with those of the next 20 ms.

A stream is an iterator over messages and pauses. Invariants: a prefix that the law keeps from the reader's region is
never sent, neither when it is cached nor when it is evicted, and nothing is sent under another law than the reader's,
or another map of where the reader's region is (older readers do not send theirs); at most one slice of work is done
between two pauses; the rate is bounded, and a reader that falls behind the journal begins again. Never decides, never
awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from farhop_wire import region_pb2

from farhop.balance.prefix.journal import Cleared, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from farhop.balance.prefix.journal import Change
    from regional_lb.scheduler.flow import RegionalFlow

    Steps = Generator[region_pb2.PrefixDelta | "Pause", None, None]  # send this; or do nothing for a while

NODES_PER_S = 50_000  # to each reader: 0.4 MB/s
BATCH_S = 0.02
LOOK_S = 0.05  # between two looks while there is something to sweep
IDLE_S = 5.0  # with nothing to send or to sweep: events wake a reader, so nothing depends on this
SLICE_NODES = 2000
SWEEP_NODES = 1000
KEEP_S = 60.0  # after the last reader has left, its way back in is kept open for this long


class Pause(NamedTuple):
    """So many seconds; with `wakes` only until something happens (`PrefixPublisher.wakes`), but `rest_s` before that in
    any case. 0: others may run."""

    seconds: float
    wakes: bool = False
    rest_s: float = 0.0


class PrefixPublisher:
    """The streams of one regional balancer. `nodes_per_s` bounds each of them; a second's worth may go at once."""

    def __init__(
        self, instance: str, flow: RegionalFlow, clock: Callable[[], float], incarnation: int, nodes_per_s: int
    ) -> None:
        self._instance, self._flow, self._clock = instance, flow, clock
        self._incarnation, self._nodes_per_s = incarnation, nodes_per_s
        self._journal = flow.replicas.journal
        self._delta_made: tuple[int, int, list[Change], region_pb2.PrefixDelta] | None = None
        self.snapshots = 0
        self._left_at: float | None = None
        self.readers = 0

    def _same_law(self, request: region_pb2.PrefixesRequest) -> bool:
        law = self._flow.law
        return law.epoch == request.law_epoch and request.places in (0, law.places_of(request.region))

    def _delta(self, **fields: Any) -> region_pb2.PrefixDelta:
        return region_pb2.PrefixDelta(instance=self._instance, incarnation=self._incarnation, **fields)

    def delta(self, after: int, seq: int, changes: list[Change]) -> region_pb2.PrefixDelta:
        """What happened between the two. Not to be changed: readers who are as far and may know as much get one and
        the same, since to make it is most of what telling them takes."""
        made = self._delta_made
        if made is None or made[:2] != (after, seq) or made[2] != changes:
            message = self._delta(after=after, seq=seq)
            for change in changes:
                _add(message, change)
            made = self._delta_made = after, seq, changes, message
        return made[3]

    def knows(self, region: str) -> bool:
        """Whether the topology has this region."""
        nobody = self._flow.law.verdict("", "")  # a verdict parts all regions, whomever it is about
        return region in nobody.excluded or region in nobody.lawful

    @property
    def wakes(self) -> dict[Callable[[], None], None]:
        """The callbacks to call whenever a stream may have something to do; see Journal.wakes."""
        return self._journal.wakes

    def tidy(self) -> None:
        """Now and then: after a while without a reader nothing is kept for those that may come back."""
        if not self.readers and self._left_at is not None and self._clock() - self._left_at >= KEEP_S:
            self._left_at = None
            self._journal.stop_listening()

    def subscribe(self, request: region_pb2.PrefixesRequest) -> Steps:
        """Deltas go on from `known_seq` where the journal still reaches it, else a snapshot comes first. Nothing is
        told before our law is the asker's, and it ends when ours is a later one: the asker asks again, by what it has
        heard by then. Close it when the reader is gone."""
        self.readers += 1
        self._journal.listen()
        try:
            same = request.known_incarnation == self._incarnation
            stream = _Stream(self, request.region, request.known_seq if same else None)
            while self._flow.law.epoch < request.law_epoch:
                yield Pause(IDLE_S, wakes=True)
            if self._same_law(request) and same and self._journal.reaches(request.known_seq):
                yield self._delta(seq=request.known_seq, after=request.known_seq)  # so that it knows at once
            while self._same_law(request):
                sent = False
                for step in stream.steps():
                    sent = True
                    yield step
                    if not self._same_law(request):
                        return
                # The next turn of a conversation may come in a moment: send now what the last turn left.
                if self._flow.replicas.trie.sweeping:
                    yield Pause(BATCH_S) if sent else Pause(LOOK_S, wakes=True)
                else:
                    yield Pause(IDLE_S, wakes=True, rest_s=BATCH_S if sent else 0.0)
        finally:
            self.readers -= 1
            self._left_at = self._clock()


class _Stream:
    """One reader. `_sent`: what it was sent; `_at`: the position up to which the journal was read for it."""

    def __init__(self, publisher: PrefixPublisher, region: str, known_seq: int | None) -> None:
        self._publisher, self._region = publisher, region
        self._journal, self._clock = publisher._journal, publisher._clock
        self._sent = self._at = known_seq if known_seq is not None else -1
        self._allowed, self._allowed_at = float(publisher._nodes_per_s), publisher._clock()

    def steps(self) -> Steps:
        """All new changes, in steps."""
        journal, trie = self._journal, self._publisher._flow.replicas.trie
        while True:
            journal.under(self._publisher._flow.law.epoch)
            # What a cleared replica held is sent even if nothing else happens.
            trie.sweep(SWEEP_NODES)
            if not journal.reaches(self._at):
                yield from self._snapshot()
                continue  # the journal may have run past it meanwhile
            if self._at == journal.seq:
                return
            self._at, changes, n_nodes = journal.read(self._at, self._region, SLICE_NODES)
            if changes:
                yield self._publisher.delta(self._sent, self._at, changes)
                self._sent = self._at
            pause_s = self._pause_s(n_nodes)
            if not pause_s and self._at == journal.seq and not trie.sweeping:
                return  # mostly
            yield Pause(pause_s)

    def _snapshot(self) -> Steps:
        publisher, journal = self._publisher, self._journal
        publisher.snapshots += 1
        snapshot_id, number = publisher.snapshots, 0
        self._at = self._sent = journal.seq
        before: list[Stored] | None = None
        for paths in journal.snapshot(self._region, SLICE_NODES):
            if before and paths:
                yield self._slice(snapshot_id, number, before, last=False)
                number += 1
            yield Pause(self._pause_s(sum(len(path.nodes) for path in paths)))
            before = paths or before
        yield self._slice(snapshot_id, number, before or [], last=True)

    def _slice(self, snapshot_id: int, number: int, paths: list[Stored], *, last: bool) -> region_pb2.PrefixDelta:
        slice_ = region_pb2.PrefixSlice(snapshot_id=snapshot_id, slice=number, last=last, paths=map(_path, paths))
        return self._publisher._delta(seq=self._sent, slice=slice_)

    def _pause_s(self, n_nodes: int) -> float:
        """Seconds until this many nodes may be sent."""
        rate, now = self._publisher._nodes_per_s, self._clock()
        self._allowed = min(float(rate), self._allowed + (now - self._allowed_at) * rate) - n_nodes
        self._allowed_at = now
        return max(0.0, -self._allowed / rate)


def _path(path: Stored) -> region_pb2.PrefixPath:
    return region_pb2.PrefixPath(parent=path.parent, nodes=path.nodes)


def _add(message: region_pb2.PrefixDelta, change: Change) -> None:
    """Fill a change into a message in place: building it separately and copying it takes twice as long."""
    added = message.changes.add()
    if isinstance(change, Stored):
        stored = added.stored
        stored.parent = change.parent
        stored.nodes.extend(change.nodes)
    elif isinstance(change, Cleared):
        added.cleared.SetInParent()
    else:
        added.evicted.nodes.extend(change.nodes)
