"""The uncertainty of an old report."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.drift import AGE_MAX_S, SILENT_MS_PER_S, UNCERTAINTY_MAX_MS, Drift


def test_a_steady_value_has_no_drift() -> None:
    drift = Drift()
    assert drift.uncertainty_ms(100.0, 0.0, 50.0) == 0.0
    for at in (0.0, 1.0, 2.0):
        drift.reported(40.0, 7, at)
    assert drift.still
    assert drift.uncertainty_ms(2.0 + AGE_MAX_S, 0.0, 50.0) == 0.0


def test_a_silent_target_becomes_more_uncertain_even_if_it_did_not_change() -> None:
    drift = Drift()
    for at in (0.0, 1.0, 2.0):
        drift.reported(40.0, 7, at)
    seen = [drift.uncertainty_ms(2.0 + AGE_MAX_S + after, 7.0, 50.0) for after in (0.0, 1.0, 3.0, 5.0, 500.0)]
    assert seen == pytest.approx([0.0, SILENT_MS_PER_S, 3 * SILENT_MS_PER_S, UNCERTAINTY_MAX_MS, UNCERTAINTY_MAX_MS])
    drift.reported(40.0, 7, 600.0)
    assert drift.uncertainty_ms(601.0, 7.0, 50.0) == 0.0  # it reports again


def test_doubt_grows_with_age_and_with_change() -> None:
    drift = Drift()
    drift.reported(0.0, 8, 0.0)
    drift.reported(40.0, 8, 1.0)
    assert drift.uncertainty_ms(1.0, 8.0, 50.0) == 0.0
    assert drift.uncertainty_ms(1.5, 8.0, 50.0) == pytest.approx(20.0)
    assert drift.uncertainty_ms(1.0 + AGE_MAX_S, 8.0, 50.0) == pytest.approx(AGE_MAX_S * 40.0)
    drift.reported(0.0, 8, 2.0)  # down again: just as uncertain
    assert drift.uncertainty_ms(2.5, 8.0, 50.0) == pytest.approx(20.0)


def test_slots_that_run_out_cost_a_wait_each() -> None:
    drift = Drift()
    drift.reported(0.0, 10, 0.0)
    drift.reported(0.0, 6, 1.0)
    assert drift.uncertainty_ms(2.0, 6.0, 50.0) == 0.0  # four more will be taken, and there are six
    assert drift.uncertainty_ms(2.0, 1.0, 50.0) == pytest.approx(150.0)


def test_a_report_that_is_not_newer_changes_nothing() -> None:
    drift = Drift()
    drift.reported(0.0, 10, 1.0)
    for at in (0.5, 1.0, 1.01):
        drift.reported(9000.0, 0, at)
    assert drift.still


_REPORTS = st.lists(st.tuples(st.floats(0, 1e8), st.integers(0, 10**6), st.floats(-1, 5)), max_size=30)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_REPORTS, st.floats(-5, 50), st.floats(-10, 100), st.floats(0, 1e6))
def test_doubt_keeps_its_bounds(reports: list[tuple[float, int, float]], later: float, left: float, ms: float) -> None:
    drift, now = Drift(), 0.0
    for wait_ms, slots_free, step in reports:
        now += step
        drift.reported(wait_ms, slots_free, now)
    assert 0.0 <= drift.uncertainty_ms(now + later, left, ms) <= UNCERTAINTY_MAX_MS
