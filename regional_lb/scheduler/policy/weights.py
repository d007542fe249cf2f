"""How much of the work each replica should get, for the weighted policies: as configured, else by measured speed.

Never chooses a replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb.scheduler.policy.base import PerReplica

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regional_lb.fleet.table import Column, Table

_MS_PER_S = 1e3


class Weights:
    """By name if any is configured; a replica without one weighs 1. Else requests a second by measured service time."""

    def __init__(self, configured: Mapping[str, float]) -> None:
        self._configured = dict(configured)
        self._column = PerReplica(1.0)

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy.adopt."""
        self._column.adopt(names)
        for name, weight in self._configured.items():
            self._column.set(name, weight)

    def of(self, table: Table) -> Column:
        """One per row, above 0."""
        if self._configured:
            return self._column.of(table)
        weights: Column = _MS_PER_S / table.service_ms
        return weights
