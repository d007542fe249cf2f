"""Policies by a hash of a request's key: `weighted` and `consistent-hash`, both by weighted rendezvous hashing.

Never writes, and draws no random numbers: equal keys give equal scores in every process (see farhop.balance.hashing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farhop.balance import hashing
from farhop.balance.prefix import chain
from global_lb.routing.policy.base import ByRegion, Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.balance.machine import Request
    from global_lb.fleet.table import Candidates, Column

_NEVER = 1e-12  # the weight of a region without one: behind all others, but usable if it is the only one


def draw_key(request: Request) -> int:
    """The key by which a request is drawn: its session; without one, the request itself, with all of its attempts."""
    return request.session or hashing.key_of(request.id)


class Weighted(Policy):
    """Each region its share of the sessions, or of the requests without one. Without any weights, by slots."""

    name, unit = "weighted", "1 / share, drawn"
    wants_session = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = ByRegion(weights, 0.0) if weights else None

    def score(self, candidates: Candidates) -> Column:
        """See the module's docstring."""
        weights = self._weights.column(candidates.names) if self._weights is not None else candidates.slots
        return hashing.costs(draw_key(candidates.request), candidates.names, np.maximum(weights, _NEVER))


class ConsistentHash(Policy):
    """Equals at one region: by session, else by tenant and the beginning of the prompt. Regions weigh by slots."""

    name, unit = "consistent-hash", "1 / slots, hashed"
    wants_session = True

    def __init__(self, prefix_bytes: int) -> None:
        self._depth = max(1, chain.depth_at(prefix_bytes))

    def score(self, candidates: Candidates) -> Column:
        """See the module's docstring."""
        return hashing.costs(self._key(candidates.request), candidates.names, np.maximum(candidates.slots, 1.0))

    def _key(self, request: Request) -> int:
        if request.session:
            return request.session
        blocks = request.chain
        return hashing.key_of(request.tenant) ^ (blocks[min(self._depth, len(blocks)) - 1] if blocks else 0)
