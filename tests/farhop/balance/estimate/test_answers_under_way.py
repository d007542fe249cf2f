"""How long answers will be at the least, by those under way and how many end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate import estimates as module
from farhop.balance.estimate.answers_under_way import GUESS_WORTH, AnswersUnderWay
from farhop.balance.estimate.estimates import FAR_LONGER, OUTPUT_TOKENS, Estimates
from farhop.balance.estimate.occupancy import AGES, LEFT_LEAST
from farhop.balance.machine import Usage

RUN = settings(max_examples=100, deadline=None, derandomize=True)
PER_S = 50.0


def test_until_an_answer_has_ended_the_estimate_follows_the_lengths_so_far() -> None:
    answers = AnswersUnderWay()
    assert answers.least_tokens(9.0, 100.0) == 0.0
    for second in range(80):
        answers.began(PER_S, second / 10)
    assert answers.least_tokens(8.0, 100.0) == pytest.approx(AGES * 4.05 * PER_S)  # 0.1 to 8 s
    alone = AnswersUnderWay()
    alone.began(PER_S, 0.0)
    assert alone.least_tokens(8.0, 100.0) == pytest.approx((8 * PER_S + GUESS_WORTH * 100.0) / GUESS_WORTH)


def test_the_estimate_is_not_biased_by_short_answers_ending_first() -> None:
    """A burst of answers of 2,000 tokens in the mean, looked at when a fifth have ended: those had some 200."""
    dice, answers, now = Random(1), AnswersUnderWay(), 10.0
    lengths = [dice.expovariate(1 / 2000.0) for _ in range(400)]
    for _ in lengths:
        answers.began(PER_S, 0.0)
    ended = [tokens for tokens in lengths if tokens <= now * PER_S]
    for tokens in ended:
        answers.over(PER_S, 0.0, tokens, ended=True)
    assert sum(ended) / len(ended) < 300.0
    assert answers.least_tokens(now, 300.0) == pytest.approx(2000.0, rel=0.2)


def test_the_estimate_is_above_zero_until_as_many_answers_have_ended_as_are_under_way() -> None:
    answers = AnswersUnderWay()
    for _ in range(4):
        answers.began(PER_S, 0.0)
    answers.over(PER_S, 0.0, 50.0, ended=True)
    assert answers.least_tokens(1.0, 50.0) > 0.0
    answers.over(PER_S, 0.0, 50.0, ended=True)
    assert answers.least_tokens(1.0, 50.0) == 0.0


def test_an_answer_broken_off_does_not_count_as_ended() -> None:
    answers = AnswersUnderWay()
    for _ in range(3):
        answers.began(PER_S, 0.0)
    answers.over(PER_S, 0.0, 100.0, ended=False)
    assert answers.least_tokens(2.0, 50.0) == pytest.approx((3 * 100.0 + GUESS_WORTH * 50.0) / GUESS_WORTH)


steps = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.sampled_from(("began", "ended", "broke")), st.floats(0.01, 1e5)), max_size=200
)


@RUN
@given(steps)
def test_the_estimate_is_never_negative_and_bounded_by_the_progress_of_running_answers(steps) -> None:
    answers, under_way, now = AnswersUnderWay(), list[tuple[float, float]](), 0.0
    for dt, what, number in steps:
        now += dt
        if what == "began":
            answers.began(number, now)
            under_way.append((number, now))
        elif under_way:
            per_s, began_at = under_way.pop(0)
            answers.over(per_s, began_at, number, ended=what == "ended")
        assert answers.in_flight == len(under_way)
        so_far = sum(per_s * (now - began_at) for per_s, began_at in under_way)
        least = answers.least_tokens(now, 100.0)
        # The sums are of numbers far larger than the remainders.
        assert 0.0 <= least <= AGES * so_far / max(1, len(under_way)) * 1.01 + 1.0


def test_old_answers_are_forgotten_as_new_ones_end() -> None:
    answers = AnswersUnderWay()
    for n in range(2000):
        answers.began(PER_S, float(n))
        answers.over(PER_S, float(n), 10.0 if n < 1000 else 500.0, ended=True)
    for _ in range(int(LEFT_LEAST) + 1):
        answers.began(PER_S, 2000.0)
    said = 64 * 500.0 + 65 * PER_S * 998_000 + GUESS_WORTH * 7.0
    assert answers.least_tokens(1e6, 7.0) == pytest.approx(said / (64 + GUESS_WORTH))


def test_running_answers_far_longer_than_the_estimate_raise_it() -> None:
    estimates = Estimates()
    for _ in range(40):
        estimates.began("acme", "m", PER_S, 0.0)
    estimates.now = 60.0
    assert estimates.output_tokens("acme", "m", None) == pytest.approx(AGES * 60.0 * PER_S)
    assert estimates.output_tokens("acme", "m", 700) == 700.0
    assert estimates.output_tokens("other", "m", None) == OUTPUT_TOKENS
    estimates.now = 0.9 * FAR_LONGER * OUTPUT_TOKENS / AGES / PER_S
    assert estimates.output_tokens("acme", "m", None) == OUTPUT_TOKENS, "not far enough"
    for tokens in range(40):
        estimates.over("acme", "m", PER_S, 0.0, tokens, ended=True)
        estimates.learn("acme", "m", 1000, Usage(250, tokens))
    assert estimates.output_tokens("acme", "m", None) < 30.0
    for _ in range(20):
        estimates.began("acme", "m", PER_S, 0.0)
    estimates.now = 60.0
    assert estimates.output_tokens("acme", "m", None) < 50.0, "more ended than are under way"


def test_answers_under_way_are_never_dropped_and_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 8)
    estimates = Estimates()
    for n in range(100):
        estimates.began(f"t{n}", "m", PER_S, 0.0)
        if n:
            estimates.over(f"t{n}", "m", PER_S, 0.0, 5.0, ended=True)
    assert len(estimates.under_way) == 8
    estimates.over("t0", "m", PER_S, 0.0, 5.0, ended=True)
