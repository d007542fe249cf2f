"""What was dispatched and has not finished, per target: the part of a decision's input that survives view swaps.

Invariants: a request holds at most one reservation; a target's Load equals the sum over its live reservations, so it is
never negative and is empty once everything is released. Never decides, and never forgets a reservation by itself: its
size is bounded by the admission of requests (farhop.balance.bounds).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

Tokens: TypeAlias = NDArray[np.float64]


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """What one request takes at a target: `prefill_tokens` (their work: cost.prefill_work) until its prefill is done,
    and `kv_tokens` until it ends, `answer_tokens` of them for its answer. `began_at`: when its answer began (monotonic
    seconds), None before. `marks` name its prompt's beginnings (chain.marks), so that the part shared with other
    requests is known. `context_tokens`: what a token of its answer reads in the mean, shared or not.
    """

    target: str
    prefill_tokens: int
    kv_tokens: int
    marks: tuple[int, ...] = ()
    answer_tokens: int = 0
    began_at: float | None = None
    context_tokens: int = 0


class Load(msgspec.Struct, frozen=True, gc=False):
    """The sum of a target's live reservations: requests, tokens still to be prefilled, tokens of KV cache, how many of
    the requests are still to be prefilled, and of the KV cache what is for answers. `decoding` requests' answers have
    begun, at times (monotonic seconds) whose sum is `began_s`: from it follows for how long they have been answered in
    all. `context_tokens`: what a token of each of them reads."""

    in_flight: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    prefills: int = 0
    answer_tokens: int = 0
    decoding: int = 0
    began_s: float = 0.0
    context_tokens: int = 0


_IDLE = Load()


class _Held:
    """What requests hold at one target, in the order in which they came. Columns: KV tokens of the prompt, KV tokens of
    the answer, and when the answer began (inf: not yet)."""

    __slots__ = ("_ids", "_rows")

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._rows: Tokens = np.empty((3, 16))

    def add(self, request_id: str, held: Reservation) -> None:
        at, rows = len(self._ids), self._rows
        if at == rows.shape[1]:
            rows = self._rows = np.concatenate([rows, np.empty_like(rows)], axis=1)
        self._ids.append(request_id)
        rows[0, at], rows[1, at] = held.kv_tokens - held.answer_tokens, held.answer_tokens
        rows[2, at] = inf if held.began_at is None else held.began_at

    def began(self, request_id: str, now: float) -> None:
        self._rows[2, self._ids.index(request_id)] = now

    def remove(self, request_id: str) -> None:
        ids, rows = self._ids, self._rows
        at = ids.index(request_id)
        del ids[at]
        rows[:, at : len(ids)] = rows[:, at + 1 : len(ids) + 1]

    @property
    def columns(self) -> Tokens:
        return self._rows[:, : len(self._ids)]


_NOBODY: Tokens = np.empty((3, 0))


class Ledger:
    """Reservations by request id, and their sums by target. Every call is O(1) except `targets`, and with `columns`
    depends on the number at one target.

    `on_change(target, load)` gets each new sum. `columns`: whether they will be asked for.
    """

    __slots__ = ("_at", "_held", "_loads", "_on_change", "_prompts")

    def __init__(self, on_change: Callable[[str, Load], None] | None = None, *, columns: bool = False) -> None:
        self._on_change = on_change
        self._held: dict[str, Reservation] = {}
        self._at: dict[str, _Held] | None = {} if columns else None  # the same by target
        # A Load is replaced, not changed: a pick reads many loads and writes one, so reading must not allocate.
        self._loads: dict[str, Load] = {}
        # By target the marks of each request there, in order: those with most in common are neighbours.
        self._prompts: dict[str, list[tuple[int, ...]]] = {}

    def reserve(self, request_id: str, reservation: Reservation) -> None:
        """Debit `reservation`. ValueError if the request holds one already or a token count is negative."""
        if request_id in self._held:
            raise ValueError(f"request {request_id!r} already holds a reservation: release it before reserving again")
        if reservation.prefill_tokens < 0 or reservation.kv_tokens < 0:
            raise ValueError(f"prefill_tokens and kv_tokens must be 0 or more: {reservation}")
        self._held[request_id] = reservation
        target = reservation.target
        if self._at is not None:
            held = self._at.get(target)
            if held is None:
                held = self._at[target] = _Held()
            held.add(request_id, reservation)
        if reservation.marks:
            insort(self._prompts.setdefault(target, []), reservation.marks)
        load = self._loads.get(target, _IDLE)
        load = self._loads[target] = Load(
            load.in_flight + 1,
            load.prefill_tokens + reservation.prefill_tokens,
            load.kv_tokens + reservation.kv_tokens,
            load.prefills + (reservation.prefill_tokens > 0),
            load.answer_tokens + reservation.answer_tokens,
            load.decoding,
            load.began_s,
            load.context_tokens + reservation.context_tokens,
        )
        if self._on_change is not None:
            self._on_change(target, load)

    def began(self, request_id: str, now: float) -> None:
        """The request's prefill is done: its prefill tokens leave the backlog, its KV tokens stay. Idempotent; unknown
        ids are ignored. (A first byte may arrive after the request was given up.)
        """
        held = self._held.get(request_id)
        if held is None or held.began_at is not None:
            return
        target, prefill = held.target, held.prefill_tokens
        begun = Reservation(target, 0, held.kv_tokens, held.marks, held.answer_tokens, now, held.context_tokens)
        self._held[request_id] = begun
        if self._at is not None:
            self._at[target].began(request_id, now)
        load = self._loads[target]
        load = self._loads[target] = Load(
            load.in_flight, load.prefill_tokens - prefill, load.kv_tokens, load.prefills - (prefill > 0),
            load.answer_tokens, load.decoding + 1, load.began_s + now, load.context_tokens,
        )  # fmt: skip
        if self._on_change is not None:
            self._on_change(target, load)

    def release(self, request_id: str) -> Reservation | None:
        """Credit what the request still holds and return it (0 prefill tokens once it began), or None. Idempotent."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        target = held.target
        load = self._loads[target]
        if load.in_flight == 1:
            self._prompts.pop(target, None)
            del self._loads[target]  # what is gone for good must not be kept
            if self._at is not None:
                del self._at[target]
            load = _IDLE
        else:
            if held.marks:
                prompts = self._prompts[target]
                del prompts[bisect_left(prompts, held.marks)]
            if self._at is not None:
                self._at[target].remove(request_id)
            load = self._loads[target] = Load(
                load.in_flight - 1,
                load.prefill_tokens - held.prefill_tokens,
                load.kv_tokens - held.kv_tokens,
                load.prefills - (held.prefill_tokens > 0),
                load.answer_tokens - held.answer_tokens,
                load.decoding - (held.began_at is not None),
                load.began_s - (held.began_at or 0.0),
                load.context_tokens - held.context_tokens,
            )
        if self._on_change is not None:
            self._on_change(target, load)
        return held

    def load(self, target: str) -> Load:
        """The target's sums; a target never heard of is idle."""
        return self._loads.get(target, _IDLE)

    def shared(self, target: str, marks: tuple[int, ...]) -> int:
        """How many of a prompt's marks, counted from its beginning, some request under way at the target has in common
        with it."""
        prompts = self._prompts.get(target)
        if not prompts:
            return 0
        at, shared = bisect_left(prompts, marks), 0
        for others in prompts[at - 1 if at else 0 : at + 1]:
            high = min(len(marks), len(others))
            while shared < high:  # each mark names all that is before it: a request with one has those before, too
                middle = (shared + high) >> 1
                if marks[middle] == others[middle]:
                    shared = middle + 1
                else:
                    high = middle
        return shared

    def held(self, request_id: str) -> Reservation | None:
        """The reservation of a request; None if it has none."""
        return self._held.get(request_id)

    def columns(self, target: str) -> Tokens:
        """The tokens that each request at this target reserves (_Held). Do not keep a reference."""
        held = self._at.get(target) if self._at is not None else None
        return held.columns if held is not None else _NOBODY

    def targets(self) -> tuple[str, ...]:
        """The targets with something in flight, also those that have left the view."""
        return tuple(self._loads)

    def __len__(self) -> int:
        return len(self._held)
