"""A figure by the median of windows: nothing carries it off at once, and what is not measured fades."""

from __future__ import annotations

from math import exp, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.windows import KEPT, SAMPLES_MAX, TAU_S, Windows, weighted_median

RUN = settings(max_examples=150, deadline=None, derandomize=True)
SAMPLES = st.lists(st.tuples(st.floats(1e-5, 1e8), st.floats(0.0, 30.0), st.floats(0.25, 1e5)), min_size=1, max_size=60)


def steady(value: float = 10.0, seconds: int = 30, per_s: int = 5) -> Windows:
    made = Windows()
    for n in range(seconds * per_s):
        made.take(value * (1.0 + 0.01 * (n % 5 - 2)), n / per_s)
    return made


def test_before_the_first_sample_there_is_no_evidence() -> None:
    assert Windows().read(5.0) == (0.0, 0.0)


def test_samples_delayed_by_one_stall_count_as_one_window() -> None:
    """Nine seconds of nothing, and then forty answers that all say forty times as much."""
    made = steady()
    for n in range(40):
        made.take(400.0, 39.0 + 0.02 * n)
    assert made.read(40.0)[0] == pytest.approx(10.0, rel=0.03)


def test_a_lasting_change_is_taken_over_within_half_of_the_memory() -> None:
    made = steady()
    for n in range(5 * 7):
        made.take(30.0, 30.0 + n / 5)
    assert made.read(37.0)[0] == 30.0


def test_long_ago_counts_for_nothing_beside_the_present() -> None:
    made = steady()
    made.take(70.0, 1e6)
    assert made.read(1e6) == (70.0, pytest.approx(0.5))


def test_many_samples_of_one_second_are_one_window_and_bounded() -> None:
    made = Windows()
    for n in range(10_000):
        made.take(1.0 + n, 0.0)
    value, evidence = made.read(0.0)
    assert value <= SAMPLES_MAX
    assert evidence == pytest.approx(SAMPLES_MAX / (SAMPLES_MAX + 1))
    for n in range(200):
        made.take(5.0, 1.0 + n)
    assert (len(made.by_age), len(made.by_value)) == (KEPT, KEPT)
    assert made.read(200.0)[1] < KEPT


def test_each_window_is_rescaled_by_its_own_load() -> None:
    made = Windows()
    for n in range(200):
        load = 1.0 + n // 10
        made.take(2.0 * load, n / 10, load=load)
    _, evidence = made.read(20.0)
    made.rescale(lambda load: 0.5 / load)
    assert made.read(20.0) == (1.0, evidence)
    made.take(1.0, 25.0)
    made.rescale(lambda load: 1.0)
    assert made.read(25.0)[0] == 1.0


@given(SAMPLES, st.floats(0.0, 1e5), st.floats(0.0, 1e3))
@RUN
def test_the_median_is_one_of_its_samples_and_its_evidence_falls_with_age(
    samples: list[tuple[float, float, float]], later_s: float, more_s: float
) -> None:
    made, now = Windows(half=256.0), 0.0
    for value, gap_s, weight in samples:
        now += gap_s
        made.take(value, now, weight)
    value, evidence = made.read(now)
    assert value in {sample for sample, _, _ in samples}
    assert 0.0 < evidence <= KEPT + 1.0
    assert made.sampled_at == now
    then, left = made.read(now + later_s)
    assert then == value  # age reduces the evidence, never the estimate
    assert left == pytest.approx(evidence * exp(-later_s / TAU_S), rel=0.15)  # with the age of the open window
    assert made.read(now + later_s + more_s)[1] <= left
    assert made.read(now - 100.0)[1] >= evidence  # a step back in time is not a duration


@given(st.floats(1e-5, 1e8), st.integers(3, 40))
@RUN
def test_a_single_outlier_hardly_moves_the_median(odd: float, seconds: int) -> None:
    made = steady(seconds=seconds)
    made.take(odd, seconds + 0.1)
    assert made.read(seconds + 0.1)[0] == pytest.approx(10.0, rel=0.03)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.0, 10.0)), min_size=1, max_size=20))
@RUN
def test_the_median_by_weight_has_no_more_than_half_below_it(pairs: list[tuple[float, float]]) -> None:
    middle = weighted_median(pairs)
    total = sum(weight for _, weight in pairs)
    assert sum(w for v, w in pairs if v < middle) <= 0.5 * total + 1e-9
    assert sum(w for v, w in pairs if v <= middle) >= 0.5 * total - 1e-9
    assert -inf < middle < inf
