"""The machine of a run, under every order of events that chance makes."""

from __future__ import annotations

from drill_documents import made
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_drill import machine
from farhop_drill.machine import (  # fmt: skip
    Check,
    Checked,
    DrillVerdict,
    Finish,
    Inject,
    Injected,
    InjectFailed,
    Observe,
    Phase,
    Restore,
    Restored,
    RestoreFailed,
    Run,
    Started,
    StopAsked,
    Ticked,
)

BAD = {"error_share": 0.9}


def play(*steps: tuple[machine.Event, float]) -> tuple[Run, list[machine.Command]]:
    run, commands = Run(made()), []
    for event, now in steps:
        commands += run.handle(event, now)
    return run, commands


WHOLE = (
    (Started(), 0.0), (Checked(), 0.1), (Ticked(), 1.0), (Ticked(), 1.2), (Injected(0), 1.3), (Ticked(), 1.9),
    (Injected(1), 2.0), (Ticked(), 2.4), (Ticked(), 2.6), (Restored(), 2.7), (Ticked(), 3.0), (Ticked(), 3.8),
)  # fmt: skip


def test_a_run_goes_through_its_steps_with_a_soak_each_restores_and_is_judged_by_its_hypotheses() -> None:
    run, commands = play(*WHOLE)
    assert commands == [Check(), Observe(), Inject(0), Inject(1), Restore(), Finish(None, "")]
    assert (run.phase, run.verdict, run.steps_done) == (Phase.DONE, None, 2)


def test_a_drill_ends_as_soon_as_the_fleet_has_recovered() -> None:
    _, commands = play(*WHOLE[:10], (Ticked(back=True), 2.8))
    assert commands[-1] == Finish(None, "")


def test_a_blocked_drill_is_not_run_and_injects_nothing() -> None:
    run, commands = play((Started(), 0.0), (Checked(("n-1: 0.9",)), 0.1), (Ticked(), 9.0), (Injected(0), 9.0))
    assert commands == [Check(), Finish(DrillVerdict.NOT_RUN, "n-1: 0.9")]
    assert run.verdict is DrillVerdict.NOT_RUN


def test_an_abort_condition_must_hold_for_its_time_and_then_restores_in_the_same_breath() -> None:
    run, commands = play(*WHOLE[:5], (Ticked(BAD), 1.4), (Ticked({"error_share": 0.1}), 1.5), (Ticked(BAD), 1.6))
    assert commands[-1] == Inject(0)
    assert run.handle(Ticked(BAD), 2.6) == [Restore()]
    assert run.handle(Restored(), 2.7) == [Finish(DrillVerdict.ABORTED, "error_share is 0.9, above 0.5 for 1 s")]


def test_a_failed_steady_state_is_not_run_and_a_stop_is_aborted() -> None:
    broken, _ = play((Started(), 0.0), (Checked(), 0.1), (Ticked(BAD), 0.0), (Ticked(BAD), 1.0))
    found, _ = play((Started(), 0.0), (Checked(), 0.1), (StopAsked("SIGINT"), 0.5))
    assert (broken.verdict, found.verdict) == (DrillVerdict.NOT_RUN, DrillVerdict.ABORTED)


def test_a_run_that_takes_too_long_is_ended_and_restored() -> None:
    run, commands = play(*WHOLE[:4], (Ticked(), 31.0))
    assert commands[-1] == Restore()
    assert run.ended == "it took longer than 30 s"


def test_an_injection_that_cannot_be_removed_is_retried_and_the_drill_fails() -> None:
    run, _ = play(*WHOLE[:9])
    for _ in range(machine.RESTORE_TRIES - 1):
        assert run.handle(RestoreFailed("no"), 3.0) == [Restore()]
    (finish,) = run.handle(RestoreFailed("no"), 3.0)
    assert isinstance(finish, Finish)
    assert finish.verdict is DrillVerdict.FAIL


EVENTS = st.sampled_from(
    [
        Started(), Checked(), Checked(("x",)), Injected(0), Injected(1), Injected(7), InjectFailed(0, "no"),
        InjectFailed(1, "no"), Ticked(), Ticked(BAD), Ticked(back=True), StopAsked("stop"), Restored(),
        RestoreFailed("no"),
    ]
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 2.0)), max_size=60))
def test_any_order_of_events_keeps_injections_sequential_and_restored(
    events: list[tuple[machine.Event, float]],
) -> None:
    run, now, commands = Run(made()), 0.0, list[machine.Command]()
    open_injections, standing, answered = 0, False, set[int]()
    for event, later in [(Started(), 0.0), *events]:
        now += later
        if isinstance(event, Injected | InjectFailed) and open_injections:
            answered.add(event.step)
        for command in run.handle(event, now):
            commands.append(command)
            if isinstance(command, Inject):
                steps = [one.step for one in commands if isinstance(one, Inject)]
                assert steps == list(range(len(steps)))  # in order, one at a time, each once
                assert not any(isinstance(one, Restore) for one in commands)  # never after a restoration
                assert command.step == 0 or command.step - 1 in answered  # never two at once
                open_injections, standing = open_injections + 1, True
            if isinstance(command, Restore):
                standing = False
            if isinstance(command, Finish):
                assert not standing  # every injection was followed by a restoration
    finishes = [one for one in commands if isinstance(one, Finish)]
    assert len(finishes) <= 1
    assert bool(finishes) == (run.phase is Phase.DONE)
    if finishes and finishes[0].verdict is None:  # by its hypotheses: only if the whole method ran
        assert run.steps_done == 2
        assert any(isinstance(one, Restore) for one in commands)
    if run.phase is Phase.DONE:
        assert run.handle(Started(), now) == []
    elif run.phase not in (Phase.PENDING, Phase.CHECKING, Phase.RESTORING, Phase.AFTER):
        stopped = run.handle(StopAsked("now"), now)  # an abort restores in the same step
        assert stopped == ([Restore()] if open_injections else [Finish(DrillVerdict.ABORTED, "now")])
