"""The regional tier's machine: admission -> queue -> policy -> pick, and what follows when things break.

Invariants: a request holds at most one reservation, from its Forward until its attempt is over; it is in the queue or
holds a reservation or is being concluded, never two of them; every request that arrives is concluded exactly once, by
an Answer, by its attempt's end or by its client leaving; nothing is forwarded that is not lawful here at that moment.
Never awaits, never opens anything, never sees a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance import chain, machine, outcome, retry
from farhop.balance.estimate import Estimates, Speed
from farhop.balance.health import HealthConfig, HealthMachine, State, may_eject
from farhop.balance.ledger import Ledger, Reservation
from farhop.balance.outcome import Source
from farhop.balance.trie import PrefixTrie
from regional_lb import admission
from regional_lb.pick import Pick, expected_wait_ms, pick
from regional_lb.policy import Need, Predictive
from regional_lb.queue import WaitingRoom
from regional_lb.view import ReplicaProbed, View, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Answer, Command, Event, Request, Usage
    from farhop.balance.outcome import Outcome
    from regional_lb.policy import Policy, Scored
    from regional_lb.view import Replica
    from topology.law import Law

K_WAITING = 8  # how many of the first in line are compared for the best prefix when a slot frees
RETRY_AFTER_S = 1.0


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one region's balancer."""

    region: str
    queue_requests_max: int = 1024
    queue_tokens_max: int = 4_000_000
    queue_wait_s: float = 30.0
    starvation_s: float = 10.0
    health: HealthConfig = HealthConfig()


class _Live:
    """One request in the machine's hands."""

    __slots__ = (
        "attempts",
        "began_at",
        "budgeted",
        "forwarded_at",
        "need",
        "pick",
        "replica",
        "request",
        "started",
        "transport_retries",
        "tried",
    )

    def __init__(self, request: Request, need: Need) -> None:
        self.request, self.need = request, need
        self.attempts = self.transport_retries = 0
        self.budgeted = self.started = False
        self.replica = ""
        self.tried: list[str] = []
        self.forwarded_at = self.began_at = 0.0
        self.pick: Pick | None = None

    @property
    def chosen(self) -> Scored | None:
        """What the last attempt was expected to meet."""
        return self.pick.chosen if self.pick is not None else None


class RegionalFlow:
    """See the module's head. `weight_of` gives a tenant's share of its band."""

    def __init__(
        self, config: FlowConfig, law: Law, rng: Random, weight_of: Callable[[str], float], policy: Policy | None = None
    ) -> None:
        self.config, self.law, self._rng, self._weight_of = config, law, rng, weight_of
        self._policy = policy or Predictive()
        self.view: View = view_of([])
        self.ledger = Ledger()
        self.estimates = Estimates()
        self.speeds: dict[str, Speed] = {}
        self.health: dict[str, HealthMachine] = {}
        self.trie = PrefixTrie()
        self.queue = WaitingRoom(config.queue_requests_max, config.queue_tokens_max, config.starvation_s)
        self.accepted_bytes: dict[str, float] = {}
        self.predicted_tokens = self.actual_tokens = 0.0
        self._budget = retry.RetryBudget()
        self._live: dict[str, _Live] = {}
        self._handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptFailed: self._failed,
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            ViewSwapped: self._view_swapped,
            ReplicaProbed: self._probed,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event in, commands out."""
        return self._handlers[type(event)](event, now)

    @property
    def under_way(self) -> int:
        """Requests that are neither answered nor given up."""
        return len(self._live)

    # -- a request's edges

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        refusal = admission.lawful_here(request, self.config.region, self.law) or admission.served_here(
            request, self.config.region, self.view
        )
        if refusal is not None:
            return [machine.Answer(request.id, refusal.outcome, refusal.detail)]
        if request.id in self._live:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        live = self._live[request.id] = _Live(request, self.need_of(request))
        self._budget.began()
        if request.issuer:
            self.accepted_bytes[request.issuer] = self.accepted_bytes.get(request.issuer, 0.0) + request.prompt_bytes
        if len(self.queue) == 0 or self._goes_first(request):
            placed = self._place(live, now)
            if placed:
                return placed
        return self._hold(live, now)

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        live.started, live.began_at = True, now
        self.ledger.began(event.id)
        if event.status >= 500:
            self._health_of(live.replica).failed(now, may_eject=self._may_eject(now))
        else:
            self._health_of(live.replica).succeeded(now)
            if live.replica in self.speeds and live.chosen is not None:
                ahead = live.chosen.backlog_tokens + live.chosen.uncached_tokens
                self.speeds[live.replica].began((now - live.forwarded_at) * 1e3, ahead)
            self._touch(live)
        return self._fill(now)

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        live = self._over(event.id)
        if live is None:
            return []
        if event.usage is not None:
            self._learn(live, event.usage, now)
        if event.status < 400:
            self._touch(live)
        return self._fill(now)

    def _failed(self, event: machine.AttemptFailed, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        self._blame(live.replica, event.outcome, now)
        self.ledger.release(event.id)
        if live.started:
            self._over(event.id)
            return [machine.Answer(event.id, event.outcome, "the replica failed while answering"), *self._fill(now)]
        return [*self._elsewhere(live, event.outcome, now), *self._fill(now)]

    def _client_left(self, event: machine.ClientLeft, now: float) -> list[Command]:
        return [] if self._over(event.id) is None else self._fill(now)

    def _timer_fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        waited = event.id in self.queue
        late = now >= live.request.deadline
        if not waited and not late:
            return [machine.SetTimer(event.id, live.request.deadline)]  # timers may fire a little early
        wait_ms = self.wait_ms(live.request.model, now)
        self._over(event.id)
        reason = outcome.DEADLINE if late else outcome.QUEUE_TIMEOUT
        detail = "the request's deadline passed" if late else "no replica had room in time"
        answer = machine.Answer(event.id, reason, detail, retry_after_s=self._retry_after_s(wait_ms), wait_ms=wait_ms)
        return [answer, *self._fill(now)]

    # -- the world's edges

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        self.view = event.view
        for name, replica in event.view.replicas.items():
            capacity_bytes = int(replica.kv_tokens * self._bytes_per_token(replica))
            if name not in self.health:
                self.health[name] = HealthMachine(self.config.health)
                self.speeds[name] = Speed(replica.prefill_ms_per_token, replica.tpot_ms)
                self.trie.add(name, capacity_bytes)
            else:
                self.trie.set_capacity(name, capacity_bytes)
        for name in [n for n in self.health if n not in event.view.replicas]:
            del self.health[name], self.speeds[name]
            self.trie.drop(name)
        return self._fill(now)

    def _probed(self, event: ReplicaProbed, now: float) -> list[Command]:
        health = self.health.get(event.target)
        if health is None:
            return []
        health.probed(event.ok, now)
        return self._fill(now)

    # -- placing

    def need_of(self, request: Request) -> Need:
        """The request in its model's tokens."""
        bytes_per_token = self.estimates.bytes_per_token(request.model)
        return Need(
            prompt_tokens=request.prompt_bytes / bytes_per_token,
            output_tokens=self.estimates.output_tokens(request.tenant, request.model, request.max_tokens),
            bytes_per_token=bytes_per_token,
        )

    def consider(self, request: Request, need: Need, now: float, without: tuple[str, ...] = ()) -> Pick | None:
        """Score the healthy replicas for a request; None if there are none. Changes nothing."""
        replicas = self._healthy(request.model, now, without)
        if not replicas:
            return None
        hits = self.trie.match(request.chain)
        return pick(need, replicas, hits, self.ledger, self.speeds, self._policy, now, self._rng)

    def _healthy(self, model: str, now: float, without: tuple[str, ...] = ()) -> list[Replica]:
        serving = self.view.by_model.get(model, ())
        able = (State.UP, State.SUSPECT)
        return [r for r in serving if r.name not in without and self.health[r.name].read(now).state in able]

    def _place(self, live: _Live, now: float) -> list[Command]:
        """Forward the request if some replica has room; [] otherwise."""
        choice = self.consider(live.request, live.need, now, tuple(live.tried))
        if choice is None or choice.chosen is None:
            return []
        chosen = choice.chosen
        if not self.health[chosen.replica].admit(now):
            return []
        request = live.request
        live.attempts += 1
        live.replica, live.forwarded_at = chosen.replica, now
        live.pick = choice
        uncached = int(chosen.uncached_tokens)
        self.ledger.reserve(request.id, Reservation(chosen.replica, uncached, uncached + int(live.need.output_tokens)))
        address = self.view.replicas[chosen.replica].address
        return [
            machine.SetTimer(request.id, request.deadline),
            machine.Forward(request.id, live.attempts, chosen.replica, address, chosen.score_ms, reasons=choice),
        ]

    def _hold(self, live: _Live, now: float) -> list[Command]:
        request = live.request
        if not self._healthy(request.model, now):
            return [self._refuse(live, outcome.NO_REPLICA, "no replica of this model is healthy", now)]
        if not self.queue.fits(live.need.prompt_tokens):
            return [self._refuse(live, outcome.QUEUE_FULL, "the region's queue is full", now)]
        self.queue.push(
            request.id, request.tenant, self._weight_of(request.tenant), request.priority, live.need.prompt_tokens, now
        )
        due = min(request.deadline, now + self.config.queue_wait_s)
        return [machine.Hold(request.id), machine.SetTimer(request.id, due)]

    def _goes_first(self, request: Request) -> bool:
        """Whether nobody who waits would be overtaken: all of them are of a lower band."""
        first = self.queue.first(1, -1.0)
        return not first or request.priority > first[0].priority

    def _fill(self, now: float) -> list[Command]:
        """Give freed room to those who wait: the best prefix match among the first in line, as long as one fits."""
        commands: list[Command] = []
        while len(self.queue):
            placed = self._fill_one(now)
            if not placed:
                break
            commands += placed
        return commands

    def _fill_one(self, now: float) -> list[Command]:
        due = self.queue.first(K_WAITING, now)
        for waiting in sorted(due, key=lambda w: self._mismatch(w.id)):
            live = self._live[waiting.id]
            refusal = admission.lawful_here(live.request, self.config.region, self.law)
            if refusal is not None:
                return [self._refuse(live, refusal.outcome, refusal.detail, now)]
            if not self._healthy(live.request.model, now):
                return [self._refuse(live, outcome.NO_REPLICA, "no replica of this model is healthy", now)]
            placed = self._place(live, now)
            if placed:
                self.queue.remove(waiting.id, served=True)
                return placed
        return []

    def _mismatch(self, request_id: str) -> bool:
        """Sort key: those whose prefix is mostly cached somewhere first, the others in their order."""
        request = self._live[request_id].request
        depth = max(self.trie.match(request.chain).values(), default=0)
        return chain.bytes_at(depth) * 2 < request.prompt_bytes

    def _elsewhere(self, live: _Live, reason: Outcome, now: float) -> list[Command]:
        """After a failure before the first byte: another replica, within the retry rules, or an answer."""
        request = live.request
        if not retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
            return [self._refuse(live, reason, "the replica failed before it answered", now)]
        if retry.draws_on_budget(reason, live.transport_retries) and not live.budgeted:
            live.budgeted = self._budget.take()
        live.transport_retries += reason.source is Source.TRANSPORT
        live.tried.append(live.replica)
        if not self._healthy(request.model, now, tuple(live.tried)):
            live.tried.clear()  # better the same replica again than none
        refusal = admission.lawful_here(request, self.config.region, self.law)
        if refusal is not None:
            return [self._refuse(live, refusal.outcome, refusal.detail, now)]
        return self._place(live, now) or self._hold(live, now)

    # -- endings and learning

    def _refuse(self, live: _Live, reason: Outcome, detail: str, now: float) -> Answer:
        wait_ms = self.wait_ms(live.request.model, now)
        self._over(live.request.id)
        return machine.Answer(
            live.request.id, reason, detail, retry_after_s=self._retry_after_s(wait_ms), wait_ms=wait_ms
        )

    def _over(self, request_id: str) -> _Live | None:
        """Forget a request and give back all it held."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self.queue.remove(request_id, served=False)
        self.ledger.release(request_id)
        self._budget.ended()
        if live.budgeted:
            self._budget.give()
        return live

    def _learn(self, live: _Live, usage: Usage, now: float) -> None:
        request = live.request
        self.estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
        if live.replica in self.speeds:
            decode_ms, service_ms = (now - live.began_at) * 1e3, (now - live.forwarded_at) * 1e3
            self.speeds[live.replica].ended(decode_ms, service_ms, usage.completion_tokens)
        if usage.cached_tokens is not None and live.chosen is not None:
            self.predicted_tokens += live.chosen.hit_tokens
            self.actual_tokens += usage.cached_tokens

    def _touch(self, live: _Live) -> None:
        if live.replica in self.trie:
            self.trie.insert(live.replica, live.request.chain)

    def _blame(self, name: str, reason: Outcome, now: float) -> None:
        health = self.health.get(name)
        if health is None:
            return
        if reason is outcome.CONNECT_FAILED:
            health.refused(now)
            self.trie.clear(name)  # nobody at home: whoever comes back comes back with an empty cache
        else:
            health.failed(now, may_eject=self._may_eject(now))

    def _may_eject(self, now: float) -> bool:
        down = sum(h.read(now).state is State.DOWN for h in self.health.values())
        return may_eject(down, len(self.health))

    def _health_of(self, name: str) -> HealthMachine:
        return self.health.get(name) or HealthMachine()

    def _bytes_per_token(self, replica: Replica) -> float:
        return max((self.estimates.bytes_per_token(model) for model in replica.models), default=4.0)

    def wait_ms(self, model: str, now: float) -> float:
        """What one more request for the model would wait before its prefill begins."""
        return expected_wait_ms(self._healthy(model, now), self.ledger, self.speeds, len(self.queue), now)

    def _retry_after_s(self, wait_ms: float) -> float:
        return max(RETRY_AFTER_S, wait_ms / 1e3)
