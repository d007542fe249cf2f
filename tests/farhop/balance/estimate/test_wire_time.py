from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.wire_time import LATEST, WINDOW_S, WireTime


def test_the_topology_s_round_trip_time_counts_until_a_ping_is_measured() -> None:
    wire = WireTime(91.0)
    assert wire.rtt_ms == 91.0
    wire.sample(88.0, 0.0)
    assert wire.rtt_ms == 88.0
    assert not wire.moving


def test_jitter_is_tolerated_and_a_single_peak_is_ignored() -> None:
    wire = WireTime(0.0)
    for i in range(10):
        wire.sample(100.0 + i % 2, float(i))
    assert wire.rtt_ms == pytest.approx(100.5)
    wire.sample(400.0, 10.0)
    assert wire.moving
    assert wire.rtt_ms < 102.0


def test_a_single_slow_ping_after_the_start_does_not_count_as_jitter() -> None:
    """A process that has just started is late for reasons of its own: its own region would look as far as another."""
    wire = WireTime(1.0)
    wire.sample(30.0, 0.0)
    assert wire.moving  # not the map's value: checked again soon
    wire.sample(1.2, 0.25)
    assert wire.rtt_ms == pytest.approx(1.2)
    wire.sample(1.4, 0.5)
    assert wire.rtt_ms == pytest.approx(1.4)
    wire.sample(25.0, 0.75)
    assert wire.rtt_ms == pytest.approx(1.4)


def test_a_changed_path_counts_once_the_window_has_passed() -> None:
    wire = WireTime(0.0)
    for i in range(10):
        wire.sample(50.0, float(i))
    for i in range(60):
        wire.sample(150.0, 10.0 + i)
    assert wire.rtt_ms == pytest.approx(150.0)
    for i in range(5):
        wire.sample(20.0, 71.0 + i)
    assert wire.rtt_ms == pytest.approx(20.0)  # a better path is accepted after five pings


@pytest.mark.parametrize("absurd", [-1.0, math.nan, math.inf, 1e9])
def test_samples_out_of_range_change_nothing(absurd: float) -> None:
    wire = WireTime(5.0)
    assert not wire.sample(absurd, 0.0)
    assert wire.rtt_ms == 5.0


@pytest.mark.parametrize("ms_per_s", [-2.0, 2.0])
def test_a_path_that_drifts_is_followed_no_later_than_the_window(ms_per_s: float) -> None:
    """Never more off than the drift of one window, and jitter on top of it does not add up."""
    wire, rng = WireTime(200.0), Random(7)
    for second in range(60):
        truth_ms = 200.0 + ms_per_s * second
        wire.sample(truth_ms + rng.uniform(0.0, 3.0), float(second))
        assert abs(wire.rtt_ms - truth_ms) <= abs(ms_per_s) * WINDOW_S + 6.0
        if ms_per_s < 0:  # an improvement is accepted soon: the latest pings alone outvote the rest
            assert wire.rtt_ms <= truth_ms + abs(ms_per_s) * LATEST + 6.0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 20)), min_size=1, max_size=60))
def test_the_estimate_is_the_least_of_the_window_and_no_more_than_its_range_above(
    samples: list[tuple[float, float]],
) -> None:
    wire, now, seen = WireTime(7.0), 0.0, list[tuple[float, float]]()
    for ms, dt in samples:
        now += dt
        wire.sample(ms, now)
        seen = [(at, x) for at, x in [*seen, (now, ms)] if now - at <= WINDOW_S]
        values = [x for _, x in seen]
        assert min(values) <= wire.rtt_ms <= 2 * max(values) - min(values) + 1e-6


def test_a_longer_route_counts_when_all_of_the_latest_pings_show_it() -> None:
    wire = WireTime(0.0)
    for i in range(20):
        wire.sample(50.0 + i % 3, float(i))
    for i in range(2 * LATEST):
        wire.sample(150.0 + i % 3, 20.0 + i / 4)
        if i + 1 >= LATEST:  # earlier samples are still in the window, and would stay for half a minute
            assert 150.0 <= wire.rtt_ms <= 152.0
    wire.sample(50.0, 25.0)  # and back
    assert wire.rtt_ms <= 152.0
    for i in range(LATEST):
        wire.sample(50.0, 26.0 + i / 4)
    assert wire.rtt_ms == pytest.approx(50.0)


def test_without_pings_the_estimate_goes_back_to_what_was_known_before_any() -> None:
    wire = WireTime(90.0)
    assert wire.at(5.0) == 90.0
    wire.sample(30.0, 10.0)
    found = [wire.at(10.0 + share * WINDOW_S) for share in (0.0, 1.0, 1.5, 2.0, 9.0)]
    assert found == pytest.approx([30.0, 30.0, 60.0, 90.0, 90.0])
    wire.sample(40.0, 10.0 + 9 * WINDOW_S)
    assert wire.at(11.0 + 9 * WINDOW_S) == 40.0


def test_the_noise_of_a_short_wire_is_no_other_path() -> None:
    wire = WireTime(0.4)
    for n, ms in enumerate((0.3, 0.9, 0.4, 1.1, 0.3)):
        wire.sample(ms, float(n))
        assert not wire.moving
    wire.sample(2.0, 6.0)
    assert wire.moving


def test_a_wire_that_is_always_noisy_is_no_other_path_each_time() -> None:
    """Or a busy machine's own delays would have it ask four times as often, and be busier for it."""
    wire, rng = WireTime(0.4), Random(3)
    moved = 0
    for second in range(200):
        wire.sample(0.4 + rng.expovariate(0.5), second / 2)
        moved += wire.moving and second >= LATEST
    assert moved <= 30  # 93 by the minimum alone
    for i in range(3):
        wire.sample(40.0 + i, 100.5 + i)
        assert wire.moving
