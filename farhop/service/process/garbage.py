"""When Python's garbage collector runs: young objects often and a few at a time, all objects while the process is idle.

A collection blocks the event loop until it ends. Requests leave no cycles behind (a test counts them), so collections
are only for the cycles that libraries make; long-lived structures hold no objects that the collector visits. Never
delays a collection by more than LATEST_S.
"""

from __future__ import annotations

import asyncio
import gc

from farhop.service.process.clock import cpu_s

NEW = 500  # objects more than before: some 0.2 ms
DUE = 100  # walks of new objects, whose survivors are worth a walk through all
EVERY_S, IDLE_SHARE, LATEST_S = 1.0, 0.1, 3600.0  # at rest: at most this share of a core is in use
_NEVER = 2**31 - 1


class Garbage:
    """The collector's times, from `open` to `close`."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._walked_at = self._spent_s = 0.0

    def open(self) -> None:
        """Begin. Call it on the event loop, after all long-lived objects were made: these are never visited again."""
        gc.freeze()
        gc.set_threshold(NEW, _NEVER, _NEVER)
        loop = asyncio.get_running_loop()
        self._walked_at = loop.time()
        self._again(loop)

    def _again(self, loop: asyncio.AbstractEventLoop) -> None:
        self.look(loop.time(), cpu_s())
        self._timer = loop.call_later(EVERY_S, self._again, loop)

    def look(self, now: float, spent_s: float) -> None:
        """Called every EVERY_S; `spent_s`: the CPU time of the process so far. Runs a full collection if it is due."""
        used_s, self._spent_s = spent_s - self._spent_s, spent_s
        is_idle = used_s <= IDLE_SHARE * EVERY_S
        walks = gc.get_count()[1]  # since the last of all
        if (is_idle and walks >= DUE) or (walks and now - self._walked_at >= LATEST_S):
            gc.collect()
            self._walked_at = now

    def close(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()
