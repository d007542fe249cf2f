"""`failover`: the first of a list that serves, active and passive. Never writes.

A region that comes back gets its requests back at the hot guard's pace, as under every policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from global_lb.policy.base import ByRegion, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from global_lb.table import Column, Field

_FAR_MS = 1e6  # above every wire time


class Failover(Policy):
    """The listed ones in their order, then all others, the nearest first."""

    name, unit = "failover", "place in the list"

    def __init__(self, regions: Sequence[str]) -> None:
        self._listed = len(regions)
        self._places = ByRegion({name: float(place) for place, name in enumerate(regions)}, float(len(regions)))

    def score(self, field: Field) -> Column:
        """Its place in the list; beyond its end a fraction by wire time."""
        places = self._places.column(field.names)
        score: Column = places + (places >= self._listed) * (field.rtt_ms / _FAR_MS)
        return score
