"""Shrinking ends with the shortest schedule that still fails, the same one every time, within its bound."""

from __future__ import annotations

from farhop_lab.chaos import schedule
from farhop_lab.chaos.schedule import WARM_S, Schedule
from farhop_lab.chaos.shrink import TRIALS_MAX, shrunk
from farhop_lab.sim.faults import Fault

BIG = Schedule(
    7,
    regions=3,
    replicas=2,
    faults=(
        Fault(9.0, 7.3, "drain", "ash"),
        Fault(12.5, 9.1, "slow", "elm", "gpu-1", factor=11.0),
        Fault(14.0, 3.3, "freeze", "elm", to="ash"),
        Fault(20.0, 8.0, "kill", "ash"),
    ),
)


def test_one_cause_is_all_that_is_left_as_short_as_it_still_fails() -> None:
    tried: list[Schedule] = []

    def fails(one: Schedule) -> bool:
        tried.append(one)
        return any(f.what == "slow" and f.for_s >= 2.0 and f.factor >= 3.0 for f in one.faults)

    short = shrunk(BIG, fails)
    assert short == Schedule(7, 2, 2, (Fault(WARM_S, 2.0, "slow", "elm", "gpu-1", factor=4.0),))
    assert len(tried) <= TRIALS_MAX
    assert len(set(map(schedule.encode, tried))) == len(tried)
    assert shrunk(BIG, fails) == short


def test_shrinking_keeps_the_distance_of_two_faults_that_fail_together() -> None:
    def fails(one: Schedule) -> bool:
        whats = {fault.what: fault for fault in one.faults}
        return {"slow", "kill"} <= whats.keys() and whats["kill"].at_s - whats["slow"].at_s == 7.5

    short = shrunk(BIG, fails)
    assert [(f.what, f.at_s, f.for_s) for f in short.faults] == [("slow", 8.0, 0.5), ("kill", 15.5, 0.5)]


def test_a_schedule_with_no_smaller_failing_form_stays_and_the_bound_holds() -> None:
    assert shrunk(BIG, lambda _: False) == BIG
    tried: list[Schedule] = []
    shrunk(BIG, lambda one: bool(tried.append(one)), trials_max=5)
    assert len(tried) <= 5
