"""Windows, and what a schedule makes due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop_drill.windows import DAY_S, Planned, WindowError, due, is_open, window_of

MONDAY = 4 * DAY_S  # 1970-01-05, 00:00 UTC
HOUR_S = 3600


def test_a_window_is_open_on_its_days_from_its_beginning_until_its_end() -> None:
    window = window_of("mon-fri 09:00-17:00")
    held = [window.holds(MONDAY + at) for at in (9 * HOUR_S - 1, 9 * HOUR_S, 17 * HOUR_S - 1, 17 * HOUR_S)]
    assert held == [False, True, True, False]
    assert not window.holds(MONDAY + 5 * DAY_S + 10 * HOUR_S)
    assert window_of("sat-mon 00:00-24:00").days == (5, 6, 0)
    assert is_open([], 0.0)


@pytest.mark.parametrize(
    "text", ["", "someday", "mon 9:00-10:00", "mon 10:00-09:00", "mon 10:60-11:00", "xyz 10:00-11:00"]
)
def test_a_text_that_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(WindowError):
        window_of(text)


def planned(**changed: object) -> Planned:
    fields = {"drill": "d", "windows": ("tue 10:00-12:00",), "every_s": 7.0 * DAY_S, "since_s": float(MONDAY)}
    return Planned(**(fields | changed))  # type: ignore[arg-type]


def test_a_run_is_due_in_its_window_once() -> None:
    tuesday = MONDAY + DAY_S + 10 * HOUR_S
    assert not due(planned(), None, tuesday - 1).now
    assert due(planned(), None, tuesday).now
    assert not due(planned(), float(tuesday), tuesday + 60).now
    assert due(planned(), float(tuesday), tuesday + 7 * DAY_S).now


def test_a_window_that_closed_without_its_run_is_missed_and_reported() -> None:
    tuesday = MONDAY + DAY_S + 10 * HOUR_S
    later = due(planned(), None, tuesday + 2 * 7 * DAY_S - DAY_S)
    assert later.missed == (tuesday, tuesday + 7 * DAY_S)
    assert not later.now
    assert due(planned(), float(later.missed[-1]), tuesday + 2 * 7 * DAY_S - DAY_S).missed == ()


@given(st.floats(0, 40 * DAY_S), st.none() | st.floats(0, 40 * DAY_S), st.floats(HOUR_S, 20 * DAY_S))
def test_a_missed_window_is_reported_once(now: float, last: float | None, every_s: float) -> None:
    one = planned(every_s=every_s, since_s=0.0)
    found = due(one, last, now)
    assert list(found.missed) == sorted(set(found.missed))
    assert all(window_of(one.windows[0]).holds(begins) for begins in found.missed)
    assert not found.now or is_open([window_of(one.windows[0])], now)
    if found.missed:
        assert due(one, float(found.missed[-1]), now).missed == ()
