"""The regional machine under any interleaving of events: one conclusion each, books that balance, law and room kept."""

from __future__ import annotations

from typing import Any, ClassVar

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
from msgspec.structs import replace
from referee import Referee, Rider
from worlds import MODEL, OTHER_MODEL, law, regional, replica, request, swapped

from farhop.balance import machine, outcome
from farhop.balance.health.reading import State
from farhop.balance.health.replica import HealthConfig, Mode
from farhop.balance.ledger import Reservation
from farhop.balance.machine import AttemptBegan, ClientLeft, Forward, Hold, RequestArrived, SetTimer, TimerFired, Usage
from farhop.balance.model_facts import ModelFacts
from farhop.balance.prefix.chain import bytes_at, marks
from regional_lb.fleet.adapters import LOAD_MS
from regional_lb.fleet.table import SAMPLE_FRESH_S
from regional_lb.fleet.view import Replica, ReplicaProbed, Sample
from regional_lb.scheduler.flow import K_WAITING
from regional_lb.scheduler.split import RuleConfig, SplitConfig, SplitsChanged
from tests.conftest import played
from topology.model import Rule as LawRule

NAMES = ("r1", "r2", "r3", "p1", "p2")  # the last two prefill for others
LAWS = (
    law(epoch=1),
    law(epoch=2, anyone=LawRule(allow=("eu",))),
    law(epoch=3, other=LawRule(allow=("world",), deny=("GB",))),
)
FAILURES = (
    outcome.CONNECT_FAILED,
    outcome.CONNECT_TIMEOUT,
    outcome.FIRST_BYTE_TIMEOUT,
    outcome.DIED_BEFORE_START,
    outcome.BAD_FRAMING,
)
# Most requests are ordinary; some have one unusual property.
ODDITIES = (
    *({} for _ in range(10)),
    {"deadline": 1.0},
    {"deadline": 0.0},
    {"tenant": "german"},
    {"model": "nowhere"},
    {"lawful": frozenset({"tokyo"})},
    {"lawful": frozenset({"tokyo", "london"}), "issuer": "global-1"},
    {"lawful": frozenset({"tokyo", "london"}), "issuer": "global-1", "continues": "ids"},
)
SPLITS: tuple[dict[str, SplitConfig], ...] = (
    {},
    {MODEL: SplitConfig(weights={"v1": 1, "v2": 1})},
    {MODEL: SplitConfig(weights={"v1": 0, "v2": 1}, fallback=False)},
    {
        MODEL: SplitConfig(weights={"v1": 1, "v2": 0}),
        OTHER_MODEL: SplitConfig(rules=[RuleConfig(version="v9", tenant="other")]),
    },
)
FAULTS = (outcome.ENGINE_OUT_OF_MEMORY, outcome.ENGINE_BROKEN, outcome.ENGINE_ERROR)
MODELS_OF = {
    "r1": {MODEL}, "r2": {MODEL, OTHER_MODEL}, "r3": {OTHER_MODEL}, "p1": {MODEL}, "p2": {MODEL, OTHER_MODEL}
}  # fmt: skip


class RegionalMachine(RuleBasedStateMachine):
    """Three replicas and two that prefill for them, two models, two tenants, and everything that can happen to them."""

    resumes: ClassVar[list[int]] = [0]  # of all examples: without any the property proves nothing of them
    moves: ClassVar[list[int]] = [0]

    @initialize()
    def begin(self) -> None:
        self.now, self.arrivals = 0.0, 0
        self.flow = regional(
            *(self._replica(name) for name in NAMES),
            under=LAWS[0],
            queue_requests_max=6,
            queue_tokens_max=4000,
            queue_wait_s=8.0,
            queue_starvation_s=3.0,
            move_over_s=1.0,
            health=HealthConfig(rise=1, fall=2, streak=2, eject_s=2.0, refused_s=0.5, trial_s=2.0, fresh_s=5.0),
        )
        self.referee = Referee(self.flow, self._lawful, self._forwarded)

    def _replica(self, name: str, **fields) -> Replica:
        version = {"r1": "v1", "r2": "v2"}.get(name, "")
        role = "prefill" if name.startswith("p") else "mixed"
        own = {"models": frozenset(MODELS_OF[name]), "kv_tokens": 3000, "prefill_tokens_max": 900, "role": role}
        own["token_ids"] = name != "r3"
        own["facts"] = {MODEL: ModelFacts({"r2": 900, "p1": 900}.get(name, 4000))}
        return replica(name, **{**own, "slots": 3, "version": version, **fields})

    def _lawful(self, one: machine.Request) -> frozenset[str]:
        allowed = self.flow.law.verdict(one.tenant, one.model, narrow=one.narrow, key=one.key).lawful
        return allowed if one.lawful is None else allowed & one.lawful

    def _forwarded(self, rider: Rider, forward: Forward, now: float) -> None:
        assert "london" in rider.lawful & self._lawful(rider.request)
        self._may_take(forward.target, rider, now)
        assert self.flow.replicas.view.replicas[forward.target].role != "prefill"
        resumes = isinstance(forward, machine.Resume)
        self.resumes[0] += resumes
        carrier = self.flow.requests[rider.request.id].carrier
        assert (carrier is not None) == (resumes or rider.request.continues is not None)
        if carrier is not None:
            assert self.flow.replicas.view.replicas[forward.target].takes_up(carrier)
        if forward.prefill is not None:
            assert not resumes
            assert rider.request.divisible
            self._may_take(forward.prefill.target, rider, now)
            assert self.flow.replicas.view.replicas[forward.prefill.target].role == "prefill"

    def _may_take(self, name: str, rider: Rider, now: float) -> None:
        target = self.flow.replicas.view.replicas[name]
        assert rider.request.model in target.models
        self._holds(target, rider, now)
        assigned, split = self.flow.requests[rider.request.id].assigned, self.flow.splits.of(rider.request.model)
        if target.role != "prefill" and assigned is not None and split is not None and not split.config.fallback:
            assert target.version == assigned.version
        machine = self.flow.replicas.health[name]
        health = machine.read(now)
        if health.state not in (State.UP, State.SUSPECT) and health.why != "a trial is under way":
            line = rider.request.model
            assert target.role != "prefill"  # panic mode is per model, and never ignores replicas that only prefill
            assert self.flow.replicas.mode(line, now) is Mode.PANIC
            assert machine.held_out(now)
        # The ledgers are read at the end: requests sent later in the same call only made it tighter.
        load = self.flow.replicas.ledger.load(name)
        if load.in_flight > 1:
            assert load.in_flight <= target.slots
            # Their prompts: not all answers are there in full at any one time, see regional_lb.fleet.kv_growth.
            assert load.kv_tokens - load.answer_tokens <= target.kv_tokens
            there = [held.prefill_tokens for held in self.flow.replicas.ledger._held.values() if held.target == name]
            # The last request sent found part of a step free, or of the next one if several waited.
            last = next((tokens for tokens in reversed(there) if tokens), 0)
            assert load.prefill_tokens - last < 2 * target.prefill_tokens_max
        sample = target.sample
        assert sample is None or (sample.queued or 0) == 0 or now - sample.at >= SAMPLE_FRESH_S

    def _holds(self, target: Replica, rider: Rider, now: float) -> None:
        """Whether it can hold the request, or nobody can who may take it."""
        state, model = self.flow.requests[rider.request.id], rider.request.model
        if target.role == "prefill" or state.need.context_tokens <= target.context_tokens(model):
            return
        view = self.flow.replicas.view
        unable = view.unable_to_resume(model, state.carrier) if state.carrier is not None else ()
        for other in self.flow.eligibility.serving(state.variant, now, unable).names:
            assert view.replicas[other].context_tokens(model) < state.need.context_tokens

    def _held_at(self, name: str) -> list[Reservation]:
        """What riders hold there, by the ledger's own word: whole attempts, and prefill halves."""
        keys = [rider.request.id for rider in self.referee.states("sent", "started") if rider.target == name]
        keys += [f"{rider.request.id}/prefill" for rider in self.referee.states("sent") if rider.prefiller == name]
        found = [self.flow.replicas.ledger.held(key) for key in keys]
        return [held for held in found if held is not None and held.target == name]

    def _tell(self, event: machine.Event) -> None:
        self.referee.happen(event, self.now)

    # -- requests

    @rule(
        sizes=st.lists(st.sampled_from((1024, 100, 3000, 9000)), min_size=1, max_size=5),
        prefix=st.sampled_from(("", "alice", "bob")),
        tenant=st.sampled_from(("anyone", "other")),
        model=st.sampled_from((MODEL, OTHER_MODEL)),
        priority=st.sampled_from((0, 1)),
        stream=st.booleans(),
        divisible=st.booleans(),
        oddity=st.sampled_from(ODDITIES),
    )
    def some_arrive(self, sizes, prefix, tenant, model, priority, stream, divisible, oddity) -> None:
        for size in sizes:
            self.arrivals += 1
            fields = {"tenant": tenant, "model": model, "divisible": divisible, "deadline": self.now + 20.0, **oddity}
            if "deadline" in oddity:
                fields["deadline"] = self.now + oddity["deadline"]
            one = request(f"q{self.arrivals}", size, prefix=prefix, priority=priority, stream=stream, **fields)
            self._tell(machine.RequestArrived(one))

    def _one(self, n: int, *states: str) -> Rider | None:
        riders = self.referee.states(*states)
        return riders[n % len(riders)] if riders else None

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(n=st.integers(0, 9), status=st.sampled_from((200, 200, 200, 404, 500)))
    def attempt_begins(self, n: int, status: int) -> None:
        if (rider := self._one(n, "sent", "started")) and not rider.prefiller:
            self._tell(machine.AttemptBegan(rider.request.id, rider.attempt, status))

    @precondition(lambda self: self.referee.states("started"))
    @rule(
        n=st.integers(0, 9),
        with_usage=st.booleans(),
        with_text=st.booleans(),
        fault=st.sampled_from((None, None, *FAULTS)),
    )
    def attempt_ends(self, n: int, with_usage: bool, with_text: bool, fault: outcome.Outcome | None) -> None:
        if rider := self._one(n, "started"):
            usage = Usage(rider.request.prompt_bytes // 5 + 1, 50, 10) if with_usage else None
            found = ((*rider.request.chain, 1 + n), 300) if with_text else ((), 0)
            self._tell(machine.AttemptEnded(rider.request.id, rider.attempt, 200, usage, fault, *found))

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(n=st.integers(0, 9), reason=st.sampled_from(FAILURES))
    def attempt_fails(self, n: int, reason: outcome.Outcome) -> None:
        if (rider := self._one(n, "sent", "started")) and not rider.prefiller:
            reason = reason if rider.state == "sent" else outcome.DIED_MID_STREAM
            self._tell(machine.AttemptFailed(rider.request.id, rider.attempt, reason))

    @precondition(lambda self: self.referee.states("sent", "started"))
    @rule(
        n=st.integers(0, 9), epoch=st.sampled_from((None, None, None, 0, 1, 2)), times=st.sampled_from((1, 1, 1, 2, 5))
    )
    def stream_breaks(self, n: int, epoch: int | None, times: int) -> None:
        """In one breath, since two rules hardly ever meet in one request; perhaps under another law than it began."""
        if (rider := self._one(n, "sent", "started")) and not rider.prefiller:
            name = rider.request.id
            for _ in range(times):
                if rider.prefiller or rider.state not in ("sent", "started"):
                    break
                self._tell(machine.AttemptBegan(name, rider.attempt, 200))
                if epoch is not None:
                    self.flow.law = LAWS[epoch]
                self._tell(machine.AttemptFailed(name, rider.attempt, outcome.DIED_MID_STREAM, resumable=True))
                if name not in self.referee.riders:
                    break

    @rule(n=st.integers(0, 9), dt=st.sampled_from((0.0, 1.0, 2.5)), goes=st.booleans(), again=st.booleans())
    def replica_drains(self, n: int, dt: float, goes: bool, again: bool) -> None:
        """Under a stream, which may be asked to leave, and may do so; and may break where it came to at once."""
        self.arrivals += 1
        self._tell(machine.RequestArrived(request(f"q{self.arrivals}", 100, stream=True, deadline=self.now + 20.0)))
        riders = [rider for rider in self.referee.states("sent", "started") if rider.request.stream]
        rider = riders[-1 - n % min(2, len(riders))] if riders else None
        if rider is None or rider.prefiller:
            return
        self._tell(machine.AttemptBegan(rider.request.id, rider.attempt, 200))
        self._tell(swapped(*(self._replica(one, draining=one == rider.target) for one in NAMES)))
        self.time_passes(dt, late=False)
        for one in self.referee.states("started"):
            if not one.moves or not goes or one.request.id not in self.referee.riders:
                continue
            self.moves[0] += 1
            self._tell(machine.AttemptFailed(one.request.id, one.attempt, outcome.STOPPING, resumable=True))
            if again and one.state == "sent":
                self._tell(machine.AttemptBegan(one.request.id, one.attempt, 200))
                self._tell(machine.AttemptFailed(one.request.id, one.attempt, outcome.STALLED, resumable=True))

    @precondition(lambda self: any(rider.prefiller for rider in self.referee.states("sent")))
    @rule(n=st.integers(0, 9), reason=st.sampled_from((None, None, outcome.ENGINE_ERROR, *FAILURES)))
    def prefill_is_over(self, n: int, reason: outcome.Outcome | None) -> None:
        prefilling = [rider for rider in self.referee.states("sent") if rider.prefiller]
        rider = prefilling[n % len(prefilling)]
        if reason is None:
            self._tell(machine.PrefillEnded(rider.request.id, rider.attempt))
        else:
            self._tell(machine.PrefillFailed(rider.request.id, rider.attempt, reason))

    @rule(n=st.integers(0, 9), stale=st.integers(0, 5))
    def old_news_arrives(self, n: int, stale: int) -> None:
        rider = self._one(n, "held", "sent")
        name, attempt = (rider.request.id, rider.attempt - 1) if rider else ("nobody", 1)
        events = (
            machine.AttemptBegan(name, attempt, 200),
            machine.AttemptEnded(name, attempt, 200, None),
            machine.AttemptFailed(name, attempt, outcome.DIED_BEFORE_START),
            machine.TimerFired(name),
            machine.PrefillEnded(name, attempt),
            machine.PrefillFailed(name, attempt, outcome.DIED_BEFORE_START),
        )
        self._tell(events[stale])

    @precondition(lambda self: self.referee.states("held", "sent", "started"))
    @rule(n=st.integers(0, 9))
    def client_leaves(self, n: int) -> None:
        if rider := self._one(n, "held", "sent", "started"):
            self._tell(machine.ClientLeft(rider.request.id))

    # -- the world

    @rule(dt=st.sampled_from((0.01, 0.3, 1.0, 4.0)), late=st.booleans())
    def time_passes(self, dt: float, late: bool) -> None:
        self.now += dt
        for name in [] if late else self.referee.due(self.now):
            if name in self.referee.riders:
                self._tell(machine.TimerFired(name))

    @rule(name=st.sampled_from(NAMES), ok=st.booleans(), ready=st.sampled_from((True, True, False)))
    def probe(self, name: str, ok: bool, ready: bool = True) -> None:
        self._tell(ReplicaProbed(name, ok, ready=ready))
        self._work_is_conserved()

    @rule()
    def all_is_well_again(self) -> None:
        self.flow.law = LAWS[0]
        self._tell(swapped(*(self._replica(name) for name in NAMES)))
        for name in NAMES:
            self.probe(name, True)

    @rule(
        gone=st.sampled_from((None, None, *NAMES)),
        waiting=st.sampled_from((0, 0, 2)),
        slots=st.sampled_from((1, 3, 3)),
        sampled=st.booleans(),
    )
    def view_swaps(self, gone: str | None, waiting: int, slots: int, sampled: bool) -> None:
        sample = Sample(at=self.now, waiting=waiting, running=1, kv_usage=0.5) if sampled else None
        self._tell(swapped(*(self._replica(name, slots=slots, sample=sample) for name in NAMES if name != gone)))
        self._work_is_conserved()

    @rule(splits=st.sampled_from(SPLITS))
    def splits_change(self, splits: dict[str, SplitConfig]) -> None:
        self._tell(SplitsChanged(splits))
        self._work_is_conserved()

    @rule(epoch=st.sampled_from((1, 2)), n=st.none() | st.integers(0, 9))
    def law_changes(self, epoch: int, n: int | None) -> None:
        """And perhaps an attempt fails right then."""
        self.flow.law = LAWS[epoch]
        if n is not None and (rider := self._one(n, "sent")) and not rider.prefiller:
            self._tell(machine.AttemptFailed(rider.request.id, rider.attempt, outcome.DIED_BEFORE_START))

    def _work_is_conserved(self) -> None:
        """Nobody among the first in line waits while there is room for it, but for one who starves. That is room also
        for what it has cached there and nobody uses: what a broken attempt left may be taking it."""
        flow = self.flow
        for model in flow.queue.models():
            if flow.queue.starved(model, self.now) is not None:
                continue
            for waiting in flow.queue.first(model, K_WAITING, self.now):
                live = flow.requests[waiting.id]
                unable = flow.replicas.view.unable_to_resume(live.request.model, live.carrier) if live.carrier else ()
                barred = (*live.tried, *unable)
                choice = flow.selector.consider(live.request, live.need, self.now, barred, assigned=live.assigned)
                chosen = choice.chosen if choice is not None else None
                if chosen is not None:
                    need, marked = live.need, marks(live.request.chain)
                    shared_tokens = (
                        flow.replicas.shared_bytes(chosen.replica, need.chain, marked) / need.bytes_per_token
                    )
                    own_tokens = int(max(chosen.uncached_tokens, need.prompt_tokens - shared_tokens))
                    assert not flow.replicas.whole.holds(chosen.replica, own_tokens + need.output_tokens)

    # -- what always holds

    @invariant()
    def the_books_balance(self) -> None:
        flow, riders = self.flow, self.referee.riders
        assert flow.under_way == len(riders)
        assert {name for name, rider in riders.items() if rider.state == "held"} == set(flow.queue.by_id)
        assert flow.queue.taken.keys() <= riders.keys()
        sent = self.referee.states("sent", "started")
        assert len(flow.replicas.ledger) == len(sent) + sum(bool(rider.prefiller) for rider in sent)
        for rider in sent:
            held = flow.replicas.ledger.held(rider.request.id)
            assert held is not None
            assert held.target == rider.target
            if rider.prefiller:
                assert held.prefill_tokens == 0
                half = flow.replicas.ledger.held(f"{rider.request.id}/prefill")
                assert half is not None
                assert half.target == rider.prefiller
        for target in flow.replicas.ledger.targets():
            load = flow.replicas.ledger.load(target)
            held = self._held_at(target)
            assert load.in_flight == len(held)
            assert load.prefill_tokens == sum(h.prefill_tokens for h in held)
            assert load.kv_tokens == sum(h.kv_tokens for h in held)

    @invariant()
    def who_waits_is_in_the_line_of_what_it_is_for(self) -> None:
        flow = self.flow
        assert all(waiting.model == flow.requests[name].variant for name, waiting in flow.queue.by_id.items())
        assert sum(flow.wait_estimate.queued(model) for model in (MODEL, OTHER_MODEL)) == len(flow.queue)

    @invariant()
    def bounds_hold(self) -> None:
        queue = self.flow.queue
        assert len(queue) <= 6
        assert queue.tokens == pytest.approx(sum(w.tokens for w in queue.by_id.values()))
        deferred = self.flow.deferred
        assert set(deferred.by_request) <= set(queue.by_id)
        assert all(wait.variant == queue.by_id[name].model for name, wait in deferred.by_request.items())
        assert queue.tokens <= 4000 or len(queue) == 1
        assert 0 <= self.flow.budget.retrying <= 3 + 0.2 * 50

    @precondition(lambda self: not self.referee.riders)
    @invariant()
    def at_rest_nothing_is_held(self) -> None:
        assert self.flow.budget.retrying == 0
        assert self.flow.replicas.ledger.targets() == ()
        assert self.flow.queue.tokens == 0.0

    def teardown(self) -> None:
        if hasattr(self, "referee"):
            for name in list(self.referee.riders):
                if name in self.referee.riders:
                    self._tell(machine.ClientLeft(name))
            assert not self.referee.riders
            self.at_rest_nothing_is_held()
            # Fast failures count for a while, and then no more: no slot is lost for good.
            for name in NAMES:
                self._tell(ReplicaProbed(name, True))
            self.now += 1000.0
            for model in (MODEL, OTHER_MODEL):
                table = self.flow.eligibility.serving_table(model, self.now)
                assert not table.in_flight.any()
                assert not table.kv_taken_tokens.any()


@pytest.mark.hypothesis  # for `make test-system`, which runs all of them
def test_the_regional_flow_keeps_its_invariants_for_any_events() -> None:
    RegionalMachine.resumes[0] = RegionalMachine.moves[0] = 0
    bounds = settings(max_examples=played(300), stateful_step_count=60, deadline=None, derandomize=True)
    run_state_machine_as_test(RegionalMachine, settings=bounds)
    assert RegionalMachine.resumes[0] >= bounds.max_examples // 12
    assert RegionalMachine.moves[0] >= bounds.max_examples // 24


def test_a_prompt_that_was_not_found_cached_corrects_the_mirror_and_is_there_now() -> None:
    flow = regional(replica("r1", kv_tokens=1_000_000))
    first, second = request("a", 64 * 1024), request("b", 64 * 1024)
    for n, asked in enumerate((first, replace(second, chain=(*first.chain[:20], *second.chain[20:])))):
        flow.handle(machine.RequestArrived(asked), n)
        flow.handle(machine.AttemptBegan(asked.id, 1, 200), n + 0.1)
        flow.handle(machine.AttemptEnded(asked.id, 1, 200, Usage(16 * 1024, 10, 0 if n else None)), n + 0.2)
    assert (
        flow.replicas.trie.match_one("r1", first.chain) == 20
    )  # the first was gone, except for the part that the second brought back
    assert flow.replicas.trie.match_one("r1", (*first.chain[:20], *second.chain[20:])) == len(second.chain)


def test_the_next_request_is_sent_where_its_prefix_is_being_computed() -> None:
    """Before the first byte of the one before, which in a cold fleet takes seconds; and of another's that stands there
    as long he thinks no better than of anybody."""
    flow = regional(replica("r1", kv_tokens=1_000_000), replica("r2", kv_tokens=1_000_000))
    first, second, other = request("a", 8192), request("b", 8192, prefix="a"), request("c", 8192)
    (sent,) = [c for c in flow.handle(machine.RequestArrived(first), 0.0) if isinstance(c, Forward)]
    assert flow.replicas.trie.match(first.chain) == {sent.target: len(first.chain)}
    choice = flow.selector.consider(second, flow.selector.need_of(second), 0.1)
    assert choice is not None
    assert {one.replica: one.hit_tokens for one in choice.ranked}[sent.target] == 8192 / 4
    choice = flow.selector.consider(other, flow.selector.need_of(other), 0.1)
    assert choice is not None
    assert {one.hit_tokens for one in choice.ranked} == {0.0}


@pytest.mark.parametrize("how", ["refused", "answered whole", "gone"])
def test_a_replica_that_refused_a_prompt_does_not_count_as_holding_it(how: str) -> None:
    """But for what it held before."""
    flow = regional(replica("r1", kv_tokens=1_000_000))
    before, asked = request("a", 4096), request("b", 8192, prefix="a")
    _turn(flow, before, ())
    held = flow.replicas.trie.match(asked.chain)
    assert 0 < held["r1"] < len(asked.chain)
    flow.handle(machine.RequestArrived(asked), 1.0)
    assert flow.replicas.trie.match(asked.chain) == {"r1": len(asked.chain)}
    if how == "gone":
        flow.handle(machine.AttemptFailed(asked.id, 1, outcome.CONNECT_FAILED), 1.1)
    else:
        if how == "refused":
            flow.handle(machine.AttemptBegan(asked.id, 1, 400), 1.1)
        flow.handle(machine.AttemptEnded(asked.id, 1, 400, None, whole=how != "refused"), 1.1)
    left = flow.replicas.trie.match(asked.chain)
    if how != "gone":  # then it was sent there again: there is no other replica
        assert left == held


def test_after_a_refused_connection_a_replica_is_asked_whose_probes_are_answered() -> None:
    """Of three replicas two stop together; the second has failed a probe, which does not yet take it down."""
    flow = regional(*(replica(name) for name in ("r1", "r2", "r3")), health=HealthConfig(rise=1, fall=3))
    for name in ("r1", "r2", "r3"):
        flow.handle(ReplicaProbed(name, True), 0.0)
    asked = request("a", 400)
    (first,) = (c.target for c in flow.handle(machine.RequestArrived(asked), 1.0) if isinstance(c, Forward))
    second, third = (name for name in ("r1", "r2", "r3") if name != first)
    flow.handle(ReplicaProbed(second, False), 1.1)
    commands = flow.handle(machine.AttemptFailed(asked.id, 1, outcome.CONNECT_FAILED), 1.2)
    assert [c.target for c in commands if isinstance(c, Forward)] == [third]
    flow.handle(ReplicaProbed(third, False), 1.3)
    commands = flow.handle(machine.AttemptFailed(asked.id, 2, outcome.CONNECT_FAILED), 1.4)
    assert [c.target for c in commands if isinstance(c, Forward)] == [second]  # better than none


@pytest.mark.parametrize(("stream", "mean"), [(True, (2 * 10 + 2 * 2) / 4), (False, (3 * 10 + 2 * 2) / 5)])
def test_an_answers_tokens_are_learned_from_at_the_mean_load_beside_it(stream: bool, mean: float) -> None:
    """It is sent at 1 s beside nine others, begins at 2 s (which of an answer in one piece is not seen), and ends at
    6 s: eight of the others leave at 4 s."""
    flow = regional(replica("r1", slots=64, kv_tokens=1_000_000))
    loads: list[float] = []
    flow.replicas.speeds.ended = lambda *of: loads.append(of[4])  # type: ignore[method-assign]
    others = [request(f"o{n}", 400) for n in range(9)]
    asked = replace(request("a", 400), stream=stream)
    for one in others:
        flow.handle(machine.RequestArrived(one), 0.0)
    flow.handle(machine.RequestArrived(asked), 1.0)
    assert flow.replicas.ledger.load("r1").context_tokens >= 10 * 100
    flow.handle(machine.AttemptBegan(asked.id, 1, 200), 2.0)
    for one in others[:8]:
        flow.handle(machine.AttemptEnded(one.id, 1, 200, None, whole=True), 4.0)
    flow.handle(machine.AttemptEnded(asked.id, 1, 200, machine.Usage(100, 50), whole=True), 6.0)
    assert loads == [pytest.approx(mean)]


def test_a_prefix_that_other_prompts_share_stays_cached_if_the_first_of_them_is_refused() -> None:
    """Their beginning is there: they have it computed."""
    flow = regional(replica("r1", kv_tokens=1_000_000))
    first, second = request("a", 8192), request("b", 8192)
    second = replace(second, chain=(*first.chain[:8], *second.chain[8:]))
    flow.handle(machine.RequestArrived(first), 0.0)
    flow.replicas.caches("r1", second.chain)
    flow.handle(machine.AttemptEnded(first.id, 1, 400, None, whole=True), 0.2)
    assert flow.replicas.trie.match(second.chain) == {"r1": len(second.chain)}
    assert flow.replicas.trie.match(first.chain) == {"r1": 8}


def test_a_replica_that_was_not_asked_after_all_is_not_thought_to_hold_the_prompt() -> None:
    """A gateway took another than it was told."""
    flow = regional(replica("r1", kv_tokens=1_000_000), replica("r2", kv_tokens=1_000_000))
    asked = request("a", 8192)
    (sent,) = [c for c in flow.handle(machine.RequestArrived(asked), 0.0) if isinstance(c, Forward)]
    other = "r2" if sent.target == "r1" else "r1"
    flow.handle(machine.AttemptMoved(asked.id, 1, other, (sent.target,)), 0.1)
    assert flow.replicas.trie.match(asked.chain) == {other: len(asked.chain)}


@pytest.mark.parametrize(("status", "usage"), [(200, Usage(16 * 1024, 10, 0)), (200, None), (500, None)])
def test_an_answer_reported_in_one_event_leaves_the_same_state_as_one_reported_in_two(
    status: int, usage: Usage | None
) -> None:
    left = []
    for whole in (False, True):
        flow = regional(replica("r1", kv_tokens=1_000_000))
        for n in range(4):
            asked = request(f"a{n}", 64 * 1024, stream=False)
            flow.handle(machine.RequestArrived(asked), n)
            if not whole:
                flow.handle(machine.AttemptBegan(asked.id, 1, status), n + 0.2)
            flow.handle(machine.AttemptEnded(asked.id, 1, status, usage, whole=whole), n + 0.2)
        replicas, table = flow.replicas, flow.eligibility.serving_table(MODEL, 5.0)
        speed = replicas.speeds["r1"]
        left.append((
            flow.under_way, replicas.ledger.load("r1"), replicas.trie.match_one("r1", asked.chain),
            replicas.health["r1"].read(5.0),
            (speed.prefill_ms_per_token, speed.tpot_ms, speed.service_ms), replicas.estimates.bytes_per_token(MODEL),
            table.in_flight.tolist(), table.kv_taken_tokens.tolist(), flow.wait_estimate.wait_ms(MODEL, 5.0),
        ))  # fmt: skip
    assert left[0] == left[1]


SAID = 4096  # bytes of an answer: 1,024 tokens


def _turn(flow: Any, asked: machine.Request, value: tuple[int, ...], now: float = 0.0, **ended: Any) -> Forward:
    """One request, served whole."""
    (forward,) = [c for c in flow.handle(machine.RequestArrived(asked), now) if isinstance(c, Forward)]
    flow.handle(machine.AttemptBegan(asked.id, 1, 200), now + 0.1)
    last = {"status": 200, "usage": Usage(asked.prompt_bytes // 4, SAID // 4), "chain": value, "answer_bytes": SAID}
    flow.handle(machine.AttemptEnded(asked.id, 1, **last | ended), now + 0.2)
    return forward


def _turns(prompt_bytes: int = 4096) -> tuple[machine.Request, machine.Request]:
    """A request, and the next, which goes on from its prompt and an answer."""
    return request("a", prompt_bytes), request("b", prompt_bytes + SAID, prefix="a")


def test_an_answer_counts_as_cached_behind_its_prompt_for_the_next_turn() -> None:
    flow = regional(replica("r1", kv_tokens=1_000_000), replica("r2", kv_tokens=1_000_000))
    first, second = _turns()
    target = _turn(flow, first, second.chain).target
    assert flow.replicas.trie.match(second.chain) == {target: len(second.chain)}
    again = _turn(flow, second, (), 1.0)
    assert again.target == target
    assert again.reasons.chosen.hit_tokens == (4096 + SAID) / 4


@pytest.mark.parametrize(
    "ended",
    [
        {"chain": (), "answer_bytes": 0},
        {"fault": outcome.ENGINE_ERROR},
        {"status": 500},
        {"answer_bytes": SAID // 2 - 1},  # as much hidden reasoning as visible text
        {"usage": Usage(1024, 2 * SAID // 4 + 1)},
    ],
    ids=["unheard", "fault", "error", "thought", "thought too"],
)
def test_an_answer_not_received_whole_does_not_count_as_cached(ended: dict[str, Any]) -> None:
    flow = regional(replica("r1", kv_tokens=1_000_000))
    first, second = _turns()
    _turn(flow, first, second.chain, **ended)
    held = {} if ended.get("status") == 500 else {"r1": len(first.chain)}
    assert flow.replicas.trie.match(second.chain) == held


def test_answer_is_cached_by_its_transcript_if_usage_is_missing() -> None:
    flow = regional(replica("r1", kv_tokens=1_000_000))
    first, second = _turns()
    _turn(flow, first, second.chain, usage=None)
    assert flow.replicas.trie.match_one("r1", second.chain) == len(second.chain)


def test_an_answer_to_a_prompt_that_was_not_found_cached_is_held_with_it() -> None:
    flow = regional(replica("r1", kv_tokens=1_000_000))
    first, second = _turns(64 * 1024)
    flow.replicas.trie.insert("r1", first.chain)
    _turn(flow, first, second.chain, usage=Usage(16 * 1024, SAID // 4, 0))
    assert flow.replicas.trie.match_one("r1", second.chain) == len(second.chain)


def test_an_adapter_stays_where_it_was_loaded_and_loading_is_learned() -> None:
    both = (replace(replica(n), models=frozenset({MODEL, "sql"}), adapters=frozenset({"sql"})) for n in ("r1", "r2"))
    flow = regional(*both)
    targets, promised = [], []
    for n in range(6):
        asked = replace(request(f"{n}", model="sql"), stream=True)
        (forward,) = [c for c in flow.handle(machine.RequestArrived(asked), n) if isinstance(c, Forward)]
        targets.append(forward.target)
        promised.append(forward.promised_ttft_ms)
        flow.handle(machine.AttemptBegan(asked.id, 1, 200), n + (0.03 if n else 0.9))
        flow.handle(machine.AttemptEnded(asked.id, 1, 200, Usage(256, 10)), n + 0.95)
    assert len(set(targets)) == 1
    assert promised[0] >= LOAD_MS > max(promised[1:])
    assert LOAD_MS < flow.replicas.adapters.load_ms(0.0) < 900.0
    assert flow.replicas.adapters.loaded(targets[0]) == ("sql",)


def test_a_tenant_with_long_answers_gets_fewer_of_them() -> None:
    """By prompts alone two tenants in a queue had as many turns, however long their answers."""
    flow = regional(
        replica("r1", slots=1, kv_tokens=1_000_000), queue_wait_s=1e4, queue_stands_s=1e4, queue_starvation_s=1e4
    )
    long = {"anyone": 2000, "other": 20}
    under_way: list[str] = []
    for n in range(60):
        asked = request(f"{n}", 400, tenant=("anyone", "other")[n % 2], max_tokens=None, deadline=1e6)
        under_way += [c.id for c in flow.handle(machine.RequestArrived(asked), 0.0) if isinstance(c, Forward)]
    turns: list[str] = []
    for now in range(1, 33):
        name = under_way.pop()
        turns.append(flow.requests[name].request.tenant)
        ended = machine.AttemptEnded(name, 1, 200, Usage(100, long[turns[-1]]))
        under_way += [c.id for c in flow.handle(ended, float(now)) if isinstance(c, Forward)]
    assert turns.count("other") >= 26
    assert turns.count("anyone") >= 2


def test_a_request_is_sent_if_there_is_room_and_held_otherwise_never_both() -> None:
    flow = regional(replica("r1", slots=1))
    commands = [c for n in range(3) for c in flow.handle(RequestArrived(request(f"q{n}")), 0.0)]
    assert [type(c) for c in commands if isinstance(c, Forward | Hold)] == [Forward, Hold, Hold]
    assert (flow.queue.waiting(MODEL), len(flow.replicas.ledger), flow.under_way) == (2, 1, 3)


def test_a_cached_prefix_takes_kv_once_for_all_requests_that_use_it() -> None:
    flow = regional(replica("r1", slots=8))
    stem = tuple(range(1, 9))  # 8 blocks of 256 B, 512 tokens
    taken = []
    for n, own in enumerate(((), (101, 102, 103, 104), (), (201, 202, 203, 204))):
        asked = request(f"q{n}", prompt_bytes=bytes_at(len(stem + own)), chain=stem + own, max_tokens=10)
        flow.handle(RequestArrived(asked), 0.0)
        held = flow.replicas.ledger.held(f"q{n}")
        assert held is not None
        taken.append(held.kv_tokens - 10)
        flow.handle(AttemptBegan(f"q{n}", 1, 200), 0.1)
    assert taken == [512, 256, 0, 256]
    for n in range(4):
        flow.handle(ClientLeft(f"q{n}"), 0.2)
    again = request("last", prompt_bytes=bytes_at(12), chain=(*stem, 301, 302, 303, 304), max_tokens=10)
    flow.handle(RequestArrived(again), 0.3)
    last = flow.replicas.ledger.held("last")
    assert last is not None
    # Two thirds are cached and need no prefill, but no other request holds them: they cannot be evicted for it alone.
    assert (last.prefill_tokens, last.kv_tokens) == (256, 768 + 10)


@pytest.mark.parametrize("stands_s", [1e-9, 100.0])
def test_a_request_that_waits_by_choice_is_never_refused_for_it(stands_s: float) -> None:
    flow = regional(
        *(replica(name, slots=8, kv_tokens=100_000) for name in ("r1", "r2")),
        queue_wait_s=1.0, queue_stands_s=stands_s, queue_ttft_objective_s=0.4,
    )  # fmt: skip
    stem = tuple(range(1, 39))  # 26 KiB, 6,656 tokens
    flow.replicas.trie.insert("r1", stem)
    other = request("other", prompt_bytes=bytes_at(28), chain=(*stem[:17], *range(51, 62)), max_tokens=10)
    (first,) = (c for c in flow.handle(RequestArrived(other), 0.0) if isinstance(c, Forward))
    assert first.target == "r1"
    long = request("long", prompt_bytes=bytes_at(40), chain=(*stem, 39, 40), max_tokens=10)
    commands = flow.handle(RequestArrived(long), 0.1)
    assert [type(c) for c in commands] == [Hold, SetTimer]
    due = commands[1].at
    assert due <= 1.1
    (late,) = (c for c in flow.handle(TimerFired("long"), due) if isinstance(c, Forward))
    assert late.target == "r2"  # r1 still computes the other prompt
    assert not len(flow.queue)


def test_a_request_that_waits_by_choice_counts_for_the_next_until_it_leaves() -> None:
    flow = regional(*(replica(name, slots=8, kv_tokens=100_000) for name in ("r1", "r2")), queue_wait_s=1.0)
    stem = tuple(range(1, 39))  # 26 KiB, 6,656 tokens
    flow.replicas.trie.insert("r1", stem)
    other = request("other", prompt_bytes=bytes_at(28), chain=(*stem[:17], *range(51, 62)), max_tokens=10)
    flow.handle(RequestArrived(other), 0.0)
    deferred = flow.deferred

    def come(name: str) -> list[str]:
        one = request(name, prompt_bytes=bytes_at(40), chain=(*stem, 39, 40), max_tokens=10, entry_region="tokyo")
        return [c.target for c in flow.handle(RequestArrived(one), 0.1) if isinstance(c, Forward)]

    assert come("q0") == []
    short = request("short", prompt_bytes=bytes_at(2), max_tokens=10)
    assert [type(command) for command in flow.handle(RequestArrived(short), 0.1)] == [SetTimer, Forward]
    flow.handle(ClientLeft("short"), 0.1)
    flow.handle(ClientLeft("q0"), 0.1)

    waiting, sent = list[str](), list[str]()
    while len(waiting) < 20 and not (sent := come(f"q{len(waiting)}")):
        waiting.append(f"q{len(waiting)}")
        assert sorted(deferred.by_request) == sorted(waiting)
        # They leave r2 to others: nobody is in line, so a short one had it without standing behind them.
        assert flow.wait_estimate.in_line(MODEL) == 0
        assert flow.wait_estimate.wait_ms(MODEL, 0.1) == flow.wait_estimate.foreign_wait_ms(MODEL, 0.5) == 0.0
    assert sent == ["r2"]  # to wait for all of them would take longer than the 717 ms of computing it there
    assert len(waiting) > 1
    assert deferred.tokens == {"r1": 512.0 * len(waiting)}  # 51 ms each
    assert 51.2 * len(waiting) < 717.0
    for one in waiting:
        flow.handle(ClientLeft(one), 0.2)
    assert not deferred.by_request


def test_deferred_requests_do_not_hold_up_those_behind_them() -> None:
    flow = regional(*(replica(name, slots=64, kv_tokens=400_000) for name in ("r1", "r2")))
    stem = tuple(range(1, 75))  # 152 KiB, 38,912 tokens, 4 s: cached by r1 alone
    flow.replicas.trie.insert("r1", stem)
    for name, start in (("a", 101), ("b", 201)):  # both prefill something else
        long = request(name, prompt_bytes=bytes_at(28), chain=tuple(range(start, start + 28)), max_tokens=10)
        flow.handle(RequestArrived(long), 0.0)
    at_r2 = next(name for name in "ab" if flow.requests[name].replica == "r2")

    def come(name: str, nodes: tuple[int, ...]) -> None:
        one = request(name, prompt_bytes=bytes_at(74) + 2_000, chain=nodes, max_tokens=10)
        assert not [c for c in flow.handle(RequestArrived(one), 0.1) if isinstance(c, Forward)]

    for n in range(K_WAITING + 4):
        come(f"q{n}", stem)
    come("other", tuple(range(301, 375)))

    sent = flow.handle(AttemptBegan(at_r2, 1, 200), 0.2)  # r2 has room; those with the stem rather wait for r1
    sent += flow.handle(machine.AttemptEnded(at_r2, 1, 200, None), 0.3)
    assert [(c.id, c.target) for c in sent if isinstance(c, Forward)] == [("other", "r2")]
    assert len(flow.deferred.by_request) == K_WAITING + 4


def test_a_long_prompt_leaves_the_last_replica_to_others_while_they_come() -> None:
    flow = regional(*(replica(name, slots=64, kv_tokens=400_000) for name in ("r1", "r2")), queue_starvation_s=3.0)

    def come(name: str, blocks: int, now: float) -> list[str]:
        one = request(name, prompt_bytes=bytes_at(blocks), max_tokens=100, deadline=100.0)
        return [c.target for c in flow.handle(RequestArrived(one), now) if isinstance(c, Forward)]

    (busy,) = come("first", 76, 0.0)
    free = "r1" if busy == "r2" else "r2"
    for n in range(30):
        assert come(f"q{n}", 2, 0.1) == [free]
        flow.handle(AttemptBegan(f"q{n}", 1, 200), 0.1)
    assert come("long", 76, 0.2) == []
    for n in range(8):
        sent = flow.handle(machine.AttemptEnded(f"q{n}", 1, 200, None), 2.0 + n)
        assert not [c for c in sent if isinstance(c, Forward)], "room there is not what it waits for"
        assert come(f"p{n}", 2, 2.5 + n) == [free], "and those behind do not wait for it"
    (sent,) = (c for c in flow.handle(AttemptBegan("first", 1, 200), 11.0) if isinstance(c, Forward))
    assert (sent.id, sent.target) == ("long", busy)


def test_the_number_of_waiting_requests_compared_for_a_slot_is_small() -> None:
    assert 2 <= K_WAITING <= 16  # each costs a match, at every slot that frees
