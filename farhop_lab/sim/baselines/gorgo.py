"""GORGO (arXiv 2602.11688): wire time, prefill and queue added up in milliseconds, the least of all engines.

Central: score(u) = w_rtt rtt_ms(u) + prefill_rate uncached_tokens(u) + queue_rate w_queue queued_tokens(u).
Distributed, v1: a region's own replica costs t_p (queued + running + unmatched), a peer latency + t_p unmatched,
without a term for the peer's queue. Queued are the prompt tokens of requests sent and not begun, running those of
requests begun, both as this router counts them; uncached is what its own trie has not seen sent there. Reads only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop_lab.engine.core.text import TOKEN_BYTES
from farhop_lab.sim.baselines.router import forwarded, text_of
from farhop_lab.sim.baselines.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.router import RouterState

RTT_EVERY_S = 30.0
RTT_SMOOTHING = 0.3


class Weights(msgspec.Struct, frozen=True):
    """What its tuner ended at."""

    rtt: float
    queue: float


WILDCHAT = Weights(2.0, 0.104)
LONG_CONTEXT = Weights(0.276, 0.5)


class Central:
    """See the module's head. `prefill_rate` and `queue_rate` are each engine's own milliseconds per token, which the
    authors calibrate beforehand."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._tree = PrefixTree()

    def score_ms(self, request: Request, among: Sequence[str], state: RouterState) -> dict[str, float]:
        """By name; lower is better."""
        text, weights = text_of(request), self._weights
        depths = self._tree.depths(text, among)
        scores: dict[str, float] = {}
        for name in among:
            target = state.targets[name]
            uncached = (len(text) - depths[name]) / TOKEN_BYTES
            work = uncached + weights.queue * state.queued_tokens[name]
            scores[name] = weights.rtt * state.rtt_ms[target.region] + target.prefill_ms_per_token * work
        return scores

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        scores = self.score_ms(request, among, state)
        return min(among, key=scores.__getitem__)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)


class HomeAndPeers:
    """Whom the distributed one may ask: the region's own engines, and peers unless one of them sent it."""

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
