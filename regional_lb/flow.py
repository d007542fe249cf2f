"""The regional tier's machine: admission -> queue -> policy -> pick, and what follows when things break.

Invariants: a request holds at most one reservation, from its Forward until its attempt is over, beside that of its
prefill half (regional_lb.pairs); it is in the queue or holds a reservation or is being concluded, never two of them;
every request that arrives is concluded exactly once, by an Answer, by its attempt's end or by its client leaving;
nothing is forwarded that is not lawful here at that moment. Never awaits, never opens anything, never sees a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop.balance import machine, outcome, retry
from farhop.balance.estimate import Estimates
from farhop.balance.health import HealthConfig
from farhop.balance.suspects import Suspects
from regional_lb import admission
from regional_lb.fleet import Fleet
from regional_lb.kv_words import TOKEN_BYTES
from regional_lb.live import Live
from regional_lb.outlook import Outlook
from regional_lb.pairs import Pairs
from regional_lb.peers.shares import Shares
from regional_lb.placing import Placing
from regional_lb.policy import Policies, PoliciesChanged
from regional_lb.queue import WaitingRoom, work
from regional_lb.split import Splits, SplitsChanged
from regional_lb.view import ViewSwapped
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Command, Event, Usage
    from topology.law import Law

    AttemptEvent = machine.AttemptBegan | machine.AttemptEnded | machine.AttemptFailed | machine.AttemptRefused


ISSUERS_MAX = 4096  # global balancers; a report names as many (farhop.store.report.ACCEPTED_LIMIT)
HEARD_SHARE = 0.5  # of the tokens that an answer took; its text may have other bytes per token than prompts have


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one region's balancer. `instance` is its name among those with whom it shares replicas; "": alone."""

    region: str
    instance: str = ""
    queue_requests_max: int = 1024
    queue_tokens_max: int = 4_000_000
    queue_wait_s: float = 30.0
    queue_stands_s: float = 2.0
    queue_standing_wait_s: float = 3.0
    starvation_s: float = 10.0
    health: HealthConfig = HealthConfig()
    foreign: admission.Foreign = admission.Foreign()


class RegionalFlow(Placing):
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
        self._pairs = Pairs(self._fleet, lambda request: admission.hints(request, self.law), rng)
        self.outlook = Outlook(config.region, config.foreign, self._fleet, self.queue, self.policies, self.splits, rng)
        self.accepted_bytes: dict[str, float] = {}  # by global balancer, who sent last at the end
        self.predicted_tokens = self.actual_tokens = 0.0
        self._budget, self._suspects = retry.RetryBudget(), Suspects()
        self._live: dict[str, Live] = {}
        self._handlers: dict[type[Event], Callable[[Any, float], list[Command]]] = {
            machine.RequestArrived: self._arrived,
            machine.AttemptBegan: self._began,
            machine.AttemptEnded: self._ended,
            machine.AttemptFailed: self._failed,
            machine.AttemptRefused: self._failed,  # an engine is no tier; should one say so, it did not answer
            machine.PrefillEnded: self._prefill_ended,
            machine.PrefillFailed: self._prefill_failed,
            machine.ClientLeft: self._client_left,
            machine.TimerFired: self._timer_fired,
            machine.LawChanged: self._law_changed,
            ViewSwapped: self._view_swapped,
            PoliciesChanged: self._policies_changed,
            SplitsChanged: self._splits_changed,
            **dict.fromkeys(self._fleet.hears, self._heard),
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event in, commands out."""
        if now >= self.speeds.due:
            self._fleet.age(now)
        return self._handlers[type(event)](event, now)

    @property
    def miscounts(self) -> int:
        """Prompts of which an engine counted other tokens than the tokenizer here."""
        return self._fleet.memory.miscounts

    @property
    def under_way(self) -> int:
        """Requests that are neither answered nor given up."""
        return len(self._live)

    # -- a request's edges

    def _arrived(self, event: machine.RequestArrived, now: float) -> list[Command]:
        request = event.request
        if request.issuer:
            self._accepted(request.issuer, request.prompt_bytes)
        if request.id in self._live:
            return [machine.Answer(request.id, outcome.INVALID_FIELD, "a request with this id is under way")]
        refusal = admission.refusal(request, self.config.region, self.law, self.view, now)
        if refusal is not None:
            return [machine.Answer(request.id, refusal.outcome, refusal.detail)]
        live = self._live[request.id] = Live(
            request, self.outlook.need_of(request), request.model, admission.is_guest(request, self.config.region)
        )
        self._budget.began()
        if (suspected := self._suspected(live, now)) is not None:
            return [suspected]
        if self.splits.by_model:
            self._assign(live)
        turned = self.outlook.turned_away(request, live.need, now, live.line)
        if turned is not None:
            return [self._refuse(live, turned.outcome, turned.detail, now)]
        placed = self._place(live, now) if self.queue.waiting(live.line) == 0 else []
        return placed or self._hold(live, now)

    def _accepted(self, issuer: str, prompt_bytes: int) -> None:
        """Whatever becomes of it: the sender reckons with everything that reached us (farhop.balance.reckoning).

        Of too many senders the one not heard of for the longest is forgotten: it has nothing on its way to us.
        """
        known = self.accepted_bytes
        known[issuer] = known.pop(issuer, 0.0) + prompt_bytes
        if len(known) > ISSUERS_MAX:
            del known[next(iter(known))]

    def _began(self, event: machine.AttemptBegan, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None or live.started:
            return []
        live.started = True
        self.ledger.began(event.id)
        self._fleet.answered(live.replica, event.status, now, live.forwarded_at)
        if event.status < 400:
            if live.replica not in self.view.bound:  # what that took over it does not keep for the next
                self._fleet.caches(live.replica, live.request.chain, admission.hints(live.request, self.law))
            if live.pick is not None:
                live.pick.policy.answered(live.replica, (now - live.forwarded_at) * 1e3, now)
            chosen = live.chosen if live.request.stream else None
            if chosen is not None:
                live.prefilled_at, elapsed_ms = now, (now - live.forwarded_at) * 1e3
                ahead_tokens = 0.0 if live.paired else chosen.backlog_tokens + chosen.uncached_tokens
                if chosen.delay_ms:
                    self._fleet.loaded(elapsed_ms - ahead_tokens * chosen.prefill_ms_per_token, now)
                else:
                    sure = chosen.exact or chosen.hit_tokens <= ahead_tokens
                    self._fleet.prefilled(live.replica, elapsed_ms, ahead_tokens, now, sure=sure)
        return self._fill(live.replica, now)

    def _ended(self, event: machine.AttemptEnded, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        held = self.ledger.held(event.id)
        if event.usage is not None:
            self.queue.settle(event.id, work(event.usage.prompt_tokens, event.usage.completion_tokens))
        self._over(live)
        if self._suspects:
            self._suspects.answered((live.request.tenant, live.request.body_hash))
        if event.fault is not None:
            began_well = event.status < 500
            self._fleet.broke(live.replica, event.fault, now, began_well=began_well, sent_at=live.forwarded_at)
        if event.fault is not None or event.status >= 500:
            self._fleet.lingers(held, live.forwarded_at, now)
        if event.status < 400:
            lacks = event.usage is not None and self._learn(live, event.usage, now)
            chain = event.chain if self._keeps(live, event) else live.request.chain if lacks else ()
            if chain:
                self._fleet.caches(live.replica, chain, admission.hints(live.request, self.law))
        return self._fill(live.replica, now)

    def _failed(self, event: machine.AttemptFailed | machine.AttemptRefused, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None:
            return []
        failed = live.replica
        self._fleet.failed(failed, event.outcome, now, live.forwarded_at)
        self._broke_off(live, event.outcome, now)
        held = self.ledger.held(event.id)
        if live.started:
            self._over(live)
            self._fleet.lingers(held, live.forwarded_at, now, event.outcome)
            broken = machine.Answer(event.id, event.outcome, "the replica failed while answering")
            return [broken, *self._fill(failed, now)]
        self._pairs.give_back(live)
        self._fleet.lingers(held, live.forwarded_at, now, event.outcome)
        live.replica = ""
        return [*self._elsewhere(live, failed, event.outcome, now), *self._fill(failed, now)]

    def _prefill_ended(self, event: machine.PrefillEnded, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None or not live.prefiller:
            return []
        freed = live.prefiller
        self._pairs.ended(live, now)
        return self._fill(freed, now)

    def _prefill_failed(self, event: machine.PrefillFailed, now: float) -> list[Command]:
        live = self._under_way(event)
        if live is None or not live.prefiller:
            return []
        freed, failed = live.replica, self._pairs.failed(live, event.outcome, now)
        if live.started:
            return self._fill(failed, now)
        self._pairs.give_back(live)
        if freed in self.view.bound and event.outcome is outcome.FIRST_BYTE_TIMEOUT:
            live.tried += (freed,)  # each waits for the other: either may be the one that is stuck
        live.replica = ""
        again = self._again(live, now) if live.whole else self._elsewhere(live, failed, event.outcome, now)
        return [*again, *self._fill(freed, now)]

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
            return self._last_call(live, now)
        # An answer in one piece does not show when its prefill was over: it is over when it was due.
        self.ledger.began(event.id)
        return [self._timer(live, live.request.deadline), *self._fill(live.replica, now)]

    def _under_way(self, event: AttemptEvent | machine.PrefillEnded | machine.PrefillFailed) -> Live | None:
        """The request if this very attempt of it is under way: what is said of an earlier one is no news."""
        live = self._live.get(event.id)
        return live if live is not None and live.replica and live.attempts == event.attempt else None

    # -- the world's edges

    def _law_changed(self, event: machine.LawChanged, now: float) -> list[Command]:
        """Who waits and may not stay is told at once; whom an engine has been sent stays there."""
        if not event.law.supersedes(self.law):
            return []
        return self._go_by(event.law.knowing(self._fleet.lineages.of), now)

    def _go_by(self, law: Law, now: float) -> list[Command]:
        before, self.law = self.law, law
        if law.widens(before, Scope.HINTS, frozenset(before.topology.regions)):
            self.journal.under(law.epoch, widened=True)
        else:
            self._fleet.narrowed(law.epoch)
        commands: list[Command] = []
        for live in [live for live in self._live.values() if not live.replica]:
            refusal = admission.unlawful(live.request, self.config.region, self.law)
            if refusal is not None:
                commands.append(self._refuse(live, refusal.outcome, refusal.detail, now))
        return commands + self._fill_all(now)

    def _view_swapped(self, event: ViewSwapped, now: float) -> list[Command]:
        self.view = self._fleet.adopt(event.view)
        self.policies.adopt(self._fleet.whole.of.names)
        law = self.law.knowing(self._fleet.lineages.of)
        return self._fill_all(now) if law is self.law else self._go_by(law, now)

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
        if live.need.line != live.line:
            live.need = replace(live.need, line=live.line)

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
            asked = (live.prefiller or live.replica, live.replica if live.replica in self.view.bound else "")
            lost = next((name for name in asked if name in silent), "")
            if not lost or live.started or request.id not in self._live:
                continue
            others = self.outlook.serving(live.line, now, (live.replica, *live.tried))
            halved = lost == live.prefiller
            if not others and not halved:
                continue  # it may yet answer
            if retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
                broken = machine.PrefillFailed if halved else machine.AttemptFailed
                cancel = machine.Cancel(request.id, live.attempts)
                commands += [cancel, *self.handle(broken(request.id, live.attempts, reason), now)]
        return commands

    # -- learning

    def _keeps(self, live: Live, event: machine.AttemptEnded) -> bool:
        """Whether the replica holds the answer behind its prompt, as it was heard and the next turn will bring it. If
        it generated far more, it was thinking, and that stands between the two."""
        if event.fault is not None or live.replica in self.view.bound or len(event.chain) <= len(live.request.chain):
            return False
        tokens = event.usage.completion_tokens if event.usage is not None else 0
        return event.said_bytes >= HEARD_SHARE * tokens * self.estimates.bytes_per_token(live.request.model)

    def _learn(self, live: Live, usage: Usage, now: float) -> bool:
        """Take a finished request's usage. Whether the mirror, thereby corrected, lacks some of the prompt."""
        request, lacks = live.request, False
        self.estimates.age(now)
        self.estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
        decode_ms, service_ms = (now - live.prefilled_at) * 1e3, (now - live.forwarded_at) * 1e3
        self._fleet.served(live.replica, decode_ms, service_ms, usage.completion_tokens, now)
        chosen = live.chosen
        if usage.cached_tokens is not None and chosen is not None and not live.paired:
            self.predicted_tokens += chosen.hit_tokens
            self.actual_tokens += usage.cached_tokens
            lacks = not chosen.exact and self._fleet.memory.overrated(
                live.replica, live.need, chosen.hit_tokens, usage.cached_tokens
            )
        if request.tokens is not None:
            self._fleet.memory.counted(request.model, len(request.tokens.ids) // TOKEN_BYTES, usage.prompt_tokens)
        return lacks
