"""Policies by how busy a replica is: `least-load` and `p2c`. They know nothing of prefixes. Never write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farhop.balance import choose
from regional_lb.scheduler.policy.base import Policy, with_room

if TYPE_CHECKING:
    from random import Random

    from regional_lb.fleet.table import Column, Table
    from regional_lb.scheduler.policy.base import Need


class LeastLoad(Policy):
    """The replica of whose slots or KV cache, whichever is scarcer there, the smallest share is taken."""

    name, unit = "least-load", "share taken"

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """max(in flight / slots, KV tokens promised / KV tokens)."""
        taken: Column = np.maximum(table.in_flight / table.slots, table.kv_taken_tokens / table.kv_tokens)
        return taken


class PowerOfTwo(Policy):
    """The less busy of two drawn at random (Mitzenmacher 2001): among many balancers the one that herds least."""

    name, unit = "p2c", "requests"

    def score(self, need: Need, table: Table, work_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """Requests in flight."""
        return table.in_flight.copy()

    def choose(self, best: int, ready: Column, need: Need, table: Table, rng: Random) -> int:  # noqa: ARG002
        """See the class."""
        rows = with_room(ready)
        return rows[choose.pick_two(ready[rows].tolist(), rng)]
