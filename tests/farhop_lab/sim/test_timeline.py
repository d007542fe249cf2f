from __future__ import annotations

from math import inf, nan
from random import Random

import pytest

from farhop_lab.sim.timeline import Timeline, TimelineError


def test_things_happen_in_the_order_of_their_moments_and_ties_in_the_order_asked() -> None:
    timeline = Timeline()
    seen: list[tuple[float, str]] = []
    for at, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        timeline.at(at, lambda name=name: seen.append((timeline.now, name)))
    timeline.run(1.5)
    assert seen == [(1.0, "a"), (1.0, "b")]
    assert timeline.now == 1.5
    timeline.run(2.0)
    assert seen[2:] == [(2.0, "c"), (2.0, "d")], "the last moment is included"
    assert timeline.happened == 4


def test_event_scheduled_in_the_past_fires_now() -> None:
    timeline = Timeline()
    timeline.run(5.0)
    seen: list[float] = []
    timeline.at(1.0, lambda: seen.append(timeline.now))
    timeline.after(-3.0, lambda: seen.append(timeline.now))
    timeline.run(5.0)
    assert seen == [5.0, 5.0]


def test_cancelled_event_never_fires_and_late_cancelling_is_harmless() -> None:
    timeline = Timeline()
    seen: list[str] = []
    first, second = timeline.at(1.0, seen.append, "first"), timeline.at(2.0, seen.append, "second")
    second.cancel()
    second.cancel()
    timeline.run(3.0)
    first.cancel()
    assert seen == ["first"]
    assert timeline.happened == 1


def test_cancelled_event_is_freed_before_its_due_time() -> None:
    """Most of what is asked for is a time-out, far off, that never happens."""
    timeline = Timeline()
    seen: list[int] = []
    most = 0
    for number in range(20_000):
        timeline.after(600.0, seen.append, number).cancel()
        if not number % 1_000:
            timeline.at(300.0, seen.append, number)
        most = max(most, len(timeline))
    assert most <= 2_000
    timeline.run(700.0)
    assert seen == list(range(0, 20_000, 1_000))


def test_time_never_runs_backwards() -> None:
    timeline, rng = Timeline(), Random(3)
    seen: list[float] = []

    def act() -> None:
        seen.append(timeline.now)
        if len(seen) < 500:
            timeline.at(timeline.now + rng.uniform(-1.0, 1.0), act)
            timeline.after(rng.random(), act)

    timeline.at(0.0, act)
    timeline.run(20.0)
    assert len(seen) > 500
    assert seen == sorted(seen)


@pytest.mark.parametrize("at", [nan, inf])
def test_a_time_that_is_not_finite_is_refused(at: float) -> None:
    with pytest.raises(TimelineError, match="finite"):
        Timeline().at(at, lambda: None)


def test_the_number_of_things_due_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop_lab.sim.timeline.PENDING_MAX", 2)
    timeline = Timeline()
    timeline.at(1.0, lambda: None)
    timeline.at(1.0, lambda: None)
    with pytest.raises(TimelineError, match="run the timeline"):
        timeline.at(1.0, lambda: None)
