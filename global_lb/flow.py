"""The global tier's machine: law -> policy -> pick, the next runner-up on refusal or failure, and what is learned.

Invariants: a request is forwarded only to a region that is lawful by the law it came under *and* by the law of now;
it is never tried twice at one region unless none is left untried after a transport failure; it holds at most one
reservation; every request is concluded exactly once. Never awaits, never opens anything, never sees a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance import machine, outcome, retry
from farhop.balance.estimate import Estimates
from farhop.balance.ewma import Mean
from farhop.balance.health import Liveness, LivenessConfig, State
from farhop.balance.ledger import Ledger, Reservation
from farhop.balance.outcome import Source
from farhop.balance.reckoning import Reckoning
from farhop.balance.trie import PrefixTrie
from global_lb import admission
from global_lb.pick import Decision, pick
from global_lb.policy import Offer, Predictive
from global_lb.view import ChannelChanged, RegionForced, RegionHeard, View, ViewSwapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Answer, Command, Event, Request
    from farhop.balance.outcome import Outcome
    from global_lb.policy import Policy
    from global_lb.view import Instance
    from topology.law import Law

RETRY_AFTER_S = 2.0


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one global balancer. `trie_bytes` is the prompt text mirrored per region, not memory."""

    region: str
    trie_bytes: int = 256 * 1024 * 1024
    liveness: LivenessConfig = LivenessConfig()


class _Live:
    """One request in the machine's hands. `lawful` is by the law it came under."""

    __slots__ = (
        "attempts",
        "budgeted",
        "decision",
        "held_until",
        "lawful",
        "reckoning",
        "refusals",
        "region",
        "request",
        "started",
        "transport_retries",
    )

    def __init__(self, request: Request, lawful: frozenset[str]) -> None:
        self.request, self.lawful = request, lawful
        self.attempts = self.transport_retries = 0
        self.budgeted = self.started = False
        self.region = ""
        self.reckoning = Reckoning()
        self.decision: Decision | None = None
        self.refusals: dict[str, Outcome] = {}
        self.held_until: float | None = None


class GlobalFlow:
    """See the module's head. `patience_s` gives how long a tenant's requests wait when no lawful region serves."""

    def __init__(
        self,
        config: FlowConfig,
        law: Law,
        rng: Random,
        patience_s: Callable[[str], float],
        policy: Policy | None = None,
    ) -> None:
        self.config, self.law, self._rng, self._patience_s = config, law, rng, patience_s
        self._policy = policy or Predictive()
        self.view = View({})
        self.ledger = Ledger()
        self.estimates = Estimates()
        self.trie = PrefixTrie()
        self.liveness: dict[str, Liveness] = {}
        self.residence: dict[str, Mean] = {}
        self._reckonings: dict[tuple[str, str], Reckoning] = {}
        self._budget = retry.RetryBudget()
        self._live: dict[str, _Live] = {}
        self._held: dict[str, None] = {}
        self._handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptRefused: self._refused,
            machine.AttemptFailed: self._failed,
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            ViewSwapped: self._view_swapped,
            RegionHeard: self._region_heard,
            ChannelChanged: self._channel_changed,
            RegionForced: self._region_forced,
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
        if request.id in self._live:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        verdict = admission.processing(request, self.law)
        live = self._live[request.id] = _Live(request, verdict.lawful)
        self._budget.began()
        return self._dispatch(live, now)

    def _began(self, event: machine.AttemptBegan, _now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        live.started = True
        self.ledger.began(event.id)
        self._liveness_of(live.region).relay_succeeded()
        if event.status < 400:
            self._remember(live)
        return []

    def _ended(self, event: machine.AttemptEnded, _now: float) -> list[Command]:
        live = self._over(event.id)
        if live is None:
            return []
        request, usage = live.request, event.usage
        if usage is not None:
            self.estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
            self._compare(live, usage.cached_tokens)
        if event.status < 400:
            self._remember(live)
        return []

    def _refused(self, event: machine.AttemptRefused, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        self._liveness_of(live.region).relay_succeeded()
        return self._came_back(live, event.outcome, now)

    def _failed(self, event: machine.AttemptFailed, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        if event.outcome.source is Source.TRANSPORT:
            self._liveness_of(live.region).relay_failed(now)
        if live.started:
            self._over(event.id)
            return [machine.Answer(event.id, event.outcome, f"region {live.region} failed while answering")]
        return self._came_back(live, event.outcome, now)

    def _client_left(self, event: machine.ClientLeft, _now: float) -> list[Command]:
        self._over(event.id)
        return []

    def _timer_fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        if now >= live.request.deadline:
            return [self._answer(live, outcome.DEADLINE, "the request's deadline passed")]
        if event.id in self._held:
            return [self._exhausted(live)]
        return [machine.SetTimer(event.id, live.request.deadline)]

    # -- the world's edges

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        self.view = event.view
        for name, region in event.view.regions.items():
            if name not in self.trie:
                self.trie.add(name, self.config.trie_bytes)
                self.residence[name] = Mean(0.05, 0.0, 1.0, 1.0)
            in_flight = self.ledger.load(name).in_flight
            for instance in region.instances:
                self._reckoning_of(instance).acknowledged(instance.incarnation, instance.accepted, in_flight)
        return self._wake(now)

    def _region_heard(self, event: RegionHeard, now: float) -> list[Command]:
        self._liveness_of(event.region).reported(now)
        return []

    def _channel_changed(self, event: ChannelChanged, now: float) -> list[Command]:
        self._liveness_of(event.region).channel(event.up)
        return self._wake(now) if event.up else []

    def _region_forced(self, event: RegionForced, now: float) -> list[Command]:
        override = self._liveness_of(event.region).override
        if event.drain:
            override.force(State.DRAINING, event.why, event.until)
        else:
            override.lift()
        return self._wake(now)

    def _wake(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for request_id in tuple(self._held):
            commands += self._dispatch(self._live[request_id], now)
        return commands

    # -- deciding

    def consider(
        self, request: Request, now: float, within: frozenset[str] | None = None, without: frozenset[str] = frozenset()
    ) -> Decision:
        """Decide for a request by the law of now, and inside `within` where given. Changes nothing.

        `without` are regions tried already. `explain` asks the same way.
        """
        verdict = admission.processing(request, self.law)
        lawful = verdict.lawful if within is None else verdict.lawful & within
        offers, absent = self._offers(request, lawful, now, without)
        output_tokens = self.estimates.output_tokens(request.tenant, request.model, request.max_tokens)
        return pick(request, output_tokens, offers, verdict, absent, self._policy, self._rng)

    def _offers(
        self, request: Request, lawful: frozenset[str], now: float, without: frozenset[str]
    ) -> tuple[list[Offer], dict[str, str]]:
        """Lawful regions that can be asked, and why the other lawful ones cannot. Suspects only if nobody is better."""
        matches = self.trie.match(request.chain)
        sure: list[Offer] = []
        suspect: list[Offer] = []
        absent: dict[str, str] = {}
        for name in sorted(lawful):
            if name in without:
                absent[name] = "tried already"
                continue
            health = self._liveness_of(name).read(now)
            instance = self._best_instance(name, request.model)
            if health.state is State.DOWN or health.state is State.DRAINING:
                absent[name] = f"{health.state}: {health.why}"
            elif instance is None:
                absent[name] = "no ready replica of this model" if name in self.view.regions else "never heard of"
            else:
                offer = self._offer(instance, request.model, matches.get(name, 0))
                (sure if health.state is State.UP else suspect).append(offer)
                if health.state is State.SUSPECT:
                    absent[name] = f"suspect: {health.why}"
        return sure or suspect, absent

    def _best_instance(self, region: str, model: str) -> Instance | None:
        known = self.view.regions.get(region)
        if known is None:
            return None
        able = [i for i in known.instances if not i.draining and model in i.models and i.models[model].replicas_ready]
        return min(able, key=lambda i: (i.models[model].wait_ms, i.name), default=None)

    def _offer(self, instance: Instance, model: str, depth: int) -> Offer:
        name = instance.region
        return Offer(
            region=name,
            rtt_ms=self.view.regions[name].rtt_ms,
            instance=instance,
            capacity=instance.models[model],
            outstanding_bytes=self._reckoning_of(instance).outstanding_bytes,
            depth=depth,
            residence=self.residence[name].value or 0.0,
        )

    def _dispatch(self, live: _Live, now: float) -> list[Command]:
        """Send the request to the best region it may go to, or conclude or hold it."""
        request = live.request
        # The law twice: that of the request's arrival bounds that of now.
        decision = live.decision = self.consider(request, now, live.lawful, frozenset(live.refusals))
        chosen = decision.chosen
        if chosen is None:
            return self._nowhere(live, decision, now)
        self._held.pop(request.id, None)
        instance = self._best_instance(chosen.region, request.model)
        assert instance is not None  # it was among the offers, and no await lies between
        live.attempts += 1
        live.region, live.reckoning = chosen.region, self._reckoning_of(instance)
        self.ledger.reserve(request.id, Reservation(chosen.region, int(chosen.uncached_tokens), 0))
        live.reckoning.sent(request.prompt_bytes)
        lawful = live.lawful & decision.verdict.lawful
        return [
            machine.Forward(request.id, live.attempts, chosen.region, instance.tier, chosen.ttft_ms, lawful, decision),
            machine.SetTimer(request.id, request.deadline),
        ]

    def _nowhere(self, live: _Live, decision: Decision, now: float) -> list[Command]:
        request = live.request
        if not live.lawful & decision.verdict.lawful:
            return [self._answer(live, outcome.UNLAWFUL, admission.summary(decision.verdict))]
        if not any(request.model in i.models for r in self.view.regions.values() for i in r.instances):
            detail = f"the model `{request.model[:128]}` does not exist or no region serves it"
            return [self._answer(live, outcome.UNKNOWN_MODEL, detail)]
        patience_s = self._patience_s(request.tenant)
        if live.held_until is None and patience_s > 0.0:
            live.held_until = min(request.deadline, now + patience_s)
        if live.held_until is not None and now < live.held_until:
            live.refusals.clear()
            self._held[request.id] = None
            return [machine.Hold(request.id), machine.SetTimer(request.id, live.held_until)]
        return [self._exhausted(live)]

    def _came_back(self, live: _Live, reason: Outcome, now: float) -> list[Command]:
        """An attempt ended before the first byte: the next runner-up, within the retry rules, or an answer."""
        request = live.request
        self.ledger.release(request.id)
        live.reckoning.came_back(request.prompt_bytes)
        live.refusals[live.region] = reason
        if not retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
            return [self._exhausted(live) if reason.retryable else self._answer(live, reason, _told(live))]
        if retry.draws_on_budget(reason, live.transport_retries) and not live.budgeted:
            live.budgeted = self._budget.take()
        live.transport_retries += reason.source is Source.TRANSPORT
        return self._dispatch(live, now)

    # -- endings and learning

    def _exhausted(self, live: _Live) -> Answer:
        """No lawful region is left. If all refused for the law's sake, the law is the answer."""
        refusals = live.refusals.values()
        if refusals and all(r is outcome.UNLAWFUL_HERE for r in refusals):
            return self._answer(live, outcome.UNLAWFUL, _told(live))
        return self._answer(live, outcome.NO_REGION, _told(live), RETRY_AFTER_S)

    def _answer(self, live: _Live, reason: Outcome, detail: str, retry_after_s: float | None = None) -> Answer:
        self._over(live.request.id)
        return machine.Answer(live.request.id, reason, detail, retry_after_s, reasons=live.decision)

    def _over(self, request_id: str) -> _Live | None:
        """Forget a request and give back all it held."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self._held.pop(request_id, None)
        self.ledger.release(request_id)
        self._budget.ended()
        if live.budgeted:
            self._budget.give()
        return live

    def _remember(self, live: _Live) -> None:
        """The region holds this prefix now; known here only if the law lets a hint of it be kept here."""
        if live.region in self.trie and admission.hints_allowed(live.request, self.config.region, self.law):
            self.trie.insert(live.region, live.request.chain)

    def _compare(self, live: _Live, cached_tokens: int | None) -> None:
        """What share of a believed hit was true tells how long blocks stay resident in that region."""
        chosen = live.decision.chosen if live.decision is not None else None
        residence = self.residence.get(live.region)
        if cached_tokens is None or chosen is None or residence is None or chosen.hit_tokens < 1.0:
            return
        believed = chosen.hit_tokens / (residence.value or 1.0)
        residence.update(min(1.0, cached_tokens / believed))

    def _liveness_of(self, region: str) -> Liveness:
        known = self.liveness.get(region)
        if known is None:
            known = self.liveness[region] = Liveness(self.config.liveness)
        return known

    def _reckoning_of(self, instance: Instance) -> Reckoning:
        name = (instance.region, instance.name)
        known = self._reckonings.get(name)
        if known is None:
            known = self._reckonings[name] = Reckoning()
        return known


def _told(live: _Live) -> str:
    """What became of the request, region by region, for the client."""
    decision = live.decision
    told = [f"{region}: {reason.reason}" for region, reason in sorted(live.refusals.items())]
    if decision is not None:
        told += [f"{region}: {why}" for region, why in sorted(decision.absent.items()) if region not in live.refusals]
    return f"no lawful region can serve this request now ({'; '.join(told[:16])})"
