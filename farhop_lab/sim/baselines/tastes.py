"""Tastes that need no ring and no wire: round robin, least load, SGLang's cache-aware rule, llm-d's weights.

Each is the published rule with its published constants as defaults. `choose` reads; `sent` alone writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.baselines.tree import PrefixTree
from farhop_lab.sim.baselines.words import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.words import Board


class RoundRobin:
    """One after another in the board's order, whoever is among them."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, among: Sequence[str], board: Board, now: float) -> str:
        """See router.Taste."""
        places = {name: place for place, name in enumerate(board.targets)}
        count = len(places)
        return min(among, key=lambda name: (places[name] - self._last - 1) % count)

    def sent(self, request: Request, target: str, board: Board, now: float) -> None:
        """See router.Taste."""
        self._last = list(board.targets).index(target)


def least(among: Sequence[str], board: Board) -> str:
    """The fewest requests of this router in flight; the first of equals."""
    return min(among, key=lambda name: board.in_flight[name])


class LeastLoad:
    """The fewest in flight."""

    def choose(self, request: Request, among: Sequence[str], board: Board, now: float) -> str:
        """See router.Taste."""
        return least(among, board)

    def sent(self, request: Request, target: str, board: Board, now: float) -> None:
        """See router.Taste."""


class CacheAware:
    """SGLang's router: where the load is out of balance (max - min > `absolute` and max > min * `relative`) the
    shortest queue; else who was sent the longest prefix if that is more than `threshold` of the text; else the
    smallest tree. Load is what this router has in flight. Defaults are the command line's."""

    def __init__(self, *, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5) -> None:
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._tree = PrefixTree()

    def choose(self, request: Request, among: Sequence[str], board: Board, now: float) -> str:
        """See router.Taste."""
        loads = [board.in_flight[name] for name in among]
        most, fewest = max(loads), min(loads)
        if most - fewest > self._absolute and most > fewest * self._relative:
            return least(among, board)
        text = text_of(request)
        length, owners = self._tree.match(text, among)
        if owners and length > self._threshold * len(text):
            return owners[0]
        return min(among, key=self._tree.size)

    def sent(self, request: Request, target: str, board: Board, now: float) -> None:
        """See router.Taste."""
        self._tree.insert(text_of(request), target, now)


class LlmD:
    """llm-d's endpoint picker: 2 x queue + 2 x kv + 3 x prefix, the highest of
    queue = (max - q) / (max - min), 1 for all where none differs; kv = 1 - usage; prefix = match / total."""

    def __init__(self, *, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> None:
        self._weights = queue, kv, prefix
        self._tree = PrefixTree()

    def scores(self, request: Request, among: Sequence[str], board: Board) -> dict[str, float]:
        """By name; higher is better. An engine not seen yet counts as empty."""
        by_queue, by_kv, by_prefix = self._weights
        text = text_of(request)
        lines = {name: board.pending(name) for name in among}
        most, fewest = max(lines.values()), min(lines.values())
        depths = self._tree.depths(text, among)
        return {
            name: by_queue * ((most - lines[name]) / (most - fewest) if most > fewest else 1.0)
            + by_kv * (1.0 - (board.seen[name][0].usage if name in board.seen else 0.0))
            + by_prefix * depths[name] / max(1, len(text))
            for name in among
        }

    def choose(self, request: Request, among: Sequence[str], board: Board, now: float) -> str:
        """See router.Taste."""
        scores = self.scores(request, among, board)
        return max(among, key=scores.__getitem__)

    def sent(self, request: Request, target: str, board: Board, now: float) -> None:
        """See router.Taste."""
        self._tree.insert(text_of(request), target, now)


class Saturation:
    """llm-d's: a pool is full while the mean of max(queue / 5, kv / 0.8) over its engines is 1 or more; an engine whose
    metrics are older than `stale_s` counts as saturated (1), and so does one never seen. For scopes.NearestFirst."""

    def __init__(self, *, queue: float = 5.0, kv: float = 0.8, stale_s: float = 0.2) -> None:
        self._queue, self._kv, self._stale_s = queue, kv, stale_s

    def __call__(self, names: Sequence[str], board: Board, now: float) -> bool:
        """Whether they are saturated."""
        return sum(self.of(name, board, now) for name in names) >= len(names)

    def of(self, name: str, board: Board, now: float) -> float:
        """One engine's share."""
        known = board.seen.get(name)
        if known is None or now - known[1] > self._stale_s:
            return 1.0
        return max(known[0].waiting / self._queue, known[0].usage / self._kv)
