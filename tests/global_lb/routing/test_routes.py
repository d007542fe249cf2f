"""Which route applies to a request, and what is counted as requests are sent."""

from __future__ import annotations

from copy import copy
from random import Random
from typing import Any

import pytest
from worlds import candidates, instance, law, request, seen, worldwide

from farhop.balance.machine import AttemptBegan, AttemptEnded, Forward, RequestArrived
from farhop.balance.session_affinity import SessionAffinity
from global_lb.fleet.table import Candidates
from global_lb.routing.pick import Decision, pick
from global_lb.routing.policy import (
    Route,
    RouteConfig,
)
from global_lb.routing.routes import Routes, RoutesChanged


def choose(value: Candidates, route: Route) -> Decision:
    verdict = law().request_verdict(value.request)
    return pick(copy(value), verdict, route, Random(1), 0.0, "london")


def test_the_narrowest_scope_decides_whole() -> None:
    routes = Routes({
        ("", ""): RouteConfig(policy="nearest"),
        ("acme", ""): RouteConfig(policy="weighted"),
        ("", "big"): RouteConfig(policy="least-load"),
        ("acme", "big"): RouteConfig(policy="waterfall"),
    })  # fmt: skip
    asked = [("x", "y"), ("acme", "y"), ("x", "big"), ("acme", "big")]
    assert [routes.of(*one).policy.name for one in asked] == ["nearest", "weighted", "least-load", "waterfall"]
    assert routes.policies() == {"*/*": "nearest", "*/big": "least-load", "acme/*": "weighted", "acme/big": "waterfall"}
    assert Routes().policies() == {"*/*": "predictive"}


def test_a_route_that_does_not_change_keeps_its_counts() -> None:
    routes = Routes({("a", ""): RouteConfig(foreign_quota=0.5)})
    chosen, default = routes.of("a", "m"), routes.of("b", "m")
    routes.apply(RoutesChanged({("b", ""): RouteConfig(policy="nearest")}))
    assert (routes.of("a", "m"), routes.of("c", "m")) == (chosen, default)
    assert routes.of("b", "m").policy.name == "nearest"
    routes.apply(RoutesChanged({("a", ""): RouteConfig(foreign_quota=0.4)}))
    assert routes.of("a", "m") is not chosen
    routes.apply(RoutesChanged({}))
    assert routes.of("b", "m") is default


@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ({}, False), ({"policy": "consistent-hash"}, True), ({"policy": "weighted"}, True),
        ({"affinity_ms": 1.0}, True), ({"canary": {"x": 0.1}}, True),
        ({"canary": {"x": 0.1}, "canary_by": "tenant"}, False),
    ],
)  # fmt: skip
def test_sessions_are_read_only_if_something_uses_them(route: dict[str, Any], wanted: bool) -> None:
    assert Routes({("", ""): RouteConfig(**route)}).want_session() is wanted


# -- what is counted as requests are sent


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.99])
def test_no_more_than_its_share_ever_leaves(share: float) -> None:
    """London is slow, so all would leave."""
    view = seen(instance("london", wait_ms=5000.0), instance("frankfurt"), instance("tokyo"))
    flow = worldwide(view=view, routes=Routes({("", ""): RouteConfig(foreign_quota=share)}))
    left = 0
    for n in range(1, 201):
        forward = flow.handle(RequestArrived(request(f"q{n}")), 0.1)[-1]
        assert isinstance(forward, Forward)
        left += forward.target != "london"
        assert left <= share * n + 1e-6
    assert left >= share * 200 - 1


def test_a_foreign_quota_does_not_apply_to_requests_that_may_not_stay_home() -> None:
    flow = worldwide(routes=Routes({("", ""): RouteConfig(foreign_quota=0.0)}))
    for n in range(5):
        forward = flow.handle(RequestArrived(request(f"q{n}", tenant="german")), 0.1)[-1]
        assert isinstance(forward, Forward)
        assert forward.target == "frankfurt"


def test_a_session_stays_while_that_costs_little() -> None:
    routes = Routes({("", ""): RouteConfig(affinity_ms=100.0)})
    flow = worldwide(view=seen(instance("london", wait_ms=500.0), instance("frankfurt")), routes=routes)

    def goes(name: str, session: int) -> str:
        forward = flow.handle(RequestArrived(request(name, session=session)), 0.1)[-1]
        assert isinstance(forward, Forward)
        flow.handle(AttemptBegan(name, 1, 200), 0.1)
        flow.handle(AttemptEnded(name, 1, 200, None), 0.1)
        return forward.target

    assert goes("a", 5) == "frankfurt"
    flow.handle(seen(instance("london"), instance("frankfurt", wait_ms=40.0)), 0.2)
    assert (goes("b", 5), goes("c", 6), goes("d", 0)) == ("frankfurt", "london", "london")
    flow.handle(seen(instance("london"), instance("frankfurt", wait_ms=300.0)), 0.3)
    assert goes("e", 5) == "london"
    assert isinstance(flow.routes.affinity, SessionAffinity)
    assert flow.routes.affinity.of(5, "llama") == "london"


def test_what_a_dollar_is_worth_is_shown_and_the_sum_can_be_checked() -> None:
    found = candidates(
        request("a", 4000), 100.0, "london", london={"usd_per_gpu_hour": 9.0}, frankfurt={"usd_per_gpu_hour": 1.0}
    )
    weight = 1e6
    decision = choose(found, Routes({("", ""): RouteConfig(usd_weight_ms=weight)}).of("anyone", "llama"))
    assert decision.chosen.region == "frankfurt", "12 ms away, and so much cheaper"
    (note,) = decision.notes
    assert note.startswith("a dollar a request is worth 1e+06 ms")
    least = min(s.usd for s in decision.ranked)
    for one in decision.ranked:
        assert one.score == pytest.approx(one.ttft_ms + one.behind_ms + weight * (one.usd - least))


def test_a_budget_that_is_spent_keeps_requests_here_until_the_hour_has_passed() -> None:
    asked = request("a", body_bytes=10**6)
    found = candidates(asked, 100.0, "london", london={"wait_ms": 900.0, "egress_usd_per_gb": 1.0},
                 frankfurt={"egress_usd_per_gb": 1.0})  # fmt: skip
    routes = Routes({("", ""): RouteConfig(egress_usd_per_hour=0.001)})
    chosen = routes.of("anyone", "llama")
    gone = choose(found, chosen)
    assert gone.chosen.region == "frankfurt"
    routes.sent(found.request, gone, 0.0)
    assert chosen.budget.spent_usd(0.0) == pytest.approx(1e-3 + 100 * 250 * 1e-9)
    kept = choose(found, chosen)
    assert (kept.chosen.region, kept.notes) == ("london", ("the egress budget of 0.001 USD an hour is spent",))
    routes.answered(gone, 0, 0.0)  # it was shorter than estimated
    assert chosen.budget.spent_usd(0.0) == pytest.approx(1e-3)
    assert chosen.budget.spent_usd(3600.0) == 0.0
