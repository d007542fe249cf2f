"""What a request would meet in this region now: its need, who could take it, whom it would get, how long it would wait.

Everything is read here, for the flow, for reports and for `explain` alike. Never changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import chain
from regional_lb import admission
from regional_lb.blocks import Path
from regional_lb.kv_words import TOKEN_BYTES
from regional_lb.pick import expected_wait_ms, least_prefill, pick
from regional_lb.policy import Need

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
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
        """The request in its model's tokens: counted where they are known, else estimated."""
        estimates, path = self._fleet.estimates, self._path(request)
        if path is not None:
            prompt_tokens = float(path.tokens)
            bytes_per_token = request.prompt_bytes / prompt_tokens
        else:
            bytes_per_token = estimates.bytes_per_token(request.model)
            prompt_tokens = request.prompt_bytes / bytes_per_token
        return Need(
            prompt_tokens=prompt_tokens,
            output_tokens=estimates.output_tokens(request.tenant, request.model, request.max_tokens),
            bytes_per_token=bytes_per_token,
            chain=request.chain,
            session=request.session,
            tenant=request.tenant,
            path=path,
        )

    def _path(self, request: Request) -> Path | None:
        tokens = request.tokens
        if tokens is None or len(tokens.ids) < TOKEN_BYTES or not self._fleet.counts_right(request.model):
            return None
        adapter = request.model if request.model in self._fleet.adapters.names else ""
        return Path(tokens.ids, adapter, tokens.cache_salt)

    def hits(self, need: Need) -> tuple[Mapping[str, float], Collection[str]]:
        """Tokens of the prompt that each replica is thought to hold, by name, and for whom that is no guess.

        Where a replica's events tell all it holds, that; where they tell a part, the more of that and of our mirror.
        """
        ends, per_token = chain.bytes_at, need.bytes_per_token
        hits = {name: ends(depth) / per_token for name, depth in self._fleet.trie.match(need.chain).items()}
        if need.path is None:
            return hits, ()
        exact, least = self._fleet.blocks.known(need.path)
        for name, tokens in least.items():
            hits[name] = max(tokens, hits.get(name, 0.0))
        hits.update(exact)
        return hits, exact

    def consider(self, request: Request, need: Need, now: float, without: tuple[str, ...] = ()) -> Pick | None:
        """Score the healthy replicas for a request; None if there are none."""
        able = self._fleet.able(request.model, now).without(without)
        if not able:
            return None
        hits, exact = self.hits(need)
        table = self._fleet.table(able)
        delay_ms = self._fleet.adapters.delay_ms(request.model, table)
        return pick(need, table, hits, self._policies.of(request.model), now, self._rng, exact, delay_ms)

    def turned_away(self, request: Request, need: Need, now: float) -> admission.Refusal | None:
        """Why a guest may not enter; None for who is none. That nobody is healthy is for the queue to say."""
        if not admission.is_guest(request, self._region):
            return None
        table = self.able(request.model, now)
        if not len(table):
            return None
        left = admission.headroom(table, self._foreign.reserve_share)
        uncached, prefill_ms = least_prefill(need, table, self.hits(need)[0])
        queued, expected_ms = self._queue.waiting(request.model), self.wait_ms(request.model, now) + prefill_ms
        return admission.guest(request, uncached + need.output_tokens, left, queued, expected_ms, self._foreign)

    def wait_ms(self, model: str, now: float) -> float:
        """What one more request for the model would wait before its prefill begins; 0 where nobody serves it."""
        return expected_wait_ms(self.able(model, now), self._queue.waiting(model), now)

    def able(self, model: str, now: float) -> Table:
        """The replicas that serve the model and may take work. Not to be kept: it goes on changing."""
        return self._fleet.table(self._fleet.able(model, now))
