"""Slow start: Envoy's curve, what a blip costs, and that a share only grows while its target is up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.health.ramp import LEAST_SHARE, Ramp

RUN = settings(max_examples=200, deadline=None, derandomize=True)


def test_a_restarted_target_grows_from_a_tenth_to_the_whole() -> None:
    ramp = Ramp(10.0)
    assert ramp.share(0.0) == 1.0  # out: others decide that
    ramp.turn(True, 100.0)
    assert [ramp.share(100.0 + s) for s in (0.0, 0.5, 1.0, 5.0, 9.0, 10.0, 99.0)] == pytest.approx(
        [0.1, 0.1, 0.1, 0.5, 0.9, 1.0, 1.0]
    )


def test_a_target_that_ran_before_this_process_needs_no_ramp_at_first() -> None:
    ramp = Ramp(10.0, warm=True)
    ramp.turn(True, 5.0)
    assert ramp.share(5.0) == 1.0
    ramp.turn(False, 6.0)
    ramp.turn(True, 60.0)
    assert ramp.share(60.0) == LEAST_SHARE
    cooled = Ramp(10.0, warm=True)
    cooled.cool()
    cooled.turn(True, 5.0)
    assert cooled.share(5.0) == LEAST_SHARE


def test_a_short_outage_costs_a_short_ramp_unless_another_process_came_back() -> None:
    ramp = Ramp(10.0, warm=True)
    ramp.turn(True, 0.0)
    ramp.turn(False, 50.0)
    ramp.turn(True, 52.0)
    assert ramp.share(52.0) == pytest.approx(0.8)
    ramp.turn(False, 53.0)  # at 0.9
    ramp.turn(True, 54.0)
    assert ramp.share(54.0) == pytest.approx(0.8)
    ramp.turn(False, 80.0)
    ramp.cool()
    ramp.turn(True, 80.1)
    assert ramp.share(80.1) == LEAST_SHARE


def test_without_a_window_there_is_no_slow_start() -> None:
    ramp = Ramp(0.0)
    ramp.turn(True, 1.0)
    assert ramp.share(1.0) == 1.0


@given(st.lists(st.tuples(st.sampled_from(["up", "out", "cool"]), st.sampled_from([0.0, 0.3, 2.0, 11.0])), max_size=30))
@RUN
def test_while_up_a_share_never_falls_and_is_whole_after_the_window(events: list[tuple[str, float]]) -> None:
    ramp, now, up, last = Ramp(10.0), 0.0, False, 0.0
    for event, dt_s in events:
        now += dt_s
        if event == "cool":
            if not up:
                ramp.cool()
        else:
            last = 0.0 if event == "out" or not up else last
            up = event == "up"
            ramp.turn(up, now)
        share = ramp.share(now)
        assert LEAST_SHARE <= share <= 1.0
        if up:
            assert share >= last
            last = share
            assert ramp.share(now + 10.001) == 1.0
