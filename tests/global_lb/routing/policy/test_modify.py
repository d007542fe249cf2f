"""Each modifier alone: which candidates it leaves, what it adds, and why."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import candidates, request

from global_lb.routing.policy import Pin, modify
from global_lb.routing.policy.account import EgressBudget, ForeignQuota


def modified(here: str = "london"):
    return candidates(request("a", 4096), 100.0, here, london={}, frankfurt={}, tokyo={})


def test_a_pin_narrows_to_its_region_and_falls_back_unless_strict() -> None:
    soft, strict = Pin("tokyo", False, "gpu test", "ann", 9.0), Pin("tokyo", True, "gpu test", "ann", 9.0)
    for pin in (soft, strict):
        part, why = modify.pinned(modified(), pin)
        assert (part.names, why) == (("tokyo",), "pinned to tokyo by ann: gpu test")
    without = modified().only([0, 1], "gone")
    assert modify.pinned(without, soft)[0] is without
    nobody, why = modify.pinned(without, strict)
    assert (len(nobody), nobody.absent["tokyo"], why.endswith("no other region may")) == (0, "gone", True)


def test_quota_and_budget_keep_what_they_can_here() -> None:
    quota = ForeignQuota(0.0)
    assert modify.within_quota(modified(), quota)[0].names == ("london",)
    assert len(modify.within_quota(modified("mars"), quota)[0]) == 0
    quota.share = 1.0
    assert modify.within_quota(modified(), quota)[1] == ""
    budget = EgressBudget(0.0)
    assert modify.within_budget(modified(), budget, 0.0)[0].names == ("london",)
    away, why = modify.within_budget(modified("mars"), budget, 0.0)
    assert (len(away), "skipped" in why) == (3, True)


def test_biases_add_up() -> None:
    bias_ms, why = modify.biased(modified(), {"london": 5.0, "mars": 9.0}, {"london": 20.0, "tokyo": -30.0})
    assert bias_ms.tolist() == [0.0, 25.0, -30.0]
    assert why == "bias in ms: london +25, tokyo -30"


def test_a_price_is_what_a_region_costs_more_than_the_cheapest() -> None:
    hour = {"london": {"usd_per_gpu_hour": 3.6}, "tokyo": {"usd_per_gpu_hour": 10.8}}
    dear = candidates(request("a", 4096), 100.0, "london", **hour)
    cheap, other = dear.usd().tolist()
    assert other == pytest.approx(3.0 * cheap)
    assert modify.priced(dear, 1000.0).tolist() == pytest.approx([0.0, 1000.0 * (other - cheap)])


def test_a_canary_draws_its_share_of_sessions_and_keeps_them() -> None:
    asked = [request(f"q{n}", 0, session=n * 7919 + 1) for n in range(3000)]
    drawn = [modify.canary(one, {"tokyo": 0.1, "london": 0.2}, "session")[0] for one in asked]
    assert abs(drawn.count("tokyo") / 3000 - 0.1) < 0.022
    assert abs(drawn.count("london") / 3000 - 0.2) < 0.03
    assert drawn == [modify.canary(one, {"tokyo": 0.1, "london": 0.2}, "session")[0] for one in asked]
    by_tenant = {modify.canary(one, {"tokyo": 0.5}, "tenant")[0] for one in asked}
    assert len(by_tenant) == 1


def test_home_is_kept_while_it_costs_no_more_than_configured() -> None:
    one = modified()
    london, tokyo = one.at["london"], one.at["tokyo"]  # 219 ms apart
    assert modify.at_home(one, "tokyo", london, None, 250.0) == (
        tokyo,
        "the session stays in tokyo, 219 ms slower than london",
    )
    assert modify.at_home(one, "tokyo", london, None, 200.0)[0] == london
    assert modify.at_home(one, "tokyo", london, np.array([False, False, True]), 250.0) == (london, "")
    assert modify.at_home(one, "mars", london, None, 250.0) == (london, "")
