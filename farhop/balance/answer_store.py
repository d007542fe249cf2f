"""Stored answers, within one limit of bytes that they share with answers being recorded.

Invariants: 0 <= stored + taken <= capacity, always; no answer takes more than a SHARE-th of it. When room is needed,
the holder with the most bytes loses its least recently used answer, so that one tenant's many answers push out its own
first. Never reads a clock, and never decides whether an answer may be used: only whether it is here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

A = TypeVar("A")

SHARE = 16
ENTRY_BYTES = 512  # what an entry takes beside its answer: key, headers, places in tables


class AnswerStore(Generic[A]):
    """Stored answers, by holder (a tenant) and key. All sizes are in bytes."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be 0 or more, not {capacity!r}")
        self.capacity = capacity
        self.stored = self.taken = 0  # bytes of answers stored, and of those being recorded or still told
        self.by_holder: dict[str, OrderedDict[bytes, tuple[A, int]]] = {}
        self._bytes: dict[str, int] = {}
        # A heap by bytes, and what each holder's entry counts: as much as it has, or more since it gave some.
        # Entries that count something else are of before.
        self._most: list[tuple[int, str]] = []
        self._counted: dict[str, int] = {}

    @property
    def largest(self) -> int:
        """The size in bytes above which an answer is not stored."""
        return max(0, self.capacity // SHARE - ENTRY_BYTES)

    def __len__(self) -> int:
        return sum(map(len, self.by_holder.values()))

    def get(self, holder: str, key: bytes) -> A | None:
        """The answer, from now on the one that was asked for last; None if it is not here."""
        mine = self.by_holder.get(holder)
        found = mine.get(key) if mine is not None else None
        if mine is None or found is None:
            return None
        mine.move_to_end(key)
        return found[0]

    def put(self, holder: str, key: bytes, answer: A, size: int) -> bool:
        """Keep an answer of this size in place of the one before. False if it is too large, or there is no room."""
        self.drop(holder, key)
        cost = size + ENTRY_BYTES
        if size > self.largest or not self._make_room(cost):
            return False
        self.by_holder.setdefault(holder, OrderedDict())[key] = answer, cost
        self._bytes[holder] = mine = self._bytes.get(holder, 0) + cost
        self.stored += cost
        self._count(holder, mine)
        return True

    def drop(self, holder: str, key: bytes) -> None:
        """Remove an answer, if it is stored."""
        mine = self.by_holder.get(holder)
        found = mine.pop(key, None) if mine is not None else None
        if found is not None:
            self._gone(holder, found[1])

    def clear(self) -> None:
        """Remove all answers. Bytes that were taken stay taken."""
        self.by_holder.clear()
        self._bytes.clear()
        self._most.clear()
        self._counted.clear()
        self.stored = 0

    # -- room for what is under way

    def take(self, n: int) -> bool:
        """Room for n bytes more of an answer under way; kept ones make room for it. False if there is none."""
        if n < 0:
            raise ValueError(f"n must be 0 or more, not {n!r}")
        if not self._make_room(n):
            return False
        self.taken += n
        return True

    def give(self, n: int) -> None:
        """Give back what was taken. ValueError if it was not."""
        if not 0 <= n <= self.taken:
            raise ValueError(f"{n!r} bytes given back, {self.taken} taken")
        self.taken -= n

    def _make_room(self, n: int) -> bool:
        if self.taken + n > self.capacity:
            return False
        while self.stored + self.taken + n > self.capacity:
            self._evict()
        return True

    def _evict(self) -> None:
        holder = ""
        while not holder:
            size, first = self._most[0]
            mine = self._bytes.get(first)
            if mine is None or -size != self._counted[first]:
                heapq.heappop(self._most)
            elif -size != mine:
                self._counted[first] = mine
                heapq.heapreplace(self._most, (-mine, first))
            else:
                holder = first
        _, (_, cost) = self.by_holder[holder].popitem(last=False)
        self._gone(holder, cost)

    def _count(self, holder: str, mine: int) -> None:
        """Record that a holder's answers now take `mine` bytes, more than before."""
        self._counted[holder] = mine
        heapq.heappush(self._most, (-mine, holder))
        if len(self._most) > 2 * len(self._bytes) + 16:
            self._counted = dict(self._bytes)
            self._most = [(-size, name) for name, size in self._bytes.items()]
            heapq.heapify(self._most)

    def _gone(self, holder: str, cost: int) -> None:
        self.stored -= cost
        self._bytes[holder] -= cost
        if not self.by_holder[holder]:
            del self.by_holder[holder], self._bytes[holder], self._counted[holder]
