"""An operator's forced state: it is in force until it expires or is lifted, and a drain's share fades."""

from __future__ import annotations

import pytest

from farhop.balance.health.reading import ForcedState, Health, State, worst_first


def test_the_newest_forced_state_is_in_force_until_it_expires() -> None:
    override = ForcedState()
    assert override.read(0.0) is None
    override.force(State.UP, "pinned", until=10.0)
    override.force(State.DRAINING, "maintenance", until=5.0)
    assert override.read(4.9) == Health(State.DRAINING, "maintenance", 5.0, forced=True)
    assert override.read(5.0) is None
    override.force(State.DOWN, "for good")
    assert override.read(1e9) == Health(State.DOWN, "for good", forced=True)
    override.lift()
    assert override.read(0.0) is None


def test_a_paced_drain_gives_its_share_away_and_repeated_gives_nothing_back() -> None:
    override = ForcedState()
    override.force(State.DRAINING, "paced", now=0.0, over_s=10.0)
    for word in ("paced", "paced, again"):
        content = override.read(4.0)
        assert content is not None
        assert (content.why, content.share) == (word, pytest.approx(0.6))
        override.force(State.DRAINING, "paced, again", now=4.0, over_s=10.0)
    assert override.read(10.0) == Health(State.DRAINING, "paced, again", None, forced=True)


def test_a_drain_at_a_pace_fades_until_it_is_whole_or_lifted() -> None:
    override = ForcedState()
    assert not override.fading(0.0)
    override.force(State.DRAINING, "why", now=0.0, over_s=10.0)
    assert [override.fading(now) for now in (0.0, 9.9, 10.0)] == [True, True, False]
    override.force(State.DRAINING, "why", now=5.0)
    assert not override.fading(5.0)
    override.force(State.DRAINING, "why", now=20.0, over_s=10.0)
    override.lift()
    assert not override.fading(21.0)


def test_a_drain_that_keeps_a_share_stops_there_and_stays() -> None:
    override = ForcedState()
    override.force(State.DRAINING, "a part", now=0.0, over_s=10.0, keep_share=0.75)
    shares = [override.read(now).share for now in (1.0, 5.0, 100.0)]  # type: ignore[union-attr]
    assert shares == [pytest.approx(0.9), 0.75, 0.75]
    assert override.fading(100.0)  # requests are drawn for as long as it stands
    override.force(State.DRAINING, "all", now=100.0)
    content = override.read(100.0)
    assert content is not None
    assert (content.share, override.fading(100.0)) == (0.0, False)


def test_states_of_other_processes_sort_worst_first_and_unknown_ones_last() -> None:
    written = ["up", None, "down", 7, "suspect", ["down"], "draining"]
    assert sorted(written, key=worst_first) == ["down", "draining", "suspect", "up", None, 7, ["down"]]
