"""The global tier's machine: law -> policy -> pick, the next runner-up on refusal or failure, and what is learned.

Reads from top to bottom: the events of a request, the events of the world around it, streams that leave a drained
region, requests that a change lets go (held or displaced), the decision and its dispatch, retries, and endings.

Invariants: a request is forwarded only to a region that is lawful by the law it came under *and* by the law in force;
it is never tried twice at one region, unless none is left untried after a transport failure, it waited for the region
to be back, or all regions left refused it in favour of other requests; it holds at most one reservation; every request
is concluded exactly once. Never awaits, never opens anything, never sees a body.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance import machine, model_steps, outcome, retry
from farhop.balance.estimate.estimates import TPOT_MS, Estimates, Learned
from farhop.balance.health.pilot_light import PilotConfig
from farhop.balance.health.reading import State
from farhop.balance.health.region import LivenessConfig
from farhop.balance.health.suspects import BROKE_OFF, Suspects
from farhop.balance.ledger import Ledger, Reservation
from farhop.balance.outcome import Source
from global_lb.fleet.regions import Regions, Spill
from global_lb.fleet.view import ChannelChanged, OutputsReported, RegionForced, RegionKnown, RegionReported, ViewSwapped
from global_lb.routing import admission, cascade, lost
from global_lb.routing.pick import Decision, pick
from global_lb.routing.policy import OverridesChanged
from global_lb.routing.redirect import Redirects
from global_lb.routing.request_state import RegionAttempt, RequestState
from global_lb.routing.routes import Routes, RoutesChanged
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Answer, Command, Event, Request
    from farhop.balance.outcome import Outcome
    from global_lb.fleet.table import Price
    from global_lb.routing.policy import RouteConfig, RouteScope
    from topology.law import Law, Verdict

    AttemptEvent = machine.AttemptBegan | machine.AttemptEnded | machine.AttemptFailed | machine.AttemptRefused

RESUMES_MAX = 3  # of one stream, as in a region
# The longest wait of a broken stream for a region that continues it. If much breaks at once, the remaining regions
# answer late: giving up a connection takes 3 s, the next report of a silent region 1 s, and asking both again some 8 s.
RESUME_WAIT_S = 20.0
MOVE_AGAIN_S = 2.0  # until a stream that could not leave a drained region tries again: another may have room
LOOK_AGAIN_S = 1.0  # between two looks at whether an attempt that has not begun should be given up
LOOK_SOON_S = 0.5  # the same, after its region's channel broke
# Another region counts as much slower beyond this factor plus this slack. By the same figures a region judges whether
# it can keep a promise (foreign.promise_factor, foreign.promise_slack_ms).
SOONER_FACTOR, SOONER_SLACK_MS = 2.0, 500.0
TURNED_AWAY_MAX = 3  # regions that refuse in favour of others before one is asked as the last resort
LOOK_HELD_S = (
    0.5  # held requests are looked at once in this time though no region changed: quotas and drains end by time
)
_ENDED_TWO_DETAIL = "this request was under way at two balancers when they ended; it is not sent to a third for a while"
_NO_PATH_DETAIL = (
    "no engine of this model has this path: ask for a chat on /v1/chat/completions, with a model that generates; "
    "embeddings, scores and rankings take a model that is served for them"
)
_NO_PATH = outcome.PATH_UNSUPPORTED
_TOO_LONG_DETAIL = "no engine of this model that the request may go to can hold so long a one"
AT_ONCE_MS = 100.0  # a request that waits no longer than this counts as not queued
ASK_AGAIN_S = 2.0  # a request on hold does not ask a region that refused it before this


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one global balancer. `trie_bytes` is the prompt text mirrored per region, not memory; `https_only`: its
    clients use TLS, and are never redirected to plain HTTP. `unicast_url` leads to this balancer alone."""

    region: str
    trie_bytes: int = 256 * 1024 * 1024
    held_max: int = 1024
    liveness: LivenessConfig = LivenessConfig()
    spill: Spill = Spill()
    https_only: bool = False
    unicast_url: str = ""
    pilots: dict[str, PilotConfig] = {}


class Reconfigured(machine.Event, frozen=True):
    """The topology, the law applied to it and the rest of the configuration, as a whole, are these from now on. The
    region and what only a start sets (`trie_bytes`, `liveness`, `https_only`) are unchanged."""

    law: Law
    config: FlowConfig
    routes: dict[RouteScope, RouteConfig]
    prices: dict[str, Price]


class GlobalFlow:
    """See the module's docstring. `patience_s` gives how long (seconds) a tenant's requests wait while no lawful region
    serves."""

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
        self.redirects = Redirects(https_only=config.https_only)
        self.routes = routes or Routes()
        self.regions = Regions(config.trie_bytes, config.liveness, config.spill, config.region, prices, config.pilots)
        self.regions.remap(frozenset(law.topology.regions))
        self.forgotten: list[Callable[[], None]] = []  # called when all prefixes are forgotten
        # Called when another law is in force, or more is known of what models it binds.
        self.law_changes: list[Callable[[], None]] = []
        self.ledger, self.estimates = Ledger(), Estimates()
        self._suspects = Suspects()
        # What a request with that many tokens of answers may cost, in millionths of a USD; the tier sets it.
        self.micro_usd: Callable[[Request, float], int | None] = lambda _request, _tokens: None
        self.requests: dict[str, RequestState] = {}
        self.budget = retry.RetryBudget(self.requests)
        self.held: dict[str, str] = {}  # by request, the lost region that it waits for; "": any that can be asked
        self.displaced: dict[str, None] = {}  # sent without a promise while a region was away, and not begun
        self._absent_regions: set[str] = set()  # regions that were absent when a request in `displaced` was sent
        self._move_deadlines: dict[str, float] = {}  # drained region -> when all its streams must have left (s)
        self._woken_at = -inf  # when all on hold were looked at last
        self._availability: dict[str, Any] = {}  # of each region, when it was last looked at for those on hold
        self.handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptRefused: self._refused,
            machine.AttemptFailed: self._failed,
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            machine.LawChanged: self._law_changed,
            Reconfigured: self._reconfigured,
            ViewSwapped: self._view_swapped,
            RegionKnown: self._region_known,
            RegionReported: self._region_reported,
            ChannelChanged: self._channel_changed,
            RegionForced: self._region_forced,
            OutputsReported: self._outputs_reported,
            RoutesChanged: self._overridden,
            OverridesChanged: self._overridden,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event; returns the commands to execute."""
        return self.handlers[type(event)](event, now)

    @property
    def under_way(self) -> int:
        """Requests that are neither answered nor given up."""
        return len(self.requests)

    # -- the events of a request

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if request.id in self.requests:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        verdict = self.law.request_verdict(request)
        lawful = verdict.lawful if request.lawful is None else verdict.lawful & request.lawful
        if request.by_anycast:
            route = self.routes.of(request.tenant, request.model).config
            own = self.redirects.to_own_name(request, route, self.config.unicast_url)
            if own is not None:
                return [own]
        state = self.requests[request.id] = RequestState(request, lawful, self.law, attempts=request.attempted)
        self.estimates.now = now
        return self._dispatch(state, now, verdict)

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        found = self._under_way(event)
        if found is None or found[1].started:
            return []
        state, attempt = found
        self.ledger.began(event.id, now)
        self._start(state, attempt, event.status)
        if event.status < 400:
            self._answer_begins(state, attempt, now)
        if attempt.region in self._move_deadlines:
            return [self._move_at(state, max(self._move_deadlines[attempt.region], now + MOVE_AGAIN_S))]
        return []

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        found = self._under_way(event)
        if found is None:
            return []
        state, attempt = found
        if not attempt.started:
            self._start(state, attempt, event.status)
        request, usage = state.request, event.usage
        if attempt.tokens_per_s:
            self._answer_over(state, attempt, now, usage, ended=True)
        self._conclude(state)
        if self._suspects.against:
            self._suspects.answered((request.tenant, request.body_hash))
        if event.status < 400 and usage is not None:
            self.estimates.now = now
            self.estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
            if state.decision is not None:
                self.routes.answered(state.decision, usage.completion_tokens, now)
                self.regions.compare(request, state.decision.chosen, usage, now)
        return []

    def _refused(self, event: machine.AttemptRefused, now: float) -> list[Command]:
        found = self._under_way(event)
        if found is None:
            return []
        state, attempt = found
        self.regions.liveness_of(attempt.region).relay_succeeded()
        # What the region's machine refuses it has counted; its listeners turn away uncounted (client, balancer).
        counted = event.outcome.source not in (Source.CLIENT, Source.BALANCER)
        counted = counted and event.outcome is not outcome.UNLAWFUL_UNREAD
        if event.wait_ms is not None:
            state.waits_ms[attempt.region] = event.wait_ms
        if event.outcome is outcome.QUEUE_TIMEOUT:
            state.waited_s += now - attempt.sent_at
        if event.outcome is outcome.TOO_LONG:
            self._too_long(state, attempt)
        elif event.outcome.source is Source.REGION:
            self.regions.refused(attempt.instance, state.request.model, event.outcome, event.wait_ms)
        return self._came_back(state, attempt, event.outcome, now, counted=counted)

    def _failed(self, event: machine.AttemptFailed, now: float) -> list[Command]:
        found = self._under_way(event)
        if found is None:
            return []
        state, attempt = found
        if event.outcome is outcome.TOO_LONG:  # an engine's word, which the region passed on
            self.regions.liveness_of(attempt.region).relay_succeeded()
            self._too_long(state, attempt)
            return self._came_back(state, attempt, event.outcome, now, counted=True)
        if outcome.blames_target(event.outcome) and not event.target_lives:
            self.regions.liveness_of(attempt.region).relay_failed(now)
            self._broke_off(state, attempt, event.outcome, now)
        if attempt.started:
            return self._resume(state, attempt, event, now)
        return self._came_back(state, attempt, event.outcome, now, counted=False)

    def _too_long(self, state: RequestState, attempt: RegionAttempt) -> None:
        """The region refused the request for its length: regions that cannot hold longer ones need not be asked."""
        model = state.request.model
        refused_tokens = self.regions.context_tokens(attempt.region, model)  # infinite: unknown, or it is down
        for region in state.lawful:
            if self.regions.context_tokens(region, model) <= refused_tokens < inf:
                state.refusals.setdefault(region, outcome.TOO_LONG)

    def _resume(
        self, state: RequestState, attempt: RegionAttempt, event: machine.AttemptFailed, now: float
    ) -> list[Command]:
        """After a failure in mid-stream: continue from another region, if the law in force and the bounds allow it. If
        no region seems to serve just now, it waits: its client has a part of the answer, and a region that could
        continue may come back. So may a lost region that is the only one: its engines need not have stopped with its
        balancer."""
        request, region = state.request, attempt.region
        state.broke |= {region}
        lawful = state.lawful & self.law.request_verdict(request).lawful
        elsewhere = any(self.regions.offers(other, request.model) for other in lawful - state.broke)
        returns = not elsewhere and region in lawful and lost.is_lost(self.regions.liveness_of(region))
        returns &= len(self.held) < self.config.held_max
        bounded = state.resumes < RESUMES_MAX and state.attempts < retry.ATTEMPTS_MAX
        if not event.resumable or not bounded or not (elsewhere or returns):
            self._conclude(state)
            how = "was stopped by another law" if event.outcome.source is Source.LAW else "failed while answering"
            return [machine.Answer(event.id, event.outcome, f"region {region} {how}")]
        self._withdraw(state, attempt, counted=True)
        state.resumes += 1
        # The region where it broke is not asked again while there is another. Refusals from before the stream began are
        # outdated.
        refusals = {**state.refusals, region: event.outcome}
        state.refusals = {one: reason for one, reason in refusals.items() if one in state.broke}
        state.waits_ms.clear()
        patience_s = max(RESUME_WAIT_S, self._patience_s(request.tenant))
        state.held_until = min(request.deadline, now + patience_s)
        if returns:
            return self._hold(state, min(state.held_until, now + ASK_AGAIN_S), region)
        return self._dispatch(state, now)

    def _client_left(self, event: machine.ClientLeft, _now: float) -> list[Command]:
        state = self.requests.get(event.id)
        if state is not None:
            self._conclude(state)
        return []

    def _timer_fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        state = self.requests.get(event.id)
        if state is None:
            return []
        if now < state.due:
            return [machine.SetTimer(event.id, state.due)]  # timers may fire a little early
        attempt = state.attempt
        if attempt is None:
            state.refusals.clear()
            return self._dispatch(state, now)
        if now >= state.request.deadline:
            return [self._answer(state, outcome.DEADLINE, "the request's deadline passed")]
        if self._should_give_up(state, attempt, now):
            self.regions.liveness_of(attempt.region).relay_failed(now)
            self._broke_off(state, attempt, outcome.FIRST_BYTE_TIMEOUT, now)
            cancel = machine.Cancel(state.request.id, state.attempts)
            return [cancel, *self._came_back(state, attempt, outcome.FIRST_BYTE_TIMEOUT, now, counted=False)]
        if attempt.started and attempt.region in self._move_deadlines:
            return self._move(state, attempt, now)
        return [self._look_again(state, attempt, now)]

    def _look_again(self, state: RequestState, attempt: RegionAttempt, now: float) -> Command:
        """Set a timer to see whether the request's region is still alive: a request that is lost on the way causes no
        event."""
        deadline = state.request.deadline
        return self._timer(state, deadline if attempt.started else min(deadline, now + LOOK_AGAIN_S))

    def _should_give_up(self, state: RequestState, attempt: RegionAttempt, now: float) -> bool:
        """Whether an attempt that has not begun should be given up: its region is down, or suspect while another is
        not. A region that left the topology reports no more: there only the relay's time limits apply."""
        if attempt.region not in self.law.topology.regions:
            return False
        health = State.UP if attempt.started else self.regions.liveness_of(attempt.region).read(now).state
        if health is not State.SUSPECT:
            return health is State.DOWN
        elsewhere = frozenset((attempt.region, *state.refusals))
        other = self.consider(state.request, now, state.lawful, elsewhere).chosen
        return other is not None and self.regions.liveness_of(other.region).read(now).state is State.UP

    def _under_way(self, event: AttemptEvent) -> tuple[RequestState, RegionAttempt] | None:
        """The request and its current attempt, if the event is about that one; an event of an earlier attempt changes
        nothing."""
        state = self.requests.get(event.id)
        if state is None or state.attempt is None or state.attempts != event.attempt:
            return None
        return state, state.attempt

    def _start(self, state: RequestState, attempt: RegionAttempt, status: int) -> None:
        """The answer's first byte is here, alone or with the whole answer."""
        attempt.started = True
        if self.displaced:
            self.displaced.pop(state.request.id, None)
        self.regions.liveness_of(attempt.region).relay_succeeded()
        attempt.load.answered(state.request.prompt_bytes, attempt.work_bytes)
        self.regions.load_changed(attempt.region)
        # The region holds this prefix now. It is recorded only if the law allows hints of it here.
        if status < 400 and admission.hints_allowed(state.request, self.config.region, self.law):
            self.regions.caches(attempt.region, state.request.chain)

    def _answer_begins(self, state: RequestState, attempt: RegionAttempt, now: float) -> None:
        """An answer begins: it counts as under way from now on, and its first token's time is compared with the
        promise. An answer in one piece shows no first token, and a continued stream is another request there."""
        request, chosen = state.request, state.decision.chosen if state.decision is not None else None
        if chosen is None or not request.stream or state.resumes:
            return
        self.regions.began(request.model, chosen, (now - attempt.sent_at) * 1e3)
        attempt.began_at, attempt.tokens_per_s = now, 1e3 / max(chosen.tpot_ms, TPOT_MS[0])
        self.estimates.now = now
        self.estimates.began(request.tenant, request.model, attempt.tokens_per_s, now)

    def _answer_over(
        self, state: RequestState, attempt: RegionAttempt, now: float, usage: machine.Usage | None, *, ended: bool
    ) -> None:
        """The answer is not under way any more: ended, or broken off."""
        request, per_s, began_at = state.request, attempt.tokens_per_s, attempt.began_at
        tokens = per_s * (now - began_at) if usage is None else float(usage.completion_tokens)
        self.estimates.over(request.tenant, request.model, per_s, began_at, tokens, ended=ended)
        attempt.tokens_per_s = 0.0

    # -- the events of the world around it

    def _law_changed(self, event: machine.LawChanged, now: float) -> list[Command]:
        """Requests under way stay where their prompt is, once all of it is there; every later dispatch must obey this
        law, too."""
        if not event.law.supersedes(self.law):
            return []
        return self._apply_law(event.law.knowing(self.regions.lineages.of), now)

    def _reconfigured(self, event: Reconfigured, now: float) -> list[Command]:
        """As with a law: requests under way stay where they are, and every further attempt obeys the new
        configuration."""
        self.config = event.config
        self.regions.remap(frozenset(event.law.topology.regions))
        self.regions.reconfigure(event.config.spill, event.prices, event.config.pilots)
        self.routes.configure(event.routes)
        return self._apply_law(event.law.knowing(self.regions.lineages.of), now)

    def _apply_law(self, law: Law, now: float) -> list[Command]:
        """Use another law: drop prefixes if it narrows hints, and recall attempts that it forbids. If more is known of
        what models are based on, the laws that requests arrived under forbid by that, too."""
        before, self.law = self.law, law
        for changed in self.law_changes:
            changed()
        if law.lineage is not before.lineage:
            arrivals = {one: one.knowing(law.lineage) for one in {state.law for state in self.requests.values()}}
            for state in self.requests.values():
                arrival = arrivals[state.law]
                state.lawful &= arrival.request_verdict(state.request).lawful
                state.request = model_steps.with_fallbacks_narrowed(state.request, arrival)
        if not law.widens(before, Scope.HINTS, frozenset((self.config.region,))):
            self.regions.forget_prefixes()  # a hash does not say whose prompt it was made from
            for forgotten in self.forgotten:
                forgotten()
        recalled = [
            machine.Recall(request_id, state.attempts)
            for request_id, state in self.requests.items()
            if (attempt := state.attempt) is not None  # one whose answer has begun may not be sent whole
            and attempt.region not in law.request_verdict(state.request).lawful & state.lawful
        ]
        return self._wake(now, by_law=True) + recalled

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        self.redirects.expire(self.regions, now)
        self.regions.adopt(event.view, now)
        law = self.law.knowing(self.regions.lineages.of)
        return self._wake(now) if law is self.law else self._apply_law(law, now)

    def _region_known(self, event: RegionKnown, now: float) -> list[Command]:
        return self._changed(event.region, lambda: self.regions.take(event.region, event.known), now)

    def _region_reported(self, event: RegionReported, now: float) -> list[Command]:
        region, known = event.region, event.known

        def change() -> None:
            self.regions.liveness_of(region).reported(now, renewed=event.renewed)
            if known is not None:
                self.redirects.expire(self.regions, now)
                self.regions.take(region, known)

        return self._changed(region, change, now)

    def _channel_changed(self, event: ChannelChanged, now: float) -> list[Command]:
        region, known = event.region, event.known

        def change() -> None:
            self.regions.liveness_of(region).channel(event.up, now)
            if known is not None:
                self.regions.take(region, known)

        commands = self._changed(region, change, now)
        if not event.up:
            for state in self.requests.values():
                attempt = state.attempt
                waits = attempt is not None and attempt.region == region and not attempt.started
                if waits and now + LOOK_SOON_S < state.due:  # its channel may be back then
                    commands.append(self._timer(state, now + LOOK_SOON_S))
        return commands

    def _region_forced(self, event: RegionForced, now: float) -> list[Command]:
        forced = self.regions.liveness_of(event.region).forced
        pace = {"over_s": event.over_s, "keep_share": event.keep_share}
        force = partial(forced.force, State.DRAINING, event.why, event.until, now=now, **pace)
        commands = self._changed(event.region, force if event.drain else forced.lift, now)
        if event.drain and event.moves:
            return commands + self._move_away(event.region, event.over_s, now)
        self._move_deadlines.pop(event.region, None)
        return commands

    def _outputs_reported(self, event: OutputsReported, now: float) -> list[Command]:
        self.estimates.now = now
        self.estimates.adopt(Learned({}, {(tenant, model): tokens for tenant, model, tokens in event.outputs}))
        return []

    def _overridden(self, event: RoutesChanged | OverridesChanged, now: float) -> list[Command]:
        self.routes.apply(event)
        return self._wake(now)

    # -- streams that leave a drained region: at its pace, each by its own timer, and only if another region takes it

    def _move_away(self, region: str, over_s: float, now: float) -> list[Command]:
        known = region in self._move_deadlines
        self._move_deadlines[region] = now + over_s
        there = [s for s in self.requests.values() if s.attempt and s.attempt.started and s.attempt.region == region]
        streams = [state for state in there if state.request.stream and (not known or state.due > now + over_s)]
        interval_s = over_s / max(1, len(streams))
        return [self._move_at(state, now + n * interval_s) for n, state in enumerate(streams, 1)]

    def _move_at(self, state: RequestState, at: float) -> Command:
        return self._timer(state, min(state.request.deadline, at))

    def _move(self, state: RequestState, attempt: RegionAttempt, now: float) -> list[Command]:
        """Ask the relay to move the stream, which knows whether it can be continued; one that cannot finishes where it
        is."""
        if self.regions.liveness_of(attempt.region).forced.read(now) is None:
            del self._move_deadlines[attempt.region]
            return [self._look_again(state, attempt, now)]
        again: Command = self._move_at(state, now + MOVE_AGAIN_S)
        elsewhere = frozenset((attempt.region, *state.refusals))
        if not state.request.stream or state.resumes >= RESUMES_MAX:
            return [self._look_again(state, attempt, now)]
        if self.consider(state.request, now, state.lawful, elsewhere).chosen is None:
            return [again]
        return [again, machine.Move(state.request.id, state.attempts)]

    # -- what a change lets go: requests on hold, and displaced ones whose region is back

    def _changed(self, region: str, change: Callable[[], None], now: float) -> list[Command]:
        """A region's liveness or offer changes. Its state until now may have changed by time alone, unnoticed: handle
        both changes.

        Held requests are looked at if the region can now take requests that it could not before, or the reverse; in any
        case once in LOOK_HELD_S.
        """
        regions = self.regions
        before = regions.availability(region, now) if self.held else None
        regions.update_guards(region, now)
        change()
        regions.update_guards(region, now)
        law = self.law.knowing(regions.lineages.of)
        commands = [] if law is self.law else self._apply_law(law, now)
        if region in self._absent_regions:
            commands += self._reclaim(region, now)
        if before is None:
            return commands
        after, seen = regions.availability(region, now), self._availability.get(region, before)
        self._availability[region] = after
        if not before == seen == after or now >= self._woken_at + LOOK_HELD_S:
            commands += self._wake(now)
        return commands

    def _reclaim(self, region: str, now: float) -> list[Command]:
        """Move requests back to a region that has returned: those that went elsewhere without a promise while it was
        away, if it would begin them at once, long before the queues where they wait. The oldest first; if one would
        gain nothing, the others like it are not tried.

        A request with a promise is released by a region that cannot keep it. One without stays there for the longest
        allowed time, and a region that died leaves hundreds of those behind: they would go on waiting although their
        region is back and idle. Only to a region that is back: in lasting overload, a request that moves from queue to
        queue loses its turn in each of them. And only to begin at once: a queue of late requests would delay all those
        that are still in time.
        """
        commands: list[Command] = []
        stuck: set[Any] = set()
        there = [state for state in map(self.requests.__getitem__, self.displaced) if _sent_while_absent(state, region)]
        if not there:
            self._absent_regions.discard(region)
        for state in there:
            request, attempt = state.request, state.attempt
            assert attempt is not None  # whose end would have taken it off
            alike = (
                request.tenant, request.model, request.alias, request.narrow, request.key, state.lawful, attempt.region,
            )  # fmt: skip
            if alike in stuck:
                continue
            decision = self._better_at(region, state, attempt, now)
            if decision is None:
                stuck.add(alike)
                continue
            commands.append(machine.Cancel(request.id, state.attempts))
            self._withdraw(state, attempt, counted=True)
            state.waited_s += now - attempt.sent_at
            state.last_resort = False
            state.refusals.clear()
            commands += self._dispatch(state, now, decision=decision)
        return commands

    def _better_at(self, region: str, state: RequestState, attempt: RegionAttempt, now: float) -> Decision | None:
        """The decision to move a waiting request to that region, if it would begin there at once and long before its
        turn where it waits; None otherwise."""
        if now >= state.request.deadline or state.attempts + 1 >= retry.ATTEMPTS_MAX:
            return None
        decision = self.consider(state.request, now, state.lawful)
        chosen = decision.chosen
        if chosen is None or chosen.region != region or chosen.wait_ms > AT_ONCE_MS or decision.is_last_resort(now):
            return None
        there = next((one for one in decision.scored if one.region == attempt.region), None)
        sooner = there is not None and there.wait_ms >= SOONER_FACTOR * chosen.bare_ttft_ms + SOONER_SLACK_MS
        return decision if sooner else None

    def _wake(self, now: float, *, by_law: bool = False) -> list[Command]:
        """Dispatch held requests that can go now. If one cannot, the others like it are not tried, as there may be
        many."""
        commands: list[Command] = []
        stuck: set[Any] = set()
        self._woken_at = now
        for request_id in tuple(self.held):
            state = self.requests[request_id]
            request, waits_for = state.request, self.held[request_id]
            if waits_for and not by_law and now < state.due and lost.is_lost(self.regions.liveness[waits_for]):
                continue
            if now >= state.due:
                state.refusals.clear()  # as its timer, which is due, would
            alike = (
                request.tenant, request.model, request.alias, request.narrow, request.key, state.lawful,
                frozenset(state.refusals), state.quarantined and request.body_hash,
            )  # fmt: skip
            if alike in stuck:
                continue
            released = self._dispatch(state, now)
            commands += released
            if self.held.get(request_id) == "":  # one that waits for a certain region says nothing of the others
                stuck.add(alike)
        return commands

    # -- deciding

    def consider(
        self, request: Request, now: float, within: frozenset[str] | None = None, without: frozenset[str] = frozenset(),
        verdict: Verdict | None = None,
    ) -> Decision:  # fmt: skip
        """Decide for a request by the law in force, inside `within` if given, and `without` the regions already tried.
        `verdict` is the law's, if it was asked just now.

        Changes nothing; `explain` asks the same way.
        """
        verdict, routes = verdict or self.law.request_verdict(request), self.routes
        output_tokens = self.estimates.output_tokens(request.tenant, request.model, request.max_tokens)
        lawful, route = admission.both(verdict.lawful, within), routes.of(request.tenant, request.model)
        candidates = self.regions.candidates(request, output_tokens, lawful, now, without, self._rng)
        decision = pick(
            candidates,
            verdict,
            route,
            self._rng,
            now,
            self.config.region,
            overrides=routes.overrides,
            affinity=routes.affinity,
            soft_affinity=routes.soft_affinity,
        )
        if not request.alias:
            return decision
        return msgspec.structs.replace(decision, notes=(model_steps.alias_note(request), *decision.notes))

    def resolve(self, request: Request, allowed: Sequence[str], now: float) -> Request | cascade.Unresolved | None:
        """The request for the model that its name stands for now; None if the name is a model's own and stands for no
        other. `allowed` are the models of its API key, empty for any. Changes nothing."""
        steps = self.routes.cascade(request.tenant, request.model)
        if not steps:
            return None
        found = cascade.resolve(
            request,
            model_steps.ordered(steps, model_steps.drawn(request, self._rng)),
            allowed,
            self.law,
            consider=lambda one: self.consider(one, now, one.lawful),
            known=self.regions.may_exist,
            micro_usd=lambda one: self.micro_usd(one, self._answer_tokens(one)),
        )
        if isinstance(found, cascade.Unresolved) or found.model != request.model:
            return found
        if not found.fallbacks:
            return None
        return msgspec.structs.replace(
            request, fallbacks=found.fallbacks, fallbacks_lawful=found.fallbacks_lawful, narrow=found.narrow
        )

    def _answer_tokens(self, request: Request) -> float:
        """The tokens of a request's answers: the most it allows or, if it sets no limit, the number expected."""
        if request.max_tokens is not None:
            return float(request.max_tokens * request.answers)
        return self.estimates.output_tokens(request.tenant, request.model, None) * request.answers

    def _decide(self, state: RequestState, now: float, verdict: Verdict | None = None) -> Decision:
        """Decide by both laws: the one of the request's arrival and the one in force. Regions that refused it in favour
        of others are asked again, without a promise, once no other region would serve it about as soon, or enough of
        them have refused."""
        decision = self.consider(state.request, now, state.lawful, frozenset(state.refusals), verdict)
        if not state.refusals:
            state.last_resort = state.last_resort or decision.is_last_resort(now)
            return decision
        turned_away_by = [region for region, reason in state.refusals.items() if admission.turned_away(reason)]
        if not turned_away_by or state.last_resort:
            state.last_resort |= not turned_away_by and decision.is_last_resort(now)
            return decision
        failed = frozenset(state.refusals.keys() - set(turned_away_by))
        as_last_resort = self.consider(state.request, now, state.lawful, failed)
        may_ask_more = len(turned_away_by) < TURNED_AWAY_MAX and state.attempts + 1 < retry.ATTEMPTS_MAX
        untried, best = decision.chosen, as_last_resort.chosen
        if may_ask_more and untried is not None:
            least_ms = max(best.bare_ttft_ms, state.waits_ms.get(best.region, 0.0)) if best is not None else inf
            if untried.bare_ttft_ms <= SOONER_FACTOR * least_ms + SOONER_SLACK_MS:
                return decision
        state.last_resort = True
        for region in turned_away_by:
            del state.refusals[region]
        return as_last_resort

    def _dispatch(
        self, state: RequestState, now: float, verdict: Verdict | None = None, decision: Decision | None = None
    ) -> list[Command]:
        """Send the request to the best region it may go to, or conclude or hold it. `verdict`: as for `consider`;
        `decision`: the region, if it was decided just now."""
        request = state.request
        if now >= request.deadline:
            return [self._answer(state, outcome.DEADLINE, "the request's deadline passed")]
        state.quarantined = False
        if self._suspects.against and request.body_hash and (commands := self._suspected(state, now)) is not None:
            return commands
        waits_for = self.held.get(request.id)
        if waits_for and self.regions.liveness[waits_for].lost_at is None:
            state.refusals.pop(waits_for, None)  # it is back, and is asked again
        decided = decision is not None
        decision = state.decision = decision or self._decide(state, now, verdict)
        chosen = decision.chosen
        if chosen is None:
            return self._nowhere(state, decision, now)
        if (
            (state.waited_for or self.regions.lost)
            and not decided
            and (waits := self._await_return(state, decision, now)) is not None
        ):
            return waits
        self.held.pop(request.id, None)
        instance = self.regions.best_instance(chosen.region, request.model)
        assert instance is not None  # it was among the offers, and no await lies between
        lawful = admission.both(state.lawful, decision.verdict.lawful)
        self.routes.sent(request, decision, now)
        if state.attempts == 0 and self.redirects.redirects(request, decision, instance, self.law):
            self._conclude(state)
            return [self.redirects.redirect(request, decision, instance, lawful, self.regions, now)]
        state.attempts += 1
        load, work_bytes = self.regions.load_of(instance), chosen.work_bytes
        state.attempt = RegionAttempt(chosen.region, instance, load, work_bytes, now)
        self.ledger.reserve(request.id, Reservation(chosen.region, int(chosen.uncached_tokens), 0))
        load.sent(request.prompt_bytes, work_bytes)
        self.regions.asked(request.model, work_bytes)
        if state.last_resort and decision.absent and not request.once:
            self.displaced[request.id] = None
            self._absent_regions.update(decision.absent)
        wanted_by, among = request.first_token_by, decision.candidates
        return [
            self._timer(state, min(request.deadline, now + LOOK_AGAIN_S)),
            (machine.Resume if state.resumes else machine.Forward)(
                request.id,
                state.attempts,
                chosen.region,
                instance.tier,
                None if state.last_resort else chosen.bare_ttft_ms,
                lawful,
                decision,
                waited_s=state.waited_s,
                first_token_by=None if wanted_by is None else wanted_by - chosen.rtt_ms / 1e3,
                longer=among is not None and among.contexts_differ and among.holds_longer(chosen.region),
            ),
        ]

    def _nowhere(self, state: RequestState, decision: Decision, now: float) -> list[Command]:
        """No region takes the request now: conclude it, start it again for another model, or hold it."""
        request = state.request
        lawful = state.lawful & decision.verdict.lawful
        if not lawful:
            return [self._answer(state, outcome.UNLAWFUL, admission.summary(decision.verdict, state.lawful))]
        if not self.regions.may_exist(request.model):
            detail = f"the model `{request.model[:128]}` does not exist or no region serves it"
            return [self._answer(state, outcome.UNKNOWN_MODEL, detail)]
        if state.held_until is None:
            state.held_until = min(request.deadline, now + self._patience_s(request.tenant))
        held = request.id in self.held
        crowded = not held and len(self.held) >= self.config.held_max
        if state.refusals and (instead := self._fall_back(state, now)) is not None:
            return [instead]
        if crowded or now >= state.held_until or state.law_refused(lawful) or state.all_say(_NO_PATH):
            return [self._exhausted(state, decision.verdict, now)]
        due = min(state.held_until, now + ASK_AGAIN_S) if state.refusals else state.held_until
        return [] if held and now < state.due else self._hold(state, due)  # []: it waits already

    def _await_return(self, state: RequestState, decision: Decision, now: float) -> list[Command] | None:
        """Hold the request while it waits for a lost region (see `lost`); None if it goes."""
        request_id = state.request.id
        held_for = self.held.get(request_id)
        found = lost.region_to_wait_for(state, decision, self.regions, held_for, now)
        if found is None or (held_for is None and len(self.held) >= self.config.held_max):
            return None
        region, until = found
        if held_for == region and state.due == until:
            return []
        state.waited_for = {**state.waited_for, region: until}
        return self._hold(state, until, region)

    # -- queries of death: what may have ended two processes is not handed to a third (farhop.balance.health.suspects)

    def _broke_off(self, state: RequestState, attempt: RegionAttempt, reason: Outcome, now: float) -> None:
        """An attempt ended without an answer: it was under way, unless there was no connection."""
        instance, request = attempt.instance, state.request
        if request.body_hash and reason in BROKE_OFF:
            process = (instance.region, instance.name, str(instance.incarnation))
            # The request is not to blame if the region fell silent before it was sent there.
            last_seen_at = max(attempt.sent_at, self.regions.view.reported_at(process))
            self._suspects.broke_off((request.tenant, request.body_hash), process, last_seen_at, now)

    def _suspected(self, state: RequestState, now: float) -> list[Command] | None:
        """What to do with a request whose body is suspected to end engines; None: send it on as usual."""
        request = state.request
        quarantine = self._suspects.quarantine((request.tenant, request.body_hash), self.regions.view.reported_at, now)
        state.quarantined = quarantine is not None
        if quarantine is None:
            return None
        if quarantine.sure:
            return [self._answer(state, outcome.ENDED_TWO_PROCESSES, _ENDED_TWO_DETAIL, quarantine.until - now)]
        due = min(request.deadline, quarantine.until)
        return [] if request.id in self.held and state.due == due else self._hold(state, due)

    # -- holding and retrying

    def _hold(self, state: RequestState, due: float, waits_for: str = "") -> list[Command]:
        """Hold the request until a region can be asked, or that one is back; its timer looks at it again at the
        latest."""
        request_id, timer = state.request.id, self._timer(state, due)
        waits = request_id in self.held
        self.held[request_id] = waits_for
        return [timer] if waits else [machine.Hold(request_id), timer]

    def _timer(self, state: RequestState, at: float) -> Command:
        state.due = at
        return machine.SetTimer(state.request.id, at)

    def _came_back(
        self, state: RequestState, attempt: RegionAttempt, reason: Outcome, now: float, *, counted: bool
    ) -> list[Command]:
        """An attempt ended before the first byte: try the next runner-up, within the retry rules, or answer.

        `counted`: the region has counted the request, so that its next reports will acknowledge it.
        """
        region = attempt.region
        self._withdraw(state, attempt, counted=counted)
        state.refusals[region] = reason
        if not retry.may_redispatch(reason, state.attempts, state.transport_retries, self.budget):
            if not reason.retryable:
                return [self._answer(state, reason, state.summary())]
            if (instead := self._fall_back(state, now)) is not None:
                return [instead]
            return self._retry_stream_later(state, now) or [
                self._exhausted(state, self.law.request_verdict(state.request), now)
            ]
        if retry.draws_on_budget(reason, state.transport_retries) and not state.budgeted:
            state.budgeted = self.budget.take()
        if reason.source is Source.TRANSPORT:
            state.transport_retries += 1
            # A region that reports its replica's failure has tried what it could; a region that did not answer may
            # still have others.
            tried = frozenset(state.refusals)
            if not counted and self.consider(state.request, now, state.lawful, tried).chosen is None:
                del state.refusals[region]  # better the same region again than none
        elif state.request.fallbacks and not state.last_resort:
            tried = frozenset(state.refusals)
            if self.consider(state.request, now, state.lawful, tried).chosen is None:
                # Before a region is asked as the last resort, where the request may wait in its queue for long.
                instead = self._fall_back(state, now, room=True)
                if instead is not None:
                    return [instead]
        return self._dispatch(state, now)

    def _fall_back(self, state: RequestState, now: float, *, room: bool = False) -> Command | None:
        """Instead of a refusal for lack of room: another model that the requested name stands for, if one is served
        where the request may go. Not if the law or the path is the reason for the refusal."""
        request = state.request
        wanted = [one for one in state.refusals.values() if one.source is not Source.LAW and one is not _NO_PATH]
        if not request.fallbacks or state.resumes or (state.refusals and not wanted):
            return None
        refused = wanted[-1].reason if wanted else "not served"
        found = cascade.fall_back(
            request, refused, state.attempts, lambda one: self.consider(one, now, one.lawful), room=room
        )
        if found is None:
            return None
        self._conclude(state)
        return machine.FallBack(request.id, found, state.decision)

    def _retry_stream_later(self, state: RequestState, now: float) -> list[Command]:
        """Try a broken stream again later, if it was tried elsewhere as often as allowed at once; [] for other
        requests, and for a stream that has waited its time."""
        full = state.attempts >= retry.ATTEMPTS_MAX or len(self.held) >= self.config.held_max
        if not state.resumes or state.held_until is None or now >= state.held_until or full:
            return []
        return self._hold(state, min(state.held_until, now + ASK_AGAIN_S))

    # -- endings and learning

    def _exhausted(self, state: RequestState, verdict: Verdict, now: float) -> Answer:
        """No lawful region is left. If all of them refused for the law's sake, the law is the answer."""
        lawful = state.lawful & verdict.lawful
        if state.law_refused(lawful):
            why = state.summary() if lawful else admission.summary(verdict, state.lawful)
            return self._answer(state, outcome.UNLAWFUL, why)
        if state.all_say(_NO_PATH):
            return self._answer(state, outcome.PATH_UNSUPPORTED, _NO_PATH_DETAIL)
        if state.all_say(outcome.TOO_LONG):
            return self._answer(state, outcome.TOO_LONG, _TOO_LONG_DETAIL)
        if state.all_say(outcome.MODEL_NOT_SERVED):
            return self._answer(state, outcome.MODEL_NOT_SERVED, state.summary())
        return self._answer(
            state, outcome.NO_REGION, state.summary(), self.regions.opens_in_s(lawful, state.waits_ms, now)
        )

    def _answer(self, state: RequestState, reason: Outcome, detail: str, retry_after_s: float | None = None) -> Answer:
        self._conclude(state)
        return machine.Answer(state.request.id, reason, detail, retry_after_s, reasons=state.decision)

    def _conclude(self, state: RequestState) -> None:
        """Forget a request and give back all it held. Who calls this gives its last command, or had its last event."""
        request_id = state.request.id
        del self.requests[request_id]
        self.held.pop(request_id, None)
        if state.attempt is not None:
            self._withdraw(state, state.attempt, counted=state.attempt.started)
        if state.budgeted:
            self.budget.give()

    def _withdraw(self, state: RequestState, attempt: RegionAttempt, *, counted: bool) -> None:
        """The attempt is over: release what it reserved."""
        self.ledger.release(state.request.id)
        if attempt.tokens_per_s:
            self._answer_over(state, attempt, self.estimates.now, None, ended=False)
        if self.displaced:
            self.displaced.pop(state.request.id, None)
        state.attempt = None
        if not attempt.started:
            release = attempt.load.answered if counted else attempt.load.came_back
            release(state.request.prompt_bytes, attempt.work_bytes)
            self.regions.load_changed(attempt.region)


def _sent_while_absent(state: RequestState, region: str) -> bool:
    """Whether the region was away when the request was sent to the region where it now waits."""
    return state.decision is not None and region in state.decision.absent
