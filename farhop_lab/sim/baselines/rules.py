"""Rules without a ring: round robin, least load, SGLang's cache-aware rule, llm-d's weights; and eligibility.

Eligible are all engines, one pool, or the nearest region that has room. Each is the published rule with its published
constants as defaults. `choose` and `candidates` read; `sent` alone writes. Invariant: `NearestFirst` returns whole
regions, so that the same picker picks at home and abroad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.baselines.router import text_of
from farhop_lab.sim.baselines.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.router import RouterState

    Full = Callable[[Sequence[str], RouterState, float], bool]

UTILISED = 0.8
"""When GKE's gateway takes a backend as full, by default."""


class AllEngines:
    """Blind pushing: every engine not known to be down, at once. If there is none, a request is sent and fails."""

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """See router.Eligibility."""
        return state.serving(state.engines) or state.engines


class WholePool:
    """All engines as one pool, and while that is `full` requests stay queued."""

    def __init__(self, full: Full) -> None:
        self._full = full

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """See router.Eligibility."""
        names = state.serving(state.engines)
        return () if self._full(names, state, now) else names


class NearestFirst:
    """The engines of the nearest region (its own first, then by round-trip time) that is not `full`. If all are: its
    own again, or with `hold` none, and requests stay queued.
    """

    def __init__(self, full: Full, *, hold: bool = False) -> None:
        self._full, self._hold = full, hold

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """See router.Eligibility."""
        regions = list(by_distance(state))
        for names in regions:
            if not self._full(names, state, now):
                return names
        if self._hold and regions:
            return ()
        return regions[0] if regions else state.engines


def by_distance(state: RouterState) -> Iterator[list[str]]:
    """The serving engines of each region that has any, home first and then by round-trip time."""
    regions = sorted(state.by_region, key=lambda region: (region != state.here, state.rtt_ms[region], region))
    for region in regions:
        names = state.serving(state.by_region[region])
        if names:
            yield names


def all_pending(names: Sequence[str], state: RouterState, now: float) -> bool:
    """Full: requests waited in every engine at the last probe."""
    return all(state.pending(name) > 0 for name in names)


def utilised(names: Sequence[str], state: RouterState, now: float) -> bool:
    """Full: the mean KV use of these engines at the last probe is at GKE's threshold. A waterfall's rule."""
    used = sum(state.seen[name][0].usage for name in names if name in state.seen)
    return used >= UTILISED * len(names)


class RoundRobin:
    """One after another in the state's order, among those eligible."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        places = {name: place for place, name in enumerate(state.targets)}
        count = len(places)
        return min(among, key=lambda name: (places[name] - self._last - 1) % count)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._last = list(state.targets).index(target)


def least(among: Sequence[str], state: RouterState) -> str:
    """The fewest requests of this router in flight; the first of equals."""
    return min(among, key=lambda name: state.in_flight[name])


class LeastLoad:
    """The fewest in flight."""

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        return least(among, state)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""


class CacheAware:
    """SGLang's router: if the load is out of balance (max - min > `absolute` and max > min * `relative`) the shortest
    queue; otherwise the one that was sent the longest prefix if that is more than `threshold` of the text; otherwise
    the smallest tree. Load is what this router has in flight. Defaults are the command line's.
    """

    def __init__(self, *, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5) -> None:
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._tree = PrefixTree()

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        loads = [state.in_flight[name] for name in among]
        most, fewest = max(loads), min(loads)
        if most - fewest > self._absolute and most > fewest * self._relative:
            return least(among, state)
        text = text_of(request)
        length, owners = self._tree.match(text, among)
        if owners and length > self._threshold * len(text):
            return owners[0]
        return min(among, key=self._tree.size)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)


class LlmD:
    """llm-d's endpoint picker: 2 x queue + 2 x kv + 3 x prefix, the highest of
    queue = (max - q) / (max - min), 1 for all where none differs; kv = 1 - usage; prefix = match / total."""

    def __init__(self, *, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> None:
        self._weights = queue, kv, prefix
        self._tree = PrefixTree()

    def scores(self, request: Request, among: Sequence[str], state: RouterState) -> dict[str, float]:
        """By name; higher is better. An engine not probed yet counts as empty."""
        by_queue, by_kv, by_prefix = self._weights
        text = text_of(request)
        lines = {name: state.pending(name) for name in among}
        most, fewest = max(lines.values()), min(lines.values())
        depths = self._tree.depths(text, among)
        return {
            name: by_queue * ((most - lines[name]) / (most - fewest) if most > fewest else 1.0)
            + by_kv * (1.0 - (state.seen[name][0].usage if name in state.seen else 0.0))
            + by_prefix * depths[name] / max(1, len(text))
            for name in among
        }

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        scores = self.scores(request, among, state)
        return max(among, key=scores.__getitem__)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        self._tree.insert(text_of(request), target, now)


STALE_S = 0.2  # as in its default configuration


class Saturation:
    """llm-d's: a pool is full while the mean of max(queue / 5, kv / 0.8) over its engines is 1 or more; an engine whose
    metrics are older than STALE_S counts as saturated (1), and so does one never probed. For NearestFirst.
    """

    def __call__(self, names: Sequence[str], state: RouterState, now: float) -> bool:
        """Whether they are saturated."""
        return sum(self.of(name, state, now) for name in names) >= len(names)

    def of(self, name: str, state: RouterState, now: float) -> float:
        """One engine's share."""
        known = state.seen.get(name)
        if known is None or now - known[1] > STALE_S:
            return 1.0
        return max(known[0].waiting / 5.0, known[0].usage / 0.8)
