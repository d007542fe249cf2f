"""A region's life by playbook, and by property: two signals are death, one is doubt, and the operator comes first."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.health.reading import Health, State
from farhop.balance.health.region import Liveness, LivenessConfig

RUN = settings(max_examples=250, deadline=None, derandomize=True)


def fields(thing: object) -> dict[str, object]:
    return {name: copy.deepcopy(getattr(thing, name)) for name in type(thing).__slots__ if name != "forced"}


def state(liveness: Liveness, now: float) -> State:
    return liveness.read(now).state


REGION_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["reported", "connected", "broke", "failed", "succeeded"]),
        st.sampled_from([0.0, 0.1, 1.0, 2.9, 3.0, 10.0]),
    ),
    max_size=40,
)


@given(REGION_EVENTS)
@RUN
def test_a_region_is_down_on_two_signals_suspect_on_one_and_up_on_none(events: list[tuple[str, float]]) -> None:
    liveness = Liveness()
    now, reported_at, connected, failures, lost_at = 50.0, None, False, [], None
    for event, dt_s in events:
        now += dt_s
        was_connected = connected
        if event == "reported":
            liveness.reported(now)
            reported_at = now
        elif event in ("connected", "broke"):
            failures = [] if event == "connected" and not connected else failures
            connected = event == "connected"
            liveness.channel(connected, now)
        elif event == "failed":
            liveness.relay_failed(now)
            failures = [*failures, now] if failures and now < failures[-1] + 10.0 else [now]
        else:
            liveness.relay_succeeded()
            failures = []
        if connected and (not failures or failures == [now]):
            lost_at = None
        if (was_connected and not connected) or failures[-1:] == [now]:
            lost_at = now if lost_at is None else lost_at
        assert liveness.lost_at == lost_at
        for later in (now, now + 2.9, now + 3.0, now + 10.0):
            against = [
                reported_at is None or later >= reported_at + 3.0,
                not connected,
                len(failures) >= 3 and later < failures[-1] + 10.0,
            ]
            before = fields(liveness)
            health = liveness.read(later)
            assert fields(liveness) == before
            assert health.state is (State.UP, State.SUSPECT, State.DOWN, State.DOWN)[sum(against)]
            assert ["no recent report" in health.why, "channel broken" in health.why, "failures" in health.why] == (
                against
            )
            if health.until is not None:  # it does change then, and not before
                just_before = health.until - 1e-6
                assert just_before < later or liveness.read(just_before) == health
                assert liveness.read(health.until).why != health.why


def test_a_region_begins_down_and_comes_up_by_report_and_channel() -> None:
    liveness = Liveness()
    assert liveness.read(0.0) == Health(State.DOWN, "no recent report and channel broken")
    liveness.reported(0.0)
    assert liveness.read(0.0) == Health(State.SUSPECT, "channel broken", 3.0)
    liveness.channel(True, 0.0)
    assert liveness.read(0.0) == Health(State.UP, "reports, channel and relay agree", 3.0)


def test_a_channel_that_is_back_takes_what_relaying_met_in_the_outage_with_it() -> None:
    life = Liveness(LivenessConfig(relay_streak=2))
    life.channel(True, 0.0)
    life.reported(0.0)
    life.relay_failed(0.0)
    life.relay_failed(0.0)
    life.channel(True, 0.0)  # it never broke: it says nothing about the path of relayed requests
    assert life.read(0.0).why == "relay failures"
    life.channel(False, 0.0)
    assert life.read(0.0).why == "channel broken and relay failures"
    life.channel(True, 0.0)
    assert life.read(0.0).state is State.UP
    life.relay_failed(1.0)
    life.relay_failed(1.0)
    assert life.read(1.0).state is State.SUSPECT


def test_a_drained_region_is_draining_whatever_the_signals() -> None:
    liveness = Liveness()
    liveness.forced.force(State.DRAINING, "maintenance", until=100.0)
    assert liveness.read(5.0) == Health(State.DRAINING, "maintenance", 100.0, forced=True)
    assert liveness.read(100.0).state is State.DOWN


@settings(max_examples=200, deadline=None, derandomize=True)
@given(words=st.lists(st.tuples(st.floats(0, 20), st.sampled_from((0.0, 1.0, 10.0, 100.0))), min_size=1, max_size=6))
def test_a_fading_share_never_grows_while_the_drain_stands(words: list[tuple[float, float]]) -> None:
    liveness, now, last = Liveness(), 0.0, 1.0
    for after, over_s in words:
        liveness.reported(now)
        liveness.channel(True, now)
        now += after
        liveness.forced.force(State.DRAINING, "x", now=now, over_s=over_s)
        liveness.reported(now)
        share = liveness.read(now).share
        assert 0.0 <= share <= (last + 1e-9 if over_s else 0.0)
        assert liveness.read(now + over_s).share == pytest.approx(0.0, abs=1e-9)
        last = share
    liveness.forced.lift()
    assert liveness.read(now) == Health(State.UP, "reports, channel and relay agree", now + 3.0)


def test_a_new_incarnation_has_no_part_in_how_relaying_failed() -> None:
    life = Liveness(LivenessConfig(relay_streak=2))
    life.channel(True, 0.0)
    life.reported(0.0)
    life.relay_failed(0.0)
    life.relay_failed(0.0)
    life.reported(1.0)
    assert life.read(1.0).state is State.SUSPECT
    life.reported(1.0, renewed=True)
    assert life.read(1.0).state is State.UP


def test_thresholds_are_checked() -> None:
    with pytest.raises(ValueError, match="relay_streak"):
        LivenessConfig(relay_streak=0)
