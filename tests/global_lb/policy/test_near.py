"""The nearest, and the nearest with room."""

from __future__ import annotations

from random import Random

from worlds import field, law, request

from global_lb import admission
from global_lb.pick import pick
from global_lb.policy import Route, Rule


def goes(name: str, **regions) -> str:
    told = field(request("a"), 100.0, "london", **regions)
    rule = Rule(Route(name))
    return pick(told, admission.processing(told.request, law()), rule, Random(1), 0.0, "london").chosen.region


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
