"""The process's clock: monotonic seconds from a random start, and the wall time of a moment for spans.

The random start makes a comparison with another process's clock fail loudly instead of nearly working. Made once, in
`main`, and handed on.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


def wall() -> datetime:
    """The time of the wall clock, for what others date: certificates. Never for an interval, nor between two hosts."""
    return datetime.now(UTC)


def cpu_s() -> float:
    """Seconds of CPU that this process has used."""
    return time.process_time()


_LOOK_S = 1.0  # after which the wall clock is read again
_STEP_NS = 50_000_000  # less is the time between two readings; slewing changes both clocks alike


class Clock:
    """`now()` in seconds; `wall_ns(now)` is that moment in epoch nanoseconds.

    The wall clock may be set while the process runs (a host that started before it knew the time), and the other one
    may stand still (a virtual machine that was suspended): how far they are apart is looked at again and again.
    """

    __slots__ = ("_base_ns", "_offset", "_read_at")

    def __init__(self, rng: Random) -> None:
        self._offset = rng.uniform(1e3, 1e6) - time.monotonic()
        self._base_ns = 0
        self._read()

    def now(self) -> float:
        """Monotonic seconds since a random origin."""
        return time.monotonic() + self._offset

    def wall_ns(self, now: float) -> int:
        """Epoch nanoseconds of a moment given by `now()`."""
        if now - self._read_at > _LOOK_S:
            self._read()
        return self._base_ns + int(now * 1e9)

    def wall_s(self, now: float) -> float:
        """The wall-clock time at the monotonic time `now`, in seconds since 1970."""
        return self.wall_ns(now) / 1e9

    def _read(self) -> None:
        self._read_at = self.now()
        base_ns = time.time_ns() - int(self._read_at * 1e9)
        if abs(base_ns - self._base_ns) > _STEP_NS:
            self._base_ns = base_ns
