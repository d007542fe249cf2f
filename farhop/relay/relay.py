"""The shell around a tier's state machine: turns what happens on connections into events, and commands into bytes.

Invariants: every ActiveRequest ends exactly once, by an answer, a broken stream or its client leaving; the machine gets
every transition of every request exactly once, in the order in which they came. Never chooses, never waits.
"""

from __future__ import annotations

import asyncio
import heapq
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec.structs import replace

from farhop.balance import machine, outcome
from farhop.balance.health.inquiry import ASKED_MAX
from farhop.balance.machine import Address
from farhop.relay import answers
from farhop.relay.active import ActiveRequest
from farhop.relay.formats.field_guard import engine_headers
from farhop.relay.http.head import RESUME
from farhop.relay.http.listener import SWEEP_S
from farhop.relay.upstream import orca
from farhop.relay.upstream.attempt import AttemptRun
from farhop.relay.upstream.concurrent_pair import ConcurrentPairRun
from farhop.relay.upstream.pair import DecodeRun, PrefillRun
from farhop.relay.upstream.resumable import ContinuedRun, carrier

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.bounds import ByteBudget
    from farhop.balance.machine import Command, Event, Flow, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import Attempt
    from farhop.relay.formats.transcript import AnswerChain
    from farhop.relay.http.exchange import Exchange
    from farhop.relay.upstream.pool import Pool
    from farhop.relay.upstream.resumable import Resumption

AttemptMaker: TypeAlias = "Callable[[Relay, ActiveRequest, int, float], AttemptRun]"
_last_activity_at = attrgetter("last_activity_at")
_EVENT_END = b"\n\n"
_ENDS_WITH_DECLINED = outcome.DECLINED | {outcome.NO_REGION, outcome.MODEL_NOT_SERVED}
_ALWAYS = b"accept-encoding: identity\r\nvia: 1.1 farhop\r\n"  # RFC 9110 §7.6.3: an intermediary adds itself


class Tier(Protocol):
    """What the relay needs from its tier, and reports to it."""

    def upstream_headers(self, active: ActiveRequest) -> bytes:
        """Header lines for the upstream: credentials, hop token, trace context."""

    def answer_headers(self, active: ActiveRequest) -> bytes:
        """Header lines for the client: region and decision."""

    def answer_tail(self, active: ActiveRequest) -> bytes:
        """What follows a stream's last event: SSE comments for the client, or nothing."""

    def redirect_url(self, active: ActiveRequest, base: str) -> str:
        """The URL at which the client asks the region of the request's `forward` itself, with the token that it needs
        there."""

    def forwarded(self, active: ActiveRequest) -> None:
        """An attempt was sent."""

    def attempt_over(self, active: ActiveRequest, attempt: Attempt, reason: Outcome) -> None:
        """An attempt has ended in any way; or its first half did, if no second one followed."""

    def concluded(self, active: ActiveRequest, reason: Outcome, status: int, usage: Usage | None) -> None:
        """The request is over. `status` is the one that the client got, 0 if none."""

    def replaced(self, active: ActiveRequest, attempt: Attempt, trace: str) -> None:
        """An engine's report of its failure is hidden from the client, and has to be logged; see AttemptOwner."""

    def salt_unknown(self, active: ActiveRequest, attempt: Attempt) -> None:
        """An engine takes no `cache_salt`, which has to be logged; see AttemptOwner."""

    def fault(self, active: ActiveRequest | None, error: Exception) -> None:
        """The machine itself failed: a bug, to be logged as an error."""


class Relay:
    """Drives one machine. `clock` gives monotonic seconds, the machine's `now`.

    The `budget` counts what answers hold.
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
        asks_load: bool = False,
        resumption: Resumption | None = None,
    ) -> None:
        """`asks_load`: engines are asked to report their load with each answer. `resumption`: streams can be continued
        elsewhere."""
        self.asks_load = asks_load
        self._name, self.flow, self._tier, self.pool, self.clock = name, flow, tier, pool, clock
        self.upstream_is_tier, self._budget = upstream_is_tier, budget
        self._loop = asyncio.get_running_loop()
        self.live: dict[str, ActiveRequest] = {}
        self._quiet: dict[Address, list[AttemptRun]] = {}  # attempts that the last sweep found silent
        self._broken_paths: set[Address] = set()  # upstreams to which the network path is broken, by other evidence
        self.unsalted_until: dict[Address, float] = {}  # see AttemptOwner
        self._news: list[tuple[Event, float]] = []  # events held until the bytes they came with are sent
        # For another model. Set afterwards: it is the ingress's, which starts requests on this relay.
        self.restart_with_model: Callable[[ActiveRequest, Request], None] | None = None
        self.resumption = resumption
        self._ending = False  # time is up, and nothing more is sent upstream
        self._sweeper = self._loop.call_later(SWEEP_S, self.sweep)
        self._perform: dict[type[Command], Callable[[ActiveRequest, Any, float], None]] = {
            machine.Forward: self._forward,
            machine.Resume: self._resume,
            machine.Hold: self._hold,
            machine.Answer: self._answer,
            machine.FallBack: self._fall_back,
            machine.Redirect: self._redirect,
            machine.Cancel: self._cancel,
            machine.Move: self._move,
            machine.Recall: self._recall,
            machine.SetTimer: self._set_timer,
        }

    @property
    def under_way(self) -> int:
        """How many requests are neither answered nor given up."""
        return len(self.live)

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: Any,
        arrived_at: float = 0.0,
        answer_chain: AnswerChain | None = None,
        geo: str = "",
        attempts: AttemptMaker = AttemptRun,
    ) -> None:
        """Take a request that was read whole and identified; `arrived_at` if that was not just now, `geo` what its
        answer's usage is to say again. `attempts` makes its attempts, where others than we carry its bytes."""
        now, progress = self.clock(), None
        asked = exchange.head.known.get(RESUME) if exchange.is_hop else None
        if self.resumption is not None and request.stream and attempts is AttemptRun:
            progress = self.resumption.of(exchange.head.path, body, request.tenant, request.model, asked)
            if progress is not None:
                attempts = self.resumption.attempt
        if asked is not None and (continues := carrier(asked)) is not None:
            request = replace(request, continues=continues)
        active = ActiveRequest(
            self, exchange, request, body, hide_usage, context, arrived_at or now, answer_chain, geo, attempts
        )
        active.progress = progress
        exchange.body = b""  # its request has it now, perhaps changed
        exchange.callbacks = self.live[request.id] = active
        if self._news:
            self._catch_up()
        self._react(machine.RequestArrived(request), now)

    def holds(self, request_id: str) -> bool:
        """Whether a request is here and has not been sent upstream yet."""
        active = self.live.get(request_id)
        return active is not None and active.forward is None

    def react(self, event: Event, now: float | None = None) -> None:
        """Let the machine decide, then act. `now`: what the clock says, if it was read just before."""
        if self._news:
            self._catch_up()
        self._react(event, self.clock() if now is None else now)

    def _catch_up(self) -> None:
        """Give the machine the events that it has not received yet."""
        news, self._news = self._news, []
        for event, now in news:
            self._react(event, now)

    def _react(self, event: Event, now: float) -> None:
        try:
            commands: list[Any] = self.flow.handle(event, now)  # every command names its request as `id`
        except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must not take the process or leak a trace
            name: str = event.request.id if isinstance(event, machine.RequestArrived) else getattr(event, "id", "")
            self.fault(self.live.get(name), error)
            return
        for command in commands:
            active = self.live.get(command.id)
            if active is None:
                continue
            try:
                self._perform[type(command)](active, command, now)
            except Exception as error:  # noqa: BLE001 - as above, and the commands after this one are other requests'
                self.fault(active, error)

    def fault(self, active: ActiveRequest | None, error: Exception) -> None:
        """The machine or the tier failed: answer the request plainly, and have the machine forget it."""
        self._tier.fault(active, error)
        if active is None or not active.exchange.is_open:
            return
        self._end_attempt(active, outcome.INTERNAL)
        known = self._forget(active)
        if active.exchange.started:
            active.exchange.break_off(None)
        else:
            detail = "the balancer failed on this request; it is logged"
            active.status = 500
            active.exchange.reply(answers.refusal(outcome.INTERNAL, detail))
        if known:
            self.react(machine.ClientLeft(active.request.id))
            self._conclude(active, outcome.INTERNAL)

    def _notify(self, active: ActiveRequest, hook: Callable[..., None], *arguments: Any) -> None:
        """Call the tier's bookkeeping; a failure there must not decide whether a request is served."""
        try:
            hook(active, *arguments)
        except Exception as error:  # noqa: BLE001 - see above; it is logged as loudly as the machine's own
            self._tier.fault(active, error)

    # -- what goes out

    def upstream_head(
        self, active: ActiveRequest, host: bytes, body_bytes: int, more: bytes = b"", target: bytes = b""
    ) -> bytes:
        """See AttemptOwner."""
        head = active.exchange.head
        lines = head.onward
        if not self.upstream_is_tier:  # of a client's header lines those that engines may see
            lines = engine_headers(lines)
            if self.asks_load:
                lines += orca.ASKING
        return b"%b %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n%b%b%b%b\r\n" % (
            head.method,
            target or head.target,
            host,
            body_bytes,
            _ALWAYS,
            lines,
            self._tier.upstream_headers(active),
            more,
        )

    def answer_head(self, active: ActiveRequest, upstream_timing: bytes) -> bytes:
        """See AttemptOwner: decision, region, and where the time went."""
        before_ms = (active.forwarded_at - active.arrived_at) * 1e3
        upstream_ms = (active.began_at - active.forwarded_at) * 1e3
        timing = b"server-timing: %b;dur=%.2f, %b-upstream;dur=%.2f" % (self._name, before_ms, self._name, upstream_ms)
        tail = b", " + upstream_timing + b"\r\n" if upstream_timing else b"\r\n"
        return self._tier.answer_headers(active) + timing + tail

    # -- what happened to an attempt

    def moved(self, attempt: AttemptRun, target: str, address: Address, passed: tuple[str, ...]) -> None:
        """The gateway could not connect to the chosen target (see machine.AttemptMoved)."""
        active = attempt.active
        if active.attempt is attempt and active.forward is not None:
            active.forward = replace(active.forward, target=target, address=address)
            attempt.target = target
            self.react(machine.AttemptMoved(active.request.id, attempt.number, target, passed))

    def began(self, attempt: AttemptRun, status: int, now: float) -> None:
        """The first byte is here. The client gets it before the machine gets the event: the event changes nothing for
        this request, and takes a tenth of a millisecond or more. For an answer that is already complete, the machine
        gets one event, at its end."""
        active = attempt.active
        active.began_at, active.status, active.streams = now, status, attempt.streams
        active.body = b""  # what has begun is never sent again
        if attempt.whole:
            return  # and its exchange is over presently
        active.exchange.release_body()
        if not self._news:
            self._loop.call_soon(self._catch_up)
        self._news.append((machine.AttemptBegan(active.request.id, attempt.number, status, attempt.load), now))

    def resumed(self, attempt: AttemptRun, status: int) -> None:
        """A broken stream continues: for its client nothing began again."""
        active = attempt.active
        assert self.resumption is not None  # it made the attempt
        self.resumption.outcomes["resumed", ""] += 1
        self.react(machine.AttemptBegan(active.request.id, attempt.number, status))

    def ended(self, attempt: AttemptRun, event: machine.AttemptEnded) -> None:
        """The answer is complete."""
        active = attempt.active
        if active.attempt is attempt:
            active.ended_at = now = active.began_at if attempt.whole else self.clock()
            reason = event.fault or (outcome.SERVED if event.status < 400 else outcome.of_answer(event.status))
            self._forget(active)
            # What was whole from its beginning has a length, and nothing may follow it.
            if attempt.streams and not attempt.whole and not active.exchange.is_hop:
                active.is_within_event = attempt.is_within_event
                self._notify(active, self._add_tail)
            active.exchange.finish()
            self._end_attempt(active, reason, event if attempt.whole else None)
            if self._news:
                self._catch_up()
            self._react(event, now)
            self._conclude(active, reason)

    def _add_tail(self, active: ActiveRequest) -> None:
        if tail := self._tier.answer_tail(active):
            active.exchange.write(_EVENT_END + tail if active.is_within_event else tail)

    def refused(self, attempt: AttemptRun, reason: Outcome, wait_ms: float | None) -> None:
        """The tier below refused the attempt."""
        if attempt.active.attempt is attempt:
            self._end_attempt(attempt.active, reason)
            self.react(machine.AttemptRefused(attempt.active.request.id, attempt.number, reason, wait_ms))

    def failed(self, attempt: AttemptRun, reason: Outcome) -> None:
        """The attempt broke."""
        if attempt.active.attempt is attempt:
            self._end_attempt(attempt.active, reason)
            attempt.active.needs_fresh |= reason is outcome.KEPT_CLOSED
            event = machine.AttemptFailed(attempt.active.request.id, attempt.number, reason)
            if attempt.resumable:
                event = replace(event, resumable=True, carried_by=attempt.carried_by)
            self.react(replace(event, target_lives=True) if attempt.target_lives else event)

    def replaced(self, attempt: AttemptRun, trace: str) -> None:
        """The engine's error answer was unfit for clients, and was replaced."""
        self._notify(attempt.active, self._tier.replaced, attempt, trace)

    def salt_unknown(self, attempt: AttemptRun) -> None:
        """The engine refused the request for its `cache_salt`."""
        self._notify(attempt.active, self._tier.salt_unknown, attempt)

    def prefilled(self, run: PrefillRun, kv_transfer_params: bytes) -> None:
        """The first half is done: send the second half to the replica that the machine chose, with the location of the
        KV cache."""
        active = run.active
        if active.attempt is not run:
            return
        self.react(machine.PrefillEnded(active.request.id, run.number))
        if active.attempt is run and active.forward is not None:
            attempt = active.attempt = DecodeRun(self, active, run.number, self.clock(), kv_transfer_params)
            attempt.start(active.forward.address)

    def prefill_over(self, run: Attempt) -> None:
        """The first half is done; the second was sent together with it."""
        if run.active.attempt is run:
            self.react(machine.PrefillEnded(run.active.request.id, run.number))

    def prefill_failed(self, run: Attempt, reason: Outcome) -> None:
        """The first half broke, or was refused. An answer that has begun goes on without it."""
        if run.active.attempt is run:
            if not run.began:
                self._end_attempt(run.active, reason)
            self.react(machine.PrefillFailed(run.active.request.id, run.number, reason))

    def client_left(self, active: ActiveRequest) -> None:
        """Cancel what runs upstream, and inform the machine."""
        if not self._forget(active):
            return
        self._end_attempt(active, outcome.CLIENT_LEFT)
        self.react(machine.ClientLeft(active.request.id))
        active.status = 0
        self._conclude(active, outcome.CLIENT_LEFT)

    def stopped(self, active: ActiveRequest) -> None:
        """The drain time is over: end the request with an answer or an error event that says so, and remove it from the
        state machine.
        """
        self._ending = True
        self._answer(
            active, machine.Answer(active.request.id, outcome.STOPPING, answers.STOPPING_DETAIL, 1.0), self.clock()
        )
        self.react(machine.ClientLeft(active.request.id))

    # -- what the machine wants done

    def _forward(self, active: ActiveRequest, command: machine.Forward, now: float) -> None:
        if self._ending:
            return  # what one that ended left free: but this one ends presently, too
        if active.attempt is not None:
            self._end_attempt(active, outcome.CLIENT_LEFT)  # one at a time: the one before loses its client
        active.forward, active.forwarded_at, active.reasons = command, now, command.reasons
        attempt: Attempt
        if command.prefill is None:
            attempt, address = active.attempts(self, active, command.attempt, now), command.address
        elif command.prefill.together:
            attempt, address = ConcurrentPairRun(self, active, command.attempt, now, command.prefill), command.address
        else:
            attempt = PrefillRun(self, active, command.attempt, command.prefill)
            address = command.prefill.address
        active.attempt = attempt
        try:
            self._tier.forwarded(active)
        except Exception as error:  # noqa: BLE001 - as in _notify, which each request would call
            self._tier.fault(active, error)
        attempt.start(address)

    def _resume(self, active: ActiveRequest, command: machine.Resume, now: float) -> None:
        """Continue a stream that broke."""
        progress, owner = active.progress, self.resumption
        if self._ending or progress is None or owner is None:
            return
        self._end_attempt(active, outcome.CLIENT_LEFT)
        active.forward, active.reasons = command, command.reasons
        if not progress.left(owner.context_of(progress, command.target, active.request.model)):
            self._end_at_limit(active, command)
            return
        attempt = active.attempt = ContinuedRun(self, active, command.attempt, now, owner)
        if active.paused:
            attempt.pause()  # a client's pause is signalled only once: a later attempt has to know of it
        self._notify(active, self._tier.forwarded)
        attempt.start(command.address)

    def _end_at_limit(self, active: ActiveRequest, command: machine.Resume) -> None:
        """End a stream that has all of its requested tokens, and lacks only the last event."""
        progress = active.progress
        assert progress is not None  # _resume looked
        active.exchange.write(progress.at_limit() + progress.end(sends_usage=not active.hide_usage))
        active.usage = progress.usage
        self._forget(active)
        active.exchange.finish()
        self.react(machine.AttemptEnded(active.request.id, command.attempt, active.status, progress.usage))
        self._conclude(active, outcome.of_answer(active.status))

    def _hold(self, active: ActiveRequest, _command: machine.Hold, now: float) -> None:
        if active.hold_from is None:
            active.hold_from = now

    def _answer(self, active: ActiveRequest, command: machine.Answer, _now: float) -> None:
        active.reasons = command.reasons or active.reasons
        extra = b"" if active.exchange.started else self._tier.answer_headers(active)
        self._end_attempt(active, command.outcome)
        self._forget(active)
        if active.exchange.started:
            # A stream to a client ends with an error event; towards the tier above it breaks, which then says so.
            event = None
            if active.streams and not active.exchange.is_hop:
                dialect = answers.dialect(active.exchange.head.path)
                event = answers.event_of(command.outcome, command.detail, dialect, active.next_number)
                event = _EVENT_END + event if active.is_within_event else event
            active.exchange.break_off(event)
        elif (
            (answer := active.declined) is not None
            and command.outcome in _ENDS_WITH_DECLINED
            and (answer.status != 404 or command.outcome is outcome.MODEL_NOT_SERVED)  # else others do serve it
        ):
            # The tier above, too, is to know it for the engine's.
            active.status = answer.status
            active.exchange.begin(answer.status, answer.head + extra, len(answer.body), answer.body)
            active.exchange.finish()
            self._conclude(active, outcome.of_answer(answer.status))
            return
        else:
            reply = answers.refusal(
                command.outcome,
                command.detail,
                retry_after_s=command.retry_after_s,
                extra=extra,
                wait_ms=command.wait_ms,
            )
            active.status = reply.status
            active.exchange.reply(reply)
        self._conclude(active, command.outcome)

    def _fall_back(self, active: ActiveRequest, command: machine.FallBack, _now: float) -> None:
        active.reasons = command.reasons
        assert self.restart_with_model is not None  # main set it where names stand for models
        self._forget(active)
        if active.progress is not None and self.resumption is not None:
            self.resumption.over(active.progress, outcome.NO_REGION)
        self.restart_with_model(active, command.request)

    def _redirect(self, active: ActiveRequest, command: machine.Redirect, _now: float) -> None:
        url, extra = command.url, b""
        if command.forward is not None:
            active.forward, active.reasons = command.forward, command.forward.reasons
            url, extra = self._tier.redirect_url(active, url), self._tier.answer_headers(active)
        elif command.own:
            url = self._tier.redirect_url(active, url)
        reply = answers.redirect(url, command.outcome, extra)
        self._end_attempt(active, command.outcome)
        self._forget(active)
        active.status = reply.status
        active.exchange.reply(reply)
        self._conclude(active, command.outcome)

    def _cancel(self, active: ActiveRequest, command: machine.Cancel, _now: float) -> None:
        if active.attempt is not None and active.attempt.number == command.attempt:
            self._end_attempt(active, outcome.CLIENT_LEFT)  # as the engine sees it

    def _move(self, active: ActiveRequest, command: machine.Move, _now: float) -> None:
        attempt, owner = active.attempt, self.resumption
        if owner is None or self._ending or not isinstance(attempt, AttemptRun) or attempt.number != command.attempt:
            return
        if attempt.began and attempt.resumable:
            owner.outcomes["moved", ""] += 1
            self.failed(attempt, outcome.STOPPING)

    def _recall(self, active: ActiveRequest, command: machine.Recall, _now: float) -> None:
        if active.attempt is not None and active.attempt.number == command.attempt:
            active.attempt.recall()

    def _set_timer(self, active: ActiveRequest, command: machine.SetTimer, now: float) -> None:
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        active.due = command.at
        if command.at - now <= SWEEP_S:  # as in _arm
            active.timer = self._loop.call_later(max(0.0, command.at - now), self._fire, active)

    def _arm(self, active: ActiveRequest, now: float) -> None:
        """Set the request's timer. Most are deadlines that never fire, so only one due before the next sweep gets a
        loop handle."""
        delay_s = active.due - now
        if delay_s <= SWEEP_S and active.timer is None:
            active.timer = self._loop.call_later(max(0.0, delay_s), self._fire, active)

    def _fire(self, active: ActiveRequest) -> None:
        active.timer, active.due = None, inf
        self.react(machine.TimerFired(active.request.id))

    # -- upstreams that can be asked

    def channel(self, address: Address, up: bool) -> None:
        """Another connection to this upstream broke, or works again: ours may be dead without notice."""
        if up:
            self._broken_paths.discard(address)
            return
        self._broken_paths.add(address)
        self.pool.give_up(address)
        for active in self.live.values():
            attempt, forward = active.attempt, active.forward
            if isinstance(attempt, AttemptRun) and forward is not None and forward.address == address:
                attempt.inquiry.path_broke = True

    def path_is_broken(self, attempt: AttemptRun) -> bool:
        """Whether the connection to the attempt's upstream is known to be broken now."""
        forward = attempt.active.forward
        return bool(self._broken_paths) and forward is not None and forward.address in self._broken_paths

    def quiet(self, address: Address) -> list[AttemptRun]:
        """The attempts at an upstream to inquire about, the longest silent first; at most ASKED_MAX."""
        now = self.clock()
        quiet = [run for run in self._quiet.get(address, ()) if run.active.attempt is run and run.is_quiet(now)]
        return heapq.nsmallest(ASKED_MAX, quiet, key=_last_activity_at)

    def in_use(self, address: Address, within_s: float) -> bool:
        """Whether requests are in progress at this upstream, or were within the last `within_s` seconds."""
        return self.pool.in_use(address, within_s)

    # -- endings

    def _end_attempt(self, active: ActiveRequest, reason: Outcome, ended: machine.AttemptEnded | None = None) -> None:
        """End the attempt under way, if any: stop it, keep the usage that it reported, and record it once. `ended`: its
        answer came in one piece and is complete, so there is nothing to stop, and its usage is known already."""
        attempt, active.attempt = active.attempt, None
        if attempt is not None:
            if ended is None:
                attempt.abort()
                active.usage = attempt.usage
                if isinstance(attempt, AttemptRun):
                    active.is_within_event, active.next_number = attempt.is_within_event, attempt.next_number
                else:
                    active.is_within_event = False
            else:
                active.usage = ended.usage
            try:
                self._tier.attempt_over(active, attempt, reason)
            except Exception as error:  # noqa: BLE001 - as in _notify, which each request would call
                self._tier.fault(active, error)

    def _forget(self, active: ActiveRequest) -> bool:
        """Forget the request; returns whether it was still under way."""
        active.exchange.callbacks = None
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        return self.live.pop(active.request.id, None) is not None

    def _conclude(self, active: ActiveRequest, reason: Outcome) -> None:
        if active.progress is not None and self.resumption is not None:
            self.resumption.over(active.progress, reason)
        try:
            self._tier.concluded(active, reason, active.status, active.usage)
        except Exception as error:  # noqa: BLE001 - as in _notify, which each request would call
            self._tier.fault(active, error)

    # -- upkeep

    def sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self.sweep)
        now, held_bytes, quiet = self.clock(), 0, dict[Address, list[AttemptRun]]()
        for active in tuple(self.live.values()):
            self._arm(active, now)
            attempt = active.attempt
            if attempt is None:
                continue
            held_bytes += attempt.held_bytes + active.exchange.unsent_bytes
            attempt.check(now)
            if self.upstream_is_tier and isinstance(attempt, AttemptRun) and attempt.is_quiet(now):
                assert active.forward is not None  # it is where the attempt went
                quiet.setdefault(active.forward.address, []).append(attempt)
        self._quiet = quiet
        if self._budget is not None:
            self._budget.note(held_bytes)  # of answers: small for each, so that looking now and then is enough
        self.pool.sweep(self._loop.time())

    async def close(self) -> None:
        """Stop the upkeep and close every upstream connection. Drain the listeners first."""
        self._sweeper.cancel()
        await self.pool.close()
