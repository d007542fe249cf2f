"""Round-trip times and clock offsets from pings."""

from __future__ import annotations

import pytest
from inprocess import topology

from farhop.balance.estimate.rtt import WINDOW_S
from global_lb.fleet.distances import Distances

NAME = ("tokyo", "r1")
NOW = 11.0


@pytest.fixture
def distances() -> Distances:
    return Distances(topology(), "virginia")


def test_the_topologys_figure_stands_until_a_ping(distances: Distances) -> None:
    assert distances.rtt_ms("tokyo", NOW) == topology().rtt_ms("virginia", "tokyo")
    assert distances.pinged(NAME, 1, 5000.0, 10.0, 10.1)
    assert distances.rtt_ms("tokyo", NOW) == pytest.approx(100.0)


def test_a_path_that_moves_is_worth_more_pings(distances: Distances) -> None:
    for i in range(3):
        distances.pinged(NAME, 1, 0.0, i, i + 0.1)
    assert not distances.moving("tokyo")
    distances.pinged(NAME, 1, 0.0, 5.0, 5.3)
    assert distances.moving("tokyo")
    assert not distances.moving("virginia")


@pytest.mark.parametrize("out_share", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("apart_s", [0.0, 3600.0])
def test_however_unequal_the_two_ways_a_clock_is_off_by_half_a_round_trip_at_most(
    distances: Distances, out_share: float, apart_s: float
) -> None:
    """And clocks an hour apart are as good as any: an expiry stamped in the other's is off by no more."""
    sent_at, rtt_s = 50.0, 0.2
    there_ms = (apart_s + sent_at + out_share * rtt_s) * 1e3
    assert distances.pinged(NAME, 1, there_ms, sent_at, sent_at + rtt_s)
    assert distances.rtt_ms("tokyo", NOW) == pytest.approx(200.0)
    offset_ms = distances.offset_ms(NAME, 1)
    assert offset_ms is not None
    assert abs(offset_ms - apart_s * 1e3) <= 100.0 + 1e-6


def test_a_clock_is_read_half_way_and_is_its_incarnations(distances: Distances) -> None:
    assert distances.offset_ms(NAME, 1) is None
    distances.pinged(NAME, 1, 70_000.0, 10.0, 10.2)
    assert distances.offset_ms(NAME, 1) == pytest.approx(70_000.0 - 10_100.0)
    assert distances.offset_ms(NAME, 2) is None
    distances.forget(NAME)
    assert distances.offset_ms(NAME, 1) is None


@pytest.mark.parametrize(
    ("clock_ms", "now"), [(float("nan"), 10.1), (-1.0, 10.1), (1e300, 10.1), (5.0, 9.0), (5.0, 1e9)]
)
def test_an_absurd_reply_changes_nothing(distances: Distances, clock_ms: float, now: float) -> None:
    before = distances.rtt_ms("tokyo", NOW)
    assert not distances.pinged(NAME, 1, clock_ms, 10.0, now)
    assert (distances.rtt_ms("tokyo", NOW), distances.offset_ms(NAME, 1)) == (before, None)


def test_distance_returns_to_the_maps_without_pings(distances: Distances) -> None:
    assert distances.pinged(NAME, 1, 5000.0, 10.0, 10.1)
    later = 10.1 + 2 * WINDOW_S
    assert distances.rtt_ms("tokyo", later) == topology().rtt_ms("virginia", "tokyo")
