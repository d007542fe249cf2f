"""What is promised beyond the model: follows the median, is carried off by nothing, and stays within its bounds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.residual import FLOOR_SHARE, LATEST, RESIDUAL_MAX_MS, Residual, corrected

times_ms = st.floats(allow_nan=True, allow_infinity=True)


def test_the_first_sample_counts_and_then_the_median() -> None:
    residual = Residual()
    assert residual.value_ms == 0.0
    residual.seen(2.0, 32.0)
    assert residual.value_ms == 30.0
    rng = Random(1)
    for _ in range(200):
        residual.seen(2.0, 2.0 + (1000.0 if rng.random() < 0.05 else rng.gauss(20.0, 3.0)))
    assert residual.value_ms == pytest.approx(20.0, abs=4.0)  # a mean would be at 69


def test_one_stall_hardly_moves_the_residual() -> None:
    residual = Residual()
    for n in range(100):
        residual.seen(0.0, 20.0 + n % 3)
    residual.seen(0.0, 9_000.0)
    assert 20.0 <= residual.value_ms <= 22.0


def test_a_load_that_changes_is_followed_both_ways() -> None:
    residual = Residual()
    for level_ms in (5.0, 80.0, 5.0):
        for n in range(LATEST):
            residual.seen(10.0, 10.0 + level_ms + n % 5)
        assert residual.value_ms == pytest.approx(level_ms + 2.0, abs=1.0)


@given(st.lists(st.tuples(times_ms, times_ms), max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_sample_moves_the_residual_out_of_its_bounds(pairs: list[tuple[float, float]]) -> None:
    residual = Residual()
    for predicted_ms, seen_ms in pairs:
        residual.seen(predicted_ms, seen_ms)
        assert -RESIDUAL_MAX_MS <= residual.value_ms <= RESIDUAL_MAX_MS


@given(st.floats(0.0, 1e6), st.floats(-RESIDUAL_MAX_MS, RESIDUAL_MAX_MS))
@settings(max_examples=200, deadline=None)
def test_a_promise_is_never_next_to_nothing_of_what_was_predicted(predicted_ms: float, residual_ms: float) -> None:
    assert corrected(predicted_ms, residual_ms) >= FLOOR_SHARE * predicted_ms >= 0.0
