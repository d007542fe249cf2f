from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.workloads.daylight import Daylight
from farhop_lab.workloads.places import by_weight, following_sun, uniform, zipf
from farhop_lab.workloads.program import WorkloadError

SESSIONS = [f"s{n}" for n in range(20_000)]
WORLD = {"virginia": (38.0, -78.0), "frankfurt": (50.1, 8.7), "tokyo": (35.7, 139.7)}


def shares(rule: object, at: float = 0.0) -> dict[str, float]:
    counts = Counter(rule(session, at) for session in SESSIONS)  # type: ignore[operator]
    return {name: count / len(SESSIONS) for name, count in counts.items()}


def test_sessions_come_by_weight() -> None:
    assert shares(by_weight({"a": 1.0, "b": 3.0, "none": 0.0})) == {
        "a": pytest.approx(0.25, abs=0.02),
        "b": pytest.approx(0.75, abs=0.02),
    }
    assert shares(uniform(["a", "b"])) == {"a": pytest.approx(0.5, abs=0.02), "b": pytest.approx(0.5, abs=0.02)}
    assert shares(zipf(["a", "b", "c"])) == {
        "a": pytest.approx(6 / 11, abs=0.02),
        "b": pytest.approx(3 / 11, abs=0.02),
        "c": pytest.approx(2 / 11, abs=0.02),
    }


def test_same_salt_gives_the_same_draw_and_another_salt_does_not() -> None:
    first, again, other = (
        [uniform(["a", "b"], salt)(session, 0.0) for session in SESSIONS[:200]] for salt in ("1", "1", "2")
    )
    assert first == again != other
    days = {name: Daylight(utc_hours=0, swing=2) for name in "ab"}
    one, two = ([following_sun(days, salt)(session, 0.0) for session in SESSIONS[:200]] for salt in ("1", "2"))
    assert one != two


@given(
    st.dictionaries(st.text(max_size=5), st.floats(0.0, 1e6, allow_subnormal=False), min_size=1),
    st.text(max_size=10),
    st.floats(0, 1e6),
)
def test_only_regions_with_weight_come_up(weights: dict[str, float], session: str, at: float) -> None:
    if any(weights.values()):
        assert weights[by_weight(weights)(session, at)] > 0.0
    else:
        with pytest.raises(WorkloadError, match="give at least one above 0"):
            by_weight(weights)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_region_weights_are_refused(weight: float) -> None:
    with pytest.raises(WorkloadError, match="weight of b"):
        by_weight({"a": 1.0, "b": weight})
    with pytest.raises(WorkloadError, match="no region"):
        uniform([])


def test_sessions_follow_the_sun() -> None:
    days = {"tokyo": Daylight(utc_hours=9, swing=16), "paris": Daylight(utc_hours=1, swing=16)}
    rule = following_sun(days)
    for at in (5 * 3600.0, 13 * 3600.0):
        total = sum(day.level(at) for day in days.values())
        seen = shares(rule, at)
        assert seen["tokyo"] == pytest.approx(days["tokyo"].level(at) / total, abs=0.02)
    assert shares(rule, 5 * 3600.0)["tokyo"] > 0.6 > 0.4 > shares(rule, 13 * 3600.0)["tokyo"]
