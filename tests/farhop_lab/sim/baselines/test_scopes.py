from __future__ import annotations

from farhop.balance.machine import Request
from farhop_lab.sim.baselines.scopes import Everybody, NearestFirst, WholePool, all_pending, by_distance, utilised
from farhop_lab.sim.baselines.words import Board, EnginesSeen, Sample, Target

ASK = Request("r", "t", "m", 0, 0, (), 100.0)
US, EU, ASIA = ["us/0", "us/1"], ["eu/0", "eu/1"], ["asia/0", "asia/1"]


def board() -> Board:
    targets = [Target(name, name.partition("/")[0]) for name in (*ASIA, *US, *EU)]
    return Board("us", targets, {"us": 5.0, "eu": 91.0, "asia": 166.0})


def saw(seen: Board, region: str, waiting: tuple[int, int], usage: tuple[float, float] = (0.0, 0.0)) -> None:
    samples = {f"{region}/{n}": Sample(waiting[n], 1, usage[n]) for n in range(2)}
    seen.hear_engines(EnginesSeen(region, samples), 0.0)


def gone(seen: Board, *regions: str) -> None:
    for region in regions:
        seen.hear_engines(EnginesSeen(region, None), 0.0)


def test_regions_are_tried_from_home_outwards() -> None:
    seen = board()
    assert list(by_distance(seen)) == [US, EU, ASIA]
    seen.rtt_ms["eu"] = 2.0
    assert list(by_distance(seen)) == [US, EU, ASIA], "home, however near the next"
    seen.rtt_ms["eu"] = 200.0
    gone(seen, "us")
    assert list(by_distance(seen)) == [ASIA, EU]


def test_everybody_is_who_is_not_known_to_be_gone() -> None:
    seen = board()
    gone(seen, "eu")
    assert Everybody().candidates(ASK, seen, 0.0) == [*ASIA, *US]
    gone(seen, "us", "asia")
    assert Everybody().candidates(ASK, seen, 0.0) == [*ASIA, *US, *EU], "it goes out and fails"


def test_work_spills_while_requests_wait_at_every_engine_of_its_region() -> None:
    scope, seen = NearestFirst(all_pending), board()
    saw(seen, "us", (1, 0))
    assert scope.candidates(ASK, seen, 0.0) == US
    saw(seen, "us", (1, 1))
    assert scope.candidates(ASK, seen, 0.0) == EU
    saw(seen, "eu", (2, 3))
    assert scope.candidates(ASK, seen, 0.0) == ASIA
    saw(seen, "asia", (1, 1))
    assert scope.candidates(ASK, seen, 0.0) == US, "everybody is full: home"
    assert NearestFirst(all_pending, hold=True).candidates(ASK, seen, 0.0) == ()
    gone(seen, "us", "eu", "asia")
    assert NearestFirst(all_pending, hold=True).candidates(ASK, seen, 0.0) == seen.engines


def test_a_waterfall_flows_over_at_four_fifths_of_the_memory() -> None:
    scope, seen = NearestFirst(utilised), board()
    saw(seen, "us", (9, 9), (1.0, 0.59))
    assert scope.candidates(ASK, seen, 0.0) == US, "who waits does not count"
    saw(seen, "us", (0, 0), (1.0, 0.6))
    assert scope.candidates(ASK, seen, 0.0) == EU
    saw(seen, "eu", (0, 0), (0.9, 0.9))
    saw(seen, "asia", (0, 0), (0.9, 0.9))
    assert scope.candidates(ASK, seen, 0.0) == US


def test_a_pool_is_all_or_nothing() -> None:
    seen = board()
    saw(seen, "us", (1, 1))
    assert WholePool(all_pending).candidates(ASK, seen, 0.0) == seen.engines
    saw(seen, "eu", (1, 1))
    saw(seen, "asia", (1, 1))
    assert WholePool(all_pending).candidates(ASK, seen, 0.0) == ()
