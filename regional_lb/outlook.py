"""What a request would meet in this region now: its need, who could take it, whom it would get, how long it would wait.

Everything is read here, for the flow, for reports and for `explain` alike. Never changes anything.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from farhop.balance import chain
from regional_lb import admission, pairs
from regional_lb.pick import expected_wait_ms, least_prefill, pick
from regional_lb.policy import Need

if TYPE_CHECKING:
    from collections.abc import Collection
    from random import Random

    from farhop.balance.machine import Request
    from regional_lb.fleet import Fleet
    from regional_lb.live import Live
    from regional_lb.pick import Pick
    from regional_lb.policy import Policies
    from regional_lb.queue import WaitingRoom
    from regional_lb.table import Table

# What a deadline cuts off was computed for nothing, and in overload all who wait longest are just about to be cut off:
# at 4 times its capacity a simulated region serves 18 % of that with a margin of 1.0, and 99 % with 1.25.
MARGIN = 1.25
CACHED_SHARE = 0.5  # below it a cached prefix is no reason to go before others


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

    def consider(
        self, request: Request, need: Need, now: float, without: tuple[str, ...] = (), *, whole: bool = False
    ) -> Pick | None:
        """Score the healthy replicas for a request; None if there are none. `whole`: without one that prefills."""
        able = self._fleet.able(request.model, now).without(without)
        if not able:
            return None
        hits = self._fleet.trie.match(request.chain)
        choice = pick(need, self._fleet.table(able), hits, self._policies.of(request.model), now, self._rng)
        chosen = choice.chosen
        if chosen is not None and request.model in self._fleet.view.prefillers and request.divisible and not whole:
            others = self._fleet.able_to_prefill(request.model, now).without(without)
            choice.prefill = pairs.prefiller(need, chosen, self._fleet.table(others), hits, now)
        return choice

    def turned_away(self, request: Request, need: Need, now: float) -> admission.Refusal | None:
        """Why a guest may not enter; None for who is none. That nobody is healthy is for the queue to say."""
        if not admission.is_guest(request, self._region):
            return None
        table = self.able(request.model, now)
        if not len(table):
            return None
        left = admission.headroom(table, self._foreign.reserve_share)
        uncached, prefill_ms = least_prefill(need, table, self._fleet.trie.match(request.chain))
        queued, expected_ms = self._queue.waiting(request.model), self.wait_ms(request.model, now) + prefill_ms
        return admission.guest(request, uncached + need.output_tokens, left, queued, expected_ms, self._foreign)

    def wait_ms(self, model: str, now: float, priority: int | None = None) -> float:
        """What one more request for the model would wait before its prefill begins; 0 where nobody serves it.

        Of a priority band: behind those of it and above.
        """
        ahead = self._queue.waiting(model) if priority is None else self._queue.ahead(model, priority)
        return expected_wait_ms(self.able(model, now), ahead, now)

    def patience_ms(self, request: Request, need: Need, table: Table, most_s: float, now: float) -> float:
        """How long a request may wait, `most_s` at the most, and still be served by its deadline. At least one row."""
        left_ms = (request.deadline - now) * 1e3 - _service_ms(need, table)
        return max(0.0, min(left_ms, most_s * 1e3))

    def too_late(self, request: Request, need: Need, table: Table, now: float) -> bool:
        """Whether it would hardly be served by its deadline if it were sent on now. At least one row."""
        return (request.deadline - now) * 1e3 < _service_ms(need, table)

    def in_turn(self, first: list[Live], table: Table, now: float) -> list[Live]:
        """The first in line, in the order in which they are offered what is free at the healthy replicas of `table`.

        Band by band: who would miss its deadline if all of them went before; then who finds most of its prompt cached
        where there is room; then as they are due.
        """
        if len(first) < 2:
            return first
        turns_ms = expected_wait_ms(table, len(first), now)
        roomy = {table.of.names[row] for row in table.room(0.0, 0.0, now).nonzero()[0].tolist()}

        def turn(live: Live) -> tuple[int, bool, float]:
            pressed = self.patience_ms(live.request, live.need, table, inf, now) < turns_ms
            share = self._cached_share(live.request, roomy)
            return -live.request.priority, not pressed, -share if share >= CACHED_SHARE else 0.0

        return sorted(first, key=turn)

    def _cached_share(self, request: Request, names: Collection[str]) -> float:
        """How much of the prompt (0..1) the best of these replicas has cached."""
        hits = self._fleet.trie.match(request.chain)
        depth = max((depth for name, depth in hits.items() if name in names), default=0)
        return chain.bytes_at(depth) / request.prompt_bytes if request.prompt_bytes else 0.0

    def able(self, model: str, now: float) -> Table:
        """The replicas that serve the model and may take work. Not to be kept: it goes on changing."""
        return self._fleet.table(self._fleet.able(model, now))


def _service_ms(need: Need, table: Table) -> float:
    """What serving a request takes at the fastest as they are now (decoding is slower beside others), nothing cached,
    and something over. At least one row."""
    prefill_ms, tpot_ms = table.prefill_ms_per_token, table.tpot_ms
    fastest_prefill_ms, fastest_tpot_ms = prefill_ms.item(prefill_ms.argmin()), tpot_ms.item(tpot_ms.argmin())
    return MARGIN * (need.prompt_tokens * fastest_prefill_ms + need.output_tokens * fastest_tpot_ms)
