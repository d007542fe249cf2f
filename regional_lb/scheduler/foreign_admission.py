"""Whether a request from another region may enter this one: by what is free here beside the reserve, and by how long it
would wait.

The rules themselves are in regional_lb.scheduler.admission; here they are asked about the replicas that the request
could go to. Never changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb.fleet.view import model_of
from regional_lb.scheduler import admission
from regional_lb.scheduler.pick import least_prefill, prefill_wait_ms

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from regional_lb.scheduler.eligibility import Eligibility
    from regional_lb.scheduler.policy import Need
    from regional_lb.scheduler.queue import RequestQueue
    from regional_lb.scheduler.request_state import RequestState
    from regional_lb.scheduler.selector import ReplicaSelector
    from regional_lb.scheduler.wait_estimate import WaitEstimate


class ForeignAdmission:
    """See the module's docstring. `terms`: how much of the region is kept from such requests."""

    def __init__(
        self,
        region: str,
        terms: admission.ForeignConfig,
        eligibility: Eligibility,
        selector: ReplicaSelector,
        waits: WaitEstimate,
        queue: RequestQueue,
    ) -> None:
        self._region, self._terms = region, terms
        self._eligibility, self._selector, self._waits, self._queue = eligibility, selector, waits, queue

    def reconfigure(self, terms: admission.ForeignConfig) -> None:
        """From now on these are the terms."""
        self._terms = terms

    def turned_away(self, request: Request, need: Need, now: float, variant: str = "") -> admission.Refusal | None:
        """Why a foreign request that other regions could take may not enter; None if it may, if it is not foreign, or
        if no other region would take it. If no replica is healthy, the queue says so."""
        promised_ms = request.promised_ttft_ms
        if promised_ms is None or not admission.is_foreign(request, self._region):
            return None
        variant = variant or request.model
        table = self._eligibility.holding_table(need, request.model, variant, now)
        if not len(table):
            return None
        left = admission.headroom(table, self._terms.reserve_share)
        uncached, prefill_ms = least_prefill(need, table, *self._selector.hits(need, table.of))
        wait_ms = self._waits.wait_ms(variant, now)
        if prefill_ms + wait_ms > promised_ms:
            queued = self._waits.in_line(variant)
            queued += self._waits.queued_elsewhere(model_of(variant), queued + 1)
            wait_ms = min(wait_ms, prefill_wait_ms(table, need, queued, now, self._queue.line_of(variant)))
        expected_ms = wait_ms + prefill_ms
        return admission.foreign_refusal(promised_ms, uncached + need.output_tokens, left, expected_ms, self._terms)

    def headroom(self, variant: str, now: float) -> admission.Headroom:
        """What requests under way leave for foreign requests that wait here or that no other region would take."""
        return admission.last_resort_headroom(
            self._eligibility.serving_table(variant, now), self._terms.last_resort_reserve_share
        )

    def fits(self, state: RequestState, now: float) -> bool:
        """Whether a foreign request that waits here or that no other region would take fits beside its reserve now."""
        table = self._eligibility.holding_table(state.need, state.request.model, state.variant, now)
        if not len(table):
            return False
        left = admission.last_resort_headroom(table, self._terms.last_resort_reserve_share)
        uncached, _ = least_prefill(state.need, table, *self._selector.hits(state.need, table.of))
        return left.takes(uncached + state.need.output_tokens)

    def open_share(self, model: str, now: float) -> float:
        """The share of new requests for the model that would find a slot beside the reserve among their variant's."""
        parts, kept = self._eligibility.parts(model), self._terms.reserve_share
        if len(parts) == 1:
            return 1.0  # the headroom of the whole says it
        return sum(
            share
            for share, variant in parts
            if admission.headroom(self._eligibility.serving_table(variant, now), kept).slots
        )
