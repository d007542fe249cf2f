"""AIBrix's `prefix-cache` (vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache.go, 2026).

    if the most requests exceed 2 (mean + 1) and the most less the fewest is 8 or more: matches count only at the
    engines with the fewest requests
    by share of the prompt's blocks that an engine was sent before, most first, fewest requests first among equals: the
    first whose requests do not exceed mean + 1 standard deviation of all
    else the fewest requests, at random among equals

Requests are those under way through this gateway; a block is 128 characters (its character tokenizer), a shorter one at
the end matches whole or not. Its table holds what was sent, not what engines hold, as by default. Reads only.
"""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from farhop_lab.sim.baselines.router import text_of
from farhop_lab.sim.baselines.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.router import RouterState

BLOCK_CHARACTERS = 128
IMBALANCE_FACTOR, IMBALANCE_GAP = 2.0, 8
DEVIATIONS = 1.0


class PrefixCache:
    """How it picks. See the module's head. `block` is in characters."""

    def __init__(self, rng: Random, block: int = BLOCK_CHARACTERS) -> None:
        self._rng, self._block = rng, block
        self._tree = PrefixTree()

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        counts = {name: state.in_flight[name] for name in among}
        most, fewest, mean = max(counts.values()), min(counts.values()), fmean(counts.values())
        matching = list(among)
        if most > IMBALANCE_FACTOR * (mean + 1.0) and most - fewest >= IMBALANCE_GAP:
            matching = [name for name in among if counts[name] == fewest]
        text = text_of(request)
        depths = self._tree.depths(text, matching)
        blocks = {name: whole_blocks(depth, len(text), self._block) for name, depth in depths.items()}
        bound = mean + DEVIATIONS * pstdev(counts.values())
        found = [name for name in matching if blocks[name] and counts[name] <= bound]
        self._rng.shuffle(found)
        if found:
            return min(found, key=lambda name: (-blocks[name], counts[name]))
        return self._rng.choice([name for name in among if counts[name] == fewest])

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)


def whole_blocks(depth: int, length: int, block: int) -> int:
    """How many blocks of a text match by hash where its first `depth` characters do."""
    return -(-length // block) if depth == length else depth // block
