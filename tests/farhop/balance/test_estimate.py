"""What is learned from finished requests: always a figure, always in its domain, of a bounded number of things."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate import BYTES_PER_TOKEN, ENTRIES_MAX, OUTPUT_TOKENS, Estimates, Speed
from farhop.balance.machine import Usage

RUN = settings(max_examples=150, deadline=None, derandomize=True)
COUNTS = st.integers(-(10**12), 10**12)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def test_what_is_not_known_has_a_guess() -> None:
    known = Estimates()
    assert known.bytes_per_token("m") == BYTES_PER_TOKEN
    assert known.output_tokens("t", "m", None) == OUTPUT_TOKENS
    assert known.output_tokens("t", "m", 10) == 10.0
    assert known.output_tokens("t", "m", 10**6) == OUTPUT_TOKENS


def test_what_was_met_is_believed_by_and_by() -> None:
    known = Estimates()
    known.learn("t", "m", 1000, Usage(500, 40))
    assert known.bytes_per_token("m") == 2.0
    assert known.output_tokens("t", "m", None) == 40.0
    assert known.output_tokens("t", "m", 30) == 30.0
    assert known.output_tokens("other", "m", None) == OUTPUT_TOKENS
    known.learn("t", "m", 1000, Usage(250, 140))
    assert known.bytes_per_token("m") == pytest.approx(2.1)
    assert known.output_tokens("t", "m", None) == pytest.approx(45.0)


def test_a_short_prompt_says_nothing_of_the_ratio() -> None:
    known = Estimates()
    known.learn("t", "m", 63, Usage(30, 5))
    assert known.bytes_per_token("m") == BYTES_PER_TOKEN
    assert known.output_tokens("t", "m", None) == 5.0


def test_the_longest_not_met_is_forgotten_and_nonsense_displaces_nobody() -> None:
    known = Estimates()
    known.learn("t", "first", 1000, Usage(500, 40))
    known.learn("t", "second", 1000, Usage(500, 40))
    for n in range(ENTRIES_MAX - 2):
        known.learn("t", f"m{n}", 1000, Usage(500, 40))
    for n in range(100):
        known.learn("t", f"nonsense{n}", 10**9, Usage(1, 10**9))
    assert known.bytes_per_token("second") == 2.0
    known.learn("t", "first", 1000, Usage(500, 40))
    known.learn("t", "one more", 1000, Usage(500, 40))
    assert known.bytes_per_token("first") == 2.0
    assert known.bytes_per_token("second") == BYTES_PER_TOKEN
    assert known.output_tokens("t", "second", None) == OUTPUT_TOKENS
    assert max(len(known._bytes_per_token), len(known._output)) == ENTRIES_MAX


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=40), st.none() | COUNTS)
@RUN
def test_estimates_stay_in_their_domain(samples: list[tuple[int, int, int]], max_tokens: int | None) -> None:
    known = Estimates()
    for prompt_bytes, prompt_tokens, completion_tokens in samples:
        known.learn("t", "m", prompt_bytes, Usage(prompt_tokens, completion_tokens))
        assert 0.25 <= known.bytes_per_token("m") <= 64.0
        assert 1.0 <= known.output_tokens("t", "m", max_tokens) <= 1e6
        if max_tokens is not None and max_tokens >= 1:
            assert known.output_tokens("t", "m", max_tokens) <= max_tokens


def test_a_speed_is_its_guess_until_measured() -> None:
    speed = Speed(0.2, 25.0)
    assert (speed.prefill_ms_per_token, speed.tpot_ms, speed.service_ms) == (0.2, 25.0, OUTPUT_TOKENS * 25.0)
    assert speed.began(525.0, 1000.0)  # one decode step of 25 ms is not prefill
    assert speed.prefill_ms_per_token == pytest.approx((256 * 0.2 + 1000 * 0.5) / 1256)
    speed.ended(decode_ms=1000.0, service_ms=1525.0, completion_tokens=101)
    assert (speed.tpot_ms, speed.service_ms) == (pytest.approx(10.0), pytest.approx(1525.0))


def test_a_long_prefill_tells_more_of_the_pace_than_many_short_ones() -> None:
    """Each takes 8 ms beside 0.01 ms a token, as a busy machine or an engine's own overhead adds."""
    speed = Speed(0.01, 2.0)
    for _ in range(20):
        speed.prefilled(8.0 + 0.01 * 64, 64.0)
    assert speed.prefill_ms_per_token > 0.05
    speed.prefilled(8.0 + 0.01 * 27_000, 27_000.0)
    assert speed.prefill_ms_per_token == pytest.approx(0.01, rel=0.05)
    for _ in range(20):
        speed.prefilled(8.0 + 0.01 * 64, 64.0)
    assert speed.prefill_ms_per_token < 0.03


@pytest.mark.parametrize(("alone_ms", "each_ms", "loads"), [(56.0, 0.47, (1, 60)), (11.0, 0.07, (20, 120))])
def test_what_each_request_adds_to_a_token_is_found_out(
    alone_ms: float, each_ms: float, loads: tuple[int, int]
) -> None:
    speed, dice = Speed(0.1, 20.0), Random(5)
    for _ in range(300):
        load = dice.randint(*loads)
        tpot_ms = alone_ms + each_ms * (load - 1) + dice.gauss(0.0, 0.02 * alone_ms)
        speed.ended(100 * tpot_ms, 1e4, 101, load)
    assert speed.crowd_ms == pytest.approx(each_ms, rel=0.25)
    for load in loads:
        assert speed.tpot_at(load) == pytest.approx(alone_ms + each_ms * (load - 1), rel=0.05)


def test_until_loads_differ_a_share_of_a_lone_token_is_taken() -> None:
    speed = Speed(0.1, 20.0)
    assert (speed.tpot_at(1), speed.crowd_ms) == (20.0, pytest.approx(0.14))
    for _ in range(50):
        speed.ended(3000.0, 4000.0, 101, 51)
    assert speed.tpot_at(51) == pytest.approx(30.0)
    assert speed.crowd_ms == pytest.approx(0.007 * 30.0 / 1.35)


def test_a_pace_that_changed_is_learned_again() -> None:
    speed = Speed(0.01, 2.0)
    for _ in range(100):
        speed.prefilled(10.0, 1000.0)
    for _ in range(32):
        speed.prefilled(50.0, 1000.0)
    assert speed.prefill_ms_per_token == pytest.approx(0.05, rel=0.05)


def test_what_says_nothing_of_a_speed_changes_nothing() -> None:
    speed = Speed(0.2, 25.0)
    assert not speed.began(500.0, 63.0)  # too small: a step's own cost
    speed.ended(decode_ms=0.0, service_ms=500.0, completion_tokens=1)
    assert (speed.prefill_ms_per_token, speed.tpot_ms) == (0.2, 25.0)


@given(FLOATS, FLOATS, st.lists(st.tuples(FLOATS, FLOATS, COUNTS), max_size=30))
@RUN
def test_speeds_stay_in_their_domain(prefill: float, tpot: float, samples: list[tuple[float, float, int]]) -> None:
    speed = Speed(prefill, tpot)
    for a, b, n in [(0.0, 1.0, 0), *samples]:
        speed.began(a, b)
        speed.ended(a, b, n, abs(n) % 700)
        assert 0.0 <= speed.crowd_ms < inf
        assert 1e-4 <= speed.tpot_at(n) < inf
        assert 1e-5 <= speed.prefill_ms_per_token <= 1e3
        assert 1e-4 <= speed.tpot_ms <= 1e5
        assert 1e-3 <= speed.service_ms <= 1e8


@pytest.mark.parametrize("guess", [nan, inf, -inf, 0.0, -1.0])
def test_an_absurd_guess_is_no_fault(guess: float) -> None:
    assert Speed(guess, guess).service_ms > 0.0


def test_a_prefill_alone_waits_for_no_decode_step() -> None:
    beside, alone = Speed(0.1, 20.0), Speed(0.1, 20.0)
    for _ in range(200):
        beside.began(120.0, 1000.0)
        alone.prefilled(120.0, 1000.0)
    assert beside.prefill_ms_per_token == pytest.approx(0.1)
    assert alone.prefill_ms_per_token == pytest.approx(0.12)
    alone.prefilled(1e9, 10.0)  # too short to tell
    assert alone.prefill_ms_per_token == pytest.approx(0.12)
