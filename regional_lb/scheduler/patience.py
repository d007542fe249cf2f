"""How long a request may wait in the region's queue: after which wait it is late, and whether it may keep waiting then.

Reads the queue and the wait estimate. Never changes the queue, and never answers a request.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from regional_lb.scheduler.queue import LATE_SHARE, SLOWDOWN_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from regional_lb.scheduler.queue import QueueConfig, RequestQueue
    from regional_lb.scheduler.request_state import RequestState
    from regional_lb.scheduler.wait_estimate import WaitEstimate

LATE_MIN_S = 1e-3  # if the objective cannot be met


class Patience:
    """See the module's docstring. `weight_of` gives a tenant's share of its band."""

    def __init__(
        self, config: QueueConfig, queue: RequestQueue, wait_estimate: WaitEstimate, weight_of: Callable[[str], float]
    ) -> None:
        self.config, self._queue, self._wait_estimate, self._weight_of = config, queue, wait_estimate, weight_of

    def crowds(self, state: RequestState, more: int = 0) -> bool:
        """Whether its tenant, with `more` requests in addition, has at least its share of the queue: see
        RequestQueue.crowds."""
        request = state.request
        weight = self._weight_of(request.tenant)
        return self._queue.crowds(state.variant, request.priority, request.tenant, weight, more)

    def late_until(self, state: RequestState, now: float) -> float:
        """Until when a request that has waited too long may keep waiting: as long as any may, or not at all (-inf) if
        it stepped back already. If another region may have room for it, the limit is its time-to-first-token objective:
        let go as soon as it steps back, it would find less of its prompt cached, and as little room."""
        request, config = state.request, self.config
        if state.late:
            return -inf
        elsewhere = request.issuer and request.promised_ttft_ms is not None and not request.waited_s
        most_s = min(config.wait_s, self._objective_s(state, now)) if elsewhere else config.wait_s
        since = now if state.held_at is None else state.held_at
        return since + most_s - request.waited_s

    def most_s(self, state: RequestState, now: float) -> float:
        """How long a request may wait, in seconds: less if its band has a standing queue, rather than a burst that is
        being worked off. A request that takes longer to prefill may wait proportionally longer. First come, first
        served, every request would wait for the whole limit, and all that are served would be late. A queue is standing
        if its oldest request has always been late (CoDel, RFC 8289), not if it merely is never empty: at 0.9 of
        capacity that lasts for long stretches, and no request need be refused. The wait in regions that released the
        request counts; if there is no standing queue here, it may wait that long once more. A request that stepped back
        blocks no other, and may wait as long as any.
        """
        if state.late:
            return self.config.wait_s
        config, waited_s = self.config, state.request.waited_s
        stands = self._queue.stands_s(state.variant, state.request.priority, now) > config.stands_s
        if not stands and not waited_s:
            return config.wait_s
        return min(config.wait_s, self.late_s(state, now) + (0.0 if stands else waited_s))

    def late_s(self, state: RequestState, now: float) -> float:
        """The total wait (seconds) after which the request is late or, if its client gave an objective, can no longer
        meet it."""
        objective_s, prefill_s = self._objective_s(state, now), self._wait_estimate.prefill_s(state, now)
        if state.request.first_token_by is None:
            return max(LATE_SHARE * objective_s, SLOWDOWN_MAX * prefill_s)
        return max(min(LATE_SHARE * objective_s, objective_s - prefill_s), LATE_MIN_S)

    def _objective_s(self, state: RequestState, now: float) -> float:
        """The request's time-to-first-token objective (seconds), counted from when it began to wait, in whichever
        region."""
        by, since = state.request.first_token_by, now if state.held_at is None else state.held_at
        return self.config.ttft_objective_s if by is None else by - since + state.request.waited_s
