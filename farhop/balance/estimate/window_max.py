"""The maximum of a figure over a sliding window, by a monotonic queue.

Only samples above all later ones are kept, so each is added and dropped once. Never reads a clock.
"""

from __future__ import annotations

from collections import deque


class WindowMax:
    """See the module's docstring. Each call of `take` says how long the window is."""

    __slots__ = ("_highest",)

    def __init__(self) -> None:
        self._highest: deque[tuple[float, float]] = deque()  # when, and a figure that none since was as high as

    def take(self, figure: float, now: float, window_s: float) -> float:
        """The most of the last `window_s`, this one included. `now` is not before the last time."""
        highest = self._highest
        while highest and highest[-1][1] <= figure:
            highest.pop()
        highest.append((now, figure))
        while highest[0][0] < now - window_s:
            highest.popleft()
        return highest[0][1]

    @property
    def most(self) -> float:
        """The maximum as of the last call of `take`; 0 before the first."""
        return self._highest[0][1] if self._highest else 0.0
