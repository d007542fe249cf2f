"""Policies by a hash of who asks: `weighted` and `consistent-hash`. Rendezvous hashing, weighted (Thaler, Ravishankar
1998; Schindelhauer, Schomaker 2005):

    score(r) = -ln(u(key, r)) / weight(r),    u uniform in (0, 1)

The least of such exponential variables is r's with probability weight(r) / sum of weights, and what one region loses or
gains moves only its own keys. Never writes, and rolls no dice: equal keys give equal scores in every process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from farhop.balance import chain
from global_lb.policy.base import ByRegion, Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.balance.machine import Request
    from global_lb.table import Column, Field

_NEVER = 1e-12  # the weight of who has none: behind all others, and still there if nobody else is
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MASK = (1 << 64) - 1


@lru_cache(maxsize=1024)
def _seeds(names: tuple[str, ...]) -> NDArray[np.uint64]:
    return np.array([xxh3_64_intdigest(name.encode()) for name in names], dtype=np.uint64)


def uniform(key: int, names: tuple[str, ...]) -> Column:
    """A number in (0, 1) for each region, by the key: splitmix64's finaliser over both."""
    mixed = _seeds(names) ^ np.uint64(key & _MASK)
    for factor, shift in zip(_MIX, _SHIFTS[:2], strict=True):
        mixed = (mixed ^ (mixed >> shift)) * factor
    mixed ^= mixed >> _SHIFTS[2]
    drawn: Column = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return drawn


def hashed(text: str) -> int:
    """A key of text."""
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def draw_key(request: Request) -> int:
    """What a draw for a request goes by: its session; without one, each request for itself (and all its attempts)."""
    return request.session or hashed(request.id)


class Weighted(Policy):
    """Each region its share of the sessions, or of the requests without one. Without any weights, by slots."""

    name, unit = "weighted", "1 / share, drawn"
    wants_session = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = ByRegion(weights, 0.0) if weights else None

    def score(self, field: Field) -> Column:
        """See the module's head."""
        weights = self._weights.column(field.names) if self._weights is not None else field.slots
        score: Column = -np.log(uniform(draw_key(field.request), field.names)) / np.maximum(weights, _NEVER)
        return score


class ConsistentHash(Policy):
    """Equals at one region: by session, else by tenant and the beginning of the prompt. Regions weigh by slots."""

    name, unit = "consistent-hash", "1 / slots, hashed"
    wants_session = True

    def __init__(self, prefix_bytes: int) -> None:
        self._depth = max(1, chain.depth_at(prefix_bytes))

    def score(self, field: Field) -> Column:
        """See the module's head."""
        drawn = uniform(self._key(field.request), field.names)
        score: Column = -np.log(drawn) / np.maximum(field.slots, 1.0)
        return score

    def _key(self, request: Request) -> int:
        if request.session:
            return request.session
        blocks = request.chain
        return hashed(request.tenant) ^ (blocks[min(self._depth, len(blocks)) - 1] if blocks else 0)
