"""How full a KV cache gets: answers staggered or begun together, with the margin for chance."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import replica, replicas_of

from farhop.balance.ledger import Reservation
from regional_lb.fleet.kv_growth import CHANCE, AnswerLengths, peak_tokens

sequences = st.lists(
    st.tuples(st.floats(0.0, 5_000.0), st.integers(0, 3_000).map(float), st.floats(0.0, 6_000.0)),
    min_size=1,
    max_size=20,
)
shares = st.lists(st.floats(0.001, 100.0), max_size=30)


def learned(ratios) -> AnswerLengths:
    lengths = AnswerLengths()
    for ratio in ratios:
        lengths.learn(ratio * 100.0, 100.0)
    return lengths


def peak(rows, lengths: AnswerLengths) -> float:
    return peak_tokens(np.array(rows, dtype=float).T, lengths)


@given(sequences, shares, st.data())
@settings(max_examples=60, deadline=None)
def test_predicted_kv_growth_covers_what_is_held_and_grows_with_the_load(rows, ratios, data) -> None:
    lengths = learned(ratios)
    whole = peak(rows, lengths)
    most = lengths.usual_share
    now = sum(held + (min(found, most * expected) if expected else 0.0) for held, expected, found in rows)
    assert whole >= now - 1e-6
    n = data.draw(st.integers(0, len(rows) - 1))
    fewer = [*rows[:n], *rows[n + 1 :]]
    assert not fewer or peak(fewer, lengths) <= whole + 1e-6
    held, expected, found = rows[n]
    larger = [*rows]
    larger[n] = held + data.draw(st.floats(0.0, 2_000.0)), expected, found
    assert peak(larger, lengths) >= whole - 1e-6


@pytest.mark.parametrize("n", [1, 2, 3, 5, 20])
def test_few_sequences_are_never_predicted_above_their_full_lengths(n: int) -> None:
    # With so few, a normal distribution says that there are 1 to 18 % more of them than there are.
    lengths = learned([1.0] * 200)  # all as long as expected
    rows = [(2_000.0, 100.0, 0.0)] * n
    assert peak(rows, lengths) <= n * (2_000.0 + 1.2 * 100.0)


def test_an_answer_that_runs_for_longer_than_usual_is_expected_no_longer_than_usual() -> None:
    # Loads rise, nothing has ended yet, and a token takes twice as long as estimated: by their ages all of them would
    # have written twice the expected length, and be the few that never end.
    lengths = AnswerLengths()
    assert lengths.usual_share == pytest.approx(1.0)
    aged = [(300.0, 256.0, 20.0 * n) for n in range(40)]
    assert peak(aged, lengths) <= 1.1 * 40 * (300.0 + 256.0)
    assert peak([(300.0, 256.0, 5_000.0)], lengths) == peak([(300.0, 256.0, 256.0)], lengths)
    twice = learned([2.0] * 200)
    assert twice.usual_share == pytest.approx(2.0)
    assert peak([(300.0, 256.0, 400.0)], twice) > peak([(300.0, 256.0, 256.0)], twice)


@given(shares, st.floats(0.0, 100.0))
@settings(max_examples=60, deadline=None)
def test_the_share_of_longer_answers_falls_with_length_and_is_never_zero(ratios, share: float) -> None:
    lengths = learned(ratios)
    longer = lengths.longer(np.array([0.0, share, share + 0.5]))
    assert longer[0] == 1.0
    assert 1.0 >= longer[1] >= longer[2] > 0.0


@pytest.mark.parametrize("prompt", [0.0, 300.0, 3_000.0])
def test_staggered_answers_take_little_more_than_now_and_those_that_began_together_all(prompt: float) -> None:
    lengths = learned([1.0] * 200)
    together = [(prompt, 400.0, 0.0)] * 40
    staggered = [(prompt, 400.0, 10.0 * n) for n in range(40)]
    whole = 40 * (prompt + 400.0)
    assert whole <= peak(together, lengths) <= 1.2 * whole
    now = sum(held + text for held, _, text in staggered)
    assert peak(staggered, lengths) <= 1.12 * now


@pytest.mark.parametrize("apart", [0.0, 2.0])
def test_until_answers_have_ended_not_all_are_thought_to_get_as_long_as_was_guessed(apart: float) -> None:
    """Else a fleet that starts seems full while half of its caches is empty; one kind of answers is soon known."""
    rows = [(145.0, 256.0, apart * n) for n in range(60)]
    whole = 60 * (145.0 + 256.0)
    assert sum(held + found for held, _, found in rows) <= peak(rows, AnswerLengths()) <= 0.6 * whole
    assert peak([(145.0, 256.0, 0.0)] * 60, learned([1.0] * 60)) >= 0.9 * whole


def test_sequences_without_an_answer_do_not_grow() -> None:
    assert peak([(700.0, 0.0, 0.0), (300.0, 0.0, 50.0)], AnswerLengths()) == 1_000.0


def test_old_samples_of_kv_growth_are_forgotten() -> None:
    lengths = learned([3.0] * 500)
    assert lengths.longer(np.array([2.0]))[0] > 0.9
    for _ in range(1_500):
        lengths.learn(10.0, 100.0)
    assert lengths.longer(np.array([0.5]))[0] < 0.02


@pytest.mark.parametrize("shape", ["alike", "log-normal", "exponential", "two kinds"])
@pytest.mark.parametrize("ages", ["together", "staggered"])
def test_the_cache_is_outgrown_no_more_often_than_its_chance(shape: str, ages: str) -> None:
    """Batches are drawn as answers are, aged, and played to their end."""
    rng = Random(f"{shape} {ages}")
    draw = {
        "alike": lambda: rng.uniform(0.9, 1.0),
        "log-normal": lambda: np.exp(rng.gauss(0.0, 0.8) - 0.32),
        "exponential": lambda: max(0.01, rng.expovariate(1.0)),
        "two kinds": lambda: rng.choice((0.1, 1.9)) * rng.uniform(0.9, 1.0),
    }[shape]
    lengths = learned([draw() for _ in range(400)])
    moments = np.arange(0.0, 1_600.0, 20.0)
    outgrown = np.zeros(len(moments))
    for _ in range(400):
        rows, ends = [], []
        while len(rows) < 24:
            expected, end = 200.0, 200.0 * draw()
            found = 0.0 if ages == "together" else rng.uniform(0.0, 600.0)
            if found < end:  # requests that ended before are not there
                rows.append((rng.choice((50.0, 400.0)), expected, found))
                ends.append(end)
        held, _, found = np.array(rows).T
        grown = np.add.outer(found, moments)
        taken = ((grown < np.array(ends)[:, None]) * (held[:, None] + grown)).sum(axis=0)
        outgrown += taken > peak(rows, lengths)
    assert outgrown.max() / 400 <= CHANCE + 0.02


def test_a_replica_has_room_for_more_where_answers_are_staggered() -> None:
    """Of 40 requests with 100 tokens of prompt and 400 of answer, 20,000 tokens if all were there whole."""
    room = {}
    for ages in ("together", "staggered"):
        known = replicas_of(replica("r", slots=256, kv_tokens=20_000, tpot_ms=20.0))
        for _ in range(200):
            known.answer_ended("r", 400, 400.0)
        for n in range(40):
            known.now = 100.0
            known.ledger.reserve(f"q{n}", Reservation("r", 0, 500, (), 400))
            known.ledger.began(f"q{n}", 100.0 if ages == "together" else 100.0 - 0.2 * n)
        room[ages] = known.whole.kv_room_tokens.item(0)
        known.ledger.release("q0")
        assert known.whole.kv_room_tokens.item(0) > room[ages]
    assert room["together"] < 0.0 < 4_000.0 < room["staggered"]
