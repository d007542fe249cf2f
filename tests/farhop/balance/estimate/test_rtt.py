from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.rtt import LATEST, WINDOW_S, RttEstimate


def test_the_topology_s_round_trip_time_counts_until_a_ping_is_measured() -> None:
    estimate = RttEstimate(91.0)
    assert estimate.rtt_ms == 91.0
    estimate.sample(88.0, 0.0)
    assert estimate.rtt_ms == 88.0
    assert not estimate.moving


def test_jitter_is_tolerated_and_a_single_peak_is_ignored() -> None:
    estimate = RttEstimate(0.0)
    for i in range(10):
        estimate.sample(100.0 + i % 2, float(i))
    assert estimate.rtt_ms == pytest.approx(100.5)
    estimate.sample(400.0, 10.0)
    assert estimate.moving
    assert estimate.rtt_ms < 102.0


def test_a_single_slow_ping_after_the_start_does_not_count_as_jitter() -> None:
    """A process that has just started is late for reasons of its own: its own region would look as far as another."""
    estimate = RttEstimate(1.0)
    estimate.sample(30.0, 0.0)
    assert estimate.moving  # not the map's value: checked again soon
    estimate.sample(1.2, 0.25)
    assert estimate.rtt_ms == pytest.approx(1.2)
    estimate.sample(1.4, 0.5)
    assert estimate.rtt_ms == pytest.approx(1.4)
    estimate.sample(25.0, 0.75)
    assert estimate.rtt_ms == pytest.approx(1.4)


def test_a_changed_path_counts_once_the_window_has_passed() -> None:
    estimate = RttEstimate(0.0)
    for i in range(10):
        estimate.sample(50.0, float(i))
    for i in range(60):
        estimate.sample(150.0, 10.0 + i)
    assert estimate.rtt_ms == pytest.approx(150.0)
    for i in range(5):
        estimate.sample(20.0, 71.0 + i)
    assert estimate.rtt_ms == pytest.approx(20.0)  # a better path is accepted after five pings


@pytest.mark.parametrize("absurd", [-1.0, math.nan, math.inf, 1e9])
def test_samples_out_of_range_change_nothing(absurd: float) -> None:
    estimate = RttEstimate(5.0)
    assert not estimate.sample(absurd, 0.0)
    assert estimate.rtt_ms == 5.0


@pytest.mark.parametrize("ms_per_s", [-2.0, 2.0])
def test_a_path_that_drifts_is_followed_no_later_than_the_window(ms_per_s: float) -> None:
    """Never more off than the drift of one window, and jitter on top of it does not add up."""
    estimate, rng = RttEstimate(200.0), Random(7)
    for second in range(60):
        truth_ms = 200.0 + ms_per_s * second
        estimate.sample(truth_ms + rng.uniform(0.0, 3.0), float(second))
        assert abs(estimate.rtt_ms - truth_ms) <= abs(ms_per_s) * WINDOW_S + 6.0
        if ms_per_s < 0:  # an improvement is accepted soon: the latest pings alone outvote the rest
            assert estimate.rtt_ms <= truth_ms + abs(ms_per_s) * LATEST + 6.0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 20)), min_size=1, max_size=60))
def test_the_estimate_is_the_least_of_the_window_and_no_more_than_its_range_above(
    samples: list[tuple[float, float]],
) -> None:
    estimate, now, seen = RttEstimate(7.0), 0.0, list[tuple[float, float]]()
    for ms, dt in samples:
        now += dt
        estimate.sample(ms, now)
        seen = [(at, x) for at, x in [*seen, (now, ms)] if now - at <= WINDOW_S]
        values = [x for _, x in seen]
        assert min(values) <= estimate.rtt_ms <= 2 * max(values) - min(values) + 1e-6


def test_a_longer_route_counts_when_all_of_the_latest_pings_show_it() -> None:
    estimate = RttEstimate(0.0)
    for i in range(20):
        estimate.sample(50.0 + i % 3, float(i))
    for i in range(2 * LATEST):
        estimate.sample(150.0 + i % 3, 20.0 + i / 4)
        if i + 1 >= LATEST:  # earlier samples are still in the window, and would stay for half a minute
            assert 150.0 <= estimate.rtt_ms <= 152.0
    estimate.sample(50.0, 25.0)  # and back
    assert estimate.rtt_ms <= 152.0
    for i in range(LATEST):
        estimate.sample(50.0, 26.0 + i / 4)
    assert estimate.rtt_ms == pytest.approx(50.0)


def test_without_pings_the_estimate_goes_back_to_what_was_known_before_any() -> None:
    estimate = RttEstimate(90.0)
    assert estimate.at(5.0) == 90.0
    estimate.sample(30.0, 10.0)
    found = [estimate.at(10.0 + share * WINDOW_S) for share in (0.0, 1.0, 1.5, 2.0, 9.0)]
    assert found == pytest.approx([30.0, 30.0, 60.0, 90.0, 90.0])
    estimate.sample(40.0, 10.0 + 9 * WINDOW_S)
    assert estimate.at(11.0 + 9 * WINDOW_S) == 40.0


def test_the_noise_of_a_short_wire_is_no_other_path() -> None:
    estimate = RttEstimate(0.4)
    for n, ms in enumerate((0.3, 0.9, 0.4, 1.1, 0.3)):
        estimate.sample(ms, float(n))
        assert not estimate.moving
    estimate.sample(2.0, 6.0)
    assert estimate.moving


def test_a_wire_that_is_always_noisy_is_no_other_path_each_time() -> None:
    """Or a busy machine's own delays would have it ask four times as often, and be busier for it."""
    estimate, rng = RttEstimate(0.4), Random(3)
    moved = 0
    for second in range(200):
        estimate.sample(0.4 + rng.expovariate(0.5), second / 2)
        moved += estimate.moving and second >= LATEST
    assert moved <= 30  # 93 by the minimum alone
    for i in range(3):
        estimate.sample(40.0 + i, 100.5 + i)
        assert estimate.moving
