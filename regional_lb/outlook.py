"""What a request would meet in this region now: its need, who could take it, whom it would get, how long it would wait.

Everything is read here, for the flow, for reports and for `explain` alike. Never changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb import admission
from regional_lb.pick import expected_wait_ms, least_prefill, pick
from regional_lb.policy import Need

if TYPE_CHECKING:
    from random import Random

    from farhop.balance.machine import Request
    from regional_lb.fleet import Fleet
    from regional_lb.pick import Pick
    from regional_lb.policy import Policies
    from regional_lb.queue import WaitingRoom
    from regional_lb.table import Table


class Outlook:
    """See the module's head. `foreign` are the terms for work from other regions."""

    def __init__(
        self,
        region: str,
        foreign: admission.Foreign,
        fleet: Fleet,
        queue: WaitingRoom,
        policies: Policies,
        rng: Random,
    ) -> None:
        self._region, self._foreign = region, foreign
        self._fleet, self._queue, self._policies, self._rng = fleet, queue, policies, rng

    def need_of(self, request: Request) -> Need:
        """The request in its model's tokens."""
        estimates = self._fleet.estimates
        bytes_per_token = estimates.bytes_per_token(request.model)
        return Need(
            prompt_tokens=request.prompt_bytes / bytes_per_token,
            output_tokens=estimates.output_tokens(request.tenant, request.model, request.max_tokens),
            bytes_per_token=bytes_per_token,
            chain=request.chain,
            session=request.session,
            tenant=request.tenant,
        )

    def consider(self, request: Request, need: Need, now: float, without: tuple[str, ...] = ()) -> Pick | None:
        """Score the healthy replicas for a request; None if there are none."""
        able = self._fleet.able(request.model, now).without(without)
        if not able:
            return None
        hits = self._fleet.hits(request.chain, able)
        return pick(need, self._fleet.table(able), hits, self._policies.of(request.model), now, self._rng)

    def turned_away(self, request: Request, need: Need, now: float) -> admission.Refusal | None:
        """Why a guest may not enter; None for who is none. That nobody is healthy is for the queue to say."""
        if not admission.is_guest(request, self._region):
            return None
        able = self._fleet.able(request.model, now)
        if not able:
            return None
        table = self._fleet.table(able)
        left = admission.headroom(table, self._foreign.reserve_share)
        uncached, prefill_ms = least_prefill(need, table, self._fleet.hits(request.chain, able))
        queued, expected_ms = self._queue.waiting(request.model), self.wait_ms(request.model, now) + prefill_ms
        return admission.guest(request, uncached + need.output_tokens, left, queued, expected_ms, self._foreign)

    def wait_ms(self, model: str, now: float) -> float:
        """What one more request for the model would wait before its prefill begins; 0 where nobody serves it."""
        return expected_wait_ms(self.able(model, now), self._queue.waiting(model), now)

    def able(self, model: str, now: float) -> Table:
        """The replicas that serve the model and may take work. Not to be kept: it goes on changing."""
        return self._fleet.table(self._fleet.able(model, now))
