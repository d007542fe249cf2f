"""Prefill here, decode there: which replica computes a prompt for the one that answers, and how that half ends.

Invariants: the prefill's reservation is held under its own key from the Forward until PrefillEnded or PrefillFailed, or
until the request's attempt ends in any way, and is released once; a replica's estimates learn nothing from the half
that another replica did (a decode engine that fetched KV reports nearly all of the prompt as cached). Never chooses the
replica that answers: the pick does. If both are asked at once (SGLang), the first half may still run when the answer
begins; its failure then counts only against its own replica.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from farhop.balance.ledger import Reservation
from farhop.balance.machine import Prefill
from farhop.balance.outcome import Source
from regional_lb.scheduler.pick import Scored, uncached_tokens, work_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from regional_lb.fleet.blocks import Known
    from regional_lb.fleet.replicas import Replicas
    from regional_lb.fleet.table import Hits, Table
    from regional_lb.scheduler.pick import Pick
    from regional_lb.scheduler.policy import Need
    from regional_lb.scheduler.request_state import RequestState
    from topology.law import Verdict

ROOM_BITS = 63  # as SGLang's router draws them

# A shorter rest of a prompt is prefilled beside the decodes within a step or two; a pair costs a round trip and the
# transfer of its KV.
PAIR_MIN_TOKENS = 256


def prefiller(need: Need, chosen: Scored, table: Table, hits: Hits, known: Known, now: float) -> Scored | None:
    """As `soonest`; also None if too few of the prompt's tokens are uncached at the chosen replica."""
    return None if chosen.uncached_tokens <= PAIR_MIN_TOKENS else soonest(need, table, hits, known, now)


def soonest(need: Need, table: Table, hits: Hits, known: Known, now: float) -> Scored | None:
    """The one of these healthy prefill replicas with room that would finish first; None if there is none."""
    if not len(table):
        return None
    uncached = uncached_tokens(need, table, hits, known)
    work = work_tokens(uncached, need.prompt_tokens)
    backlog = table.backlog_left(now)
    end_ms = (backlog + work) * table.prefill_ms_per_token
    ready = np.where(table.room(uncached, 0.0, now), end_ms, np.inf)
    best = int(ready.argmin())
    if ready.item(best) == inf:
        return None
    left, own = uncached.item(best), work.item(best)
    return Scored(
        table.of.names[best], end_ms.item(best), need.prompt_tokens - left, left, own, backlog.item(best),
        table.prefill_ms_per_token.item(best), table.tpot_ms.item(best),
    )  # fmt: skip


class Pairs:
    """The prefill halves under way. `state.prefiller` is the replica of a request's half, "" if there is none. `hints`
    gives the verdict on where a request's prefix may be known."""

    def __init__(self, replicas: Replicas, hints: Callable[[Request], Verdict], rng: Random) -> None:
        self._replicas, self._hints, self._rng = replicas, hints, rng

    def begin(self, state: RequestState, choice: Pick, now: float) -> Prefill | None:
        """Reserve room for the prefill that the pick gives to another replica; None if there is none, or the replica
        may not take it now."""
        half = choice.prefill
        if half is None or not self._replicas.admit(half.replica, now):
            choice.prefill = None
            return None
        self._replicas.ledger.reserve(
            _key(state), Reservation(half.replica, int(half.work_tokens), int(half.uncached_tokens))
        )
        state.prefiller = half.replica
        replica = self._replicas.view.replicas[half.replica]
        if replica.handover == "vllm":
            return Prefill(half.replica, replica.address)
        return Prefill(half.replica, replica.address, replica.bootstrap_port, self._rng.getrandbits(ROOM_BITS))

    def ended(self, state: RequestState, now: float) -> None:
        """The prompt is computed: what follows is the decode replica's own time, if that has not begun before."""
        name, half = state.prefiller, state.pick.prefill if state.pick is not None else None
        self.over(state)
        self._replicas.answered(name, 200, now, state.forwarded_at, state.request.tenant)
        self._replicas.caches(name, state.request.chain, self._hints(state.request))
        if half is not None:
            elapsed_ms = (now - state.forwarded_at) * 1e3
            self._replicas.computed(name, elapsed_ms, half.backlog_tokens + half.work_tokens, now)
        if not state.started:
            state.forwarded_at = state.prefilled_at = now

    def failed(self, state: RequestState, reason: Outcome, now: float) -> str:
        """The prompt was not computed. Returns the replica that failed. An engine that refused the request (4xx) did
        not fail, but is not asked again for it."""
        name = state.prefiller
        self.over(state)
        if reason.source is Source.ENGINE:
            self._replicas.answered(name, 400, now, tenant=state.request.tenant)
            state.whole = True
        else:
            self._replicas.failed(name, reason, now, state.forwarded_at, state.request.tenant)
        return name

    def give_back(self, state: RequestState) -> None:
        """Release all that a request holds: its attempt, or the request itself, is over."""
        self._replicas.ledger.release(state.request.id)
        if state.prefiller:
            self.over(state)

    def over(self, state: RequestState) -> None:
        """Give back what the half under way holds, if there is one."""
        if state.prefiller:
            self._replicas.ledger.release(_key(state))
            state.prefiller = ""


def _key(state: RequestState) -> str:
    return state.request.id + "/prefill"
