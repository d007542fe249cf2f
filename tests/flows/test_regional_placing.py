"""The regional machine's ways with a request that finds room, waits for it, or waits in vain."""

from __future__ import annotations

from math import inf

import pytest
from playbook import Expected, answered, held, sent, timer
from worlds import MODEL, OTHER_MODEL, regional, replica, request, swapped

from farhop.balance import machine, outcome
from farhop.balance.health.reading import State
from farhop.balance.ledger import Reservation
from farhop.balance.machine import (
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    ClientLeft,
    RequestArrived,
    TimerFired,
    Usage,
)
from farhop.balance.model_facts import ModelFacts
from regional_lb.fleet.view import Replica, ReplicaProbed, ReplicaSampled, Sample
from regional_lb.scheduler.split import SplitConfig, SplitsChanged

NOTHING = ()


def ended(request_id: str, attempt: int = 1, usage: Usage | None = None) -> AttemptEnded:
    return AttemptEnded(request_id, attempt, 200, usage)


def test_a_free_replica_takes_a_request_at_once(play) -> None:
    flow = regional(replica("r1"))
    arrived = RequestArrived(request("a"))
    forward = Expected(
        machine.Forward,
        id="a",
        attempt=1,
        target="r1",
        address=replica("r1").address,
        # 1024 bytes at 4 per token, nothing cached, 0.1 ms each.
        promised_ttft_ms=pytest.approx(25.6),
        reasons=lambda choice: choice.chosen.replica == "r1",
    )
    play(flow).at(0.0).on(arrived).expect(timer("a", at=60.0), forward).at(0.1).on(AttemptBegan("a", 1, 200)).expect(
        *NOTHING
    ).at(2.0).on(ended("a")).expect(*NOTHING)
    assert (flow.under_way, len(flow.replicas.ledger)) == (0, 0)


def test_a_full_region_holds_requests_and_a_freed_slot_goes_to_them(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .at(1.0).on(RequestArrived(request("b"))).expect(held("b", until=31.0))
        .at(2.0).on(AttemptBegan("a", 1, 200)).expect()
        .at(3.0).on(ended("a")).expect(sent("b", "r1", attempt=1))
        .at(4.0).on(AttemptBegan("b", 1, 200)).expect()
        .at(5.0).on(ended("b")).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.queue), len(flow.replicas.ledger)) == (0, 0, 0)


def test_engine_with_a_queue_gets_no_requests_until_it_reports_none(play) -> None:
    busy = replica("r1", sample=Sample(at=10.0, waiting=3, running=2, kv_usage=0.4))
    idle = replica("r1", sample=Sample(at=10.5, waiting=0, running=2, kv_usage=0.4))
    flow = regional(busy)
    (
        play(flow)
        .at(10.1).on(RequestArrived(request("a"))).expect(held("a"))
        .at(10.5).on(swapped(idle)).expect(sent("a", "r1"))
    )  # fmt: skip


def test_old_scrape_is_ignored(play) -> None:
    flow = regional(replica("r1", sample=Sample(at=10.0, waiting=3, running=2, kv_usage=0.4)))
    (
        play(flow)
        .at(12.0).on(RequestArrived(request("a"))).expect(held("a"))
        .at(13.0).on(ReplicaProbed("r1", True)).expect(sent("a", "r1"))
    )  # fmt: skip


def long(name: str, tokens: int, **fields) -> Replica:
    """Whose engine takes so many tokens, prompt and answer together."""
    return replica(name, facts={MODEL: ModelFacts(tokens)}, slots=9, prefill_tokens_max=9999, **fields)


def test_a_long_request_goes_to_a_replica_that_can_hold_it_and_waits_for_it(play) -> None:
    flow = regional(long("short", 1000), long("long", 8000, prefill_ms_per_token=1.0, kv_tokens=3000))
    (
        play(flow)
        .on(RequestArrived(request("a", 3600))).expect(sent("a", "short"))  # 900 tokens, and 100 of an answer
        .on(RequestArrived(request("b", 3601))).expect(sent("b", "long"))
        .on(RequestArrived(request("c", 8000))).expect(held("c"))
        .on(RequestArrived(request("d", 400))).expect(held("d"), sent("d", "short"))  # not held up
        .at(1.0).on(AttemptBegan("b", 1, 200)).expect()
        .at(2.0).on(ended("b")).expect(sent("c", "long"))
    )  # fmt: skip


def test_too_long_request_is_refused_by_an_engine_if_no_replica_can_hold_it(play) -> None:
    flow = regional(long("r1", 1000))
    play(flow).on(RequestArrived(request("a", 8000))).expect(sent("a", "r1"))


def test_a_long_request_goes_back_to_the_replica_that_failed_it_if_no_other_can_hold_it(play) -> None:
    flow = regional(long("short", 1000), long("long", 8000))
    (
        play(flow)
        .on(RequestArrived(request("a", 8000))).expect(sent("a", "long"))
        .at(0.1).on(AttemptFailed("a", 1, outcome.DIED_BEFORE_START)).expect(sent("a", "long", attempt=2))
    )  # fmt: skip


def test_other_replicas_are_tried_while_the_one_that_can_hold_the_request_is_down(play) -> None:
    flow = regional(long("short", 1000), long("long", 8000))
    for _ in range(3):
        flow.handle(ReplicaProbed("long", False), 0.0)
    play(flow).on(RequestArrived(request("a", 8000))).expect(sent("a", "short"))


def test_an_engine_holds_no_more_than_its_cache_and_an_adapter_what_its_base_does(play) -> None:
    sample = Sample(at=-9.0, waiting=0, running=0, kv_tokens=1500)
    small = replica("small", facts={MODEL: ModelFacts(8000)}, sample=sample)
    assert (small.context_tokens(MODEL), replica("r").context_tokens(MODEL)) == (1500, inf)
    tuned = replica("r", facts={MODEL: ModelFacts(4000), "tuned": ModelFacts(0, "", MODEL)})
    assert tuned.context_tokens("tuned") == 4000
    flow = regional(small, long("long", 8000, prefill_ms_per_token=1.0))
    (
        play(flow)
        .on(RequestArrived(request("a", 5600))).expect(sent("a", "small"))
        .on(RequestArrived(request("b", 5601))).expect(sent("b", "long"))
        # A new report of its engine about its cache replaces the known contents.
        .at(1.0).on(ReplicaSampled("small", Sample(1.0, 0, 0, kv_tokens=9000))).expect()
        .on(RequestArrived(request("c", 5601))).expect(sent("c", "small"))
    )  # fmt: skip


def test_a_request_refused_for_its_length_goes_where_longer_ones_fit(play) -> None:
    """How many tokens it is was an estimate."""
    flow = regional(
        long("short", 1000),
        long("middle", 2000, prefill_ms_per_token=0.2),
        long("long", 8000, prefill_ms_per_token=0.9),
    )
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "short", longer=True))
        .at(0.1).on(AttemptFailed("a", 1, outcome.TOO_LONG)).expect(sent("a", "middle", longer=True, attempt=2))
        .at(0.2).on(AttemptFailed("a", 2, outcome.TOO_LONG)).expect(sent("a", "long", longer=False, attempt=3))
        .at(0.3).on(AttemptBegan("a", 3, 400)).expect()  # that is the answer then
    )  # fmt: skip
    assert flow.replicas.health["short"].read(0.3).state is State.UP


def test_too_long_request_for_its_version_is_released_to_a_version_with_room(play) -> None:
    """Its own version's line waits for that version's replicas, which are full."""
    flow = regional(long("short", 1000, version="v1"), long("long", 8000, version="v2"))
    flow.handle(SplitsChanged({MODEL: SplitConfig(weights={"v1": 1, "v2": 0})}), 0.0)
    for name in ("short", "long"):
        flow.handle(ReplicaSampled(name, Sample(0.0, 9, 1)), 0.0)
    (
        play(flow)
        .on(RequestArrived(request("a", 8000))).expect(held("a"))
        .at(1.0).on(ReplicaSampled("long", Sample(1.0, 0, 1))).expect(sent("a", "long"))
    )  # fmt: skip


def test_length_refusal_by_a_removed_replica_does_not_count_for_others(play) -> None:
    middle = long("middle", 2000, prefill_ms_per_token=0.2)
    flow = regional(long("short", 1000), middle)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "short"))
        .at(0.1).on(swapped(middle)).expect()
        .on(AttemptFailed("a", 1, outcome.TOO_LONG)).expect(sent("a", "middle", attempt=2))
    )  # fmt: skip


def test_a_refusal_for_length_is_the_answer_where_a_gateway_carries_the_request(play) -> None:
    flow = regional(long("short", 1000), long("long", 8000, prefill_ms_per_token=0.9))
    play(flow).on(RequestArrived(request("a", once=True))).expect(sent("a", "short", longer=False))


def test_answer_is_context_length_exceeded_if_no_replica_can_hold_the_request(play) -> None:
    flow = regional(long("short", 1000), long("long", 8000, prefill_ms_per_token=0.9))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "short", longer=True))
    for _ in range(3):
        flow.handle(ReplicaProbed("long", False), 0.0)
    refused = answered("a", outcome.TOO_LONG, retry_after_s=None)
    book.at(0.1).on(AttemptFailed("a", 1, outcome.TOO_LONG)).expect(refused)
    assert len(flow.replicas.ledger) == 0


def test_foreign_requests_are_admitted_by_the_room_of_replicas_that_can_hold_them(play) -> None:
    flow = regional(long("short", 1000), long("long", 8000, kv_tokens=2100))
    guest = {"issuer": "g", "entry_region": "tokyo", "promised_ttft_ms": 9e3}
    (
        play(flow)
        .on(RequestArrived(request("a", 7600))).expect(sent("a", "long"))
        .on(RequestArrived(request("b", 7600, **guest))).expect(answered("b", outcome.FOREIGN_FULL))
        .on(RequestArrived(request("c", 400, **guest))).expect(sent("c", "short"))
    )  # fmt: skip


def test_kv_cache_that_would_not_hold_the_answer_holds_the_request(play) -> None:
    # 256 tokens and 100 of an answer, three times. Their final length is unknown: two take 598, except by chance.
    flow = regional(replica("r1", slots=9, kv_tokens=900, prefill_tokens_max=9999))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(sent("b", "r1"))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(ended("a")).expect(sent("c", "r1"))
    )  # fmt: skip


def test_an_idle_engine_takes_even_what_seems_too_large(play) -> None:
    flow = regional(replica("r1", kv_tokens=100, prefill_tokens_max=100))
    play(flow).on(RequestArrived(request("a", 64 * 1024))).expect(sent("a", "r1"))


def test_prefill_under_way_bounds_what_more_is_sent(play) -> None:
    flow = regional(replica("r1", slots=9, prefill_tokens_max=500))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        # Half of a step is free: a prefill that fits begins there, however long it is.
        .on(RequestArrived(request("long", 8192))).expect(sent("long", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .at(0.5).on(AttemptBegan("a", 1, 200)).expect()
        .at(0.9).on(AttemptBegan("long", 1, 200)).expect(sent("b", "r1"))
    )  # fmt: skip


def test_requests_queued_in_an_engine_by_this_balancer_do_not_block_it(play) -> None:
    flow = regional(replica("r1", slots=9, prefill_tokens_max=1000))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b"))).expect(sent("b", "r1"))
    book.on(ReplicaSampled("r1", Sample(0.0, 2, 0, 0.0))).expect()  # those two
    book.at(0.1).on(AttemptBegan("a", 1, 200)).expect().on(AttemptBegan("b", 1, 200)).expect()
    book.on(RequestArrived(request("c"))).expect(sent("c", "r1"))
    book.at(0.2).on(ReplicaSampled("r1", Sample(0.2, 3, 2, 0.0))).expect()  # two belong to another request
    book.on(RequestArrived(request("d"))).expect(held("d"))


def test_unstreamed_answer_counts_as_prefilled_at_the_expected_time(play) -> None:
    flow = regional(replica("r1", slots=9, prefill_tokens_max=250))
    whole = request("a", stream=False)
    (
        play(flow)
        .on(RequestArrived(whole)).expect(timer("a", at=pytest.approx(0.0256)), Expected(machine.Forward, id="a"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .at(0.02).on(TimerFired("a")).expect(timer("a", at=pytest.approx(0.0256)))  # early
        .at(0.03).on(TimerFired("a")).expect(timer("a", at=60.0), sent("b", "r1"))
        .at(60.0).on(TimerFired("a")).expect(answered("a", outcome.DEADLINE))
    )  # fmt: skip


def test_a_higher_band_goes_first(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .at(1.0).on(RequestArrived(request("low"))).expect(held("low"))
        .at(2.0).on(RequestArrived(request("high", priority=5))).expect(held("high"))
        .at(3.0).on(ended("a")).expect(sent("high", "r1"))
        .at(4.0).on(ended("high")).expect(sent("low", "r1"))
    )  # fmt: skip


def test_waiting_tenants_are_served_alternately(play) -> None:
    flow = regional(replica("r1", slots=1))
    book = play(flow).on(RequestArrived(request("first"))).expect(sent("first", "r1"))
    for name in ("a1", "a2", "a3"):
        book.on(RequestArrived(request(name))).expect(held(name))
    book.on(RequestArrived(request("b1", tenant="other"))).expect(held("b1"))
    running = "first"
    for name in ("a1", "b1", "a2", "a3"):
        book.on(ended(running)).expect(sent(name, "r1"))
        running = name


def test_weights_give_shares(play) -> None:
    flow = regional(replica("r1", slots=1), weights={"other": 2.0})
    book = play(flow).on(RequestArrived(request("first"))).expect(sent("first", "r1"))
    for n in range(3):
        book.on(RequestArrived(request(f"a{n}"))).expect(held(f"a{n}"))
    for n in range(4):
        book.on(RequestArrived(request(f"b{n}", tenant="other"))).expect(held(f"b{n}"))
    running, order = "first", []
    for _ in range(6):
        commands = flow.handle(ended(running), 0.0)
        running = commands[-1].id
        order.append(running[0])
    assert order == ["a", "b", "b", "a", "b", "b"]


def test_a_starving_request_gets_every_fourth_turn(play) -> None:
    flow = regional(replica("r1", slots=1), queue_starvation_s=10.0, queue_wait_s=600.0)
    book = play(flow).on(RequestArrived(request("now", deadline=999.0))).expect(sent("now", "r1"))
    book.on(RequestArrived(request("low", deadline=999.0))).expect(held("low"))
    for n in range(6):
        name = f"h{n}"
        book.on(RequestArrived(request(name, priority=1, deadline=999.0))).expect(held(name))
    running = "now"
    for n, name in enumerate(("h0", "h1", "h2", "low", "h3")):
        book.at(11.0 + n).on(ended(running)).expect(sent(name, "r1"))
        running = name


def test_a_replica_is_kept_free_for_a_large_one_that_starves(play) -> None:
    """Small ones that fit must not pass it for ever."""
    flow = regional(
        replica("r1", slots=4, kv_tokens=950, prefill_tokens_max=9999), queue_starvation_s=5.0, queue_wait_s=99.0
    )
    book = play(flow)
    for name in ("a", "b"):
        book.on(RequestArrived(request(name))).expect(sent(name, "r1"))
        book.on(AttemptBegan(name, 1, 200)).expect()
    book.at(1.0).on(RequestArrived(request("large", 3200))).expect(held("large"))  # 800 + 100 tokens
    for n in range(4):
        book.on(RequestArrived(request(f"s{n}"))).expect(held(f"s{n}"))
    book.at(10.0)
    book.on(ended("a")).expect(sent("s0", "r1"))
    book.on(ended("b")).expect(sent("s1", "r1"))
    book.on(ended("s0")).expect(sent("s2", "r1"))
    book.on(ended("s1")).expect()  # three turns passed it: now r1 drains
    book.on(ended("s2")).expect(sent("large", "r1"))


def test_queue_of_one_model_does_not_block_another(play) -> None:
    flow = regional(replica("r1", slots=1), replica("r2", slots=1, models=frozenset({OTHER_MODEL})))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    for n in range(10):
        book.on(RequestArrived(request(f"w{n}"))).expect(held(f"w{n}"))
    book.on(RequestArrived(request("x", model=OTHER_MODEL))).expect(sent("x", "r2"))
    book.on(RequestArrived(request("y", model=OTHER_MODEL))).expect(held("y"))
    book.on(ended("x")).expect(sent("y", "r2"))


def test_a_smaller_one_among_the_first_fills_what_the_head_cannot(play) -> None:
    flow = regional(replica("r1", slots=9, kv_tokens=1000, prefill_tokens_max=9999))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("large", 3200))).expect(held("large"))
        .on(RequestArrived(request("small", 256))).expect(held("small"), sent("small", "r1"))
    )  # fmt: skip


def test_full_queue_refuses_with_its_expected_wait(play) -> None:
    flow = regional(replica("r1", slots=1), queue_requests_max=1)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        # One of 256 tokens at 20 ms leaves every 5.12 s, and one waits already.
        .on(RequestArrived(request("c"))).expect(
            answered("c", outcome.QUEUE_FULL, wait_ms=pytest.approx(10_240.0), retry_after_s=pytest.approx(10.24)))
    )  # fmt: skip
    assert flow.under_way == 2


def test_a_queue_is_bounded_in_tokens_too(play) -> None:
    flow = regional(replica("r1", slots=1), queue_tokens_max=500)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c"))).expect(answered("c", outcome.QUEUE_FULL))
    )  # fmt: skip


def test_a_full_queue_sheds_the_newest_of_the_lowest_band(play) -> None:
    flow = regional(replica("r1", slots=1), queue_requests_max=2)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .on(RequestArrived(request("high", priority=1))).expect(answered("c", outcome.QUEUE_FULL), held("high"))
        .on(RequestArrived(request("low"))).expect(answered("low", outcome.QUEUE_FULL))
        .on(ended("a")).expect(sent("high", "r1"))
    )  # fmt: skip


def test_no_request_waits_for_ever(play) -> None:
    flow = regional(replica("r1", slots=1), queue_wait_s=5.0)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .at(1.0).on(RequestArrived(request("b"))).expect(held("b", until=6.0))
        .at(5.999).on(TimerFired("b")).expect(timer("b", at=6.0))
        .at(6.0).on(TimerFired("b")).expect(answered("b", outcome.QUEUE_TIMEOUT, wait_ms=pytest.approx(5120.0)))
        .at(7.0).on(ended("a")).expect()
    )  # fmt: skip


def test_the_deadline_ends_it_in_the_queue_and_in_flight(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a", deadline=3.0))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", deadline=2.0))).expect(held("b", until=2.0))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .at(2.0).on(TimerFired("b")).expect(answered("b", outcome.DEADLINE))
        .at(3.0).on(TimerFired("a")).expect(answered("a", outcome.DEADLINE), sent("c", "r1"))
    )  # fmt: skip


def test_request_past_its_deadline_is_not_dispatched(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .at(5.0).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("late", deadline=5.0))).expect(answered("late", outcome.DEADLINE))
        .on(RequestArrived(request("b", deadline=6.0))).expect(held("b"))
        # Its timer is late as well: the event that frees the slot must not send it.
        .at(6.5).on(ended("a")).expect(answered("b", outcome.DEADLINE))
        .at(6.6).on(TimerFired("b")).expect()
    )  # fmt: skip


def test_a_client_may_leave_the_queue_or_a_replica(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .on(ClientLeft("b")).expect()
        .on(ClientLeft("a")).expect(sent("c", "r1"))
        .on(ClientLeft("a")).expect()
        .on(ClientLeft("c")).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.queue), len(flow.replicas.ledger)) == (0, 0, 0)


def test_the_warm_replica_is_chosen_and_load_moves_it_elsewhere(play) -> None:
    flow = regional(replica("r1", slots=9, prefill_tokens_max=99_999), replica("r2", slots=9), seed=3)
    big = 16 * 1024
    warm = flow.handle(RequestArrived(request("a", big, prefix="alice")), 0.0)[-1].target
    cold = "r2" if warm == "r1" else "r1"
    book = play(flow)
    book.at(0.5).on(AttemptBegan("a", 1, 200)).expect()
    book.at(1.0).on(ended("a")).expect()
    hit = sent("b", warm, reasons=lambda choice: choice.chosen.hit_tokens == pytest.approx(4096.0))
    book.on(RequestArrived(request("b", big, prefix="alice"))).expect(hit)
    # 64 KiB of another prompt are ahead of it there: 1.6 s of backlog outweigh 0.4 s of prefill.
    flow.replicas.ledger.reserve("x", Reservation(warm, 16_384, 16_384))
    book.on(RequestArrived(request("c", big, prefix="alice"))).expect(sent("c", cold))


def test_a_queued_request_goes_to_the_replica_with_its_prefix(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a", 4096, prefix="alice"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", 4096, prefix="bob", tenant="other"))).expect(held("b"))
        .on(RequestArrived(request("c", 4096, prefix="alice"))).expect(held("c"))
        .at(0.5).on(AttemptBegan("a", 1, 200)).expect()
        .at(1.0).on(ended("a")).expect(sent("c", "r1"))
    )  # fmt: skip


def test_a_freed_slot_goes_to_the_best_match_at_that_replica(play) -> None:
    """Bob's prompt is cached at r2, which has no room: of those who wait, what r1 holds most of goes to r1."""
    flow = regional(replica("r1", slots=1), replica("r2", slots=1))
    flow.replicas.trie.insert("r1", request("a", 4096, prefix="alice").chain)
    flow.replicas.trie.insert("r1", request("c", 2400, prefix="carol").chain)
    flow.replicas.trie.insert("r2", request("b", 4096, prefix="bob").chain)
    (
        play(flow)
        .on(RequestArrived(request("a", 4096, prefix="alice"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", 4096, prefix="bob"))).expect(sent("b", "r2"))
        .on(RequestArrived(request("b2", 4096, prefix="bob"))).expect(held("b2"))
        .on(RequestArrived(request("c", 4096, prefix="carol"))).expect(held("c"))
        .on(RequestArrived(request("a2", 4096, prefix="alice"))).expect(held("a2"))
        .on(ended("a")).expect(sent("a2", "r1"))
        .on(ended("a2")).expect(sent("c", "r1"))
        .on(ended("b")).expect(sent("b2", "r2"))
    )  # fmt: skip


def test_a_request_near_its_deadline_goes_before_the_others(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=2.0), queue_wait_s=300.0)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c"))).expect(held("c"))
        .on(RequestArrived(request("soon", deadline=1.5))).expect(held("soon"))
        .at(0.5).on(ended("a")).expect(sent("soon", "r1"))
        .at(0.6).on(ended("soon")).expect(sent("b", "r1"))
    )  # fmt: skip


def test_a_request_that_would_wait_far_too_long_is_refused_on_arrival(play) -> None:
    flow = regional(replica("r1", slots=1), queue_wait_s=5.0)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))  # the next one, however long it takes
        # One of 256 tokens at 20 ms leaves every 5.12 s; half a minute of the expected time is not certain.
        .on(RequestArrived(request("c", deadline=6.0))).expect(answered("c", outcome.QUEUE_FULL))
        .on(RequestArrived(request("high", priority=1))).expect(held("high"))  # those of lower bands wait behind it
    )  # fmt: skip


def test_in_a_standing_queue_late_requests_step_back_behind_new_ones(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .at(1.0).on(RequestArrived(request("c"))).expect(held("c"))
        .at(3.5).on(ended("a")).expect(sent("b", "r1"))  # late since 2.0, a burst: in the order in which they came
        .at(4.5).on(RequestArrived(request("d"))).expect(held("d"))
        .at(6.0).on(ended("b")).expect(timer("c", at=31.0), sent("d", "r1"))  # c steps back behind the newest
        .at(7.0).on(RequestArrived(request("e"))).expect(held("e"))
        .at(8.0).on(ended("d")).expect(sent("e", "r1"))
        .at(8.5).on(RequestArrived(request("f"))).expect(held("f"))
        .at(9.0).on(ended("e")).expect(sent("f", "r1"))
        .at(11.0).on(ended("f")).expect(sent("c", "r1"))  # and is served when no other request waits
    )  # fmt: skip


def test_a_tenant_below_its_share_does_not_step_back_behind_a_flood() -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    flow.handle(RequestArrived(request("a")), 0.0)
    for n in range(4):
        flow.handle(RequestArrived(request(f"old {n}", tenant="other")), 0.0)
    flow.handle(RequestArrived(request("b")), 1.0)
    for n in range(4):
        flow.handle(RequestArrived(request(f"new {n}", tenant="other")), 4.0)
    commands = flow.handle(ended("a"), 4.5)
    commands += flow.handle(ended(next(c.id for c in commands if isinstance(c, machine.Forward))), 4.6)
    # The flood's own requests step back behind its new ones; b, as long in the queue, is served in its turn.
    forwarded = [c.id for c in commands if isinstance(c, machine.Forward)]
    assert sorted(forwarded) == ["b", "new 0"]
    assert [name for name, waiting in flow.queue.by_id.items() if waiting.late] == [f"old {n}" for n in range(4)]


def test_a_long_prompt_waits_longer_before_it_steps_back() -> None:
    """3,600 tokens at 0.25 ms each, four times: 3.6 s, where others wait for 2."""
    flow = regional(
        replica("r1", slots=1, tpot_ms=0.5, prefill_ms_per_token=0.25), queue_stands_s=2.0, queue_ttft_objective_s=4.0
    )
    flow.handle(RequestArrived(request("a")), 0.0)
    flow.handle(RequestArrived(request("oldest")), 0.5)
    flow.handle(RequestArrived(request("long", 14_400)), 1.1)
    flow.handle(RequestArrived(request("short")), 1.1)
    flow.handle(RequestArrived(request("new")), 4.4)
    flow.handle(ended("a"), 4.6)
    late = {name for name, waiting in flow.queue.by_id.items() if waiting.late}
    assert late == {"short", "oldest"}


def test_a_request_that_stepped_back_waits_up_to_the_queue_timeout(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b"))).expect(held("b"))
    book.at(1.0).on(RequestArrived(request("c"))).expect(held("c"))
    book.at(3.5).on(ended("a")).expect(sent("b", "r1"))
    book.at(4.5).on(RequestArrived(request("d"))).expect(held("d"))
    book.at(6.0).on(ended("b")).expect(timer("c", at=31.0), sent("d", "r1"))
    book.at(31.0).on(TimerFired("c")).expect(answered("c", outcome.QUEUE_TIMEOUT))


def test_a_request_that_another_region_may_take_is_released_once(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    sent_here = {"issuer": "g", "lawful": frozenset({"london", "paris"}), "promised_ttft_ms": 100.0}
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b", **sent_here))).expect(held("b"))
    book.at(1.0).on(RequestArrived(request("c", **sent_here))).expect(held("c"))
    book.at(3.5).on(ended("a")).expect(sent("b", "r1"))
    book.at(4.5).on(RequestArrived(request("d"))).expect(held("d"))
    book.at(6.0).on(ended("b")).expect(answered("c", outcome.QUEUE_TIMEOUT), sent("d", "r1"))
    # A request that waited elsewhere in vain steps back here.
    book.on(RequestArrived(request("e", **sent_here, waited_s=5.0))).expect(held("e"))
    book.at(7.0).on(RequestArrived(request("f"))).expect(held("f"))
    book.at(8.0).on(TimerFired("e")).expect(timer("e", at=31.0))
    book.at(8.5).on(ended("d")).expect(sent("f", "r1"))
    book.at(9.0).on(ended("f")).expect(sent("e", "r1"))


def test_a_request_that_another_region_may_take_steps_back_before_it_is_released(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    sent_here = {"issuer": "g", "lawful": frozenset({"london", "paris"}), "promised_ttft_ms": 100.0}
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b"))).expect(held("b"))
    book.at(1.0).on(RequestArrived(request("c", **sent_here))).expect(held("c"))
    book.at(4.1).on(RequestArrived(request("d"))).expect(held("d"))
    book.at(4.2).on(ended("a")).expect(timer("b", at=30.0), timer("c", at=5.0), sent("d", "r1"))
    book.at(5.0).on(TimerFired("c")).expect(answered("c", outcome.QUEUE_TIMEOUT))


def test_a_request_that_stepped_back_in_another_region_counts_as_late_if_any_here_did() -> None:
    """Where nobody did, what it waited brings it forward."""
    for anybody in (False, True):
        flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
        flow.handle(RequestArrived(request("a")), 0.0)
        for n in range(3):
            flow.handle(RequestArrived(request(f"own {n}")), 0.1)
        if anybody:
            flow.queue.step_back("own 2")
        flow.handle(RequestArrived(request("short", issuer="g", waited_s=1.9)), 0.5)
        flow.handle(RequestArrived(request("back", issuer="g", waited_s=2.1)), 0.5)
        assert flow.queue.by_id["back"].late is anybody
        assert not flow.queue.by_id["short"].late, "it had time left"
        (first,) = (c.id for c in flow.handle(ended("a"), 0.6) if isinstance(c, machine.Forward))
        assert first == ("short" if anybody else "back")


def test_when_a_request_steps_back_depends_on_its_clients_objective(play) -> None:
    """Within 4 s where it says nothing: late is who has waited for half of that, or cannot be in time any more."""
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(RequestArrived(request("b"))).expect(held("b"))
    for name, by, at in (("none", None, 7.0), ("later", 13.0, 9.0), ("sooner", 7.0, 6.0), ("over", 4.0, 5.001)):
        book.at(5.0).on(RequestArrived(request(name, first_token_by=by))).expect(held(name, until=at))
    # 3,600 tokens take 360 ms, and 400 are left.
    long = request("long", 14_400, first_token_by=5.4)
    book.at(5.0).on(RequestArrived(long)).expect(held("long", until=5.04))


def test_a_queue_stands_once_its_oldest_is_late_by_its_client_s_own_objective() -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    flow.handle(RequestArrived(request("a")), 0.0)
    flow.handle(RequestArrived(request("batch", first_token_by=60.0)), 0.0)
    flow.handle(RequestArrived(request("b")), 20.0)
    assert flow.queue.stands_s(MODEL, 0, 20.0) == 0.0
    flow.handle(RequestArrived(request("c")), 31.0)
    assert flow.queue.stands_s(MODEL, 0, 31.0) == 1.0


def test_a_queue_that_moves_refuses_no_request_even_if_never_empty(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_stands_s=2.0, queue_ttft_objective_s=4.0)
    book = play(flow).on(RequestArrived(request("q0"))).expect(sent("q0", "r1"))
    book.on(RequestArrived(request("q1"))).expect(held("q1"))
    for n in range(1, 20):
        book.at(n * 1.5).on(RequestArrived(request(f"q{n + 1}"))).expect(held(f"q{n + 1}"))
        book.on(ended(f"q{n - 1}")).expect(sent(f"q{n}", "r1"))


def test_time_waited_in_another_region_counts_towards_the_timeout(play) -> None:
    flow = regional(replica("r1", slots=1, tpot_ms=0.5), queue_wait_s=5.0)
    timed_out = {"entry_region": "tokyo", "promised_ttft_ms": None, "waited_s": 4.0}
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", **timed_out))).expect(held("b"))
        .on(RequestArrived(request("c", **{**timed_out, "waited_s": 5.0}))).expect(
            answered("c", outcome.QUEUE_TIMEOUT))
        .at(1.0).on(TimerFired("b")).expect(answered("b", outcome.QUEUE_TIMEOUT))
    )  # fmt: skip


def test_request_whose_deadline_is_too_near_is_not_dispatched(play) -> None:
    flow = regional(replica("r1", slots=1, prefill_ms_per_token=1.0))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", 8192, deadline=4.0))).expect(held("b"))
        .on(RequestArrived(request("c", 8192, deadline=60.0))).expect(held("c"))
        .at(3.0).on(ended("a")).expect(answered("b", outcome.QUEUE_TIMEOUT), sent("c", "r1"))
    )  # fmt: skip


def test_measured_speeds_replace_configured_ones(play) -> None:
    flow = regional(replica("r1"))
    book = play(flow).on(RequestArrived(request("a", 4000))).expect(sent("a", "r1"))
    book.at(1.020).on(AttemptBegan("a", 1, 200)).expect()
    book.at(3.020).on(ended("a", usage=Usage(2000, 101, cached_tokens=0))).expect()
    book.at(4.0).on(ReplicaProbed("r1", True)).expect()
    # One second for 1000 tokens (as then estimated) after one decode step; 100 steps in two seconds.
    speed, guess = flow.replicas.speeds["r1"], replica("r1").prefill_ms_per_token
    assert guess < speed.prefill_ms_per_token < 1.0
    assert speed.tpot_ms == pytest.approx(20.0)
    assert 3020.0 < speed.service_ms < 5120.0
    assert flow.replicas.estimates.bytes_per_token(MODEL) == pytest.approx(2.0)
    assert flow.replicas.estimates.output_tokens("anyone", MODEL, None) == pytest.approx(101.0, abs=0.1)
    assert (flow.learning.predicted_tokens, flow.learning.actual_tokens) == (0.0, 0.0)


def test_an_answer_in_one_piece_does_not_pass_for_a_slow_prefill(play) -> None:
    flow = regional(replica("r1"))
    book = play(flow).on(RequestArrived(request("a", 4000, stream=False))).expect(sent("a", "r1"))
    book.at(2.1).on(AttemptBegan("a", 1, 200)).expect()
    book.on(ended("a", usage=Usage(1000, 101))).expect()
    assert flow.replicas.speeds["r1"].prefill_ms_per_token == 0.1
    assert flow.replicas.speeds["r1"].tpot_ms == pytest.approx(20.0)  # 2.1 s minus the expected 0.1 s of prefill


def test_error_answer_changes_no_speed_or_cache_estimate(play) -> None:
    flow = regional(replica("r1"))
    book = play(flow).on(RequestArrived(request("a", 4000))).expect(sent("a", "r1"))
    book.at(0.001).on(AttemptBegan("a", 1, 400)).expect()
    book.on(AttemptEnded("a", 1, 400, None)).expect()
    assert flow.replicas.trie.nodes == 0
    assert flow.replicas.speeds["r1"].prefill_ms_per_token == 0.1


def test_several_waiting_requests_fill_the_next_engine_step(play) -> None:
    flow = regional(replica("r1", slots=8, prefill_tokens_max=500, kv_tokens=100_000))
    book = play(flow).on(RequestArrived(request("a", 2400))).expect(sent("a", "r1"))  # 600 tokens: this step is full
    book.on(RequestArrived(request("b", 400))).expect(held("b"))  # one may wait: its best replica may become free
    book.on(RequestArrived(request("c", 1200))).expect(held("c"), sent("b", "r1"))
    book.on(RequestArrived(request("d", 1200))).expect(held("d"), sent("c", "r1"))  # 1,000 tokens: so is the next
    book.on(RequestArrived(request("e", 4000))).expect(held("e"))
    book.at(0.1).on(AttemptBegan("a", 1, 200)).expect(sent("d", "r1"))
