"""Policies that keep equals together on a hash ring: `prefix`, `session`, `consistent-hash`.

Consistent hashing (Karger et al. 1997), for the first two with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018):
from a request's key clockwise to the first replica with room whose load is within
`load_factor * (all in flight + 1) / replicas`, as KubeAI does; if none is, to the first with room. A replica that
comes or goes moves only the keys next to it. Scores are what is in flight: the ring, not the score, prefers.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

from farhop.balance import chain, choose
from regional_lb.policy.base import Policy, with_room

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from regional_lb.policy.base import Need
    from regional_lb.table import Column, Table

VNODES = 128  # a replica's share of the keys is within about 10 % of even


def _hash(text: str) -> int:
    return xxh3_64_intdigest(text.encode())


class _OnRing(Policy):
    """The walk; what the key is, its heirs say."""

    unit = "requests"

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor
        self._ring = HashRing(vnodes=VNODES, hash_fn=_hash)

    def key(self, need: Need) -> str:
        """What keeps requests together; "" if nothing does: then it goes to the less busy of two drawn."""
        raise NotImplementedError

    def score(self, need: Need, table: Table, uncached_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """Requests in flight."""
        return table.in_flight.copy()

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:
        """See the module's head."""
        key = self.key(need)
        if not key:
            rows = with_room(ready)
            return rows[choose.pick_two(ready[rows].tolist(), rng)]
        bound = self._load_factor * (float(table.in_flight.sum()) + 1.0) / len(table)
        at = table.of.at
        passed: int | None = None
        for name in self._clockwise(key):
            place = at.get(name)
            load = ready.item(place) if place is not None else inf
            if place is None or load == inf:
                continue
            if load <= bound:
                return place
            if passed is None:
                passed = place
        return best if passed is None else passed

    def _clockwise(self, key: str) -> Iterator[str]:
        yield self._ring.get_node(key)  # mostly the last one asked for: iterating copies half of the ring
        yield from self._ring.iterate_nodes(key)

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        now, before = set(names), set(self._ring.get_nodes())
        if len(now ^ before) > 2:
            self._ring = HashRing(list(names), vnodes=VNODES, hash_fn=_hash)
            return
        for name in before - now:
            self._ring.remove_node(name)
        for name in now - before:
            self._ring.add_node(name)


class Prefix(_OnRing):
    """Equal beginnings of prompts together: the first blocks of the prefix chain, at most `prefix_bytes` of text."""

    name = "prefix"

    def __init__(self, load_factor: float, prefix_bytes: int) -> None:
        super().__init__(load_factor)
        self._depth = max(1, chain.depth_at(prefix_bytes))

    def key(self, need: Need) -> str:
        """The node where those blocks end; a prompt of less than one block has none."""
        blocks = need.chain
        return f"{blocks[min(self._depth, len(blocks)) - 1]:x}" if blocks else ""


class Session(_OnRing):
    """Requests of one session together."""

    name = "session"
    wants_session = True

    def key(self, need: Need) -> str:
        """The session; many requests have none."""
        return f"{need.session:x}" if need.session else ""


class ConsistentHash(_OnRing):
    """Each caller at its own replica as long as that has room: by session where there is one, else by tenant."""

    name = "consistent-hash"
    wants_session = True

    def __init__(self) -> None:
        super().__init__(inf)

    def key(self, need: Need) -> str:
        """The caller."""
        return f"{need.session:x}" if need.session else f"tenant {need.tenant}"
