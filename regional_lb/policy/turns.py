"""Policies by turns: `round-robin` and `weighted-round-robin`.

Stride scheduling (Waldspurger and Weihl 1995; Envoy's weighted round robin is of this kind): each replica has a stride
of 1 / weight in virtual time, is due in its middle, and the earliest due goes first. So turns interleave, whatever the
weights. Who had no room, or is new, goes on from the present and does not catch up. A turn is over when a request is
sent, never when one is only considered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regional_lb.policy.base import PerReplica, Policy
from regional_lb.policy.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from regional_lb.policy.base import Need
    from regional_lb.table import Column, Table


class RoundRobin(Policy):
    """One after another, in the order of their configuration."""

    name, unit = "round-robin", "turns"

    def __init__(self) -> None:
        self._gone = PerReplica(0.0)  # where each one's last stride ended
        self._clock = 0.0  # when the last one to go was due

    def score(self, need: Need, table: Table, uncached_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """How long until it is due."""
        return np.maximum(self._gone.of(table) + 0.5 * self._strides(table) - self._clock, 0.0)

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:  # noqa: ARG002
        """The one due first; of two, the first in order."""
        return best

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        self._gone.adopt(names)

    def placed(self, name: str, whole: Table) -> None:
        """See Policy."""
        half = 0.5 * self._strides(whole).item(whole.of.at[name])
        self._clock = max(self._gone.get(name) + half, self._clock)
        self._gone.set(name, self._clock + half)

    def _strides(self, table: Table) -> Column:
        return np.ones(len(table))


class WeightedRoundRobin(RoundRobin):
    """Each as often as its weight says, evenly spread."""

    name = "weighted-round-robin"

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = Weights(weights)

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        super().adopt(names)
        self._weights.adopt(names)

    def _strides(self, table: Table) -> Column:
        strides: Column = 1.0 / self._weights.of(table)
        return strides
