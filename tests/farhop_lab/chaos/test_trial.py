"""Trials: the same schedule gives the same findings; what once failed does not fail again; a bounded share of seeds.

Every file of tests/seeds/chaos once failed, and what made it fail is mended. `farhop bench chaos` plays many more.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farhop_lab.chaos import schedule, trial
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.sim.faults import KINDS, Fault
from tests.conftest import further

KEPT = sorted((Path(__file__).parents[2] / "seeds" / "chaos").glob("*.yaml"))
SEEDS = (35, 50, 731)  # of the first 3,000 with two regions of two replicas, the three with the most kinds of faults


def test_every_kind_of_fault_is_played() -> None:
    played = [*map(schedule.drawn, SEEDS), *(schedule.decode(path.read_text(), path.name) for path in KEPT)]
    assert {fault.what for one in played for fault in one.faults} == set(KINDS)


def findings(one: Schedule) -> list[str]:
    return [f"{f.property}: {f.subject}: {f.what}" for f in trial.run(one).findings]


@pytest.mark.parametrize("path", further(KEPT, *KEPT[:3]), ids=lambda path: path.stem)
def test_schedules_that_once_failed_pass(path: Path) -> None:
    assert findings(schedule.decode(path.read_text(), path.name)) == []


@pytest.mark.parametrize("seed", further(SEEDS, 731))
def test_after_random_faults_all_is_as_before(seed: int) -> None:
    assert findings(schedule.drawn(seed)) == []


def test_a_trial_without_faults_has_no_findings_and_is_reproducible() -> None:
    quiet = Schedule(4, regions=2, replicas=1)
    first, again = trial.run(quiet), trial.run(quiet)
    assert first.findings == ()
    assert first.failures == ()
    assert not first.failed
    assert msgspec.structs.replace(first, cpu_s=0.0) == msgspec.structs.replace(again, cpu_s=0.0)


def test_a_fault_that_is_not_mended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.FaultInjector, "_mend", lambda *_: None)
    outcome = trial.run(Schedule(1, faults=(Fault(9.0, 1.0, "dead-green", "ash", "gpu-0"),)))
    # Requests that it swallows move on by themselves (regional_lb.scheduler.overdue): none stays open because of it.
    assert {"shares", "standing"} <= set(outcome.failures)
    assert outcome.failures[0] == "shares"


def test_a_machine_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(trial.FaultInjector, "_break", raises)
    (only,) = trial.run(Schedule(1, faults=(Fault(9.0, 1.0, "kill", "ash"),))).findings
    assert (only.property, only.what) == ("sound", "9.000 s: RuntimeError: no")
