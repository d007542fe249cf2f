from __future__ import annotations

import time
from random import Random

import pytest

from farhop.service.process.clock import Clock, cpu_s


def test_the_clock_runs_as_the_monotonic_one_from_a_random_start() -> None:
    clock = Clock(Random(1))
    before = time.monotonic()
    first = clock.now()
    second = clock.now()
    after = time.monotonic()
    assert first <= second
    assert second - first <= after - before
    assert first >= 1e3


def test_two_clocks_of_one_machine_do_not_agree() -> None:
    assert abs(Clock(Random(1)).now() - Clock(Random(2)).now()) > 60.0


def test_a_moment_has_its_wall_time() -> None:
    clock = Clock(Random(3))
    assert abs(clock.wall_ns(clock.now()) - time.time_ns()) < 50_000_000
    now = clock.now()
    assert abs(clock.wall_ns(now + 1.5) - clock.wall_ns(now) - 1_500_000_000) <= 1_000
    assert clock.wall_s(now) == clock.wall_ns(now) / 1e9


@pytest.mark.parametrize("step_s", [86_400.0, -3600.0])
def test_a_wall_clock_that_was_set_counts_from_then_on(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    clock, real = Clock(Random(4)), time.time_ns
    begun = clock.now()
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(step_s * 1e9))
    assert abs(clock.wall_ns(begun) - real()) < 500_000_000
    for _ in range(2):
        assert abs(clock.wall_s(begun + 1.5) - 1.5 - real() / 1e9 - step_s) < 0.5
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(step_s * 1e9) + 1_000_000)
    before = clock.wall_ns(begun)
    clock.wall_ns(begun + 3.0)
    assert clock.wall_ns(begun) == before, "what is read a moment later is no step"


def test_cpu_is_what_this_process_used() -> None:
    before = cpu_s()
    assert sum(range(1_000_000))
    assert 0.0 < cpu_s() - before < 60.0
