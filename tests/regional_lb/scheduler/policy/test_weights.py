"""Weights: configured, or by measured speed."""

from __future__ import annotations

from worlds import replica, replicas_of

from regional_lb.scheduler.policy.weights import Weights


def test_configured_weights_count_and_the_default_is_one() -> None:
    weights = Weights({"b": 3.0, "gone": 9.0})
    weights.adopt(("a", "b"))
    assert weights.of(replicas_of(replica("a"), replica("b")).whole).tolist() == [1.0, 3.0]
    weights.adopt(("b", "c"))
    assert weights.of(replicas_of(replica("b"), replica("c")).whole).tolist() == [3.0, 1.0]


def test_without_configured_weights_measured_speed_decides() -> None:
    known = replicas_of(replica("slow", tpot_ms=40.0), replica("fast", tpot_ms=10.0))
    weights = Weights({})
    weights.adopt(("slow", "fast"))
    slow, fast = weights.of(known.whole).tolist()
    assert fast == 4.0 * slow
    for n in range(100):
        known.served("fast", 100.0, 1000.0, 10, (0.0, 0.0), 0.1 * n)
    known.age(10.0)
    assert 0.9 < weights.of(known.whole).item(1) < 1.0 + 1e-9  # a request in a second
