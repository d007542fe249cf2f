"""NVIDIA Dynamo's KV router (ai-dynamo/dynamo, lib/kv-router/src/scheduling, 2026): the fewest blocks of work.

    cost = prefill_load_scale x max(0, raw_prefill_blocks - overlap_score_credit x overlap_blocks) + decode_blocks
    raw_prefill_blocks = (uncached prompt tokens of requests without a first token there + this prompt) / block size
    decode_blocks = blocks of all requests under way there, shared ones once, this one's among them

Both weights are 1, the temperature is 0 (the least cost, ties at random), outputs are not tracked: its defaults.
Overlap is what the engine's cache holds by its KV events (`use_kv_events`). While every engine has more than
`QUEUE_THRESHOLD` batches of prompt tokens to compute, requests stay queued in the router, first come first served. It
knows one pool and no wire. Reads only, but for what it was told of its own requests.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from farhop_lab.engine.core.text import token_count
from farhop_lab.sim.baselines.caches import EngineCaches
from farhop_lab.sim.baselines.router import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.process import EnginePool
    from farhop_lab.sim.baselines.router import Ended, RouterState

QUEUE_THRESHOLD = 4.0
"""`router_queue_threshold`, in units of an engine's `max_num_batched_tokens`."""
BLOCK_TOKENS = 16
"""For engines that are not a Gpu and have no blocks."""


class KvRouter:
    """How it picks. See the module's head."""

    def __init__(self, pools: Mapping[str, EnginePool], rng: Random) -> None:
        self._caches, self._rng = EngineCaches(pools), rng
        self._prefill: Counter[str] = Counter()  # uncached tokens without a first token yet
        self._active: dict[str, Counter[int]] = {}  # requests under way by block
        self._sent: dict[str, tuple[str, int, list[int]]] = {}
        self._begun: set[str] = set()

    def busy(self, names: Sequence[str], state: RouterState, now: float) -> bool:
        """Whether none of them takes more: for WholePool and NearestFirst."""
        return all(self._prefill[name] > QUEUE_THRESHOLD * self._batch_tokens(name, state) for name in names)

    def _batch_tokens(self, name: str, state: RouterState) -> int:
        gpu = self._caches.gpu(name, state)
        return gpu.core.profile.prefill_tokens_per_step if gpu is not None else 8192

    def costs(self, request: Request, among: Sequence[str], state: RouterState) -> dict[str, float]:
        """In blocks, by name; lower is better."""
        return {name: self._cost(request, name, state) for name in among}

    def _cost(self, request: Request, name: str, state: RouterState) -> float:
        size, names, overlap = self._look(request, name, state)
        prefill = (self._prefill[name] + token_count(text_of(request))) / size
        active = self._active.get(name, ())
        decode = len(active) + sum(block not in active for block in names)
        return max(0.0, prefill - overlap) + decode

    def _look(self, request: Request, name: str, state: RouterState) -> tuple[int, list[int], int]:
        """The size of its blocks, the names of this prompt's, and how many of those it holds."""
        gpu = self._caches.gpu(name, state)
        if gpu is None:
            return BLOCK_TOKENS, [], 0
        names = self._caches.names(request, gpu)
        return gpu.core.profile.block_tokens, names, gpu.core.kv.match(names)

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        costs = self.costs(request, among, state)
        least = min(costs.values())
        return self._rng.choice([name for name in among if costs[name] == least])

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        size, names, overlap = self._look(request, target, state)
        uncached = max(0, token_count(text_of(request)) - overlap * size)
        self._prefill[target] += uncached
        self._active.setdefault(target, Counter()).update(names)
        self._sent[request.id] = target, uncached, names

    def began(self, request_id: str) -> None:
        """See router.Learner."""
        if request_id in self._sent and request_id not in self._begun:
            self._begun.add(request_id)
            target, uncached, _ = self._sent[request_id]
            self._prefill[target] -= uncached

    def ended(self, what: Ended) -> None:
        """See router.Learner."""
        self.began(what.id)
        self._begun.discard(what.id)
        target, _, names = self._sent.pop(what.id)
        active = self._active[target]
        for block in names:
            active[block] -= 1
            if not active[block]:
                del active[block]
