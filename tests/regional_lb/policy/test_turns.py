"""Turns: in order, in proportion, evenly spread, without catching up."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import fleet, replica

from farhop.balance.ledger import Reservation
from regional_lb.pick import pick
from regional_lb.policy import Need
from regional_lb.policy.turns import RoundRobin, WeightedRoundRobin

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def turns(policy, known, times: int) -> list[str]:
    policy.adopt(known.whole.of.names)
    picked = []
    for n in range(times):
        choice = pick(NEED, known.whole, (), policy, 0.0, Random(n))
        policy.placed(choice.chosen.replica, known.whole)
        picked.append(choice.chosen.replica)
    return picked


def test_one_after_another() -> None:
    known = fleet(*(replica(name) for name in "abc"))
    assert "".join(turns(RoundRobin(), known, 7)) == "abcabca"


def test_the_heavy_and_the_light_interleave() -> None:
    known = fleet(*(replica(name) for name in "abc"))
    assert "".join(turns(WeightedRoundRobin({"a": 2.0}), known, 8)) == "abcaabca"


def test_faster_replicas_get_more_without_any_configuration() -> None:
    known = fleet(replica("slow", tpot_ms=30.0), replica("fast", tpot_ms=10.0))
    assert Counter(turns(WeightedRoundRobin({}), known, 40)) == {"slow": 10, "fast": 30}


def test_who_had_no_room_goes_on_from_the_present() -> None:
    names = ("a", "b", "c")
    policy = RoundRobin()
    full = fleet(*(replica(name) for name in names), reserved=[Reservation("c", 0, 10)] * 2)
    assert set(turns(policy, full, 40)) == {"a", "b"}
    free = fleet(*(replica(name) for name in names))
    assert Counter(turns(policy, free, 30))["c"] in (10, 11)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_at_every_moment_nobody_is_far_from_its_share(weights: list[int]) -> None:
    known = fleet(*(replica(f"r{i}") for i in range(len(weights))))
    policy = WeightedRoundRobin({f"r{i}": float(weight) for i, weight in enumerate(weights)})
    counts: Counter[str] = Counter()
    total = sum(weights)
    for n, name in enumerate(turns(policy, known, 2 * total), start=1):
        counts[name] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"r{i}"] - n * weight / total) <= 0.5 * len(weights) + 0.5
    assert [counts[f"r{i}"] for i in range(len(weights))] == [2 * weight for weight in weights]
