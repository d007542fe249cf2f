from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.sim.stats import Interval, fewest, interval, jain, ratio, share_interval, t95

SHARES = st.lists(st.floats(0.0, 1e6, allow_subnormal=False), min_size=1, max_size=20)


def test_student_t_as_tables_have_it() -> None:
    assert [t95(n) for n in (1, 4, 9, 30)] == [12.706, 2.776, 2.262, 2.042]
    assert [t95(n) for n in (31, 40, 60, 120)] == pytest.approx([2.040, 2.021, 2.000, 1.980], abs=6e-4)
    with pytest.raises(ValueError, match="freedom: 0"):
        t95(0)


def test_an_interval_by_hand() -> None:
    # mean 12, deviations -2 0 2: s = 2, half = 4.303 * 2 / sqrt(3)
    found = interval([10.0, 12.0, 14.0])
    assert (found.mean, found.n) == (12.0, 3)
    assert found.half == pytest.approx(4.9687, abs=1e-3)
    assert (found.low, found.high) == (pytest.approx(7.031, abs=1e-3), pytest.approx(16.969, abs=1e-3))
    assert str(found) == "12 ± 5"
    assert msgspec.json.decode(msgspec.json.encode(found), type=Interval) == found


def test_single_value_has_no_confidence_interval() -> None:
    found = interval([3.14159])
    assert (str(found), found.half, found.low, found.high) == ("3.142", None, -inf, inf)
    assert msgspec.json.encode(found) == b'{"mean":3.14159,"half":null,"n":1}'
    for values in ([], [1.0, float("nan")], [inf]):
        with pytest.raises(ValueError, match="have no mean"):
            interval(values)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng = Random(1)
    held = 0
    for _ in range(2000):
        found = interval([rng.gauss(5.0, 2.0) for _ in range(5)])
        held += found.low <= 5.0 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


def test_ratios_are_taken_seed_by_seed() -> None:
    found = ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (found.mean, found.half) == (2.0, 0.0)
    with pytest.raises(ValueError, match="run both on the same seeds"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="ratio to 0"):
        ratio([1.0], [0.0])


def test_fairness_by_hand() -> None:
    assert jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 3.0]) == pytest.approx(16 / 20)
    assert jain([]) == jain([0.0, 0.0]) == 1.0


@given(SHARES)
def test_fairness_is_between_1_over_n_and_1(shares: list[float]) -> None:
    assert 1.0 / len(shares) - 1e-9 <= jain(shares) <= 1.0 + 1e-9


@given(st.integers(0, 50), st.integers(0, 50), st.integers(-5, 60))
def test_the_fewest_that_are_enough(low: int, more: int, need: int) -> None:
    asked: list[int] = []

    def enough(count: int) -> bool:
        asked.append(count)
        return count >= need

    found = fewest(enough, low, low + more)
    assert found == (None if need > low + more else max(low, need))
    assert len(asked) <= 8
    assert all(low <= count <= low + more for count in asked)


def test_an_empty_range_has_no_fewest() -> None:
    with pytest.raises(ValueError, match="low 3 is above high 2"):
        fewest(lambda _count: True, 3, 2)


def test_a_share_s_interval_by_hand() -> None:
    # Wilson's interval of 45 of 50 is 0.786 to 0.957; twice as many requests, of which two count as one, prove no more.
    assert share_interval(90, 100) == pytest.approx((0.786, 0.957), abs=1e-3)
    low, high = share_interval(100, 100)
    assert 0.9 < low < high == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one request"):
        share_interval(0, 0)
