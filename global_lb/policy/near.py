"""Policies by wire time: `nearest` and `waterfall`. They know nothing of prefixes and speeds. Never write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from global_lb.policy.base import TIE_MS, Policy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from global_lb.table import Column, Field, Scored


class Nearest(Policy):
    """The nearest region; one that is hot or has no slot left is so much further away as the hot guard says."""

    name, unit = "nearest", "ms"
    in_ms = True
    ties = TIE_MS

    def score(self, field: Field) -> Column:
        """Wire time."""
        return field.rtt_ms

    def terms(self, scored: Scored) -> dict[str, float]:
        """See Policy."""
        return {"rtt": scored.rtt_ms}

    def full(self, field: Field) -> NDArray[np.bool_]:
        """No slot left that is not promised."""
        full: NDArray[np.bool_] = field.left < 1.0
        return full


class Waterfall(Policy):
    """The nearest is filled up to a share of its capacity, then the next (GKE's waterfall by utilisation)."""

    name, unit = "waterfall", "ms, those with room first"
    ties = TIE_MS

    def __init__(self, fill_at: float) -> None:
        self._fill_at = fill_at

    def score(self, field: Field) -> Column:
        """Wire time."""
        return field.rtt_ms

    def full(self, field: Field) -> NDArray[np.bool_]:
        """Filled, by its report and what was sent there since; or without a slot."""
        full: NDArray[np.bool_] = (field.used_share() >= self._fill_at) | (field.left < 1.0)
        return full
