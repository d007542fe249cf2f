"""`predictive`: milliseconds until the first token, and what later tokens cost. Needs no counter of its own.

    score_ms(i) = (prefill backlog(i) + uncached(i)) * prefill_ms_per_token(i) + beta * m * (tpot_ms(i) - min tpot)

Never writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb.policy.base import Policy

if TYPE_CHECKING:
    from regional_lb.policy.base import Need
    from regional_lb.table import Column, Table

BETA = 0.25  # how much of a later token counts against the first: TTFT alone drowns decode (DESIGN: GORGO's finding)


class Predictive(Policy):
    """The default."""

    name, unit = "predictive", "ms"
    ties_share, ties_floor = 0.05, 1.0  # scores this close are equal within what prefill speed is known to

    def score(self, need: Need, table: Table, uncached_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """See the module's head, and farhop.balance.cost.replica_score_ms for one replica."""
        tpot_ms = table.tpot_ms
        later_ms = (tpot_ms - tpot_ms[tpot_ms.argmin()]) * (BETA * need.output_tokens)
        score_ms: Column = (table.backlog_tokens + uncached_tokens) * table.prefill_ms_per_token + later_ms
        return score_ms
