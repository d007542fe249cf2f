"""The global machine under any interleaving of events: one conclusion each, books that balance, the law kept always."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from referee import Referee, Rider
from worlds import MODEL, OTHER_MODEL, REGIONS, capacity, everywhere, instance, law, report_in, request, seen, worldwide

from farhop.balance import machine, outcome
from farhop.balance.health.reading import State
from farhop.balance.health.region import LivenessConfig
from farhop.balance.machine import Forward, Usage
from global_lb.fleet.view import ChannelChanged, RegionForced, RegionReported
from tests.conftest import played
from topology.model import Residency, Rule

NAMES = tuple(REGIONS)
LAWS = (
    law(epoch=1),
    law(epoch=2, anyone=Rule(allow=("eu", "uk")), german=Rule(allow=("world",))),
    law(epoch=3, anyone=Rule(allow=("world",), deny=("eu",)), european=Rule(allow=("mars",))),
    law(epoch=4, anyone=Residency(Rule(allow=("world",)), hints=Rule(allow=("JP",)))),
)
REFUSALS = (
    outcome.QUEUE_FULL,
    outcome.NO_REPLICA,
    outcome.UNLAWFUL_HERE,
    outcome.STOPPING,
    outcome.DEADLINE,
    outcome.FOREIGN_FULL,
    outcome.BROKEN_PROMISE,
    outcome.CONNECT_FAILED,  # a region reports its replica's failure
)
FAILURES = (outcome.CONNECT_FAILED, outcome.FIRST_BYTE_TIMEOUT, outcome.DIED_BEFORE_START, outcome.BAD_FRAMING)
# Most requests are ordinary; some have one unusual property.
ODDITIES = (
    *({} for _ in range(8)),
    {"deadline": 1.0},
    {"deadline": 0.0},
    {"tenant": "lost"},
    {"model": "nowhere"},
    {"model": OTHER_MODEL},
    {"narrow": (("uk", "apac"),)},
    {"lawful": frozenset({"london", "tokyo"})},
)


class GlobalMachine(RuleBasedStateMachine):
    """Three regions of two instances, tenants of three laws, and everything that can happen to them."""

    resumes: ClassVar[list[int]] = [0]  # of all examples: without any the property proves nothing of them

    @initialize(patience_s=st.sampled_from((0.0, 5.0)))
    def begin(self, patience_s: float) -> None:
        self.now, self.arrivals = 0.0, 0
        liveness = LivenessConfig(report_age_s=3.0, relay_streak=2, relay_hold_s=2.0)
        self.flow = worldwide(patience_s=patience_s, under=LAWS[0], held_max=3, liveness=liveness)
        self.referee = Referee(self.flow, self._lawful, self._forwarded)

    def _lawful(self, one: machine.Request) -> frozenset[str]:
        allowed = self.flow.law.verdict(one.tenant, one.model, narrow=one.narrow, key=one.key).lawful
        return allowed if one.lawful is None else allowed & one.lawful

    def _forwarded(self, rider: Rider, forward: Forward, now: float) -> None:
        self.resumes[0] += isinstance(forward, machine.Resume)
        lawful = rider.lawful & self._lawful(rider.request)
        assert forward.target in lawful
        # Asked twice only without a promise, once: who turned it away for the sake of others takes it at last.
        assert rider.refused_by.count(forward.target) <= (forward.promised_ttft_ms is None)
        assert forward.lawful is not None
        assert forward.lawful <= lawful
        assert self.flow.regions.liveness[forward.target].read(now).state in (State.UP, State.SUSPECT)
        asked = [i for i in self.flow.regions.view.regions[forward.target].instances if i.tier == forward.address]
        assert len(asked) == 1
        assert not asked[0].draining
        assert asked[0].models[rider.request.model].replicas_ready > 0
        # Suspect regions only if no region is sure.
        if self.flow.regions.liveness[forward.target].read(now).state is State.SUSPECT:
            tried = set(self.flow.requests[forward.id].refusals)
            assert not [r for r in lawful - tried if self._sure(r, rider.request.model)]

    def _sure(self, region: str, model: str) -> bool:
        serving = self.flow.regions.best_instance(region, model) is not None
        return serving and self.flow.regions.liveness[region].read(self.now).state is State.UP

    def _tell(self, event: machine.Event) -> None:
        self.referee.happen(event, self.now)

    # -- requests

    @rule(
        sizes=st.lists(st.sampled_from((1024, 100, 9000)), min_size=1, max_size=4),
        tenant=st.sampled_from(("anyone", "european", "german")),
        oddity=st.sampled_from(ODDITIES),
    )
    def some_arrive(self, sizes, tenant, oddity) -> None:
        for size in sizes:
            self.arrivals += 1
            fields = {"tenant": tenant, "deadline": self.now + 20.0, **oddity}
            if "deadline" in oddity:
                fields["deadline"] = self.now + oddity["deadline"]
            self._tell(machine.RequestArrived(request(f"q{self.arrivals}", size, prefix="alice", **fields)))

    def _one(self, n: int, *states: str) -> Rider | None:
        riders = self.referee.states(*states)
        return riders[n % len(riders)] if riders else None

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(n=st.integers(0, 9), status=st.sampled_from((200, 200, 404)))
    def attempt_begins(self, n: int, status: int) -> None:
        if rider := self._one(n, "sent", "started"):
            self._tell(machine.AttemptBegan(rider.request.id, rider.attempt, status))

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(n=st.integers(0, 9), cached=st.sampled_from((None, 0, 100)))
    def attempt_ends(self, n: int, cached: int | None) -> None:
        if rider := self._one(n, "sent", "started"):
            usage = Usage(rider.request.prompt_bytes // 5 + 1, 50, cached)
            self._tell(machine.AttemptEnded(rider.request.id, rider.attempt, 200, usage))

    @precondition(lambda self: self.referee.states("sent"))
    @rule(n=st.integers(0, 9), reason=st.sampled_from(REFUSALS))
    def attempt_is_refused(self, n: int, reason: outcome.Outcome) -> None:
        if rider := self._one(n, "sent"):
            self._tell(machine.AttemptRefused(rider.request.id, rider.attempt, reason, 100.0))

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(n=st.integers(0, 9), reason=st.sampled_from(FAILURES), resumable=st.booleans())
    def attempt_fails(self, n: int, reason: outcome.Outcome, resumable: bool) -> None:
        if rider := self._one(n, "sent", "started"):
            reason = reason if rider.state == "sent" else outcome.DIED_MID_STREAM
            begun = rider.state == "started"
            self._tell(machine.AttemptFailed(rider.request.id, rider.attempt, reason, resumable and begun))

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(n=st.integers(0, 9), epoch=st.sampled_from((None, None, 0, 1, 2, 3)), well=st.booleans())
    def stream_breaks(self, n: int, epoch: int | None, well: bool) -> None:
        """In one breath, since two rules hardly ever meet in one request; perhaps under another law than it began."""
        if well:
            self.all_is_well_again()
        if rider := self._one(n, "sent", "started"):
            name, attempt = rider.request.id, rider.attempt
            self._tell(machine.AttemptBegan(name, attempt, 200))
            if epoch is not None:
                self.flow.law = LAWS[epoch]
            self._tell(machine.AttemptFailed(name, attempt, outcome.DIED_MID_STREAM, resumable=True))

    @rule(n=st.integers(0, 9), stale=st.integers(0, 4))
    def old_news_arrives(self, n: int, stale: int) -> None:
        rider = self._one(n, "held", "sent")
        name, attempt = (rider.request.id, rider.attempt - 1) if rider else ("nobody", 1)
        events = (
            machine.AttemptBegan(name, attempt, 200),
            machine.AttemptEnded(name, attempt, 200, None),
            machine.AttemptFailed(name, attempt, outcome.DIED_BEFORE_START),
            machine.AttemptRefused(name, attempt, outcome.QUEUE_FULL),
            machine.TimerFired(name),
        )
        self._tell(events[stale])

    @precondition(lambda self: self.referee.states("held", "sent", "started"))
    @rule(n=st.integers(0, 9))
    def client_leaves(self, n: int) -> None:
        if rider := self._one(n, "held", "sent", "started"):
            self._tell(machine.ClientLeft(rider.request.id))

    # -- the world

    @rule(dt=st.sampled_from((0.01, 0.5, 1.0, 4.0)), late=st.booleans(), alive=st.booleans())
    def time_passes(self, dt: float, late: bool, alive: bool) -> None:
        self.now += dt
        for region in NAMES if alive else ():
            self._tell(RegionReported(region))
        for name in [] if late else self.referee.due(self.now):
            if name in self.referee.riders:
                self._tell(machine.TimerFired(name))

    @rule(region=st.sampled_from(NAMES), up=st.booleans())
    def channel_changes(self, region: str, up: bool) -> None:
        self._tell(ChannelChanged(region, up))

    @rule(region=st.sampled_from(NAMES), drain=st.booleans(), for_s=st.sampled_from((None, 1.0)))
    def operator_speaks(self, region: str, drain: bool, for_s: float | None) -> None:
        self._tell(RegionForced(region, drain, "because", None if for_s is None else self.now + for_s))

    @rule(
        gone=st.sampled_from((None, None, *NAMES)),
        ready=st.sampled_from((2, 2, 0)),
        draining=st.sampled_from((False, False, True)),
        accepted=st.sampled_from((0.0, 1024.0, 50_000.0)),
        incarnation=st.sampled_from((1, 1, 2)),
        wait_ms=st.sampled_from((0.0, 400.0)),
        second=st.booleans(),
    )
    def view_swaps(self, gone, ready, draining, accepted, incarnation, wait_ms, second) -> None:
        instances = []
        for region in NAMES:
            if region == gone:
                continue
            models = {MODEL: capacity(wait_ms=wait_ms, replicas_ready=ready), OTHER_MODEL: capacity()}
            known = {"models": models, "accepted": accepted, "incarnation": incarnation}
            instances.append(instance(region, "a", draining=draining, **known))
            if second:
                instances.append(instance(region, "b", wait_ms=wait_ms))
        self._tell(seen(*instances))

    @rule()
    def all_is_well_again(self) -> None:
        self.flow.law = LAWS[0]
        self._tell(everywhere())
        for region in NAMES:
            self._tell(ChannelChanged(region, True))
            self._tell(RegionReported(region))
            self._tell(RegionForced(region, False))

    @rule(epoch=st.sampled_from((1, 2, 3)), n=st.none() | st.integers(0, 9))
    def law_changes(self, epoch: int, n: int | None) -> None:
        """And perhaps an attempt fails right then."""
        self.flow.law = LAWS[epoch]
        if n is not None and (rider := self._one(n, "sent", "started")):
            begun = rider.state == "started"
            reason = outcome.DIED_MID_STREAM if begun else outcome.DIED_BEFORE_START
            self._tell(machine.AttemptFailed(rider.request.id, rider.attempt, reason, begun))

    # -- what always holds

    @invariant()
    def the_books_balance(self) -> None:
        flow, riders = self.flow, self.referee.riders
        assert flow.under_way == len(riders)
        assert set(flow.held) == {name for name, rider in riders.items() if rider.state == "held"}
        assert len(flow.held) <= 3
        sent = self.referee.states("sent", "started")
        assert len(flow.ledger) == len(sent)
        for region in NAMES:
            load = flow.ledger.load(region)
            assert load.in_flight == sum(r.target == region for r in sent)
            assert load.prefill_tokens >= 0
        assert 0 <= flow.budget.retrying <= 3 + 0.2 * 50

    @invariant()
    def what_is_outstanding_is_under_way(self) -> None:
        waiting = sum(r.request.prompt_bytes for r in self.referee.states("sent"))
        outstanding = [load.outstanding_bytes for load in self.flow.regions.loads.values()]
        assert all(n >= 0.0 for n in outstanding)
        assert sum(outstanding) <= waiting

    @invariant()
    def what_is_learned_stays_in_its_domain(self) -> None:
        assert all(0.1 <= r.value <= 1.0 for r in self.flow.regions.cache_hit_calibration.values())

    @invariant()
    def answers_under_way_are_those_that_speak(self) -> None:
        flow = self.flow
        attempts = [state.attempt for state in flow.requests.values() if state.attempt is not None]
        speaking = sum(bool(attempt.tokens_per_s) for attempt in attempts)
        assert sum(one.in_flight for one in flow.estimates.under_way.values()) == speaking
        assert speaking <= sum(attempt.started for attempt in attempts)

    @invariant()
    def who_may_be_fetched_is_under_way_and_has_not_begun(self) -> None:
        sent = {rider.request.id for rider in self.referee.states("sent")}
        assert self.flow.displaced.keys() <= sent

    @precondition(lambda self: not self.referee.riders)
    @invariant()
    def at_rest_nothing_is_held(self) -> None:
        assert self.flow.budget.retrying == 0
        assert self.flow.ledger.targets() == ()

    def teardown(self) -> None:
        if hasattr(self, "referee"):
            for name in list(self.referee.riders):
                if name in self.referee.riders:
                    self._tell(machine.ClientLeft(name))
            assert not self.referee.riders
            self.at_rest_nothing_is_held()


@pytest.mark.hypothesis  # for `make test-system`, which runs all of them
def test_the_global_flow_keeps_its_invariants_for_any_events() -> None:
    GlobalMachine.resumes[0] = 0
    bounds = settings(max_examples=played(600), stateful_step_count=60, deadline=None, derandomize=True)
    run_state_machine_as_test(GlobalMachine, settings=bounds)
    assert GlobalMachine.resumes[0] >= bounds.max_examples // 6


def test_a_prompt_whose_hints_are_unlawful_leaves_no_trace_in_the_trie() -> None:
    """The trie of London's balancer after a thousand requests, every second of them secret."""
    secretive = Residency(processing=Rule(allow=("world",)), hints=Rule(allow=("JP",)))
    flow = worldwide(under=law(secretive=secretive))
    for n in range(1000):
        secret = n % 2 == 1
        tenant = "secretive" if secret else "anyone"
        flow.handle(machine.RequestArrived(request(f"q{n}", prefix=tenant, tenant=tenant)), 0.0)
        flow.handle(machine.AttemptBegan(f"q{n}", 1, 200), 0.0)
        flow.handle(machine.AttemptEnded(f"q{n}", 1, 200, Usage(256, 10, 0)), 0.0)
    report_in(flow, NAMES, 0.0)
    assert flow.regions.trie.match(request("probe", prefix="secretive").chain) == {}
    assert flow.regions.trie.match(request("probe", prefix="anyone").chain) != {}


def test_a_stream_that_broke_may_go_on_where_it_was_refused_before_it_began() -> None:
    one, before = GlobalMachine(), GlobalMachine.resumes[0]
    one.begin(0.0)
    one.some_arrive([1024], "anyone", {})
    one.attempt_is_refused(0, outcome.QUEUE_FULL)
    one.stream_breaks(0, None, False)
    one.attempt_is_refused(0, outcome.QUEUE_FULL)
    assert GlobalMachine.resumes[0] - before == 2, "two regions are left, and each is asked"
    one.the_books_balance()
