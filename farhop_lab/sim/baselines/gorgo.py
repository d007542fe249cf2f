"""GORGO (arXiv 2602.11688): round-trip time, prefill and queue added up, the least of all engines.

Central, as in its author's package (gorgo-lb 0.2.0, `gorgo-2d`; a test holds it against that, score by score):
score(u) = w_rtt rtt_ms(u) + prefill_rate uncached_tokens(u) + queue_rate w_queue queued_tokens(u). The published
weights were learned with rates of 1, so they weigh tokens, not milliseconds; `calibrated`, the rates are each engine's
own milliseconds per token, which the package measures. Queued are the prompt tokens of all requests that were sent and
are not over (its `load_release_at_ttft` is off); uncached is what its own trie has not seen sent there.
Distributed, v1: a region's own replica costs t_p (queued + running + unmatched), a peer latency + t_p unmatched,
without a term for the peer's queue. Reads only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop_lab.engine.core.text import TOKEN_BYTES, token_count
from farhop_lab.sim.baselines.router import forwarded, text_of
from farhop_lab.sim.baselines.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.gorgo_tuner import OnlineTuner
    from farhop_lab.sim.baselines.router import Ended, RouterState

RTT_EVERY_S = 30.0
RTT_SMOOTHING = 0.3


class Weights(msgspec.Struct, frozen=True):
    """The result of its tuner: the weight of a millisecond of network, and of a queued token if an uncached one weighs
    1.
    """

    rtt: float
    queue: float


WILDCHAT = Weights(2.0, 0.104)
LONG_CONTEXT = Weights(0.276, 0.5)
UNTUNED = Weights(1.0, 1.0)


class Central:
    """See the module's head. With a `tuner` the weights are the best so far."""

    def __init__(self, weights: Weights, *, calibrated: bool = False, tuner: OnlineTuner | None = None) -> None:
        self._weights, self._calibrated, self._tuner = weights, calibrated, tuner
        self._tree = PrefixTree()

    def score(self, request: Request, among: Sequence[str], state: RouterState) -> dict[str, float]:
        """By name; lower is better. In uncached tokens, in ms if calibrated."""
        text = text_of(request)
        found = self._tuner.weights if self._tuner is not None else None
        w_rtt, w_queue = (
            (found["rtt"], found["queue"]) if found is not None else (self._weights.rtt, self._weights.queue)
        )
        depths = self._tree.depths(text, among)
        scores: dict[str, float] = {}
        for name in among:
            target = state.targets[name]
            uncached = token_count(text) - depths[name] // TOKEN_BYTES
            queued = state.queued_tokens[name] + state.running_tokens[name]
            rate = target.prefill_ms_per_token if self._calibrated else 1.0
            scores[name] = w_rtt * state.rtt_ms[target.region] + rate * max(0, uncached) + rate * w_queue * queued
        return scores

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        scores = self.score(request, among, state)
        return min(among, key=scores.__getitem__)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)

    def began(self, request_id: str) -> None:
        """See router.Learner."""

    def ended(self, what: Ended) -> None:
        """See router.Learner."""
        if self._tuner is not None and what.ttft_s is not None:
            self._tuner.on_sample(what.ttft_s)


class HomeAndPeers:
    """The candidates of the distributed one: the region's own engines, and peers unless one of them sent the
    request.
    """

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """See router.Eligibility."""
        names = state.local if forwarded(request) else [*state.local, *state.peers]
        return state.serving(names) or names


class Distributed:
    """How the distributed one picks."""

    def __init__(self) -> None:
        self._tree = PrefixTree()

    def cost_ms(self, request: Request, among: Sequence[str], state: RouterState) -> dict[str, float]:
        """By name; lower is better."""
        text = text_of(request)
        depths = self._tree.depths(text, among)
        costs: dict[str, float] = {}
        for name in among:
            target = state.targets[name]
            tokens = (len(text) - depths[name]) / TOKEN_BYTES
            if not target.balancer:
                tokens += state.queued_tokens[name] + state.running_tokens[name]
            wire_ms = state.rtt_ms[target.region] if target.balancer else 0.0
            costs[name] = wire_ms + target.prefill_ms_per_token * tokens
        return costs

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        costs = self.cost_ms(request, among, state)
        return min(among, key=costs.__getitem__)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)
