"""vLLM production-stack's `kvaware` and `prefixaware` (vllm-project/production-stack, routers/routing_logic.py, 2026).

kvaware: the engine with the longest prefix by LMCache's controller, if that is all of the prompt but for 2,000 tokens
at most; otherwise by the session on a hash ring, without a session the one that was sent the fewest requests in the
last minute (an engine that was sent none, first). prefixaware: at random among those that were sent the longest prefix,
in chunks of 128 characters; nothing is ever forgotten. Neither looks at load otherwise. Reads only, except for what was
sent.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from farhop_lab.engine.core.text import token_count
from farhop_lab.sim.baselines.aibrix import whole_blocks
from farhop_lab.sim.baselines.caches import EngineCaches
from farhop_lab.sim.baselines.ring import ConsistentHash
from farhop_lab.sim.baselines.router import text_of
from farhop_lab.sim.baselines.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.process import EnginePool
    from farhop_lab.sim.baselines.router import RouterState

THRESHOLD_TOKENS = 2000
RATE_WINDOW_S = 60.0
CHUNK_CHARACTERS = 128


class KvAware:
    """See the module's head. LMCache's contents are the engine's own cache: the emulated ones have no other."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self._caches, self._ring = EngineCaches(pools), ConsistentHash()
        self._recent: deque[tuple[float, str]] = deque()
        self._rates: Counter[str] = Counter()

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        held = {name: self._held_tokens(request, name, state) for name in among}
        best = max(among, key=held.__getitem__)
        if held[best] and held[best] >= token_count(text_of(request)) - THRESHOLD_TOKENS:
            return best
        if request.session:
            return self._ring.choose(request, among, state, now)
        rates = self._rates.copy()
        for at, name in self._recent:
            if at >= now - RATE_WINDOW_S:
                break
            rates[name] -= 1
        return min(among, key=rates.__getitem__)

    def _held_tokens(self, request: Request, name: str, state: RouterState) -> int:
        gpu = self._caches.gpu(name, state)
        return gpu.core.kv.match(self._caches.names(request, gpu)) * gpu.core.profile.block_tokens if gpu else 0

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._recent.append((now, target))
        self._rates[target] += 1
        while self._recent[0][0] < now - RATE_WINDOW_S:
            self._rates[self._recent.popleft()[1]] -= 1


class PrefixAware:
    """See the module's head."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._tree = PrefixTree(chars_max=2**62)

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        text = text_of(request)
        depths = self._tree.depths(text, among)
        chunks = {name: whole_blocks(depths[name], len(text), CHUNK_CHARACTERS) for name in among}
        most = max(chunks.values())
        return self._rng.choice([name for name in among if chunks[name] == most])

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)
