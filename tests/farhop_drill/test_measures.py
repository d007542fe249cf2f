"""Figures from canaries and looks that were written down here."""

from __future__ import annotations

from typing import Any

import pytest
from drill_documents import made
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_drill import measures
from farhop_drill.document import MEASURES
from farhop_drill.measures import Canary, StatusSample, Timeline, measured, percentile

T0, RESTORE, RESTORED, END = 10.0, 20.0, 21.0, 30.0
MARKS = Timeline(0.0, T0, RESTORE, RESTORED, END)


def canary(began_s: float, region: str = "virginia", **changed: Any) -> Canary:
    fields = {"entry": "virginia", "tenant": "t", "model": "m", "began_s": began_s, "first_s": began_s + 0.05,
            "ended_s": began_s + 0.1, "region": region}  # fmt: skip
    return Canary(**(fields | changed))


def failed(began_s: float) -> Canary:
    return canary(began_s, "", first_s=None, ended_s=began_s + 0.2, code="connect_failed")


def figures(*canaries: Canary, looks: tuple[StatusSample, ...] = (), marks: Timeline = MARKS) -> dict[str, float]:
    return measured(made(), canaries, looks, marks, lambda one: one.region == "tokyo", {"virginia": 1.0, "tokyo": 2.0})


BEFORE = tuple(canary(at) for at in (1.0, 3.0, 5.0, 7.0, 9.0))


def test_a_client_that_never_failed_is_restored_by_its_first_answer() -> None:
    found = figures(*BEFORE, canary(10.4, "frankfurt"), canary(11.0, "frankfurt"))
    assert found["rto_s"] == pytest.approx(0.45)
    assert (found["requests_failed"], found["elsewhere_share"]) == (0.0, 1.0)


def test_a_client_that_failed_is_restored_by_its_first_good_answer_after_the_last_failure() -> None:
    found = figures(*BEFORE, failed(10.2), canary(10.6, "frankfurt"), failed(11.0), canary(12.0, "frankfurt"))
    assert found["rto_s"] == pytest.approx(2.05)
    assert found["requests_failed"] == 2.0


def test_a_first_token_that_comes_too_late_is_no_service() -> None:
    slow = canary(10.5, "frankfurt", first_s=13.0, ended_s=13.1)
    assert figures(*BEFORE, slow, canary(14.0, "frankfurt"))["rto_s"] == pytest.approx(4.05)


def test_the_slowest_client_counts_and_one_never_restored_counts_as_long_as_it_was_looked_at() -> None:
    other = (failed(10.5), failed(18.0))
    found = figures(*BEFORE, canary(10.4, "frankfurt"), *(Canary(**{**_fields(one), "tenant": "u"}) for one in other))
    assert found["rto_s"] == pytest.approx(8.2)


def _fields(one: Canary) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_streams_lost_bytes_lost_and_doubled_are_counted_against_what_came_before() -> None:
    whole = canary(2.0, prompt="p", text="one two three")
    broken = canary(9.9, prompt="p", text="one two", ended_s=10.5, code="stream_broken")
    twice = canary(11.0, "frankfurt", prompt="p", text="one two two three")
    found = figures(whole, broken, twice)
    assert found["streams_lost"] == 1.0
    assert found["stream_bytes_lost"] == len(" three") + len("hree")
    assert found["stream_bytes_doubled"] == len("wo three")


def test_engines_that_do_not_repeat_themselves_have_no_bytes_compared() -> None:
    answers = (canary(1.0, prompt="p", text="a"), canary(2.0, prompt="p", text="b"), canary(11.0, prompt="p", text="c"))
    assert "stream_bytes_lost" not in figures(*answers)


def test_shift_detection_and_return_are_timed() -> None:
    during = (canary(10.2), canary(10.8, "frankfurt"), *(canary(11.0 + n / 10, "frankfurt") for n in range(20)))
    after = (canary(21.5, "frankfurt"), *(canary(22.0 + n / 10) for n in range(20)))
    looks = (
        StatusSample(at_s=9.0, states={"virginia": "up"}, used={}),
        StatusSample(at_s=10.6, states={"virginia": "down"}, used={}),
    )
    found = figures(*BEFORE, *during, *after, looks=looks)
    assert found["detect_s"] == pytest.approx(0.6)
    assert found["decide_s"] == pytest.approx(0.85)
    assert found["shifted_90_s"] == pytest.approx(0.2)  # one of 22 is less than a tenth
    assert found["shifted_99_s"] == pytest.approx(0.8)
    assert found["failback_s"] == pytest.approx(2.05)


def test_a_pilot_light_that_was_asleep_is_timed_until_all_have_woken_it() -> None:
    def looks(*awake: bool) -> tuple[StatusSample, ...]:
        return tuple(
            StatusSample(at_s=at_s, states={}, used={}, pilots={"tokyo": one})
            for at_s, one in zip((9.0, 10.5, 11.5, 12.0), awake, strict=True)
        )

    assert figures(*BEFORE, looks=looks(False, False, True, True))["pilot_light_s"] == 1.5
    for never in ((True, True, True, True), (False, False, False, False)):
        assert "pilot_light_s" not in figures(*BEFORE, looks=looks(*never)), "nothing was seen of it"
    assert "pilot_light_s" not in figures(*BEFORE)


def test_violations_cost_utilisation_and_the_laws_way_are_measured() -> None:
    looks = (
        StatusSample(at_s=11.0, states={}, used={"virginia": 1.0, "frankfurt": 0.4}, epochs=(1, 2)),
        StatusSample(at_s=12.0, states={}, used={"frankfurt": 0.6}, epochs=(2, 2)),
    )
    spilled = canary(11.0, "tokyo", sent_bytes=10**9, got_bytes=10**9)
    found = figures(*BEFORE, spilled, looks=looks, marks=Timeline(0.0, T0, RESTORE, RESTORED, END, 2))
    assert (found["residency_violations"], found["spill_usd"]) == (1.0, 3.0)
    assert (found["survivors_utilisation"], found["law_followed_s"]) == (0.6, 2.0)


def test_live_measures_cover_recent_requests_but_all_residency_violations() -> None:
    old = [failed(1.0), failed(2.0)]
    now = [canary(10.0), failed(10.1)]
    live = measures.live(made(), [*old, *now], [], 11.0, 3)
    assert (live["error_share"], live["requests_failed"], live["residency_violations"]) == (0.5, 1.0, 3.0)
    assert "survivors_utilisation" not in live


def test_the_fleet_is_back_when_every_region_is_up_and_serves_its_own_clients() -> None:
    up = [StatusSample(at_s=25.0, states={"virginia": "up"}, used={})]
    home = [*BEFORE, canary(23.5), canary(24.0), canary(24.5)]
    assert measures.is_back(made(), home, up, MARKS, 25.0)
    assert not measures.is_back(made(), [*home, canary(24.8, "tokyo")], up, MARKS, 25.0)
    assert not measures.is_back(made(), home, [StatusSample(at_s=25.0, states={"x": "down"}, used={})], MARKS, 25.0)
    assert not measures.is_back(made(), home, up, MARKS, 21.5)


def test_clients_that_ask_rarely_are_restored_too() -> None:
    """Of the last three since the restoration none is within the moment that others are judged by."""
    up = [StatusSample(at_s=99.0, states={"virginia": "up"}, used={})]
    seldom = [*BEFORE, canary(30.0, "tokyo"), canary(40.0), canary(50.0), canary(60.0)]
    assert measures.is_back(made(), seldom, up, MARKS, 99.0)
    assert not measures.is_back(made(), seldom[:-1], up, MARKS, 99.0)
    assert not measures.is_back(made(), [*BEFORE, canary(40.0), canary(50.0)], up, MARKS, 99.0)


def test_a_percentile_is_the_nearest_rank() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert percentile([], 0.5) is None


CANARIES = st.lists(
    st.builds(
        lambda at, ttft, took, entry, region, code: canary(
            at, region, entry=entry, first_s=None if ttft is None else at + ttft, ended_s=at + took + (ttft or 0.0),
            code=code, prompt=entry, text=region,
        ),
        st.floats(0, 29), st.none() | st.floats(0, 3), st.floats(0, 3), st.sampled_from(["virginia", "tokyo"]),
        st.sampled_from(["virginia", "frankfurt", "tokyo", ""]), st.sampled_from(["", "", "broken"]),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=60)
@given(CANARIES, st.sampled_from([MARKS, Timeline(), Timeline(0.0, T0), Timeline(0.0, T0, RESTORE)]))
def test_every_figure_is_one_that_is_known_and_none_is_below_nothing(canaries: list[Canary], marks: Timeline) -> None:
    found = figures(*sorted(canaries, key=lambda one: one.ended_s), marks=marks)
    assert set(found) <= set(MEASURES)
    assert all(value >= 0.0 for value in found.values())
    assert found.get("error_share", 0.0) <= 1.0
    assert found.get("shifted_90_s", 0.0) <= found.get("shifted_99_s", 1e9)
