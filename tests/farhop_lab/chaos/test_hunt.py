"""Many seeds: counted, shrunk, kept, and the same whatever the number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhop_lab.chaos import hunt, schedule, trial
from farhop_lab.chaos.properties import Finding
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.trial import Outcome


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """Trials that fail where somebody is killed or slow."""
    seen: list[Schedule] = []

    def run(one: Schedule) -> Outcome:
        seen.append(one)
        whats = {fault.what for fault in one.faults}
        found = [Finding("shares", "ash", "out")] if "slow" in whats else []
        found += [Finding("open", "elm", "hung")] if "kill" in whats else []
        return Outcome(one, tuple(sorted(found)), answers=10, cpu_s=0.5)

    monkeypatch.setattr(trial, "run", run)
    return seen


def test_failures_are_counted_by_property_and_by_fault_and_shrunk() -> None:
    progress: list[int] = []
    found = hunt.hunt(range(40), workers=1, done=progress.append)
    drawn = [schedule.drawn(seed) for seed in range(40)]
    kinds = [{fault.what for fault in one.faults} for one in drawn]
    assert found.seeds == 40
    assert found.answers == 400
    assert found.cpu_s == 20.0
    assert found.failed == len(found.failures) == sum(bool(those & {"slow", "kill"}) for those in kinds)
    assert found.by_property == {
        "shares": sum("slow" in those for those in kinds), "open": sum("kill" in those for those in kinds)
    }  # fmt: skip
    assert found.by_kind["slow"][0] == found.by_kind["slow"][1] == sum("slow" in those for those in kinds)
    assert progress[-1] == 40
    assert progress == sorted(progress)
    shapes = {tuple(fault.what for fault in one.schedule.faults) for one in found.shortest}
    assert shapes == {("slow",), ("kill",)}, "one of each kind of failure, with its one cause"
    assert [fault.for_s for one in found.shortest for fault in one.schedule.faults] == [0.5, 0.5]


def test_kept_schedule_is_replayed(tmp_path: Path) -> None:
    found = hunt.hunt(range(40), workers=1)
    paths = hunt.save(found.shortest, tmp_path / "seeds")
    assert len(paths) == 2
    for path in paths:
        again = hunt.replayed(schedule.decode(path.read_text()))
        assert again.failed == 1
        assert again.shortest == ()
        assert again.failures[0].schedule.about in ("ash: out", "elm: hung")


def test_no_failures_no_shrinking(played: list[Schedule]) -> None:
    calm = next(seed for seed in range(99) if not {"slow", "kill"} & {f.what for f in schedule.drawn(seed).faults})
    found = hunt.hunt([calm])
    assert (found.failed, found.by_property, found.shortest) == (0, {}, ())
    assert len(played) == 1
