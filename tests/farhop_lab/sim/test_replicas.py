"""A replica's process breaks as a live one does, and comes back as it was or empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from farhop_lab.engine.core.faults import OOM_TEXT, Fault
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import TextModel
from farhop_lab.sim.engines import Gpu, Station
from farhop_lab.sim.replicas import ReplicaFaultError, ReplicaProcess
from farhop_lab.sim.timeline import Timeline

if TYPE_CHECKING:
    from farhop.balance.machine import Usage

A100 = PROFILES["a100"]
# 100 tokens of prompt in one pass of 13.2 ms, then 19 passes with one decode and its KV.
STEP_S = A100.step_ms(0, 1, 110) / 1e3
FIRST_S, WHOLE_S = 0.0132, 0.0132 + 19 * STEP_S


class RefusableJob:
    def __init__(self, timeline: Timeline, name: str = "g") -> None:
        self.timeline, self.id = timeline, name
        self.prompt, self.max_tokens, self.answer_tokens = name.encode().ljust(400, b"x"), 20, 20
        self.events: list[tuple[str, float]] = []

    def _note(self, what: str) -> None:
        self.events.append((what, round(self.timeline.now, 3)))

    def first(self) -> None:
        self._note("first")

    def done(self, _usage: Usage) -> None:
        self._note("done")

    def broke(self, text: str) -> None:
        self._note(f"broke {text[:18]}")

    def refused(self, status: int, text: str = "") -> None:
        self._note(f"refused {status} {text[:18]}")


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def process(timeline: Timeline) -> ReplicaProcess:
    return ReplicaProcess(timeline, lambda at: Gpu(at, A100, TextModel("m", 1)))


def jobs(timeline: Timeline, process: ReplicaProcess, count: int = 1) -> list[RefusableJob]:
    made = [RefusableJob(timeline, f"g{n}") for n in range(count)]
    for job in made:
        process.take(job)
    return made


def test_a_replica_without_faults_serves(timeline: Timeline, process: ReplicaProcess) -> None:
    (job,) = jobs(timeline, process)
    timeline.run(2.0)
    assert [what for what, _ in job.events] == ["first", "done"]
    assert job.events[1][1] == pytest.approx(WHOLE_S, abs=2e-3)
    assert (process.listens, process.answers, process.healthy, process.xid, process.quiet_since) == (
        True,
        True,
        True,
        0,
        None,
    )


@pytest.mark.parametrize("at", [0.0, 0.01, 0.2])
def test_a_pause_takes_its_time_and_loses_nothing(timeline: Timeline, process: ReplicaProcess, at: float) -> None:
    (job,) = jobs(timeline, process)
    timeline.at(at, process.pause)
    late = RefusableJob(timeline, "late")
    timeline.at(1.0, process.take, late)
    timeline.run(5.0)
    assert process.listens
    assert not process.answers
    assert process.quiet_since == at
    assert "done" not in [what for what, _ in job.events]
    assert late.events == []
    process.resume()
    timeline.run(10.0)
    assert job.events[-1][0] == "done"
    assert 5.0 <= job.events[-1][1] < 5.0 + WHOLE_S + 0.1
    assert [what for what, _ in late.events] == ["first", "done"]
    assert process.quiet_since is None


def test_a_client_that_leaves_a_paused_replica_is_forgotten_once_it_resumes(
    timeline: Timeline, process: ReplicaProcess
) -> None:
    (here,) = jobs(timeline, process)
    timeline.run(0.1)
    process.pause()
    late = RefusableJob(timeline, "late")
    process.take(late)
    process.abort("late")
    process.abort(here.id)
    assert process.engine.metrics()[1] == 1, "it does nothing yet"
    process.resume()
    timeline.run(3.0)
    assert late.events == []
    assert [what for what, _ in here.events] == ["first"]
    assert process.engine.metrics() == (0, 0, 0.0)


def test_stopped_replica_fails_its_requests_and_returns_empty(timeline: Timeline, process: ReplicaProcess) -> None:
    first, second = jobs(timeline, process, 2)
    timeline.run(0.1)
    before = process.engine
    process.stop()
    process.stop()
    assert [one.events[-1][0] for one in (first, second)] == ["broke ", "broke "]
    assert not process.listens
    assert not process.answers
    process.start()
    assert process.listens
    assert process.engine is not before
    (again,) = jobs(timeline, process)
    timeline.run(2.0)
    assert again.events[-1][0] == "done"
    assert len(first.events) == 2


def test_refusing_replica_continues_its_requests(timeline: Timeline, process: ReplicaProcess) -> None:
    (job,) = jobs(timeline, process)
    process.refuse(refusing=True)
    assert not process.listens
    assert not process.answers
    timeline.run(2.0)
    assert job.events[-1][0] == "done"
    process.refuse(refusing=False)
    assert process.answers


def test_slow_takes_so_many_times_as_long(timeline: Timeline, process: ReplicaProcess) -> None:
    process.command(Fault("slow", factor=5.0))
    (job,) = jobs(timeline, process)
    timeline.run(9.0)
    assert job.events == [("first", 5 * FIRST_S), ("done", pytest.approx(5 * WHOLE_S, abs=0.01))]


def test_slow_in_the_middle_of_a_leap_begins_with_the_next_step(timeline: Timeline, process: ReplicaProcess) -> None:
    (job,) = jobs(timeline, process)
    timeline.at(0.1, process.command, Fault("slow", factor=10.0))
    timeline.at(1.1, process.command, None)
    timeline.run(9.0)
    (_, ended) = job.events[-1]
    # A second of 10 times slower steps, to the end of the last: eight of the 19, in place of a tenth of the second.
    assert ended == pytest.approx(WHOLE_S + 8 * 9 * STEP_S, abs=0.03)


@pytest.mark.parametrize(("kind", "healthy"), [("stuck", False), ("dead-green", True)])
def test_stuck_replica_produces_nothing_until_repaired(
    timeline: Timeline, process: ReplicaProcess, kind: str, healthy: bool
) -> None:
    (job,) = jobs(timeline, process)
    timeline.at(0.2, process.command, Fault(kind))  # type: ignore[arg-type]
    timeline.run(4.0)
    assert [what for what, _ in job.events] == ["first"]
    assert process.answers
    assert process.healthy is healthy
    assert process.quiet_since == 0.2
    process.command(None)
    timeline.run(6.0)
    assert job.events[-1][0] == "done"
    assert process.quiet_since is None


def test_out_of_memory_breaks_streams_and_refuses_with_torchs_message(
    timeline: Timeline, process: ReplicaProcess
) -> None:
    (job,) = jobs(timeline, process)
    timeline.run(0.1)
    process.command(Fault("oom"))
    (other,) = jobs(timeline, process)
    assert job.events[-1][0] == f"broke {OOM_TEXT[:18]}"
    assert other.events[0][0] == f"refused 500 {OOM_TEXT[:18]}"
    assert process.healthy
    assert process.engine.metrics() == (0, 0, 0.0)
    process.command(None)
    (last,) = jobs(timeline, process)
    timeline.run(3.0)
    assert last.events[-1][0] == "done"


def test_an_xid_is_reported_and_nothing_else_changes(timeline: Timeline, process: ReplicaProcess) -> None:
    process.command(Fault("xid", xid=79))
    (job,) = jobs(timeline, process)
    timeline.run(2.0)
    assert process.xid == 79
    assert job.events[-1][0] == "done"


def test_faults_on_a_station_are_refused(timeline: Timeline) -> None:
    process = ReplicaProcess(timeline, lambda at: Station(at, 1, 1.0, 0.1, 5))
    for breaks in (process.pause, process.stop, lambda: process.command(Fault("slow"))):
        with pytest.raises(ReplicaFaultError, match="GPUs"):
            breaks()
    full = [RefusableJob(timeline, f"s{n}") for n in range(3)]
    for job in full:
        process.take(job)
    timeline.run(9.0)
    assert all(job.events[-1][0] == "done" for job in full)
