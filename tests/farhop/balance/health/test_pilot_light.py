"""A pilot light sleeps, wakes and goes back to sleep, and never in haste."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.health.pilot_light import PilotConfig, PilotLight, PilotState

STEPS = st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.5), st.floats(0.0, 60.0)), max_size=60)


@given(STEPS)
def test_its_invariants_hold_for_any_events(steps) -> None:
    pilot, now, needed_at = PilotLight(PilotConfig(sleep_after_s=100.0)), 0.0, None
    for needed, warm, passed in steps:
        now += passed
        before = pilot.state
        changed = pilot.look("because" if needed else "", warm, now)
        needed_at = now if needed else needed_at
        assert changed == (pilot.state is not before)
        assert not (needed and pilot.state is PilotState.ASLEEP)
        share = pilot.admitted_share(warm)
        assert 0.0 <= share <= 1.0
        assert share == 0.0 or pilot.state is not PilotState.ASLEEP
        if before is not PilotState.ASLEEP and pilot.state is PilotState.ASLEEP:
            assert now - needed_at >= 100.0


def test_a_waking_region_gets_the_share_of_requests_that_its_ready_replicas_can_take() -> None:
    pilot = PilotLight(PilotConfig(sleep_after_s=10.0))
    assert pilot.admitted_share(1.0) == 0.0
    assert pilot.look("paris cannot be used", 0.25, 1.0)
    assert (pilot.state, pilot.why, pilot.admitted_share(0.25)) == ("waking", "paris cannot be used", 0.25)
    assert not pilot.look("paris cannot be used", 0.5, 2.0)
    assert pilot.look("paris cannot be used", 1.0, 3.0)
    assert (pilot.state, pilot.admitted_share(0.5)) == ("awake", 1.0)
    assert not pilot.look("", 1.0, 12.9)
    assert pilot.look("", 1.0, 13.0)
    assert pilot.state == "asleep"


def test_a_changed_configuration_applies_at_once_and_is_checked() -> None:
    pilot = PilotLight(PilotConfig())
    pilot.look("x", 0.0, 0.0)
    pilot.configure(PilotConfig(sleep_after_s=1.0))
    assert pilot.look("", 0.0, 1.0)
    with pytest.raises(ValueError, match="sleep_after_s"):
        PilotConfig(sleep_after_s=-1.0)
