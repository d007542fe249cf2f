"""`predictive`: the earliest first token, and what later tokens cost, in milliseconds.

    ttft_ms(r)  = rtt_ms(r) + upload_ms(r, bytes) + wait_ms(r) + work(r) * prefill_ms_per_token(r)
    work(r)     = cost.prefill_work of n - hit(r), the last of n prompt tokens
    score_ms(r) = ttft_ms(r) + beta * (m * (token_ms(r) - min token) + stalled_ms(r)) + behind_ms(r)
    token_ms(r) = tpot_ms(r) + batch_interference_ms(r) * requests at each of its replicas: its cost to all of them
    stalled_ms(r) = the part of the prefill beyond a step * those requests: they wait for it
    behind_ms(r) = wait_ms(r) * work(r) / usual * min(1, wait_ms(r) / (usual * prefill_ms_per_token(r))):
                   the requests behind this one wait for its prefill, too; `usual` is an average request's work

Prompt tokens n are counted by each region's own learned bytes per token. Never writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from global_lb.routing.policy.base import TIE_MS, Policy

if TYPE_CHECKING:
    from global_lb.fleet.table import Candidates, Column, Scored


class Predictive(Policy):
    """The default policy: the region with the least predicted cost (ms)."""

    name, unit = "predictive", "ms"
    in_ms = uncertain_waits = replicates_prefixes = True
    ties = TIE_MS

    def score(self, candidates: Candidates) -> Column:
        """See the module's docstring; the least tpot is the same for all, and is taken off where scores are shown."""
        return candidates.predicted_ms()

    def terms(self, scored: Scored) -> dict[str, float]:
        """See Policy."""
        return {
            "rtt": scored.rtt_ms,
            "upload": scored.upload_ms,
            "wait": scored.wait_ms,
            "prefill": scored.prefill_ms,
            "decode": scored.decode_ms,
            "interference": scored.interference_ms,
            "stall": scored.stall_ms,
            "behind": scored.behind_ms,
        }

    def shift(self, candidates: Candidates) -> float:
        """See Policy."""
        return candidates.beta * candidates.output_tokens * candidates.token_least_ms
