"""What a frozen replica never began is found by what a healthy one would have done, and a slow one is left alone."""

from __future__ import annotations

from regional_lb.scheduler.doubts import CONFIRM_S, LOOK_S, Doubts


def looked(doubts: Doubts, begin: float, until: float) -> tuple[float, list[tuple[str, str]]]:
    """Asked whenever it is due: when something was doubted first, and what."""
    now = begin
    while now < until:
        now = max(now + 0.01, min(doubts.due, until))
        if found := doubts.doubted(now):
            return now, found
    return until, []


def measured(doubts: Doubts) -> None:
    for n in range(400):
        doubts.began(100.0 if n % 2 else 130.0, 100.0)


def test_what_is_never_begun_is_doubted_by_what_was_expected() -> None:
    doubts = Doubts()
    measured(doubts)
    assert doubts.factor == 3.0  # it never differed by more
    for name, expected_ms in (("short", 30.0), ("long", 2000.0)):
        doubts.sent("r1", name, expected_ms, 0.0)
    at, found = looked(doubts, 0.0, 20.0)
    assert found == [("r1", "short")]
    assert at <= 3.0 * 0.05 + CONFIRM_S + 2 * LOOK_S
    doubts.over("r1", "short")
    at, found = looked(doubts, at, 20.0)
    assert found == [("r1", "long")]
    assert 3.0 * 2.0 < at < 3.0 * 2.02 + 1.0


def test_before_anything_was_measured_doubt_takes_longer() -> None:
    doubts = Doubts()
    doubts.sent("r1", "a", 30.0, 0.0)
    at, found = looked(doubts, 0.0, 9.0)
    assert found == [("r1", "a")]
    assert 0.5 < at < 2.2


def test_a_slow_replica_that_shows_signs_of_life_is_never_doubted() -> None:
    doubts = Doubts()
    measured(doubts)
    doubts.sent("r1", "a", 30.0, 0.0)
    for tick in range(100):
        doubts.alive("r1", tick * 0.5)
        assert looked(doubts, tick * 0.5, tick * 0.5 + 0.5)[1] == []
    assert looked(doubts, 50.0, 60.0)[1] == [("r1", "a")]


def test_while_nobody_was_listened_to_nobody_is_doubted() -> None:
    doubts = Doubts()
    measured(doubts)
    doubts.sent("r1", "a", 30.0, 0.0)
    assert doubts.doubted(30.0) == []  # this process was stopped, or had nothing to do
    assert looked(doubts, 30.0, 40.0)[1] == [("r1", "a")]


def test_nothing_is_kept_of_what_is_over() -> None:
    doubts = Doubts()
    doubts.sent("r1", "a", 30.0, 0.0)
    doubts.alive("r1", 0.1)
    doubts.over("r1", "a")
    doubts.over("r1", "a")
    doubts.alive("r1", 0.2)
    assert not doubts._waiting
    assert not doubts._alive_at
    assert doubts.doubted(1.0) == []
    assert doubts.due == float("inf")
