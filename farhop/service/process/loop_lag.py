"""Measures how late the event loop is, ten times a second: anything that blocks the loop delays all requests.

Never blocks the loop itself, and never judges: it is a metric, and the first to look at when everything is slow at
once.
"""

from __future__ import annotations

import asyncio
from collections import deque

EVERY_S = 0.1
KEPT = 150  # looks: 15 s, so that no scrape at the usual 15 s misses the worst


class LoopLag:
    """Measures from `open` to `close`, in the loop's own time."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self.total_s = 0.0

    def open(self) -> None:
        """Begin to measure. Call it on the event loop."""
        self._again(asyncio.get_running_loop())

    def _again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(loop.time() + EVERY_S, self._look, loop, loop.time() + EVERY_S)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.looked(loop.time() - due)
        self._again(loop)

    def looked(self, late_s: float) -> None:
        """The timer fired `late_s` seconds after it was due."""
        late_s = max(0.0, late_s)
        self._late_s.append(late_s)
        self.total_s += late_s

    def worst_s(self) -> float:
        """The longest delay of the last 15 s."""
        return max(self._late_s, default=0.0)

    async def close(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
