"""By how busy a replica is."""

from __future__ import annotations

from random import Random

import numpy as np
from worlds import replica, replicas_of

from farhop.balance.ledger import Reservation
from regional_lb.scheduler.pick import pick
from regional_lb.scheduler.policy import Need
from regional_lb.scheduler.policy.load import LeastLoad, PowerOfTwo

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def test_load_is_the_larger_used_share_of_slots_and_kv_cache() -> None:
    big, small = replica("big", slots=10), replica("small", slots=4)
    held = [Reservation("big", 0, 10)] * 2 + [Reservation("small", 0, 10)] + [Reservation("big", 0, 5000)]
    table = replicas_of(big, small, reserved=held).whole
    assert LeastLoad().score(NEED, table, np.zeros(2), np.zeros(2), 0.0).tolist() == [0.502, 0.25]


def test_the_least_loaded_is_taken_and_idle_ones_share() -> None:
    known = replicas_of(*(replica(f"r{i}", slots=9) for i in range(3)), reserved=[Reservation("r0", 0, 10)])
    picked = {pick(NEED, known.whole, (), LeastLoad(), 0.0, Random(seed)).chosen.replica for seed in range(20)}
    assert picked == {"r1", "r2"}


def test_power_of_two_takes_the_less_busy_of_two_drawn_replicas() -> None:
    held = [Reservation("r0", 0, 10)] * 2 + [Reservation("r1", 0, 10)]
    known = replicas_of(*(replica(f"r{i}", slots=9) for i in range(3)), reserved=held)
    picked = [pick(NEED, known.whole, (), PowerOfTwo(), 0.0, Random(seed)).chosen.replica for seed in range(300)]
    # Two of three: the least loaded is in two draws of three and wins both, the busiest never wins.
    assert set(picked) == {"r1", "r2"}
    assert 150 < picked.count("r2") < 250
