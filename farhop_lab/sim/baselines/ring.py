"""Routers that hash: a plain ring, and KubeAI's consistent hashing with bounded loads. `choose` reads; nothing is kept.

Invariant: a ring always holds all targets of a router; one that is not eligible now is skipped, so that the others keep
their keys.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import xxhash

from farhop_lab.sim.baselines.router import key_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.router import RouterState

ENTRIES_MIN = 1024


class Ring:
    """`each` points for every name, by xxh64."""

    def __init__(self, names: Sequence[str], each: int) -> None:
        points = sorted((xxhash.xxh64_intdigest(f"{name}{n}".encode()), name) for name in names for n in range(each))
        self._points, self._names = [point for point, _ in points], [name for _, name in points]

    def walk(self, key: int) -> Iterator[str]:
        """Names from the key's place on, once around; a name comes as often as it has points."""
        start = bisect_right(self._points, key)
        for at in range(len(self._names)):
            yield self._names[(start + at) % len(self._names)]


class ConsistentHash:
    """The first eligible one on the ring, at or after the key. At least `entries` points in all."""

    def __init__(self, entries: int = ENTRIES_MIN) -> None:
        self._entries = entries
        self._rings: dict[tuple[str, ...], Ring] = {}

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        # Engines and other routers are separate rings, as in SkyWalker-CH: a request is first kept at home.
        names = tuple(state.peers if state.targets[among[0]].balancer else state.engines)
        ring = self._rings.get(names)
        if ring is None:
            ring = self._rings[names] = Ring(names, -(-self._entries // len(names)))
        return next(name for name in ring.walk(key_of(request)) if name in among)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""


class Chwbl:
    """KubeAI: xxhash64 of the prompt's first `characters` and the adapter, 256 points for each engine; from there on
    the first whose load is at most `factor` x (total + 1) / n. There always is one: the least loaded has at most
    total / n."""

    def __init__(self, *, characters: int = 100, points: int = 256, factor: float = 1.25) -> None:
        self._characters, self._each, self._factor = characters, points, factor
        self._ring: Ring | None = None

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        ring = self._ring = self._ring or Ring(state.engines, self._each)
        total = sum(state.in_flight[name] for name in among)
        bound = self._factor * (total + 1) / len(among)
        # The adapter is part of the model's name here; one model, no adapter: the prefix alone.
        key = xxhash.xxh64_intdigest(text_of(request)[: self._characters])
        return next(name for name in ring.walk(key) if name in among and state.in_flight[name] <= bound)

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
