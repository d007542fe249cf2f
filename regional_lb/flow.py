"""The regional tier's machine: admission -> queue -> policy -> pick, and what follows when things break.

Invariants: a request holds at most one reservation, from its Forward until its attempt is over; it is in the queue or
holds a reservation or is being concluded, never two of them; every request that arrives is concluded exactly once, by
an Answer, by its attempt's end or by its client leaving; nothing is forwarded that is not lawful here at that moment.
Never awaits, never opens anything, never sees a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance import machine, outcome, retry
from farhop.balance.estimate import Estimates
from farhop.balance.health import HealthConfig
from farhop.balance.ledger import Reservation
from farhop.balance.outcome import Source
from regional_lb import admission
from regional_lb.fleet import Fleet
from regional_lb.kv_words import TOKEN_BYTES
from regional_lb.live import Live
from regional_lb.outlook import Outlook
from regional_lb.policy import Policies, PoliciesChanged
from regional_lb.queue import WaitingRoom
from regional_lb.shares import Shares
from regional_lb.split import Splits, SplitsChanged
from regional_lb.view import ViewSwapped, model_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Answer, Command, Event, Usage
    from farhop.balance.outcome import Outcome
    from regional_lb.table import Subset, Table
    from topology.law import Law

    AttemptEvent = machine.AttemptBegan | machine.AttemptEnded | machine.AttemptFailed | machine.AttemptRefused

K_WAITING = 8  # how many of the first in line are compared for the best prefix when a slot frees
RETRY_AFTER_S = 1.0


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one region's balancer. `instance` is its name among those with whom it shares replicas; "": alone."""

    region: str
    instance: str = ""
    queue_requests_max: int = 1024
    queue_tokens_max: int = 4_000_000
    queue_wait_s: float = 30.0
    starvation_s: float = 10.0
    health: HealthConfig = HealthConfig()
    foreign: admission.Foreign = admission.Foreign()


class RegionalFlow:
    """See the module's head. `weight_of` gives a tenant's share of its band."""

    def __init__(
        self,
        config: FlowConfig,
        law: Law,
        rng: Random,
        weight_of: Callable[[str], float],
        policies: Policies | None = None,
        splits: Splits | None = None,
    ) -> None:
        self.config, self.law, self._rng, self._weight_of = config, law, rng, weight_of
        self.policies, self.splits = policies or Policies(), splits or Splits()
        self.estimates = Estimates()
        self.shares = Shares(config.instance) if config.instance else None
        self._fleet = Fleet(config.health, self.estimates, self.shares)
        self.view, self.health = self._fleet.view, self._fleet.health
        self.speeds, self.trie, self.journal = self._fleet.speeds, self._fleet.trie, self._fleet.journal
        self.ledger, self.standing = self._fleet.ledger, self._fleet.standing
        self.blocks, self.adapters = self._fleet.blocks, self._fleet.adapters
        self.queue = WaitingRoom(config.queue_requests_max, config.queue_tokens_max, config.starvation_s)
        self.outlook = Outlook(config.region, config.foreign, self._fleet, self.queue, self.policies, self.splits, rng)
        self.accepted_bytes: dict[str, float] = {}
        self.predicted_tokens = self.actual_tokens = 0.0
        self._budget = retry.RetryBudget()
        self._live: dict[str, Live] = {}
        self._handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptFailed: self._failed,
            machine.AttemptRefused: self._failed,  # an engine is no tier; should one say so, it did not answer
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            ViewSwapped: self._view_swapped,
            PoliciesChanged: self._policies_changed,
            SplitsChanged: self._splits_changed,
            **dict.fromkeys(self._fleet.hears, self._heard),
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event in, commands out."""
        return self._handlers[type(event)](event, now)

    @property
    def miscounts(self) -> int:
        """Prompts of which an engine counted other tokens than the tokenizer here."""
        return self._fleet.miscounts

    @property
    def under_way(self) -> int:
        """Requests that are neither answered nor given up."""
        return len(self._live)

    # -- a request's edges

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if request.issuer:
            # Whatever becomes of it: the sender reckons with everything that reached us (farhop.balance.reckoning).
            self.accepted_bytes[request.issuer] = self.accepted_bytes.get(request.issuer, 0.0) + request.prompt_bytes
        if request.id in self._live:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        refusal = admission.refusal(request, self.config.region, self.law, self.view, now)
        if refusal is not None:
            return [machine.Answer(request.id, refusal.outcome, refusal.detail)]
        live = self._live[request.id] = Live(request, self.outlook.need_of(request), request.model)
        self._budget.began()
        if self.splits.by_model:
            self._assign(live)
        turned = self.outlook.turned_away(request, live.need, now, live.line)
        if turned is not None:
            return [self._refuse(live, turned.outcome, turned.detail, now)]
        placed = self._place(live, now) if self.queue.waiting(live.line) == 0 else []
        return placed or self._hold(live, now)

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None or live.started:
            return []
        live.started = True
        self.ledger.began(event.id)
        self._fleet.answered(live.replica, event.status, now)
        if event.status < 400:
            self._fleet.caches(live.replica, live.request.chain, admission.hints(live.request, self.law))
            if live.pick is not None:
                live.pick.policy.answered(live.replica, (now - live.forwarded_at) * 1e3, now)
            if live.request.stream and live.chosen is not None:
                live.prefilled_at = now
                chosen, elapsed_ms = live.chosen, (now - live.forwarded_at) * 1e3
                ahead_tokens = chosen.backlog_tokens + chosen.uncached_tokens
                if chosen.delay_ms:
                    self._fleet.loaded(elapsed_ms - ahead_tokens * chosen.prefill_ms_per_token)
                else:
                    self._fleet.prefilled(live.replica, elapsed_ms, ahead_tokens, now)
        return self._fill(live.replica, now)

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        held = self.ledger.held(event.id)
        self._over(live)
        if event.fault is not None:
            self._fleet.broke(live.replica, event.fault, now, began_well=event.status < 500)
        if event.fault is not None or event.status >= 500:
            self._fleet.lingers(held, live.forwarded_at, now)
        if event.status < 400 and event.usage is not None:
            self._learn(live, event.usage, now)
        return self._fill(live.replica, now)

    def _failed(self, event: machine.AttemptFailed | machine.AttemptRefused, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        failed = live.replica
        self._fleet.failed(failed, event.outcome, now)
        held = self.ledger.held(event.id)
        if live.started:
            self._over(live)
            self._fleet.lingers(held, live.forwarded_at, now, event.outcome)
            broken = machine.Answer(event.id, event.outcome, "the replica failed while answering")
            return [broken, *self._fill(failed, now)]
        self.ledger.release(event.id)
        self._fleet.lingers(held, live.forwarded_at, now, event.outcome)
        live.replica = ""
        return [*self._elsewhere(live, failed, event.outcome, now), *self._fill(failed, now)]

    def _client_left(self, event: machine.ClientLeft, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        self._over(live)
        return self._fill(live.replica, now)

    def _timer_fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        if now < live.due:
            return [machine.SetTimer(event.id, live.due)]  # timers may fire a little early
        if now >= live.request.deadline:
            answer = self._refuse(live, outcome.DEADLINE, "the request's deadline passed", now)
            return [answer, *self._fill(live.replica, now)]
        if not live.replica:
            return [self._refuse(live, outcome.QUEUE_TIMEOUT, "no replica had room in time", now)]
        # An answer in one piece does not show when its prefill was over: it is over when it was due.
        self.ledger.began(event.id)
        return [self._timer(live, live.request.deadline), *self._fill(live.replica, now)]

    def _under_way(self, event: AttemptEvent) -> Live | None:
        """The request if this very attempt of it is under way: what is said of an earlier one is no news."""
        live = self._live.get(event.id)
        return live if live is not None and live.replica and live.attempts == event.attempt else None

    def _timer(self, live: Live, at: float) -> Command:
        live.due = at
        return machine.SetTimer(live.request.id, at)

    # -- the world's edges

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        self.view = self._fleet.adopt(event.view)
        self.policies.adopt(self._fleet.whole.of.names)
        return self._fill_all(now)

    def _policies_changed(self, event: PoliciesChanged, now: float) -> list[Command]:
        self.policies.override(event.choices)
        return self._fill_all(now)

    def _splits_changed(self, event: SplitsChanged, now: float) -> list[Command]:
        changed = self.splits.override(event.splits)
        concerned = [live for live in self._live.values() if live.request.model in changed]
        for live in concerned:
            self._assign(live)
        self.queue.reline({live.request.id: live.line for live in concerned})
        return self._fill_all(now)

    def _assign(self, live: Live) -> None:
        """Find out what it is for. What is under way is not disturbed: it counts when it is placed anew."""
        live.assigned = assigned = self.outlook.assign(live.request)
        live.line = live.request.model if assigned is None else assigned.line

    def _heard(self, event: Event, now: float) -> list[Command]:
        replica = self._fleet.hear(event, now)
        commands = self._given_up(now) if self._fleet.silent else []
        return commands + (self._fill(replica, now) if replica is not None else self._fill_all(now))

    def _given_up(self, now: float) -> list[Command]:
        """What probes gave up has swallowed what it was sent and never began: others are asked, if there are any."""
        commands: list[Command] = []
        silent, self._fleet.silent = self._fleet.silent, []
        for live in list(self._live.values()):
            request, reason = live.request, outcome.FIRST_BYTE_TIMEOUT
            if live.replica not in silent or live.started or request.id not in self._live:
                continue
            if not self.outlook.serving(live.line, now, (live.replica, *live.tried)):
                continue  # it may yet answer
            if retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
                cancel = machine.Cancel(request.id, live.attempts)
                commands += [cancel, *self._failed(machine.AttemptFailed(request.id, live.attempts, reason), now)]
        return commands

    # -- placing

    def _place(self, live: Live, now: float, aside: tuple[str, ...] = ()) -> list[Command]:
        """Forward the request if some replica but those `aside` has room; [] otherwise."""
        request = live.request
        if live.tried and not self.outlook.serving(live.line, now, live.tried):
            live.tried = ()  # better the same replica again than none
        choice = self.outlook.consider(request, live.need, now, live.tried, aside, live.assigned)
        if choice is None or choice.chosen is None:
            return []
        chosen = choice.chosen
        if not self._fleet.admit(chosen.replica, now):
            return []
        live.attempts += 1
        live.replica, live.forwarded_at, live.pick = chosen.replica, now, choice
        choice.policy.placed(chosen.replica, self._fleet.whole)
        uncached = int(chosen.uncached_tokens)
        self.ledger.reserve(request.id, Reservation(chosen.replica, uncached, uncached + int(live.need.output_tokens)))
        self._fleet.adapters.sent(chosen.replica, request.model)
        prefill_ms = (chosen.backlog_tokens + chosen.uncached_tokens) * chosen.prefill_ms_per_token + chosen.delay_ms
        live.prefilled_at = now + prefill_ms / 1e3
        address = self.view.replicas[chosen.replica].address
        return [
            self._timer(live, request.deadline if request.stream else min(request.deadline, live.prefilled_at)),
            machine.Forward(request.id, live.attempts, chosen.replica, address, prefill_ms, reasons=choice),
        ]

    def _hold(self, live: Live, now: float) -> list[Command]:
        request, tokens = live.request, live.need.prompt_tokens
        if not self.outlook.serving(live.line, now):
            return [self._refuse(live, outcome.NO_REPLICA, _nobody(live), now)]
        if self.outlook.hopeless(live, self.config.queue_wait_s, now):
            return [self._refuse(live, outcome.QUEUE_FULL, "the region's queue is too long for it to wait", now)]
        commands: list[Command] = []
        if not self.queue.fits(tokens):
            victim = self.queue.victim(request.priority, tokens)
            if victim is None:
                return [self._refuse(live, outcome.QUEUE_FULL, "the region's queue is full", now)]
            detail = "the region's queue is full, and others go first"
            commands.append(self._refuse(self._live[victim.id], outcome.QUEUE_FULL, detail, now))
        self.queue.push(
            request.id, live.line, request.tenant, self._weight_of(request.tenant), request.priority, tokens, now
        )
        commands += [machine.Hold(request.id), self._timer(live, min(request.deadline, now + self.config.queue_wait_s))]
        # Alone in its line it was just tried; before others it may be due, and among them the one that fits.
        return commands + self._fill_line(live.line, now) if self.queue.waiting(live.line) > 1 else commands

    def _fill(self, replica: str, now: float) -> list[Command]:
        """Give what was freed at a replica to those who wait for what it serves."""
        if not len(self.queue) or replica not in self.view.replicas:
            return []
        serves = self.view.replicas[replica].models
        return [c for line in self.queue.models() if model_of(line) in serves for c in self._fill_line(line, now)]

    def _fill_all(self, now: float) -> list[Command]:
        return [c for line in self.queue.models() for c in self._fill_line(line, now)]

    def _fill_line(self, line: str, now: float) -> list[Command]:
        """Let go as many as there is room for, or all of them if nobody is there to serve."""
        commands: list[Command] = []
        while waiting := self.queue.waiting(line):
            able = self.outlook.serving(line, now)
            if not able:
                everybody = [self._live[w.id] for w in self.queue.first(line, waiting)]
                return commands + [self._refuse(live, outcome.NO_REPLICA, _nobody(live), now) for live in everybody]
            # No room for the smallest request there is: there is no point in scoring.
            released = self._release_one(line, able, now) if self._fleet.table(able).room(0.0, 0.0, now).any() else []
            if not released:
                break
            commands += released
        return commands

    def _release_one(self, line: str, able: Subset, now: float) -> list[Command]:
        """The best prefix match among the first in line. While one starves, a replica is kept free until it fits."""
        table, starved = self._fleet.table(able), self.queue.starved(line, now)
        aside: tuple[str, ...] = ()
        if starved is not None:
            if released := self._release(self._live[starved.id], table, now, aside):
                return released
            aside = (able.names[int(table.kv_taken_tokens.argmin())],)
        first = [self._live[waiting.id] for waiting in self.queue.first(line, K_WAITING)]
        for live in self.outlook.in_turn(first, table, now):
            if released := self._release(live, table, now, aside):
                return released
        return []

    def _release(self, live: Live, able: Table, now: float, aside: tuple[str, ...]) -> list[Command]:
        """Forward one that waits, or refuse it if it may not go any more; [] if it must go on waiting."""
        request = live.request
        refusal = admission.refusal(request, self.config.region, self.law, self.view, now)
        if refusal is not None:
            return [self._refuse(live, refusal.outcome, refusal.detail, now)]
        if self.outlook.too_late(request, live.need, able, now):
            return [self._refuse(live, outcome.QUEUE_TIMEOUT, "no room in time to be served by the deadline", now)]
        placed = self._place(live, now, aside)
        if placed:
            self.queue.remove(request.id, served=True)
        return placed

    def _elsewhere(self, live: Live, failed: str, reason: Outcome, now: float) -> list[Command]:
        """After a failure before the first byte: another replica, within the retry rules, or an answer."""
        request = live.request
        if not retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
            return [self._refuse(live, reason, "the replica failed before it answered", now)]
        if retry.draws_on_budget(reason, live.transport_retries) and not live.budgeted:
            live.budgeted = self._budget.take()
        live.transport_retries += reason.source is Source.TRANSPORT
        live.tried += (failed,)
        refusal = admission.refusal(request, self.config.region, self.law, self.view, now)
        if refusal is not None:
            return [self._refuse(live, refusal.outcome, refusal.detail, now)]
        return self._place(live, now) or self._hold(live, now)

    # -- endings and learning

    def _refuse(self, live: Live, reason: Outcome, detail: str, now: float) -> Answer:
        self._over(live)
        if reason.source is Source.LAW:
            return machine.Answer(live.request.id, reason, detail)
        if reason is outcome.NO_REPLICA:
            return machine.Answer(live.request.id, reason, detail, RETRY_AFTER_S)  # nobody knows how long
        wait_ms = self.outlook.wait_ms(live.line, now)
        return machine.Answer(live.request.id, reason, detail, max(RETRY_AFTER_S, wait_ms / 1e3), wait_ms)

    def _over(self, live: Live) -> None:
        """Forget a request and give back all it held."""
        request_id = live.request.id
        del self._live[request_id]
        self.queue.remove(request_id, served=False)
        self.ledger.release(request_id)
        self._budget.ended()
        if live.budgeted:
            self._budget.give()

    def _learn(self, live: Live, usage: Usage, now: float) -> None:
        request = live.request
        self.estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
        decode_ms, service_ms = (now - live.prefilled_at) * 1e3, (now - live.forwarded_at) * 1e3
        self._fleet.served(live.replica, decode_ms, service_ms, usage.completion_tokens)
        if usage.cached_tokens is not None and live.chosen is not None:
            self.predicted_tokens += live.chosen.hit_tokens
            self.actual_tokens += usage.cached_tokens
            if not live.chosen.exact and self._fleet.overrated(
                live.replica, live.need, live.chosen.hit_tokens, usage.cached_tokens
            ):
                self._fleet.caches(live.replica, request.chain, admission.hints(request, self.law))
        if request.tokens is not None:
            self._fleet.counted(request.model, len(request.tokens.ids) // TOKEN_BYTES, usage.prompt_tokens)


def _nobody(live: Live) -> str:
    """Why a request is refused where nobody is able."""
    which = f"version {live.assigned.version} of this model" if live.assigned is not None else "this model"
    return f"no replica of {which} is healthy"
