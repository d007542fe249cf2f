"""Failover: the list's order, then nearness."""

from worlds import field, request

from global_lb.policy.order import Failover


def order(*listed: str) -> list[str]:
    regions = {"a": {"rtt_ms": 50.0}, "b": {"rtt_ms": 3.0}, "c": {"rtt_ms": 300.0}, "d": {"rtt_ms": 2.0}}
    told = field(request("x"), 100.0, "b", **regions)
    return [told.names[place] for place in Failover(listed).score(told).argsort()]


def test_the_listed_in_their_order_then_the_nearest() -> None:
    assert order("c", "a") == ["c", "a", "d", "b"]
    assert order("mars", "a", "c") == ["a", "c", "d", "b"]
