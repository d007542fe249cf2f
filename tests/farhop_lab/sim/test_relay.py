from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farhop.balance import machine, outcome
from farhop.balance.machine import Address, Answer, Command, Event, Forward, Hold, Request, SetTimer
from farhop_lab.sim.measures import Journal
from farhop_lab.sim.relay import ActiveRequest, Prompt, SimulatedRelay
from farhop_lab.sim.timeline import Timeline

AHEAD_S = 1000.0


class Script:
    """A machine that says what it is told to."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float]] = []
        self.last: Event | None = None
        self.says: dict[str, list[Command]] = {}

    def handle(self, event: Event, now: float) -> list[Command]:
        kind = type(event).__name__
        self.events.append((kind, round(now, 3)))
        self.last = event
        return self.says.pop(kind, [])


class Someone:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def began(self, status: int) -> None:
        self.events.append(("began", status))

    def ended(self, status: int, usage: machine.Usage | None) -> None:
        self.events.append(("ended", status))

    def refused(self, answer: Answer) -> None:
        self.events.append(("refused", answer.outcome))

    def broke(self, outcome: outcome.Outcome) -> None:
        self.events.append(("broke", outcome))


class Try:
    def __init__(self, number: int) -> None:
        self.number, self.aborted = number, False
        self.text: bytes | None = None

    def so_far(self) -> bytes | None:
        return self.text

    def abort(self) -> None:
        self.aborted = True


class Stand:
    """A relay with everything around it scripted."""

    def __init__(self) -> None:
        self.timeline, self.flow, self.someone = Timeline(), Script(), Someone()
        self.journal = Journal(self.timeline)
        self.tries: list[Try] = []
        self.relay = SimulatedRelay("x", self.flow, self.timeline, AHEAD_S, self.journal, self._attempt)
        request = Request("r", "t", "m", 100, 300, (), AHEAD_S + 60.0)
        self.active = ActiveRequest(request, Prompt(b"", None), self.someone)

    def _attempt(self, active: ActiveRequest, forward: Forward) -> Try:
        self.tries.append(Try(forward.attempt))
        return self.tries[-1]

    def start(self, *says: Command) -> None:
        self.flow.says["RequestArrived"] = list(says)
        self.relay.start(self.active)


def timer(at: float = AHEAD_S + 60.0) -> SetTimer:
    return SetTimer("r", at)


def forward(number: int = 1) -> Forward:
    return Forward("r", number, "there", Address("there", 1), 10.0)


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_a_request_served(stand: Stand) -> None:
    stand.start(timer(), forward())
    (attempt,) = stand.tries
    stand.timeline.run(1.0)
    stand.relay.began(stand.active, attempt, 200)
    stand.relay.ended(stand.active, attempt, 200, None, (1, 2), 300)
    assert stand.flow.last == machine.AttemptEnded(stand.active.request.id, 1, 200, None, None, (1, 2), 300)
    assert stand.flow.events == [("RequestArrived", 1000.0), ("AttemptBegan", 1001.0), ("AttemptEnded", 1001.0)]
    assert stand.someone.events == [("began", 200), ("ended", 200)]
    assert stand.relay.under_way == 0
    stand.timeline.run(100.0)
    assert len(stand.flow.events) == 3, "its timer went with it"
    assert stand.journal.violations == 0


def test_timers_are_of_the_process_clock_and_never_early(stand: Stand) -> None:
    stand.start(Hold("r"), timer(AHEAD_S + 7.3))
    stand.flow.says["TimerFired"] = [timer(AHEAD_S + 9.0)]
    stand.timeline.run(7.2)
    assert len(stand.flow.events) == 1
    stand.timeline.run(8.0)
    assert stand.flow.events[1:] == [("TimerFired", 1007.3)]
    stand.timeline.run(9.5)
    assert stand.flow.events[2:] == [("TimerFired", 1009.0)]


def test_late_events_of_a_replaced_attempt_are_ignored(stand: Stand) -> None:
    stand.start(timer(), forward())
    stand.flow.says["AttemptRefused"] = [timer(), forward(2)]
    stand.relay.refused(stand.active, stand.tries[0], outcome.QUEUE_FULL, 20.0)
    stand.relay.began(stand.active, stand.tries[0], 200)
    stand.relay.failed(stand.active, stand.tries[0], outcome.CONNECT_FAILED)
    assert [kind for kind, _ in stand.flow.events] == ["RequestArrived", "AttemptRefused"]
    assert (stand.active.attempts, stand.active.target) == (2, "there")
    assert stand.journal.violations == 0


@pytest.mark.parametrize(("started", "word"), [(False, "refused"), (True, "broke")])
def test_answer_cancels_the_attempt_and_reaches_the_client(stand: Stand, started: bool, word: str) -> None:
    stand.start(timer(), forward())
    if started:
        stand.relay.began(stand.active, stand.tries[0], 200)
    stand.flow.says["TimerFired"] = [Answer("r", outcome.DEADLINE, "")]
    stand.timeline.run(61.0)
    assert stand.tries[0].aborted
    assert stand.someone.events[-1] == (word, outcome.DEADLINE)
    assert stand.relay.under_way == 0


def test_a_client_that_leaves_takes_its_attempt_along(stand: Stand) -> None:
    stand.start(timer(), forward())
    assert stand.relay.client_left("r")
    assert stand.tries[0].aborted
    assert stand.flow.events[-1][0] == "ClientLeft"
    assert not stand.relay.client_left("r")
    assert stand.someone.events == []


def test_killed_process_sends_nothing_and_returns_its_requests(stand: Stand) -> None:
    stand.start(timer(), forward())
    assert stand.relay.die() == [stand.active]
    stand.relay.began(stand.active, stand.tries[0], 200)
    stand.timeline.run(100.0)
    assert len(stand.flow.events) == 1
    assert stand.tries[0].aborted


def test_the_most_under_way_is_counted_after_the_machine_decided(stand: Stand) -> None:
    stand.start(Answer("r", outcome.NO_REGION, ""))
    assert stand.relay.most_under_way() == 0
    other = Stand()
    other.start(timer(), forward())
    assert other.relay.client_left("r")
    assert [other.relay.most_under_way(), other.relay.most_under_way()] == [1, 0]


def broken(name: str, event: str | None, *says: Command) -> Any:
    return pytest.param(event, says, id=name)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        broken("a word on nobody", None, timer(), forward(), Hold("nobody")),
        broken("no timer", None, forward()),
        broken("neither held nor sent", None, timer()),
        broken("attempt 2 first", None, timer(), forward(2)),
        broken("two at once", None, timer(), forward(), forward(2)),
        broken("a word after the last", None, Answer("r", outcome.NO_REGION, ""), timer()),
        broken("forgotten after a failure", "AttemptFailed"),
        broken("past its deadline", "TimerFired", timer(2000.0), forward(2)),
    ],
)
def test_a_machine_that_breaks_the_rules_is_seen(stand: Stand, event: str | None, says: tuple[Command, ...]) -> None:
    happen: dict[str, Callable[[], None]] = {
        "AttemptFailed": lambda: stand.relay.failed(stand.active, stand.tries[0], outcome.CONNECT_FAILED),
        "TimerFired": lambda: stand.timeline.run(70.0),
    }
    if event is None:
        stand.start(*says)
    else:
        stand.start(timer(), forward())
        assert stand.journal.violations == 0
        stand.flow.says[event] = list(says)
        happen[event]()
    assert stand.journal.violations >= 1


def test_a_machine_that_raises_ends_the_run(stand: Stand) -> None:
    stand.flow.says = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        stand.relay.start(stand.active)


def resume(number: int) -> machine.Resume:
    return machine.Resume("r", number, "elsewhere", Address("there", 2), 10.0)


def test_a_broken_stream_is_continued_without_its_client_noticing(stand: Stand) -> None:
    stand.start(timer(), forward())
    stand.relay.began(stand.active, stand.tries[0], 200)
    stand.tries[0].text = b"the sea"
    stand.flow.says["AttemptFailed"] = [timer(), resume(2)]
    stand.relay.failed(stand.active, stand.tries[0], outcome.DIED_MID_STREAM)
    failed = stand.flow.last
    assert isinstance(failed, machine.AttemptFailed)
    assert failed.resumable
    assert stand.active.generated == b"the sea"
    stand.relay.began(stand.active, stand.tries[1], 200)
    stand.relay.ended(stand.active, stand.tries[1], 200, None)
    assert stand.someone.events == [("began", 200), ("ended", 200)]
    assert stand.journal.violations == 0


@pytest.mark.parametrize("value", [b"the sea", None])
def test_stream_is_moved_only_if_it_can_be_continued(stand: Stand, value: bytes | None) -> None:
    stand.start(timer(AHEAD_S + 5.0), forward())
    stand.relay.began(stand.active, stand.tries[0], 200)
    stand.tries[0].text = value
    stand.flow.says["TimerFired"] = [timer(AHEAD_S + 50.0), machine.Move("r", 1)]
    stand.flow.says["AttemptFailed"] = [timer(AHEAD_S + 50.0), resume(2)]
    stand.timeline.run(6.0)
    assert stand.tries[0].aborted is (value is not None)
    assert len(stand.tries) == (2 if value else 1)
    assert stand.journal.violations == 0


def test_resuming_a_stream_without_output_is_a_violation(stand: Stand) -> None:
    stand.start(timer(), forward())
    stand.relay.began(stand.active, stand.tries[0], 200)
    stand.flow.says["AttemptFailed"] = [timer(), resume(2)]
    stand.relay.failed(stand.active, stand.tries[0], outcome.DIED_MID_STREAM)
    assert stand.journal.violations == 1
