from __future__ import annotations

import pytest

from entry_dns.fleet.entry_health import STEPS, EntryHealth, EntryHealthConfig, EntryHealthTracker, State

CONFIG = EntryHealthConfig(ramp_s=100.0)


def tracker(**up: bool) -> EntryHealthTracker:
    made = EntryHealthTracker(CONFIG)
    made.know({"a": "r1", "b": "r2", "c": "r2"}, 0.0)
    for name, good in {"a": True, "b": True, "c": True, **up}.items():
        for at in (0.1, 0.2):
            made.probed(name, good, "" if good else "refused", at)
    return made


def of(made: EntryHealthTracker, name: str, now: float) -> EntryHealth:
    return next(one for one in made.read(now) if one.entry == name)


def test_one_lost_probe_makes_an_entry_suspect_and_a_second_takes_it_down() -> None:
    made = tracker()
    assert of(made, "a", 1.0).state is State.UP
    made.probed("a", False, "refused", 1.0)
    assert of(made, "a", 1.0) == EntryHealth("a", State.SUSPECT, 1.0, 0.0, 0.0, "refused")
    made.probed("a", False, "refused", 2.0)
    assert of(made, "a", 2.0).state is State.DOWN
    assert not of(made, "a", 2.0).answers


def test_an_entry_that_comes_back_takes_a_growing_share() -> None:
    made = tracker()
    for at in (1.0, 2.0):
        made.probed("a", False, "refused", at)
    for at in (200.0, 201.0):
        made.probed("a", True, "", at)
    shares = [of(made, "a", 201.0 + s).share for s in (0, 25, 50, 75, 100)]
    assert shares == sorted(shares)
    assert shares[0] <= 2 / STEPS
    assert shares[-1] == 1.0


def test_if_no_entry_answers_our_network_is_down_and_the_last_view_stays_for_frozen_s() -> None:
    made = tracker(c=False)
    assert of(made, "c", 0.3).state is State.DOWN
    now = 0.0
    for now in (10.0, 11.0, 12.0, 13.0):
        for name in "abc":
            made.probed(name, False, "no answer", now)
    assert made.cut_off(13.0)
    assert [one.state for one in made.read(13.0)] == [State.SUSPECT, State.SUSPECT, State.DOWN]
    assert {one.state for one in made.read(13.0 + CONFIG.frozen_s)} == {State.UNKNOWN}
    made.probed("a", True, "", 400.0)
    assert not made.cut_off(400.0)


def test_a_lone_entry_that_dies_is_dead() -> None:
    made = EntryHealthTracker(CONFIG)
    made.know({"a": "r1"}, 0.0)
    made.probed("a", True, "", 0.0)
    for at in (10.0, 11.0, 12.0):
        made.probed("a", False, "refused", at)
    assert of(made, "a", 12.0).state is State.DOWN


def test_a_drain_takes_the_share_over_its_pace_and_ends_with_its_length() -> None:
    made = tracker()
    made.drained(["a"], 10.0, 60.0, "kernel", 1.0)
    assert of(made, "a", 6.0).share == pytest.approx(0.5)
    made.drained(["a"], 10.0, 60.0, "kernel", 6.0)  # reported again: not a new beginning
    assert of(made, "a", 11.0) == EntryHealth("a", State.DRAINED, 0.0, 0.0, 0.0, "kernel")
    after = of(made, "a", 61.0)
    assert after.state is State.UP
    assert after.share < 0.2


def test_a_drain_taken_back_comes_back_by_the_ramp() -> None:
    made = tracker()
    made.drained(["a"], 0.0, 600.0, "kernel", 1.0)
    made.undrained(["a"], 30.0)
    assert of(made, "a", 30.0).share < 0.2
    assert of(made, "a", 130.0).share == 1.0


def test_a_full_region_sheds_and_a_report_ages() -> None:
    made = tracker()
    made.loaded("r2", 0.95, 1.0)
    assert of(made, "a", 2.0).share == 1.0
    assert of(made, "b", 2.0).share == of(made, "c", 2.0).share == pytest.approx(0.5)
    assert of(made, "b", 2.0 + CONFIG.load_age_s).share == 1.0


def test_a_bias_holds_until_its_end() -> None:
    made = tracker()
    made.biased({"r1": (40.0, 50.0)})
    assert of(made, "a", 49.0).bias_ms == 40.0
    assert of(made, "a", 51.0).bias_ms == 0.0


def test_reading_changes_nothing() -> None:
    made = tracker(b=False)
    assert made.read(5.0) == made.read(5.0)


def test_a_drain_that_is_renewed_goes_on_and_one_that_keeps_a_share_stops_there() -> None:
    made = tracker()
    for now in range(1, 60, 2):
        made.drained(["a"], 0.0, now + 6.0, "drill", float(now), 0.75)
        assert of(made, "a", now + 1.0).state is State.DRAINED
    assert of(made, "a", 60.0).share == pytest.approx(0.75)
    assert of(made, "a", 66.0).state is State.UP  # it was not renewed
