"""Health by playbook, and by property: evidence before UP, the operator's word first, reading changes nothing."""

import copy
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.health.reading import ForcedState, Health, State
from farhop.balance.health.replica import OTHERS_S, HealthConfig, HealthMachine, Mode, may_eject, panic

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


def state(machine: HealthMachine, now: float) -> State:
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
        machine.forced.force(State.DRAINING, "operator", now + 10.0)
    elif event == "lift":
        machine.forced.lift()
    else:
        getattr(machine, event)(now)


def fields(thing: object) -> dict[str, object]:
    kept = {name: copy.deepcopy(getattr(thing, name)) for name in type(thing).__slots__ if name != "forced"}
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
            # Whatever happened, no back-off lasts longer than four times the base, and no trial longer than its time.
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
    machine.forced.lift()
    health = machine.read(now)
    admitted = [machine.admit(now) for _ in range(3)]
    if health.why == "one trial after ejection":
        assert admitted == [True, False, False]
    else:
        assert admitted == [health.state in (State.UP, State.SUSPECT)] * 3


def test_a_target_is_down_at_first_and_up_after_one_success() -> None:
    machine = HealthMachine(CONFIG)
    assert machine.read(0.0) == Health(State.DOWN, "not heard of yet")
    assert not machine.admit(0.0)
    assert state(proven(), 0.0) is State.UP
    replaced = HealthMachine(CONFIG)
    replaced.succeeded(0.0)  # what was sent to the process before it
    assert state(replaced, 0.0) is State.DOWN


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


def test_a_probe_that_fails_in_between_restarts_the_rise() -> None:
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
    machine.succeeded(1.5)  # requests that were under way may end well
    assert machine.read(1.5).state is State.DOWN
    machine.probed(True, 2.0)
    assert machine.read(2.0).state is State.DOWN
    machine.probed(True, 3.0)
    assert machine.read(3.0).state is State.UP


def test_a_replica_without_recent_evidence_is_suspect() -> None:
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
        machine.failed(now + 1.0)  # requests in flight at the ejection do not prolong it
        machine.probed(True, now + 1.0)  # and a probe does not see the errors that requests see
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
    machine.succeeded(now + 2.0 + 240.0)  # healthy for twice the longest back-off: the ejections are forgotten
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
    assert machine.read(31.0).until == 32.0  # back for twice the longest back-off: the ejections are forgotten


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


def test_a_forced_state_wins_over_death_and_expires() -> None:
    machine = HealthMachine(CONFIG)
    machine.forced.force(State.UP, "pinned by ann", until=60.0)
    assert machine.read(59.0) == Health(State.UP, "pinned by ann", 60.0, forced=True)
    assert machine.admit(59.0)
    assert machine.read(60.0).state is State.DOWN
    machine.forced.force(State.DRAINING, "for ever")
    assert state(machine, 1e9) is State.DRAINING
    assert not machine.admit(1e9)


def test_lifting_an_override_that_is_not_set_changes_nothing() -> None:
    override = ForcedState()
    override.lift()
    assert override.read(0.0) is None


def test_no_replica_and_no_healthy_replica_are_modes_of_their_own() -> None:
    assert [panic(0, 0), panic(0, 3), panic(1, 3)] == [Mode.EMPTY, Mode.ALL_DOWN, Mode.NORMAL]


@pytest.mark.parametrize("bad", [{"rise": 0}, {"streak": -1}, {"eject_s": 0.0}, {"fresh_s": float("nan")}])
def test_thresholds_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HealthConfig(**bad)  # type: ignore[arg-type]


# --- a region -------------------------------------------------------------------------------------------------------


def test_a_forced_state_keeps_requests_from_a_target_that_is_well() -> None:
    machine = HealthMachine()
    machine.probed(True, 0.0)
    assert machine.admit(1.0)
    machine.forced.force(State.DOWN, "repair", until=5.0)
    assert not machine.admit(2.0)
    assert machine.admit(6.0)


# -- beyond streaks: readiness, ejection at once, panic, strain, and the share that comes with them

EASED = HealthConfig(rise=2, fall=3, streak=3, eject_s=30.0, refused_s=1.0, fresh_s=1e6, slow_start_s=10.0)


def warm() -> HealthMachine:
    machine = HealthMachine(EASED, warm=True)
    machine.probed(True, 0.0)
    return machine


def test_alive_and_not_ready_takes_no_work_and_is_no_failure() -> None:
    machine = warm()
    for second in range(1, 100):
        machine.probed(True, float(second), ready=False)
        assert machine.read(float(second)) == Health(State.DOWN, "alive, not ready")
        assert not machine.steady
    machine.probed(True, 100.0)
    assert machine.read(100.0).state is State.UP  # its own report is enough


def test_replica_that_finished_loading_comes_up_after_one_probe_with_a_ramp() -> None:
    machine = HealthMachine(EASED, warm=True)
    machine.probed(False, 0.0)
    machine.probed(True, 1.0, ready=False)
    machine.probed(True, 60.0)
    assert (machine.read(60.0).state, machine.share(60.0)) == (State.UP, 0.1)


def test_a_replica_that_was_not_ready_and_then_is_silent_is_down() -> None:
    machine = warm()
    machine.probed(True, 1.0, ready=False)
    machine.probed(False, 2.0)
    assert machine.read(2.0) == Health(State.DOWN, "probes fail")


def test_a_replica_that_refused_a_connection_comes_back_cold_and_one_with_failed_probes_does_not() -> None:
    gone, silent = warm(), warm()
    gone.refused(50.0)
    gone.probed(True, 52.0)
    assert (gone.read(52.0).state, gone.share(52.0)) == (State.UP, 0.1)
    for _ in range(3):
        silent.probed(False, 50.0)
    for at in (51.0, 52.0):
        silent.probed(True, at)
    assert (silent.read(52.0).state, silent.share(52.0)) == (State.UP, pytest.approx(0.8))


def test_an_ejection_at_once_grows_to_four_times_until_it_has_been_back_for_long() -> None:
    machine, now = warm(), 0.0
    for out_s in (30.0, 60.0, 120.0, 120.0):
        machine.eject("slower than its peers", now)
        machine.eject("again", now + 1.0)  # is not another process
        assert machine.read(now) == Health(State.DOWN, "slower than its peers", now + out_s)
        now += out_s
        assert machine.admit(now)
        machine.succeeded(now)  # its answers are good, only slow
        assert machine.read(now).state is State.UP
    now += 240.0
    machine.eject("slower than its peers", now)
    assert machine.read(now).until == now + 30.0
    assert machine.ejections == 5


def test_refused_connections_make_no_ejection_longer() -> None:
    """A restart refuses a few: each is out for longer, and what requests meet later is counted on its own."""
    machine = warm()
    for at in (1.0, 1.5, 2.0):
        machine.refused(at)
        machine.probed(True, at + 0.4)
    machine.eject("slower than its peers", 5.0)
    assert machine.read(5.0).until == 35.0
    machine.refused(36.0)  # its trial could not connect
    assert machine.read(36.0) == Health(State.DOWN, "connection refused", 37.0)
    machine.probed(True, 36.5)
    assert machine.read(36.5).state is State.UP
    assert machine.ejections == 1


def test_a_replica_readmitted_in_panic_is_out_no_longer_than_four_times_the_base() -> None:
    machine, now = warm(), 0.0
    for out_s in (30.0, 60.0, 120.0, 120.0, 120.0):
        machine.eject("slower than its peers", now)
        assert machine.read(now).until == now + out_s
        assert machine.admit(now + 1.0, panic=True)
        machine.succeeded(now + 2.0, sent_at=now + 1.0)
        assert machine.read(now + 2.0).state is State.UP
        now += 3.0


def test_failures_of_requests_sent_before_a_recovery_do_not_count() -> None:
    machine = warm()
    for at in (1.0, 2.0, 3.0):
        machine.probed(False, at)
    for _ in range(9):
        machine.failed(3.0)  # given up because probes fail: that is known already
    for at in (12.0, 13.0):
        machine.probed(True, at)
    assert machine.read(13.0).state is State.UP
    for sent_at in (0.5, 2.0, 12.9):
        machine.failed(14.0, sent_at=sent_at)
    assert machine.read(14.0).state is State.UP
    for _ in range(3):
        machine.failed(14.5, sent_at=13.0)
    assert machine.read(14.5).why == "requests failed in a row"
    machine.failed(50.0, sent_at=14.0)  # no trial of its own
    assert machine.read(50.0).why == "one trial after ejection"
    assert machine.admit(50.0)
    machine.succeeded(51.0, sent_at=14.0)
    assert machine.read(51.0).why == "a trial is under way"
    machine.succeeded(52.0, sent_at=50.0)
    assert machine.read(52.0).state is State.UP


@pytest.mark.parametrize(
    "spoil",
    [
        lambda machine: [machine.probed(False, 1.0) for _ in range(3)],
        lambda machine: machine.probed(True, 1.0, "GPU 0: XID 79"),
        lambda machine: machine.probed(True, 1.0, ready=False),
        lambda machine: machine.forced.force(State.DOWN, "operator"),
    ],
)
def test_panic_overlooks_no_probe_no_fault_and_no_operator(spoil: Callable[[HealthMachine], object]) -> None:
    machine = warm()
    machine.eject("out of memory", 1.0)
    spoil(machine)
    assert not machine.held_out(1.0)
    assert not machine.admit(1.0, panic=True)


def test_panic_ignores_failed_requests_but_not_refused_connections() -> None:
    refused = warm()
    refused.refused(1.0)
    assert not refused.held_out(1.0)
    assert not refused.admit(1.0, panic=True)
    ejected = warm()
    for _ in range(3):
        ejected.failed(1.0)
    assert ejected.held_out(1.0)
    assert ejected.admit(1.0, panic=True)
    assert ejected.admit(1.0, panic=True)
    assert not ejected.admit(1.0)
    ejected.succeeded(2.0)  # of a request that panic mode let through: it counts as a trial
    assert ejected.read(2.0).state is State.UP


def test_a_strained_replica_is_suspect_and_gets_half_of_its_slots() -> None:
    machine = warm()
    machine.probed(True, 1.0, strain="GPU 0: 97 °C, above 95")
    assert machine.read(1.0) == Health(State.SUSPECT, "GPU 0: 97 °C, above 95", 1.0 + 1e6)
    assert machine.share(1.0) == 0.5
    machine.probed(True, 2.0)
    assert machine.share(2.0) == 1.0


def test_panic_begins_below_the_configured_share_of_healthy_replicas() -> None:
    found = [panic(ready, 4, 0.5) for ready in range(5)]
    assert found == [Mode.ALL_DOWN, Mode.PANIC, Mode.NORMAL, Mode.NORMAL, Mode.NORMAL]
    assert panic(1, 100, 0.0) is Mode.NORMAL


@pytest.mark.parametrize("bad", [{"eject_share_max": 1.1}, {"panic_share": -0.1}, {"slow_start_s": -1.0},
                                 {"outlier_factor": 1.0}, {"outlier_factor": float("nan")}])  # fmt: skip
def test_shares_and_factors_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HealthConfig(**bad)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "bad", "unready", "failed", "eject", "refused", "admit", "succeeded", "panic"]),
            st.sampled_from([0.0, 1.0, 31.0, 301.0]),
        ),
        max_size=40,
    )
)
@RUN
def test_a_healthy_target_always_comes_back(events: list[tuple[str, float]]) -> None:
    """Whatever it went through: probes that succeed, the longest back-off, and one trial that is answered."""
    machine, now = HealthMachine(EASED), 0.0
    for event, dt_s in events:
        now += dt_s
        if event in ("ok", "bad", "unready"):
            machine.probed(event != "bad", now, ready=event != "unready")
        elif event == "eject":
            machine.eject("x", now)
        elif event in ("admit", "panic"):
            machine.admit(now, panic=event == "panic")
        else:
            getattr(machine, event)(now)
    for _ in range(2):
        machine.probed(True, now)
    now += 300.0 + 30.0
    assert machine.admit(now)
    machine.succeeded(now)
    assert machine.read(now).state is State.UP
    assert machine.share(now + 10.0) == 1.0


# -- whose requests fail


def test_one_tenant_s_failures_do_not_eject_while_others_are_answered_well() -> None:
    machine = proven()
    machine.succeeded(1.0, tenant="hospital")
    for n in range(50):
        machine.failed(1.0 + n / 10, tenant="attacker")
    assert state(machine, 6.0) is State.SUSPECT
    machine.failed(6.0, tenant="hospital")  # theirs fail, too: it is the engine
    assert state(machine, 6.0) is State.DOWN


def test_one_tenant_s_failures_eject_once_no_other_was_answered_well_for_a_while() -> None:
    machine = proven()
    machine.succeeded(1.0, tenant="hospital")
    machine.succeeded(2.0, tenant="lone")
    for _ in range(9):
        machine.failed(10.9, tenant="lone")
    assert state(machine, 10.9) is State.SUSPECT
    machine.failed(11.0, tenant="lone")
    assert state(machine, 11.0) is State.DOWN


@RUN
@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.sampled_from([0.0, 1.0, 6.0, 11.0])), max_size=30))
def test_a_streak_ejects_by_whose_requests_it_is_made_of(results: list[tuple[str, bool, float]]) -> None:
    """The model: the results since the last good one, and when others than their only tenant were last answered."""
    machine, now = proven(), 0.0
    good_at: dict[str, float] = {}
    streak: list[str] = []
    for tenant, ok, passed_s in results:
        now += passed_s
        if ok:
            machine.succeeded(now, tenant=tenant)
            good_at[tenant], streak = now, []
            continue
        machine.failed(now, tenant=tenant)
        streak.append(tenant)
        others = [at for one, at in good_at.items() if len(set(streak)) == 1 and one != tenant and now - at < OTHERS_S]
        if len(streak) >= CONFIG.streak and not others:
            assert state(machine, now) is State.DOWN
            return
        assert state(machine, now) is not State.DOWN
