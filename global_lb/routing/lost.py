"""Whether a request waits for a lost region that has its prompt cached, and until when.

A balancer that is started again finds its engines, and their caches, as they were; a request that goes elsewhere
meanwhile is prefilled again there. It is unknown how long a region stays away. Waiting for as long as that prefill
would take, counted from the loss, costs at most as much again (ski rental, Karlin et al. 1988).

Never sends or holds anything, and never waits for a region that the law forbids or an operator drained.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from farhop.balance import outcome, retry
from farhop.balance.outcome import Source

if TYPE_CHECKING:
    from farhop.balance.health.region import Liveness
    from global_lb.fleet.regions import Regions
    from global_lb.routing.pick import Decision
    from global_lb.routing.request_state import RequestState

# No balancer is started again sooner: who would lose less elsewhere does not wait. Measured in worlds drawn at random
# (docs/measurements/routing-trials.md).
WORTH_MIN_S = 1.0
WAIT_MAX_S = 5.0  # later a balancer is hardly back by itself, however long the prompt is
_ATTEMPTS = retry.ATTEMPTS_MAX // 2  # the others are for other regions


def is_lost(liveness: Liveness) -> bool:
    """Whether the region is lost, and not by an operator's order."""
    return liveness.lost_at is not None and liveness.forced.health is None


def region_to_wait_for(
    state: RequestState, decision: Decision, regions: Regions, held_for: str | None, now: float
) -> tuple[str, float] | None:
    """The region that the request waits for rather than go where it was decided, and until when (monotonic seconds);
    None if it goes. `held_for`: the region that it waits for already. Each region is waited for once, until the
    balancer that is back has found its engines, too.
    """
    if state.attempts > _ATTEMPTS:
        return None
    refusals = state.refusals
    for region, until in state.waited_for.items():
        finds_engines = refusals.get(region, outcome.NO_REPLICA) is outcome.NO_REPLICA
        waits = region in decision.absent and now < until and (finds_engines or region == held_for)
        if waits and regions.liveness[region].forced.health is None:
            return region, until
    found = _lost(state, decision, regions)
    if found is None:
        return None
    region, until = found
    request, chosen = state.request, decision.chosen
    if request.first_token_by is not None and chosen is not None and not state.resumes:
        until = min(until, request.first_token_by - chosen.bare_ttft_ms / 1e3)  # it goes while it can be in time
    until = min(until, request.deadline)
    return (region, until) if now < until else None


def _lost(state: RequestState, decision: Decision, regions: Regions) -> tuple[str, float] | None:
    """The lost region that it would wait for the longest, and until when."""
    refusals, request, candidates, chosen = state.refusals, state.request, decision.candidates, decision.chosen
    lost = [
        name
        for name in decision.absent  # lawful regions alone are named there
        if name in regions.lost
        and name not in state.waited_for
        and is_lost(regions.liveness[name])
        and (name not in refusals or refusals[name].source is Source.TRANSPORT)
    ]
    if not lost or candidates is None or chosen is None:
        return None
    depths, latest = regions.trie.match(request.chain), ("", -inf)
    for name in lost:
        held_bytes = regions.partial_blocks.bytes_behind(request.chain, depths.get(name, 0))
        worth_s = candidates.fill_up_ms(candidates.at[chosen.region], min(held_bytes, request.prompt_bytes)) / 1e3
        lost_at = regions.liveness[name].lost_at
        if worth_s >= WORTH_MIN_S and lost_at is not None:
            latest = max(latest, (name, lost_at + min(worth_s, WAIT_MAX_S)), key=lambda one: one[1])
    return latest if latest[0] else None
