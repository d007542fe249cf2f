"""The queue: its bounds, its order between priorities, tenants and models, and what is evicted when it is full."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from regional_lb.scheduler.queue import OF_LATE_S, STARVED_EVERY, RequestQueue, work

RUN = settings(max_examples=80, deadline=None, derandomize=True)
REQUESTS_MAX, TOKENS_MAX, STARVATION_S = 8, 1000, 10.0
NOW = 100.0  # after all requests here have come


def room(**bounds) -> RequestQueue:
    return RequestQueue(**{"requests_max": 1000, "tokens_max": 10**9, "starvation_s": STARVATION_S, **bounds})


def push(queue: RequestQueue, name: str, tenant: str = "t", weight: float = 1.0, **fields) -> None:
    known = {"model": "m", "priority": 0, "tokens": 100.0, "now": 0.0, **fields}
    queue.push(name, tenant=tenant, weight=weight, **known)


def test_a_queue_refuses_a_request_it_has_and_one_that_does_not_fit() -> None:
    queue = room(requests_max=2, tokens_max=150)
    push(queue, "large", tokens=500.0)  # alone, whatever its size
    with pytest.raises(ValueError, match="waits already"):
        push(queue, "large")
    assert not queue.fits(1.0)
    with pytest.raises(ValueError, match="full"):
        push(queue, "small", tokens=1.0)
    queue.remove("large", served=True)
    assert queue.tokens == 0.0
    assert queue.remove("large", served=True) is None
    assert not room(requests_max=0).fits(0.0)


def test_queued_requests_are_counted_by_priority_and_tenant() -> None:
    queue = room()
    for name, tenant, band in (("a", "t", 0), ("b", "t", 0), ("c", "u", 1)):
        push(queue, name, tenant, priority=band)
    assert queue.by_tenant() == {(0, "t"): 2, (1, "u"): 1}


def test_an_empty_queue_has_nothing_to_serve_or_evict() -> None:
    queue = room()
    assert (len(queue), queue.models(), queue.first("m", 8, NOW), queue.starved("m", 1e9)) == (0, [], [], None)
    assert queue.waiting("m") == 0
    assert queue.victims(9, 1.0) == []


def test_the_line_is_that_of_the_requests_that_are_on_time() -> None:
    queue = room()
    assert queue.line_of("m") is None
    push(queue, "a", tokens=100.0, output_tokens=10.0, cached_tokens=40.0)
    push(queue, "b", tokens=300.0, output_tokens=30.0)
    push(queue, "late", tokens=9000.0)
    push(queue, "other", tokens=9000.0, model="n")
    queue.step_back("late")
    assert queue.line_of("m", but=1) == pytest.approx((2, 200.0, 180.0, 20.0))
    assert queue.line_of("m", but=2) is None


def stands_s(queue, priority, now, late_s=1.0):
    queue.note("m", late_s, now)
    return queue.stands_s("m", priority, now)


def test_a_queue_stands_since_the_oldest_of_its_lowest_priority_became_late() -> None:
    queue = room()
    assert stands_s(queue, 0, 5.0) == 0.0
    push(queue, "a", now=1.0)
    push(queue, "b", now=1.4)
    push(queue, "c", now=4.5)
    push(queue, "high", priority=1, now=2.0)
    assert stands_s(queue, 0, 1.9) == 0.0
    assert stands_s(queue, 0, 2.1) == pytest.approx(0.1)  # late since 2.0
    queue.remove("a", served=True)
    assert stands_s(queue, 0, 2.2) == pytest.approx(0.2)  # the next is not late yet, but nearly
    queue.remove("b", served=True)
    assert stands_s(queue, 0, 4.6) == 0.0  # it moves
    assert stands_s(queue, 0, 5.6) == pytest.approx(0.1)
    queue.remove("c", served=True)
    assert stands_s(queue, 1, 9.0) == 0.0


def test_a_queue_does_not_stand_while_others_below_suffer_first() -> None:
    queue = room()
    push(queue, "b", now=4.0)
    push(queue, "high", priority=1, now=2.0)
    assert stands_s(queue, 0, 6.0) == 1.0
    assert stands_s(queue, 1, 6.0) == 0.0  # others are below it
    queue.remove("b", served=True)
    assert stands_s(queue, 1, 6.0) == 0.0  # nor have they gone for good
    assert stands_s(queue, 1, 4.0 + OF_LATE_S) == 1.0 + OF_LATE_S


def test_a_tenants_requests_are_ordered_by_waiting_time_in_relation_to_size() -> None:
    queue = room()
    push(queue, "large", tokens=4000.0, now=0.0)
    push(queue, "small", tokens=200.0, now=1.0)
    push(queue, "cached", tokens=4000.0, cached_tokens=3900.0, now=1.0)
    push(queue, "new", tokens=100.0, now=2.0)
    assert [w.id for w in queue.first("m", 8, 2.0)] == ["cached", "small", "large", "new"]
    # The large one is not starved by new ones: its waiting time brings it forward.
    for n in range(300):
        push(queue, f"more {n}", tokens=100.0, now=2.0 + n)
        queue.remove(queue.first("m", 1, 3.0 + n)[0].id, served=True)
    assert "large" not in queue


def test_another_tenants_turn_does_not_go_by_the_size_of_ones_own() -> None:
    queue = room()
    for n in range(4):
        push(queue, f"a{n}", "a", tokens=10.0, now=0.0)
    push(queue, "b0", "b", tokens=4000.0, now=0.0)
    assert "b0" in [w.id for w in queue.first("m", 2, 9.0)]


def test_foreign_requests_neither_precede_nor_displace_local_ones() -> None:
    queue = room(requests_max=3, starvation_s=1.0)
    for name, now in (("g1", 0.0), ("g2", 1.0), ("own", 2.0)):
        push(queue, name, now=now, foreign=name != "own")
    assert (queue.foreign_waits_s("m", 2.5), queue.foreign_waits_s("n", 2.5)) == (2.5, 0.0)
    assert [queue.foreign_waits_s("m", 2.5, but) for but in (("g1",), ("g1", "g2"))] == [1.5, 0.0]
    assert [w.id for w in queue.first("m", 8, NOW)] == ["g1", "g2", "own"]
    assert [w.id for w in queue.in_order("m", NOW, own=True)] == ["own"]
    for _ in range(STARVED_EVERY - 1):
        queue.remove("g2", served=True)
        push(queue, "g2", now=5.0, foreign=True)
    starved = queue.starved("m", 9.0)
    assert starved is not None
    assert starved.id == "own"
    assert queue.victims(0, 1.0, "m", "t", foreign=True) == []
    assert [one.id for one in queue.victims(0, 1.0, "m", "t")] == ["g2"]  # the newest of them
    queue.remove("g2", served=False)
    push(queue, "newest", now=9.0)
    assert queue.victims(0, 1.0, "m", "another", foreign=True) == []  # nor for the sake of fairness
    assert queue.victims(0, 1.0, "m", "another")


def test_the_wait_in_other_regions_counts() -> None:
    queue = room()
    push(queue, "a", now=0.0)
    push(queue, "old", now=3.0, waited_s=4.0)
    assert not queue.outlived("a", 2.0, 3.5)  # the other is not younger
    push(queue, "young", now=3.4)
    assert queue.outlived("a", 2.0, 3.5)
    assert queue.outlived("old", 2.0, 3.5)


def test_a_late_request_is_outlived_by_one_as_urgent_that_is_not_late() -> None:
    queue = room()
    push(queue, "old", now=0.0)
    push(queue, "high", priority=1, now=1.0)
    assert not queue.outlived("old", 2.0, 5.0)  # all of them have
    push(queue, "young", now=4.0)
    assert queue.outlived("old", 2.0, 5.0)
    assert not queue.outlived("high", 2.0, 5.0)  # the young one is less urgent
    assert not queue.outlived("young", 2.0, 5.0)
    push(queue, "other", model="else", now=4.0)
    queue.remove("young", served=True)
    assert not queue.outlived("old", 2.0, 5.0)  # a request for another model competes with none of them


def test_models_are_served_by_band_then_by_age() -> None:
    queue = room()
    push(queue, "a", model="old", now=1.0)
    push(queue, "b", model="young", now=2.0)
    push(queue, "c", model="urgent", priority=1, now=3.0)
    assert queue.models() == ["urgent", "old", "young"]
    assert [w.id for w in queue.first("old", 8, NOW)] == ["a"]


def test_a_request_that_moves_to_another_model_s_queue_keeps_its_age_and_priority() -> None:
    queue = room(tokens_max=400)
    for n, (name, model, priority) in enumerate(
        (("a", "old", 0), ("b", "new", 0), ("c", "old", 1), ("d", "old", 0), ("e", "apart", 0))
    ):
        push(queue, name, f"t{n}", model=model, priority=priority, now=float(n), tokens=80.0)
    apart = queue.first("apart", 8, NOW)
    queue.reassign({"a": "new", "c": "new", "d": "newest", "b": "new", "gone": "new"})
    assert [w.id for w in queue.first("new", 8, NOW)] == ["c", "a", "b"]
    assert [(w.id, w.since) for w in queue.first("newest", 8, NOW)] == [("d", 3.0)]
    assert (queue.waiting("old"), len(queue), queue.tokens) == (0, 5, 400.0)
    assert queue.first("apart", 8, NOW) == apart  # unrelated requests are left alone
    served = [queue.remove(name, served=True) for name in "abcde"]
    assert [w.model for w in served if w is not None] == ["new", "new", "new", "newest", "apart"]
    assert (len(queue), queue.models(), queue.tokens) == (0, [], 0.0)


def test_only_what_is_served_counts_against_a_tenant() -> None:
    """Ten of A's give up unserved: its eleventh is as near to its turn as B's first."""
    queue = room()
    for n in range(10):
        push(queue, f"a{n}", "a")
    push(queue, "b0", "b")
    push(queue, "b1", "b")
    for n in range(10):
        queue.remove(f"a{n}", served=False)
    push(queue, "a10", "a")
    queue.remove("b0", served=True)
    assert [w.id for w in queue.first("m", 8, NOW)] == ["a10", "b1"]


def test_a_new_tenant_neither_waits_for_the_past_nor_profits_from_it() -> None:
    queue = room()
    for n in range(50):
        push(queue, f"a{n}", "a")
    for n in range(40):
        queue.remove(f"a{n}", served=True)
    for n in range(3):
        push(queue, f"b{n}", "b")
    order = serve_all(queue)
    assert order[:6] in (["a40", "b0", "a41", "b1", "a42", "b2"], ["b0", "a40", "b1", "a41", "b2", "a42"])


def test_a_tenant_that_leaves_and_returns_pays_what_it_took() -> None:
    queue = room()
    push(queue, "a0", "a", tokens=1000.0)
    for n in range(5):
        push(queue, f"b{n}", "b")
    queue.remove("a0", served=True)
    push(queue, "a1", "a")
    assert serve_all(queue) == ["b0", "b1", "b2", "b3", "b4", "a1"]


def serve_all(queue: RequestQueue) -> list[str]:
    order = []
    while due := queue.first("m", 1, NOW):
        queue.remove(due[0].id, served=True)
        order.append(due[0].id)
    return order


@given(
    st.lists(st.sampled_from((10.0, 100.0, 400.0)), min_size=60, max_size=60),
    st.lists(st.sampled_from((10.0, 100.0, 400.0)), min_size=60, max_size=60),
    st.sampled_from((1.0, 2.0, 5.0)),
)
@RUN
def test_service_is_in_proportion_to_weight(light: list[float], heavy: list[float], weight: float) -> None:
    """While both are backlogged, tokens served per weight differ by no more than one request of each (SFQ's bound)."""
    queue = room()
    for n, tokens in enumerate(light):
        push(queue, f"l{n}", "light", tokens=tokens)
    for n, tokens in enumerate(heavy):
        push(queue, f"h{n}", "heavy", weight, tokens=tokens)
    served = {"light": 0.0, "heavy": 0.0}
    while {w.tenant for w in queue.first("m", 120, NOW)} == {"light", "heavy"}:
        due = queue.first("m", 1, NOW)[0]
        queue.remove(due.id, served=True)
        served[due.tenant] += due.tokens
        assert abs(served["light"] - served["heavy"] / weight) <= 400.0 + 400.0 / weight


ANSWERS = st.lists(st.tuples(st.sampled_from((0.0, 50.0, 300.0)), st.sampled_from((0.0, 50.0, 300.0))), min_size=60)


@given(ANSWERS, ANSWERS, st.sampled_from((1.0, 2.0, 5.0)), st.integers(0, 8))
@settings(RUN, max_examples=40)
def test_service_is_fair_by_actual_answer_lengths_however_wrong_the_estimates(
    light: Any, heavy: Any, weight: float, late: int
) -> None:
    """However wrong what was expected of an answer: work served per weight differs by no more than one request of each
    and what is still unknown of those under way."""
    queue, most = room(), work(100.0, 300.0)
    answers = {
        f"{name[0]}{n}": one for name, all_ in (("light", light), ("heavy", heavy)) for n, one in enumerate(all_)
    }
    for request_id, (expected, _) in answers.items():
        mine = ("light", 1.0) if request_id[0] == "l" else ("heavy", weight)
        push(queue, request_id, *mine, output_tokens=expected)
    served, under_way = {"light": 0.0, "heavy": 0.0}, deque[str]()
    while {w.tenant for w in queue.first("m", 200, NOW)} == {"light", "heavy"}:
        due = queue.first("m", 1, NOW)[0]
        queue.remove(due.id, served=True)
        served[due.tenant] += work(100.0, answers[due.id][1])
        under_way.append(due.id)
        if len(under_way) > late:
            over = under_way.popleft()
            queue.settle(over, work(100.0, answers[over][1]))
        assert abs(served["light"] - served["heavy"] / weight) <= (1 + late) * (most + most / weight)


def test_long_answers_are_paid_for() -> None:
    """By prompts alone both tenants had as many turns, and one of them took 30 times the GPU time."""
    queue = room()
    for n in range(40):
        push(queue, f"long{n}", "long", output_tokens=100.0)  # as there is no better estimate
        push(queue, f"short{n}", "short", output_tokens=100.0)
    order = []
    for _ in range(40):
        due = queue.first("m", 1, NOW)[0]
        queue.remove(due.id, served=True)
        queue.settle(due.id, work(100.0, 1500.0 if due.tenant == "long" else 50.0))
        order.append(due.tenant)
    assert order.count("long") == pytest.approx(40 * 200 / (200 + 3100), abs=1.0)


def test_a_turn_is_settled_once_and_never_after_its_band_has_emptied() -> None:
    queue = room()
    push(queue, "a0", "a")
    queue.remove("a0", served=True)
    push(queue, "a1", "a")
    push(queue, "b0", "b")
    queue.settle("a0", 1e9)  # of a band that is gone: its earlier state is forgotten
    assert serve_all(queue) == ["a1", "b0"]
    for name in ("a1", "b0", "a0", "never"):
        queue.settle(name, None)
        queue.settle(name, 1e9)
    assert not queue.taken


@given(st.integers(1, 60), st.integers(1, 6))
@RUN
def test_the_oldest_waits_no_more_than_so_many_turns(urgent: int, pace: int) -> None:
    """Once it is too old, in every STARVED_EVERY turns one is its, whatever stands before it."""
    queue = room()
    push(queue, "old", now=0.0)
    now, turns = STARVATION_S + 0.1, 0
    for n in range(urgent):
        push(queue, f"u{n}", "other", priority=1, now=now)
    while True:
        starved = queue.starved("m", now)
        due = starved or queue.first("m", 1, NOW)[0]
        queue.remove(due.id, served=True)
        turns += 1
        push(queue, f"more{turns}", "other", priority=1, now=now)
        now += pace
        if due.id == "old":
            break
        assert due.priority == 1
    assert turns == STARVED_EVERY


def test_two_starving_requests_are_not_served_back_to_back() -> None:
    queue = room()
    for name in ("old0", "old1"):
        push(queue, name, now=0.0)
    for n in range(9):
        push(queue, f"u{n}", "other", priority=1, now=1.0)
    order = []
    for _ in range(8):
        due = queue.starved("m", 99.0) or queue.first("m", 1, NOW)[0]
        queue.remove(due.id, served=True)
        order.append(due.id)
    assert order == ["u0", "u1", "u2", "old0", "u3", "u4", "u5", "old1"]


def test_requests_younger_than_the_starvation_limit_are_not_starving() -> None:
    queue = room()
    for n in range(9):
        push(queue, f"q{n}", now=0.0)
    for n in range(8):
        assert queue.starved("m", STARVATION_S) is None
        queue.remove(f"q{8 - n}", served=True)
    assert queue.starved("m", STARVATION_S + 0.1) is not None


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1)), max_size=40),
    st.fixed_dictionaries({name: st.sampled_from((0.5, 1.0, 3.0)) for name in "abcd"}),
    st.integers(0, 12),
)
@RUN
def test_the_count_ahead_of_a_new_request_matches_its_place_in_the_queue(
    waiting: list[tuple[str, int]], weights: dict[str, float], served: int
) -> None:
    queue = room()
    for n, (tenant, band) in enumerate(waiting):
        push(queue, f"{n}", tenant, weights[tenant], priority=band)
    for _ in range(min(served, len(waiting))):
        queue.remove(queue.first("m", 1, NOW)[0].id, served=True)
    ahead = queue.ahead("m", 0, "a", weights["a"])
    push(queue, "new", "a", weights["a"])
    place = [one.id for one in queue.first("m", 99, NOW)].index("new")
    assert place <= ahead <= place + 3  # of turns that are due at once, each other tenant may have one


def test_a_tenant_that_fills_the_queue_is_not_ahead_of_one_with_no_request_there() -> None:
    queue = room()
    for n in range(500):
        push(queue, f"{n}", "many")
    assert queue.ahead("m", 0, "many", 1.0) == 500
    assert queue.ahead("m", 0, "few", 1.0) == 1


def test_the_newest_of_the_lowest_band_makes_way() -> None:
    queue = room(requests_max=3, tokens_max=1000)
    push(queue, "low0", tokens=100.0)
    push(queue, "low1", tokens=400.0, model="other")
    push(queue, "mid", priority=1, tokens=400.0)
    assert [one.id for one in queue.victims(2, 100.0)] == ["low1"]
    assert [one.id for one in queue.victims(1, 500.0)] == ["low1"]
    assert [one.id for one in queue.victims(1, 501.0)] == ["low1", "low0"]  # one place is not enough
    assert queue.victims(1, 601.0) == []  # both of them are not, either
    assert queue.victims(0, 100.0) == []


def test_a_tenant_whose_few_requests_fill_the_queue_makes_way_for_another_with_more_small_ones() -> None:
    """It is prompt tokens that are lacking, and so what tenants hold of these is compared."""
    queue = room(requests_max=1000, tokens_max=4_000_000)
    for n in range(4):
        push(queue, f"huge{n}", "mallory", tokens=999_000.0)
    for n in range(8):
        push(queue, f"{n}", "alice", tokens=500.0)
    assert queue.victims(0, 500.0, "m", "mallory") == []
    assert [one.id for one in queue.victims(0, 500.0, "m", "alice")] == ["huge3"]
    assert [one.id for one in queue.victims(0, 500.0, "m", "bob")] == ["huge3"]
    assert [one.id for one in queue.victims(0, 1_100_000.0, "m", "bob")] == ["huge3", "huge2"]
    assert queue.victims(0, 2_000_000.0, "m", "bob") == []  # not beyond its equal share


def test_a_small_request_behind_large_ones_of_its_tenant_keeps_no_other_out() -> None:
    queue = room(requests_max=1000, tokens_max=4000)
    for n in range(4):
        push(queue, f"{n}", "mallory", tokens=999.0)
    push(queue, "tiny", "mallory", tokens=1.0)
    for n in range(3):
        push(queue, f"tiny{n}", "mallory", tokens=1.0)
    assert [one.id for one in queue.victims(0, 500.0, "m", "alice")] == ["3"]
    many = room(requests_max=1000, tokens_max=4000)
    for n in range(400):
        push(many, f"{n}", "mallory", tokens=10.0)
    assert [one.id for one in many.victims(0, 25.0, "m", "alice")] == ["399", "398", "397"]


def test_a_request_that_stepped_back_is_last_starves_none_and_is_evicted_first() -> None:
    queue = room(requests_max=4)
    for n, priority in enumerate((1, 0, 1)):
        push(queue, f"q{n}", priority=priority, now=float(n))
    queue.step_back("q0")
    queue.step_back("q0")
    assert [w.id for w in queue.first("m", 9, NOW)] == ["q2", "q1", "q0"]
    assert (queue.waiting("m"), queue.on_time("m")) == (3, 2)
    for n in range(3, 3 + STARVED_EVERY):
        push(queue, f"q{n}", now=20.0)
        queue.remove(f"q{n}", served=True)
    assert queue.starved("m", 30.0).id == "q1", "the oldest of those who did not step back"
    push(queue, "q9", now=30.0)
    assert [one.id for one in queue.victims(0, 100.0)] == ["q0"]
    assert queue.outlived("q1", 5.0, 31.0)
    queue.reassign({"q0": "m-2", "q1": "m-2"})
    assert [w.id for w in queue.first("m-2", 9, NOW)] == ["q1", "q0"]


def test_requests_that_stepped_back_go_latest_first_and_within_an_octave_in_the_usual_order() -> None:
    queue = room()
    for name, since, tokens in (("old", 0.0, 100.0), ("small", 6.0, 100.0), ("large", 5.0, 400.0), ("new", 8.5, 400.0)):
        push(queue, name, now=since, tokens=tokens)
        queue.step_back(name)
    # Waited for 10, 4, 5 and 1.5 s: octaves from 8, 4, 4 and 1.
    assert [w.id for w in queue.first("m", 9, 10.0)] == ["new", "small", "large", "old"]
    push(queue, "in time", now=9.9)
    assert queue.first("m", 1, 10.0)[0].id == "in time"


def test_a_tenant_crowds_once_its_waiting_requests_reach_its_share() -> None:
    queue = room()
    assert queue.crowds("m", 0, "few", 1.0)
    for n in range(6):
        push(queue, f"many {n}", "many")
    push(queue, "few", "few")
    push(queue, "heavy 0", "heavy", weight=3.0)
    push(queue, "heavy 1", "heavy", weight=3.0)
    # Nine wait for weights of 5: 1.8 each.
    assert queue.crowds("m", 0, "many", 1.0)
    assert not queue.crowds("m", 0, "few", 1.0)
    assert not queue.crowds("m", 0, "heavy", 3.0)
    assert not queue.crowds("m", 0, "new", 1.0, more=1)
    for n in range(5):
        queue.step_back(f"many {n}")  # requests that stepped back are not counted
    assert not queue.crowds("m", 0, "heavy", 3.0)  # four for 5
    assert queue.crowds("m", 0, "few", 1.0)
    queue.remove("heavy 0", served=True)
    queue.remove("heavy 1", served=True)
    assert queue.crowds("m", 0, "few", 1.0), "where nobody has more, everybody does"
    assert queue.crowds("m", 0, "many", 1.0)
    assert queue.crowds("m", 1, "few", 1.0), "nobody of its band waits"


def test_no_tenant_fills_the_queue_alone() -> None:
    """Neither one model nor one tenant: who has most of it, by weight, makes way for who would still have less."""
    queue = room(requests_max=8)

    def come(name: str, model: str, tenant: str, weight: float = 1.0) -> str:
        gone = ""
        if not queue.fits(100.0):
            victims = queue.victims(0, 100.0, model, tenant, weight)
            if not victims:
                return name
            (gone,) = (one.id for one in victims)
            queue.remove(gone, served=False)
        push(queue, name, tenant, weight, model=model)
        return gone

    assert [come(f"a{n}", "busy", "a") for n in range(10)] == [""] * 8 + ["a8", "a9"]
    assert [come(f"q{n}", "quiet", "a") for n in range(5)] == ["a7", "a6", "a5", "a4", "q4"]
    assert [come(f"b{n}", "busy", "b", 2.0) for n in range(6)] == ["a3", "q3", "a2", "q2", "b4", "b5"]
    assert [w.id for w in queue.first("busy", 9, NOW)] == ["a0", "b0", "b1", "a1", "b2", "b3"]
    queue.remove("a0", served=True)
    push(queue, "high", "c", priority=1)
    assert queue.victims(1, 100.0, "m", "d")  # a lower band first
    assert queue.victims(-1, 100.0, "busy", "d") == []


BACK = 100


class Room(RuleBasedStateMachine):
    """A room beside the plainest model of it: a list in order of arrival."""

    @initialize()
    def begin(self) -> None:
        self.queue = room(requests_max=REQUESTS_MAX, tokens_max=TOKENS_MAX)
        self.model: dict[str, tuple[str, str, int, float]] = {}
        self.back: list[str] = []  # requests that stepped back, in this order: their bands are BACK below their own
        self.names = 0

    @rule(
        tenant=st.sampled_from("abc"),
        model=st.sampled_from("mn"),
        priority=st.integers(0, 2),
        tokens=st.sampled_from((0.0, 0.1, 100.0, 300.0, 2000.0)),
    )
    def push(self, tenant: str, model: str, priority: int, tokens: float) -> None:
        total = sum(t for *_, t in self.model.values())
        fits = not self.model or (len(self.model) < REQUESTS_MAX and total + tokens <= TOKENS_MAX)
        assert self.queue.fits(tokens) is fits
        if fits:
            self.names += 1
            push(self.queue, f"q{self.names}", tenant, 1.0, model=model, priority=priority, tokens=tokens)
            self.model[f"q{self.names}"] = (tenant, model, priority, tokens)

    @rule(n=st.integers(0, 9), served=st.booleans())
    def remove(self, n: int, served: bool) -> None:
        if self.model:
            name = list(self.model)[n % len(self.model)]
            removed = self.queue.remove(name, served=served)
            assert (removed.id, removed.tokens) == (name, self.model.pop(name)[3])
            self.back = [one for one in self.back if one != name]

    @rule(n=st.integers(0, 9))
    def step_back(self, n: int) -> None:
        if self.model:
            name = list(self.model)[n % len(self.model)]
            self.queue.step_back(name)
            if name not in self.back:
                tenant, model, priority, tokens = self.model[name]
                self.model[name] = (tenant, model, priority - BACK, tokens)
                self.back.append(name)

    def ratio(self, name: str) -> float:
        """How long it has waited, for what it is."""
        return NOW / work(self.model[name][3], 0.0)

    @invariant()
    def agrees(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.model)
        assert queue.tokens == pytest.approx(sum(t for *_, t in self.model.values()))
        assert set(queue.models()) == {m for _, m, *_ in self.model.values()}
        for model in "mn":
            here = {name: (t, p) for name, (t, m, p, _) in self.model.items() if m == model}
            order = [w.id for w in queue.first(model, 99, NOW)]
            assert sorted(order) == sorted(here)
            assert queue.waiting(model) == len(here)
            assert queue.on_time(model) == len(here.keys() - set(self.back))
            for tenant in "abc":
                rest = sum(p > 1 or (p == 1 and t == tenant) for t, p in here.values())
                assert rest <= queue.ahead(model, 1, tenant, 1.0) <= sum(p >= 1 for _, p in here.values())
            assert [w.id for w in queue.first(model, 3, NOW)] == order[:3]
            # Bands in order, and within a band each tenant's requests by their waiting time in relation to their size.
            assert [here[name][1] for name in order] == sorted((p for _, p in here.values()), reverse=True)
            for tenant in "abc":
                for priority in (*range(3), *range(-BACK, 3 - BACK)):
                    own = [name for name in order if here[name] == (tenant, priority)]
                    came = here if priority >= 0 else self.back
                    mine = [name for name in came if here.get(name) == (tenant, priority)]
                    assert own == sorted(mine, key=self.ratio, reverse=True)
        for tokens in (1.0, TOKENS_MAX / 2):
            victims = queue.victims(3, tokens)
            assert bool(victims) == bool(self.model)
            left = queue.tokens + tokens - sum(one.tokens for one in victims)
            assert not victims or left <= TOKENS_MAX
            assert len(victims) < 2 or all(left + one.tokens > TOKENS_MAX for one in victims), "no more than it takes"


TestRoom = Room.TestCase
TestRoom.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


def test_remembered_tenants_are_bounded() -> None:
    queue = room(requests_max=10)
    push(queue, "stays", "resident")
    for n in range(3000):
        push(queue, f"q{n}", f"tenant{n}")
        queue.remove(f"q{n}", served=True)
    (line,) = queue.lines.values()
    (band,) = line.bands.values()
    assert len(band.tenants) == 1
    assert len(band.finishes) <= 1024
