"""Sequences of which nobody hears every token: each writes one with every pass, and a pass by itself costs nothing.

All decode in step, so where one of them next needs a KV block, fills one or may end is known from when it joined: only
then is it looked at. Pure. Invariants (nobody can tell a member from a sequence that is stepped):
- a member's blocks are at any time those that steps would have given it, asked for in the same order;
- its text and counts lag behind until it is asked for (`caught_up`, `leave`);
- no answer ends within: who is `due` leaves first.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop_lab.engine.core.kv import PagedCache
    from farhop_lab.engine.core.sequence import Sequence

FAR = 1 << 60  # passes: nobody decodes that long
BY_ORDER = attrgetter("order")


class Decodes:
    """See the module's head. `size` is a block's tokens, 2 or more."""

    __slots__ = ("_context", "_due", "_members", "_passes", "_phases", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._passes = 0
        self._context = 0  # tokens of all members, less their number times the passes
        self._members: dict[Sequence, tuple[int, int]] = {}  # up to which pass it is written, in which it is due
        # By how far into a block a member is when `_passes` is a multiple of the size: that never changes.
        self._phases: list[dict[Sequence, None]] = [{} for _ in range(size)]
        self._due: list[tuple[int, int, Sequence]] = []  # a heap; who has left stays in it until then

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def join(self, sequence: Sequence) -> bool:
        """From the next pass on, if it decodes and its next token does not end its answer; whether it does."""
        known = sequence.foresee(FAR) if sequence.total_tokens - sequence.computed_tokens == 1 else 0
        if known <= 0:
            return False
        due = self._passes + known
        self._members[sequence] = (self._passes, due)
        self._context += sequence.total_tokens - self._passes
        self._phases[(sequence.computed_tokens - self._passes) % self._size][sequence] = None
        heappush(self._due, (due, sequence.order, sequence))
        return True

    def leave(self, sequence: Sequence) -> None:
        """It is stepped by others from now on, or gone."""
        self._catch_up(sequence)
        del self._members[sequence]
        self._context -= sequence.total_tokens - self._passes
        del self._phases[(sequence.computed_tokens - self._passes) % self._size][sequence]

    def disband(self) -> list[Sequence]:
        """All leave."""
        members = self.caught_up()
        self._members.clear()
        self._context = 0
        self._due.clear()
        for phase in self._phases:
            phase.clear()
        return members

    def caught_up(self) -> list[Sequence]:
        """The members, their texts and counts as they are now."""
        for sequence in self._members:
            self._catch_up(sequence)
        return list(self._members)

    def _catch_up(self, sequence: Sequence) -> None:
        written, due = self._members[sequence]
        if written < self._passes:
            sequence.advance(self._passes - written)
            sequence.computed_tokens += self._passes - written
            self._members[sequence] = (self._passes, due)

    # -- passes

    @property
    def context_tokens(self) -> int:
        """Of all members together, as they stand now."""
        return self._context + len(self._members) * self._passes

    @property
    def ahead(self) -> int:
        """How many passes there are until somebody is due."""
        due = self._due
        while due:
            at, _, sequence = due[0]
            if self._members.get(sequence, (0, -1))[1] == at:
                return at - self._passes
            heappop(due)
        return FAR

    def due(self) -> list[Sequence]:
        """Who must leave before the next pass: it may end the answer, or nobody knows."""
        found = []
        while self.ahead <= 0:
            found.append(heappop(self._due)[2])
        return found

    def needs(self, passes: int) -> int:
        """How many blocks so many passes need."""
        blocks = 0
        for phase, members in enumerate(self._phases):
            if members:
                into = (phase + self._passes) % self._size
                blocks += len(members) * (-(-(into + passes) // self._size) - (into > 0))
        return blocks

    def edges(self) -> list[Sequence]:
        """Who needs a block in the next pass, or fills one, in the order of admission."""
        into = self._passes % self._size
        needing, filling = self._phases[-into], self._phases[self._size - 1 - into]
        if not needing and not filling:
            return []
        found = [*needing, *filling]
        if len(found) > 1:
            found.sort(key=BY_ORDER)
        return found

    def grant(self, sequence: Sequence, kv: PagedCache) -> None:
        """Its block, which it needs or fills in the next pass (one of `edges`). The cache must have it."""
        table = sequence.table
        if sequence in self._phases[-(self._passes % self._size)]:
            granted = kv.grow(table, 1)
            assert granted, "whoever lets members pass has counted the blocks"
            if table.private == 1:
                return
        self._catch_up(sequence)
        held = len(table.full)
        # None where the text is a few bytes shorter than its tokens: then its block is filled with the next token.
        for name in sequence.block_names(held + 1, since=held):
            kv.fill(table, name)

    def passed(self) -> None:
        """A pass: each has written a token."""
        self._passes += 1
