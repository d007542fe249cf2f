"""Policies that keep requests with equal keys together on a hash ring: `prefix`, `session`, `consistent-hash`.

Consistent hashing (Karger et al. 1997), for the first two with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018):
from a request's key clockwise to the first replica with room whose load is within
`load_factor * (all in flight + 1) / replicas`, as KubeAI does; if none is, to the first with room. A replica that
comes or goes moves only the keys next to it. Scores are the requests in flight: the ring, not the score, chooses.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from farhop.balance import choose, hashing
from farhop.balance.prefix import chain
from regional_lb.scheduler.policy.base import Policy, with_room

if TYPE_CHECKING:
    from random import Random

    from numpy.typing import NDArray

    from regional_lb.fleet.table import Column, Table
    from regional_lb.scheduler.policy.base import Need

_LOOK = 16  # points looked at first
_OWNER = np.uint64(0xFFFF)
VNODES = 128  # a replica's share of the keys is within about 10 % of even


class _Ring:
    """Points on a circle of 64 bits, VNODES for each name, sorted; the lowest bits of a point are its owner's index."""

    __slots__ = ("_points", "names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        owners = np.arange(len(names), dtype=np.uint64)[:, np.newaxis]
        self._points = np.sort(((hashing.points(names, VNODES) & ~_OWNER) | owners).reshape(-1))

    def first(self, at: int, wanted: NDArray[np.bool_]) -> str:
        """The owner of the first point at or after `at`, clockwise, of those wanted: one at least."""
        points, size = self._points, _LOOK
        start = int(points.searchsorted(np.uint64(at)))
        while True:
            owners = points.take(np.arange(start, start + size), mode="wrap") & _OWNER
            found = wanted[owners.astype(np.intp)]
            nearest = int(found.argmax())
            if found[nearest]:
                return self.names[int(owners[nearest])]
            start, size = start + size, 4 * size  # many are full


class _OnRing(Policy):
    """The walk; what the key is, its heirs say."""

    unit = "requests"

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor
        self._ring = _Ring(())

    def key(self, need: Need) -> str:
        """What keeps requests together; "" if nothing does: then it goes to the less busy of two drawn."""
        raise NotImplementedError

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """Requests in flight."""
        return table.in_flight.copy()

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:  # noqa: ARG002
        """See the module's docstring."""
        key = self.key(need)
        if not key:
            rows = with_room(ready)
            return rows[choose.pick_two(ready[rows].tolist(), rng)]
        bound = self._load_factor * (float(table.in_flight.sum()) + 1.0) / len(table)
        fits = ready <= bound if bound < inf else ready < inf
        if not fits.any():
            fits = ready < inf
        of, ring = table.of, self._ring
        on_ring = np.zeros(len(ring.names), dtype=np.bool_)
        on_ring[of.rows] = fits
        return of.at[ring.first(hashing.key_of(key), on_ring)]

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        if names != self._ring.names:
            self._ring = _Ring(names)


class PrefixHash(_OnRing):
    """Equal beginnings of prompts together: the first blocks of the prefix chain, at most `prefix_bytes` of text."""

    name = "prefix"

    def __init__(self, load_factor: float, prefix_bytes: int) -> None:
        super().__init__(load_factor)
        self._depth = max(1, chain.depth_at(prefix_bytes))

    def key(self, need: Need) -> str:
        """The node where those blocks end; a prompt of less than one block has none."""
        blocks = need.chain
        return f"{blocks[min(self._depth, len(blocks)) - 1]:x}" if blocks else ""


class SessionHash(_OnRing):
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
