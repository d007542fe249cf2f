"""The shell around a tier's machine: turns what happens on the wire into events, and commands into bytes.

It holds one Journey per request under way. Invariants: every Journey ends exactly once, by an answer, a broken stream
or its client leaving; the machine hears of every edge of every request exactly once. Never chooses, never waits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from farhop.balance import machine, outcome
from farhop.relay import answers
from farhop.relay.attempt import AttemptRun
from farhop.relay.listener import SWEEP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Address, Command, Event, Flow, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.inbound import Exchange
    from farhop.relay.outbound import Pool


class Tier(Protocol):
    """What the relay asks of the tier it carries for, and tells it."""

    def upstream_headers(self, journey: Journey) -> bytes:
        """Header lines for the upstream: credentials, hop token, trace context."""

    def answer_headers(self, journey: Journey) -> bytes:
        """Header lines for the client: region and decision."""

    def forwarded(self, journey: Journey) -> None:
        """An attempt is on its way."""

    def attempt_over(self, journey: Journey, attempt: AttemptRun, reason: Outcome) -> None:
        """An attempt ended, however."""

    def concluded(self, journey: Journey, reason: Outcome, status: int, usage: Usage | None) -> None:
        """The request is over. `status` is what the client saw, 0 if nothing."""

    def fault(self, journey: Journey | None, error: Exception) -> None:
        """The machine itself failed: a bug, to be logged loudly."""


class Journey:
    """One request under way. `context` belongs to the tier."""

    __slots__ = (
        "_relay",
        "arrived_at",
        "attempt",
        "began_at",
        "body",
        "context",
        "exchange",
        "forward",
        "forwarded_at",
        "hide_usage",
        "hold_from",
        "reasons",
        "request",
        "timer",
    )

    def __init__(
        self, relay: Relay, exchange: Exchange, request: Request, body: bytes, hide_usage: bool, context: Any
    ) -> None:
        self._relay, self.exchange, self.request, self.body = relay, exchange, request, body
        self.hide_usage, self.context = hide_usage, context
        self.attempt: AttemptRun | None = None
        self.forward: machine.Forward | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.arrived_at = relay.clock()
        self.forwarded_at = self.began_at = 0.0
        self.hold_from: float | None = None
        self.reasons: Any = None  # the machine's last decision on it

    def client_left(self) -> None:
        """The exchange's connection is gone."""
        self._relay.client_left(self)

    def pause(self) -> None:
        """The client is behind."""
        if self.attempt is not None:
            self.attempt.pause()

    def resume(self) -> None:
        """The client caught up."""
        if self.attempt is not None:
            self.attempt.resume()

    def upstream_head(self, address: Address) -> bytes:
        """The request's head as the upstream gets it."""
        head = self.exchange.head
        return b"%b %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\naccept-encoding: identity\r\n%b%b\r\n" % (
            head.method,
            head.target,
            str(address).encode(),
            len(self.body),
            head.onward,
            self._relay.tier.upstream_headers(self),
        )

    def answer_head(self, upstream_timing: bytes) -> bytes:
        """Our header lines on an answer that began: decision, region, and where the time went."""
        before_ms = (self.forwarded_at - self.arrived_at) * 1e3
        upstream_ms = (self.began_at - self.forwarded_at) * 1e3
        name = self._relay.name
        timing = b"server-timing: %b;dur=%.2f, %b-upstream;dur=%.2f" % (name, before_ms, name, upstream_ms)
        tail = b", " + upstream_timing + b"\r\n" if upstream_timing else b"\r\n"
        return self._relay.tier.answer_headers(self) + timing + tail


class Relay:
    """Drives one machine. `clock` gives monotonic seconds, the machine's `now`."""

    def __init__(
        self, name: bytes, flow: Flow, tier: Tier, pool: Pool, clock: Callable[[], float], *, upstream_is_tier: bool
    ) -> None:
        self.name, self._flow, self.tier, self.pool, self.clock = name, flow, tier, pool, clock
        self.upstream_is_tier = upstream_is_tier
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, Journey] = {}
        self._sweeper = self._loop.create_task(self._sweep())
        self._perform: dict[type[Command], Callable[[Any], None]] = {
            machine.Forward: self._forward,
            machine.Hold: self._hold,
            machine.Answer: self._answer,
            machine.Redirect: self._redirect,
            machine.Cancel: self._cancel,
            machine.SetTimer: self._set_timer,
        }

    @property
    def under_way(self) -> int:
        """How many requests are neither answered nor given up."""
        return len(self._live)

    def start(self, exchange: Exchange, request: Request, body: bytes, *, hide_usage: bool, context: Any) -> None:
        """Take a request that was read whole and identified."""
        journey = Journey(self, exchange, request, body, hide_usage, context)
        exchange.journey = self._live[request.id] = journey
        self.react(machine.RequestArrived(request))

    def react(self, event: Event) -> None:
        """Let the machine decide, then act."""
        try:
            commands = self._flow.handle(event, self.clock())
        except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must not take the process or leak a trace
            self._fault(event, error)
            return
        for command in commands:
            self._perform[type(command)](command)

    def _fault(self, event: Event, error: Exception) -> None:
        name: str = event.request.id if isinstance(event, machine.RequestArrived) else getattr(event, "id", "")
        journey = self._live.get(name)
        self.tier.fault(journey, error)
        if journey is not None:
            self._answer(machine.Answer(name, outcome.INTERNAL, "the balancer failed on this request; it is logged"))

    # -- what happened to an attempt

    def began(self, attempt: AttemptRun, status: int) -> None:
        """The first byte is here."""
        journey = attempt.journey
        journey.began_at = self.clock()
        self.react(machine.AttemptBegan(journey.request.id, attempt.number, status))

    def ended(self, attempt: AttemptRun, status: int, usage: Usage | None) -> None:
        """The answer is whole."""
        journey = attempt.journey
        reason = outcome.SERVED if status < 400 else outcome.ENGINE_ERROR
        self.tier.attempt_over(journey, attempt, reason)
        self._forget(journey)
        journey.exchange.finish()
        self.react(machine.AttemptEnded(journey.request.id, attempt.number, status, usage))
        self.tier.concluded(journey, reason, status, usage)

    def refused(self, attempt: AttemptRun, reason: Outcome, wait_ms: float | None) -> None:
        """The tier below said no."""
        self.tier.attempt_over(attempt.journey, attempt, reason)
        self.react(machine.AttemptRefused(attempt.journey.request.id, attempt.number, reason, wait_ms))

    def failed(self, attempt: AttemptRun, reason: Outcome) -> None:
        """The attempt broke."""
        self.tier.attempt_over(attempt.journey, attempt, reason)
        self.react(machine.AttemptFailed(attempt.journey.request.id, attempt.number, reason))

    def client_left(self, journey: Journey) -> None:
        """Cancel what runs upstream, and tell the machine."""
        if self._live.get(journey.request.id) is not journey:
            return
        attempt = journey.attempt
        self._forget(journey)
        if attempt is not None:
            attempt.abort()
            self.tier.attempt_over(journey, attempt, outcome.CLIENT_LEFT)
        self.react(machine.ClientLeft(journey.request.id))
        usage = attempt.usage if attempt is not None else None
        self.tier.concluded(journey, outcome.CLIENT_LEFT, 0, usage)

    # -- what the machine wants done

    def _forward(self, command: machine.Forward) -> None:
        journey = self._live.get(command.id)
        if journey is None:
            return
        now = self.clock()
        journey.forward, journey.forwarded_at, journey.reasons = command, now, command.reasons
        attempt = journey.attempt = AttemptRun(self, journey, command.attempt, now)
        self.tier.forwarded(journey)
        attempt.start(command.address)

    def _hold(self, command: machine.Hold) -> None:
        journey = self._live.get(command.id)
        if journey is not None and journey.hold_from is None:
            journey.hold_from = self.clock()

    def _answer(self, command: machine.Answer) -> None:
        journey = self._live.get(command.id)
        if journey is None:
            return
        self._forget(journey)
        attempt, exchange = journey.attempt, journey.exchange
        journey.reasons = command.reasons or journey.reasons
        if attempt is not None:
            attempt.abort()
        if exchange.started:
            self._break_off(journey, command)
            status = attempt.status if attempt is not None else 0
        else:
            extra = self.tier.answer_headers(journey)
            if exchange.is_hop:
                extra += answers.hop_outcome(command.outcome, command.wait_ms)
            reply = answers.refusal(command.outcome, command.detail, retry_after_s=command.retry_after_s, extra=extra)
            exchange.reply(reply)
            status = reply.status
        self.tier.concluded(journey, command.outcome, status, attempt.usage if attempt is not None else None)

    def _break_off(self, journey: Journey, command: machine.Answer) -> None:
        """A stream to a client ends with an error event; towards the tier above it breaks, which then says so."""
        attempt = journey.attempt
        speaks = attempt is not None and attempt.streams and not journey.exchange.is_hop
        journey.exchange.break_off(answers.event_of(command.outcome, command.detail) if speaks else None)

    def _redirect(self, command: machine.Redirect) -> None:
        journey = self._live.get(command.id)
        if journey is None:
            return
        self._forget(journey)
        journey.exchange.reply(answers.redirect(command.url, command.outcome))
        self.tier.concluded(journey, command.outcome, 307, None)

    def _cancel(self, command: machine.Cancel) -> None:
        journey = self._live.get(command.id)
        if journey is not None and journey.attempt is not None and journey.attempt.number == command.attempt:
            journey.attempt.abort()

    def _set_timer(self, command: machine.SetTimer) -> None:
        journey = self._live.get(command.id)
        if journey is None:
            return
        if journey.timer is not None:
            journey.timer.cancel()
        delay = max(0.0, command.at - self.clock())
        journey.timer = self._loop.call_later(delay, self.react, machine.TimerFired(command.id))

    def _forget(self, journey: Journey) -> None:
        self._live.pop(journey.request.id, None)
        journey.exchange.journey = None
        if journey.timer is not None:
            journey.timer.cancel()
            journey.timer = None

    # -- upkeep

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.clock()
            for journey in tuple(self._live.values()):
                if journey.attempt is not None:
                    journey.attempt.check(now, self.pool.limits)
            self.pool.sweep(self._loop.time())

    async def close(self) -> None:
        """Stop the upkeep and close every upstream connection. Drain the listeners first."""
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.pool.close()
