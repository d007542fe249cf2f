"""The terms of the cost model, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate import cost

RUN = settings(max_examples=200, deadline=None, derandomize=True)


@given(st.integers(0, 10**9), st.floats(0, 1000), st.integers(1, 10**6))
@RUN
def test_upload_is_the_least_number_of_doublings_that_carries_the_body(body: int, rtt_ms: float, window: int) -> None:
    flights, carried = 1, window
    while carried < body:
        flights += 1
        carried += window * 2 ** (flights - 1)
    assert cost.upload_ms(body, rtt_ms, window) == (flights - 1) * rtt_ms


def test_upload_ms_at_the_edges_of_the_congestion_window() -> None:
    assert [cost.upload_ms(n, 100.0) for n in (0, 14_600, 14_601, 43_800, 43_801, 200_000)] == [
        0.0,
        0.0,
        100.0,
        100.0,
        200.0,
        300.0,
    ]


def test_token_and_stall_costs_as_computed_by_hand() -> None:
    assert cost.token_ms(30.0, 0.5, 20.0) == 40.0
    assert [cost.stalled_ms(prefill_ms, 50.0, 20.0) for prefill_ms in (40.0, 50.0, 90.0)] == [0.0, 0.0, 800.0]


def test_the_last_tokens_of_a_long_text_are_more_work_than_the_first() -> None:
    assert cost.prefill_work(1_000.0, 1_000.0) == pytest.approx(1_015.0, rel=1e-3)
    assert cost.prefill_work(100_000.0, 100_000.0) == pytest.approx(252_600.0, rel=1e-3)
    assert cost.prefill_work(1_000.0, 100_000.0) == pytest.approx(4_036.0, rel=1e-3)
    assert cost.prefill_work(0.0, 100_000.0) == 0.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
@RUN
def test_a_prompt_is_the_same_work_in_one_piece_as_in_two(first: float, second: float, share: float) -> None:
    whole = first + second
    parts = cost.prefill_work(first, first) + cost.prefill_work(second, whole)
    assert cost.prefill_work(whole, whole) == pytest.approx(parts, rel=1e-9, abs=1e-9)
    assert share * whole <= cost.prefill_work(share * whole, whole) * (1 + 1e-9)


def test_requests_behind_wait_for_what_a_request_has_more_than_the_mean() -> None:
    def behind_ms(wait_ms: float, uncached: float, ms_per_unit: float = 1.0) -> float:
        return cost.behind_ms(wait_ms, work=uncached, mean_work=200.0, ms_per_unit=ms_per_unit)

    assert [behind_ms(300.0, uncached) for uncached in (0.0, 100.0, 200.0, 1000.0)] == [0.0, 150.0, 300.0, 1500.0]
    assert behind_ms(0.0, 1000.0) == 0.0
    assert behind_ms(50.0, 200.0) == 12.5  # a quarter of another request's prefill is left
    assert behind_ms(50.0, 200.0, ms_per_unit=0.0) == 50.0
