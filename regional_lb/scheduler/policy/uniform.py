"""Policies by chance: `random` and `weighted-random`. They keep nothing and look at nothing but room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farhop.balance import choose
from regional_lb.scheduler.policy.base import Policy, with_room
from regional_lb.scheduler.policy.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from regional_lb.fleet.table import Column, Table
    from regional_lb.scheduler.policy.base import Need


class Uniform(Policy):
    """Each with the same chance."""

    name, unit = "random", "1 / weight"

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """The inverse of its weight: here everyone weighs the same."""
        return np.ones(len(table))

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:  # noqa: ARG002
        """A draw in proportion to the weights of those with room."""
        rows = with_room(ready)
        return rows[choose.draw((1.0 / ready[rows]).tolist(), rng)]


class WeightedRandom(Uniform):
    """Each with a chance in proportion to its weight."""

    name = "weighted-random"

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = Weights(weights)

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """See Uniform."""
        inverse: Column = 1.0 / self._weights.of(table)
        return inverse

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy."""
        self._weights.adopt(names)
