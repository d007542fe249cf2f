"""How long a request may stand in the region's queue: after what wait it is late, and whether it may wait on then.

Reads the queue and what a request would meet. Never changes the queue, and never answers anybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb.scheduler.queue import LATE_SHARE, SLOWDOWN_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from regional_lb.scheduler.queue import QueueConfig, RequestQueue
    from regional_lb.scheduler.request_state import RequestState
    from regional_lb.scheduler.wait_estimate import WaitEstimate

LATE_MIN_S = 1e-3  # where what is wanted cannot be had


class Patience:
    """See the module's head. `weight_of` gives a tenant's share of its band."""

    def __init__(
        self, config: QueueConfig, queue: RequestQueue, wait_estimate: WaitEstimate, weight_of: Callable[[str], float]
    ) -> None:
        self.config, self._queue, self._wait_estimate, self._weight_of = config, queue, wait_estimate, weight_of

    def crowds(self, state: RequestState, more: int = 0) -> bool:
        """Whether its tenant has its share of those who wait, or more, with so many `more`: see RequestQueue.crowds."""
        request = state.request
        weight = self._weight_of(request.tenant)
        return self._queue.crowds(state.variant, request.priority, request.tenant, weight, more)

    def waits_on(self, state: RequestState, now: float) -> bool:
        """Whether one that waited too long goes on waiting: not where it stepped back already, or has waited as long as
        anybody may. Where another region may have room for it, that is no longer than its first token was wanted in:
        let go as soon as it steps back, it would find less of its prompt cached, and as little room."""
        request, config = state.request, self.config
        if state.late:
            return False
        elsewhere = request.issuer and request.promised_ttft_ms is not None and not request.waited_s
        most_s = min(config.wait_s, self._objective_s(state, now)) if elsewhere else config.wait_s
        since = now if state.held_at is None else state.held_at
        state.late_until = since + most_s - request.waited_s
        return now < state.late_until

    def most_s(self, state: RequestState, now: float) -> float:
        """How long a request may wait: less where its band's queue stands, and is no burst that will be worked off.
        Who takes long to prefill may wait for as much longer.

        First come, first served, everybody would wait as long as anybody may, and all that is served be late. A queue
        stands where the oldest has always been late (CoDel, RFC 8289), not where it merely was never empty: that it is
        for long stretches at 0.9 of capacity, and nobody need be refused. Who is late already still goes before nobody.
        What it waited in regions that let it go counts; where no queue stands it may wait that little once more. Who
        stepped back is in nobody's way, and may wait as long as anybody.
        """
        if state.late:
            return self.config.wait_s
        config, waited_s = self.config, state.request.waited_s
        stands = self._queue.stands_s(state.variant, state.request.priority, now) > config.stands_s
        if not stands and not waited_s:
            return config.wait_s
        return min(config.wait_s, self.late_s(state, now) + (0.0 if stands else waited_s))

    def late_s(self, state: RequestState, now: float) -> float:
        """After what wait in all it is late, or cannot be in time any more if its client says what that is."""
        objective_s, prefill_s = self._objective_s(state, now), self._wait_estimate.prefill_s(state, now)
        if state.request.first_token_by is None:
            return max(LATE_SHARE * objective_s, SLOWDOWN_MAX * prefill_s)
        return max(min(LATE_SHARE * objective_s, objective_s - prefill_s), LATE_MIN_S)

    def _objective_s(self, state: RequestState, now: float) -> float:
        """Within how long its first token was wanted when it began to wait, wherever that was."""
        by, since = state.request.first_token_by, now if state.held_at is None else state.held_at
        return self.config.ttft_objective_s if by is None else by - since + state.request.waited_s
