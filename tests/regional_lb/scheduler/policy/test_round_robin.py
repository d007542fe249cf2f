"""Turns: in order, in proportion, evenly spread, without catching up."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import regional, replica, replicas_of, request

from farhop.balance.ledger import Reservation
from farhop.balance.machine import AttemptEnded, RequestArrived
from regional_lb.scheduler.pick import pick
from regional_lb.scheduler.policy import Need, PoliciesChanged, PolicyConfig
from regional_lb.scheduler.policy.round_robin import VARIANTS_MAX, RoundRobin, WeightedRoundRobin

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def turns(policy, known, times: int, need: Need = NEED) -> list[str]:
    policy.adopt(known.whole.of.names)
    picked = []
    for n in range(times):
        choice = pick(need, known.whole, (), policy, 0.0, Random(n))
        policy.placed(choice.chosen.replica, need.variant, known.whole)
        picked.append(choice.chosen.replica)
    return picked


def test_round_robin_takes_replicas_in_turn() -> None:
    known = replicas_of(*(replica(name) for name in "abc"))
    assert "".join(turns(RoundRobin(), known, 7)) == "abcabca"


def test_the_heavy_and_the_light_interleave() -> None:
    known = replicas_of(*(replica(name) for name in "abc"))
    assert "".join(turns(WeightedRoundRobin({"a": 2.0}), known, 8)) == "abcaabca"


def test_faster_replicas_get_more_without_any_configuration() -> None:
    known = replicas_of(replica("slow", tpot_ms=30.0), replica("fast", tpot_ms=10.0))
    assert Counter(turns(WeightedRoundRobin({}), known, 40)) == {"slow": 10, "fast": 30}


def test_a_replica_that_had_no_room_does_not_catch_up_later() -> None:
    names = ("a", "b", "c")
    policy = RoundRobin()
    full = replicas_of(*(replica(name) for name in names), reserved=[Reservation("c", 0, 10)] * 2)
    assert set(turns(policy, full, 40)) == {"a", "b"}
    free = replicas_of(*(replica(name) for name in names))
    assert Counter(turns(policy, free, 30))["c"] in (10, 11)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_at_any_time_every_replica_is_near_its_share(weights: list[int]) -> None:
    known = replicas_of(*(replica(f"r{i}") for i in range(len(weights))))
    policy = WeightedRoundRobin({f"r{i}": float(weight) for i, weight in enumerate(weights)})
    counts: Counter[str] = Counter()
    total = sum(weights)
    for n, name in enumerate(turns(policy, known, 2 * total), start=1):
        counts[name] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"r{i}"] - n * weight / total) <= 0.5 * len(weights) + 0.5
    assert [counts[f"r{i}"] for i in range(len(weights))] == [2 * weight for weight in weights]


def test_a_busier_model_does_not_move_the_others_turns() -> None:
    """By one clock for all, every replica of the quiet model was overdue, and the first of them got all of its work."""
    busy = [replica(f"busy{n}", models=frozenset({"busy"})) for n in range(2)]
    quiet = [replica(f"quiet{n}", models=frozenset({"quiet"})) for n in range(3)]
    flow = regional(*busy, *quiet)
    flow.handle(PoliciesChanged({"": PolicyConfig(name="round-robin")}), 0.0)
    sent: Counter[str] = Counter()
    for n in range(120):
        for model in ("busy", "busy", "busy", "quiet") if n % 4 == 0 else ("busy",):
            name = f"{model}-{n}-{sent.total()}"
            *_, forward = flow.handle(RequestArrived(request(name, model=model, deadline=1e6)), float(n))
            sent[forward.target] += 1
            flow.handle(AttemptEnded(name, 1, 200, None), float(n))
    assert [sent[one.name] for one in quiet] == [10, 10, 10]
    assert sent["busy0"] == sent["busy1"]


def test_rotations_are_bounded_and_the_least_recently_used_is_dropped() -> None:
    known, policy = replicas_of(*(replica(name) for name in "ab")), RoundRobin()
    for n in range(VARIANTS_MAX):
        turns(policy, known, 1, replace(NEED, variant=f"m{n}"))
    turns(policy, known, 1, replace(NEED, variant="m0"))
    turns(policy, known, 1, replace(NEED, variant="one more"))
    assert len(policy.variants) == VARIANTS_MAX
    assert {"m0", "one more"} <= policy.variants.keys()
    assert "m1" not in policy.variants
