"""The shell around a tier's machine: turns what happens on the wire into events, and commands into bytes.

It holds one Journey per request under way. Invariants: every Journey ends exactly once, by an answer, a broken stream
or its client leaving; the machine hears of every edge of every request exactly once. Never chooses, never waits.
"""

from __future__ import annotations

import asyncio
import heapq
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from farhop.balance import machine, outcome
from farhop.balance.inquiry import ASKED_MAX
from farhop.balance.machine import Address
from farhop.relay import answers
from farhop.relay.attempt import AttemptRun
from farhop.relay.guard import engine_headers
from farhop.relay.listener import SWEEP_S
from farhop.relay.pair import DecodeRun, PrefillRun
from farhop.relay.together import TogetherRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.limits import ByteBudget
    from farhop.balance.machine import Command, Event, Flow, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.inbound import Exchange
    from farhop.relay.outbound import Pool
    from farhop.relay.transcript import Continuation

_heard_at = attrgetter("heard_at")
_ALWAYS = b"accept-encoding: identity\r\nvia: 1.1 farhop\r\n"  # RFC 9110 §7.6.3: who passes a request on says so


class Tier(Protocol):
    """What the relay asks of the tier it carries for, and tells it."""

    def upstream_headers(self, journey: Journey) -> bytes:
        """Header lines for the upstream: credentials, hop token, trace context."""

    def answer_headers(self, journey: Journey) -> bytes:
        """Header lines for the client: region and decision."""

    def redirect_url(self, journey: Journey, base: str) -> str:
        """Where the client asks the region of the journey's `forward` itself, with the token it needs there."""

    def forwarded(self, journey: Journey) -> None:
        """An attempt is on its way."""

    def attempt_over(self, journey: Journey, attempt: AttemptRun | PrefillRun, reason: Outcome) -> None:
        """An attempt ended, however; or its first half, if there was no second."""

    def concluded(self, journey: Journey, reason: Outcome, status: int, usage: Usage | None) -> None:
        """The request is over. `status` is what the client saw, 0 if nothing."""

    def fault(self, journey: Journey | None, error: Exception) -> None:
        """The machine itself failed: a bug, to be logged loudly."""


class Journey:
    """One request under way. `context` belongs to the tier. With a `continuation` its answer is listened to."""

    __slots__ = (
        "_relay",
        "arrived_at",
        "attempt",
        "began_at",
        "body",
        "context",
        "continuation",
        "due",
        "exchange",
        "forward",
        "forwarded_at",
        "hide_usage",
        "hold_from",
        "reasons",
        "request",
        "status",
        "streams",
        "timer",
        "usage",
    )

    def __init__(
        self, relay: Relay, exchange: Exchange, request: Request, body: bytes, hide_usage: bool, context: Any,
        arrived_at: float, continuation: Continuation | None,
    ) -> None:  # fmt: skip
        self._relay, self.exchange, self.request, self.body = relay, exchange, request, body
        self.hide_usage, self.context, self.continuation = hide_usage, context, continuation
        self.attempt: AttemptRun | PrefillRun | None = None
        self.forward: machine.Forward | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.due = inf  # when the machine wants to hear of it
        self.arrived_at = arrived_at
        self.forwarded_at = self.began_at = 0.0
        self.hold_from: float | None = None
        self.reasons: Any = None  # the machine's last decision on it
        self.status = 0  # of the answer that began
        self.streams = False  # whether that is a stream of events, which can end with an error event
        self.usage: Usage | None = None

    def client_left(self) -> None:
        """The exchange's connection is gone."""
        self._relay.client_left(self)

    def stopped(self) -> None:
        """The listener stops, and time is up."""
        self._relay.stopped(self)

    def pause(self) -> None:
        """The client is behind."""
        if self.attempt is not None:
            self.attempt.pause()

    def resume(self) -> None:
        """The client caught up."""
        if self.attempt is not None:
            self.attempt.resume()

    def upstream_head(self, host: bytes, body_bytes: int, more: bytes = b"") -> bytes:
        """The request's head as the upstream gets it. `host` is its `Host` header's value; `more`: further lines."""
        head = self.exchange.head
        return b"%b %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n%b%b%b%b\r\n" % (
            head.method,
            head.target,
            host,
            body_bytes,
            _ALWAYS,
            head.onward if self._relay.upstream_is_tier else engine_headers(head.onward),
            self._relay.tier.upstream_headers(self),
            more,
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
    """Drives one machine. `clock` gives monotonic seconds, the machine's `now`.

    The `budget` is told what answers hold.
    """

    def __init__(
        self,
        name: bytes,
        flow: Flow,
        tier: Tier,
        pool: Pool,
        clock: Callable[[], float],
        *,
        upstream_is_tier: bool,
        budget: ByteBudget | None = None,
    ) -> None:
        self.name, self._flow, self.tier, self.pool, self.clock = name, flow, tier, pool, clock
        self.upstream_is_tier, self._budget = upstream_is_tier, budget
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, Journey] = {}
        self._quiet: dict[Address, list[AttemptRun]] = {}  # attempts that the last sweep found silent
        self._dark: set[Address] = set()  # upstreams to which the way is broken, by other evidence
        self._ending = False  # time is up, and nothing more is sent upstream
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._perform: dict[type[Command], Callable[[Journey, Any, float], None]] = {
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

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: Any,
        arrived_at: float = 0.0,
        continuation: Continuation | None = None,
    ) -> None:
        """Take a request that was read whole and identified; `arrived_at` if that was not just now."""
        now = self.clock()
        journey = Journey(self, exchange, request, body, hide_usage, context, arrived_at or now, continuation)
        exchange.body = b""  # the journey has it, perhaps changed
        exchange.journey = self._live[request.id] = journey
        self.react(machine.RequestArrived(request), now)

    def react(self, event: Event, now: float | None = None) -> None:
        """Let the machine decide, then act. `now`: what the clock says, if it was read just before."""
        now = self.clock() if now is None else now
        try:
            commands: list[Any] = self._flow.handle(event, now)  # every command names its request as `id`
        except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must not take the process or leak a trace
            name: str = event.request.id if isinstance(event, machine.RequestArrived) else getattr(event, "id", "")
            self.fault(self._live.get(name), error)
            return
        for command in commands:
            journey = self._live.get(command.id)
            if journey is None:
                continue
            try:
                self._perform[type(command)](journey, command, now)
            except Exception as error:  # noqa: BLE001 - as above, and the commands after this one are other requests'
                self.fault(journey, error)

    def fault(self, journey: Journey | None, error: Exception) -> None:
        """The machine or the tier failed: answer the request plainly, and have the machine forget it."""
        self.tier.fault(journey, error)
        if journey is None or not journey.exchange.is_open:
            return
        self._end_attempt(journey, outcome.INTERNAL)
        known = self._forget(journey)
        if journey.exchange.started:
            journey.exchange.break_off(None)
        else:
            detail = "the balancer failed on this request; it is logged"
            journey.status = 500
            journey.exchange.reply(answers.refusal(outcome.INTERNAL, detail))
        if known:
            self.react(machine.ClientLeft(journey.request.id))
            self._conclude(journey, outcome.INTERNAL)

    def _tell(self, journey: Journey, hook: Callable[..., None], *said: Any) -> None:
        """What the tier notes down must not decide whether a request is served."""
        try:
            hook(journey, *said)
        except Exception as error:  # noqa: BLE001 - see above; it is logged as loudly as the machine's own
            self.tier.fault(journey, error)

    # -- what happened to an attempt

    def began(self, attempt: AttemptRun, status: int) -> bool:
        """The first byte is here. False if it is no longer wanted."""
        journey, now = attempt.journey, self.clock()
        journey.began_at, journey.status, journey.streams = now, status, attempt.streams
        journey.body = b""  # what has begun is never sent again
        journey.exchange.let_go()
        self.react(machine.AttemptBegan(journey.request.id, attempt.number, status), now)
        return journey.attempt is attempt

    def ended(self, attempt: AttemptRun, event: machine.AttemptEnded) -> None:
        """The answer is whole."""
        journey = attempt.journey
        if journey.attempt is attempt:
            reason = event.fault or (outcome.SERVED if event.status < 400 else outcome.ENGINE_ERROR)
            self._forget(journey)
            journey.exchange.finish()
            self._end_attempt(journey, reason)
            self.react(event)
            self._conclude(journey, reason)

    def refused(self, attempt: AttemptRun, reason: Outcome, wait_ms: float | None) -> None:
        """The tier below said no."""
        if attempt.journey.attempt is attempt:
            self._end_attempt(attempt.journey, reason)
            self.react(machine.AttemptRefused(attempt.journey.request.id, attempt.number, reason, wait_ms))

    def failed(self, attempt: AttemptRun, reason: Outcome) -> None:
        """The attempt broke."""
        if attempt.journey.attempt is attempt:
            self._end_attempt(attempt.journey, reason)
            self.react(machine.AttemptFailed(attempt.journey.request.id, attempt.number, reason))

    def prefilled(self, run: PrefillRun, where: bytes) -> None:
        """The first half is done: the second goes where the machine said, and tells the engine where the KV is."""
        journey = run.journey
        if journey.attempt is not run:
            return
        self.react(machine.PrefillEnded(journey.request.id, run.number))
        if journey.attempt is run and journey.forward is not None:
            attempt = journey.attempt = DecodeRun(self, journey, run.number, self.clock(), where)
            attempt.start(journey.forward.address)

    def prefill_over(self, run: TogetherRun) -> None:
        """The first half is done, and the second was asked with it."""
        if run.journey.attempt is run:
            self.react(machine.PrefillEnded(run.journey.request.id, run.number))

    def prefill_failed(self, run: PrefillRun | TogetherRun, reason: Outcome) -> None:
        """The first half broke, or was refused. An answer that has begun goes on without it."""
        if run.journey.attempt is run:
            if not run.began:
                self._end_attempt(run.journey, reason)
            self.react(machine.PrefillFailed(run.journey.request.id, run.number, reason))

    def client_left(self, journey: Journey) -> None:
        """Cancel what runs upstream, and tell the machine."""
        if not self._forget(journey):
            return
        self._end_attempt(journey, outcome.CLIENT_LEFT)
        self.react(machine.ClientLeft(journey.request.id))
        journey.status = 0
        self._conclude(journey, outcome.CLIENT_LEFT)

    def stopped(self, journey: Journey) -> None:
        """Our time is up: end it with an answer or an error event that says so, and have the machine forget it."""
        self._ending = True
        self._answer(
            journey, machine.Answer(journey.request.id, outcome.STOPPING, answers.STOPPING_DETAIL, 1.0), self.clock()
        )
        self.react(machine.ClientLeft(journey.request.id))

    # -- what the machine wants done

    def _forward(self, journey: Journey, command: machine.Forward, now: float) -> None:
        if self._ending:
            return  # what one that ended left free: but this one ends presently, too
        self._end_attempt(journey, outcome.CLIENT_LEFT)  # one at a time: the one before, if it runs, loses its client
        journey.forward, journey.forwarded_at, journey.reasons = command, now, command.reasons
        if command.prefill is not None and command.prefill.together:
            both = journey.attempt = TogetherRun(self, journey, command.attempt, now, command.prefill)
            self._tell(journey, self.tier.forwarded)
            both.start(command.address)
            return
        if command.prefill is not None:
            half = journey.attempt = PrefillRun(self, journey, command.attempt, command.prefill)
            self._tell(journey, self.tier.forwarded)
            half.start(command.prefill.address)
            return
        attempt = journey.attempt = AttemptRun(self, journey, command.attempt, now)
        self._tell(journey, self.tier.forwarded)
        attempt.start(command.address)

    def _hold(self, journey: Journey, _command: machine.Hold, now: float) -> None:
        if journey.hold_from is None:
            journey.hold_from = now

    def _answer(self, journey: Journey, command: machine.Answer, _now: float) -> None:
        journey.reasons = command.reasons or journey.reasons
        extra = b"" if journey.exchange.started else self.tier.answer_headers(journey)
        self._end_attempt(journey, command.outcome)
        self._forget(journey)
        if journey.exchange.started:
            # A stream to a client ends with an error event; towards the tier above it breaks, which then says so.
            speaks = journey.streams and not journey.exchange.is_hop
            journey.exchange.break_off(answers.event_of(command.outcome, command.detail) if speaks else None)
        else:
            reply = answers.refusal(
                command.outcome,
                command.detail,
                retry_after_s=command.retry_after_s,
                extra=extra,
                wait_ms=command.wait_ms,
            )
            journey.status = reply.status
            journey.exchange.reply(reply)
        self._conclude(journey, command.outcome)

    def _redirect(self, journey: Journey, command: machine.Redirect, _now: float) -> None:
        url, extra = command.url, b""
        if command.forward is not None:
            journey.forward, journey.reasons = command.forward, command.forward.reasons
            url, extra = self.tier.redirect_url(journey, url), self.tier.answer_headers(journey)
        reply = answers.redirect(url, command.outcome, extra)
        self._end_attempt(journey, command.outcome)
        self._forget(journey)
        journey.status = reply.status
        journey.exchange.reply(reply)
        self._conclude(journey, command.outcome)

    def _cancel(self, journey: Journey, command: machine.Cancel, _now: float) -> None:
        if journey.attempt is not None and journey.attempt.number == command.attempt:
            self._end_attempt(journey, outcome.CLIENT_LEFT)  # as the engine sees it

    def _set_timer(self, journey: Journey, command: machine.SetTimer, now: float) -> None:
        if journey.timer is not None:
            journey.timer.cancel()
            journey.timer = None
        journey.due = command.at
        self._arm(journey, now)

    def _arm(self, journey: Journey, now: float) -> None:
        """Most timers are deadlines that never fire: only one due before the sweep comes by again gets a handle."""
        delay_s = journey.due - now
        if delay_s <= SWEEP_S and journey.timer is None:
            journey.timer = self._loop.call_later(max(0.0, delay_s), self._fire, journey)

    def _fire(self, journey: Journey) -> None:
        journey.timer, journey.due = None, inf
        self.react(machine.TimerFired(journey.request.id))

    # -- upstreams that can be asked

    def channel(self, address: Address, up: bool) -> None:
        """Another connection to this upstream broke, or works again: ours may be dead without a word."""
        if up:
            self._dark.discard(address)
            return
        self._dark.add(address)
        self.pool.give_up(address)
        for journey in self._live.values():
            attempt, forward = journey.attempt, journey.forward
            if isinstance(attempt, AttemptRun) and forward is not None and forward.address == address:
                attempt.inquiry.doubted = True

    def is_dark(self, attempt: AttemptRun) -> bool:
        """Whether the way to its upstream is broken now."""
        forward = attempt.journey.forward
        return bool(self._dark) and forward is not None and forward.address in self._dark

    def quiet(self, address: Address) -> list[AttemptRun]:
        """Attempts there to ask about, the longest silent first; at most ASKED_MAX."""
        now = self.clock()
        quiet = [run for run in self._quiet.get(address, ()) if run.journey.attempt is run and run.is_quiet(now)]
        return heapq.nsmallest(ASKED_MAX, quiet, key=_heard_at)

    # -- endings

    def _end_attempt(self, journey: Journey, reason: Outcome) -> None:
        """The attempt under way, if any, is over: stop it, keep what it said, and note it once."""
        attempt, journey.attempt = journey.attempt, None
        if attempt is not None:
            attempt.abort()
            journey.usage = attempt.usage
            self._tell(journey, self.tier.attempt_over, attempt, reason)

    def _forget(self, journey: Journey) -> bool:
        """Whether it was still under way."""
        journey.exchange.journey = None
        if journey.timer is not None:
            journey.timer.cancel()
            journey.timer = None
        return self._live.pop(journey.request.id, None) is not None

    def _conclude(self, journey: Journey, reason: Outcome) -> None:
        self._tell(journey, self.tier.concluded, reason, journey.status, journey.usage)

    # -- upkeep

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        now, held_bytes, quiet = self.clock(), 0, dict[Address, list[AttemptRun]]()
        for journey in tuple(self._live.values()):
            self._arm(journey, now)
            attempt = journey.attempt
            if attempt is None:
                continue
            held_bytes += attempt.held_bytes + journey.exchange.unsent_bytes
            attempt.check(now, self.pool.limits)
            if self.upstream_is_tier and isinstance(attempt, AttemptRun) and attempt.is_quiet(now):
                assert journey.forward is not None  # it is where the attempt went
                quiet.setdefault(journey.forward.address, []).append(attempt)
        self._quiet = quiet
        if self._budget is not None:
            self._budget.note(held_bytes)  # of answers: small for each, so that looking now and then is enough
        self.pool.sweep(self._loop.time())

    async def close(self) -> None:
        """Stop the upkeep and close every upstream connection. Drain the listeners first."""
        self._sweeper.cancel()
        await self.pool.close()
