from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.health.hot_guard import GuardConfig, HotGuard


def test_a_short_peak_does_not_make_a_region_hot() -> None:
    guard = HotGuard()
    guard.used(0.95, 0.0)
    guard.used(0.95, 1.9)
    guard.used(0.85, 2.0)
    guard.used(0.95, 2.1)
    guard.used(0.95, 4.0)
    assert not guard.hot
    assert guard.admitted_share(4.0) == 1.0


def test_heat_that_lasts_closes_it_and_only_real_relief_opens_it() -> None:
    guard = HotGuard()
    guard.used(0.90, 0.0)
    guard.used(0.91, 2.0)
    assert guard.hot
    assert guard.admitted_share(2.0) == 0.0
    guard.used(0.80, 3.0)  # between the thresholds nothing changes
    assert guard.hot
    guard.used(0.74, 4.0)
    assert not guard.hot
    assert guard.admitted_share(4.0) == pytest.approx(0.05)
    assert guard.admitted_share(13.0) == pytest.approx(0.5)
    assert guard.admitted_share(23.0) == 1.0


def test_an_absence_is_ramped_like_heat() -> None:
    guard = HotGuard()
    guard.came_back(1.0)
    assert guard.admitted_share(1.0) == 1.0  # it never was away
    guard.left()
    guard.came_back(10.0)
    assert guard.admitted_share(10.0) == pytest.approx(0.05)
    guard.came_back(15.0)  # reported again: the ramp continues
    assert guard.admitted_share(20.0) == pytest.approx(0.55)


@pytest.mark.parametrize("wrong", [{"return_at": 0.95}, {"return_at": 0.0}, {"hold_s": -1.0}, {"ramp_per_s": 0.0}])
def test_bad_thresholds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GuardConfig(**wrong)


_STEPS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(0.01, 3), st.sampled_from(["used", "left", "came_back"])), max_size=40
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_STEPS)
def test_the_share_never_jumps_up(steps: list[tuple[float, float, str]]) -> None:
    """From any moment to the next it grows by the ramp at most, once a ramp has begun; reading changes nothing."""
    guard, now = HotGuard(), 0.0
    for share, dt, what in steps:
        before = guard.admitted_share(now)
        was_hot = guard.hot
        now += dt
        if what == "used":
            guard.used(share, now)
        elif what == "left":
            guard.left()
        else:
            guard.came_back(now)
        after = guard.admitted_share(now)
        assert 0.0 <= after <= 1.0
        assert after == guard.admitted_share(now)
        assert after <= before + 0.05 * dt + 0.05 + 1e-9
        if was_hot and not guard.hot:
            assert share < 0.75


def test_time_without_reports_does_not_count_as_overload() -> None:
    guard = HotGuard(GuardConfig(hold_s=2.0))
    guard.used(0.95, 0.0)
    guard.used(0.95, 60.0)  # no report came in between
    assert not guard.hot
    guard.used(0.95, 61.0)
    guard.used(0.95, 62.0)
    assert guard.hot


def test_cap_bounds_the_share_of_the_ramp() -> None:
    guard = HotGuard(GuardConfig(ramp_per_s=0.5))
    guard.cap = 0.25
    assert guard.admitted_share(0.0) == 0.25
    guard.left()
    assert guard.admitted_share(1.0) == 0.0
    guard.came_back(2.0)
    assert guard.admitted_share(10.0) == 0.25
    guard.cap = 1.0
    assert guard.admitted_share(10.0) == 1.0
