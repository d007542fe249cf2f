"""The regional machine when things break: replicas, probes, views, and the law while requests are under way."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import ANY

import pytest
from playbook import Expected, answered, held, sent, timer
from worlds import MODEL, OTHER_MODEL, law, regional, replica, request, swapped

from farhop.balance import machine, outcome
from farhop.balance.health.reading import State
from farhop.balance.health.replica import HealthConfig
from farhop.balance.machine import (
    Address,
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    AttemptRefused,
    ClientLeft,
    LawChanged,
    Recall,
    RequestArrived,
    TimerFired,
    Usage,
)
from regional_lb.fleet.view import ReplicaProbed, ViewSwapped
from regional_lb.scheduler.flow import MOVE_AGAIN_S
from regional_lb.scheduler.refusals import OrderedRefusal, RefusalsChanged
from topology.law import Law
from topology.model import Rule


def failed(request_id: str, attempt: int = 1, reason: outcome.Outcome = outcome.DIED_BEFORE_START) -> AttemptFailed:
    return AttemptFailed(request_id, attempt, reason)


def elsewhere(target: str) -> str:
    return "r2" if target == "r1" else "r1"


def arrive(flow, request_id: str, now: float = 0.0, **fields) -> str:
    """Let a request arrive that is forwarded at once; where to."""
    return flow.handle(RequestArrived(request(request_id, **fields)), now)[-1].target


def test_a_refused_connection_sends_the_request_to_the_other_replica(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    first = arrive(flow, "a")
    other = elsewhere(first)
    (
        play(flow)
        .at(0.1).on(failed("a", 1, outcome.CONNECT_FAILED)).expect(sent("a", other, attempt=2))
        .on(RequestArrived(request("b"))).expect(sent("b", other))  # the first does not answer
        .at(0.2).on(AttemptBegan("a", 2, 200)).expect()
        .at(0.3).on(AttemptEnded("a", 2, 200, None)).expect()
    )  # fmt: skip
    assert flow.replicas.health[first].read(0.3).state is State.DOWN
    assert flow.replicas.ledger.load(first).in_flight == 0


def test_replica_is_not_blamed_if_a_complete_answer_takes_too_long(play) -> None:
    """However many: nobody is ejected, nobody else is asked, nothing lingers, and no budget is drawn on."""
    flow = regional(replica("r1", slots=8), replica("r2", slots=8))
    book = play(flow)
    for n in range(12):
        flow.handle(RequestArrived(request(f"q{n}", stream=False, deadline=1e4)), float(n))
        book.at(600.0 + n).on(failed(f"q{n}", 1, outcome.WHOLE_ANSWER_TIMEOUT)).expect(
            answered(f"q{n}", outcome.WHOLE_ANSWER_TIMEOUT, detail=lambda d: "in one piece" in d)
        )
    for name in ("r1", "r2"):
        flow.handle(ReplicaProbed(name, True), 620.0)
        assert flow.replicas.health[name].read(620.0).state is State.UP
        assert flow.replicas.health_tracker.share(name, 620.0) == 1.0
        assert flow.replicas.ledger.load(name).in_flight == 0
    assert not flow.replicas.health_tracker.ejections
    assert (flow.under_way, flow.budget.retrying) == (0, 0)


def test_closed_idle_connection_is_retried_without_blame(play) -> None:
    """Once for free, then by the budget; however many, no replica is ejected, eased or thought to be busy with them."""
    flow = regional(replica("r1", slots=8), replica("r2", slots=8))
    book = play(flow)
    for n in range(12):
        target = arrive(flow, f"q{n}", float(n))
        book.at(float(n)).on(failed(f"q{n}", 1, outcome.KEPT_CLOSED)).expect(
            sent(f"q{n}", elsewhere(target), attempt=2)
        )
        assert flow.budget.retrying == 0
        book.on(failed(f"q{n}", 2, outcome.KEPT_CLOSED)).expect(sent(f"q{n}", ANY, attempt=3))
        assert flow.budget.retrying == 1
        book.on(failed(f"q{n}", 3, outcome.KEPT_CLOSED)).expect(answered(f"q{n}", outcome.KEPT_CLOSED))
    for name in ("r1", "r2"):
        assert flow.replicas.health[name].read(12.0).state is State.UP
        assert flow.replicas.health_tracker.share(name, 12.0) == 1.0
        assert flow.replicas.ledger.load(name).in_flight == 0
    assert not flow.replicas.health_tracker.ejections


def test_one_redispatch_is_free_and_the_next_draws_on_the_budget(play) -> None:
    flow = regional(replica("r1"), replica("r2"), replica("r3"))
    first = arrive(flow, "a")
    book = play(flow).on(failed("a"))
    second = flow.replicas.ledger.held("a").target
    book.expect(sent("a", second, attempt=2))
    third = ({"r1", "r2", "r3"} - {first, second}).pop()
    assert flow.budget.retrying == 0
    book.on(failed("a", 2)).expect(sent("a", third, attempt=3))
    assert flow.budget.retrying == 1
    book.on(failed("a", 3)).expect(answered("a", outcome.DIED_BEFORE_START))
    assert (flow.budget.retrying, flow.under_way, len(flow.replicas.ledger)) == (0, 0, 0)


def test_second_failure_is_answered_when_the_budget_is_spent(play) -> None:
    flow = regional(*(replica(f"r{n}", slots=9) for n in range(3)))
    book = play(flow)
    for n in range(4):
        arrive(flow, f"a{n}")
        flow.handle(failed(f"a{n}"), 0.0)
    for n in range(3):  # 3 + 20 % of 4: three fit
        flow.handle(failed(f"a{n}", 2), 0.0)
    assert flow.budget.retrying == 3
    book.on(failed("a3", 2)).expect(answered("a3", outcome.DIED_BEFORE_START))
    book.on(ClientLeft("a0")).expect()
    assert flow.budget.retrying == 2


def test_same_replica_is_retried_if_there_is_no_other(play) -> None:
    flow = regional(replica("r1"))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(failed("a")).expect(sent("a", "r1", attempt=2))
    )  # fmt: skip


def test_a_failed_request_waits_while_other_replicas_are_full_and_takes_the_next_slot(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    first = arrive(flow, "a")
    other = elsewhere(first)
    (
        play(flow)
        .on(RequestArrived(request("b"))).expect(sent("b", other))
        .on(failed("a", 1, outcome.CONNECT_FAILED)).expect(held("a"))
        .at(0.5).on(ReplicaProbed(first, True)).expect()  # back, but it failed this very request: the other first
        .at(1.0).on(failed("b", 1, outcome.CONNECT_FAILED)).expect(sent("b", first))
        .at(1.5).on(ReplicaProbed(other, True)).expect(sent("a", other, attempt=2))
    )  # fmt: skip


def test_a_request_whose_other_replica_leaves_takes_the_first_again(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    first = arrive(flow, "a")
    other = elsewhere(first)
    (
        play(flow)
        .on(RequestArrived(request("b"))).expect(sent("b", other))
        .on(failed("a")).expect(held("a"))
        .on(swapped(replica(first, slots=1))).expect(sent("a", first, attempt=2))
    )  # fmt: skip


def test_attempt_is_retried_before_its_first_byte_and_not_after(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    first = arrive(flow, "a")
    (
        play(flow)
        .on(failed("a")).expect(sent("a", elsewhere(first)))
        .at(0.1).on(AttemptBegan("a", 2, 200)).expect()
        .at(0.2).on(failed("a", 2, outcome.DIED_MID_STREAM)).expect(answered("a", outcome.DIED_MID_STREAM))
    )  # fmt: skip
    assert len(flow.replicas.ledger) == 0


def test_an_answer_that_breaks_before_its_start_is_not_retried(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    arrive(flow, "a")
    play(flow).on(failed("a", 1, outcome.BAD_FRAMING)).expect(answered("a", outcome.BAD_FRAMING))


def test_tier_headers_from_an_engine_do_not_count_as_an_answer(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    first = arrive(flow, "a")
    play(flow).on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(sent("a", elsewhere(first)))


def test_events_of_an_earlier_attempt_are_ignored(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    first = arrive(flow, "a")
    other = elsewhere(first)
    (
        play(flow)
        .on(failed("a")).expect(sent("a", other, attempt=2))
        .on(failed("a", 1)).expect()
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(AttemptEnded("a", 1, 200, None)).expect()
        .on(AttemptEnded("unknown", 1, 200, None)).expect()
        .on(TimerFired("unknown")).expect()
        .on(ReplicaProbed("unknown", True)).expect()
    )  # fmt: skip
    assert (flow.under_way, flow.replicas.ledger.load(other).in_flight) == (1, 1)


def test_a_request_in_the_queue_ignores_late_events_of_its_attempt(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    arrive(flow, "a")
    arrive(flow, "b")
    play(flow).on(failed("a")).expect(held("a")).on(failed("a")).expect().on(AttemptBegan("a", 1, 200)).expect()
    assert "a" in flow.queue


def test_request_id_in_flight_is_not_accepted_twice(play) -> None:
    flow = regional(replica("r1"))
    arrive(flow, "a")
    play(flow).on(RequestArrived(request("a"))).expect(answered("a", outcome.INVALID_FIELD))
    assert flow.under_way == 1


def test_removed_replica_finishes_its_requests(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    first = arrive(flow, "a")
    other = elsewhere(first)
    (
        play(flow)
        .on(RequestArrived(request("b"))).expect(sent("b", other))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .on(swapped(replica(other, slots=1))).expect()
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(AttemptEnded("a", 1, 200, Usage(256, 10, 0))).expect()  # its slot is gone with it
        .on(AttemptEnded("b", 1, 200, None)).expect(sent("c", other))
    )  # fmt: skip
    assert first not in flow.replicas.health
    assert first not in flow.replicas.trie


def test_new_replica_takes_queued_requests_after_its_first_probe_succeeds(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(swapped(replica("r1", slots=1), replica("r2", slots=1))).expect()
        .on(ReplicaProbed("r2", True)).expect(sent("b", "r2"))
    )  # fmt: skip


def test_restarted_replica_counts_as_having_an_empty_cache(play) -> None:
    flow = regional(replica("r1"))
    arrive(flow, "a")
    flow.handle(AttemptBegan("a", 1, 200), 0.1)
    assert flow.replicas.trie.bytes_held("r1") == 1024
    play(flow).on(swapped(replica("r1", address=Address("r1.example", 8001)))).expect()
    assert flow.replicas.trie.bytes_held("r1") == 0


def test_queue_is_flushed_promptly_if_no_replica_is_healthy(play) -> None:
    flow = regional(replica("r1", slots=1), health=HealthConfig(fall=2, rise=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .at(1.0).on(ReplicaProbed("r1", False)).expect()
        .at(2.0).on(ReplicaProbed("r1", False)).expect(
            answered("b", outcome.NO_REPLICA, wait_ms=None), answered("c", outcome.NO_REPLICA, retry_after_s=1.0))
        .on(RequestArrived(request("d"))).expect(answered("d", outcome.NO_REPLICA))
        .at(3.0).on(ReplicaProbed("r1", True)).expect()
        .on(RequestArrived(request("e"))).expect(held("e"))  # earlier requests are still there
        .at(4.0).on(AttemptEnded("a", 1, 200, None)).expect(sent("e", "r1"))
    )  # fmt: skip


def test_the_last_replica_refusing_connections_ends_the_request(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(failed("a", 1, outcome.CONNECT_FAILED)).expect(
            answered("a", outcome.NO_REPLICA), answered("b", outcome.NO_REPLICA))
    )  # fmt: skip


def test_replicas_not_proven_yet_get_no_requests(play) -> None:
    flow = regional(replica("r1"), up=False)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(answered("a", outcome.NO_REPLICA))
        .on(ReplicaProbed("r1", True)).expect()
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    )  # fmt: skip


def test_a_replica_that_fails_fast_is_not_attractive(play) -> None:
    flow = regional(replica("r1", slots=99), replica("r2", slots=99), health=HealthConfig(streak=3))
    failures = 0
    for n in range(40):
        name = f"a{n}"
        if arrive(flow, name) == "r1":
            failures += 1
            flow.handle(AttemptBegan(name, 1, 500), 0.0)
            flow.handle(AttemptEnded(name, 1, 500, None), 0.0)
        else:
            flow.handle(AttemptBegan(name, 1, 200), 0.0)
            flow.handle(AttemptEnded(name, 1, 200, None), 0.0)
    assert failures == 1  # the streak would let three through: the first alone makes it look as busy as if it served


def test_law_refuses_by_token_by_tenant_and_by_key(play) -> None:
    flow = regional(replica("r1"))
    (
        play(flow)
        .on(RequestArrived(request("a", lawful=frozenset({"tokyo"})))).expect(
            answered("a", outcome.UNLAWFUL_HERE, detail=lambda text: "hop token" in text, wait_ms=None))
        .on(RequestArrived(request("b", lawful=frozenset()))).expect(answered("b", outcome.UNLAWFUL_HERE))
        .on(RequestArrived(request("c", tenant="german", lawful=frozenset({"london"})))).expect(
            answered("c", outcome.UNLAWFUL_HERE, detail=lambda text: "allows only DE" in text))
        .on(RequestArrived(request("d", tenant="nobody"))).expect(answered("d", outcome.UNLAWFUL_HERE))
        .on(RequestArrived(request("e", tenant="stateless"))).expect(answered("e", outcome.UNLAWFUL_HERE))
        .on(RequestArrived(request("f", narrow=(("eu",),)))).expect(answered("f", outcome.UNLAWFUL_HERE))
        .on(RequestArrived(request("g", key="stolen"))).expect(answered("g", outcome.UNLAWFUL_HERE))
        .on(RequestArrived(request("h", key="home", lawful=frozenset({"london"})))).expect(sent("h", "r1"))
    )  # fmt: skip
    assert flow.under_way == 1


def test_a_rule_for_a_base_binds_its_adapters_as_soon_as_they_are_known_for_such(play) -> None:
    def of(**lineage: frozenset[str] | None) -> ViewSwapped:
        return swapped(replica("r1", models=frozenset({"base", "sql"}), lineage={"base": frozenset(), **lineage}))

    under = law()
    ruled = Law(replace(under.topology, models={"base": Rule(("world",), ("uk",))}))
    flow = regional(replica("r1", models=frozenset({"base", "sql"})), under=ruled)
    play(flow).on(RequestArrived(request("a", model="sql"))).expect(sent("a", "r1"))
    flow.handle(AttemptBegan("a", 1, 200), 0.0)
    flow.handle(AttemptEnded("a", 1, 200, None), 0.0)
    (
        play(flow)
        .on(of(sql=frozenset({"base"}))).expect()
        .on(RequestArrived(request("b", model="sql"))).expect(
            answered("b", outcome.UNLAWFUL_HERE, detail=lambda text: "model base, the base of sql" in text))
        .on(of(sql=None)).expect()
        .on(RequestArrived(request("c", model="sql"))).expect(
            answered("c", outcome.UNLAWFUL_HERE, detail=lambda text: "nobody knows the base" in text))
    )  # fmt: skip


def test_the_law_of_arrival_forbids_by_a_base_that_is_learned_after_another_law_came(play) -> None:
    """By it alone: the law in force then would allow the request, and the fallback."""

    def of(base: str) -> ViewSwapped:
        models = {"sql": frozenset({base}), "code": frozenset({base})}
        return swapped(replica("r1", models=frozenset(models), lineage=models, slots=1))

    arrived_under = Law(replace(law().topology, models={"base": Rule(("world",), ("uk",))}))
    flow = regional(replica("r1", models=frozenset({"sql", "code"}), slots=1), under=arrived_under)
    (
        play(flow)
        .on(RequestArrived(request("a", model="sql"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", model="sql", alias="auto", fallbacks=("code",)))).expect(held("b"))
        .on(LawChanged(law(epoch=2))).expect()
        .on(RequestArrived(request("c", model="sql"))).expect(held("c"))
        .on(of("other")).expect()
        .on(of("base")).expect(answered("b", outcome.UNLAWFUL_HERE), Expected(Recall, id="a", attempt=1))
        .on(AttemptEnded("a", 1, 200, None)).expect(sent("c", "r1"))
    )  # fmt: skip


def test_law_changed_while_a_request_waits_is_applied(play) -> None:
    flow = regional(replica("r1", slots=1))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b"))).expect(held("b"))
    book.on(RequestArrived(request("c", tenant="other"))).expect(held("c"))
    flow.law = law(epoch=2, anyone=Rule(allow=("eu",)))
    book.on(AttemptEnded("a", 1, 200, None)).expect(answered("b", outcome.UNLAWFUL_HERE), sent("c", "r1"))


def test_law_that_changes_in_flight_forbids_the_second_attempt(play) -> None:
    flow = regional(replica("r1"), replica("r2"))
    arrive(flow, "a")
    flow.law = law(epoch=2, anyone=Rule(allow=("eu",)))
    play(flow).on(failed("a")).expect(answered("a", outcome.UNLAWFUL_HERE))


def test_a_model_not_served_here_is_refused_so_that_another_region_takes_it(play) -> None:
    flow = regional(replica("r1"))
    play(flow).on(RequestArrived(request("a", model=OTHER_MODEL))).expect(answered("a", outcome.MODEL_NOT_HERE))


def test_everything_that_reached_the_region_is_counted_for_its_sender(play) -> None:
    flow = regional(replica("r1", slots=1), queue_requests_max=0)
    book = play(flow).on(RequestArrived(request("a", 1000, issuer="global-1"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b", 500, issuer="global-1"))).expect(answered("b", outcome.QUEUE_FULL))
    book.on(RequestArrived(request("c", 100, issuer="global-1", tenant="german")))
    book.expect(answered("c", outcome.UNLAWFUL_HERE))
    book.on(RequestArrived(request("d", 50, issuer="global-2"))).expect(answered("d", outcome.QUEUE_FULL))
    book.on(RequestArrived(request("e", 7))).expect(answered("e", outcome.QUEUE_FULL))
    assert flow.accepted_bytes == {"global-1": 1600.0, "global-2": 50.0}


def test_the_wait_answered_grows_with_what_waits(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) == 0.0
    arrive(flow, "a")
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) == 0.0  # the other is idle
    arrive(flow, "b")
    waits = [flow.wait_estimate.wait_ms(MODEL, 0.0)]
    for n in range(3):
        play(flow).on(RequestArrived(request(f"w{n}"))).expect(held(f"w{n}"))
        waits.append(flow.wait_estimate.wait_ms(MODEL, 0.0))
    # Two replicas of 5.12 s a request: one leaves every 2.56 s.
    assert waits == pytest.approx([2560.0, 5120.0, 7680.0, 10240.0])
    assert flow.wait_estimate.wait_ms(OTHER_MODEL, 0.0) == 0.0


def test_a_trial_after_an_ejection_is_one_request(play) -> None:
    flow = regional(replica("r1", slots=9), health=HealthConfig(refused_s=1.0, fresh_s=600.0, slow_start_s=0.0))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(failed("a", 1, outcome.CONNECT_FAILED)).expect(answered("a", outcome.NO_REPLICA))
        .at(1.0).on(RequestArrived(request("b"))).expect(sent("b", "r1"))
        .on(RequestArrived(request("c"))).expect(answered("c", outcome.NO_REPLICA))
        .at(1.1).on(AttemptBegan("b", 1, 200)).expect()
        .on(RequestArrived(request("d"))).expect(sent("d", "r1"))
        .on(AttemptBegan("d", 1, 200)).expect()
        .at(60.0).on(TimerFired("d")).expect(answered("d", outcome.DEADLINE))
        .on(TimerFired("b")).expect(answered("b", outcome.DEADLINE))
        .on(RequestArrived(request("late", deadline=61.0))).expect(sent("late", "r1"))
    )  # fmt: skip


def down(book, name: str, at: float):  # type: ignore[no-untyped-def]
    """Three probes of it fail."""
    for n in range(2):
        book.at(at + n / 10).on(ReplicaProbed(name, False)).expect()
    return book.at(at + 0.3).on(ReplicaProbed(name, False))


def test_request_lost_by_a_silent_replica_is_retried_elsewhere_once(play) -> None:
    flow = regional(replica("r1"), replica("r2", prefill_ms_per_token=9.0))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    down(book, "r1", 1.0).expect(Expected(machine.Cancel, id="a", attempt=1), sent("a", "r2", attempt=2))
    book.at(2.0).on(AttemptBegan("a", 1, 200)).expect()  # too late
    book.at(3.0).on(AttemptBegan("a", 2, 200)).expect()
    book.at(4.0).on(AttemptEnded("a", 2, 200, None)).expect()
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


def test_begun_request_or_one_without_alternative_stays(play) -> None:
    flow = regional(replica("r1"))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b"))).expect(sent("b", "r1"))
    book.at(0.5).on(AttemptBegan("a", 1, 200)).expect()
    down(book, "r1", 1.0).expect()
    book.at(2.0).on(AttemptBegan("b", 1, 200)).expect()
    book.at(3.0).on(AttemptEnded("a", 1, 200, None)).expect()
    book.at(3.0).on(AttemptEnded("b", 1, 200, None)).expect()
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


# -- streams that leave a drained replica


def fleet_of(drained: str = "", **fields) -> ViewSwapped:
    names = ("r1", "r2")
    return swapped(*(replica(name, token_ids=True, draining=name == drained, **fields) for name in names))


def streams(count: int, move_over_s: float | None = 2.0):
    """Streams under way at one of two replicas; the machine, and which."""
    flow = regional(replica("r1", token_ids=True), replica("r2", token_ids=True), move_over_s=move_over_s)
    flow.handle(ReplicaProbed("r2", False), 0.0)
    flow.handle(swapped(replica("r1", token_ids=True)), 0.0)
    for n in range(count):
        assert arrive(flow, f"s{n}", deadline=60.0) == "r1"
        flow.handle(AttemptBegan(f"s{n}", 1, 200), 0.1)
    flow.handle(fleet_of(), 0.1)
    flow.handle(ReplicaProbed("r2", True), 0.1)
    flow.handle(ReplicaProbed("r2", True), 0.2)
    return flow


def test_streams_leave_a_drained_replica_at_a_pace(play) -> None:
    flow = streams(2)
    book = play(flow).at(1.0).on(fleet_of("r1")).expect(timer("s0", at=2.0), timer("s1", at=3.0))
    leaves = Expected(machine.Move, id="s0", attempt=1)
    book.at(2.0).on(TimerFired("s0")).expect(timer("s0", at=2.0 + MOVE_AGAIN_S), leaves)
    goes_on = Expected(machine.Resume, id="s0", target="r2", attempt=2)
    book.on(AttemptFailed("s0", 1, outcome.STOPPING, resumable=True)).expect(timer("s0"), goes_on)
    book.at(2.1).on(AttemptBegan("s0", 2, 200)).expect()
    book.at(2.2).on(AttemptEnded("s0", 2, 200, None)).expect()
    book.on(AttemptEnded("s1", 1, 200, None)).expect()
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)
    assert flow.replicas.health["r1"].read(2.2).state is State.UP  # no failure is counted


def test_streams_stay_if_no_other_replica_has_room_and_reports_token_ids(play) -> None:
    flow = streams(1)
    busy = swapped(replica("r1", token_ids=True, draining=True), replica("r2", token_ids=False))
    book = play(flow).at(1.0).on(busy).expect(timer("s0", at=3.0))
    book.at(3.0).on(TimerFired("s0")).expect(timer("s0", at=3.0 + MOVE_AGAIN_S))


def test_streams_end_at_a_drained_replica_without_the_setting(play) -> None:
    flow = streams(1, None)
    play(flow).at(1.0).on(fleet_of("r1")).expect()


def test_a_refusal_applies_to_new_requests_and_ends_by_itself(play) -> None:
    flow = regional(replica("r1"))
    refused = answered("b", outcome.REFUSED_BY_OPERATOR, detail=lambda text: "operator" in text and "ann" not in text)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .at(1.0).on(RefusalsChanged({MODEL: OrderedRefusal(1.0, 7.0, "a drill", "ann")})).expect()
        .on(AttemptBegan("a", 1, 200)).expect()
        .at(2.0).on(RequestArrived(request("b"))).expect(refused)
        .at(7.0).on(RequestArrived(request("c"))).expect(sent("c", "r1"))  # whatever set it is gone
        .on(AttemptEnded("a", 1, 200, None)).expect()
        .on(AttemptEnded("c", 1, 200, None)).expect()
        .on(RefusalsChanged({OTHER_MODEL: OrderedRefusal(1.0, 90.0, "a drill", "ann")})).expect()
        .on(RequestArrived(request("d"))).expect(sent("d", "r1"))
        .on(RefusalsChanged({"": OrderedRefusal(1.0, 90.0, "a drill", "ann")})).expect()
        .on(RequestArrived(request("e"))).expect(answered("e", outcome.REFUSED_BY_OPERATOR))
        .on(RefusalsChanged({})).expect()
        .on(RequestArrived(request("f"))).expect(sent("f", "r1"))
    )  # fmt: skip
    assert outcome.REFUSED_BY_OPERATOR.retryable
