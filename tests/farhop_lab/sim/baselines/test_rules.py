from __future__ import annotations

import pytest

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.router import EnginesSeen, RouterState, Sample, Target
from farhop_lab.sim.baselines.rules import (
    AllEngines,
    CacheAware,
    LeastLoad,
    LlmD,
    NearestFirst,
    RoundRobin,
    Saturation,
    WholePool,
    all_pending,
    by_distance,
    utilised,
)

NAMES = ["us/0", "us/1", "us/2"]


def ask(text: bytes = b"") -> Request:
    return Request("r", "t", "m", len(text), len(text), (), 100.0, tokens=Tokens(text))


def state() -> RouterState:
    return RouterState("us", [Target(name, "us") for name in NAMES], {"us": 1.0})


def saw(seen: RouterState, at: float, **samples: tuple[int, float]) -> None:
    for name, (waiting, usage) in samples.items():
        seen.seen[name.replace("_", "/")] = Sample(waiting, 1, usage), at


def test_round_robin_takes_the_next_that_may_be_asked() -> None:
    picker, seen, order = RoundRobin(), state(), []
    for among in (NAMES, NAMES, NAMES, NAMES, ["us/0", "us/2"], NAMES, ["us/1"], ["us/1"]):
        target = picker.choose(ask(), among, seen, 0.0)
        picker.sent(ask(), target, seen, 0.0)
        order.append(target[-1])
    assert "".join(order) == "01202011"


def test_least_load_takes_the_fewest_in_flight_and_the_first_of_equals() -> None:
    picker, seen = LeastLoad(), state()
    assert picker.choose(ask(), NAMES, seen, 0.0) == "us/0"
    seen.in_flight.update({"us/0": 2, "us/1": 1, "us/2": 1})
    assert picker.choose(ask(), NAMES, seen, 0.0) == "us/1"
    assert picker.choose(ask(), ["us/0"], seen, 0.0) == "us/0"


def test_sglang_follows_a_match_of_more_than_its_threshold_and_else_the_smallest_tree() -> None:
    picker, seen = CacheAware(), state()
    assert picker.choose(ask(b"a" * 100), NAMES, seen, 0.0) == "us/0", "all trees are empty"
    picker.sent(ask(b"a" * 100), "us/1", seen, 0.0)
    picker.sent(ask(b"b" * 50), "us/0", seen, 0.0)
    assert picker.choose(ask(b"a" * 31 + b"c" * 69), NAMES, seen, 0.0) == "us/1"
    assert picker.choose(ask(b"a" * 30 + b"c" * 70), NAMES, seen, 0.0) == "us/2", "30 % is not more than 30 %"
    picker.sent(ask(b"d" * 99), "us/2", seen, 0.0)
    assert picker.choose(ask(b"a" * 30 + b"c" * 70), NAMES, seen, 0.0) == "us/0"


@pytest.mark.parametrize(
    ("loads", "balanced"),
    [((64, 0, 0), True), ((65, 0, 0), False), ((195, 130, 130), True), ((196, 130, 130), False)],
)
def test_sglang_rule_uses_load_if_both_thresholds_are_exceeded(loads: tuple[int, ...], balanced: bool) -> None:
    # (195, 130): apart by 65 > 64, but 195 is not more than 1.5 x 130.
    picker, seen = CacheAware(), state()
    picker.sent(ask(b"a" * 100), "us/0", seen, 0.0)
    seen.in_flight.update(dict(zip(NAMES, loads, strict=True)))
    assert picker.choose(ask(b"a" * 100), NAMES, seen, 0.0) == ("us/0" if balanced else "us/1")


def test_llm_d_adds_up_queue_kv_and_prefix() -> None:
    picker, seen = LlmD(), state()
    saw(seen, 0.0, us_0=(4, 0.5), us_1=(1, 0.9), us_2=(0, 1.0))
    picker.sent(ask(b"a" * 60), "us/0", seen, 0.0)
    scores = picker.scores(ask(b"a" * 60 + b"b" * 40), NAMES, seen)
    assert scores == pytest.approx(
        {
            "us/0": 2 * 0.0 + 2 * 0.5 + 3 * 0.6,
            "us/1": 2 * 0.75 + 2 * 0.1 + 3 * 0.0,
            "us/2": 2 * 1.0 + 2 * 0.0 + 3 * 0.0,
        }
    )
    assert picker.choose(ask(b"a" * 60 + b"b" * 40), NAMES, seen, 0.0) == "us/0"
    assert picker.choose(ask(b"b" * 100), NAMES, seen, 0.0) == "us/2"


def test_llm_d_gives_all_queues_the_same_where_none_differs() -> None:
    picker, seen = LlmD(), state()
    saw(seen, 0.0, us_0=(3, 0.0), us_1=(3, 0.5), us_2=(3, 0.0))
    assert picker.scores(ask(b"x"), NAMES, seen) == {"us/0": 4.0, "us/1": 3.0, "us/2": 4.0}


def test_llm_d_is_saturated_by_queues_by_memory_and_by_old_metrics() -> None:
    full, seen = Saturation(), state()
    assert full(NAMES, seen, 0.0), "nothing is known of any"
    saw(seen, 10.0, us_0=(5, 0.0), us_1=(0, 0.8), us_2=(0, 0.4))
    assert [full.of(name, seen, 10.2) for name in NAMES] == pytest.approx([1.0, 1.0, 0.5])
    assert not full(NAMES, seen, 10.2)
    assert full(["us/0", "us/1"], seen, 10.2)
    assert full.of("us/2", seen, 10.21) == 1.0, "older than 200 ms"
    assert full(NAMES, seen, 10.21)
    saw(seen, 11.0, us_0=(10, 0.0), us_1=(0, 0.0), us_2=(5, 0.0))
    assert full(NAMES, seen, 11.0), "2 + 0 + 1 over three"


ASK = Request("r", "t", "m", 0, 0, (), 100.0)
US, EU, ASIA = ["us/0", "us/1"], ["eu/0", "eu/1"], ["asia/0", "asia/1"]


def regions_state() -> RouterState:
    targets = [Target(name, name.partition("/")[0]) for name in (*ASIA, *US, *EU)]
    return RouterState("us", targets, {"us": 5.0, "eu": 91.0, "asia": 166.0})


def saw_region(
    seen: RouterState, region: str, waiting: tuple[int, int], usage: tuple[float, float] = (0.0, 0.0)
) -> None:
    samples = {f"{region}/{n}": Sample(waiting[n], 1, usage[n]) for n in range(2)}
    seen.on_engines(EnginesSeen(region, samples), 0.0)


def gone(seen: RouterState, *regions: str) -> None:
    for region in regions:
        seen.on_engines(EnginesSeen(region, None), 0.0)


def test_regions_are_tried_from_home_outwards() -> None:
    seen = regions_state()
    assert list(by_distance(seen)) == [US, EU, ASIA]
    seen.rtt_ms["eu"] = 2.0
    assert list(by_distance(seen)) == [US, EU, ASIA], "home, however near the next"
    seen.rtt_ms["eu"] = 200.0
    gone(seen, "us")
    assert list(by_distance(seen)) == [ASIA, EU]


def test_all_engines_are_candidates_except_those_known_to_be_down() -> None:
    seen = regions_state()
    gone(seen, "eu")
    assert AllEngines().candidates(ASK, seen, 0.0) == [*ASIA, *US]
    gone(seen, "us", "asia")
    assert AllEngines().candidates(ASK, seen, 0.0) == [*ASIA, *US, *EU], "it goes out and fails"


def test_work_spills_while_requests_wait_at_every_engine_of_its_region() -> None:
    eligibility, seen = NearestFirst(all_pending), regions_state()
    saw_region(seen, "us", (1, 0))
    assert eligibility.candidates(ASK, seen, 0.0) == US
    saw_region(seen, "us", (1, 1))
    assert eligibility.candidates(ASK, seen, 0.0) == EU
    saw_region(seen, "eu", (2, 3))
    assert eligibility.candidates(ASK, seen, 0.0) == ASIA
    saw_region(seen, "asia", (1, 1))
    assert eligibility.candidates(ASK, seen, 0.0) == US, "everybody is full: home"
    assert NearestFirst(all_pending, hold=True).candidates(ASK, seen, 0.0) == ()
    gone(seen, "us", "eu", "asia")
    assert NearestFirst(all_pending, hold=True).candidates(ASK, seen, 0.0) == seen.engines


def test_a_waterfall_flows_over_at_four_fifths_of_the_memory() -> None:
    eligibility, seen = NearestFirst(utilised), regions_state()
    saw_region(seen, "us", (9, 9), (1.0, 0.59))
    assert eligibility.candidates(ASK, seen, 0.0) == US, "who waits does not count"
    saw_region(seen, "us", (0, 0), (1.0, 0.6))
    assert eligibility.candidates(ASK, seen, 0.0) == EU
    saw_region(seen, "eu", (0, 0), (0.9, 0.9))
    saw_region(seen, "asia", (0, 0), (0.9, 0.9))
    assert eligibility.candidates(ASK, seen, 0.0) == US


def test_a_pool_has_all_engines_or_none_if_all_regions_are_full() -> None:
    seen = regions_state()
    saw_region(seen, "us", (1, 1))
    assert WholePool(all_pending).candidates(ASK, seen, 0.0) == seen.engines
    saw_region(seen, "eu", (1, 1))
    saw_region(seen, "asia", (1, 1))
    assert WholePool(all_pending).candidates(ASK, seen, 0.0) == ()
