"""The recorder: each call of a driver is one entry; calls that a machine makes on itself are not entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from farhop.balance import machine
from farhop_lab.histories import names, recorder
from topology.law import Law
from topology.model import Topology


class Nested:
    def handle(self, event: Any, now: float) -> list[Any]:
        return [machine.Cancel("r", 1), *(self.handle(machine.ClientLeft("r"), now) if event is None else [])]


def a_recorder(**more: Any) -> recorder.HistoryRecorder:
    return recorder.HistoryRecorder("t", names.of_region("r", Law(Topology("t", 1, {})), "s"), **more)


def test_event_raised_by_the_machine_itself_is_recorded_once() -> None:
    one = a_recorder()
    flow = one.watch(Nested())
    assert len(flow.handle(None, 1.0)) == 2
    assert one.count == 1


def test_a_full_tape_takes_no_more() -> None:
    one = a_recorder(calls_max=2)
    flow = one.watch(Nested())
    for _ in range(5):
        flow.handle(machine.ClientLeft("r"), 1.0)
    assert one.count == 2


def test_work_done_in_turns_is_recorded_turn_by_turn() -> None:
    def work() -> Iterator[None]:
        yield
        yield

    one = a_recorder()
    assert len(list(one.work(names.TIDY, 0.0, None, work()))) == 2
    assert one.count == 4
