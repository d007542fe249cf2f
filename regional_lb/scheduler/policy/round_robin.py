"""Policies by turns: `round-robin` and `weighted-round-robin`.

Stride scheduling (Waldspurger and Weihl 1995; Envoy's weighted round robin is of this kind): each replica has a stride
of 1 / weight in virtual time, is due in its middle, and the earliest due goes first. So turns interleave, whatever the
weights. A replica that had no room, or is new, continues from the present and does not catch up. A turn is over when a
request is sent, never when one is only considered. Each variant (a model, or a version of it) has its own turns and its
own present: with one clock for all, the replicas of a variant with less traffic would all be overdue, and the first
would get everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regional_lb.scheduler.policy.base import PerReplica, Policy
from regional_lb.scheduler.policy.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from regional_lb.fleet.table import Column, Table
    from regional_lb.scheduler.policy.base import Need


VARIANTS_MAX = 256  # each keeps a number per replica of the region


class _Turns:
    """One variant's: where each replica's last stride ended, and when the last one to go was due."""

    __slots__ = ("clock", "gone")

    def __init__(self) -> None:
        self.gone = PerReplica(0.0)
        self.clock = 0.0


class RoundRobin(Policy):
    """One after another, in the order of their configuration."""

    name, unit = "round-robin", "turns"
    learns = True

    def __init__(self) -> None:
        self.variants: dict[str, _Turns] = {}  # who was used least lately first
        self._names: tuple[str, ...] = ()

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """How long until it is due."""
        turns = self.variants.get(need.variant)
        half = 0.5 * self._strides(table)
        return half if turns is None else np.maximum(turns.gone.of(table) + half - turns.clock, 0.0)

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:  # noqa: ARG002
        """The one due first; of two, the first in order."""
        return best

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        self._names = names
        for turns in self.variants.values():
            turns.gone.adopt(names)

    def placed(self, name: str, variant: str, whole: Table) -> None:
        """See Policy."""
        turns = self.variants.pop(variant, None)
        if turns is None:
            turns = _Turns()
            turns.gone.adopt(self._names)
            if len(self.variants) >= VARIANTS_MAX:
                del self.variants[next(iter(self.variants))]
        self.variants[variant] = turns
        half = 0.5 * self._strides(whole).item(whole.of.at[name])
        turns.clock = max(turns.gone.get(name) + half, turns.clock)
        turns.gone.set(name, turns.clock + half)

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
