"""The nearest, the nearest with room, the first of a list, the least loaded."""

from __future__ import annotations

from random import Random

from worlds import candidates, law, request

from global_lb.routing.pick import pick
from global_lb.routing.policy import Route, RouteConfig
from global_lb.routing.policy.ranked import Failover, LeastLoad


def goes(name: str, **regions) -> str:
    found = candidates(request("a"), 100.0, "london", **regions)
    route = Route(RouteConfig(policy=name))
    return pick(found, law().request_verdict(found.request), route, Random(1), 0.0, "london").chosen.region


def test_the_nearest_whatever_waits_there() -> None:
    assert goes("nearest", london={"wait_ms": 2000.0}, frankfurt={}, tokyo={}) == "london"


def test_the_next_if_it_is_full_and_a_hop_costs_no_more_than_the_guard_says() -> None:
    assert goes("nearest", london={"slots_free": 0}, frankfurt={}, tokyo={}) == "frankfurt"
    assert goes("nearest", london={"slots_free": 0}, tokyo={"rtt_ms": 400.0}) == "london"


def test_a_waterfall_fills_one_after_another_however_far() -> None:
    full, half = {"used_share": 0.85}, {"used_share": 0.5}
    assert goes("waterfall", london=half, frankfurt={}, tokyo={}) == "london"
    assert goes("waterfall", london=full, frankfurt=half, tokyo={}) == "frankfurt"
    assert goes("waterfall", london=full, frankfurt=full, tokyo={"rtt_ms": 900.0}) == "tokyo"
    assert goes("waterfall", london=full, frankfurt=full, tokyo=full) == "london"


def test_a_waterfall_counts_what_was_sent_since_the_report() -> None:
    sent = {"used_share": 0.75, "slots_total": 10, "unacknowledged_bytes": 100.0}
    assert goes("waterfall", london={**sent, "slots_free": 3}, frankfurt={}) == "frankfurt"


def order(*listed: str) -> list[str]:
    regions = {"a": {"rtt_ms": 50.0}, "b": {"rtt_ms": 3.0}, "c": {"rtt_ms": 300.0}, "d": {"rtt_ms": 2.0}}
    found = candidates(request("x"), 100.0, "b", **regions)
    return [found.names[place] for place in Failover(listed).score(found).argsort()]


def test_the_listed_in_their_order_then_the_nearest() -> None:
    assert order("c", "a") == ["c", "a", "d", "b"]
    assert order("mars", "a", "c") == ["a", "c", "d", "b"]


def test_least_load_scores_the_used_share_and_the_bytes_sent_since_the_report() -> None:
    found = candidates(
        request("a"), 100.0, "", a={"used_share": 0.5, "slots_total": 10},
        b={"used_share": 0.3, "slots_total": 10, "unacknowledged_bytes": 9.0}, c={"used_share": 0.45, "rtt_ms": 900.0},
    )  # fmt: skip
    assert [round(score, 6) for score in LeastLoad().score(found).tolist()] == [0.5, 0.4, 0.45]
