"""The order of an engine's KV events: which batch to apply, which is a repetition, which is missing, and restarts.

Batches are numbered from 0. Invariants: a batch is applied at most once and in order; a batch that cannot be had is
reported (`Lost`), and so is another process of the engine (`Cleared`): its numbers went back, or its replay differs
from what it sent. Silence is not death: an idle engine sends nothing. Never reads a batch, never opens anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from xxhash import xxh3_64_intdigest

from regional_lb.fleet.kv_events import Cleared, Lost

if TYPE_CHECKING:
    from regional_lb.fleet.kv_events import KvEvent

SEQ_MAX = (1 << 63) - 1  # beyond it lies vLLM's end of a replay, -1

Out: TypeAlias = Cleared | Lost | bytes
"""What becomes of what came: a change, or a payload to be read and applied."""


class Follower:
    """Puts one stream's batches in order. `applied` and the digest of that batch survive a cut link: they show whether
    the process at the other end is still the same."""

    __slots__ = ("_digest", "_empty", "_newest", "_unproven", "applied")

    def __init__(self) -> None:
        self.applied = -1
        self._newest = -1  # the last number that came by itself
        self._digest = 0
        self._empty = False  # it is known to have sent nothing yet
        self._unproven = False  # a replay is under way and has not shown that it is the engine we know

    # -- as it comes

    def on_batch(self, seq: int, payload: bytes) -> tuple[list[Out], bool]:
        """A batch arrived that was not asked for: what to do, and whether an earlier one is missing. If so, a replay
        follows; batches that it does not bring are given up by `give_up`."""
        out: list[Out] = []
        if seq <= self._newest:
            out += self._anew()
        self._newest = seq
        if seq <= self.applied:
            return out, False  # a replay was faster
        if seq != self.applied + 1:
            return out, True
        return [*out, *self._first(seq), self._take(seq, payload)], False

    def give_up(self, seq: int, payload: bytes) -> list[Out]:
        """The batches missing before this one cannot be had: what to do."""
        if seq <= self.applied:
            return []
        return [Lost(), self._take(seq, payload)]

    # -- the replay

    def ask(self) -> int:
        """A replay begins: the number to ask from. The last known batch is asked for once more, to be compared."""
        self._unproven = self.applied >= 0
        return max(self.applied, 0)

    def replayed(self, seq: int, payload: bytes) -> tuple[list[Out], bool]:
        """A batch of the replay arrived: what to do, and whether to ask again (a part of it was dropped on the way)."""
        if self._unproven:
            if seq < self.applied:
                return [], False
            self._unproven = False
            if seq > self.applied:
                return [Lost(), self._take(seq, payload)], False  # it does not keep that much
            if xxh3_64_intdigest(payload) == self._digest:
                return [], False
            return self._anew(), True
        if self.applied < 0:
            return [*self._first(seq), self._take(seq, payload)], False
        if seq <= self.applied:
            return [], False
        if seq > self.applied + 1:
            return [], True
        return [self._take(seq, payload)], False

    def replay_ended(self) -> list[Out]:
        """The replay has ended. Returns what to do."""
        if self._unproven:
            # A publisher keeps at least its last batch. So this is another one, and has sent nothing yet.
            self._unproven = False
            return self._anew()
        return self._first(0) if self.applied < 0 else []

    def lost(self) -> list[KvEvent]:
        """The link was cut, or is new, and there is no replay: the process at the other end, and its cache, are
        unknown."""
        self._anew()
        self._unproven = self._empty = False
        return [Lost()]

    # -- within

    def _first(self, seq: int) -> list[Out]:
        """What to do before the first batch received is applied."""
        if seq:
            return [Lost()] if self.applied < 0 else []
        known, self._empty = self._empty, True
        return [] if known else [Cleared()]  # before its very first it held nothing

    def _take(self, seq: int, payload: bytes) -> bytes:
        self.applied, self._digest, self._empty = seq, xxh3_64_intdigest(payload), False
        return payload

    def _anew(self) -> list[Out]:
        self.applied = self._newest = -1
        self._digest, self._empty = 0, True
        return [Cleared()]
