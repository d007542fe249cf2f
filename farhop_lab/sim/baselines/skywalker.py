"""SkyWalker (EuroSys'26): selective pushing by pending requests, home first, by a trie of what was sent.

    every 100 ms: a replica is available iff its engine's pending queue is 0
                  a remote router is available iff q_remote <= 10 and q_remote <= q_self and it has an available replica
    the head of the queue goes to an available local replica, else to an available remote router (once, never again)
    among them: who was sent the longest prefix (tie: fewest in flight) if it is more than half of the text, else the
    fewest in flight

Nothing is accounted for between two probes; a remote router's trie holds what this router sent there. Reads only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.baselines.router import forwarded, text_of
from farhop_lab.sim.baselines.rules import least
from farhop_lab.sim.baselines.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.router import RouterState

PROBE_S = 0.1
PAUSE_S = 0.01
"""Its loop's pause after each request that leaves the queue: at most 100 a second."""
REMOTE_QUEUE_MAX = 10
THRESHOLD = 0.5


class SelectivePushing:
    """Eligibility: SP-P."""

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """See router.Eligibility."""
        free = [name for name in state.serving(state.local) if state.pending(name) == 0]
        if free or forwarded(request):
            return free
        return [name for name in state.serving(state.peers) if self._free(name, state)]

    def _free(self, peer: str, state: RouterState) -> bool:
        known = state.balancers.get(peer)
        return known is not None and known.available and known.queued <= min(REMOTE_QUEUE_MAX, state.queued)


class LongestPrefix:
    """How it picks."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self._threshold = threshold
        self._tree = PrefixTree()

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        text = text_of(request)
        length, owners = self._tree.match(text, among)
        return least(owners if owners and length > self._threshold * len(text) else among, state)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)
