"""A request that failed early keeps counting for as long as serving it would have taken."""

from __future__ import annotations

from regional_lb.fleet.black_hole import HELD_S_MAX, BlackHoleGuard


def test_a_failed_request_counts_as_load_until_its_time() -> None:
    sinkhole = BlackHoleGuard()
    sinkhole.failed("r1", 100, until=5.0, now=0.0, slots=4)
    sinkhole.failed("r1", 50, until=6.0, now=1.0, slots=4)
    assert (sinkhole.load("r1"), sinkhole.load("r2"), len(sinkhole)) == ((2, 150), (0, 0), 1)
    sinkhole.expire(4.9)
    assert sinkhole.load("r1") == (2, 150)
    sinkhole.expire(5.0)
    assert sinkhole.load("r1") == (1, 50)
    sinkhole.expire(6.0)
    assert (sinkhole.load("r1"), len(sinkhole)) == ((0, 0), 0)


def test_a_request_that_failed_after_its_expected_time_adds_no_load() -> None:
    sinkhole = BlackHoleGuard()
    sinkhole.failed("r1", 100, until=3.0, now=3.0, slots=4)
    assert len(sinkhole) == 0


def test_the_load_held_by_a_black_hole_is_bounded_by_slots_and_time() -> None:
    sinkhole = BlackHoleGuard()
    for _ in range(9):
        sinkhole.failed("r1", 10, until=1e9, now=0.0, slots=3)
    assert sinkhole.load("r1") == (3, 30)
    sinkhole.expire(HELD_S_MAX)
    assert sinkhole.names() == ()


def test_forget_clears_a_replica() -> None:
    sinkhole = BlackHoleGuard()
    sinkhole.failed("r1", 10, until=9.0, now=0.0, slots=3)
    sinkhole.forget("r1")
    sinkhole.forget("nobody")
    assert sinkhole.load("r1") == (0, 0)
