"""Health by playbook, and by property: evidence before UP, the operator's word first, reading changes nothing."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.health import (
    Health,
    HealthConfig,
    HealthMachine,
    Liveness,
    LivenessConfig,
    Mode,
    Override,
    State,
    may_eject,
    panic,
)

RUN = settings(max_examples=250, deadline=None, derandomize=True)
CONFIG = HealthConfig(rise=2, fall=3, streak=3, eject_s=30.0, refused_s=1.0, trial_s=20.0, fresh_s=1000.0)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "ok",
                "bad",
                "unready",
                "strained",
                "succeeded",
                "failed",
                "failed_kept",
                "ejected",
                "refused",
                "admit",
                "force",
                "lift",
            ]
        ),
        st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0, 31.0, 301.0]),
    ),
    max_size=40,
)


def proven(now: float = 0.0) -> HealthMachine:
    machine = HealthMachine(CONFIG)
    machine.probed(True, now)
    return machine


def state(machine: HealthMachine | Liveness, now: float) -> State:
    return machine.read(now).state


def apply(machine: HealthMachine, event: str, now: float) -> None:
    if event in ("ok", "bad"):
        machine.probed(event == "ok", now)
    elif event == "unready":
        machine.probed(True, now, ready=False)
    elif event == "strained":
        machine.probed(True, now, strain="GPU 0: 99 °C")
    elif event == "ejected":
        machine.eject("slower than its peers", now)
    elif event == "failed_kept":
        machine.failed(now, may_eject=False)
    elif event == "force":
        machine.override.force(State.DRAINING, "operator", now + 10.0)
    elif event == "lift":
        machine.override.lift()
    else:
        getattr(machine, event)(now)


def fields(thing: object) -> dict[str, object]:
    kept = {name: copy.deepcopy(getattr(thing, name)) for name in type(thing).__slots__ if name != "override"}
    for part in ("_ramp", "_eject_backoff", "_refused_backoff"):
        if part in kept:
            kept[part] = fields(kept[part])
    return kept


@given(EVENTS)
@RUN
def test_up_needs_recent_evidence_and_the_forced_wins_until_it_expires(events: list[tuple[str, float]]) -> None:
    config = HealthConfig(rise=2, fall=3, streak=3, trial_s=20.0, fresh_s=25.0)
    machine = HealthMachine(config)
    now, forced_until, heard_at = 100.0, None, None
    for event, dt_s in events:
        now += dt_s
        apply(machine, event, now)
        if event in ("ok", "strained", "succeeded"):
            heard_at = now
        forced_until = {"force": now + 10.0, "lift": None}.get(event, forced_until)
        for later in (now, now + 9.0, now + 11.0, now + 26.0, now + 1e6):
            before = fields(machine)
            health = machine.read(later)
            assert fields(machine) == before
            assert health == machine.read(later)
            assert 0.0 < machine.share(later) <= 1.0
            assert health.forced == (forced_until is not None and later < forced_until)
            if health.forced:
                assert health == Health(State.DRAINING, "operator", forced_until, forced=True)
            if health.state is State.UP:
                assert heard_at is not None
                assert later < heard_at + 25.0
                assert health.until is not None
                assert later < health.until
            # Whatever was met, no back-off outlasts four times the base, nor a trial its time.
            assert health.forced or health.until is None or health.until <= now + 25.0


@given(EVENTS, st.sampled_from([0.5, 31.0, 301.0]))
@RUN
def test_half_open_lets_one_through_and_no_more(events: list[tuple[str, float]], dt_s: float) -> None:
    machine = proven()
    now = 0.0
    for event, step_s in events:
        now += step_s
        apply(machine, event, now)
    now += dt_s
    machine.override.lift()
    health = machine.read(now)
    admitted = [machine.admit(now) for _ in range(3)]
    if health.why == "one trial after ejection":
        assert admitted == [True, False, False]
    else:
        assert admitted == [health.state in (State.UP, State.SUSPECT)] * 3


def test_a_target_never_heard_of_is_down_and_one_word_of_life_is_enough() -> None:
    machine = HealthMachine(CONFIG)
    assert machine.read(0.0) == Health(State.DOWN, "not heard of yet")
    assert not machine.admit(0.0)
    assert state(proven(), 0.0) is State.UP
    served = HealthMachine(CONFIG)
    served.succeeded(0.0)
    assert state(served, 0.0) is State.UP


def test_probes_take_down_by_fall_and_bring_back_by_rise() -> None:
    machine = proven()
    machine.probed(False, 1.0)
    machine.probed(False, 2.0)
    assert machine.read(2.0).state is State.SUSPECT
    machine.probed(False, 3.0)
    assert machine.read(3.0) == Health(State.DOWN, "probes fail")
    machine.probed(True, 4.0)
    assert state(machine, 4.0) is State.DOWN
    machine.probed(True, 5.0)
    assert state(machine, 5.0) is State.UP


def test_a_probe_that_fails_in_between_starts_the_rise_anew() -> None:
    machine = proven()
    for ok in (False, False, False, True, False, True):
        machine.probed(ok, 1.0)
    assert state(machine, 1.0) is State.DOWN


def test_a_fault_takes_a_target_out_at_once_and_probes_bring_it_back_by_rise() -> None:
    machine = HealthMachine(HealthConfig(rise=2, fall=3))
    machine.probed(True, 0.0)
    machine.probed(True, 1.0, "GPU 3: XID 79")
    assert machine.read(1.0) == Health(State.DOWN, "GPU 3: XID 79")
    assert not machine.steady
    machine.succeeded(1.5)  # what was under way may end well
    assert machine.read(1.5).state is State.DOWN
    machine.probed(True, 2.0)
    assert machine.read(2.0).state is State.DOWN
    machine.probed(True, 3.0)
    assert machine.read(3.0).state is State.UP


def test_evidence_grows_old() -> None:
    machine = proven()
    assert machine.read(999.0) == Health(State.UP, "proven", 1000.0)
    assert machine.read(1000.0) == Health(State.SUSPECT, "no recent evidence")


def test_a_streak_ejects_and_each_failed_trial_doubles_the_backoff_to_four_times() -> None:
    machine = proven()
    now = 0.0
    for _ in range(3):
        machine.failed(now)
    for backoff_s in (30.0, 60.0, 120.0, 120.0):
        assert machine.read(now) == Health(State.DOWN, "requests failed in a row", now + backoff_s)
        machine.failed(now + 1.0)  # what was in flight at the ejection does not prolong it
        machine.probed(True, now + 1.0)  # and a probe does not see what requests see
        assert machine.read(now + 1.0).until == now + backoff_s
        now += backoff_s
        assert state(machine, now) is State.SUSPECT
        assert machine.admit(now)
        assert machine.read(now).why == "a trial is under way"
        machine.failed(now)
    now += 120.0
    assert machine.admit(now)
    machine.succeeded(now + 2.0)
    assert state(machine, now + 2.0) is State.UP
    machine.succeeded(now + 2.0 + 240.0)  # well for twice the longest back-off: it is forgotten
    for _ in range(3):
        machine.failed(now + 250.0)
    assert machine.read(now + 250.0).until == now + 280.0


def test_a_success_breaks_the_streak() -> None:
    machine = proven()
    for _ in range(5):
        machine.failed(1.0)
        machine.failed(1.0)
        machine.succeeded(1.0)
    assert state(machine, 1.0) is State.UP


def test_an_answer_to_an_older_request_ends_no_ejection() -> None:
    machine = proven()
    for _ in range(3):
        machine.failed(0.0)
    machine.succeeded(1.0)
    assert state(machine, 1.0) is State.DOWN
    machine.succeeded(30.0)
    assert machine.read(30.0).why == "one trial after ejection"


def test_a_trial_that_is_lost_does_not_wedge_the_target_and_a_late_answer_still_counts() -> None:
    machine = proven()
    for _ in range(3):
        machine.failed(0.0)
    assert machine.admit(30.0)
    assert not machine.admit(49.0)
    assert machine.admit(50.0)
    machine.succeeded(200.0)
    assert state(machine, 200.0) is State.UP


def test_a_refused_connection_ejects_at_once_and_a_probe_brings_it_back() -> None:
    machine = proven()
    machine.refused(10.0)
    assert machine.read(10.0) == Health(State.DOWN, "connection refused", 11.0)
    machine.probed(True, 10.2)
    assert state(machine, 10.2) is State.UP
    machine.refused(10.3)
    assert machine.read(10.3).until == 12.3  # flapping
    machine.probed(True, 10.5)
    machine.refused(31.0)
    assert machine.read(31.0).until == 32.0  # back for twice the longest back-off: that is forgotten


def test_the_share_already_out_keeps_a_failing_target_in() -> None:
    machine = proven()
    for _ in range(9):
        machine.failed(1.0, may_eject=False)
    assert machine.read(1.0) == Health(State.SUSPECT, "requests fail")
    assert [may_eject(0, 1), may_eject(0, 2), may_eject(1, 2), may_eject(1, 4), may_eject(2, 4)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert not may_eject(1, 10, share_max=0.1)


def test_an_operators_word_wins_over_death_and_expires() -> None:
    machine = HealthMachine(CONFIG)
    machine.override.force(State.UP, "pinned by ann", until=60.0)
    assert machine.read(59.0) == Health(State.UP, "pinned by ann", 60.0, forced=True)
    assert machine.admit(59.0)
    assert machine.read(60.0).state is State.DOWN
    machine.override.force(State.DRAINING, "for ever")
    assert state(machine, 1e9) is State.DRAINING
    assert not machine.admit(1e9)


def test_lifting_nothing_is_fine() -> None:
    override = Override()
    override.lift()
    assert override.read(0.0) is None


def test_all_down_has_a_name() -> None:
    assert [panic(0, 0), panic(0, 3), panic(1, 3)] == [Mode.EMPTY, Mode.ALL_DOWN, Mode.NORMAL]


@pytest.mark.parametrize("bad", [{"rise": 0}, {"streak": -1}, {"eject_s": 0.0}, {"fresh_s": float("nan")}])
def test_thresholds_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HealthConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="relay_streak"):
        LivenessConfig(relay_streak=0)


# --- a region -------------------------------------------------------------------------------------------------------

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
    now, reported_at, connected, failures = 50.0, None, False, []
    for event, dt_s in events:
        now += dt_s
        if event == "reported":
            liveness.reported(now)
            reported_at = now
        elif event in ("connected", "broke"):
            failures = [] if event == "connected" and not connected else failures
            connected = event == "connected"
            liveness.channel(connected)
        elif event == "failed":
            liveness.relay_failed(now)
            failures = [*failures, now] if failures and now < failures[-1] + 10.0 else [now]
        else:
            liveness.relay_succeeded()
            failures = []
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
    liveness.channel(True)
    assert liveness.read(0.0) == Health(State.UP, "reports, channel and relay agree", 3.0)


def test_a_channel_that_is_back_takes_what_relaying_met_in_the_outage_with_it() -> None:
    life = Liveness(LivenessConfig(relay_streak=2))
    life.channel(True)
    life.reported(0.0)
    life.relay_failed(0.0)
    life.relay_failed(0.0)
    life.channel(True)  # it never broke: it says nothing of the path that relaying takes
    assert life.read(0.0).why == "relay failures"
    life.channel(False)
    assert life.read(0.0).why == "channel broken and relay failures"
    life.channel(True)
    assert life.read(0.0).state is State.UP
    life.relay_failed(1.0)
    life.relay_failed(1.0)
    assert life.read(1.0).state is State.SUSPECT


def test_a_drained_region_says_so_whatever_the_signals() -> None:
    liveness = Liveness()
    liveness.override.force(State.DRAINING, "maintenance", until=100.0)
    assert liveness.read(5.0) == Health(State.DRAINING, "maintenance", 100.0, forced=True)
    assert liveness.read(100.0).state is State.DOWN


@settings(max_examples=200, deadline=None, derandomize=True)
@given(words=st.lists(st.tuples(st.floats(0, 20), st.sampled_from((0.0, 1.0, 10.0, 100.0))), min_size=1, max_size=6))
def test_a_fading_share_never_grows_while_the_word_stands(words: list[tuple[float, float]]) -> None:
    liveness, now, last = Liveness(), 0.0, 1.0
    for after, over_s in words:
        liveness.reported(now)
        liveness.channel(True)
        now += after
        liveness.override.force(State.DRAINING, "x", now=now, over_s=over_s)
        liveness.reported(now)
        share = liveness.read(now).share
        assert 0.0 <= share <= (last + 1e-9 if over_s else 0.0)
        assert liveness.read(now + over_s).share == pytest.approx(0.0, abs=1e-9)
        last = share
    liveness.override.lift()
    assert liveness.read(now) == Health(State.UP, "reports, channel and relay agree", now + 3.0)


def test_a_new_incarnation_has_no_part_in_how_relaying_failed() -> None:
    life = Liveness(LivenessConfig(relay_streak=2))
    life.channel(True)
    life.reported(0.0)
    life.relay_failed(0.0)
    life.relay_failed(0.0)
    life.reported(1.0)
    assert life.read(1.0).state is State.SUSPECT
    life.reported(1.0, renewed=True)
    assert life.read(1.0).state is State.UP


def test_an_operators_word_keeps_requests_from_a_target_that_is_well() -> None:
    machine = HealthMachine()
    machine.probed(True, 0.0)
    assert machine.admit(1.0)
    machine.override.force(State.DOWN, "repair", until=5.0)
    assert not machine.admit(2.0)
    assert machine.admit(6.0)
