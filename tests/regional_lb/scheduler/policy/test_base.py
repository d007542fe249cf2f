"""A number per replica, kept while replicas come and go; near ties; which replicas have room."""

from __future__ import annotations

from random import Random

import numpy as np
from worlds import replica, replicas_of

from farhop.balance.ledger import Reservation
from regional_lb.scheduler.policy import Need, Predictive
from regional_lb.scheduler.policy.base import PerReplica, with_room

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def test_a_number_stays_with_its_replica() -> None:
    column = PerReplica(7.0)
    column.adopt(("a", "b"))
    column.set("b", 1.0)
    column.set("nobody", 3.0)
    column.adopt(("b", "c"))
    table = replicas_of(replica("b"), replica("c")).whole
    assert column.of(table).tolist() == [1.0, 7.0]
    assert (column.get("b"), column.get("a")) == (1.0, 7.0)
    column.of(table)[0] = 99.0  # a copy: a scorer may change it freely
    assert column.get("b") == 1.0


def test_a_part_of_the_table_gets_its_own_rows() -> None:
    known = replicas_of(*(replica(f"r{i}") for i in range(4)))
    column = PerReplica(0.0)
    column.adopt(known.whole.of.names)
    for i in range(4):
        column.set(f"r{i}", float(i))
    assert column.of(known.table(known.whole.of.without(("r0", "r2")))).tolist() == [1.0, 3.0]


def test_near_ties_go_to_the_less_busy_replica() -> None:
    table = replicas_of(replica("r1"), replica("r2"), replica("r3"), reserved=[Reservation("r1", 0, 10)]).whole
    ready = np.array([100.0, 104.0, 106.0])
    assert {Predictive().choose(0, ready, NEED, table, Random(seed)) for seed in range(20)} == {1}
    ready[1] = np.inf
    assert {Predictive().choose(0, ready, NEED, table, Random(seed)) for seed in range(20)} == {0}


def test_with_room_returns_the_rows_of_finite_score() -> None:
    assert with_room(np.array([np.inf, 0.0, 5.0, np.inf])) == [1, 2]
