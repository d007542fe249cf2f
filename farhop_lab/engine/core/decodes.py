"""Sequences whose single tokens are not needed: each generates one with every step, without any cost per step.

All decode in step, so it is known from the start when one of them next needs a KV block, fills one or may end. A
sequence that filled a block which no other had held goes on *alone*: no other holds the blocks that follow, and none
can except past that block, its *end*. Until another sequence comes to that end, its blocks are counted, and named only
on access. The others are *watched*: handled wherever they need a block or fill one. Pure. Invariants (a member behaves
exactly like a sequence that is stepped):
- at any time as many blocks are taken as steps would have taken, in the same order if that matters;
- its text, its counts and, if it is alone, its blocks lag behind until they are asked for (`caught_up`, `leave`) or
  another sequence comes to its end (`watch`);
- no answer ends within: a member that is `due` leaves first.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from farhop_lab.engine.core.text import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop_lab.engine.core.kv import PagedCache
    from farhop_lab.engine.core.sequence import Sequence

FAR = 1 << 60  # steps: no sequence decodes that long
BY_ORDER = attrgetter("order")


class Decodes:
    """See the module's head. `size` is a block's tokens, 2 or more; `kv` has the members' blocks."""

    __slots__ = ("_alone", "_context", "_due", "_ends", "_kv", "_members", "_passes", "_size", "_watched")

    def __init__(self, size: int, kv: PagedCache) -> None:
        self._size, self._kv = size, kv
        self._passes = 0
        self._context = 0  # tokens of all members, less their number times the steps
        self._members: dict[Sequence, tuple[int, int]] = {}  # (step up to which it is written, step in which it is due)
        # By a member's offset in its block when `_passes` is a multiple of the size: that never changes.
        self._watched: list[dict[Sequence, None]] = [{} for _ in range(size)]
        self._alone: list[dict[Sequence, None]] = [{} for _ in range(size)]
        self._ends: dict[int, Sequence] = {}  # those alone, by their last named block
        self._due: list[tuple[int, int, Sequence]] = []  # a heap; entries of members that left stay until then

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def join(self, sequence: Sequence) -> bool:
        """Join from the next step on, if it decodes and its next token does not end its answer; returns whether it
        does.
        """
        known = sequence.foresee(FAR) if sequence.total_tokens - sequence.computed_tokens == 1 else 0
        if known <= 0:
            return False
        due = self._passes + known
        self._members[sequence] = (self._passes, due)
        self._context += sequence.total_tokens - self._passes
        self._watched[self._phase(sequence)][sequence] = None
        heappush(self._due, (due, sequence.order, sequence))
        return True

    def leave(self, sequence: Sequence) -> None:
        """It is stepped individually from now on, or gone."""
        self._catch_up(sequence)
        del self._members[sequence]
        self._context -= sequence.total_tokens - self._passes
        phase = self._phase(sequence)
        if sequence in self._alone[phase]:
            del self._alone[phase][sequence]
            del self._ends[sequence.table.end]
        else:
            del self._watched[phase][sequence]

    def disband(self) -> list[Sequence]:
        """All leave."""
        members = self.caught_up()
        self._members.clear()
        self._ends.clear()
        self._context = 0
        self._due.clear()
        for phase in (*self._watched, *self._alone):
            phase.clear()
        return members

    def caught_up(self) -> list[Sequence]:
        """The members, with texts, counts and blocks up to now."""
        for sequence in self._members:
            self._catch_up(sequence)
        return list(self._members)

    def _phase(self, sequence: Sequence) -> int:
        """Of a member that is caught up."""
        return (sequence.computed_tokens - self._passes) % self._size

    def _write(self, sequence: Sequence) -> None:
        written, due = self._members[sequence]
        if written < self._passes:
            sequence.advance(self._passes - written)
            sequence.computed_tokens += self._passes - written
            self._members[sequence] = (self._passes, due)

    def _catch_up(self, sequence: Sequence, granted: int = 0) -> None:
        """`granted`: 1 if it already has the block of the next step, else 0."""
        self._write(sequence)
        if sequence not in self._alone[self._phase(sequence)]:
            return
        table, size, computed = sequence.table, self._size, sequence.computed_tokens + granted
        table.private = -(-computed // size) - table.named
        # If the text is a few bytes shorter than its tokens, a block is filled with the token after its last.
        late = len(sequence.text) < TOKEN_BYTES * sequence.total_tokens
        full = (computed - late) // size
        if full > table.named:
            del self._ends[table.end]
            self._kv.fill(table, sequence.block_names(full, since=table.named))
            self._ends[table.end] = sequence

    def watch(self, end: int, granted_before: int) -> bool:
        """Another sequence has come to this block: if a member that is alone ends there, its blocks are named, and it
        is watched from now on. Returns whether there was one. Those admitted before number `granted_before` already
        have the block of the step that begins.
        """
        sequence = self._ends.get(end)
        if sequence is None:
            return False
        self._catch_up(sequence, sequence.order < granted_before)
        del self._ends[sequence.table.end]
        phase = self._phase(sequence)
        del self._alone[phase][sequence]
        self._watched[phase][sequence] = None
        return True

    # -- steps

    @property
    def context_tokens(self) -> int:
        """Context of all members together, now."""
        return self._context + len(self._members) * self._passes

    @property
    def ahead(self) -> int:
        """The number of steps until a member is due."""
        due = self._due
        while due:
            at, _, sequence = due[0]
            if self._members.get(sequence, (0, -1))[1] == at:
                return at - self._passes
            heappop(due)
        return FAR

    def due(self) -> list[Sequence]:
        """Members that must leave before the next step: it may end the answer, or that is unknown."""
        found = []
        while self.ahead <= 0:
            found.append(heappop(self._due)[2])
        return found

    def needs(self, passes: int) -> int:
        """How many blocks this many steps need."""
        return self._needs(self._watched, passes) + self._needs(self._alone, passes)

    def _needs(self, phases: list[dict[Sequence, None]], passes: int) -> int:
        blocks, begun, size = 0, self._passes, self._size
        for phase, members in enumerate(phases):
            if members:
                into = (phase + begun) % size
                blocks += len(members) * (-(-(into + passes) // size) - (into > 0))
        return blocks

    def at_edges(self) -> int:
        """How many members need a block in the next step, or fill one."""
        into, watched, alone = self._passes % self._size, self._watched, self._alone
        fills = self._size - 1 - into
        return len(watched[-into]) + len(watched[fills]) + len(alone[-into]) + len(alone[fills])

    def edges(self) -> list[Sequence]:
        """Those, in the order of admission."""
        into, watched, alone = self._passes % self._size, self._watched, self._alone
        fills = self._size - 1 - into
        found = [*watched[-into], *watched[fills], *alone[-into], *alone[fills]]
        if len(found) > 1:
            found.sort(key=BY_ORDER)
        return found

    def grant(self, sequence: Sequence) -> None:
        """Grant the block that it needs or fills in the next step (one of `edges`). The cache must have it."""
        kv, needing = self._kv, -(self._passes % self._size)
        if sequence in self._alone[needing]:
            kv.take(1)
            return
        if sequence in self._alone[needing - 1]:
            return
        table = sequence.table
        if sequence in self._watched[needing]:
            granted = kv.grow(table, 1)
            assert granted, "whoever lets members pass has counted the blocks"
            if table.private == 1:
                return
        self._write(sequence)
        # None if the text is a few bytes shorter than its tokens: then its block is filled with the next token.
        for name in sequence.block_names(table.named + 1, since=table.named):
            self.watch(name, sequence.order)
            if not kv.fill(table, [name]):
                phase = self._phase(sequence)
                del self._watched[phase][sequence]
                self._alone[phase][sequence] = None
                self._ends[name] = sequence

    def grant_all(self) -> None:
        """Grant every member the block of the next step."""
        if self._unwatched():
            self._kv.take(self._needs(self._alone, 1))
        else:
            for sequence in self.edges():
                self.grant(sequence)

    def leap(self, passes: int) -> None:
        """Carry out this many steps, with their blocks."""
        while passes:
            alone = min(passes, self._unwatched())
            if alone:
                self._kv.take(self._needs(self._alone, alone))
            else:
                for sequence in self.edges():
                    self.grant(sequence)
                alone = 1
            self._passes += alone
            passes -= alone

    def _unwatched(self) -> int:
        """How many steps there are before one in which a watched member needs a block or fills one."""
        fewest, begun, size = FAR, self._passes, self._size
        for phase, members in enumerate(self._watched):
            if members:
                into = (phase + begun) % size
                if not into:
                    return 0
                fewest = min(fewest, size - 1 - into)
        return fewest

    def passed(self) -> None:
        """A step has ended: each member has generated a token."""
        self._passes += 1
