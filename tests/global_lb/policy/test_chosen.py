"""What every policy must do with any modifiers: one suite over all of them. And which route decides for whom."""

from __future__ import annotations

from copy import copy
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import REGIONS, field, instance, law, request, seen, worldwide

from farhop.balance.machine import AttemptBegan, AttemptEnded, Forward, RequestArrived, Usage
from global_lb import admission
from global_lb.pick import pick
from global_lb.policy import KNOWN, Bias, Pin, Route, Routes, RoutesChanged, Rule, Steered, Words
from global_lb.policy.chosen import Homes
from global_lb.view import RegionForced

NAMES = sorted(KNOWN)
ORDER = ("tokyo", "frankfurt", "london")


def route(name: str, **modifiers: Any) -> Route:
    return Route(name, regions=ORDER if name == "failover" else (), **modifiers)


def world(size: int, **more: Any) -> dict[str, dict[str, Any]]:
    return {f"r{n:02}": {"rtt_ms": 1.0 + 10.0 * n, "slots_total": 20, **more} for n in range(size)}


def choose(told, rule: Rule, rng: Random | None = None, **more: Any):
    return pick(copy(told), admission.processing(told.request, law()), rule, rng or Random(1), 0.0, **more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 12, 60])
def test_it_works_at_every_size_and_names_itself(name: str, size: int) -> None:
    rule, rng = Rule(route(name)), Random(1)
    for n in range(10):
        decision = choose(field(request(f"q{n}", session=n + 1), 100.0, "r00", **world(size)), rule, rng)
        assert decision.chosen is not None
        assert decision.rule.policy.name == name
        assert len(decision.field) == size
        assert decision.chosen in decision.field


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
    lambda to, strict, whom, ms: Words({to: Bias(to, ms, "w", "a", 9.0)}, {whom: Pin(to, strict, "w", "a", 9.0)}),
    st.sampled_from([*REGIONS, "mars"]), st.booleans(),
    st.sampled_from([("tenant", "german"), ("tenant", "anyone"), ("model", "llama")]), st.floats(-5000, 5000),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(modified=modifiers, said=st.none() | words, seed=st.integers(0, 9), drained=st.sampled_from(["", *REGIONS]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_no_policy_and_no_modifier_leads_out_of_the_law_or_to_who_is_drained(
    name: str, modified: dict[str, Any], said: Words | None, seed: int, drained: str
) -> None:
    under = law()
    flow = worldwide(under=under, seed=seed)
    flow.handle(RoutesChanged({("", ""): route(name, **modified)}), 0.0)
    if said is not None:
        flow.handle(Steered(said), 0.0)
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
def test_asking_changes_nothing(name: str) -> None:
    flow = worldwide(routes=Routes({("", ""): route(name, foreign_quota=0.5, canary={"tokyo": 0.2}, affinity_ms=9.0)}))
    asked = [request(f"q{n}", session=n) for n in range(20)]
    before = [flow.consider(one, 0.1).chosen.region for one in asked]
    assert [flow.consider(one, 0.1).chosen.region for one in asked] == before
    assert len(flow.routes.homes) == 0


@pytest.mark.parametrize("name", NAMES)
def test_who_is_hot_is_left_for_who_is_not(name: str) -> None:
    told = field(request("a", session=4), 100.0, "r00", **world(3))
    first = choose(told, Rule(route(name))).chosen.region
    told = field(request("a", session=4), 100.0, "r00", **world(3))
    told.penalty_ms = np.array([300.0 if one == first else 0.0 for one in told.names])
    decision = choose(told, Rule(route(name)))
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
def test_equals_are_drawn_by_headroom(name: str) -> None:
    busy = {"rtt_ms": 5.0, "slots_total": 100, "used_share": 0.7, "tpot_ms": 50.0}  # no prefill stalls anybody
    told = {"r0": {**busy, "slots_free": 10}, "r1": {**busy, "slots_free": 30}}
    rule, rng = Rule(route(name)), Random(5)
    drawn = [choose(field(request("a"), 100.0, "", **told), rule, rng).chosen.region for _ in range(800)]
    assert 0.68 < drawn.count("r1") / 800 < 0.82


# -- which of them


def test_the_narrowest_scope_decides_whole() -> None:
    routes = Routes({
        ("", ""): Route("nearest"), ("acme", ""): Route("weighted"), ("", "big"): Route("least-load"),
        ("acme", "big"): Route("waterfall"),
    })  # fmt: skip
    asked = [("x", "y"), ("acme", "y"), ("x", "big"), ("acme", "big")]
    assert [routes.of(*one).policy.name for one in asked] == ["nearest", "weighted", "least-load", "waterfall"]
    assert routes.told() == {"*/*": "nearest", "*/big": "least-load", "acme/*": "weighted", "acme/big": "waterfall"}
    assert Routes().told() == {"*/*": "predictive"}


def test_what_does_not_change_goes_on_counting() -> None:
    routes = Routes({("a", ""): Route(foreign_quota=0.5)})
    rule, default = routes.of("a", "m"), routes.of("b", "m")
    routes.hear(RoutesChanged({("b", ""): Route("nearest")}))
    assert (routes.of("a", "m"), routes.of("c", "m")) == (rule, default)
    assert routes.of("b", "m").policy.name == "nearest"
    routes.hear(RoutesChanged({("a", ""): Route(foreign_quota=0.4)}))
    assert routes.of("a", "m") is not rule
    routes.hear(RoutesChanged({}))
    assert routes.of("b", "m") is default


@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        (Route(), False), (Route("consistent-hash"), True), (Route("weighted"), True), (Route(affinity_ms=1.0), True),
        (Route(canary={"x": 0.1}), True), (Route(canary={"x": 0.1}, canary_by="tenant"), False),
    ],
)  # fmt: skip
def test_sessions_are_read_only_where_something_goes_by_them(route: Route, wanted: bool) -> None:
    assert Routes({("", ""): route}).want_session() is wanted


# -- what is counted as requests are sent


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.99])
def test_no_more_than_its_share_ever_leaves(share: float) -> None:
    """London is slow, so all would leave."""
    view = seen(instance("london", wait_ms=5000.0), instance("frankfurt"), instance("tokyo"))
    flow = worldwide(view=view, routes=Routes({("", ""): Route(foreign_quota=share)}))
    left = 0
    for n in range(1, 201):
        forward = flow.handle(RequestArrived(request(f"q{n}")), 0.1)[-1]
        assert isinstance(forward, Forward)
        left += forward.target != "london"
        assert left <= share * n + 1e-6
    assert left >= share * 200 - 1


def test_a_quota_is_not_for_who_may_not_stay_here() -> None:
    flow = worldwide(routes=Routes({("", ""): Route(foreign_quota=0.0)}))
    for n in range(5):
        forward = flow.handle(RequestArrived(request(f"q{n}", tenant="german")), 0.1)[-1]
        assert isinstance(forward, Forward)
        assert forward.target == "frankfurt"


def test_a_session_stays_while_that_costs_little() -> None:
    routes = Routes({("", ""): Route(affinity_ms=100.0)})
    flow = worldwide(view=seen(instance("london", wait_ms=500.0), instance("frankfurt")), routes=routes)

    def goes(name: str, session: int) -> str:
        forward = flow.handle(RequestArrived(request(name, session=session)), 0.1)[-1]
        assert isinstance(forward, Forward)
        flow.handle(AttemptBegan(name, 1, 200), 0.1)
        flow.handle(AttemptEnded(name, 1, 200, None), 0.1)
        return forward.target

    assert goes("a", 5) == "frankfurt"
    flow.handle(seen(instance("london"), instance("frankfurt", wait_ms=80.0)), 0.2)
    assert (goes("b", 5), goes("c", 6), goes("d", 0)) == ("frankfurt", "london", "london")
    flow.handle(seen(instance("london"), instance("frankfurt", wait_ms=300.0)), 0.3)
    assert goes("e", 5) == "london"
    assert isinstance(flow.routes.homes, Homes)
    assert flow.routes.homes.of(5, "llama") == "london"


def test_what_a_dollar_is_worth_is_told_and_the_sum_can_be_checked() -> None:
    told = field(
        request("a", 4000), 100.0, "london", london={"usd_per_gpu_hour": 9.0}, frankfurt={"usd_per_gpu_hour": 1.0}
    )
    weight = 1e6
    decision = choose(told, Routes({("", ""): Route(usd_weight_ms=weight)}).of("anyone", "llama"), here="london")
    assert decision.chosen.region == "frankfurt", "12 ms away, and so much cheaper"
    (note,) = decision.notes
    assert note.startswith("a dollar a request is worth 1e+06 ms")
    least = min(s.usd for s in decision.field)
    for one in decision.field:
        assert one.score == pytest.approx(one.ttft_ms + weight * (one.usd - least))


def test_a_budget_that_is_spent_keeps_requests_here_until_the_hour_has_passed() -> None:
    told = field(request("a", body_bytes=10**6), 100.0, "london", london={"wait_ms": 900.0, "egress_usd_per_gb": 1.0},
                 frankfurt={"egress_usd_per_gb": 1.0})  # fmt: skip
    routes = Routes({("", ""): Route(egress_usd_per_hour=0.001)})
    rule = routes.of("anyone", "llama")
    gone = choose(told, rule, here="london")
    assert gone.chosen.region == "frankfurt"
    routes.sent(told.request, gone, 0.0)
    assert rule.budget.spent_usd(0.0) == pytest.approx(1e-3 + 100 * 250 * 1e-9)
    kept = choose(told, rule, here="london")
    assert (kept.chosen.region, kept.notes) == ("london", ("the egress budget of 0.001 USD an hour is spent",))
    routes.answered(gone, 0, 0.0)  # it was shorter than thought
    assert rule.budget.spent_usd(0.0) == pytest.approx(1e-3)
    assert rule.budget.spent_usd(3600.0) == 0.0
