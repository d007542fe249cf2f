"""How many replicas a load needs: the planner's arithmetic, and a signal made of it that is fast up and slow down.

Loads are in replicas: requests under way and waiting, or KV tokens taken, per what one replica holds (by Little's law,
arrivals x time in service / slots). They are stable at a target share if load <= target * replicas, also with some of
these lost; N-1 asks the same with any one region lost. Invariants: what is needed is monotone in the load; a constant
load never makes the signal go up and down; it never leaves its bounds. Never reads a clock, and starts no replica.
"""

from __future__ import annotations

import heapq
from math import ceil, exp
from typing import TYPE_CHECKING

import msgspec

from farhop.balance.estimate.window_max import WindowMax

if TYPE_CHECKING:
    from collections.abc import Mapping

REPLICAS_MAX = 100_000
NOTHING = 1e-4  # of a replica: a smaller load is a rounding error
BAND = 0.1  # one replica less only if it would also carry this much more: two sizes are then never both right
GROWTH_MAX = 1.5  # times what is there: a trend is capped at this, since a step looks like a steep trend
SETTLE_S = 30.0  # the signal does not fall for this long after a start: a new balancer sees no load yet
# Two means: the faster lags by this share of the warm-up, the slower by a multiple of that; their difference is the
# trend. Arrivals by chance make a trend of themselves: over less than a quarter of a minute it is more of that than of
# demand.
_FAST, _SLOWER, _FAST_MIN_S = 0.15, 4.0, 15.0


class ScalingBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas, a share of what one holds, seconds. `warm_up_s`: how long a new replica takes until it serves."""

    replicas_min: int = 1
    replicas_max: int = 1024
    target_share: float = 0.7
    spare_replicas: int = 1
    warm_up_s: float = 120.0
    down_after_s: float = 300.0

    def clamp(self, replicas: int) -> int:
        """The number of replicas, limited to the bounds."""
        return max(self.replicas_min, min(replicas, self.replicas_max))


def replicas_for(load: float, target_share: float, spare: int = 0) -> int:
    """The fewest that hold the load at their target share with `spare` lost; 0 for no load."""
    needed = max(0, ceil((load - NOTHING) / target_share))
    return min(needed + spare, REPLICAS_MAX) if needed else 0


def share_of_the_lost(loads: Mapping[str, float]) -> dict[str, float]:
    """What each region takes on if the worst of the others is lost, spread evenly: max load of another / (regions - 1).

    So sum(load + share) over any that are left is at least the sum of all loads (N-1). 0 where there is but one.
    """
    others = len(loads) - 1
    if others < 1:
        return dict.fromkeys(loads, 0.0)
    most, next_most = heapq.nlargest(2, loads.values())
    return {name: (next_most if load >= most else most) / others for name, load in loads.items()}


def made_up_for(largest_share: float) -> float:
    """By how much all regions grow, each in proportion, so that the largest (its share of all) may be lost: 1 / (1 -
    largest), and a quarter over for what does not divide; at most 6.25."""
    return 1.25 / max(0.2, 1.0 - largest_share)


class DesiredReplicas:
    """The signal for one model: from the load, observed now and then, how many replicas there should be.

    Up at once: by the load, and by where its trend leads within a warm-up. Down only when fewer would carry the highest
    load of `down_after_s`, and BAND more.
    """

    __slots__ = ("_at", "_began", "_bounds", "_fast", "_highest", "_slow", "needed")

    def __init__(self, bounds: ScalingBounds) -> None:
        self._bounds = bounds
        self._began = self._at = 0.0
        self._fast: float | None = None
        self._slow = 0.0
        self._highest = WindowMax()  # of the loads foreseen
        self.needed = 0  # without bounds

    def configure(self, bounds: ScalingBounds) -> None:
        """Use these bounds from the next call of `observe` on."""
        self._bounds = bounds

    @property
    def bounds(self) -> ScalingBounds:
        """The bounds in force."""
        return self._bounds

    @property
    def desired(self) -> int:
        """The number of replicas wanted, within the bounds."""
        return self._bounds.clamp(self.needed)

    @property
    def load(self) -> float:
        """The highest that was foreseen lately, in replicas kept at their target share."""
        return self._highest.most / self._bounds.target_share

    def observe(self, load: float, present: int, now: float) -> None:
        """The load in replicas, and how many are there, at `now`: not before the last time. NaN changes nothing."""
        if not load >= 0.0:
            return
        bounds = self._bounds
        most = self._highest.take(self._foreseen(min(load, REPLICAS_MAX), now), now, bounds.down_after_s)
        needed = replicas_for(most, bounds.target_share, bounds.spare_replicas)
        if now - self._began < SETTLE_S:
            needed = max(needed, min(present, bounds.replicas_max), self.needed)
        less = replicas_for(most * (1.0 + BAND), bounds.target_share, bounds.spare_replicas)
        if needed > self.needed:
            self.needed = needed
        elif less < self.needed and now - self._began >= max(SETTLE_S, bounds.down_after_s):
            self.needed = less

    def _foreseen(self, load: float, now: float) -> float:
        warm_up_s = max(1.0, self._bounds.warm_up_s)
        if self._fast is None:
            self._began, self._at = now, now
            self._fast = self._slow = load
            return load
        fast_s = max(_FAST_MIN_S, _FAST * warm_up_s)
        slow_s = _SLOWER * fast_s
        dt_s, self._at = max(0.0, now - self._at), now
        self._fast += (load - self._fast) * (1.0 - exp(-dt_s / fast_s))
        self._slow += (load - self._slow) * (1.0 - exp(-dt_s / slow_s))
        # On a ramp each mean lags by its own time: the slope is what parts them.
        slope = max(0.0, self._fast - self._slow) / (slow_s - fast_s)
        ahead = self._fast + slope * (fast_s + self._bounds.warm_up_s)
        return min(ahead, GROWTH_MAX * self._fast) if slope else self._fast
