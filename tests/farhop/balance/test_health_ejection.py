"""Health beyond streaks: readiness, ejection at once, panic, strain, and the share that comes with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.health import Health, HealthConfig, HealthMachine, Mode, State, panic

RUN = settings(max_examples=250, deadline=None, derandomize=True)
CONFIG = HealthConfig(rise=2, fall=3, streak=3, eject_s=30.0, refused_s=1.0, fresh_s=1e6, slow_start_s=10.0)


def proven() -> HealthMachine:
    machine = HealthMachine(CONFIG, warm=True)
    machine.probed(True, 0.0)
    return machine


def test_alive_and_not_ready_takes_no_work_and_is_no_failure() -> None:
    machine = proven()
    for second in range(1, 100):
        machine.probed(True, float(second), ready=False)
        assert machine.read(float(second)) == Health(State.DOWN, "alive, not ready")
        assert not machine.steady
    machine.probed(True, 100.0)
    assert machine.read(100.0).state is State.UP  # its own word is enough


def test_a_model_that_loads_and_then_serves_comes_up_by_one_word_and_is_eased_in() -> None:
    machine = HealthMachine(CONFIG, warm=True)
    machine.probed(False, 0.0)
    machine.probed(True, 1.0, ready=False)
    machine.probed(True, 60.0)
    assert (machine.read(60.0).state, machine.share(60.0)) == (State.UP, 0.1)


def test_who_was_not_ready_and_then_is_silent_is_down() -> None:
    machine = proven()
    machine.probed(True, 1.0, ready=False)
    machine.probed(False, 2.0)
    assert machine.read(2.0) == Health(State.DOWN, "probes fail")


def test_who_refused_a_connection_comes_back_cold_and_whose_probes_failed_for_a_moment_does_not() -> None:
    gone, silent = proven(), proven()
    gone.refused(50.0)
    gone.probed(True, 52.0)
    assert (gone.read(52.0).state, gone.share(52.0)) == (State.UP, 0.1)
    for _ in range(3):
        silent.probed(False, 50.0)
    for at in (51.0, 52.0):
        silent.probed(True, at)
    assert (silent.read(52.0).state, silent.share(52.0)) == (State.UP, pytest.approx(0.8))


def test_an_ejection_at_once_grows_to_four_times_until_it_has_been_back_for_long() -> None:
    machine, now = proven(), 0.0
    for out_s in (30.0, 60.0, 120.0, 120.0):
        machine.eject("slower than its peers", now)
        machine.eject("again", now + 1.0)  # is no other
        assert machine.read(now) == Health(State.DOWN, "slower than its peers", now + out_s)
        now += out_s
        assert machine.admit(now)
        machine.succeeded(now)  # it answers well, and is only slow
        assert machine.read(now).state is State.UP
    now += 240.0
    machine.eject("slower than its peers", now)
    assert machine.read(now).until == now + 30.0
    assert machine.ejections == 5


def test_refused_connections_make_no_ejection_longer() -> None:
    """A restart refuses a few: each is out for longer, and what requests meet later is counted on its own."""
    machine = proven()
    for at in (1.0, 1.5, 2.0):
        machine.refused(at)
        machine.probed(True, at + 0.4)
    machine.eject("slower than its peers", 5.0)
    assert machine.read(5.0).until == 35.0
    machine.refused(36.0)  # its trial found nobody at home
    assert machine.read(36.0) == Health(State.DOWN, "connection refused", 37.0)
    machine.probed(True, 36.5)
    assert machine.read(36.5).state is State.UP
    assert machine.ejections == 1


def test_a_replica_readmitted_in_panic_is_out_no_longer_than_four_times_the_base() -> None:
    machine, now = proven(), 0.0
    for out_s in (30.0, 60.0, 120.0, 120.0, 120.0):
        machine.eject("slower than its peers", now)
        assert machine.read(now).until == now + out_s
        assert machine.admit(now + 1.0, panic=True)
        machine.succeeded(now + 2.0, sent_at=now + 1.0)
        assert machine.read(now + 2.0).state is State.UP
        now += 3.0


def test_what_was_sent_before_it_came_back_says_nothing_of_now() -> None:
    machine = proven()
    for at in (1.0, 2.0, 3.0):
        machine.probed(False, at)
    for _ in range(9):
        machine.failed(3.0)  # given up since probes fail: that is known already
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
        lambda machine: machine.override.force(State.DOWN, "operator"),
    ],
)
def test_panic_overlooks_no_probe_no_fault_and_no_operator(spoil: Callable[[HealthMachine], object]) -> None:
    machine = proven()
    machine.eject("out of memory", 1.0)
    spoil(machine)
    assert not machine.held_out(1.0)
    assert not machine.admit(1.0, panic=True)


def test_panic_overlooks_what_requests_met_but_not_that_nobody_is_at_home() -> None:
    refused = proven()
    refused.refused(1.0)
    assert not refused.held_out(1.0)
    assert not refused.admit(1.0, panic=True)
    ejected = proven()
    for _ in range(3):
        ejected.failed(1.0)
    assert ejected.held_out(1.0)
    assert ejected.admit(1.0, panic=True)
    assert ejected.admit(1.0, panic=True)
    assert not ejected.admit(1.0)
    ejected.succeeded(2.0)  # of a request that panic let through: as good as a trial
    assert ejected.read(2.0).state is State.UP


def test_what_is_strained_is_suspect_and_gets_half() -> None:
    machine = proven()
    machine.probed(True, 1.0, strain="GPU 0: 97 °C, above 95")
    assert machine.read(1.0) == Health(State.SUSPECT, "GPU 0: 97 °C, above 95", 1.0 + 1e6)
    assert machine.share(1.0) == 0.5
    machine.probed(True, 2.0)
    assert machine.share(2.0) == 1.0


def test_panic_has_a_name_and_a_share() -> None:
    told = [panic(ready, 4, 0.5) for ready in range(5)]
    assert told == [Mode.ALL_DOWN, Mode.PANIC, Mode.NORMAL, Mode.NORMAL, Mode.NORMAL]
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
    machine, now = HealthMachine(CONFIG), 0.0
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
