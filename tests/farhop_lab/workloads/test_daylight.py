from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.workloads.daylight import DAY_S, PEAK_HOUR, THREE, Daylight
from farhop_lab.workloads.program import WorkloadError

DAYS = st.builds(
    Daylight,
    utc_hours=st.floats(-12, 14),
    swing=st.floats(1.0, 40.0),
    weight=st.floats(0.1, 10.0),
    starts_hour=st.floats(0, 24),
    day_s=st.sampled_from([60.0, 3600.0, DAY_S]),
)


def test_single_regions_swing_widely_and_the_world_hardly() -> None:
    assert all(2.9 <= day.swing <= 32.6 for day in THREE.values())
    levels = [sum(day.level(step * DAY_S / 1440) for day in THREE.values()) for step in range(1440)]
    assert max(levels) / min(levels) == pytest.approx(1.29, abs=0.01)


def test_the_peak_is_at_its_local_hour_and_twelve_hours_from_the_trough() -> None:
    tokyo = Daylight(utc_hours=9.0, swing=9.0, weight=2.0)
    at_peak = (PEAK_HOUR - 9.0) * 3600.0
    assert tokyo.level(at_peak) == pytest.approx(6.0) == pytest.approx(tokyo.peak)
    assert tokyo.level(at_peak + DAY_S / 2) == pytest.approx(6.0 / 9.0)


@given(DAYS, st.floats(0.0, 1e5))
def test_levels_stay_within_the_swing_and_come_again(day: Daylight, at: float) -> None:
    assert day.peak / day.swing * (1 - 1e-9) <= day.level(at) <= day.peak * (1 + 1e-9)
    assert day.level(at) == pytest.approx(day.level(at + day.day_s), rel=1e-6)


@given(DAYS, st.floats(0.0, 1e5), st.floats(0.0, 1.0))
def test_a_sleeping_client_wakes_on_time_and_within_a_day(day: Daylight, now: float, threshold: float) -> None:
    wakes = day.awake(now, threshold)
    assert now <= wakes <= now + day.day_s * (1 + 1e-9)
    if wakes == now:
        assert day.level(now) >= threshold * day.peak * 0.998
    else:
        assert day.level(wakes) >= threshold * day.peak * 0.998
        assert day.level(now) < threshold * day.peak


@pytest.mark.parametrize("figures", [{"swing": 0.5}, {"weight": -1.0}, {"day_s": 0.0}])
def test_impossible_daylight_figures_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(WorkloadError, match="give a swing of 1 or more"):
        Daylight(**{"utc_hours": 0.0, "swing": 2.0, **figures})


def test_a_threshold_is_a_share() -> None:
    with pytest.raises(WorkloadError, match="threshold"):
        Daylight(utc_hours=0, swing=2).awake(0.0, 1.5)
