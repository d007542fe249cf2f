"""The changes of a trie, in order, for other balancers: nodes added and evicted, and which regions may know of each.

The audience of a node is the set of regions that may learn of it. Invariants: a region outside a node's audience never
learns of the node, neither when it is added nor when it is evicted; the changes, replayed in order on a snapshot begun
at the same seq, give the set of nodes that the reader may know; the numbers of nodes and entries kept are bounded, and
a reader that is further behind starts again with a snapshot. Never holds text.

While nobody listens and nothing is restricted, the trie has no observer, and an insert costs nothing extra. Insert
through the journal: what is inserted into the trie directly is reported to no region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from farhop.balance.prefix.chain import DEPTH_MAX
from farhop.balance.prefix.nodes import NodeMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farhop.balance.prefix.trie import PrefixTrie

    Audience = frozenset[str] | None  # regions that may know; None: all

ENTRIES_MAX = 65_536
NODES_MAX = 262_144  # in all entries together: 8 B each in the tuples, some 36 B more once the trie has evicted it
ENTRY_NODES_MAX = 1024
RESTRICTED_MAX = 1 << 20
_NOBODY: frozenset[str] = frozenset()


class Stored(msgspec.Struct, frozen=True):
    """Some location now holds these consecutive nodes of one path; `parent` 0: the first is a root. Some may have been
    reported before.
    """

    parent: int
    nodes: tuple[int, ...]


class Evicted(msgspec.Struct, frozen=True):
    """No location holds these nodes any more; each comes before its parent."""

    nodes: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True):
    """No location holds anything any more."""


Change: TypeAlias = "Stored | Evicted | Cleared"


class _Entry(msgspec.Struct):
    what: Change | list[int]  # a list: evicted nodes, to which more may be added until it is read
    audience: Audience


class Journal:
    """The journal of one trie. `seq` numbers entries from 1; `epoch` is the epoch of the law that audiences are
    from.
    """

    def __init__(self, trie: PrefixTrie, entries_max: int = ENTRIES_MAX, nodes_max: int = NODES_MAX) -> None:
        self.trie, self.entries_max, self._nodes_max = trie, entries_max, nodes_max
        self.entries: dict[int, _Entry] = {}
        self.n_nodes = 0
        self.restricted = NodeMap()  # node -> its audience's place in `_audiences`
        self._audiences: list[frozenset[str]] = []
        self._places: dict[frozenset[str], int] = {}
        self._audience: Audience = _NOBODY  # of the current insert; a direct insert into the trie is reported to nobody
        self._recording = False
        self._sealed = 0  # the last entry that was read, to which nothing may be added
        self.epoch: int | None = None
        # Called in order at every entry, at every change of the law, and where something is to be swept: for readers
        # that wait for one of these.
        self.wakes: dict[Callable[[], None], None] = {}
        self.seq = 0
        self.floor = 0  # the entries kept are those above it

    # -- by the trie's owner

    def insert(self, location: str, chain: Sequence[int], audience: Audience) -> None:
        """The location caches this path now. `audience` (None: all regions) is added to the path's audience."""
        trie, store = self.trie, self.trie.store
        if audience is None and store.observer is None:
            trie.insert(location, chain)  # no reader, and nothing to withhold
            return
        if audience is not None and not self._may_restrict(len(chain)):
            return  # better no report than one whose audience is unknown
        store.observer = self
        if self.restricted.most:
            self._widen(chain, audience)  # first, so that no reader gets a node before its parent
        self._audience = audience
        try:
            trie.insert(location, chain)
        finally:
            self._audience = _NOBODY

    def under(self, epoch: int, *, widened: bool = False) -> None:
        """The law now has this epoch. Nodes inserted under another epoch may be known to no region until they are
        inserted again, unless the law `widened`: then every region that was allowed to know them still is.
        """
        if epoch == self.epoch:
            return
        before, self.epoch = self.epoch, epoch
        if not widened and before is not None:
            self.narrowed()
        self._wake()  # even if nothing changed for them: readers that asked under the former law must ask again

    def narrowed(self) -> None:
        """No region may know the nodes inserted until now, until they are inserted again. Readers that are behind are
        not sent them, either: entries with audiences of the former law are dropped.
        """
        self.entries.clear()
        self.n_nodes = 0
        self.floor = self.seq
        if self.trie.nodes:
            self.trie.observer = self
            self.restricted = NodeMap.alike(self.trie.shards, self._place(_NOBODY))
        self._record(Cleared(), None, 1)

    def _widen(self, chain: Sequence[int], audience: Audience) -> None:
        """Report again, run by run, held nodes of this path whose audience grows."""
        restricted = self.restricted
        parent, run, sent = 0, list[int](), audience
        for above, node in zip((0, *chain), chain, strict=False):
            known = self._known_to(node)
            wider = None if known is None or audience is None else known | audience
            is_wider = known is not None and wider != known
            if run and (not is_wider or wider != sent):
                self._record(Stored(parent, tuple(run)), sent, len(run))
                run = []
            if not is_wider:
                continue
            if wider is None:
                restricted.pop(node)
            else:
                restricted.put((node,), self._place(wider))
            if not run:
                parent, sent = above, wider
            run.append(node)
        if run:
            self._record(Stored(parent, tuple(run)), sent, len(run))

    def _may_restrict(self, more: int) -> bool:
        restricted = self.restricted
        return restricted.most + more <= RESTRICTED_MAX or len(restricted) + more <= RESTRICTED_MAX

    def _place(self, audience: frozenset[str]) -> int:
        """The audience's index in `_audiences`: there are few different ones."""
        if audience not in self._places:
            if not len(self.restricted):
                self._places, self._audiences = {}, []
            self._places[audience] = len(self._audiences)
            self._audiences.append(audience)
        return self._places[audience]

    def _known_to(self, node: int) -> Audience:
        place = self.restricted.get(node)
        return None if place is None else self._audiences[place]

    # -- by the trie

    def stored(self, parent: int, nodes: Sequence[int]) -> None:
        """See trie.TrieObserver."""
        if self._audience is not None:
            place, restricted = self._place(self._audience), self.restricted
            restricted.put([node for node in nodes if node not in restricted], place)
        self._record(Stored(parent, tuple(nodes)), self._audience, len(nodes))

    def evicted(self, node: int) -> None:
        """See trie.TrieObserver."""
        place = self.restricted.pop(node) if self.restricted.most else None
        audience = None if place is None else self._audiences[place]
        if not self._recording or audience == _NOBODY:
            return
        last = self.entries.get(self.seq)
        if (
            last is not None
            and self.seq > self._sealed
            and type(last.what) is list
            and last.audience == audience
            and len(last.what) < ENTRY_NODES_MAX
        ):
            last.what.append(node)
            self._bound(1)
        else:
            self._record([node], audience, 1)

    def cleared(self) -> None:
        """See trie.TrieObserver."""
        self.restricted = NodeMap()
        self._record(Cleared(), None, 1)

    def hidden(self) -> None:
        """See trie.TrieObserver: readers sweep."""
        self._wake()

    def _record(self, what: Stored | Cleared | list[int], audience: Audience, n_nodes: int) -> None:
        if not self._recording:
            return
        self.seq += 1
        self.entries[self.seq] = _Entry(what, audience)
        self._bound(n_nodes)
        self._wake()

    def _wake(self) -> None:
        for wake in tuple(self.wakes):
            wake()

    def _bound(self, n_nodes: int) -> None:
        self.n_nodes += n_nodes
        while len(self.entries) > self.entries_max or self.n_nodes > self._nodes_max:
            self.floor += 1
            gone = self.entries.pop(self.floor).what
            self.n_nodes -= 1 if isinstance(gone, Cleared) else len(gone if isinstance(gone, list) else gone.nodes)

    # -- by readers

    def listen(self) -> None:
        """Record from now on. What happened without a listener is lost: an earlier reader starts again with a
        snapshot."""
        if not self._recording:
            self._recording = True
            self.trie.observer = self
            self.seq += 1
            self.floor = self._sealed = self.seq

    def stop_listening(self) -> None:
        """Stop recording: there is no listener any more."""
        self._recording = False
        self.entries.clear()
        self.n_nodes = 0
        self.floor = self.seq
        if not len(self.restricted):
            self.trie.observer = None

    def reaches(self, seq: int) -> bool:
        """Whether a reader who has applied everything up to `seq` can go on from there."""
        return self._recording and self.floor <= seq <= self.seq

    def read(self, seq: int, region: str, nodes_max: int) -> tuple[int, list[Change], int]:
        """What happened after `seq` as far as `region` may know: the seq reached, the changes, their count of nodes.

        Stops before it exceeds `nodes_max`, but takes one entry at least, if there is one. `reaches(seq)` must hold.
        """
        changes: list[Change] = []
        n_nodes = 0
        while seq < self.seq:
            entry = self.entries[seq + 1]
            if entry.audience is None or region in entry.audience:
                change = entry.what
                if isinstance(change, list):
                    change = entry.what = Evicted(tuple(change))
                size = 1 if isinstance(change, Cleared) else len(change.nodes)
                if changes and n_nodes + size > nodes_max:
                    break
                changes.append(change)
                n_nodes += size
            seq += 1
        self._sealed = max(self._sealed, seq)
        return seq, changes, n_nodes

    def snapshot(self, region: str, nodes_max: int) -> Iterator[list[Stored]]:
        """All that `region` may know, in slices of about `nodes_max` nodes, parents first; the trie may change between
        two slices. Entries read from the seq at which the iteration began then complete it.
        """
        sent = NodeMap()
        work = 0  # in units of reporting one node of a path
        slice_: list[Stored] = []
        for node in self.trie.all_nodes():
            work += 1
            path = self._unsent(node, region, sent)
            if path:
                slice_.append(path)
                work += 3 + len(path.nodes)
            if work >= nodes_max:
                yield slice_
                slice_, work = [], 0
        yield slice_
        for count, _ in enumerate(sent.drain()):
            if count % (2 * nodes_max) == 0:
                yield []  # freeing this many takes time, too

    def _unsent(self, node: int, region: str, sent: NodeMap) -> Stored | None:
        """The path down to `node` from the first node that was not sent; marks it as sent."""
        if node in sent or not self.trie.is_held(node):
            return None
        nodes: list[int] = []
        restricted, parent = self.restricted, self.trie.parent
        while node and node not in sent:
            # Chains made to collide could lead above what the region may know.
            audience = self._known_to(node) if restricted.most else None
            if len(nodes) > DEPTH_MAX or (audience is not None and region not in audience):
                return None
            nodes.append(node)
            node = parent(node)
        sent.put(nodes)
        nodes.reverse()
        return Stored(node, tuple(nodes))
