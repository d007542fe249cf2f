"""Room, choice and expected wait over replicas."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import replica, replicas_of

from farhop.balance.estimate.cost import prefill_work
from farhop.balance.ledger import Reservation
from farhop.balance.prefix import chain
from regional_lb.fleet.blocks import Known
from regional_lb.fleet.table import Line
from regional_lb.fleet.view import Sample
from regional_lb.scheduler.deferred import NO_DEFERRED, Deferral, Deferred
from regional_lb.scheduler.pick import (
    DEFER_S,
    EXPLORED_SHARE,
    REMEMBERED_MAX,
    expected_wait_ms,
    least,
    pick,
    prefill_wait_ms,
)
from regional_lb.scheduler.policy import Need, Predictive
from regional_lb.scheduler.policy.latency import LeastLatency
from regional_lb.scheduler.policy.predictive import BETA
from regional_lb.scheduler.policy.round_robin import RoundRobin
from regional_lb.scheduler.split import Assigned

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)
LINE = Line(requests=2, prompt_tokens=1250.0, uncached_tokens=1000.0, answer_tokens=250.0)


def sample(waiting: int, at: float = 0.0, running: int = 0) -> Sample:
    return Sample(at=at, waiting=waiting, running=running, kv_usage=0.0)


def table(*replicas, reserved=()):
    return replicas_of(*replicas, reserved=reserved).whole


def choose(*replicas, hits=None, reserved=(), seed=1):
    rows = table(*replicas, reserved=reserved)
    held = [(chain.bytes_at(depth), rows.of.at[name]) for name, depth in (hits or {}).items()]
    return pick(NEED, rows, held, Predictive(), 0.0, Random(seed))


FULL = (Reservation("r1", 0, 10), Reservation("r1", 0, 10))


def test_reason_of_a_version_is_of_low_cardinality() -> None:
    choice = choose(replica("r1"))
    assert (choice.version, choice.split) == ("", "")
    choice.version, choice.assigned = "v2", Assigned("v2", "llama v2", "rule 17")
    assert choice.split == "rule"
    choice.version = "v1"
    assert choice.split == "fallback"


def test_the_choice_has_its_candidates_and_the_full_replicas() -> None:
    choice = choose(replica("r1"), replica("r2", prefill_ms_per_token=0.3), reserved=FULL)
    assert choice.chosen.replica == "r2"
    assert [s.replica for s in choice.ranked] == ["r1", "r2"]
    assert choice.full == ("r1",)
    nobody = choose(replica("r1"), reserved=FULL)
    assert (nobody.chosen, nobody.full) == (None, ("r1",))


def test_a_picks_field_does_not_change_with_later_load() -> None:
    both = replicas_of(replica("r1"), replica("r2"))
    choice = pick(NEED, both.whole, (), Predictive(), 0.0, Random(1))
    before = choice.ranked
    both.ledger.reserve("q", Reservation("r1", 700, 700))
    both.served("r2", 1e4, 1e5, 100, (0.0, 0.0), 0.0)
    both.age(1.0)
    assert choice.ranked == before


def test_a_decision_keeps_only_the_best_of_very_many_candidates() -> None:
    many = [replica(f"r{i}", prefill_ms_per_token=1.0 + i) for i in range(3 * REMEMBERED_MAX)]
    choice = choose(*many)
    assert [s.replica for s in choice.ranked] == [f"r{i}" for i in range(REMEMBERED_MAX)]
    assert choice.chosen.replica == "r0"


def test_near_ties_go_to_the_less_loaded_and_clear_wins_do_not() -> None:
    one = [Reservation("r1", 0, 10)]
    both = (replica("r1"), replica("r2"))
    assert {choose(*both, reserved=one, seed=s).chosen.replica for s in range(20)} == {"r2"}
    assert {choose(*both, seed=s).chosen.replica for s in range(20)} == {"r1", "r2"}
    warm = {"r1": 4}  # the whole prompt of 1024 bytes
    assert {choose(*both, hits=warm, reserved=one, seed=s).chosen.replica for s in range(20)} == {"r1"}


LONG = Need(prompt_tokens=8192.0, output_tokens=100.0, bytes_per_token=4.0, chain=tuple(range(1, 41)))
ROOMY = {"slots": 8, "kv_tokens": 100_000, "prefill_tokens_max": 2_000}


def of_long(need: Need, backlog_tokens: int, *, waited_s: float = 0.0, policy=None, deferred=NO_DEFERRED):
    """Who gets a prompt that r1 holds but for 1,536 tokens, and r2 does not; r1 prefills so many of another's."""
    rows = table(replica("r1", **ROOMY), replica("r2", **ROOMY), reserved=[Reservation("r1", backlog_tokens, 4_000)])
    policy = policy or Predictive()
    policy.adopt(rows.of.names)
    hits = [(chain.bytes_at(38), rows.of.at["r1"])]
    choice = pick(need, rows, hits, policy, 0.0, Random(1), waited_s=waited_s, deferred=deferred)
    waits = "r1", pytest.approx(1_843.2, rel=0.2), 38, DEFER_S
    assert choice.deferred_to == (None if choice.chosen is not None else waits)
    return choice.chosen


def those(*waits: tuple[object, ...]) -> Deferred:
    deferred = Deferred()
    for n, wait in enumerate(waits):
        deferred.add(f"q{n}", Deferral("m", *wait))
    return deferred


def test_a_long_prompt_waits_for_its_replica_and_is_not_computed_again_elsewhere() -> None:
    # 38 blocks are 26 KiB, 6,656 tokens. Computing all takes 819 ms; waiting for 2,100 and computing the rest, 364.
    assert of_long(LONG, 2_100) is None
    assert of_long(LONG, 2_100, waited_s=DEFER_S).replica == "r2"
    assert of_long(LONG, 1_500).replica == "r1"  # there is room
    assert of_long(LONG, 9_000).replica == "r2"  # waiting for that is later than computing it
    assert of_long(LONG, 2_100, policy=RoundRobin()).replica == "r2"  # the costs are unknown
    # Whoever waits for it already goes first: there is a number of them from which it is later than computing it.
    assert of_long(LONG, 2_100, deferred=those(("r1", 2_000.0), ("r2", 9_000.0), ("gone", 9_000.0))) is None
    assert of_long(LONG, 2_100, deferred=those(("r1", 6_000.0))).replica == "r2"
    # And a smaller one if they wait for the same prefix there: a second replica that holds it saves them half of it.
    assert of_long(LONG, 2_100, deferred=those(*[("r1", 500.0)] * 5)) is None
    assert of_long(LONG, 2_100, deferred=those(*[("r1", 500.0, 37)] * 5)) is None
    assert of_long(LONG, 2_100, deferred=those(*[("r1", 500.0, 38)] * 5)).replica == "r2"
    # No request waits for a replica without room in its KV cache, or with a line, if another has room.
    full = table(
        replica("r1", **{**ROOMY, "kv_tokens": 5_000}),
        replica("r2", **ROOMY),
        reserved=[Reservation("r1", 1_500, 4_500)],
    )
    assert pick(LONG, full, [(chain.bytes_at(38), 0)], Predictive(), 0.0, Random(1)).chosen.replica == "r2"


def test_a_long_prompt_waits_as_long_as_it_would_delay_others_on_the_last_replica() -> None:
    """Not for DEFER_S alone: after that the last replica would be blocked, too, and all who come."""
    need = Need(prompt_tokens=60_000.0, output_tokens=10.0, bytes_per_token=4.0)
    sizes = {"slots": 64, "kv_tokens": 500_000, "prefill_tokens_max": 8_192}
    reserved = [Reservation("r1", 20_000, 20_000), *[Reservation("r2", 0, 300)] * 30]

    def asked(waited_s: float):
        rows = table(replica("r1", **sizes), replica("r2", **sizes), reserved=reserved)
        return pick(need, rows, (), Predictive(), 0.0, Random(1), waited_s=waited_s)

    at, *_, most_s = asked(0.0).deferred_to
    assert at == "r1"
    assert most_s > 5.0 * DEFER_S
    assert asked(0.99 * most_s).deferred_to == asked(0.0).deferred_to
    assert asked(most_s).chosen.replica == "r2"  # its own wait has cost as much
    assert asked(inf).chosen.replica == "r2"
    # It takes the last one while its deadline can be met there, for which its work and as much again must be left.
    need = replace(need, deadline=100.0)
    early_s = asked(0.0).deferred_to[-1]
    assert DEFER_S < early_s < most_s
    need = replace(need, deadline=100.0 - early_s)
    assert asked(0.0).deferred_to[-1] == DEFER_S
    assert asked(DEFER_S).chosen.replica == "r2"


def test_of_a_long_prompt_the_work_counts_not_the_tokens() -> None:
    """Both compute 10,000 tokens: one all of its prompt, the other the end of a long one. And what each score is made
    of adds up to it."""
    rows = table(*(replica(name, slots=8, kv_tokens=500_000, prefill_ms_per_token=0.1) for name in ("r1", "r2")))
    for prompt_tokens in (10_000.0, 100_000.0):
        need = Need(prompt_tokens=prompt_tokens, output_tokens=100.0, bytes_per_token=4.0)
        held = ((prompt_tokens - 10_000.0) * need.bytes_per_token, rows.of.at["r1"])
        choice = pick(need, rows, [held], Predictive(), 0.0, Random(1))
        chosen, work = choice.chosen, prefill_work(10_000.0, prompt_tokens)
        assert (chosen.uncached_tokens, chosen.work_tokens) == (10_000.0, pytest.approx(work))
        assert choice.prefill_ms == pytest.approx(0.1 * work)
        for scored in choice.ranked:
            assert sum(choice.terms()[scored.replica].values()) == pytest.approx(scored.score)
            assert choice.terms()[scored.replica]["prefill"] == pytest.approx(0.1 * scored.work_tokens)
    short = pick(NEED, rows, [], Predictive(), 0.0, Random(1)).chosen
    assert short.work_tokens == short.uncached_tokens


def test_the_expected_wait_counts_service_time_slots_and_prefill_ahead() -> None:
    one, two = (replica(name, slots=1, prefill_ms_per_token=0.1, tpot_ms=20.0) for name in ("r1", "r2"))
    assert expected_wait_ms(table(), 0, 0.0) == 0.0
    assert expected_wait_ms(table(one, two), 0, 0.0) == 0.0
    reserved = [Reservation("r1", 100, 100), Reservation("r2", 100, 100)]
    # 256 tokens of 20 ms: each is done after 5.12 s, one of two every 2.56 s.
    assert expected_wait_ms(table(one, two, reserved=reserved), 0, 0.0) == pytest.approx(2560.0)
    assert expected_wait_ms(table(one, two, reserved=reserved), 3, 0.0) == pytest.approx(10240.0)
    roomy = replica("r1", slots=9, prefill_ms_per_token=0.1)
    assert expected_wait_ms(table(roomy, reserved=reserved[:1]), 0, 0.0) == pytest.approx(10.0)  # 100 tokens ahead


def test_during_a_long_prefill_no_request_is_expected_to_begin_however_many_leave() -> None:
    busy = [Reservation("r1", 0, 100) for _ in range(99)] + [Reservation("r1", 100_000, 100_000)]
    one, two = (replica(name, slots=200, prefill_ms_per_token=0.1, tpot_ms=20.0) for name in ("r1", "r2"))
    assert expected_wait_ms(table(one, reserved=busy), 0, 0.0) == pytest.approx(10_000.0)
    assert expected_wait_ms(table(one, two, reserved=busy), 0, 0.0) == 0.0


def test_with_free_slots_a_request_waits_for_the_prefills_before_it_not_for_answers_to_end() -> None:
    one, two = (replica(name, slots=9, prefill_ms_per_token=0.1, tpot_ms=20.0) for name in ("r1", "r2"))
    reserved = [Reservation("r1", 4000, 100), Reservation("r2", 3000, 100)]
    rows = table(one, two, reserved=reserved)
    assert expected_wait_ms(rows, 2, 0.0) == pytest.approx(7680.0)  # two are under way: one leaves every 2.56 s
    # The two that are queued have 1,000 tokens each to compute, half of them at each replica.
    assert prefill_wait_ms(rows, NEED, 2, 0.0, LINE) == pytest.approx(300.0 + 100.0)
    assert prefill_wait_ms(rows, NEED, 0, 0.0) == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("slots", "kv_tokens", "queued"),
    [(1, 100_000, 0), (3, 100_000, 2), (9, 4300, 0), (9, 7000, 2)],
    ids=["no slot", "no slot behind those queued", "no KV cache", "no KV cache behind those queued"],
)
def test_without_room_for_all_of_them_a_request_waits_for_more_than_prefills(slots, kv_tokens, queued) -> None:
    one = replica("r1", slots=slots, kv_tokens=kv_tokens)
    rows = table(one, reserved=[Reservation("r1", 4000, 4100)])
    assert prefill_wait_ms(rows, NEED, queued, 0.0, LINE) == inf
    assert prefill_wait_ms(table(), NEED, 0, 0.0) == inf


def test_requests_of_others_at_an_engine_count_for_its_wait() -> None:
    theirs = replica("r1", sample=sample(waiting=7, running=4), tpot_ms=20.0)
    # Eight, itself included, go first, four run: one leaves every 1.28 s.
    assert expected_wait_ms(table(theirs), 0, 0.0) == pytest.approx(8 * 1280.0)


def test_a_delay_is_part_of_the_score_and_shown() -> None:
    both = table(replica("r1"), replica("r2"))
    delay = np.array([50.0, 0.0])
    choice = pick(NEED, both, (), Predictive(), 0.0, Random(1), Known({"r2": 0.0}, {}), delay)
    assert {s.replica: (s.delay_ms, s.exact) for s in choice.ranked} == {"r1": (50.0, False), "r2": (0.0, True)}
    best, other = choice.ranked
    assert (best.replica, other.score - best.score) == ("r2", pytest.approx(50.0))
    many = table(*(replica(f"r{i:03}") for i in range(2 * REMEMBERED_MAX)))
    delays = np.arange(2.0 * REMEMBERED_MAX)
    short = pick(NEED, many, (), Predictive(), 0.0, Random(1), delay_ms=delays)
    assert [s.delay_ms for s in short.ranked][:REMEMBERED_MAX] == delays[:REMEMBERED_MAX].tolist()


@given(st.integers(9, 400), st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_least_scores_are_those_that_sorting_gives(count: int, seed: int, most: int, kinds: int) -> None:
    scores = Random(seed).choices(
        [2.0, 1.0, np.inf, 1.5, 0.0, 7.0][:kinds], weights=[20, 2, 20, 1, 1, 9][:kinds], k=count
    )
    column = np.array(scores)
    rows = least(column, most)
    assert len(set(rows.tolist())) == most
    assert sorted(column[rows]) == sorted(scores)[:most]


# -- what a score is made of


def test_the_terms_of_a_score_in_ms_add_up_to_it() -> None:
    reserved = [Reservation("r1", 700, 700), Reservation("r3", 0, 300), Reservation("r3", 50, 300)]
    rows = table(replica("r1", slots=8), replica("r2", tpot_ms=30.0), replica("r3", slots=8), reserved=reserved)
    choice = pick(NEED, rows, ((512.0, 2),), Predictive(), 0.0, Random(1), delay_ms=np.array([0.0, 200.0, 0.0]))
    terms = choice.terms()
    token_ms = (rows.tpot_ms + rows.batch_interference_ms * rows.in_flight).tolist()
    for scored in choice.ranked:
        place = rows.of.at[scored.replica]
        assert sum(terms[scored.replica].values()) == pytest.approx(scored.score)
        assert terms[scored.replica]["decode"] == pytest.approx(
            BETA * NEED.output_tokens * (rows.tpot_ms.item(place) - min(token_ms))
        )
    assert terms["r1"]["backlog"] == pytest.approx(70.0)
    assert terms["r2"]["adapter"] == 200.0
    assert terms["r3"]["interference"] > terms["r1"]["interference"] > terms["r2"]["interference"] == 0.0
    assert terms["r3"]["stall"] == 0.0 < terms["r1"]["stall"]


def test_only_scores_in_milliseconds_have_terms() -> None:
    rows = table(replica("r1", slots=8), replica("r2"), reserved=[Reservation("r1", 0, 10)])
    assert pick(NEED, rows, (), turns_of(rows), 0.0, Random(1)).terms() == {}
    peaks = LeastLatency()
    peaks.adopt(rows.of.names)
    choice = pick(NEED, rows, (), peaks, 0.0, Random(1))
    for scored in choice.ranked:
        assert sum(choice.terms()[scored.replica].values()) == pytest.approx(scored.score)
    assert choice.terms()["r1"]["others"] == pytest.approx(choice.terms()["r1"]["first byte"])


def turns_of(rows) -> RoundRobin:
    policy = RoundRobin()
    policy.adopt(rows.of.names)
    return policy


# -- who is uncertain


def uncertain(
    times: int = 1000, uncertainty=(0.1, 0.5, 0.5), deadline: float = inf, **fields
) -> list[tuple[str, bool]]:
    """Whom picks choose of three, of whom the second is thought to be slower and the third was never near."""
    rows = table(replica("r1", slots=64), replica("r2", slots=64, tpot_ms=fields.pop("tpot_ms", 24.0)),
                 replica("r3", slots=64, tpot_ms=200.0))  # fmt: skip
    rows.uncertainty[:] = uncertainty
    dice, need = Random(3), replace(NEED, deadline=deadline)
    found = [pick(need, rows, fields.get("hits", ()), Predictive(), 0.0, dice) for _ in range(times)]
    return [(choice.chosen.replica, choice.explored) for choice in found]


def test_uncertain_replicas_that_may_be_as_good_get_a_stated_share() -> None:
    found = uncertain()
    explored = [name for name, explored in found if explored]
    assert set(explored) == {"r2"}
    assert 0.03 < len(explored) / len(found) < 0.07 == EXPLORED_SHARE + 0.02
    assert {name for name, explored in found if not explored} == {"r1"}


def test_only_a_less_known_replica_that_could_be_as_good_is_explored() -> None:
    assert not any(explored for _, explored in uncertain(uncertainty=(0.5, 0.5, 0.5)))
    assert not any(explored for _, explored in uncertain(tpot_ms=60.0))


def test_a_cached_prefix_is_not_left_to_explore() -> None:
    assert not any(explored for _, explored in uncertain(hits=((2048.0, 0),)))


def test_a_deadline_is_not_left_to_doubt() -> None:
    """2.4 s on the doubtful one, twice as long at the most; 2 s on the known one, a fifth more at the most."""
    assert any(explored for _, explored in uncertain(deadline=5.2))
    assert {name for name, _ in uncertain(deadline=3.0)} == {"r1"}
    # Even if it would be slightly better.
    assert {name for name, _ in uncertain(deadline=3.0, tpot_ms=19.0)} == {"r1"}
    assert {name for name, _ in uncertain(deadline=5.2, tpot_ms=19.0)} == {"r2"}


def test_a_session_breaks_near_ties_and_nothing_else() -> None:
    """Among equals it stays, however often; against a score that is clearly better it never does."""
    equals = table(*(replica(f"r{i}") for i in range(5)))
    for seed in range(50):
        assert pick(NEED, equals, (), Predictive(), 0.0, Random(seed), home="r3").chosen.replica == "r3"
    slower = table(replica("r1"), replica("r2", prefill_ms_per_token=0.2))
    for seed in range(50):
        assert pick(NEED, slower, (), Predictive(), 0.0, Random(seed), home="r2").chosen.replica == "r1"
    full = table(replica("r1"), replica("r2"), reserved=FULL)
    assert pick(NEED, full, (), Predictive(), 0.0, Random(1), home="r1").chosen.replica == "r2"
    assert pick(NEED, equals, (), Predictive(), 0.0, Random(1), home="gone").chosen is not None
    rounds = RoundRobin()
    assert {pick(NEED, equals, (), rounds, 0.0, Random(s), home="r3").chosen.replica for s in range(9)} == {"r0"}
