"""Estimates how long requests wait in this region, and how much of it is in use: for one more request, for those in the
queue, and for reports.

`wait_ms` is how long one more request would wait; `in_turn` orders those that wait by how long they still can. Never
changes anything.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from regional_lb.fleet.view import model_of
from regional_lb.scheduler.pick import expected_wait_ms, uncached_tokens, work_tokens

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from regional_lb.fleet.replicas import Replicas
    from regional_lb.fleet.table import Line, Table
    from regional_lb.scheduler.deferred import Deferred
    from regional_lb.scheduler.eligibility import Eligibility
    from regional_lb.scheduler.policy import Need
    from regional_lb.scheduler.queue import RequestQueue
    from regional_lb.scheduler.request_state import RequestState
    from regional_lb.scheduler.selector import ReplicaSelector
    from regional_lb.scheduler.split import Splits

# An answer that is cut off at its deadline was computed for nothing, and in overload those that waited longest are all
# about to be cut off. At 4 times its capacity a simulated region serves 18 % of that capacity in time with a margin of
# 1.0, and 99 % with 1.25.
MARGIN = 1.25
HOPELESS = 2.0  # times as long as it may: the expectation errs
CACHED_SHARE = 0.25  # below it a cached prefix is no reason to go before others


class WaitEstimate:
    """See the module's docstring. `deferred`: the requests that wait by choice."""

    def __init__(
        self,
        replicas: Replicas,
        queue: RequestQueue,
        eligibility: Eligibility,
        selector: ReplicaSelector,
        splits: Splits,
        deferred: Deferred,
    ) -> None:
        self._replicas, self._queue, self._splits = replicas, queue, splits
        self._eligibility, self._selector, self._deferred = eligibility, selector, deferred

    def wait_ms(self, model: str, now: float) -> float:
        """How long one more request for the model, or variant, would wait before its prefill begins, in ms, averaged
        over its parts; 0 if no replica serves it."""
        parts = self._eligibility.parts(model)
        if len(parts) == 1:  # nearly always, and 20 times a second
            return self._wait_ms(parts[0][1], self.in_line(parts[0][1]), now)
        return sum(share * self._wait_ms(variant, self.in_line(variant), now) for share, variant in parts)

    def foreign_wait_ms(self, model: str, now: float) -> float:
        """How long one more request from another region that no other would take would wait, at least, in ms: as long
        as the first of those in the queue has waited, which is the best guess if it is unknown how many go before them
        (the delay of the head of the line: R. Ibrahim, W. Whitt, "Real-time delay estimation based on delay history",
        M&SOM 11, 2009). The region's own requests do, however many arrive. Requests that wait by choice leave the room
        to others."""
        queue, by_choice = self._queue, self._deferred.by_request
        return 1e3 * sum(
            share * queue.foreign_waits_s(variant, now, by_choice) for share, variant in self._eligibility.parts(model)
        )

    def in_line(self, variant: str) -> int:
        """How many requests wait because no replica has room for them, and have not stepped back: those that wait by
        choice leave the room to others."""
        waiting = self._queue.on_time(variant)
        return max(0, waiting - self._deferred.by_variant.get(variant, 0)) if waiting else 0

    def _wait_ms(self, variant: str, queued: int, now: float) -> float:
        # Of the requests waiting at another balancer of the region, as many are served before ours as are ahead of it
        # here.
        return expected_wait_ms(
            self._eligibility.serving_table(variant, now),
            queued,
            now,
            self.queued_elsewhere(model_of(variant), queued + 1),
        )

    def queued(self, model: str) -> int:
        """How many requests wait for the model, whichever version of it."""
        if self._splits.of(model) is None:
            return self._queue.waiting(model)
        return sum(self._queue.waiting(variant) for variant in self._queue.models() if model_of(variant) == model)

    def queued_elsewhere(self, model: str, most: float = inf) -> int:
        """Requests for the model that wait at other balancers of the region, counting at most `most` of each
        balancer's."""
        shares = self._replicas.shares
        return shares.queued(model, most) if shares is not None else 0

    def used_share(self, model: str, now: float) -> float:
        """The share of slots or of KV cache, whichever is larger, that is in use or waited for, averaged over the
        model's parts."""
        parts = self._eligibility.parts(model)
        if len(parts) == 1:
            return self._used(parts[0][1], now)
        return sum(share * self._used(variant, now) for share, variant in parts)

    def _used(self, variant: str, now: float) -> float:
        able = self._eligibility.serving_table(variant, now)
        if not len(able):
            return 0.0
        sums = able.sums()
        wanted = sums.in_flight + self._queue.waiting(variant) + self.queued_elsewhere(model_of(variant))
        return max(wanted / sums.slots, sums.kv_taken_tokens / sums.kv_tokens)

    def prefill_s(self, state: RequestState, now: float) -> float:
        """Seconds to prefill its whole prompt at the fastest able replica; 0 if there is none."""
        per_token_ms = self._eligibility.serving_table(state.variant, now).prefill_ms_per_token
        return state.need.prompt_tokens * per_token_ms.item(per_token_ms.argmin()) / 1e3 if len(per_token_ms) else 0.0

    def hopeless(self, state: RequestState, weight: float, most_s: float, now: float) -> bool:
        """Whether the request would wait far longer than it may (at most `most_s`), behind those due before it.

        Never true for the next in turn, since its waiting costs nothing. Some replica must be able to serve it.
        `weight` is its tenant's.
        """
        ahead = self._queue.ahead(state.variant, state.request.priority, state.request.tenant, weight)
        ahead = min(ahead, self.in_line(state.variant))
        if not ahead:
            return False
        able = self._eligibility.serving_table(state.variant, now)
        patience_ms = _patience_ms(state.request, self._service_ms(state.request, state.need, able), most_s, now)
        return self._wait_ms(state.variant, ahead, now) > HOPELESS * patience_ms

    def too_late(self, request: Request, need: Need, table: Table, now: float) -> bool:
        """Whether the request could hardly be served by its deadline if it were sent now. `table` has at least one
        row."""
        return (request.deadline - now) * 1e3 < self._service_ms(request, need, table)

    def _service_ms(self, request: Request, need: Need, table: Table) -> float:
        """As the function of this name, except for tenants that never got an answer: a guessed answer length must not
        be a reason to refuse, since a refused tenant gets no answer, and the guess would never be corrected."""
        known = self._replicas.estimates.knows_output(request.tenant, request.model)
        return _service_ms(need.prompt_tokens, need.output_tokens if known else 1.0, table)

    def in_turn(self, first: list[RequestState], table: Table, now: float, line: Line | None) -> list[RequestState]:
        """The first in the queue, in the order in which they are offered free room at the healthy replicas of `table`.

        By priority band, those that stepped back last. Within a band: first a request that would miss its deadline if
        all others went before it; then the one with most of its prompt cached where there is room; then in turn.
        """
        if len(first) < 2:
            return first
        turns_ms = expected_wait_ms(table, len(first), now)
        room = table.room(0.0, 0.0, now, line)

        def turn(state: RequestState) -> tuple[bool, int, bool, float]:
            need = state.need
            service_ms = _service_ms(need.prompt_tokens, need.output_tokens, table)
            pressed = _patience_ms(state.request, service_ms, inf, now) < turns_ms
            uncached = uncached_tokens(need, table, *self._selector.hits(need, table.of))[room]
            share = 1.0 - float(uncached.min()) / need.prompt_tokens if need.prompt_tokens and len(uncached) else 0.0
            return state.late, -state.request.priority, not pressed, -share if share >= CACHED_SHARE else 0.0

        return sorted(first, key=turn)


def _patience_ms(request: Request, service_ms: float, most_s: float, now: float) -> float:
    """How long a request with this service time may wait (at most `most_s`) and still be served by its deadline, in
    ms."""
    return max(0.0, min((request.deadline - now) * 1e3 - service_ms, most_s * 1e3))


def _service_ms(prompt_tokens: float, output_tokens: float, table: Table) -> float:
    """Milliseconds to serve a request at the fastest replica under its present load, with nothing cached, plus a
    margin. At least one row."""
    prefill_ms, tpot_ms = table.prefill_ms_per_token, table.tpot_ms
    fastest_prefill_ms, fastest_tpot_ms = prefill_ms.item(prefill_ms.argmin()), tpot_ms.item(tpot_ms.argmin())
    return MARGIN * (work_tokens(prompt_tokens, prompt_tokens) * fastest_prefill_ms + output_tokens * fastest_tpot_ms)
