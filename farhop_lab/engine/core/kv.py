"""A paged KV cache: blocks of tokens named by the hash of all text up to their end, shared, counted and evicted.

Pure: blocks are accounted for, not stored. Never hands out more than it has. Invariants (`check` asserts them):
- blank + cached + referenced == capacity, none negative: no block is lost or counted twice;
- a full block is either referenced (count >= 1) or cached (nobody's), never both;
- where a block is held, the block before it in its chain is held too (so a prefix match may stop at the first gap):
  a table references whole chains, and returns them leaf first, so that a leaf is always evicted before its parent.
vLLM keeps duplicates of a block that two sequences compute at once; here the second takes a reference to the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class CacheLog(Protocol):
    """What is told of blocks that go; of those that come the core tells, which knows their text."""

    def evicted(self, name: int) -> None:
        """A cached block made room for another."""

    def cleared(self) -> None:
        """All cached blocks are forgotten."""


class BlockTable:
    """The blocks of one sequence: `full` by name, in order from the start of the text, then `private` unnamed ones."""

    __slots__ = ("full", "private")

    def __init__(self) -> None:
        self.full: list[int] = []
        self.private = 0

    @property
    def blocks(self) -> int:
        """Blocks held by this table."""
        return len(self.full) + self.private


class PagedCache:
    """The blocks of one GPU. Tables are passed in; a table belongs to one cache for life."""

    __slots__ = ("_blank", "_cached", "_private", "_references", "capacity", "evictions", "log")

    def __init__(self, capacity: int, log: CacheLog | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"kv_blocks: {capacity} is below 1; a cache needs at least one block")
        self.capacity = capacity
        self.evictions = 0
        self.log = log
        self._blank = capacity
        self._private = 0
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """Blocks that a sequence could get now: blank ones, and cached ones it may evict."""
        return self._blank + len(self._cached)

    @property
    def referenced(self) -> int:
        """Blocks in use by sequences."""
        return len(self._references) + self._private

    @property
    def cached(self) -> int:
        """Full blocks kept for reuse that no sequence uses."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1. As in vLLM, what is merely cached counts as free."""
        return self.referenced / self.capacity

    def references(self, name: int) -> int:
        """How many sequences hold the block now."""
        return self._references.get(name, 0)

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks of `chain` are held: those before one that is held are, too."""
        references, cached = self._references, self._cached
        return bisect_left(chain, True, key=lambda name: name not in references and name not in cached)

    def share(self, table: BlockTable, chain: Sequence[int]) -> None:
        """Reference the held blocks `chain` as the start of an empty `table`. KeyError where one is not held."""
        assert not table.blocks, "a prefix is shared before anything is grown"
        references, cached = self._references, self._cached
        for name in chain:
            count = references.get(name)
            if count is None:
                del cached[name]
                references[name] = 1
            else:
                references[name] = count + 1
        table.full.extend(chain)

    def grow(self, table: BlockTable, blocks: int) -> bool:
        """Give `table` so many private blocks, evicting the oldest cached ones; False, and nothing done, if short."""
        if blocks > self.available:
            return False
        while self._blank < blocks:
            name, _ = self._cached.popitem(last=False)
            if self.log is not None:
                self.log.evicted(name)
            self._blank += 1
            self.evictions += 1
        self._blank -= blocks
        self._private += blocks
        table.private += blocks
        return True

    def fill(self, table: BlockTable, name: int) -> bool:
        """The first private block of `table` is full and is `name` from now on; whether nobody had held that."""
        assert table.private, "only a private block can be filled"
        table.private -= 1
        self._private -= 1
        held = name in self._references or name in self._cached
        if held:
            self._refer(name)
            self._blank += 1
        else:
            self._references[name] = 1
        table.full.append(name)
        return not held

    def reset(self) -> bool:
        """Forget all that is cached. False, and nothing done, while sequences hold blocks, as in vLLM."""
        if self.referenced:
            return False
        self._blank += len(self._cached)
        self._cached.clear()
        if self.log is not None:
            self.log.cleared()
        return True

    def release(self, table: BlockTable) -> None:
        """Take everything back; full blocks stay cached. An empty table is released without effect."""
        self._blank += table.private
        self._private -= table.private
        table.private = 0
        references, cached = self._references, self._cached
        for name in reversed(table.full):
            count = references.pop(name)
            if count > 1:
                references[name] = count - 1
            else:
                cached[name] = None
        table.full.clear()

    def check(self) -> None:
        """Assert the invariants that do not need the tables."""
        assert self._blank >= 0
        assert self._private >= 0
        assert self._blank + self.cached + self.referenced == self.capacity
        assert all(count > 0 for count in self._references.values())
        assert not self._references.keys() & self._cached.keys()

    def _refer(self, name: int) -> None:
        count = self._references.get(name)
        if count is None:
            del self._cached[name]
            self._references[name] = 1
        else:
            self._references[name] = count + 1
