"""What was recently cached at which replica, in order of use: for the peers of this region.

Unlike farhop.balance.prefix.journal, which reports the region as a whole, this informs peers replica by replica; they
replay it, and their mirrors then age as this one does, so that evictions need not be sent. Invariants: every entry is
kept with the audience that the law allows, and with that law: a law that lets fewer regions know revokes all earlier
audiences; entries and nodes are bounded, and a reader further behind continues from the oldest there is. Never decides.
"""

from __future__ import annotations

import msgspec

ENTRIES_MAX = 65_536
NODES_MAX = 524_288  # in all entries together: 8 B each, some 36 B more where the trie has let go of one


_NOBODY: frozenset[str] = frozenset()


class Cached(msgspec.Struct, frozen=True, gc=False):
    """A replica began to serve this path. `audience`: regions that may know, None for all. `own`: we sent it there."""

    replica: str
    chain: tuple[int, ...]
    audience: frozenset[str] | None
    own: bool = False


class Recent:
    """`seq` numbers entries from 1; those kept are above `floor`."""

    def __init__(self, entries_max: int = ENTRIES_MAX, nodes_max: int = NODES_MAX) -> None:
        self._entries_max, self._nodes_max = entries_max, nodes_max
        self._entries: dict[int, Cached] = {}
        self._n_nodes = 0
        self._narrowed_at = 0  # audiences up to this seq were judged by a law that let more know
        self.seq = self.floor = 0

    def narrowed(self) -> None:
        """The law allows fewer regions to know than before: remembered entries may be known nowhere, until they are
        cached again."""
        self._narrowed_at = self.seq

    def add(self, entry: Cached) -> None:
        """Remember one more, and forget the oldest if there are too many."""
        self.seq += 1
        self._entries[self.seq] = entry
        self._n_nodes += len(entry.chain)
        while len(self._entries) > self._entries_max or self._n_nodes > self._nodes_max:
            self.floor += 1
            self._n_nodes -= len(self._entries.pop(self.floor).chain)

    def reaches(self, seq: int) -> bool:
        """Whether all entries after `seq` are still kept."""
        return self.floor <= seq <= self.seq

    def read(self, seq: int, all_until: int, nodes_max: int) -> tuple[int, list[Cached]]:
        """What came after `seq`: everything up to `all_until`, from there on our own. The seq reached, and entries,
        each with the audience that holds by the law of now.

        About `nodes_max` nodes and regions of audiences, but one entry at least, if there is one.
        """
        entries: list[Cached] = []
        n_nodes = 0
        seq = max(seq, self.floor)
        while seq < self.seq and n_nodes < nodes_max:
            seq += 1
            entry = self._entries[seq]
            if entry.own or seq <= all_until:
                taken_back = seq <= self._narrowed_at and entry.audience != _NOBODY
                entries.append(msgspec.structs.replace(entry, audience=_NOBODY) if taken_back else entry)
                n_nodes += len(entry.chain) + len(entry.audience or ())
        return seq, entries
