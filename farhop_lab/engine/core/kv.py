"""A paged KV cache: blocks of tokens named by the hash of all text up to their end, shared, counted and evicted.

Pure: blocks are accounted for, not stored. Never grants more than it has. Invariants (`check` asserts them):
- blank + cached + referenced == capacity, none negative: no block is lost or counted twice;
- a full block is either referenced (count >= 1) or cached (count 0), never both;
- if a block is held, the block before it in its chain is held too (so a prefix match may stop at the first gap): a
  table references whole chains, and returns them leaf first, so that a leaf is always evicted before its parent.

Neighbours in a chain with the same state are one run, so that to share or return a chain costs its runs, not its
blocks. vLLM keeps duplicates of a block that two sequences compute at once; here the second takes a reference to the
first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class CacheLog(Protocol):
    """Receives evictions; the core itself logs stored blocks, as it knows their text."""

    def evicted(self, name: int) -> None:
        """A cached block made room for another."""

    def cleared(self) -> None:
        """All cached blocks are forgotten."""


class _Run:
    """Consecutive blocks of a chain, the first of them number `start`, all with the same number of `references`; what
    follows in any chain follows the last. `followers` counts the runs that do.
    """

    __slots__ = ("before", "followers", "names", "references", "start")

    def __init__(self, before: _Run | None, start: int, names: list[int], references: int) -> None:
        self.before, self.start, self.names, self.references = before, start, names, references
        self.followers = 0


class BlockTable:
    """The blocks of one sequence: `named` full ones, from the start of the text, then `private` unnamed ones."""

    __slots__ = ("_last", "named", "private")

    def __init__(self) -> None:
        self._last: _Run | None = None
        self.named = self.private = 0

    @property
    def blocks(self) -> int:
        """Blocks held by this table."""
        return self.named + self.private

    @property
    def end(self) -> int:
        """The name of the last full one; 0 if there is none."""
        return self._last.names[-1] if self._last is not None else 0

    @property
    def full(self) -> list[int]:
        """The names of all full ones, in order; read only."""
        runs = [run.names for run in _back(self._last)]
        return [name for names in reversed(runs) for name in names]


class PagedCache:
    """The blocks of one GPU. Tables are passed in; a table belongs to one cache for life."""

    __slots__ = ("_blank", "_cached", "_line", "_runs", "capacity", "evictions", "log", "private")

    def __init__(self, capacity: int, log: CacheLog | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"kv_blocks: {capacity} is below 1; a cache needs at least one block")
        self.capacity = capacity
        self.evictions = 0
        self.log = log
        self._blank = capacity
        self.private = 0
        self._cached = 0
        self._runs: dict[int, _Run] = {}  # by the name of every full block
        # Unreferenced ones, oldest first; the last block of each is evicted first.
        self._line: OrderedDict[_Run, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that a sequence could get now: blank ones, and cached ones it may evict."""
        return self._blank + self._cached

    @property
    def referenced(self) -> int:
        """Blocks in use by sequences."""
        return self.capacity - self._blank - self._cached

    @property
    def cached(self) -> int:
        """Full blocks kept for reuse that no sequence uses."""
        return self._cached

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1. As in vLLM, what is merely cached counts as free."""
        return self.referenced / self.capacity

    @property
    def names(self) -> set[int]:
        """Names of all full blocks; read only."""
        return set(self._runs)

    @property
    def line(self) -> list[int]:
        """The cached blocks in the order of eviction; read only."""
        return [name for run in self._line for name in reversed(run.names)]

    def references(self, name: int) -> int:
        """How many sequences hold the block."""
        run = self._runs.get(name)
        return run.references if run is not None else 0

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks of `chain` are held: all blocks before a held one are, too."""
        runs = self._runs
        return bisect_left(chain, True, key=lambda name: name not in runs)

    def unreferenced(self, chain: Sequence[int]) -> int:
        """How many of the held blocks `chain`, the start of some text, are merely cached."""
        count, end = 0, len(chain)
        for run in _back(self._runs[chain[-1]] if chain else None):
            if run.references:
                break
            count += end - run.start
            end = run.start
        return count

    def share(self, table: BlockTable, chain: Sequence[int]) -> None:
        """Reference the held blocks `chain` as the start of an empty `table`. KeyError if one is not held."""
        assert not table.blocks, "a prefix is shared before anything is grown"
        if chain:
            table._last = self._up_to(chain[-1], len(chain))
            table.named = len(chain)
            for run in _back(table._last):
                self._refer(run)

    def grow(self, table: BlockTable, blocks: int) -> bool:
        """Give `table` this many private blocks, evicting the oldest cached ones; False, and nothing changed, if there
        are too few.
        """
        if blocks > self._blank + self._cached:
            return False
        self.take(blocks)
        table.private += blocks
        return True

    def take(self, blocks: int) -> None:
        """As `grow`, for up to this many blocks, for tables that get them later."""
        while self._blank < blocks:
            self._evict(blocks - self._blank)
        self._blank -= blocks
        self.private += blocks

    def _evict(self, most: int) -> None:
        """Evict up to this many of the oldest blocks."""
        run = next(iter(self._line))
        gone = run.names[-most:]
        del run.names[-most:]
        if not run.names:
            del self._line[run]
            if run.before is not None:
                run.before.followers -= 1
        for name in reversed(gone):
            del self._runs[name]
            if self.log is not None:
                self.log.evicted(name)
        self._blank += len(gone)
        self._cached -= len(gone)
        self.evictions += len(gone)

    def fill(self, table: BlockTable, names: Sequence[int]) -> int:
        """The first private blocks of `table` are now full and have these `names`, in order. Returns how many of them,
        the first ones, were held before.
        """
        assert table.private >= len(names), "only private blocks can be filled"
        held = self.match(names)
        table.private -= len(names)
        self.private -= len(names)
        if held:
            known, table._last = table._last, self._up_to(names[held - 1], table.named + held)
            for run in _back(table._last):
                if run is known:
                    break
                self._refer(run)
            self._blank += held
        if held < len(names):
            fresh, last = names[held:], table._last
            if last is None or last.references > 1 or last.followers:
                if last is not None:
                    last.followers += 1
                last = table._last = _Run(last, table.named + held, [], 1)
            last.names += fresh
            self._runs.update(dict.fromkeys(fresh, last))
        table.named += len(names)
        return held

    def reset(self) -> bool:
        """Forget all cached blocks. False, and nothing changed, while sequences hold blocks, as in vLLM."""
        if self.referenced:
            return False
        self._blank, self._cached = self.capacity, 0
        self._line.clear()
        self._runs.clear()
        if self.log is not None:
            self.log.cleared()
        return True

    def release(self, table: BlockTable) -> None:
        """Take all blocks back; full ones stay cached. Does nothing for an empty table."""
        self._blank += table.private
        self.private -= table.private
        table.private = 0
        for run in _back(table._last):
            run.references -= 1
            if not run.references:
                self._line[run] = None
                self._cached += len(run.names)
        table._last, table.named = None, 0

    def check(self) -> None:
        """Assert the invariants that do not need the tables."""
        runs = set(self._runs.values())
        assert min(self._blank, self.private, self._cached) >= 0
        assert self._blank + self.cached + self.referenced == self.capacity
        assert self.referenced == self.private + sum(len(run.names) for run in runs if run.references)
        assert self._cached == sum(len(run.names) for run in self._line)
        assert {run for run in runs if not run.references} == self._line.keys()
        for run in runs:
            assert all(self._runs[name] is run for name in run.names)
            assert run.followers == sum(other.before is run for other in runs)
            before = run.before
            assert (before is None) is (run.start == 0)
            if before is not None:
                assert before in runs
                assert before.start + len(before.names) == run.start
                assert before.references >= run.references

    def _up_to(self, name: int, end: int) -> _Run:
        """The run that ends with this block, `end` blocks from its chain's start; the rest becomes another run."""
        run = self._runs[name]
        into = end - run.start
        if into == len(run.names):
            return run
        # The new run is in front, since tables and followers know a run by its end.
        first = _Run(run.before, run.start, run.names[:into], run.references)
        first.followers = 1
        self._runs.update(dict.fromkeys(first.names, first))
        del run.names[:into]
        run.before, run.start = first, end
        if not first.references:
            self._line[first] = None  # until it is referenced, which is at once
        return first

    def _refer(self, run: _Run) -> None:
        if not run.references:
            del self._line[run]
            self._cached -= len(run.names)
        run.references += 1


def _back(run: _Run | None) -> Iterator[_Run]:
    """Return it and all before it, the last first."""
    while run is not None:
        yield run
        run = run.before
