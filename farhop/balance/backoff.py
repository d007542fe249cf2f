"""How long to wait before trying again what failed: doubling, bounded, with jitter.

Jitter is what keeps a fleet from coming back in step when a server does. Never waits itself: it says how long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Waits drawn from (half, whole] of a ceiling that doubles from `first_s` to `limit_s`."""

    __slots__ = ("_ceiling_s", "_first_s", "_limit_s", "_rng")

    def __init__(self, rng: Random, first_s: float = 0.05, limit_s: float = 1.0) -> None:
        if not 0 < first_s <= limit_s:
            raise ValueError(f"first_s {first_s} must be above 0 and at most limit_s {limit_s}")
        self._rng = rng
        self._first_s = first_s
        self._limit_s = limit_s
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now; the next answer is drawn from twice as much."""
        wait_s = self._ceiling_s * (1.0 - self._rng.random() / 2)
        self._ceiling_s = min(self._ceiling_s * 2, self._limit_s)
        return wait_s

    def reset(self) -> None:
        """After a success: the next pause is `first_s` again."""
        self._ceiling_s = self._first_s
