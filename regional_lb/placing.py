"""Gives a request to a replica or lets it wait, and gives what frees to those who wait: one half of the flow.

Invariants are the flow's (regional_lb.flow): what is here places, holds, releases, refuses and forgets, each in one
breath with the books. Never handles an event itself.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from farhop.balance import chain, machine, outcome, retry
from farhop.balance.ledger import Reservation
from farhop.balance.outcome import Source
from farhop.balance.suspects import BROKE_OFF
from regional_lb import admission
from regional_lb.view import model_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.ledger import Ledger
    from farhop.balance.machine import Answer, Command
    from farhop.balance.outcome import Outcome
    from farhop.balance.suspects import Suspects
    from regional_lb.fleet import Fleet
    from regional_lb.flow import FlowConfig
    from regional_lb.live import Live
    from regional_lb.outlook import Outlook
    from regional_lb.pairs import Pairs
    from regional_lb.pick import Scored
    from regional_lb.queue import WaitingRoom
    from regional_lb.table import Subset, Table
    from regional_lb.view import View
    from topology.law import Law

K_WAITING = 8  # how many of the first in line are compared for the best prefix when a slot frees
CHOOSY_S = 2.0  # how long a request waits for who serves it sooner than who has room: others may go on coming there
# Answers take their room token by token: those under way have half of theirs in the mean, and hardly ever all at once
# much more. With the whole of it set aside a fleet is full at 70 % of its cache; with 0.6 of it caches lose their
# prefixes, and engines queue.
GROWN_SHARE = 0.75
RETRY_AFTER_S = 1.0
_GAVE_UP = {
    outcome.WHOLE_ANSWER_TIMEOUT: "no answer within this region's limit for one in one piece: ask for a stream, or less"
}


class Placing:
    """See the module's head. What it works on is the flow's."""

    config: FlowConfig
    law: Law
    view: View
    ledger: Ledger
    queue: WaitingRoom
    outlook: Outlook
    _fleet: Fleet
    _pairs: Pairs
    _budget: retry.RetryBudget
    _suspects: Suspects
    _live: dict[str, Live]
    _weight_of: Callable[[str], float]

    def _timer(self, live: Live, at: float) -> Command:
        live.due = at
        return machine.SetTimer(live.request.id, at)

    def _place(self, live: Live, now: float, aside: tuple[str, ...] = ()) -> list[Command]:
        """Forward the request if some replica but those `aside` has room, a guest beside the reserve; [] otherwise."""
        request = live.request
        if live.guest and not self.outlook.fits_guest(live, now):
            live.declined = False
            return []
        if live.tried and not self.outlook.serving(live.line, now, live.tried):
            live.tried = ()  # better the same replica again than none
        choosy = live.held_at is None or now - live.held_at < CHOOSY_S
        choice = self.outlook.consider(
            request, live.need, now, live.tried, aside, live.assigned, whole=live.whole, choosy=choosy
        )
        live.declined = choice is not None and choice.declined
        if choice is None or choice.chosen is None:
            return []
        chosen = choice.chosen
        if not self._fleet.admit(chosen.replica, now):
            return []
        half = self._pairs.begin(live, choice, now) if choice.prefill is not None else None
        if half is None and chosen.replica in self.view.bound:
            return []  # who was to prefill is on trial, and has one already
        live.attempts += 1
        live.replica, live.forwarded_at, live.pick = chosen.replica, now, choice
        choice.policy.placed(chosen.replica, live.line, self._fleet.whole)
        uncached = int(chosen.uncached_tokens)
        self._fleet.adapters.sent(chosen.replica, request.model)
        ttft_ms, marks = choice.prefill_ms, chain.marks(request.chain)
        kv_tokens = self._own_tokens(live, chosen, marks) + int(GROWN_SHARE * live.need.output_tokens)
        self.ledger.reserve(request.id, Reservation(chosen.replica, 0 if half else uncached, kv_tokens, marks))
        live.prefilled_at = now + ttft_ms / 1e3
        address = self.view.replicas[chosen.replica].address
        return [
            self._timer(live, request.deadline if request.stream else min(request.deadline, live.prefilled_at)),
            machine.Forward(request.id, live.attempts, chosen.replica, address, ttft_ms, reasons=choice, prefill=half),
        ]

    def _own_tokens(self, live: Live, chosen: Scored, marks: tuple[int, ...]) -> int:
        """Of its prompt, what is in the replica's KV cache for its sake: a cached prefix cannot be evicted while it is
        used, so a hit takes room as well, but for what somebody else there holds anyway."""
        need = live.need
        shared = chain.bytes_at(chain.marked_depth(self.ledger.shared(chosen.replica, marks))) / need.bytes_per_token
        return int(max(chosen.uncached_tokens, need.prompt_tokens - shared))

    def _hold(self, live: Live, now: float) -> list[Command]:
        request, tokens = live.request, live.need.prompt_tokens
        if self.outlook.nobody_for(live, now):
            return [self._refuse(live, outcome.NO_REPLICA, self._nobody(live, now), now)]
        self.queue.note(live.line, self.config.queue_standing_wait_s, now)
        most_s = self._most_s(live, now) - request.waited_s
        if most_s <= 0.0:
            return self._last_call(live, now)
        # By the longest wait there is: where the queue stands, those ahead are let go for their own sake, and who comes
        # now is next sooner than their number says.
        if self.outlook.hopeless(live, self.config.queue_wait_s - request.waited_s, now):
            return [self._refuse(live, outcome.QUEUE_FULL, "the region's queue is too long for it to wait", now)]
        commands: list[Command] = []
        if not self.queue.fits(tokens):
            weight = self._weight_of(request.tenant)
            victim = self.queue.victim(request.priority, tokens, live.line, request.tenant, weight, guest=live.guest)
            if victim is None:
                return [self._refuse(live, outcome.QUEUE_FULL, "the region's queue is full", now)]
            detail = "the region's queue is full, and others go first"
            commands.append(self._refuse(self._live[victim.id], outcome.QUEUE_FULL, detail, now))
        self.queue.settle(request.id, 0.0)  # a turn that came to nothing
        self.queue.push(
            request.id, live.line, request.tenant, self._weight_of(request.tenant), request.priority, tokens, now,
            live.need.output_tokens, waited_s=request.waited_s, guest=live.guest,
        )  # fmt: skip
        live.held_at = now if live.held_at is None else live.held_at
        commands += [machine.Hold(request.id), self._timer(live, min(request.deadline, now + most_s))]
        # Alone in its line it was just tried; before others it may be due, and among them the one that fits.
        return commands + self._fill_line(live.line, now) if self.queue.waiting(live.line) > 1 else commands

    def _most_s(self, live: Live, now: float) -> float:
        """How long a request may wait: less where its band's queue stands, and is no burst that will be worked off.

        First come, first served, everybody would wait as long as anybody may, and all that is served be late. A queue
        stands where the oldest has always been late (CoDel, RFC 8289), not where it merely was never empty: that it is
        for long stretches at 0.9 of capacity, and nobody need be refused. Who is late already still goes before nobody.
        What it waited in regions that let it go counts; where no queue stands it may wait that little once more.
        """
        config, waited_s = self.config, live.request.waited_s
        stands = self.queue.stands_s(live.line, live.request.priority, now) > config.queue_stands_s
        if not stands and not waited_s:
            return config.queue_wait_s
        return min(config.queue_wait_s, config.queue_standing_wait_s + (0.0 if stands else waited_s))

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
            self.queue.note(line, self.config.queue_standing_wait_s, now)
            able = self.outlook.serving(line, now)
            if not able:
                everybody = [self._live[w.id] for w in self.queue.first(line, waiting)]
                return commands + [
                    self._refuse(live, outcome.NO_REPLICA, self._nobody(live, now), now) for live in everybody
                ]
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
        # What is free may be the reserve: then guests, however many, do not stand before those it is for.
        guests = self.queue.guests(line)
        kept = bool(guests) and self.outlook.left_for_guests(line, now).slots < 1
        for own in (True,) if kept else (False, True) if guests else (False,):
            first = [self._live[waiting.id] for waiting in self.queue.first(line, K_WAITING, own=own)]
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
            return [self._refuse(live, outcome.QUEUE_TIMEOUT, "no replica had room in time", now)]
        if self.queue.outlived(request.id, self._most_s(live, now), now):
            return self._last_call(live, now)
        placed = self._place(live, now, aside)
        if placed:
            self.queue.remove(request.id, served=True)
        return placed

    def _last_call(self, live: Live, now: float) -> list[Command]:
        """It may wait no longer: whoever waited by choice takes who has room now."""
        if live.declined:
            live.held_at = -inf
            placed = self._place(live, now)
            if placed:
                self.queue.remove(live.request.id, served=True)
                return placed
        return [self._refuse(live, outcome.QUEUE_TIMEOUT, "no replica had room in time", now)]

    def _elsewhere(self, live: Live, failed: str, reason: Outcome, now: float) -> list[Command]:
        """After a failure before the first byte: another replica, within the retry rules, or an answer."""
        if not retry.may_redispatch(reason, live.attempts, live.transport_retries, self._budget):
            return [self._refuse(live, reason, _GAVE_UP.get(reason, "the replica failed before it answered"), now)]
        if retry.draws_on_budget(reason, live.transport_retries) and not live.budgeted:
            live.budgeted = self._budget.take()
        live.transport_retries += reason.source is Source.TRANSPORT
        live.tried += (failed,)
        return self._again(live, now)

    def _again(self, live: Live, now: float) -> list[Command]:
        refusal = admission.refusal(live.request, self.config.region, self.law, self.view, now)
        if refusal is not None:
            return [self._refuse(live, refusal.outcome, refusal.detail, now)]
        if (suspected := self._suspected(live, now)) is not None:
            return [suspected]
        return self._place(live, now) or self._hold(live, now)

    # -- queries of death: what may have ended two replicas is not handed to a third (farhop.balance.suspects)

    def _broke_off(self, live: Live, reason: Outcome, now: float) -> None:
        """An attempt ended without an answer: it was under way, unless there was no connection."""
        request = live.request
        if request.body_hash and reason in BROKE_OFF:
            body = (request.tenant, request.body_hash)
            self._suspects.broke_off(body, (live.replica,), self._heard_of((live.replica,)), now)

    def _heard_of(self, process: tuple[str, ...]) -> float:
        """When a replica last told of itself."""
        replica = self.view.replicas.get(process[0])
        return replica.sample.at if replica is not None and replica.sample is not None else -inf

    def _suspected(self, live: Live, now: float) -> Answer | None:
        """The answer where two replicas are gone that it was under way at. Nobody waits here until that is sure: the
        next scrapes show it, and the client may ask again then."""
        request = live.request
        if not request.body_hash or not self._suspects:
            return None
        verdict = self._suspects.verdict((request.tenant, request.body_hash), self._heard_of, now)
        if verdict is None:
            return None
        self._over(live)
        detail = "this request was under way at two replicas when they ended; it is not sent to a third for a while"
        return machine.Answer(request.id, outcome.ENDS_PROCESSES, detail, max(RETRY_AFTER_S, verdict.until - now))

    def _refuse(self, live: Live, reason: Outcome, detail: str, now: float) -> Answer:
        self._over(live)
        if reason.source is Source.LAW:
            return machine.Answer(live.request.id, reason, detail)
        if reason is outcome.NO_REPLICA:
            return machine.Answer(live.request.id, reason, detail, RETRY_AFTER_S)  # nobody knows how long
        wait_ms = self.outlook.wait_ms(live.line, now)
        return machine.Answer(live.request.id, reason, detail, max(RETRY_AFTER_S, wait_ms / 1e3), wait_ms)

    def _nobody(self, live: Live, now: float) -> str:
        """Why a request is refused where nobody is able."""
        which = f"version {live.assigned.version} of this model" if live.assigned is not None else "this model"
        if not self.outlook.serving(live.line, now):
            return f"no replica of {which} is healthy"
        if live.whole:
            return f"the replica that prefills for those of {which} refused it"
        if live.request.divisible:
            return f"no replica that prefills for those of {which} is healthy"
        return f"no replica of {which} takes one with several prompts or answers, or that asks what its prompt was"

    def _over(self, live: Live) -> None:
        """Forget a request and give back all it held."""
        request_id = live.request.id
        del self._live[request_id]
        self.queue.remove(request_id, served=False)
        self.queue.settle(request_id, None)
        self._pairs.give_back(live)
        self._budget.ended()
        if live.budgeted:
            self._budget.give()
