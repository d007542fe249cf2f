"""What is learned from finished requests: always a figure, always in its domain, of a bounded number of things."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.estimates import (
    BYTES_PER_TOKEN,
    ENTRIES_MAX,
    INTERFERENCE_SHARE,
    OUTPUT_TOKENS,
    DecayingMean,
    Estimates,
    Speed,
)
from farhop.balance.machine import Usage

RUN = settings(max_examples=150, deadline=None, derandomize=True)
COUNTS = st.integers(-(10**12), 10**12)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def test_an_unknown_model_or_tenant_has_a_default() -> None:
    known = Estimates()
    assert known.bytes_per_token("m") == BYTES_PER_TOKEN
    assert known.output_tokens("t", "m", None) == OUTPUT_TOKENS
    assert known.output_tokens("t", "m", 10) == 10.0
    assert known.output_tokens("t", "m", 10**6) == OUTPUT_TOKENS


def test_the_first_answer_sets_an_estimate_and_later_ones_move_it_slowly() -> None:
    known = Estimates()
    known.learn("t", "m", 1000, Usage(500, 40))
    assert known.bytes_per_token("m") == 2.0
    assert known.output_tokens("t", "m", None) == 40.0
    assert known.output_tokens("t", "m", 30) == 30.0
    assert known.output_tokens("other", "m", None) == OUTPUT_TOKENS
    known.learn("t", "m", 1000, Usage(250, 140))
    assert known.bytes_per_token("m") == pytest.approx(2.1)
    assert known.output_tokens("t", "m", None) == pytest.approx(45.0)


def test_one_endless_answer_does_not_make_a_tenant_a_nuisance_and_long_ones_are_forgotten() -> None:
    known = Estimates()
    known.learn("t", "m", 1000, Usage(500, 10**6))
    assert known.output_tokens("t", "m", None) == 8 * OUTPUT_TOKENS
    known.now = 2 * 3600.0
    assert known.output_tokens("t", "m", None) == pytest.approx(OUTPUT_TOKENS, rel=0.15)


def test_short_prompt_does_not_change_bytes_per_token() -> None:
    known = Estimates()
    known.learn("t", "m", 63, Usage(30, 5))
    assert known.bytes_per_token("m") == BYTES_PER_TOKEN
    assert known.output_tokens("t", "m", None) == 5.0


def test_the_least_recently_seen_is_forgotten_and_nonsense_displaces_none() -> None:
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
    assert max(len(known.bytes_by_tenant), len(known.outputs_by_tenant)) == ENTRIES_MAX


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


def test_a_speed_without_samples_has_no_measurement() -> None:
    speed = Speed()
    assert speed.measured(0.0) == (0.0,) * 8
    assert speed.sampled_at is None
    assert speed.began(525.0, 1000.0, 25.0, 1.0)  # one decode step of 25 ms is not prefill
    speed.ended(decode_ms=1000.0, service_ms=1525.0, completion_tokens=101, load=1.0, now=2.0)
    found = speed.measured(2.0)
    assert (found.prefill_ms_per_token, found.alone_ms, found.service_ms) == (0.5, 10.0, 1525.0)
    assert speed.sampled_at == 2.0


def test_a_long_prefill_weighs_more_than_many_short_ones() -> None:
    """Each takes 8 ms beside 0.01 ms a token, as a busy machine or an engine's own overhead adds."""
    speed = Speed()
    for _ in range(20):
        speed.prefilled(8.0 + 0.01 * 64, 64.0, 0.0)
    assert speed.measured(0.0).prefill_ms_per_token > 0.05
    speed.prefilled(8.0 + 0.01 * 27_000, 27_000.0, 0.0)
    assert speed.measured(0.0).prefill_ms_per_token == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(("alone_ms", "each_ms", "loads"), [(56.0, 0.47, (1, 60)), (11.0, 0.07, (20, 120))])
def test_the_time_that_each_request_adds_to_a_token_is_learned(
    alone_ms: float, each_ms: float, loads: tuple[int, int]
) -> None:
    speed, dice = Speed(), Random(5)
    for n in range(300):
        load = dice.randint(*loads)
        tpot_ms = alone_ms + each_ms * (load - 1) + dice.gauss(0.0, 0.02 * alone_ms)
        speed.ended(100 * tpot_ms, 1e4, 101, load, 0.1 * n)
        found = speed.measured(0.1 * n)
        speed.interference_share = (found.cov + 100 * INTERFERENCE_SHARE) / (found.var + 100)
    found = speed.measured(30.0)
    assert speed.interference_share * found.alone_ms == pytest.approx(each_ms, rel=0.25)
    for load in loads:
        at_load_ms = found.alone_ms * (1.0 + speed.interference_share * (load - 1))
        assert at_load_ms == pytest.approx(alone_ms + each_ms * (load - 1), rel=0.05)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.floats(1.0, 300.0))
@RUN
def test_what_a_token_takes_at_the_usual_load_does_not_change_with_what_each_request_adds(
    shares: list[float], load: float
) -> None:
    speed = Speed()
    for n in range(50):
        speed.ended(100 * 35.0, 1e4, 101, load, 0.1 * n)
    for share in shares:
        speed.interference_share = share
        assert speed.measured(5.0).alone_ms * (1.0 + share * (load - 1.0)) == pytest.approx(35.0)


def test_the_first_samples_of_a_cold_engine_weigh_a_quarter() -> None:
    cold, warm = Speed(), Speed()
    for n in range(16):
        warm.ended(1e3, 1e3, 101, 1.0, 0.01 * n)
    cold.ended(1e3, 1e3, 101, 1.0, 100.0)
    warm.ended(1e3, 1e3, 101, 1.0, 100.0)
    assert cold.measured(100.0).alone_evidence == pytest.approx(0.25 / 1.25)
    assert warm.measured(100.0).alone_evidence == pytest.approx(0.5, abs=1e-3)


def test_samples_too_small_or_out_of_range_do_not_change_a_speed() -> None:
    speed = Speed()
    assert not speed.began(500.0, 63.0, 20.0, 0.0)  # too small: a step's own cost
    assert not speed.prefilled(1e9, 10.0, 0.0)
    speed.ended(decode_ms=0.0, service_ms=500.0, completion_tokens=1, load=1.0, now=0.0)
    found = speed.measured(0.0)
    assert (found.prefill_evidence, found.alone_evidence, found.service_evidence) == (0.0, 0.0, 1.0)


@given(st.lists(st.tuples(FLOATS, FLOATS, COUNTS, st.floats(0.0, 1e6)), max_size=30))
@RUN
def test_measurements_stay_in_their_domain(samples: list[tuple[float, float, int, float]]) -> None:
    speed = Speed()
    for a, b, n, now in [(0.0, 1.0, 0, 0.0), *samples]:
        speed.began(a, b, 20.0, now)
        speed.ended(a, b, n, abs(n) % 700, now)
        found = speed.measured(now)
        assert found.prefill_ms_per_token == 0.0 or 1e-5 <= found.prefill_ms_per_token <= 1e3
        assert found.alone_ms == 0.0 or 1e-4 <= found.alone_ms <= 1e5
        assert found.service_ms == 0.0 or 1e-3 <= found.service_ms <= 1e8
        assert all(
            0.0 <= x < inf for x in (found.prefill_evidence, found.alone_evidence, found.service_evidence, found.var)
        )
        assert -inf < found.cov < inf


def test_a_prefill_alone_waits_for_no_decode_step() -> None:
    beside, alone = Speed(), Speed()
    for _ in range(20):
        beside.began(120.0, 1000.0, 20.0, 0.0)
        alone.prefilled(120.0, 1000.0, 0.0)
    assert beside.measured(0.0).prefill_ms_per_token == pytest.approx(0.1)
    assert alone.measured(0.0).prefill_ms_per_token == pytest.approx(0.12)


def test_a_fading_mean_is_not_carried_off_by_one_sample_and_fades() -> None:
    mean = DecayingMean()
    assert mean.read(5.0) == (0.0, 0.0)
    for n in range(40):
        mean.take(100.0, 0.1 * n)
    mean.take(1e8, 4.0)
    value, evidence = mean.read(4.0)
    assert value == pytest.approx(100.0 + 200.0 / 16.0, rel=0.01)
    assert mean.read(64.0) == (value, pytest.approx(evidence * 0.1353, rel=1e-3))
    assert mean.read(3.0) == (value, evidence)  # a step back in time is not a duration
