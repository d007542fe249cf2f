"""Virtual time: what is due when, and nothing else.

Invariants: time never runs backwards; what is due at one moment happens in the order it was asked for; a call that was
cancelled never happens. Never reads a clock: an hour passes as fast as its events can be handled.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PENDING_MAX = 5_000_000


class TimelineError(Exception):
    """Something was asked of a timeline that time does not do; the text names the remedy."""


class Call:
    """Something that is due at `at` (seconds)."""

    __slots__ = ("_act", "_args", "at")

    def __init__(self, at: float, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.at = at
        self._act: Callable[..., object] | None = act
        self._args = args

    def cancel(self) -> None:
        """It shall not happen. Idempotent, and harmless once it has happened."""
        self._act = None
        self._args = ()

    def happen(self) -> bool:
        """Do it; False if it was cancelled."""
        act, args = self._act, self._args
        if act is None:
            return False
        self.cancel()
        act(*args)
        return True


class Timeline:
    """Seconds from 0. `happened` counts calls made."""

    __slots__ = ("_asked", "_due", "happened", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._due: list[tuple[float, int, Call]] = []
        self._asked = 0

    def at(self, at: float, act: Callable[..., object], *args: Any) -> Call:
        """Do it at `at`, or as soon as possible if that has passed. TimelineError for no moment at all."""
        if not isfinite(at):
            raise TimelineError(f"at: {at!r} is not a moment; give finite seconds")
        if len(self._due) >= PENDING_MAX:
            raise TimelineError(f"{PENDING_MAX} calls are due: run the timeline before asking for more")
        call = Call(max(at, self.now), act, args)
        self._asked += 1
        heappush(self._due, (call.at, self._asked, call))
        return call

    def after(self, delay_s: float, act: Callable[..., object], *args: Any) -> Call:
        """Do it `delay_s` from now."""
        return self.at(self.now + delay_s, act, *args)

    def run(self, until: float) -> None:
        """Let everything happen that is due up to `until`, that moment included; then it is `until`."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, call = heappop(due)
            self.happened += call.happen()
        self.now = max(self.now, until)
