"""The relay's counterpart in virtual time: gives one machine its events, and carries out its commands.

Invariants, counted as violations if the machine breaks them: a command names a request under way; a request has one
attempt at a time, numbered from 1 without a gap; after its final command on a request a machine gives no other; each
request under way is held or has an attempt, with a timer. Never routes. A machine that raises ends the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from farhop.balance import machine, outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Answer, Command, Event, Flow, Forward, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.measures import Journal
    from farhop_lab.sim.timeline import Call, Timeline

TIMER_LATE_S = 1e-6  # a loop's timer is a little late; else rounding between clocks could keep it early forever


class Client(Protocol):
    """The sender of a request. Its callbacks: `began` and then `ended` or `broke`; or `refused` alone; or none after it
    left.
    """

    def began(self, status: int) -> None:
        """The first byte."""

    def ended(self, status: int, usage: Usage | None) -> None:
        """The answer is complete."""

    def refused(self, answer: Answer) -> None:
        """Refused before the first byte."""

    def broke(self, outcome: Outcome) -> None:
        """The stream ended incomplete."""


class RequestRelay(Protocol):
    """Accepts requests; a SimulatedRelay is one."""

    def clock(self) -> float:
        """Monotonic seconds of its process."""

    def start(self, active: ActiveRequest) -> None:
        """Take a request."""

    def client_left(self, request_id: str) -> bool:
        """Its client is gone; False if the request is over."""


class EntryPoint(Protocol):
    """A process that clients connect to."""

    @property
    def name(self) -> str:
        """Unique in the world."""

    @property
    def relay(self) -> RequestRelay:
        """Its driver."""


class SimulatedAttempt(Protocol):
    """One attempt under way; reports its progress to the relay."""

    number: int

    def abort(self) -> None:
        """Stop at once; no callback follows."""

    def so_far(self) -> bytes | None:
        """The text so far, from which another target could continue; None if none could."""


class Prompt:
    """What a machine does not see of a request. `answer_tokens` None: the model decides. `seed` is that of its prefix
    chain.
    """

    __slots__ = ("answer_tokens", "seed", "text")

    def __init__(self, text: bytes, answer_tokens: int | None, seed: int = 0) -> None:
        self.text, self.answer_tokens, self.seed = text, answer_tokens, seed


class ActiveRequest:
    """One request at one tier. `target` is that of the last attempt, "" before the first. `generated` is the text of
    attempts whose stream is to be continued elsewhere, `longer` as in the last Forward.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "client",
        "generated",
        "held",
        "longer",
        "prompt",
        "request",
        "started",
        "target",
        "timer",
    )

    def __init__(self, request: Request, prompt: Prompt, client: Client) -> None:
        self.request, self.prompt, self.client = request, prompt, client
        self.attempt: SimulatedAttempt | None = None
        self.attempts = 0
        self.timer: Call | None = None
        self.target = ""
        self.started = self.held = self.longer = False
        self.generated = b""

    def last_word(self) -> Client:
        """The client, for its last callback. The reference is dropped: client and request refer to each other, and a
        concluded request with its prompt shall be freed at once, not by the garbage collector.
        """
        client = self.client
        del self.client
        return client

    def so_far(self) -> bytes | None:
        """All text of its answer so far, by all attempts, to continue elsewhere; None if that is not possible."""
        if not self.started or self.attempt is None:
            return self.generated or None
        more = self.attempt.so_far()
        return None if more is None else self.generated + more


class SimulatedRelay:
    """Drives one machine. `clock_s` is how far this process's clock is ahead of the timeline's."""

    def __init__(
        self,
        name: str,
        flow: Flow,
        timeline: Timeline,
        clock_s: float,
        journal: Journal,
        attempt: Callable[[ActiveRequest, Forward], SimulatedAttempt],
    ) -> None:
        self.name, self.flow = name, flow
        self._timeline, self._clock_s, self._journal, self._attempt = timeline, clock_s, journal, attempt
        self.live: dict[str, ActiveRequest] = {}
        self._most = 0
        self._perform: dict[type[Command], Callable[[ActiveRequest, Any], None]] = {
            machine.Forward: self._forward,
            machine.Resume: self._resume,
            machine.Hold: self._hold,
            machine.Answer: self._answer,
            machine.Cancel: self._cancel,
            machine.Move: self._move,
            machine.Recall: self._recall,
            machine.SetTimer: self._set_timer,
        }

    def clock(self) -> float:
        """Monotonic seconds of this process."""
        return self._timeline.now + self._clock_s

    @property
    def under_way(self) -> int:
        """The number of requests neither answered nor given up."""
        return len(self.live)

    def has(self, request_id: str) -> bool:
        """Whether this request is under way here."""
        return request_id in self.live

    def attempts(self) -> list[SimulatedAttempt]:
        """Attempts under way."""
        return [active.attempt for active in self.live.values() if active.attempt is not None]

    def most_under_way(self) -> int:
        """The highest number of requests under way since the last call."""
        most, self._most = self._most, len(self.live)
        return most

    def start(self, active: ActiveRequest) -> None:
        """Take a request."""
        self.live[active.request.id] = active
        self.react(machine.RequestArrived(active.request))

    def react(self, event: Event) -> None:
        """Let the machine decide, then carry out its commands."""
        commands: list[Any] = self.flow.handle(event, self._timeline.now + self._clock_s)
        journal, live = self._journal, self.live
        if not journal.hushed:
            journal.note(self.name, event, commands)
        for command in commands:
            active = live.get(command.id)
            if active is None:
                self._wrong(f"{type(command).__name__} for {command.id}, which is over")
                continue
            self._perform[type(command)](active, command)
        if len(live) > self._most:
            self._most = len(live)  # after the machine has decided: a refused request occupies nothing
        name = event.request.id if isinstance(event, machine.RequestArrived) else getattr(event, "id", None)
        active = live.get(name) if name is not None else None
        if active is not None and (active.timer is None or (active.attempt is None and not active.held)):
            self._wrong(f"{name} was forgotten after {type(event).__name__}")

    def _wrong(self, what: str) -> None:
        self._journal.violated(f"{self.name}: {what}")

    # -- events of an attempt

    def began(self, active: ActiveRequest, attempt: SimulatedAttempt, status: int) -> None:
        """The first byte arrived."""
        if status == 400 and active.longer:  # engines here refuse only what they cannot hold
            self.failed(active, attempt, outcome.TOO_LONG)
        elif active.attempt is attempt:
            self.react(machine.AttemptBegan(active.request.id, attempt.number, status))
            if active.attempt is attempt and not active.started:  # a continued answer does not begin anew
                active.started = True
                active.client.began(status)

    def ended(
        self, active: ActiveRequest, attempt: SimulatedAttempt, status: int, usage: Usage | None,
        chain: tuple[int, ...] = (), answer_bytes: int = 0, fault: Outcome | None = None,
    ) -> None:  # fmt: skip
        """The answer is complete; with `fault` the engine ended it with an error."""
        if active.attempt is attempt:
            self._forget(active)
            active.attempt = None
            ended = machine.AttemptEnded(
                active.request.id, attempt.number, status, usage, fault, chain=chain, answer_bytes=answer_bytes
            )
            self.react(ended)
            active.last_word().ended(status if fault is None else 500, usage)

    def refused(self, active: ActiveRequest, attempt: SimulatedAttempt, reason: Outcome, wait_ms: float | None) -> None:
        """The tier below refused it."""
        if active.attempt is attempt:
            active.attempt = None
            self.react(machine.AttemptRefused(active.request.id, attempt.number, reason, wait_ms))

    def failed(
        self, active: ActiveRequest, attempt: SimulatedAttempt, reason: Outcome, *, target_lives: bool = False
    ) -> None:
        """The attempt broke."""
        if active.attempt is attempt:
            active.attempt = None
            generated = attempt.so_far() if active.started else None
            active.generated += generated or b""
            self.react(
                machine.AttemptFailed(
                    active.request.id, attempt.number, reason, generated is not None, target_lives=target_lives
                )
            )

    def client_left(self, request_id: str) -> bool:
        """Cancel the attempt, and inform the machine. False if the request is over."""
        active = self.live.get(request_id)
        if active is None:
            return False
        self._forget(active)
        self._stop(active)
        active.last_word()  # the client's own
        self.react(machine.ClientLeft(request_id))
        return True

    def die(self) -> list[ActiveRequest]:
        """The process and its machine die. Returns the requests under way, so that their clients can be told."""
        orphans = list(self.live.values())
        for active in orphans:
            generated = active.so_far()
            self._forget(active)
            self._stop(active)
            active.generated = generated or b""  # whoever has received all of it may continue from there
        return orphans

    # -- the machine's commands

    def _forward(self, active: ActiveRequest, command: Forward) -> None:
        request_id = active.request.id
        goes_on = isinstance(command, machine.Resume)
        if active.attempt is not None or active.started is not goes_on:
            self._wrong(f"{request_id} was forwarded while an attempt is under way")
            self._stop(active)
        if command.attempt != active.attempts + 1:
            self._wrong(f"{request_id}: attempt {command.attempt} after {active.attempts}")
        if self.clock() >= active.request.deadline:
            self._wrong(f"{request_id} was forwarded past its deadline")
        active.attempts, active.target, active.held = command.attempt, command.target, False
        active.longer = command.longer
        active.attempt = self._attempt(active, command)

    def _resume(self, active: ActiveRequest, command: machine.Resume) -> None:
        if not active.generated:
            self._wrong(f"{active.request.id} is to go on from nothing")
        self._forward(active, command)

    def _move(self, active: ActiveRequest, command: machine.Move) -> None:
        attempt = active.attempt
        if attempt is not None and attempt.number == command.attempt and active.started:
            generated = attempt.so_far()
            if generated is not None:
                active.generated += generated
                self._stop(active)
                self.react(machine.AttemptFailed(active.request.id, command.attempt, outcome.STOPPING, resumable=True))

    def _recall(self, active: ActiveRequest, command: machine.Recall) -> None:
        """Stops it; the target notices at once."""

    def _hold(self, active: ActiveRequest, _command: machine.Hold) -> None:
        active.held = True

    def _answer(self, active: ActiveRequest, command: Answer) -> None:
        self._forget(active)
        self._stop(active)
        if active.started:
            active.last_word().broke(command.outcome)
        else:
            active.last_word().refused(command)

    def _cancel(self, active: ActiveRequest, command: machine.Cancel) -> None:
        if active.attempt is not None and active.attempt.number == command.attempt:
            self._stop(active)

    def _set_timer(self, active: ActiveRequest, command: machine.SetTimer) -> None:
        if active.timer is not None:
            active.timer.cancel()
        active.timer = self._timeline.at(
            command.at - self._clock_s + TIMER_LATE_S, self.react, machine.TimerFired(command.id)
        )

    # -- endings

    def _stop(self, active: ActiveRequest) -> None:
        attempt, active.attempt = active.attempt, None
        if attempt is not None:
            attempt.abort()

    def _forget(self, active: ActiveRequest) -> None:
        del self.live[active.request.id]
        if active.timer is not None:
            active.timer.cancel()
