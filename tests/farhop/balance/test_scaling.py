"""The scaling arithmetic, and the signal made of it."""

from __future__ import annotations

from itertools import pairwise
from math import cos, nan, pi
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.scaling import (
    GROWTH_MAX,
    NOTHING,
    DesiredReplicas,
    ScalingBounds,
    made_up_for,
    replicas_for,
    share_of_the_lost,
)

LOADS = st.floats(0.0, 1000.0)
TARGETS = st.floats(0.05, 1.0)
BOUNDS = ScalingBounds(replicas_min=1, replicas_max=50, warm_up_s=120.0, down_after_s=300.0)


def signal(bounds: ScalingBounds = BOUNDS, present: int = 0) -> DesiredReplicas:
    made = DesiredReplicas(bounds)
    for second in range(40):
        made.observe(0.0, present, float(second))
    return made


@given(LOADS, TARGETS, st.integers(0, 5))
def test_the_fewest_replicas_that_stay_stable_with_the_spare_lost(load: float, target: float, spare: int) -> None:
    needed = replicas_for(load, target, spare)
    kept = needed - spare if needed else 0
    assert load <= target * kept + NOTHING
    if needed:
        assert load > target * max(0, kept - 1) + NOTHING


@given(LOADS, LOADS, TARGETS, st.integers(0, 5))
def test_more_load_never_needs_less(a: float, b: float, target: float, spare: int) -> None:
    assert replicas_for(min(a, b), target, spare) <= replicas_for(max(a, b), target, spare)


@given(st.lists(LOADS, min_size=2, max_size=8), TARGETS)
def test_any_one_region_may_be_lost(loads: list[float], target: float) -> None:
    """N-1: what is left holds all of the load at its target; and so it does grown by the planner's factor."""
    of = {f"r{n}": load for n, load in enumerate(loads)}
    shares = share_of_the_lost(of)
    replicas = {name: replicas_for(of[name] + shares[name], target) for name in of}
    total, largest = sum(loads), max(loads)
    for lost in of:
        left = sum(n for name, n in replicas.items() if name != lost)
        assert total <= target * left + 0.01 * len(of) + 1e-6
        if total and largest / total <= 0.8:
            assert (total - of[lost]) * made_up_for(largest / total) >= total - 1e-6


@given(st.lists(LOADS, min_size=2, max_size=8), st.integers(0, 7), st.floats(0.0, 100.0))
def test_more_load_in_one_region_asks_less_of_none(loads: list[float], which: int, more: float) -> None:
    of = {f"r{n}": load for n, load in enumerate(loads)}
    name = f"r{which % len(loads)}"
    before, after = share_of_the_lost(of), share_of_the_lost({**of, name: of[name] + more})
    assert all(after[one] >= before[one] - 1e-9 for one in of)


def test_a_single_region_takes_no_load_from_others() -> None:
    assert share_of_the_lost({"a": 5.0}) == {"a": 0.0}
    assert made_up_for(1.0) == 1.25 / 0.2


@given(LOADS, st.integers(0, 80), st.integers(1, 30))
def test_under_constant_load_the_desired_replicas_change_at_most_once(load: float, present: int, every_s: int) -> None:
    """Whatever was there before: it goes one way, and then stays."""
    made, seen = DesiredReplicas(BOUNDS), []
    for n in range(1200 // every_s):
        made.observe(load, present, n * float(every_s))
        seen.append(made.desired)
    turns = [b - a for a, b in pairwise(seen) if a != b]
    assert all(step > 0 for step in turns) or all(step < 0 for step in turns)
    assert len(turns) <= 1
    assert all(BOUNDS.replicas_min <= one <= BOUNDS.replicas_max for one in seen)


@given(st.floats(1.0, 20.0), st.integers(0, 2**32))
def test_a_load_that_wavers_by_a_tenth_hardly_changes_the_desired_replicas(load: float, seed: int) -> None:
    """Of a load that wavers by a tenth around its mean: hardly any change in an hour once it has found its size."""
    rng, made, seen = Random(seed), DesiredReplicas(BOUNDS), []
    for second in range(0, 4200, 5):
        made.observe(load * rng.uniform(0.9, 1.1), 0, float(second))
        if second >= 600:
            seen.append(made.desired)
    assert sum(a != b for a, b in pairwise(seen)) <= 4
    assert max(seen) - min(seen) <= max(1, round(0.15 * max(seen)))
    assert min(seen) >= min(BOUNDS.replicas_max, replicas_for(0.95 * load, BOUNDS.target_share, 1))


@given(LOADS, LOADS)
def test_a_higher_load_never_asks_for_fewer_replicas(a: float, b: float) -> None:
    low, high = signal(), signal()
    low.observe(min(a, b), 0, 60.0)
    high.observe(max(a, b), 0, 60.0)
    assert low.desired <= high.desired


def test_the_desired_replicas_rise_at_once_and_fall_after_a_delay() -> None:
    made = signal()
    for second in range(60, 120):
        made.observe(7.0, 0, float(second))
    assert made.desired >= replicas_for(7.0, 0.7, 1)
    peak = made.desired
    made.observe(0.0, 0, 121.0)
    for second in range(121, 400, 2):
        made.observe(0.0, 0, float(second))
        assert made.desired == peak, second
    for second in range(400, 800, 2):
        made.observe(0.0, 0, float(second))
    assert made.desired == BOUNDS.replicas_min


def test_a_ramp_is_seen_a_warm_up_ahead() -> None:
    """By the time a replica asked for now would serve, it is needed: the signal leads a steady climb."""
    made, slope = signal(), 10.0 / 1800.0
    for second in range(60, 1860, 2):
        load = slope * (second - 60)
        made.observe(load, 0, float(second))
        if second > 400:
            assert made.needed >= replicas_for(load + 0.8 * slope * BOUNDS.warm_up_s, BOUNDS.target_share, 1)
            assert made.load * BOUNDS.target_share <= GROWTH_MAX * load + 1.0


def test_the_desired_replicas_follow_a_days_load() -> None:
    """A day of swing 8 in two hours: never short of what the load needs, and hardly more than twice that."""
    made, asked, least, short = signal(), 0, 0, 0
    for second in range(40, 14_440, 5):
        load = 6.0 * 8.0 ** (0.5 * cos(2 * pi * second / 7200.0))
        made.observe(load, 0, float(second))
        if second > 900:
            needed = replicas_for(load, BOUNDS.target_share, 1)
            asked, least, short = asked + made.desired, least + needed, short + (made.desired < needed)
    assert short == 0
    assert asked / least < 1.35


def test_after_a_start_the_number_of_replicas_stays_for_down_after_s() -> None:
    """Eight replicas serve and it has seen no load yet: they stay for `down_after_s`."""
    made = signal(present=8)
    assert made.desired == 8
    for second in range(40, 290, 10):
        made.observe(0.0, 8, float(second))
        assert made.desired == 8
    for second in range(290, 700, 10):
        made.observe(0.0, 8, float(second))
    assert made.desired == 1


@pytest.mark.parametrize("load", [nan, -1.0])
def test_a_negative_load_or_one_that_is_no_number_changes_nothing(load: float) -> None:
    made = signal()
    made.observe(load, 9, 50.0)
    assert (made.needed, made.desired) == (0, 1)


def test_bounds_hold_and_may_change() -> None:
    made = signal()
    made.observe(1e9, 0, 50.0)
    made.observe(1e9, 0, 300.0)
    assert made.desired == 50 < made.needed
    made.configure(ScalingBounds(replicas_max=7))
    assert (made.desired, made.bounds.replicas_max) == (7, 7)
