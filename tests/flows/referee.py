"""Whatever happens in whatever order: what must hold of a machine's commands. Plays the shell, and keeps its books.

Every request is concluded exactly once; no command names one that is over or was never there; an attempt follows on
the one before; whoever is not concluded is on hold or under way, with a timer. The tier's own rules are the test's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from farhop.balance import machine, retry
from farhop.balance.machine import Command, Event, Flow, Forward, Request


@dataclass
class Rider:
    """A request as the shell knows it. `state`: new, held, sent, started, or failed (an attempt broke, no word yet)."""

    request: Request
    lawful: frozenset[str]
    state: str = "new"
    attempt: int = 0
    target: str = ""
    prefiller: str = ""  # while the prompt is computed there
    timer: float | None = None
    refused_by: tuple[str, ...] = ()  # since it was last on hold or called back, or since its stream last broke
    moves: bool = False  # its attempt is to be aborted, if its stream can continue elsewhere
    begun: bool = False  # its client has the beginning of a stream


class Referee:
    """`lawful` gives the regions lawful for a request at arrival; `forwarded` judges a Forward by the tier's rules."""

    def __init__(
        self,
        flow: Flow,
        lawful: Callable[[Request], frozenset[str]],
        forwarded: Callable[[Rider, Forward, float], None],
    ) -> None:
        self._flow, self._lawful, self._forwarded = flow, lawful, forwarded
        self.riders: dict[str, Rider] = {}

    def happen(self, event: Event, now: float) -> list[Command]:
        """Tell the machine, and hold what it wants done against the books."""
        self._note(event, now)
        commands = self._flow.handle(event, now)
        for command in commands:
            self._act(command, now)
        for rider in self.riders.values():
            assert rider.state in ("held", "sent", "started"), f"{rider} was forgotten by {event}"
            assert rider.timer is not None
        return commands

    def states(self, *states: str) -> list[Rider]:
        """The riders in one of these states, oldest first."""
        return [rider for rider in self.riders.values() if rider.state in states]

    def due(self, now: float) -> list[str]:
        """Whose timers are due."""
        return [name for name, rider in self.riders.items() if rider.timer is not None and rider.timer <= now]

    def _note(self, event: Event, now: float) -> None:
        if isinstance(event, machine.RequestArrived):
            request = event.request
            assert request.id not in self.riders
            self.riders[request.id] = Rider(request, self._lawful(request))
            return
        rider = self.riders.get(getattr(event, "id", ""))
        if rider is None:
            return
        if isinstance(event, machine.ClientLeft):
            del self.riders[rider.request.id]
        elif isinstance(event, machine.TimerFired):
            rider.timer = None
        elif getattr(event, "attempt", None) == rider.attempt and rider.state in ("sent", "started"):
            if isinstance(event, machine.AttemptEnded):
                del self.riders[rider.request.id]
            elif isinstance(event, machine.PrefillEnded):
                rider.prefiller = ""
            elif isinstance(event, machine.AttemptBegan):
                rider.state, rider.begun = "started", True
            else:
                if isinstance(event, machine.AttemptRefused):
                    rider.refused_by += (rider.target,)
                elif rider.state == "started":
                    rider.refused_by = ()
                goes_on = rider.state == "sent" or getattr(event, "resumable", False)
                rider.state = "failed" if goes_on else "broken"

    def _act(self, command: Command, now: float) -> None:
        rider = self.riders.get(command.id)
        assert rider is not None, f"{command} for a request that is over"
        if isinstance(command, machine.Answer):
            del self.riders[command.id]
        elif isinstance(command, machine.SetTimer):
            assert isfinite(command.at)
            rider.timer = command.at
        elif isinstance(command, machine.Move):
            assert (rider.state, rider.attempt) == ("started", command.attempt), "only what has begun has a stream"
            assert rider.request.stream
            rider.moves = True
        elif isinstance(command, machine.Recall):
            assert rider.state in ("sent", "started")
            assert rider.attempt == command.attempt
        elif isinstance(command, machine.Cancel):
            assert (rider.state, rider.attempt) == ("sent", command.attempt), "what has begun is never given up"
            rider.state, rider.refused_by = "failed", ()  # time has passed, as for requests on hold
        elif isinstance(command, machine.Hold):
            assert rider.state in ("new", "failed")
            rider.state, rider.target, rider.refused_by = "held", "", ()
        else:
            assert isinstance(command, Forward), f"{command} is nothing a tier does by now"
            assert rider.state in ("new", "failed", "held"), f"{command} while {rider}"
            assert isinstance(command, machine.Resume) == rider.begun
            assert command.attempt == rider.attempt + 1 <= retry.ATTEMPTS_MAX
            assert now < rider.request.deadline
            rider.state, rider.attempt, rider.target, rider.moves = "sent", command.attempt, command.target, False
            rider.prefiller = command.prefill.target if command.prefill is not None else ""
            self._forwarded(rider, command, now)
