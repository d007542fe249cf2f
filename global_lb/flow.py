"""The global tier's machine: law -> policy -> pick, the next runner-up on refusal or failure, and what is learned.

Invariants: a request is forwarded only to a region that is lawful by the law it came under *and* by the law of now;
it is never tried twice at one region unless none is left untried after a transport failure, or all that are left turned
it away for the sake of others; it holds at most one reservation; every request is concluded exactly once. Never awaits,
never opens anything, never sees a body.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from farhop.balance import machine, outcome, retry
from farhop.balance.estimate import Estimates
from farhop.balance.health import State
from farhop.balance.ledger import Ledger, Reservation
from farhop.balance.outcome import Source
from farhop.balance.suspects import BROKE_OFF, Suspects
from global_lb import admission
from global_lb.answering import Answering
from global_lb.fleet import Regions
from global_lb.live import LOOK_SOON_S, Live
from global_lb.pick import Decision, pick
from global_lb.policy import Routes, RoutesChanged, Steered
from global_lb.view import ChannelChanged, RegionForced, RegionHeard, RegionKnown, ViewSwapped
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.balance.machine import Answer, Command, Event, Request
    from farhop.balance.outcome import Outcome
    from global_lb.bounds import FlowConfig
    from global_lb.row import Price
    from global_lb.view import View
    from topology.law import Law, Verdict

    AttemptEvent = machine.AttemptBegan | machine.AttemptEnded | machine.AttemptFailed | machine.AttemptRefused

TURNED_AWAY_MAX = 3  # regions; each costs the client a round trip
LOOK_HELD_S = 0.5  # quotas and drains open by time alone: those on hold are looked at this often at least
_ENDED_TWO = "this request was under way at two balancers when they ended; it is not sent to a third for a while"
ASK_AGAIN_S = 2.0  # a request on hold does not ask a region that refused it before this


class GlobalFlow:
    """See the module's head. `patience_s` gives how long a tenant's requests wait when no lawful region serves."""

    def __init__(
        self,
        config: FlowConfig,
        law: Law,
        rng: Random,
        patience_s: Callable[[str], float],
        routes: Routes | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self.config, self.law, self._rng, self._patience_s = config, law, rng, patience_s
        self.answering = Answering(https_only=config.https_only)
        self.routes = routes or Routes()
        self._regions = Regions(config.trie_bytes, config.liveness, config.spill, config.region, prices)
        self.trie = self._regions.trie
        self.liveness, self.residence = self._regions.liveness, self._regions.residence
        self.best_instance = self._regions.best_instance
        self.hits, self.sent, self.cold_share = self._regions.hits, self._regions.sent, self._regions.cold_share
        self.forgotten: list[Callable[[], None]] = []  # who is told that all prefixes were
        self.ledger, self.estimates = Ledger(), Estimates()
        self._budget, self._suspects = retry.RetryBudget(), Suspects()
        self._live: dict[str, Live] = {}
        self._held: dict[str, None] = {}
        self._woken_at = -inf  # when all on hold were looked at last
        self._standings: dict[str, Any] = {}  # of each region, when it was last looked at for those on hold
        self._handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptRefused: self._refused,
            machine.AttemptFailed: self._failed,
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            machine.LawChanged: self._law_changed,
            ViewSwapped: self._view_swapped,
            RegionKnown: self._region_known,
            RegionHeard: self._region_heard,
            ChannelChanged: self._channel_changed,
            RegionForced: self._region_forced,
            RoutesChanged: self._steered,
            Steered: self._steered,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event in, commands out."""
        return self._handlers[type(event)](event, now)

    @property
    def view(self) -> View:
        """The regions as they are known now: frozen."""
        return self._regions.view

    @property
    def under_way(self) -> int:
        """Requests that are neither answered nor given up."""
        return len(self._live)

    # -- a request's edges

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if request.id in self._live:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        lawful = admission.processing(request, self.law).lawful
        if request.lawful is not None:
            lawful &= request.lawful
        live = self._live[request.id] = Live(request, lawful)
        self.estimates.age(now)
        self._budget.began()
        return self._dispatch(live, now)

    def _began(self, event: machine.AttemptBegan, _now: float) -> list[Command]:
        live = self._under_way(event)
        if live is not None and not live.started:
            self._start(live, event.status)
        return []

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        if not live.started:
            self._start(live, event.status)
        self._over(live)
        request, usage = live.request, event.usage
        if self._suspects:
            self._suspects.answered((request.tenant, request.body_hash))
        if event.status < 400 and usage is not None:
            self.estimates.age(now)
            self.estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
            if live.decision is not None:
                self.routes.answered(live.decision, usage.completion_tokens, now)
                if usage.cached_tokens is not None:
                    self._regions.compare(live.decision.chosen, usage.cached_tokens, now)
        return []

    def _refused(self, event: machine.AttemptRefused, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        self._regions.liveness_of(live.region).relay_succeeded()
        # What the region's machine refuses it has counted; its doors turn away uncounted (client, balancer).
        counted = event.outcome.source not in (Source.CLIENT, Source.BALANCER)
        counted = counted and event.outcome is not outcome.UNLAWFUL_UNREAD
        if event.wait_ms is not None:
            live.waits_ms[live.region] = event.wait_ms
        if event.outcome is outcome.QUEUE_TIMEOUT:
            live.waited_s += now - live.sent_at
        if live.instance is not None and event.outcome.source is Source.REGION:
            self._regions.refused(live.instance, live.request.model, event.outcome, event.wait_ms)
        return self._came_back(live, event.outcome, now, counted=counted)

    def _failed(self, event: machine.AttemptFailed, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        if outcome.blames_target(event.outcome):
            self._regions.liveness_of(live.region).relay_failed(now)
            self._broke_off(live, event.outcome, now)
        if live.started:
            self._over(live)
            return [machine.Answer(event.id, event.outcome, f"region {live.region} failed while answering")]
        return self._came_back(live, event.outcome, now, counted=False)

    def _client_left(self, event: machine.ClientLeft, _now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is not None:
            self._over(live)
        return []

    def _timer_fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        live = self._live.get(event.id)
        if live is None:
            return []
        if now < live.due:
            return [machine.SetTimer(event.id, live.due)]  # timers may fire a little early
        if not live.region:
            live.refusals.clear()
            return self._dispatch(live, now)
        if now >= live.request.deadline:
            return [self._answer(live, outcome.DEADLINE, "the request's deadline passed")]
        if self._swallowed(live, now):
            self._regions.liveness_of(live.region).relay_failed(now)
            self._broke_off(live, outcome.FIRST_BYTE_TIMEOUT, now)
            cancel = machine.Cancel(live.request.id, live.attempts)
            return [cancel, *self._came_back(live, outcome.FIRST_BYTE_TIMEOUT, now, counted=False)]
        return [self._timer(live, live.look_again(now))]

    def _swallowed(self, live: Live, now: float) -> bool:
        """Whether an attempt that has not begun is better given up: its region is down, or in doubt and another not."""
        state = State.UP if live.started else self._regions.liveness_of(live.region).read(now).state
        if state is not State.SUSPECT:
            return state is State.DOWN
        elsewhere = frozenset((live.region, *live.refusals))
        other = self.consider(live.request, now, live.lawful, elsewhere).chosen
        return other is not None and self._regions.liveness_of(other.region).read(now).state is State.UP

    def _under_way(self, event: AttemptEvent) -> Live | None:
        """The request if this very attempt of it is under way: what is said of an earlier one is no news."""
        live = self._live.get(event.id)
        return live if live is not None and live.region and live.attempts == event.attempt else None

    def _start(self, live: Live, status: int) -> None:
        live.started = True
        self.ledger.began(live.request.id)
        self._regions.liveness_of(live.region).relay_succeeded()
        if live.reckoning is not None:
            live.reckoning.settled(live.request.prompt_bytes, live.uncached_bytes)
            self._regions.settled(live.region)
        # The region holds this prefix now: known here only if the law lets a hint of it be kept here.
        if status < 400 and admission.hints_allowed(live.request, self.config.region, self.law):
            self._regions.caches(live.region, live.request.chain)

    # -- the world's edges

    def _law_changed(self, event: machine.LawChanged, now: float) -> list[Command]:
        """Who is under way stays where the prompt is; whoever is sent from now on, or again, goes by this law, too."""
        if not event.law.supersedes(self.law):
            return []
        return self._go_by(event.law.knowing(self._regions.lineages.of), now)

    def _go_by(self, law: Law, now: float) -> list[Command]:
        before, self.law = self.law, law
        if not law.widens(before, Scope.HINTS, frozenset((self.config.region,))):
            self._regions.forget_prefixes()  # whose nodes they are nobody can tell any more
            for forgotten in self.forgotten:
                forgotten()
        return self._wake(now)

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        self.answering.settle(self._regions, now)
        self._regions.adopt(event.view, now)
        law = self.law.knowing(self._regions.lineages.of)
        return self._wake(now) if law is self.law else self._go_by(law, now)

    def _region_known(self, event: RegionKnown, now: float) -> list[Command]:
        return self._changed(event.region, lambda: self._regions.take(event.region, event.known), now)

    def _region_heard(self, event: RegionHeard, now: float) -> list[Command]:
        region, known = event.region, event.known

        def change() -> None:
            self._regions.liveness_of(region).reported(now, renewed=event.renewed)
            if known is not None:
                self.answering.settle(self._regions, now)
                self._regions.take(region, known)

        return self._changed(region, change, now)

    def _channel_changed(self, event: ChannelChanged, now: float) -> list[Command]:
        region, known = event.region, event.known

        def change() -> None:
            self._regions.liveness_of(region).channel(event.up)
            if known is not None:
                self._regions.take(region, known)

        commands = self._changed(region, change, now)
        waiting = [] if event.up else [live for live in self._live.values() if live.region == region]
        return commands + [self._timer(live, now + LOOK_SOON_S) for live in waiting if live.look_soon(now)]

    def _region_forced(self, event: RegionForced, now: float) -> list[Command]:
        override = self._regions.liveness_of(event.region).override
        force = partial(override.force, State.DRAINING, event.why, event.until, now=now, over_s=event.over_s)
        return self._changed(event.region, force if event.drain else override.lift, now)

    def _steered(self, event: RoutesChanged | Steered, now: float) -> list[Command]:
        self.routes.hear(event)
        return self._wake(now)

    def _changed(self, region: str, change: Callable[[], None], now: float) -> list[Command]:
        """A region's life or offer changes. What it was until now may have come by time alone, unseen: see to both.

        Whoever is on hold is looked at if it can be asked otherwise than before; once in LOOK_HELD_S in any case.
        """
        regions = self._regions
        before = regions.standing(region, now) if self._held else None
        regions.settle(region, now)
        change()
        regions.settle(region, now)
        if before is None:
            return []
        after, seen = regions.standing(region, now), self._standings.get(region, before)
        self._standings[region] = after
        return self._wake(now) if not before == seen == after or now >= self._woken_at + LOOK_HELD_S else []

    def _wake(self, now: float) -> list[Command]:
        """Let those on hold go who can now. One that cannot speaks for all like it, as there may be many."""
        commands: list[Command] = []
        stuck: set[Any] = set()
        self._woken_at = now
        for request_id in tuple(self._held):
            live = self._live[request_id]
            request = live.request
            if now >= live.due:
                live.refusals.clear()  # as its timer, which is due, would
            alike = (
                request.tenant, request.model, request.narrow, request.key, live.lawful, frozenset(live.refusals),
                live.doubted and request.body_hash,
            )  # fmt: skip
            if alike in stuck:
                continue
            released = self._dispatch(live, now)
            commands += released
            if request_id in self._held:
                stuck.add(alike)
        return commands

    # -- deciding

    def consider(
        self, request: Request, now: float, within: frozenset[str] | None = None, without: frozenset[str] = frozenset()
    ) -> Decision:
        """Decide for a request by the law of now, and inside `within` where given, `without` those tried already.

        Changes nothing; `explain` asks the same way.
        """
        verdict, routes = admission.processing(request, self.law), self.routes
        output_tokens = self.estimates.output_tokens(request.tenant, request.model, request.max_tokens)
        lawful, rule = admission.both(verdict.lawful, within), routes.of(request.tenant, request.model)
        field = self._regions.field(request, output_tokens, lawful, now, without, self._rng)
        return pick(field, verdict, rule, self._rng, now, self.config.region, routes.words, routes.homes)

    def _decide(self, live: Live, now: float) -> Decision:
        """The law twice: that of the request's arrival bounds that of now. Those who turned it away are asked again,
        without a promise, once nobody else is left or the client has waited for enough of them."""
        decision = self.consider(live.request, now, live.lawful, frozenset(live.refusals))
        away = [region for region, reason in live.refusals.items() if admission.turned_away(reason)]
        few = len(away) < TURNED_AWAY_MAX and live.attempts + 1 < retry.ATTEMPTS_MAX
        if not away or live.last_resort or (few and decision.chosen is not None):
            live.last_resort |= not away and decision.unwelcome(now)
            return decision
        live.last_resort = True
        for region in away:
            del live.refusals[region]
        return self.consider(live.request, now, live.lawful, frozenset(live.refusals))

    def _dispatch(self, live: Live, now: float) -> list[Command]:
        """Send the request to the best region it may go to, or conclude or hold it."""
        request = live.request
        if now >= request.deadline:
            return [self._answer(live, outcome.DEADLINE, "the request's deadline passed")]
        if request.body_hash and (commands := self._suspected(live, now)) is not None:
            return commands
        decision = live.decision = self._decide(live, now)
        chosen = decision.chosen
        if chosen is None:
            return self._nowhere(live, decision, now)
        self._held.pop(request.id, None)
        instance = self._regions.best_instance(chosen.region, request.model)
        assert instance is not None  # it was among the offers, and no await lies between
        lawful = admission.both(live.lawful, decision.verdict.lawful)
        self.routes.sent(request, decision, now)
        if live.attempts == 0 and self.answering.redirects(request, decision, instance, self.law):
            self._over(live)
            return [self.answering.redirect(request, decision, instance, lawful, self._regions, now)]
        live.attempts += 1
        live.sent_at = now
        live.region, live.reckoning = chosen.region, self._regions.reckoning_of(instance)
        live.instance, promised_ms = instance, None if live.last_resort else chosen.ttft_ms
        self.ledger.reserve(request.id, Reservation(chosen.region, int(chosen.uncached_tokens), 0))
        live.uncached_bytes = chosen.uncached_share * request.prompt_bytes
        live.reckoning.sent(request.prompt_bytes, live.uncached_bytes)
        return [
            self._timer(live, live.look_again(now)),
            machine.Forward(
                request.id,
                live.attempts,
                chosen.region,
                instance.tier,
                promised_ms,
                lawful,
                decision,
                waited_s=live.waited_s,
            ),
        ]

    def _nowhere(self, live: Live, decision: Decision, now: float) -> list[Command]:
        request = live.request
        lawful = live.lawful & decision.verdict.lawful
        if not lawful:
            return [self._answer(live, outcome.UNLAWFUL, admission.summary(decision.verdict, live.lawful))]
        if not self._regions.may_exist(request.model):
            detail = f"the model `{request.model[:128]}` does not exist or no region serves it"
            return [self._answer(live, outcome.UNKNOWN_MODEL, detail)]
        if live.held_until is None:
            live.held_until = min(request.deadline, now + self._patience_s(request.tenant))
        held = request.id in self._held
        crowded = not held and len(self._held) >= self.config.held_max
        if crowded or now >= live.held_until or live.law_refused(lawful):
            return [self._exhausted(live, decision.verdict, now)]
        due = min(live.held_until, now + ASK_AGAIN_S) if live.refusals else live.held_until
        if held and now < live.due:
            return []  # it waits already
        self._held[request.id] = None
        timer = self._timer(live, due)
        return [timer] if held else [machine.Hold(request.id), timer]

    # -- queries of death: what may have ended two processes is not handed to a third (farhop.balance.suspects)

    def _broke_off(self, live: Live, reason: Outcome, now: float) -> None:
        """An attempt ended without an answer: it was under way, unless there was no connection."""
        instance, request = live.instance, live.request
        if instance is not None and request.body_hash and reason in BROKE_OFF:
            process = (instance.region, instance.name, str(instance.incarnation))
            self._suspects.broke_off((request.tenant, request.body_hash), process, self._heard_of(process), now)

    def _heard_of(self, process: tuple[str, ...]) -> float:
        """When a report of this very process came, by whatever path."""
        region, name, incarnation = process
        known = self.view.regions.get(region)
        instances = () if known is None else known.instances
        same = (i.received_at for i in instances if i.name == name and str(i.incarnation) == incarnation)
        return max(same, default=-inf)

    def _suspected(self, live: Live, now: float) -> list[Command] | None:
        """What to do instead of sending a request on; None where nothing is held against it."""
        request = live.request
        verdict = self._suspects.verdict((request.tenant, request.body_hash), self._heard_of, now)
        live.doubted = verdict is not None
        if verdict is None:
            return None
        if verdict.sure:
            return [self._answer(live, outcome.ENDS_PROCESSES, _ENDED_TWO, verdict.until - now)]
        held, due = request.id in self._held, min(request.deadline, verdict.until)
        if held and live.due == due:
            return []
        self._held[request.id] = None
        timer = self._timer(live, due)
        return [timer] if held else [machine.Hold(request.id), timer]

    def _timer(self, live: Live, at: float) -> Command:
        live.due = at
        return machine.SetTimer(live.request.id, at)

    def _came_back(self, live: Live, reason: Outcome, now: float, *, counted: bool) -> list[Command]:
        """An attempt ended before the first byte: the next runner-up, within the retry rules, or an answer.

        `counted`: the region has counted the request, so that its next reports will acknowledge it.
        """
        region = self._withdraw(live, counted=counted)
        live.refusals[region] = reason
        if not retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
            if reason.retryable:
                return [self._exhausted(live, admission.processing(live.request, self.law), now)]
            return [self._answer(live, reason, live.told())]
        if retry.draws_on_budget(reason, live.transport_retries) and not live.budgeted:
            live.budgeted = self._budget.take()
        if reason.source is Source.TRANSPORT:
            live.transport_retries += 1
            # A region that tells of its replica's failure has tried what it could; one that did not speak may yet.
            if not counted and self.consider(live.request, now, live.lawful, frozenset(live.refusals)).chosen is None:
                del live.refusals[region]  # better the same region again than none
        return self._dispatch(live, now)

    # -- endings and learning

    def _exhausted(self, live: Live, verdict: Verdict, now: float) -> Answer:
        """No lawful region is left. If all of them refused for the law's sake, the law is the answer."""
        lawful = live.lawful & verdict.lawful
        if live.law_refused(lawful):
            why = live.told() if lawful else admission.summary(verdict, live.lawful)
            return self._answer(live, outcome.UNLAWFUL, why)
        return self._answer(live, outcome.NO_REGION, live.told(), self._regions.opens_in_s(lawful, live.waits_ms, now))

    def _answer(self, live: Live, reason: Outcome, detail: str, retry_after_s: float | None = None) -> Answer:
        self._over(live)
        return machine.Answer(live.request.id, reason, detail, retry_after_s, reasons=live.decision)

    def _over(self, live: Live) -> None:
        """Forget a request and give back all it held."""
        request_id = live.request.id
        del self._live[request_id]
        self._held.pop(request_id, None)
        if live.region:
            region = live.region
            self._withdraw(live, counted=live.started)
            live.region = region  # whoever concludes it may still tell where it was
        self._budget.ended()
        if live.budgeted:
            self._budget.give()

    def _withdraw(self, live: Live, *, counted: bool) -> str:
        """The attempt is over: give back what it held, and return where it was."""
        self.ledger.release(live.request.id)
        if live.reckoning is not None and not live.started:
            settle = live.reckoning.settled if counted else live.reckoning.came_back
            settle(live.request.prompt_bytes, live.uncached_bytes)
            self._regions.settled(live.region)
        region, live.region, live.reckoning = live.region, "", None
        return region
