"""The regional tier's machine: admission -> queue -> policy -> pick, and what follows when things break.

Reads from top to bottom: the events of a request, the events of the world around it, streams that leave a drained
replica, dispatch (to a replica or into the queue, and out of it), retries, and endings.

Invariants: a request holds at most one reservation, from its Forward until its attempt is over, beside the one for its
prefill half (regional_lb.scheduler.pairs); it is in exactly one of three states: queued, holding a reservation, or
being concluded; every request that arrives is concluded exactly once, by an Answer, by its attempt's end or by its
client leaving; nothing is forwarded unless it is lawful here at that moment. Never awaits, never opens anything, never
sees a body.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop.balance import machine, model_steps, outcome, retry
from farhop.balance.estimate.estimates import Estimates
from farhop.balance.health.replica import HealthConfig
from farhop.balance.health.suspects import BROKE_OFF, Suspects
from farhop.balance.ledger import Reservation
from farhop.balance.outcome import Source
from farhop.balance.prefix import chain
from regional_lb.fleet.replicas import Replicas
from regional_lb.fleet.shares import Shares
from regional_lb.fleet.table import ANY
from regional_lb.fleet.view import ViewSwapped, model_of
from regional_lb.scheduler import admission
from regional_lb.scheduler.accepted_bytes import AcceptedBytes
from regional_lb.scheduler.deferred import Deferral, Deferred
from regional_lb.scheduler.eligibility import Eligibility
from regional_lb.scheduler.foreign_admission import ForeignAdmission
from regional_lb.scheduler.learning import Learning
from regional_lb.scheduler.overdue import OverdueCheckDue, OverdueRequests
from regional_lb.scheduler.pairs import Pairs
from regional_lb.scheduler.patience import Patience
from regional_lb.scheduler.policy import Policies, PoliciesChanged
from regional_lb.scheduler.queue import QueueConfig, RequestQueue, work
from regional_lb.scheduler.refusals import Refusals, RefusalsChanged
from regional_lb.scheduler.request_state import RequestState
from regional_lb.scheduler.scaling import Scaling, ScalingConfig
from regional_lb.scheduler.selector import ReplicaSelector
from regional_lb.scheduler.split import Splits, SplitsChanged
from regional_lb.scheduler.wait_estimate import WaitEstimate
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Answer, Command, Event, Request
    from farhop.balance.outcome import Outcome
    from regional_lb.fleet.table import Line, Subset, Table
    from regional_lb.scheduler.pick import Pick, Scored
    from regional_lb.scheduler.policy import PolicyConfig
    from regional_lb.scheduler.split import SplitConfig
    from topology.law import Law

    AttemptEvent = (
        machine.AttemptMoved
        | machine.AttemptBegan
        | machine.AttemptEnded
        | machine.AttemptFailed
        | machine.AttemptRefused
    )


_HINTS = Scope.HINTS  # to look up an enum's member is a call, and this is asked for every request

MOVE_AGAIN_S = 2.0  # until a stream that could not leave a drained replica tries again: another may have room
RESUMES_MAX = 3  # of one stream: what ends one engine after another is not handed on for ever

K_WAITING = 8  # how many of the first in line are compared for the best prefix when a slot frees
RETRY_AFTER_S = 1.0
_GAVE_UP = {
    outcome.PATH_UNSUPPORTED: "no engine of this model here has this path",
    outcome.TOO_LONG: "no engine of this model here that serves can hold so long a request",
    outcome.ENGINE_KEY_REFUSED: (
        "no engine of this model here accepts the region's key for it: its operator must set `engine_key`"
    ),
    outcome.ENGINE_REDIRECTS: (
        "the engines of this model here answer with redirects, which are not followed: their operator must set the "
        "`url` that answers itself"
    ),
    outcome.NO_ENGINE_THERE: (
        "what answers for the engines of this model here is a web page: their operator must correct their `url`"
    ),
    outcome.MODEL_NOT_SERVED: "no engine here serves this model any more",
    **dict.fromkeys(outcome.DECLINED, "no engine of this model here takes a request now"),
    outcome.WHOLE_ANSWER_TIMEOUT: (
        "no answer within this region's limit for one in one piece: ask for a stream, or less"
    ),
}


# An engine lacks a path for good; what lacks the model, or takes nothing now, said so a moment ago.
_ASKED_ONCE = frozenset((outcome.PATH_UNSUPPORTED, outcome.MODEL_NOT_SERVED, *outcome.DECLINED))


def _while_answering(reason: Outcome) -> str:
    """What ended an answer that had begun; the law does where the request was not sent whole."""
    stopped = reason.source is Source.LAW
    return "another law stopped it while it was sent" if stopped else "the replica failed while answering"


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one regional balancer. `instance` is its name among its peers, which share its replicas; "": it is
    alone. `move_over_s`: streams leave a drained replica over that many seconds; None: they end there."""

    region: str
    instance: str = ""
    queue: QueueConfig = QueueConfig()
    health: HealthConfig = HealthConfig()
    foreign: admission.ForeignConfig = admission.ForeignConfig()
    scaling: ScalingConfig = ScalingConfig()
    scalings: dict[str, ScalingConfig] = {}
    move_over_s: float | None = None


class Reconfigured(machine.Event, frozen=True):
    """The topology, the law applied to it and the rest of the configuration, as a whole, are these from now on. Region,
    instance and `health` are those of the start."""

    law: Law
    config: FlowConfig
    policies: dict[str, PolicyConfig]
    splits: dict[str, SplitConfig]


class RegionalFlow:
    """See the module's docstring. `weight_of` gives a tenant's weight within its priority band."""

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
        self.replicas = Replicas(config.health, Estimates(), Shares(config.instance) if config.instance else None)
        self.queue = RequestQueue(config.queue.requests_max, config.queue.tokens_max, config.queue.starvation_s)
        self._pairs = Pairs(self.replicas, lambda request: self.law.request_verdict(request, _HINTS), rng)
        self.deferred = Deferred()
        self.eligibility = Eligibility(self.replicas, self.splits)
        self.selector = ReplicaSelector(self.replicas, self.eligibility, self.policies, self.splits, self.deferred, rng)
        self.wait_estimate = WaitEstimate(
            self.replicas, self.queue, self.eligibility, self.selector, self.splits, self.deferred
        )
        self.foreign_admission = ForeignAdmission(
            config.region, config.foreign, self.eligibility, self.selector, self.wait_estimate, self.queue
        )
        self._patience = Patience(config.queue, self.queue, self.wait_estimate, weight_of)
        self.learning = Learning(self.replicas)
        self.scaling = Scaling(self.replicas, self.eligibility, self.wait_estimate, config.scaling, config.scalings)
        self.accepted_bytes = AcceptedBytes()
        self.news = 0  # a count of events that changed something: engines at rest report the same again and again
        self.wake: Callable[[], None] | None = None  # set by what waits for news: to be called at least once
        self._suspects, self.overdue_requests = Suspects(), OverdueRequests()
        self.refusals = Refusals()
        self.requests: dict[str, RequestState] = {}
        self.budget = retry.RetryBudget(self.requests)
        # Called when another law is in force, or more is known of what models it binds.
        self.law_changes: list[Callable[[], None]] = []
        self.handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptMoved: self._moved,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptFailed: self._failed,
            machine.AttemptRefused: self._failed,  # only a tier refuses: an engine that says so has failed
            machine.PromptTokenized: self._tokenized,
            machine.PrefillEnded: self._prefill_ended,
            machine.PrefillFailed: self._prefill_failed,
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            machine.LawChanged: self._law_changed,
            Reconfigured: self._reconfigured,
            ViewSwapped: self._view_swapped,
            PoliciesChanged: self._policies_changed,
            SplitsChanged: self._splits_changed,
            RefusalsChanged: self._refusals_changed,
            OverdueCheckDue: self._overdue_check_due,
            **dict.fromkeys(self.replicas.event_types, self._fleet_changed),
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event; returns the commands to execute."""
        self.news += 1
        self.replicas.now = now
        if now >= self.replicas.speeds.due:
            self.replicas.age(now)
            self.news += 1  # beside the event, which may be none
        news, wake = self.news, self.wake
        commands = self.handlers[type(event)](event, now)  # it may call `handle` itself
        if wake is not None and self.news >= news:
            self.wake = None
            wake()
        return commands

    def report_holds_until(self, news: int, now: float) -> float:
        """Until when (monotonic seconds) a report stays true if no event comes: no replica's health changes by time
        alone before that. `now` if there was news since the caller read `news`."""
        return self.replicas.health_unchanged_until(now) if self.news == news else now

    def wants_tokens(self, request: Request, now: float) -> bool:
        """Whether this request must arrive with its prompt's tokens; otherwise they may follow (PromptTokenized). False
        if it would be refused, or waits in the queue for longer than tokenizing takes."""
        if self.queue.waiting(request.model) or not self.selector.goes_by_tokens(request):
            return False
        return admission.refusal(request, self.config.region, self.law, self.replicas.view, now) is None

    @property
    def under_way(self) -> int:
        """Requests that are neither answered nor given up."""
        return len(self.requests)

    # -- the events of a request

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if request.issuer:
            self.accepted_bytes.add(request.issuer, request.prompt_bytes)  # whatever becomes of it
        if request.id in self.requests:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        refusal = admission.refusal(request, self.config.region, self.law, self.replicas.view, now)
        if refusal is not None:
            instead = self._fall_back(request, refusal.outcome, request.attempted, now)
            return [instead or machine.Answer(request.id, refusal.outcome, refusal.detail)]
        if self.refusals.by_model and (why := self.refusals.of(request.model, now, self._rng)):
            instead = self._fall_back(request, outcome.REFUSED_BY_OPERATOR, request.attempted, now)
            return [instead or machine.Answer(request.id, outcome.REFUSED_BY_OPERATOR, why, RETRY_AFTER_S)]
        state = self.requests[request.id] = RequestState(
            request,
            self.selector.need_of(request),
            request.model,
            self.law,
            request.entry_region not in ("", self.config.region),
            request.attempted,
        )
        if self._suspects.against and (suspected := self._suspected(state, now)) is not None:
            return [suspected]
        if self.splits.by_model:
            self._assign(state)
        if state.foreign:
            turned = self.foreign_admission.turned_away(request, state.need, now, state.variant)
            if turned is not None:
                return [self._refuse(state, turned.outcome, turned.detail, now)]
        if request.continues is not None:
            state.carrier = request.continues
            unable = self.replicas.view.unable_to_resume(request.model, state.carrier)
            if not self.eligibility.serving(state.variant, now, unable):
                return [self._refuse(state, outcome.NO_REPLICA, "no replica here takes up such a stream", now)]
        placed: list[Command] = []
        if not self.queue.by_id:
            placed = self._place(state, now)
        elif not self.wait_estimate.in_line(state.variant):
            placed = self._place(state, now, line=self.queue.line_of(state.variant))
        return placed or self._hold(state, now)

    def _moved(self, event: machine.AttemptMoved, now: float) -> list[Command]:
        """Move the request's reservation to the replica it went to. Nothing is learned from its times there, since none
        were predicted."""
        state, held = self._under_way(event), self.replicas.ledger.held(event.id)
        if (
            state is None
            or held is None
            or event.target == state.replica
            or event.target not in self.replicas.view.replicas
        ):
            return []
        left = state.replica
        for name in event.passed:
            self.replicas.failed(name, outcome.CONNECT_FAILED, now, state.forwarded_at)
        self.overdue_requests.over(left, event.id)
        self.replicas.ledger.release(event.id)
        self.replicas.ledger.reserve(event.id, replace(held, target=event.target))
        state.replica, state.pick, state.paired = event.target, None, False
        self._will_cache(state)
        return self._fill(left, now)

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        state = self._under_way(event)
        if state is None or state.started:
            return []
        self.replicas.ledger.began(event.id, now)
        self.overdue_requests.over(state.replica, event.id)
        self.overdue_requests.alive(state.replica, now)
        self._start(state, event, now)
        if event.status < 400:
            if state.paired:
                self._will_cache(state)
            chosen = state.chosen if state.request.stream else None
            if chosen is not None:
                state.prefilled_at, elapsed_ms = now, (now - state.forwarded_at) * 1e3
                table = self.replicas.whole
                if state.replica in table.of.at:
                    state.load_since = now, table.in_flight_s[table.of.at[state.replica]]
                assert state.pick is not None  # it has chosen
                self.overdue_requests.began(elapsed_ms, state.expected_ms)
                if not state.resumes:
                    self.replicas.promised(state.request.model, state.pick.predicted_ms, elapsed_ms)
                ahead_tokens = 0.0 if state.paired else chosen.backlog_tokens + chosen.work_tokens
                if chosen.delay_ms:
                    self.replicas.loaded(elapsed_ms - ahead_tokens * chosen.prefill_ms_per_token, now)
                else:
                    sure = chosen.exact or chosen.hit_tokens <= ahead_tokens
                    self.replicas.prefilled(state.replica, elapsed_ms, ahead_tokens, now, sure=sure)
        moves = [self._move_at(state, now + MOVE_AGAIN_S)] if self._leaves(state) else []
        return moves + self._fill(state.replica, now)

    def _start(self, state: RequestState, event: machine.AttemptBegan | machine.AttemptEnded, now: float) -> None:
        """The answer's first byte is here, alone or with the whole answer."""
        state.started = True
        self.replicas.answered(state.replica, event.status, now, state.forwarded_at, state.request.tenant)
        if event.load is not None:
            self.replicas.on_engine_load(state.replica, event.load, now)
        if event.status < 400 and state.pick is not None and state.pick.policy.learns:
            state.pick.policy.answered(state.replica, (now - state.forwarded_at) * 1e3, now)

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        state = self._under_way(event)
        if state is None:
            return []
        if event.whole:
            self._start(state, event, now)
            if event.status >= 400:
                self.replicas.ledger.began(event.id, now)  # what lingers is not its prompt
        failed = event.fault is not None or event.status in outcome.ENGINES_FAULTS
        held = self.replicas.ledger.held(event.id) if failed else None
        if event.usage is not None and state.held_at is not None:
            self.queue.settle(event.id, work(event.usage.prompt_tokens, event.usage.completion_tokens))
        self._conclude(state, now)
        if self._suspects.against:
            self._suspects.answered((state.request.tenant, state.request.body_hash))
        if event.fault is not None:
            began_well = event.status not in outcome.ENGINES_FAULTS
            self.replicas.broke(
                state.replica, event.fault, now,
                began_well=began_well, sent_at=state.forwarded_at, tenant=state.request.tenant,
            )  # fmt: skip
        if failed:
            self.replicas.lingers(held, state.forwarded_at, now)
        if event.status < 400:
            # A stream that was continued elsewhere says nothing about one engine's decode time.
            lacks = event.usage is not None and not state.resumes and self.learning.ended(state, event.usage, now)
            lacks = lacks or (event.whole and state.paired and state.replica not in self.replicas.view.decode_only)
            chain = event.chain if self.learning.holds_answer(state, event) else state.request.chain if lacks else ()
            if chain:
                self.replicas.caches(state.replica, chain, self.law.request_verdict(state.request, _HINTS))
        else:
            self._will_not_cache(state)
        return self._fill(state.replica, now) if self.queue.by_id else []

    def _failed(self, event: machine.AttemptFailed | machine.AttemptRefused, now: float) -> list[Command]:
        state = self._under_way(event)
        if state is None:
            return []
        failed, sent_at = state.replica, state.forwarded_at
        held = self.replicas.ledger.held(event.id)
        if event.outcome.source is Source.ENGINE:  # its own word, in the midst of a stream
            self.replicas.broke(
                failed, event.outcome, now, began_well=True, sent_at=sent_at, tenant=state.request.tenant
            )
            self.replicas.lingers(held, sent_at, now)
        else:
            self.replicas.failed(failed, event.outcome, now, sent_at, state.request.tenant)
            self.replicas.lingers(held, sent_at, now, event.outcome)
        self._broke_off(state, event.outcome, now)
        if state.started and isinstance(event, machine.AttemptFailed) and event.resumable:
            return [*self._resume(state, failed, event, now), *self._fill(failed, now)]
        if state.started:
            self._conclude(state)
            broken = machine.Answer(event.id, event.outcome, _while_answering(event.outcome))
            return [broken, *self._fill(failed, now)]
        self._will_not_cache(state)
        self._pairs.give_back(state)
        self.overdue_requests.over(failed, event.id)
        state.replica = ""
        return [*self._elsewhere(state, failed, event.outcome, now), *self._fill(failed, now)]

    def _resume(self, state: RequestState, failed: str, event: machine.AttemptFailed, now: float) -> list[Command]:
        """After a failure in mid-stream: continue from another replica, if the law in force and the bounds allow it."""
        request, state.carrier = state.request, event.carried_by
        unable = self.replicas.view.unable_to_resume(request.model, state.carrier)
        if state.resumes >= RESUMES_MAX or not self.eligibility.serving(state.variant, now, unable):
            self._conclude(state)
            return [machine.Answer(request.id, event.outcome, _while_answering(event.outcome))]
        self._pairs.give_back(state)
        self.overdue_requests.over(failed, request.id)
        state.resumes += 1
        state.started, state.replica, state.tried = False, "", (*state.tried, failed)
        return self._again(state, now)

    def _tokenized(self, event: machine.PromptTokenized, now: float) -> list[Command]:  # noqa: ARG002
        """The prompt's tokens are here. If the request is under way they are compared with the engine's count; if it
        waits, it is placed by them."""
        state = self.requests.get(event.id)
        if state is None or (state.request.tokens is not None and state.request.tokens.whole):
            return []
        state.request = replace(state.request, tokens=event.tokens)
        if state.replica:
            if state.need.path is not None:  # it was placed by the first of them
                state.need = replace(state.need, path=self.selector.path_of(state.request))
        else:
            state.need = replace(self.selector.need_of(state.request), variant=state.variant)
        return []

    def _prefill_ended(self, event: machine.PrefillEnded, now: float) -> list[Command]:
        state = self._under_way(event)
        if state is None or not state.prefiller:
            return []
        freed = state.prefiller
        self._pairs.ended(state, now)
        return self._fill(freed, now)

    def _prefill_failed(self, event: machine.PrefillFailed, now: float) -> list[Command]:
        state = self._under_way(event)
        if state is None or not state.prefiller:
            return []
        freed, failed = state.replica, self._pairs.failed(state, event.outcome, now)
        if state.started:
            return self._fill(failed, now)
        self._pairs.give_back(state)
        self.overdue_requests.over(freed, event.id)
        if freed in self.replicas.view.decode_only and event.outcome is outcome.FIRST_BYTE_TIMEOUT:
            state.tried += (freed,)  # each waits for the other: either may be the one that is stuck
        state.replica = ""
        again = self._again(state, now) if state.whole else self._elsewhere(state, failed, event.outcome, now)
        return [*again, *self._fill(freed, now)]

    def _client_left(self, event: machine.ClientLeft, now: float) -> list[Command]:
        state = self.requests.get(event.id)
        if state is None:
            return []
        self._conclude(state)
        return self._fill(state.replica, now)

    def _timer_fired(self, event: machine.TimerFired, now: float) -> list[Command]:
        state = self.requests.get(event.id)
        if state is None:
            return []
        if now < state.due:
            return [machine.SetTimer(event.id, state.due)]  # timers may fire a little early
        if now >= state.request.deadline:
            answer = self._refuse(state, outcome.DEADLINE, "the request's deadline passed", now)
            return [answer, *self._fill(state.replica, now)]
        if not state.replica:
            return self._wait_over(state, now)
        if self._leaves(state):
            return self._move(state, now)
        # An answer in one piece does not show when its prefill was over: it is over when it was due.
        self.replicas.ledger.began(event.id, now)
        return [self._timer(state, state.request.deadline), *self._fill(state.replica, now)]

    def _under_way(self, event: AttemptEvent | machine.PrefillEnded | machine.PrefillFailed) -> RequestState | None:
        """The request, if the event is about its current attempt; None for an event of an earlier attempt."""
        state = self.requests.get(event.id)
        return state if state is not None and state.replica and state.attempts == event.attempt else None

    # -- the events of the world around it

    def _law_changed(self, event: machine.LawChanged, now: float) -> list[Command]:
        """Waiting requests that are no longer lawful are answered at once; those sent whole to an engine stay there."""
        if not event.law.supersedes(self.law):
            return []
        return self._apply_law(event.law.knowing(self.replicas.lineages.of), now)

    def _reconfigured(self, event: Reconfigured, now: float) -> list[Command]:
        """As with a law: requests at an engine stay there, and every further attempt obeys the new configuration."""
        queue = event.config.queue
        self.config = event.config
        self._patience.config = queue
        self.queue.set_limits(queue.requests_max, queue.tokens_max, queue.starvation_s)
        self.foreign_admission.reconfigure(event.config.foreign)
        self.scaling.configure(event.config.scaling, event.config.scalings)
        self.policies.configure(event.policies)
        self._reassign(self.splits.configure(event.splits))
        return self._apply_law(event.law.knowing(self.replicas.lineages.of), now)

    def _apply_law(self, law: Law, now: float) -> list[Command]:
        """Use another law. If more is known of what models are based on, the laws that requests arrived under forbid by
        that, too."""
        before, self.law = self.law, law
        for changed in self.law_changes:
            changed()
        if law.lineage is not before.lineage:
            arrivals = {one: one.knowing(law.lineage) for one in {state.law for state in self.requests.values()}}
            for state in self.requests.values():
                arrival = arrivals[state.law]
                state.request = model_steps.with_fallbacks_narrowed(state.request, arrival)
                if self.config.region not in arrival.request_verdict(state.request).lawful:
                    state.request = replace(state.request, lawful=frozenset())
        if law.widens(before, Scope.HINTS, frozenset(before.topology.regions)):
            self.replicas.journal.under(law.epoch, widened=True)
        else:
            self.replicas.narrowed(law.epoch)
        commands: list[Command] = []
        recalled: list[Command] = []
        for state in list(self.requests.values()):
            refusal = admission.unlawful(state.request, self.config.region, self.law)
            if refusal is None:
                continue
            if state.replica:  # one whose answer has begun may not be sent whole
                recalled.append(machine.Recall(state.request.id, state.attempts))
            else:
                commands.append(self._refuse(state, refusal.outcome, refusal.detail, now))
        return commands + self._fill_all(now) + recalled

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        undrained = {name for name, one in self.replicas.view.replicas.items() if not one.draining}
        self.replicas.adopt(event.view)
        self.policies.adopt(self.replicas.whole.of.names)
        law = self.law.knowing(self.replicas.lineages.of)
        commands = self._fill_all(now) if law is self.law else self._apply_law(law, now)
        return commands + self._move_away(undrained, now)

    def _policies_changed(self, event: PoliciesChanged, now: float) -> list[Command]:
        self.policies.override(event.choices)
        return self._fill_all(now)

    def _splits_changed(self, event: SplitsChanged, now: float) -> list[Command]:
        self._reassign(self.splits.override(event.splits))
        return self._fill_all(now)

    def _refusals_changed(self, event: RefusalsChanged, now: float) -> list[Command]:  # noqa: ARG002
        """Refusals apply to new requests only; those already admitted stay."""
        self.refusals = Refusals(event.by_model)
        return []

    def _reassign(self, changed: frozenset[str]) -> None:
        """The splits of these models have changed, and with them perhaps the order of their queues."""
        concerned = [state for state in self.requests.values() if state.request.model in changed]
        for state in concerned:
            self._assign(state)
        self.queue.reassign({state.request.id: state.variant for state in concerned})

    def _assign(self, state: RequestState) -> None:
        """Determine which version the request is for. A request under way is not disturbed: this counts when it is
        placed again."""
        state.assigned = assigned = self.selector.assign(state.request)
        state.variant = state.request.model if assigned is None else assigned.variant
        if state.need.variant != state.variant:
            state.need = replace(state.need, variant=state.variant)

    def _fleet_changed(self, event: Event, now: float) -> list[Command]:
        replica = self.replicas.handle(event, now)
        self.news -= self.replicas.unchanged  # a bool: an event that changed nothing is no news
        if self.replicas.alive:
            self.overdue_requests.alive(self.replicas.alive, now)
        commands = self._retry_silent(now) if self.replicas.silent else []
        if now >= self.overdue_requests.due:
            commands += self._retry_overdue(now)
        return commands + (self._fill(replica, now) if replica is not None else self._fill_all(now))

    def _overdue_check_due(self, event: OverdueCheckDue, now: float) -> list[Command]:  # noqa: ARG002
        commands = self._retry_overdue(now) if now >= self.overdue_requests.due else []
        self.news -= not commands
        return commands

    @property
    def overdue_check_due(self) -> float:
        """When to send OverdueCheckDue next (monotonic seconds); infinite while no request waits for its answer to
        begin."""
        return self.overdue_requests.due

    def _retry_silent(self, now: float) -> list[Command]:
        """Probes took replicas down: requests there whose answer never began are tried at other replicas, if there are
        any."""
        commands: list[Command] = []
        silent, self.replicas.silent = self.replicas.silent, []
        for state in list(self.requests.values()):
            request, reason = state.request, outcome.FIRST_BYTE_TIMEOUT
            asked = (
                state.prefiller or state.replica,
                state.replica if state.replica in self.replicas.view.decode_only else "",
            )
            lost = next((name for name in asked if name in silent), "")
            if not lost or state.started or request.id not in self.requests:
                continue
            others = self.eligibility.others(state, now, (state.replica, *state.tried))
            halved = lost == state.prefiller
            if not others and not halved:
                continue  # it may yet answer
            if self._may_go_on(state, reason):
                broken = machine.PrefillFailed if halved else machine.AttemptFailed
                cancel = machine.Cancel(request.id, state.attempts)
                commands += [cancel, *self.handle(broken(request.id, state.attempts, reason), now)]
        return commands

    def _retry_overdue(self, now: float) -> list[Command]:
        """Requests that a healthy replica would long have begun are tried at another replica with room, if there is
        one."""
        commands: list[Command] = []
        for replica, request_id in self.overdue_requests.overdue(now):
            state = self.requests.get(request_id)
            if state is None or state.started or state.replica != replica or state.paired:
                continue
            others = self.eligibility.others(state, now, (replica, *state.tried))
            need, reason = state.need, outcome.FIRST_BYTE_TIMEOUT
            if not others or not self.replicas.table(others).room(need.prompt_tokens, need.output_tokens, now).any():
                continue
            if self._may_go_on(state, reason):
                failed = machine.AttemptFailed(request_id, state.attempts, reason)
                commands += [machine.Cancel(request_id, state.attempts), *self.handle(failed, now)]
        return commands

    # -- streams that leave a drained replica: at a pace, each by its own timer, and only where another has room

    def _leaves(self, state: RequestState) -> bool:
        """Whether the request is a stream at a drained replica that should continue elsewhere."""
        if self.config.move_over_s is None or not state.started or state.resumes >= RESUMES_MAX:
            return False
        known = self.replicas.view.replicas.get(state.replica)
        return known is not None and known.draining and state.request.stream

    def _move_away(self, undrained: set[str], now: float) -> list[Command]:
        """Pace the streams off replicas that were `undrained` in the view before and are drained in this one."""
        if self.config.move_over_s is None or not any(
            self.replicas.view.replicas[name].draining for name in undrained & self.replicas.view.replicas.keys()
        ):
            return []
        streams = [one for one in self.requests.values() if one.replica in undrained and self._leaves(one)]
        interval_s = self.config.move_over_s / max(1, len(streams))
        return [self._move_at(state, now + n * interval_s) for n, state in enumerate(streams, 1)]

    def _move_at(self, state: RequestState, at: float) -> Command:
        return self._timer(state, min(state.request.deadline, at))

    def _move(self, state: RequestState, now: float) -> list[Command]:
        """Ask the relay to move the stream, which knows whether it can be continued; one that cannot finishes where it
        is."""
        need, again = state.need, [self._move_at(state, now + MOVE_AGAIN_S)]
        known = self.replicas.view.replicas.get(state.replica)
        carrier: machine.Carrier = "ids" if known is not None and known.token_ids else "text"
        unable = self.replicas.view.unable_to_resume(state.request.model, carrier)
        others = self.eligibility.others(state, now, (state.replica, *unable))
        if not others or not self.replicas.table(others).room(need.prompt_tokens, need.output_tokens, now).any():
            return [*again]
        return [*again, machine.Move(state.request.id, state.attempts)]

    # -- dispatch: to a replica, or into the queue

    def _timer(self, state: RequestState, at: float) -> Command:
        state.due = at
        return machine.SetTimer(state.request.id, at)

    def _place(
        self, state: RequestState, now: float, aside: tuple[str, ...] = (), *, line: Line | None = None
    ) -> list[Command]:
        """Forward the request if some replica, except those in `aside`, has room (for a foreign request: beside the
        reserve); [] otherwise. `line`: see Table.room."""
        request, deferred = state.request, self.deferred
        if deferred.by_request:
            deferred.remove(request.id)
        if state.foreign and not self.foreign_admission.fits(state, now):
            return []
        barred: tuple[str, ...] = ()
        if request.among is not None or state.carrier is not None:
            barred = self.eligibility.barred(state, now)
        if state.tried and not self.eligibility.others(state, now, state.tried):
            state.tried = ()  # better the same replica again than none
        choice = self.selector.consider(
            request,
            state.need,
            now,
            (*state.tried, *barred),
            aside,
            state.assigned,
            whole=state.whole or bool(state.resumes),
            waited_s=0.0 if state.held_at is None else now - state.held_at,
            line=line,
        )
        if choice is None or choice.chosen is None:
            state.cached_tokens = choice.most_cached_tokens if choice is not None else 0.0
            if choice is not None and choice.deferred_to is not None:
                deferred.add(request.id, Deferral(state.variant, *choice.deferred_to))
            return []
        chosen, need = choice.chosen, state.need
        if not self.replicas.admit(chosen.replica, now):
            return []
        # A cached prefix cannot be evicted while it is used, so a hit takes room, too, except for the part shared with
        # others.
        marks = chain.marks(request.chain)
        shared_tokens = self.replicas.shared_bytes(chosen.replica, need.chain, marks) / need.bytes_per_token
        own_tokens = int(max(chosen.uncached_tokens, need.prompt_tokens - shared_tokens))
        if not self._holds(chosen.replica, own_tokens + need.output_tokens):
            return []
        return self._send(state, choice, chosen, own_tokens, marks, now)

    def _send(
        self, state: RequestState, choice: Pick, chosen: Scored, own_tokens: int, marks: tuple[int, ...], now: float
    ) -> list[Command]:
        """Forward it as the pick says; [] if the other half of a pair may not be asked now."""
        request = state.request
        half = self._pairs.begin(state, choice, now) if choice.prefill is not None else None
        if half is None and chosen.replica in self.replicas.view.decode_only:
            return []  # the replica that was to prefill is on trial after an ejection, and has its one request already
        state.attempts += 1
        state.replica, state.forwarded_at, state.pick = chosen.replica, now, choice
        state.paired = choice.prefill is not None
        if request.soft_session:
            self.selector.affinity.moved_in(request.soft_session, request.model, chosen.replica)
        if choice.policy.learns:
            choice.policy.placed(chosen.replica, state.variant, self.replicas.whole)
        work_tokens = int(chosen.work_tokens)
        if self.replicas.adapters.names:
            self.replicas.adapters.sent(chosen.replica, request.model)
        ttft_ms = choice.prefill_ms
        answer = int(state.need.output_tokens)
        reservation = Reservation(
            chosen.replica, 0 if half else work_tokens, own_tokens + answer, marks, answer,
            context_tokens=int(state.need.prompt_tokens) + answer // 2,
        )  # fmt: skip
        self.replicas.ledger.reserve(request.id, reservation)
        state.prefilled_at, table = now + ttft_ms / 1e3, self.replicas.whole
        state.load_since = now, table.in_flight_s[table.of.at[chosen.replica]]
        state.expected_ms = ttft_ms + (1.0 if request.stream else state.need.output_tokens) * chosen.tpot_ms
        self.overdue_requests.sent(chosen.replica, request.id, state.expected_ms, now)
        if half is None:  # as in _will_cache; a replica that only decodes always has a half that prefills for it
            self.replicas.caches(chosen.replica, request.chain, self.law.request_verdict(request, _HINTS))
        address = self.replicas.view.replicas[chosen.replica].address
        longer = self.replicas.contexts_differ and not request.once
        sends = machine.Resume if state.resumes else machine.Forward
        due = state.due = request.deadline if request.stream else min(request.deadline, state.prefilled_at)
        return [
            machine.SetTimer(request.id, due),
            sends(
                request.id,
                state.attempts,
                chosen.replica,
                address,
                ttft_ms,
                reasons=choice,
                prefill=half,
                longer=longer and self.replicas.holds_longer(request.model, chosen.replica),
            ),
        ]

    def _will_cache(self, state: RequestState) -> None:
        """Count the prompt as cached at its replica from now on: a later request with the same beginning waits behind
        it there and finds it computed. A prompt that another replica prefills is cached here once the answer has
        begun."""
        if state.replica not in self.replicas.view.decode_only:  # these keep no KV cache that was transferred to them
            self.replicas.caches(state.replica, state.request.chain, self.law.request_verdict(state.request, _HINTS))

    def _will_not_cache(self, state: RequestState) -> None:
        """Forget the cached prompt: the replica refused it, or died before it answered."""
        if (chosen := state.chosen) is not None:
            predicted_bytes = chosen.hit_tokens * state.need.bytes_per_token
            self.replicas.mirror.missed(state.replica, state.request.chain, predicted_bytes)

    def _holds(self, replica: str, tokens: float) -> bool:
        """Whether the replica's KV cache has room for the request. `room` assumed the whole cached prefix to be in use
        already; less of it may be."""
        return self.replicas.whole.holds(replica, tokens)

    def _hold(self, state: RequestState, now: float) -> list[Command]:
        """Put the request into the queue, if it is full in the place of another that goes after it. Or refuse it: no
        replica serves it, it has waited its time, or the queue is full or too long."""
        request, tokens = state.request, state.need.prompt_tokens
        if self.eligibility.none_able(state, now):
            return [self._refuse(state, outcome.NO_REPLICA, self.eligibility.why_none_able(state, now), now)]
        self.queue.note(state.variant, self.config.queue.late_s, now)
        most_s = self._wait_left_s(state, now)
        if most_s <= 0.0:
            return self._wait_over(state, now)
        weight = self._weight_of(request.tenant)
        # By the longest wait allowed: in a standing queue some of those ahead will be let go, so a new request is
        # served sooner than their number suggests.
        if self.wait_estimate.hopeless(state, weight, self.config.queue.wait_s - request.waited_s, now):
            return [self._refuse(state, outcome.QUEUE_FULL, "the region's queue is too long for it to wait", now)]
        commands: list[Command] = []
        if not self.queue.fits(tokens):
            victims = self.queue.victims(
                request.priority, tokens, state.variant, request.tenant, weight, foreign=state.foreign
            )
            if not victims:
                return [self._refuse(state, outcome.QUEUE_FULL, "the region's queue is full", now)]
            detail = "the region's queue is full, and others go first"
            commands += [self._refuse(self.requests[one.id], outcome.QUEUE_FULL, detail, now) for one in victims]
        self.queue.settle(request.id, 0.0)  # a turn that came to nothing
        self.queue.push(
            request.id, state.variant, request.tenant, weight, request.priority, tokens, now,
            state.need.output_tokens, cached_tokens=state.cached_tokens, waited_s=request.waited_s,
            foreign=state.foreign, late=state.late,
            late_s=0.0 if request.first_token_by is None else self._patience.late_s(state, now),
        )  # fmt: skip
        state.held_at = now if state.held_at is None else state.held_at
        commands += [machine.Hold(request.id), self._timer(state, min(request.deadline, now + most_s))]
        # If it is alone in its variant, it was just tried. Otherwise it may be its turn, or it may be the one that
        # fits.
        return commands + self._fill_variant(state.variant, now) if self.queue.waiting(state.variant) > 1 else commands

    def _wait_left_s(self, state: RequestState, now: float) -> float:
        """For how many more seconds the request may wait; 0 or less: its wait is over. One that was late elsewhere, and
        may keep waiting, steps back at once if its tenant has its share of the queue."""
        request = state.request
        left_s = self._patience.most_s(state, now) - request.waited_s
        # A request that stepped back in another region joins those that did here. If none did, there is room soon, and
        # it goes before newcomers by what it has waited.
        if (
            request.waited_s
            and self.queue.stepped_back(state.variant)
            and request.waited_s >= self._patience.late_s(state, now)
        ):
            left_s = 0.0
        if left_s <= 0.0 and now < self._patience.late_until(state, now):
            state.late = self._patience.crowds(state, more=1)
            left_s = self.config.queue.wait_s - request.waited_s
        return left_s

    def _fill(self, replica: str, now: float) -> list[Command]:
        """Give the room freed at a replica to requests that wait for the variants it serves."""
        if not self.queue.by_id or replica not in self.replicas.view.replicas:
            return []
        serves = self.replicas.view.replicas[replica].models
        return [
            c
            for variant in self.queue.models()
            if model_of(variant) in serves
            for c in self._fill_variant(variant, now)
        ]

    def _fill_all(self, now: float) -> list[Command]:
        return [c for variant in self.queue.models() for c in self._fill_variant(variant, now)]

    def _fill_variant(self, variant: str, now: float) -> list[Command]:
        """Release as many waiting requests as there is room for, or all of them if no replica can serve them."""
        commands: list[Command] = []
        while waiting := self.queue.waiting(variant):
            self.queue.note(variant, self.config.queue.late_s, now)
            able = self.eligibility.serving(variant, now)
            if not able:
                those_waiting = [self.requests[w.id] for w in self.queue.first(variant, waiting, now)]
                return commands + [
                    self._refuse(state, outcome.NO_REPLICA, self.eligibility.why_none_able(state, now), now)
                    for state in those_waiting
                ]
            # No room for the smallest request there is: there is no point in scoring.
            line = self.queue.line_of(variant, but=1)
            free = ANY(self.replicas.table(able).room(0.0, 0.0, now, line))
            released = self._release_one(variant, able, now, line=line) if free else []
            released = released or self._release_to_other_version(variant, now, line=line)
            if not released:
                break
            commands += released
        return commands

    def _release_one(self, variant: str, able: Subset, now: float, *, line: Line | None) -> list[Command]:
        """Release the best prefix match among the first in the queue. While a request starves, a replica is kept free
        until it fits."""
        table, starved = self.replicas.table(able), self.queue.starved(variant, now)
        aside: tuple[str, ...] = ()
        if starved is not None:
            if released := self._release(self.requests[starved.id], table, now, aside, line=line):
                return released
            if starved.id not in self.deferred.by_request:  # else it declined room for others
                its = self.eligibility.others(self.requests[starved.id], now, ()) or able  # who can take it
                aside = (its.names[int(self.replicas.table(its).kv_taken_tokens.argmin())],)
        # The free room may be the reserve: then foreign requests, however many, must not block the region's own
        # requests.
        foreign = self.queue.foreign(variant)
        reserve_only = bool(foreign) and self.foreign_admission.headroom(variant, now).slots < 1
        for own in (True,) if reserve_only else (False, True) if foreign else (False,):
            first = self._first(variant, table, now, line=line, own=own)
            for state in self.wait_estimate.in_turn(first, table, now, line):
                if released := self._release(state, table, now, aside, line=line):
                    return released
        return []

    def _first(self, variant: str, table: Table, now: float, *, line: Line | None, own: bool) -> list[RequestState]:
        """The first in the queue, except those that wait by choice for a replica that still has no room: what room
        there is they leave to others, who would else stand behind them for nothing."""
        due = (self.requests[waiting.id] for waiting in self.queue.in_order(variant, now, own=own))
        if deferred := self.deferred.by_request:
            room = table.room(0.0, 0.0, now, line).tolist()
            full = {name for name, has_room in zip(table.of.names, room, strict=True) if not has_room}
            due = (
                state
                for state in due
                if (deferral := deferred.get(state.request.id)) is None
                or deferral.replica not in full
                or (state.held_at is not None and now - state.held_at >= deferral.most_s)
            )
        return list(islice(due, K_WAITING))

    def _release_to_other_version(self, variant: str, now: float, *, line: Line | None) -> list[Command]:
        """Release a request that failed at all replicas of its version, or is too long for them, if another version may
        serve it: its own queue waits for its version's replicas."""
        if model_of(variant) == variant:
            return []
        for state in [self.requests[waiting.id] for waiting in self.queue.first(variant, K_WAITING, now)]:
            falls = state.tried or state.need.context_tokens > self.replicas.least_context_tokens
            able = self.eligibility.others(state, now, state.tried) if falls else None
            if able and (released := self._release(state, self.replicas.table(able), now, (), line=line)):
                return released
        return []

    def _release(
        self, state: RequestState, able: Table, now: float, aside: tuple[str, ...], *, line: Line | None
    ) -> list[Command]:
        """Forward a waiting request, or refuse it if it is not allowed any more; [] if it must keep waiting."""
        request = state.request
        refusal = admission.refusal(request, self.config.region, self.law, self.replicas.view, now)
        if refusal is not None:
            return [self._refuse(state, refusal.outcome, refusal.detail, now)]
        if self.wait_estimate.too_late(request, state.need, able, now):
            return [self._refuse(state, outcome.QUEUE_TIMEOUT, "no replica had room in time", now)]
        if (
            not state.late
            and self.queue.outlived(request.id, self._patience.most_s(state, now), now)
            and self._patience.crowds(state)
        ):
            return self._wait_over(state, now)
        placed = self._place(state, now, aside, line=line)
        if placed:
            self.queue.remove(request.id, served=True)
        return placed

    def _wait_over(self, state: RequestState, now: float) -> list[Command]:
        """The request's time to wait is over. One that waited by choice takes a replica with room now. One that may
        wait longer steps back, or keeps its turn if its tenant has less than its share of the queue."""
        if state.request.id in self.deferred.by_request:
            state.held_at = -inf
            placed = self._place(state, now)
            if placed:
                self.queue.remove(state.request.id, served=True)
                return placed
        if state.request.id in self.queue and now < (until := self._patience.late_until(state, now)):
            if self._patience.crowds(state):
                state.late = True
                self.queue.step_back(state.request.id)
            return [self._timer(state, min(state.request.deadline, until))]
        return [self._refuse(state, outcome.QUEUE_TIMEOUT, "no replica had room in time", now)]

    def _elsewhere(self, state: RequestState, failed: str, reason: Outcome, now: float) -> list[Command]:
        """After a failure before the first byte: another replica, within the retry rules, or an answer."""
        if not self._may_go_on(state, reason):
            # A request that ended two replicas is answered so, however the second ended: its client must not ask again
            # at once.
            if (suspected := self._suspected(state, now)) is not None:
                return [suspected]
            detail = _GAVE_UP.get(reason, "the replica failed before it answered")
            if reason is outcome.UNLAWFUL_HERE:  # taken back from a gateway
                forbidden = admission.unlawful(state.request, self.config.region, self.law)
                detail = detail if forbidden is None else forbidden.detail
            return [self._refuse(state, reason, detail, now)]
        if retry.draws_on_budget(reason, state.transport_retries) and not state.budgeted:
            state.budgeted = self.budget.take()
        state.transport_retries += reason.source is Source.TRANSPORT
        state.tried += (failed,)
        if reason is outcome.CONNECT_FAILED:
            # Several may have stopped together: one whose last probe failed, too, comes after those that are well.
            doubtful = self.replicas.doubtful(state.request.model, now)
            if self.eligibility.others(state, now, (*state.tried, *doubtful)):
                state.tried += doubtful
        if reason in _ASKED_ONCE and not self.eligibility.serving(state.variant, now, state.tried):
            return [self._refuse(state, reason, _GAVE_UP[reason], now)]
        if reason is outcome.TOO_LONG:
            refused_tokens = self.replicas.most_context_tokens(state.request.model, (failed,))
            if refused_tokens < inf:  # infinite: unknown, or the replica has left
                state.need = replace(state.need, context_tokens=refused_tokens + 1.0)
            if not self.eligibility.serving_and_holding(state, now, state.tried):
                return [self._refuse(state, reason, _GAVE_UP[reason], now)]
        return self._again(state, now)

    def _may_go_on(self, state: RequestState, reason: Outcome) -> bool:
        """Whether it may be sent to another after this."""
        if state.request.once:
            return False
        return retry.may_redispatch(reason, state.attempts, state.transport_retries, self.budget)

    def _again(self, state: RequestState, now: float) -> list[Command]:
        """Dispatch a request whose attempt is over once more, if the law in force still allows it here."""
        refusal = admission.refusal(state.request, self.config.region, self.law, self.replicas.view, now)
        if refusal is not None:
            return [self._refuse(state, refusal.outcome, refusal.detail, now)]
        if (suspected := self._suspected(state, now)) is not None:
            return [suspected]
        return self._place(state, now) or self._hold(state, now)

    # -- queries of death: what may have ended two replicas is not handed to a third (farhop.balance.health.suspects)

    def _broke_off(self, state: RequestState, reason: Outcome, now: float) -> None:
        """An attempt ended without an answer: it was under way, unless there was no connection."""
        request = state.request
        if request.body_hash and reason in BROKE_OFF:
            body = (request.tenant, request.body_hash)
            # A server may still answer for its broken engine: that answer is no sign of life.
            last_seen_at = -inf if reason is outcome.ENGINE_BROKEN else self.replicas.view.sampled_at((state.replica,))
            self._suspects.broke_off(body, (state.replica,), last_seen_at, now)

    def _suspected(self, state: RequestState, now: float) -> Answer | None:
        """The answer if two replicas died while this request was under way at them. The request is not held until that
        is certain: the next scrapes show it, and the client may ask again then."""
        request = state.request
        if not request.body_hash:
            return None
        quarantine = self._suspects.quarantine((request.tenant, request.body_hash), self.replicas.view.sampled_at, now)
        if quarantine is None:
            return None
        self._conclude(state)
        detail = "this request was under way at two replicas when they ended; it is not sent to a third for a while"
        return machine.Answer(
            request.id, outcome.ENDED_TWO_PROCESSES, detail, max(RETRY_AFTER_S, quarantine.until - now)
        )

    # -- endings

    def _fall_back(self, request: Request, reason: Outcome, attempts: int, now: float) -> Command | None:
        """Instead of a refusal: another model that the requested name stands for, if one is served here: the first with
        room, else the first, where the request may wait. Not if the request was refused by the law, for its path, or
        for its content."""
        final = reason.source is Source.LAW or reason is outcome.PATH_UNSUPPORTED or not reason.retryable
        if not request.fallbacks or final or request.continues is not None or request.once:
            return None
        served: Request | None = None
        for model in request.fallbacks:
            one = model_steps.fallback(request, model, reason.reason, attempts)
            if admission.refusal(one, self.config.region, self.law, self.replicas.view, now) is not None:
                continue
            choice = self.selector.consider(one, self.selector.need_of(one), now)
            if choice is not None and choice.chosen is not None:
                return machine.FallBack(request.id, one, choice)
            served = served or one
        return None if served is None else machine.FallBack(request.id, served)

    def _refuse(self, state: RequestState, reason: Outcome, detail: str, now: float) -> Command:
        self._conclude(state)
        if state.request.fallbacks and not state.resumes and state.carrier is None:
            instead = self._fall_back(state.request, reason, state.attempts, now)
            if instead is not None:
                return instead
        if reason.source is Source.LAW:
            return machine.Answer(state.request.id, reason, detail)
        if reason in (outcome.NO_REPLICA, outcome.PATH_UNSUPPORTED, outcome.MODEL_NOT_SERVED, outcome.TOO_LONG):
            return machine.Answer(  # it is unknown for how long, if it ends at all
                state.request.id, reason, detail, RETRY_AFTER_S if reason is outcome.NO_REPLICA else None
            )
        wait_ms = self.wait_estimate.wait_ms(state.variant, now)
        return machine.Answer(state.request.id, reason, detail, max(RETRY_AFTER_S, wait_ms / 1e3), wait_ms)

    def _conclude(self, state: RequestState, alive_at: float | None = None) -> None:
        """Forget a request and release all it held. `alive_at`: when its replica showed a sign of life (monotonic
        seconds)."""
        request_id = state.request.id
        del self.requests[request_id]
        self.overdue_requests.over(state.replica, request_id, alive_at)
        if state.held_at is not None:  # else it never stood in line
            self.queue.remove(request_id, served=False)
            self.queue.settle(request_id, None)
        if self.deferred.by_request:
            self.deferred.remove(request_id)
        self.replicas.ledger.release(request_id)
        if state.prefiller:
            self._pairs.over(state)
        if state.budgeted:
            self.budget.give()
