"""Policies by one figure of each region: `nearest`, `waterfall`, `failover`, `least-load`. They never write.

They know nothing of prefixes and speeds. A region that comes back gets its requests back at the hot guard's pace, as
under every policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from global_lb.routing.policy.base import TIE_MS, ByRegion, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from global_lb.fleet.table import Candidates, Column, Scored

_FAR_MS = 1e6  # above every round-trip time


class Nearest(Policy):
    """The nearest region. One that is hot or has no free slot counts as further away, by the hot guard's penalty."""

    name, unit = "nearest", "ms"
    in_ms = True
    ties = TIE_MS

    def score(self, candidates: Candidates) -> Column:
        """The round-trip times (ms)."""
        return candidates.rtt_ms

    def terms(self, scored: Scored) -> dict[str, float]:
        """See Policy."""
        return {"rtt": scored.rtt_ms}

    def full(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Where no slot is left that is not promised."""
        full: NDArray[np.bool_] = candidates.left < 1.0
        return full


class Waterfall(Policy):
    """The nearest is filled up to a share of its capacity, then the next (GKE's waterfall by utilisation)."""

    name, unit = "waterfall", "ms, those with room first"
    ties = TIE_MS

    def __init__(self, fill_at: float) -> None:
        self._fill_at = fill_at

    def score(self, candidates: Candidates) -> Column:
        """The round-trip times (ms)."""
        return candidates.rtt_ms

    def full(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Filled, by its report and what was sent there since; or without a slot."""
        full: NDArray[np.bool_] = (candidates.used_share() >= self._fill_at) | (candidates.left < 1.0)
        return full


class Failover(Policy):
    """The listed ones in their order, then all others, the nearest first."""

    name, unit = "failover", "place in the list"

    def __init__(self, regions: Sequence[str]) -> None:
        self._listed = len(regions)
        self._places = ByRegion({name: float(place) for place, name in enumerate(regions)}, float(len(regions)))

    def score(self, candidates: Candidates) -> Column:
        """Its place in the list; beyond its end a fraction by round-trip time."""
        places = self._places.column(candidates.names)
        score: Column = places + (places >= self._listed) * (candidates.rtt_ms / _FAR_MS)
        return score


class LeastLoad(Policy):
    """The used share as reported, and what was sent there since. Near equals are drawn by headroom: no herding."""

    name, unit = "least-load", "share used"
    ties = 0.05

    def score(self, candidates: Candidates) -> Column:
        """See Candidates.used_share."""
        return candidates.used_share()
