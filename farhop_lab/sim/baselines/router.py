"""A baseline router: one line, first come first served, a scope that says who may be asked now and a taste that picks.

The machine `handle(event, now) -> commands` that a Carrier drives, as it drives the shipped ones. Invariants: the head
of the line goes first, and while it cannot, nobody does; one attempt per request, never a second (none of the published
routers retries); a request is concluded at its deadline if it has not begun. Rules read the board and never write it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from farhop.balance import machine, outcome
from farhop.balance.machine import Address, Answer, Forward, Hold, SetTimer
from farhop_lab.sim.baselines.words import BalancerSeen, EnginesSeen, WireMeasured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.machine import Command, Event, Request
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.baselines.words import Board

LINE_MAX = 100_000
_ANYWHERE = Address("sim", 1)


class Scope(Protocol):
    """Whom a request may be sent to now."""

    def candidates(self, request: Request, board: Board, now: float) -> Sequence[str]:
        """Names of targets, in the board's order; none: the request stays in line."""


class Taste(Protocol):
    """Which of them."""

    def choose(self, request: Request, among: Sequence[str], board: Board, now: float) -> str:
        """One of `among`, which is never empty. Reads only."""

    def sent(self, request: Request, target: str, board: Board, now: float) -> None:
        """It goes there: remember what there is to remember."""


class Router:
    """See the module's head. `pace_s` passes between two that leave the line. `smoothing` is the share that a new ping
    has in what is believed of a wire (1: the last one counts alone)."""

    def __init__(
        self, board: Board, scope: Scope, taste: Taste, *, pace_s: float = 0.0, smoothing: float = 1.0
    ) -> None:
        self.board, self.scope, self.taste = board, scope, taste
        self._pace_s, self._smoothing = pace_s, smoothing
        self._next_at = 0.0
        self._line: OrderedDict[str, Request] = OrderedDict()
        self._live: dict[str, Request] = {}
        self._told: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptFailed: self._failed,
            machine.AttemptRefused: self._failed,
            machine.ClientLeft: self._left,
            machine.TimerFired: self._fired,
            EnginesSeen: self._engines_seen,
            BalancerSeen: self._balancer_seen,
            WireMeasured: self._measured,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """See farhop.balance.machine.Flow."""
        return self._told[type(event)](event, now)

    # -- requests

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if len(self._line) >= LINE_MAX:
            return [Answer(request.id, outcome.QUEUE_FULL, "the line is full")]
        self._live[request.id] = self._line[request.id] = request
        commands: list[Command] = [SetTimer(request.id, request.deadline)]
        commands += self._drain(now)
        if request.id in self._line:
            commands.append(Hold(request.id))
        return commands

    def _drain(self, now: float) -> list[Command]:
        """Let go from the head as many as may."""
        commands: list[Command] = []
        line, board = self._line, self.board
        while line:
            board.line = len(line)
            head = next(iter(line.values()))
            if now < self._next_at:
                commands.append(SetTimer(head.id, min(head.deadline, self._next_at)))
                break
            names = self.scope.candidates(head, board, now)
            if not names:
                break
            target = self.taste.choose(head, names, board, now)
            del line[head.id]
            self._next_at = now + self._pace_s
            board.sent(head, target)
            self.taste.sent(head, target, board, now)
            commands += [SetTimer(head.id, head.deadline), Forward(head.id, 1, target, _ANYWHERE, None, head.lawful)]
        board.line = len(line)
        return commands

    def _conclude(self, request_id: str) -> None:
        self._line.pop(request_id, None)
        self._live.pop(request_id, None)
        self.board.over(request_id)

    def _answer(self, request_id: str, reason: Outcome, now: float) -> list[Command]:
        self._conclude(request_id)
        return [Answer(request_id, reason, reason.reason), *self._drain(now)]

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        self.board.began(event.id)
        return self._drain(now)

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        self._conclude(event.id)
        return self._drain(now)

    def _failed(self, event: machine.AttemptFailed | machine.AttemptRefused, now: float) -> list[Command]:
        return self._answer(event.id, event.outcome, now)

    def _left(self, event: machine.ClientLeft, now: float) -> list[Command]:
        self._conclude(event.id)
        return self._drain(now)

    def _fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        request = self._live.get(event.id)
        if request is None or self.board.begun(event.id):
            return []
        if now >= request.deadline:
            late = outcome.QUEUE_TIMEOUT if event.id in self._line else outcome.DEADLINE
            return self._answer(event.id, late, now)
        return [SetTimer(event.id, request.deadline), *self._drain(now)]

    # -- what is heard

    def _engines_seen(self, event: EnginesSeen, now: float) -> list[Command]:
        self.board.hear_engines(event, now)
        return self._drain(now)

    def _balancer_seen(self, event: BalancerSeen, now: float) -> list[Command]:
        self.board.hear_balancer(event)
        return self._drain(now)

    def _measured(self, event: WireMeasured, now: float) -> list[Command]:
        known, share = self.board.rtt_ms, self._smoothing
        known[event.region] = (1.0 - share) * known[event.region] + share * event.rtt_ms
        return self._drain(now)
