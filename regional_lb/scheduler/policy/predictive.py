"""`predictive`: milliseconds until the first token, and what later tokens cost. Needs no counter of its own.

    score_ms(i) = (prefill backlog(i) + work(i)) * prefill_ms_per_token(i)
                + beta * (m * (token_ms(i) - min token_ms) + stalled_ms(i))
    token_ms(i) = tpot_ms(i) with one request more + batch_interference_ms(i) * in flight(i)
    stalled_ms(i) = the part of the prefill beyond a step * in flight(i)

The work of a prefill is its uncached tokens, weighted up by the context before them (cost.prefill_work); the backlog is
the work of all prompts to be prefilled there, less what the engine has done of it since its step began. A token costs
the time that the request itself waits for it, and the time by which it delays all requests beside it: engines decode a
batch in one pass, so the second is as large as the first's growth, and without it load is never even. A prefill, too,
costs both: the whole batch pays for a missed prefix. A long prefill on the last replica that has none under way also
costs all requests that arrive meanwhile: `blocking_ms`. Never writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy import array

from regional_lb.fleet.table import TOTAL
from regional_lb.scheduler.policy.base import Policy

if TYPE_CHECKING:
    from regional_lb.fleet.table import Column, ScoreInputs, Table
    from regional_lb.scheduler.policy.base import Need

# How much of a later token counts against the first. From 0.05 to 1 throughput and hits are the same within 2 % in the
# ready-made scenarios; the first token's tail is shortest around this.
BETA = 0.15
_ZERO, _BETA = array(0.0), array(BETA)
LONG_MS = 1000.0  # a shorter prefill is over before many come


class Predictive(Policy):
    """The default."""

    name, unit = "predictive", "ms"
    explores = True
    waits_ms = 50.0  # what is being prefilled at each counts in its scores; the price of a detour through the queue
    ties_share, ties_floor = 0.05, 1.0  # scores this close are equal within what prefill speed is known to

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """See the module's docstring."""
        # cost.token_ms and .stalled_ms, all at once. A float beside a short column takes longer than the column itself.
        cost_ms = table.tpot_ms + table.batch_interference_ms * table.in_flight
        prefill_ms = work_tokens * table.prefill_ms_per_token
        stalled_ms = np.maximum(prefill_ms - table.tpot_alone_ms, _ZERO) * table.in_flight
        later_ms = (cost_ms - array(cost_ms.item(cost_ms.argmin()))) * array(need.output_tokens) + stalled_ms
        score_ms: Column = backlog_tokens * table.prefill_ms_per_token + prefill_ms + _BETA * later_ms
        return score_ms

    def blocking_ms(self, table: Table, work_tokens: Column) -> Column | None:
        """BETA times the total stall of the requests that arrive during a long prefill, half of it each, if no other
        replica is left for them: by Little's law in flight / service time arrive per millisecond."""
        stalled_ms = work_tokens * table.prefill_ms_per_token - table.tpot_alone_ms
        if stalled_ms.item(stalled_ms.argmax()) < LONG_MS:
            return None
        open_rows = table.backlog_tokens <= table.step_tokens
        n_open = np.count_nonzero(open_rows)
        if n_open > 1 or len(open_rows) < 2:
            return None
        per_ms = float(TOTAL(table.in_flight / table.service_ms))
        blocking_ms: Column = BETA * 0.5 * per_ms * np.square(np.maximum(stalled_ms, 0.0))
        return np.where(open_rows, blocking_ms, 0.0) if n_open else blocking_ms

    def at_stake(self, need: Need, table: Table, prefill_ms: Column) -> Column:
        """Its prefill, and the time of its tokens."""
        stake_ms: Column = prefill_ms + BETA * need.output_tokens * table.tpot_ms
        return stake_ms

    def terms(self, inputs: ScoreInputs, work_tokens: Column, output_tokens: float, score: Column) -> dict[str, Column]:
        """See Policy. `decode` is what its tokens take longer than a token costs where that is least; `interference`
        what they cost those under way there, `stall` what its prefill does."""
        per_token_ms = inputs.prefill_ms_per_token
        backlog_ms, prefill_ms = inputs.backlog_tokens * per_token_ms, work_tokens * per_token_ms
        interference_ms = BETA * output_tokens * inputs.batch_interference_ms * inputs.in_flight
        stall_ms = BETA * np.maximum(prefill_ms - inputs.tpot_alone_ms, 0.0) * inputs.in_flight
        return {
            "backlog": backlog_ms,
            "prefill": prefill_ms,
            # The least is of all replicas, of which the best are remembered: it is what is left.
            "decode": score - backlog_ms - prefill_ms - interference_ms - stall_ms,
            "interference": interference_ms,
            "stall": stall_ms,
        }
