from __future__ import annotations

from collections.abc import Sequence

from farhop.balance import machine, outcome
from farhop.balance.machine import Answer, Command, Forward, Hold, Request, SetTimer, Tokens, Usage
from farhop_lab.sim.baselines import router as routers
from farhop_lab.sim.baselines.router import Router
from farhop_lab.sim.baselines.tastes import LeastLoad
from farhop_lab.sim.baselines.words import BalancerSeen, Board, EnginesSeen, Sample, Target, WireMeasured


class Free:
    """A scope: engines where nothing waited."""

    def candidates(self, request: Request, board: Board, now: float) -> Sequence[str]:
        return [name for name in board.serving(board.engines) if board.pending(name) == 0]


def make(pace_s: float = 0.0, smoothing: float = 1.0) -> Router:
    board = Board("us", [Target("us/0", "us"), Target("us/1", "us"), Target("eu", "eu", balancer=True)], {"eu": 90.0})
    return Router(board, Free(), LeastLoad(), pace_s=pace_s, smoothing=smoothing)


def ask(name: str, deadline: float = 100.0) -> Request:
    return Request(name, "t", "m", 400, 600, (), deadline, tokens=Tokens(b"x" * 400))


def arrive(made: Router, name: str, now: float = 0.0, deadline: float = 100.0) -> list[str]:
    return words(made.handle(machine.RequestArrived(ask(name, deadline)), now))


def words(commands: list[Command]) -> list[str]:
    said = []
    for command in commands:
        if isinstance(command, Forward):
            said.append(f"{command.id} > {command.target} #{command.attempt}")
        elif isinstance(command, Answer):
            said.append(f"{command.id} {command.outcome.reason}")
        elif isinstance(command, SetTimer):
            said.append(f"{command.id} at {command.at:g}")
        else:
            assert isinstance(command, Hold)
            said.append(f"{command.id} holds")
    return said


def waits(made: Router, first: int, second: int, now: float = 0.0) -> list[str]:
    samples = {"us/0": Sample(first, 1, 0.1), "us/1": Sample(second, 1, 0.1)}
    return words(made.handle(EnginesSeen("us", samples), now))


def test_who_may_go_goes_at_once_to_the_taste_s_choice() -> None:
    made = make()
    assert arrive(made, "a") == ["a at 100", "a at 100", "a > us/0 #1"]
    assert arrive(made, "b") == ["b at 100", "b at 100", "b > us/1 #1"]
    assert made.handle(machine.AttemptBegan("a", 1, 200), 1.0) == []
    assert made.board.running_tokens["us/0"] == 100
    assert made.handle(machine.AttemptEnded("a", 1, 200, Usage(100, 5)), 2.0) == []
    assert made.board.in_flight == {"us/0": 0, "us/1": 1, "eu": 0}


def test_the_head_holds_up_the_line_and_a_probe_lets_it_go() -> None:
    made = make()
    assert waits(made, 1, 1) == []
    assert arrive(made, "a") == ["a at 100", "a holds"]
    assert arrive(made, "b") == ["b at 100", "b holds"]
    assert made.board.line == 2
    assert waits(made, 1, 0, 3.0) == ["a at 100", "a > us/1 #1", "b at 100", "b > us/1 #1"]
    assert made.board.line == 0


def test_a_pace_passes_between_two_that_leave_the_line() -> None:
    made = make(pace_s=0.01)
    assert arrive(made, "a", 5.0)[-1] == "a > us/0 #1"
    assert arrive(made, "b", 5.004) == ["b at 100", "b at 5.01", "b holds"]
    assert arrive(made, "c", 5.005) == ["c at 100", "b at 5.01", "c holds"]
    fired = words(made.handle(machine.TimerFired("b"), 5.0101))
    assert fired == ["b at 100", "b at 100", "b > us/1 #1", "c at 5.0201"]


def test_an_early_timer_of_the_head_does_not_take_its_deadline() -> None:
    made = make(pace_s=0.01)
    arrive(made, "a", 5.0)
    arrive(made, "b", 5.0)
    waits(made, 1, 1, 5.005)
    assert words(made.handle(machine.TimerFired("b"), 5.02)) == ["b at 100"]
    assert words(made.handle(machine.TimerFired("b"), 100.1)) == ["b queue_timeout"]


def test_a_deadline_ends_what_has_not_begun_and_nothing_else() -> None:
    made = make()
    arrive(made, "a", deadline=10.0)
    arrive(made, "b", deadline=10.0)
    made.handle(machine.AttemptBegan("b", 1, 200), 9.0)
    assert words(made.handle(machine.TimerFired("a"), 10.0)) == ["a deadline_exceeded"]
    assert made.handle(machine.TimerFired("b"), 10.0) == []
    assert made.board.in_flight == {"us/0": 0, "us/1": 1, "eu": 0}


def test_nothing_is_tried_twice() -> None:
    made = make()
    arrive(made, "a")
    arrive(made, "b")
    assert words(made.handle(machine.AttemptFailed("a", 1, outcome.CONNECT_FAILED), 1.0)) == ["a connect_failed"]
    assert words(made.handle(machine.AttemptRefused("b", 1, outcome.QUEUE_FULL), 1.0)) == ["b queue_full"]
    assert made.board.in_flight.total() == 0


def test_who_leaves_the_head_makes_way() -> None:
    made = make()
    waits(made, 1, 1)
    arrive(made, "a")
    arrive(made, "b")
    assert made.handle(machine.ClientLeft("a"), 1.0) == []
    assert waits(made, 0, 1, 2.0) == ["b at 100", "b > us/0 #1"]
    assert made.handle(machine.ClientLeft("b"), 3.0) == []
    assert made.board.in_flight.total() == 0
    assert made.handle(machine.TimerFired("b"), 100.0) == []


def test_a_full_line_says_no() -> None:
    made = make()
    waits(made, 1, 1)
    bound, routers.LINE_MAX = routers.LINE_MAX, 1
    try:
        arrive(made, "a")
        assert arrive(made, "b") == ["b queue_full"]
    finally:
        routers.LINE_MAX = bound


def test_pings_are_smoothed_and_peers_are_heard() -> None:
    made = make(smoothing=0.3)
    made.handle(WireMeasured("eu", 190.0), 0.0)
    assert made.board.rtt_ms["eu"] == 0.7 * 90.0 + 0.3 * 190.0
    made.handle(BalancerSeen("eu", 3, True), 0.0)
    assert made.board.said["eu"].line == 3
