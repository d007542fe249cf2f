"""`least-load`: the region of which the smallest share is used. Knows nothing of distance. Never writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from global_lb.policy.base import Policy

if TYPE_CHECKING:
    from global_lb.table import Column, Field


class LeastLoad(Policy):
    """The used share as reported, and what was sent there since. Near equals are drawn by headroom: no herding."""

    name, unit = "least-load", "share used"
    ties = 0.05

    def score(self, field: Field) -> Column:
        """See Field.used_share."""
        return field.used_share()
