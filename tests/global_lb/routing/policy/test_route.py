"""Invariants of every policy with any modifiers, in one suite. And which route applies to a request."""

from __future__ import annotations

from copy import copy
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import REGIONS, candidates, law, request, worldwide

from farhop.balance.machine import AttemptBegan, AttemptEnded, Forward, RequestArrived, Usage
from global_lb.fleet.view import RegionForced
from global_lb.routing.pick import pick
from global_lb.routing.policy import (
    KNOWN,
    Bias,
    OperatorOverrides,
    OverridesChanged,
    Pin,
    Route,
    RouteConfig,
)
from global_lb.routing.policy.route import OPTIONS, routes_of
from global_lb.routing.routes import Routes, RoutesChanged

NAMES = sorted(KNOWN)
ORDER = ("tokyo", "frankfurt", "london")


def route(name: str, **modifiers: Any) -> RouteConfig:
    return RouteConfig(policy=name, **({"regions": ORDER} if name == "failover" else {}), **modifiers)


def world(size: int, **more: Any) -> dict[str, dict[str, Any]]:
    return {f"r{n:02}": {"rtt_ms": 1.0 + 10.0 * n, "slots_total": 20, **more} for n in range(size)}


def choose(value, chosen: Route, rng: Random | None = None, **more: Any):
    return pick(copy(value), law().request_verdict(value.request), chosen, rng or Random(1), 0.0, **more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 12, 60])
def test_every_policy_works_with_any_number_of_regions_and_names_itself(name: str, size: int) -> None:
    chosen, rng = Route(route(name)), Random(1)
    for n in range(10):
        decision = choose(candidates(request(f"q{n}", session=n + 1), 100.0, "r00", **world(size)), chosen, rng)
        assert decision.chosen is not None
        assert decision.route.policy.name == name
        assert len(decision.ranked) == size
        assert decision.chosen in decision.ranked


modifiers = st.fixed_dictionaries({}, optional={
    "bias_ms": st.dictionaries(st.sampled_from([*REGIONS, "mars"]), st.floats(-5000, 5000), max_size=3),
    "foreign_quota": st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    "affinity_ms": st.sampled_from([0.0, 50.0, 60_000.0]),
    "canary": st.dictionaries(st.sampled_from([*REGIONS, "mars"]), st.floats(0, 0.3), max_size=3),
    "canary_by": st.sampled_from(["session", "tenant"]),
    "egress_usd_per_hour": st.sampled_from([0.0, 1.0]),
    "usd_weight_ms": st.sampled_from([0.0, 1e6]),
})  # fmt: skip
words = st.builds(
    lambda to, strict, whom, ms: OperatorOverrides({to: Bias(to, ms, "w", "a", 9.0)}, {whom: Pin(to, strict, "w", "a",
    9.0)}), st.sampled_from([*REGIONS, "mars"]), st.booleans(),
    st.sampled_from([("tenant", "german"), ("tenant", "anyone"), ("model", "llama")]), st.floats(-5000, 5000),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(modified=modifiers, overrides=st.none() | words, seed=st.integers(0, 9), drained=st.sampled_from(["", *REGIONS]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_no_policy_or_modifier_chooses_an_unlawful_or_drained_region(
    name: str, modified: dict[str, Any], overrides: OperatorOverrides | None, seed: int, drained: str
) -> None:
    under = law()
    flow = worldwide(under=under, seed=seed)
    flow.handle(RoutesChanged({("", ""): route(name, **modified)}), 0.0)
    if overrides is not None:
        flow.handle(OverridesChanged(overrides), 0.0)
    if drained:
        flow.handle(RegionForced(drained, True, "why", 60.0), 0.0)
    for n, tenant in enumerate(["anyone", "european", "german", "lost"] * 4):
        asked = request(f"q{n}", tenant=tenant, session=n % 3)
        lawful = under.verdict(tenant, "llama").lawful
        for command in flow.handle(RequestArrived(asked), 0.1):
            if isinstance(command, Forward):
                assert command.target in lawful - {drained}
                assert command.lawful is not None
                assert command.lawful <= lawful
                flow.handle(AttemptBegan(asked.id, 1, 200), 0.2)
                flow.handle(AttemptEnded(asked.id, 1, 200, Usage(256, 10)), 0.3)
    assert flow.under_way == 0


@pytest.mark.parametrize("name", NAMES)
def test_consider_changes_no_state_of_a_route(name: str) -> None:
    flow = worldwide(routes=Routes({("", ""): route(name, foreign_quota=0.5, canary={"tokyo": 0.2}, affinity_ms=9.0)}))
    asked = [request(f"q{n}", session=n) for n in range(20)]
    before = [flow.consider(one, 0.1).chosen.region for one in asked]
    assert [flow.consider(one, 0.1).chosen.region for one in asked] == before
    assert len(flow.routes.affinity) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_hot_region_is_left_for_another(name: str) -> None:
    found = candidates(request("a", session=4), 100.0, "r00", **world(3))
    first = choose(found, Route(route(name))).chosen.region
    found = candidates(request("a", session=4), 100.0, "r00", **world(3))
    found.penalty_ms = np.array([300.0 if one == first else 0.0 for one in found.names])
    decision = choose(found, Route(route(name)))
    assert (decision.chosen.region != first, decision.spilled_from) == (True, first)


@pytest.mark.parametrize("name", NAMES)
def test_a_retry_goes_to_the_next_and_the_last_stays_reachable(name: str) -> None:
    flow = worldwide(routes=Routes({("", ""): route(name)}))
    tried: frozenset[str] = frozenset()
    for _ in REGIONS:
        chosen = flow.consider(request("a"), 0.1, without=tried).chosen
        assert chosen is not None
        assert chosen.region not in tried
        tried |= {chosen.region}
    assert flow.consider(request("a"), 0.1, without=tried).chosen is None


@pytest.mark.parametrize("name", ["predictive", "nearest", "waterfall", "least-load"])
def test_equal_regions_are_drawn_in_proportion_to_their_headroom(name: str) -> None:
    busy = {"rtt_ms": 5.0, "slots_total": 100, "used_share": 0.7, "tpot_ms": 50.0}  # no prefill delays another request
    fields = {"r0": {**busy, "slots_free": 10}, "r1": {**busy, "slots_free": 30}}
    chosen, rng = Route(route(name)), Random(5)
    drawn = [choose(candidates(request("a"), 100.0, "", **fields), chosen, rng).chosen.region for _ in range(800)]
    assert 0.68 < drawn.count("r1") / 800 < 0.82


def test_every_policy_takes_its_options() -> None:
    given = {"fill_at": 0.5, "weights": {"tokyo": 1.0}, "regions": ["tokyo"], "prefix_bytes": 512}
    for policy in KNOWN:
        route = {"tenant": "a", "policy": policy, **{option: given[option] for option in OPTIONS.get(policy, ())}}
        one = RouteConfig.model_validate(route)
        assert (one.policy, one.tenant, one.model) == (policy, "a", "")


def test_routes_that_cannot_stand_together_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"routes\.1: a second one for tenant 'a', model ''; keep one"):
        routes_of([RouteConfig(tenant="a"), RouteConfig(tenant="a")], {"london", "tokyo"})
    with pytest.raises(ValueError, match=r"routes\.0: no region 'mars' in the topology; known are london, tokyo"):
        routes_of([RouteConfig(policy="failover", regions=("mars",))], {"london", "tokyo"})


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ({"models": [{"model": "big"}]}, "goes with `model`"),
        ({"model": "auto", "models": [{"model": "big"}], "policy": "nearest"}, "policy: does not go with `models`"),
        ({"model": "auto", "models": [{"model": "big"}, {"model": "big"}]}, "'big' is given twice"),
        ({"model": "auto", "models": [{"model": "big", "prompt_bytes_max": 9}]}, "some requests would have none"),
        (
            {"model": "auto", "models": [{"model": "a", "tools": True}, {"model": "b", "tools": False}]},
            "would have none",
        ),
        ({"model": "auto", "models": [{"model": "a", "weight": 0}]}, "weight"),
    ],
)
def test_models_that_an_alias_cannot_stand_for_are_refused_with_the_remedy(route: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouteConfig(**route)


def test_an_alias_must_not_point_to_another_alias() -> None:
    auto = RouteConfig(model="auto", models=({"model": "big"},))
    itself = RouteConfig(model="big", models=({"model": "big"}, {"model": "small"}))
    assert routes_of([itself], {"a"}) == {("", "big"): itself}
    with pytest.raises(ValueError, match=r"routes.0.models: 'big' stands for others itself"):
        routes_of([auto, itself], {"a"})
