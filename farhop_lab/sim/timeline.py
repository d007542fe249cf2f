"""Virtual time: a queue of timed calls.

Invariants: time never runs backwards; calls due at one moment are made in the order of scheduling; a cancelled call is
never made. Never reads a clock: time passes as fast as calls are handled.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PENDING_MAX = 5_000_000
_TIDY_MIN = 1_000
_SLOTS_PER_S = 2.0


class TimelineError(Exception):
    """A call was scheduled at an impossible time; the text names the remedy."""


class Call(list[Any]):
    """A scheduled call: its time (seconds), its place in the order of scheduling, the function (None: cancelled or
    done), and the arguments. A list, since the heap compares lists without calling Python code.
    """

    __slots__ = ()

    def cancel(self) -> None:
        """It will not be made. Idempotent; does nothing once it was made."""
        self[2] = None
        self[3] = ()


class Timeline:
    """Seconds from 0. `happened` counts calls made.

    Only the calls of the current half second are kept in order. Later ones wait in slots: most of them are timeouts,
    which are cancelled before their slot comes.
    """

    __slots__ = ("_asked", "_due", "_later", "_slot", "_slots", "_tidy_from", "happened", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._due: list[Call] = []  # a heap: up to the end of `_slot`
        self._later: dict[int, list[Call]] = {}  # later ones, by slot
        self._slots: list[int] = []  # a heap: the slots of `_later`
        self._slot = -(1 << 62)
        self._asked = 0
        self._tidy_from = min(_TIDY_MIN, PENDING_MAX)  # at this length `_tidy` runs next

    def __len__(self) -> int:
        """Calls kept: those that are due, and for a while those that were cancelled."""
        return len(self._due) + sum(map(len, self._later.values()))

    def at(self, at: float, act: Callable[..., object], *args: Any) -> Call:
        """Schedule at `at`, or as soon as possible if that has passed. TimelineError if `at` is not a number."""
        if not at < inf:
            raise TimelineError(f"at: {at!r} is not a moment; give finite seconds")
        return self._keep(at, act, args)

    def after(self, delay_s: float, act: Callable[..., object], *args: Any) -> Call:
        """Schedule `delay_s` from now."""
        at = self.now + delay_s
        if not at < inf:
            raise TimelineError(f"at: {at!r} is not a moment; give finite seconds")
        return self._keep(at, act, args)

    def _keep(self, at: float, act: Callable[..., object], args: tuple[Any, ...]) -> Call:
        now = self.now
        if at < now:
            at = now
        asked = self._asked
        if asked >= self._tidy_from:
            self._tidy()
        self._asked = asked + 1
        call, slot = Call((at, asked, act, args)), int(at * _SLOTS_PER_S)
        if slot <= self._slot:
            heappush(self._due, call)
        elif slot in self._later:
            self._later[slot].append(call)
        else:
            self._later[slot] = [call]
            heappush(self._slots, slot)
        return call

    def _tidy(self) -> None:
        """Drop cancelled calls: most calls are timeouts that are cancelled, and each would stay until its time."""
        for calls in (self._due, *self._later.values()):
            calls[:] = [call for call in calls if call[2] is not None]
        heapify(self._due)
        kept = len(self)
        if kept >= PENDING_MAX:
            raise TimelineError(f"{PENDING_MAX} calls are due: run the timeline before asking for more")
        self._tidy_from = self._asked + min(PENDING_MAX - kept, max(_TIDY_MIN, 4 * kept))

    def run(self, until: float) -> None:
        """Make all calls that are due up to `until`, included; then it is `until`."""
        due, pop = self._due, heappop
        while True:
            while due and due[0][0] <= until:
                call = pop(due)
                self.now, _, act, args = call
                if act is not None:
                    call[2] = None  # as `cancel` does
                    call[3] = ()
                    self.happened += 1
                    act(*args)
            # Rather a slot too early than too late: the ordered heap may reach beyond `until`.
            if due or not self._slots or self._slots[0] - 1 > until * _SLOTS_PER_S:
                break
            self._slot = heappop(self._slots)
            due += [call for call in self._later.pop(self._slot) if call[2] is not None]
            heapify(due)
        self.now = max(self.now, until)
