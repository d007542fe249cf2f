"""Virtual time: what is due when, and nothing else.

Invariants: time never runs backwards; what is due at one moment happens in the order it was asked for; a call that was
cancelled never happens. Never reads a clock: an hour passes as fast as its events can be handled.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PENDING_MAX = 5_000_000
_TIDY_MIN = 1_000


class TimelineError(Exception):
    """Something was asked of a timeline that time does not do; the text names the remedy."""


class Call(list[Any]):
    """Something that is due: at which moment (seconds), in which place among all that was asked for, what (None: it was
    cancelled, or has happened), and with what. A list, since the heap compares lists without a call of ours."""

    __slots__ = ()

    def cancel(self) -> None:
        """It shall not happen. Idempotent, and harmless once it has happened."""
        self[2] = None
        self[3] = ()


class Timeline:
    """Seconds from 0. `happened` counts calls made."""

    __slots__ = ("_asked", "_due", "_tidy_from", "happened", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._due: list[Call] = []
        self._tidy_from = min(_TIDY_MIN, PENDING_MAX)  # calls, cancelled ones included
        self._asked = 0

    def __len__(self) -> int:
        """How many calls are kept: those that are due, and for a while those that were cancelled."""
        return len(self._due)

    def at(self, at: float, act: Callable[..., object], *args: Any) -> Call:
        """Do it at `at`, or as soon as possible if that has passed. TimelineError for no moment at all."""
        if not at < inf:
            raise TimelineError(f"at: {at!r} is not a moment; give finite seconds")
        if len(self._due) >= self._tidy_from:
            self._tidy()
        self._asked += 1
        call = Call((at if at > self.now else self.now, self._asked, act, args))
        heappush(self._due, call)
        return call

    def after(self, delay_s: float, act: Callable[..., object], *args: Any) -> Call:
        """Do it `delay_s` from now."""
        # As `at` does, without calling it: nearly everything is asked for so.
        now, due = self.now, self._due
        at = now + delay_s
        if len(due) >= self._tidy_from or not at < inf:
            return self.at(at, act, *args)
        self._asked += 1
        call = Call((at if at > now else now, self._asked, act, args))
        heappush(due, call)
        return call

    def _tidy(self) -> None:
        """Let go of what was cancelled: most of what is asked for is a time-out that never happens, and each would
        stay until it is due."""
        due = self._due
        due[:] = [call for call in due if call[2] is not None]
        if len(due) >= PENDING_MAX:
            raise TimelineError(f"{PENDING_MAX} calls are due: run the timeline before asking for more")
        heapify(due)
        self._tidy_from = min(PENDING_MAX, max(_TIDY_MIN, 2 * len(due)))

    def run(self, until: float) -> None:
        """Let everything happen that is due up to `until`, that moment included; then it is `until`."""
        due, pop = self._due, heappop
        while due and due[0][0] <= until:
            call = pop(due)
            self.now, _, act, args = call
            if act is not None:
                call[2] = None  # as `cancel` does
                call[3] = ()
                self.happened += 1
                act(*args)
        self.now = max(self.now, until)
