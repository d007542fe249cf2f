"""The cost model: the design's formulas by hand, and monotone and finite everywhere."""

from collections.abc import Callable
from math import inf, isfinite, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import cost

RUN = settings(max_examples=200, deadline=None, derandomize=True)
FINITE = st.floats(0, 1e12)
ARITY: dict[str, tuple[Callable[..., float], int, frozenset[int]]] = {
    # name: formula, number of arguments, those in which it falls (what is credited to the target)
    "ttft_ms": (cost.ttft_ms, 5, frozenset()),
    "reckoned_wait_ms": (cost.reckoned_wait_ms, 4, frozenset({2})),
    "uncached_tokens": (cost.uncached_tokens, 2, frozenset({1})),
}


@pytest.mark.parametrize("name", ARITY)
@given(data=st.data())
@RUN
def test_formulas_are_finite_and_monotone_in_each_argument(name: str, data: st.DataObject) -> None:
    formula, arity, falling = ARITY[name]
    args = [data.draw(FINITE) for _ in range(arity)]
    value = formula(*args)
    assert isfinite(value)
    assert value >= 0.0
    for i in range(arity):
        more = [*args]
        more[i] += data.draw(FINITE)
        grown = formula(*more)
        assert grown <= value if i in falling else grown >= value


@given(st.lists(FINITE, min_size=9, max_size=9), st.integers(0, 8), FINITE)
@RUN
def test_scores_rise_with_every_cost_and_fall_with_no_more_than_the_best(args: list[float], i: int, by: float) -> None:
    ttft, out, token, token_best, stalled, beta, usd, usd_best, weight = args
    token, usd = max(token, token_best), max(usd, usd_best)  # the best is the least, by definition
    args = [ttft, out, token, token_best, stalled, beta, usd, usd_best, weight]
    score = cost.score_ms(*args)
    assert isfinite(score)
    assert score >= ttft
    if i not in (3, 7):
        args[i] += by
        assert cost.score_ms(*args) >= score


@given(st.lists(FINITE, min_size=8, max_size=8), st.sampled_from([0, 1, 2, 3, 4, 6, 7]), FINITE)
@RUN
def test_a_replicas_score_rises_with_every_cost(args: list[float], i: int, by: float) -> None:
    args[4] = max(args[4], args[5])
    score = cost.replica_score_ms(*args)
    assert isfinite(score)
    args[i] += by
    assert cost.replica_score_ms(*args) >= score


@given(st.integers(0, 10**9), st.floats(0, 1000), st.integers(1, 10**6))
@RUN
def test_upload_is_the_least_number_of_doublings_that_carries_the_body(body: int, rtt_ms: float, window: int) -> None:
    flights, carried = 1, window
    while carried < body:
        flights += 1
        carried += window * 2 ** (flights - 1)
    assert cost.upload_ms(body, rtt_ms, window) == (flights - 1) * rtt_ms


def test_upload_by_hand() -> None:
    assert [cost.upload_ms(n, 100.0) for n in (0, 14_600, 14_601, 43_800, 43_801, 200_000)] == [
        0.0,
        0.0,
        100.0,
        100.0,
        200.0,
        300.0,
    ]


def test_scores_by_hand() -> None:
    ttft = cost.ttft_ms(90.0, 180.0, 40.0, 1000.0, 0.6)
    assert ttft == 910.0
    assert cost.score_ms(ttft, 200.0, 30.0, 25.0, 80.0, 0.5, 0.004, 0.003, 50_000.0) == pytest.approx(1410 + 40 + 50)
    assert cost.replica_score_ms(500.0, 1000.0, 0.6, 200.0, 30.0, 25.0, 80.0, 0.5) == pytest.approx(900 + 500 + 40)
    assert cost.token_ms(30.0, 0.5, 20.0) == 40.0
    assert [cost.stalled_ms(prefill_ms, 50.0, 20.0) for prefill_ms in (40.0, 50.0, 90.0)] == [0.0, 0.0, 800.0]


def test_dead_reckoning_adds_what_is_outstanding_and_never_takes_away() -> None:
    assert cost.reckoned_wait_ms(100.0, 5000.0, 3000.0, 0.1) == 300.0
    assert cost.reckoned_wait_ms(100.0, 3000.0, 5000.0, 0.1) == 100.0


def test_tokens_by_learned_ratio() -> None:
    assert cost.tokens(1000, 4.0) == 250.0
    for bad in (0.0, -1.0, nan, inf):
        with pytest.raises(ValueError, match="bytes_per_token"):
            cost.tokens(1000, bad)
