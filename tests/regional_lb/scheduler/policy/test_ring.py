"""On the ring: equals together, little moves, and no replica far above the mean."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import replica, replicas_of

from farhop.balance.ledger import Reservation
from regional_lb.scheduler.pick import pick
from regional_lb.scheduler.policy import Need
from regional_lb.scheduler.policy.ring import ConsistentHash, PrefixHash, SessionHash


def need(n: int, **fields) -> Need:
    return Need(256.0, 100.0, 4.0, **{"chain": (n + 1,), "session": n + 1, "tenant": f"t{n}", **fields})


def many(count: int):
    return replicas_of(*(replica(f"r{i}", slots=1000) for i in range(count)))


def home(policy, known, asked: Need, seed: int = 1) -> str:
    policy.adopt(known.whole.of.names)
    return pick(asked, known.whole, (), policy, 0.0, Random(seed)).chosen.replica


@pytest.mark.parametrize("make", [lambda: PrefixHash(1.25, 1024), lambda: SessionHash(1.25), ConsistentHash])
def test_a_replica_that_leaves_moves_only_its_own_keys(make) -> None:
    policy, ten, nine = make(), many(10), many(9)
    before = [home(policy, ten, need(n)) for n in range(400)]
    after = [home(policy, nine, need(n)) for n in range(400)]
    assert all(now == then for now, then in zip(after, before, strict=True) if then != "r9")
    again = [home(policy, ten, need(n)) for n in range(400)]
    assert again == before
    assert [home(make(), many(10), need(n)) for n in range(0, 400, 4)] == before[::4]  # in every process
    assert min(Counter(before).values()) > 10


@given(st.integers(2, 16), st.integers(0, 1000), st.sampled_from([1.0, 1.25, 2.0]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_one_hot_key_never_fills_a_replica_beyond_the_bound(count: int, key: int, factor: float) -> None:
    known = many(count)
    for policy in (PrefixHash(factor, 1024), SessionHash(factor)):
        for n in range(60):
            replica_name = home(policy, known, need(key))
            loads = known.whole.in_flight
            assert loads[known.whole.of.at[replica_name]] <= factor * (loads.sum() + 1.0) / count
            known.ledger.reserve(f"{policy.name} {n}", Reservation(replica_name, 0, 1))


def test_without_a_bound_a_caller_stays_until_there_is_no_room() -> None:
    policy, known = ConsistentHash(), replicas_of(*(replica(f"r{i}") for i in range(4)))
    first = home(policy, known, need(5, session=0))
    for n in range(2):
        assert home(policy, known, need(5, session=0)) == first
        known.ledger.reserve(f"q{n}", Reservation(first, 0, 1))
    assert home(policy, known, need(5, session=0)) != first


def test_a_prefix_is_its_first_blocks() -> None:
    policy, known = PrefixHash(1.25, 512), many(16)
    assert home(policy, known, need(0, chain=(7, 8, 9))) == home(policy, known, need(1, chain=(7, 8, 1, 2, 3)))
    assert policy.key(need(0, chain=(7,))) != policy.key(need(0, chain=(7, 8)))
    assert PrefixHash(1.25, 1).key(need(0, chain=(7, 8))) == "7"


@pytest.mark.parametrize("policy", [PrefixHash(1.25, 1024), SessionHash(1.25)])
def test_a_request_without_a_key_goes_to_the_less_busy_of_two(policy) -> None:
    known = many(2)
    known.ledger.reserve("q", Reservation("r0", 0, 1))
    keyless = need(0, chain=(), session=0)
    assert {home(policy, known, keyless, seed) for seed in range(20)} == {"r1"}
