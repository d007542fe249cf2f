"""The choice among candidates: near ties, penalties, reasons, and that it is spelled out as it was."""

from __future__ import annotations

from copy import copy
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from worlds import candidates, law, request

from farhop.balance.machine import Request
from global_lb.routing.pick import Decision, pick
from global_lb.routing.policy import Bias, OperatorOverrides, Route, RouteConfig

FAR = {"rtt_ms": 400.0}


def choose(value, seed: int = 1, route: RouteConfig | None = None, **more: Any) -> Decision:
    verdict = law().request_verdict(request("a"))
    return pick(copy(value), verdict, Route(route or RouteConfig()), Random(seed), 0.0, "london", **more)


def drawn(times: int = 400, **regions) -> list[str]:
    return [choose(candidates(request("a"), **regions), seed).chosen.region for seed in range(times)]


def test_a_decision_lists_its_candidates_and_why_others_are_absent() -> None:
    found = candidates(request("a"), london={}, frankfurt={}, tokyo={})
    found.absent = {"mars": "down"}
    decision = choose(found)
    assert decision.chosen.region == "london"
    assert [s.region for s in decision.ranked] == ["london", "frankfurt", "tokyo"]
    assert (decision.verdict.epoch, decision.absent, decision.foreign) == (1, {"mars": "down"}, False)
    assert [s.region for s in decision.scored[1:]] == ["london", "tokyo"]
    nothing = choose(candidates(request("a")))
    assert (nothing.chosen, nothing.ranked) == (None, ())


def test_near_ties_are_drawn_by_free_slots_and_clear_wins_are_not() -> None:
    assert set(drawn(30, london={"slots_free": 0}, frankfurt={"slots_free": 8, "rtt_ms": 1.5})) == {"frankfurt"}
    some = drawn(london={"slots_free": 2, "used_share": 0.6}, frankfurt={"slots_free": 6, "rtt_ms": 1.5})
    assert 0.6 < some.count("frankfurt") / 400 < 0.9
    assert set(drawn(30, london={"slots_free": 1}, frankfurt={"slots_free": 99})) == {"london"}  # 11 ms


def test_no_request_leaves_an_idle_local_region() -> None:
    assert set(drawn(50, london={"slots_free": 2}, frankfurt={"slots_free": 60, "rtt_ms": 1.5})) == {"london"}


def test_the_doubt_of_a_moving_region_makes_ties() -> None:
    still = {"london": {"used_share": 0.9}, "frankfurt": {}}
    assert set(drawn(50, **still)) == {"london"}
    moving = {"london": {"used_share": 0.9, "rates": (-1.0, 30.0, 0.0)}, "frankfurt": {}}
    assert set(drawn(50, **moving)) == {"london", "frankfurt"}
    found = choose(candidates(request("a"), **moving)).ties
    assert found == {"frankfurt": 0.0, "london": 30.0}


def test_a_penalty_moves_what_others_can_take_and_is_shown() -> None:
    found = candidates(request("a"), london={}, frankfurt={}, tokyo=FAR)
    found.penalty_ms = np.array([300.0 if name == "london" else 0.0 for name in found.names])
    decision = choose(found)
    assert (decision.chosen.region, decision.spilled_from) == ("frankfurt", "london")
    far = candidates(request("a"), london={}, tokyo=FAR)
    far.penalty_ms = np.array([300.0, 0.0])
    assert (choose(far).chosen.region, choose(far).spilled_from) == ("london", None)


def test_among_ties_a_region_that_is_not_hot_is_chosen() -> None:
    found = candidates(request("a"), london={"used_share": 0.9}, frankfurt={"rtt_ms": 1.0})
    found.penalty_ms = np.array([0.5, 0.0])
    assert {choose(found, seed).chosen.region for seed in range(20)} == {"london"}


def test_policies_not_scored_in_milliseconds_try_hot_regions_last() -> None:
    found = candidates(request("a"), london={}, tokyo=FAR)
    found.penalty_ms = np.array([300.0, 0.0])
    route = RouteConfig(policy="failover", regions=("london", "tokyo"))
    assert (choose(found, route=route).chosen.region, choose(found, route=route).spilled_from) == ("tokyo", "london")
    found.penalty_ms = np.array([300.0, 300.0])
    assert choose(found, route=route).chosen.region == "london"  # all are hot


def test_a_decision_that_is_remembered_holds_no_request() -> None:
    found = candidates(request("a", 4096, prefix="secret"), london={})
    assert found.request.chain
    assert choose(found).candidates.request == Request("", "", "", 0, 0, (), 0.0)


def test_decision_has_the_figures_it_was_made_by() -> None:
    found = candidates(request("a"), london={}, tokyo={})
    decision = choose(found, overrides=OperatorOverrides({"tokyo": Bias("tokyo", -1000.0, "why", "ann", 9.0)}))
    assert decision.chosen.region == "tokyo"
    assert (decision.chosen.bias_ms, decision.foreign) == (-1000.0, True)
    assert decision.notes == ("bias in ms: tokyo -1000",)
    assert decision.ranked[0] == decision.chosen


@pytest.mark.parametrize("policy", ["predictive", "nearest"])
def test_the_terms_of_a_score_in_ms_add_up_to_it(policy: str) -> None:
    busy = {"slots_free": 1, "slots_total": 16, "batch_interference_ms": 0.5, "rates": (-1.0, 30.0, 0.0)}
    found = candidates(
        request("a", 200_000), 100.0, london=busy, frankfurt={"tpot_ms": 40.0, "usd_per_gpu_hour": 9.0}, tokyo=FAR
    )  # fmt: skip
    found.penalty_ms = np.array([0.0, 300.0, 0.0])
    decision = choose(found, route=RouteConfig(policy=policy, bias_ms={"tokyo": -20.0}, usd_weight_ms=5000.0))
    terms = decision.terms()
    for scored in decision.ranked:
        assert sum(terms[scored.region].values()) == pytest.approx(scored.score, rel=1e-6)
    assert any(one["penalty"] for one in terms.values())
    assert any(one["bias"] for one in terms.values())
    assert any(one["price"] for one in terms.values())
    assert choose(candidates(request("a"), london={}), route=RouteConfig(policy="least-load")).terms() == {}
    assert choose(candidates(request("a"))).terms() == {}


# -- what brings requests elsewhere is brought here

CALM: dict[str, Any] = {"wait_ms": 0.0}
LONG = request("a", 40_000, prefix="shared")
CHAIN = len(LONG.chain)


def shared(**regions: dict[str, Any]) -> Any:
    """Tokyo, 150 ms away, holds all of a prompt of 10,000 tokens; here its prefill takes a second."""
    places = {"london": {}, "tokyo": {"rtt_ms": 150.0, "depth": CHAIN}} | regions
    return candidates(LONG, **{name: CALM | given for name, given in places.items()})


def share_here(found: Any, times: int = 2000, **more: Any) -> float:
    return [choose(found, seed, **more).chosen.region for seed in range(times)].count("london") / times


def test_a_prefix_that_brings_requests_elsewhere_is_brought_here_as_often_as_the_way_is_worth_its_prefill() -> None:
    found = shared()
    fill_ms = found.fill_ms(found.at["london"], found.at["tokyo"])
    assert 800.0 < fill_ms < 1100.0  # the part that its checkpoints cover
    assert share_here(found) == pytest.approx(150.0 / fill_ms, abs=0.03)
    notes = {choose(found, seed).notes for seed in range(50)}
    assert notes == {(), ("london is to hold what tokyo holds of it, too",)}


@pytest.mark.parametrize(
    ("regions", "route"),
    [
        ({"london": {"wait_ms": 400.0}}, None),  # it would wait, and so would all requests behind it
        ({"london": {"wait_ms": 20.0, "depth": CHAIN}, "tokyo": {"rtt_ms": 10.0, "depth": CHAIN}}, None),
        ({"london": {"tpot_ms": 60.0}}, None),  # its decoding is slower by more than the distance
        ({"london": {"depth": CHAIN, "tpot_ms": 60.0}}, None),  # it has as much cached: that is not the reason
        ({"tokyo": {"rtt_ms": 150.0}, "london": {"tpot_ms": 60.0}}, None),  # no region has it cached
        ({}, RouteConfig(policy="failover", regions=("tokyo",))),
        ({}, RouteConfig(bias_ms={"london": 400.0})),  # an operator wants it elsewhere
    ],
)
def test_no_prefix_is_brought_home_if_something_else_favours_the_other_region(
    regions: Any, route: RouteConfig | None
) -> None:
    assert share_here(shared(**regions), 100, route=route) == 0.0


def test_no_prefix_is_brought_home_to_a_hot_or_absent_region() -> None:
    found = shared()
    found.penalty_ms = np.array([300.0 if name == "london" else 0.0 for name in found.names])
    assert share_here(found, 100) == 0.0
    elsewhere = candidates(LONG, frankfurt=CALM | {"rtt_ms": 90.0}, tokyo=CALM | {"rtt_ms": 150.0, "depth": CHAIN})
    assert {choose(elsewhere, seed).chosen.region for seed in range(100)} == {"tokyo"}


def test_an_agent_stays_where_its_session_is() -> None:
    places = {"london": CALM, "tokyo": CALM | {"rtt_ms": 150.0, "depth": CHAIN}}
    assert share_here(candidates(msgspec.structs.replace(LONG, tools=True), **places), 100) == 0.0


@pytest.mark.parametrize("like_it", [1, 3, 7, 20, 100])
def test_bringing_a_prefix_home_costs_at_most_twice_the_optimum(like_it: int) -> None:
    found, away = shared(), 0
    fill_ms = found.fill_ms(found.at["london"], found.at["tokyo"])
    brought = 0
    for world in range(300):
        for one in range(like_it):
            if choose(found, world * 1000 + one).chosen.region == "london":
                brought += 1
                break
            away += 1
    paid_ms = (150.0 * away + fill_ms * brought) / 300
    assert paid_ms < 2.0 * min(150.0 * like_it, fill_ms) * 1.1
