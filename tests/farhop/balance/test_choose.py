"""Choices are valid, fair in the stated proportion, and blind to what is no number."""

from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.choose import draw, pick_two

RUN = settings(max_examples=200, deadline=None, derandomize=True)


@given(st.lists(st.floats(), min_size=1, max_size=20), st.integers(0, 2**32))
@RUN
def test_a_draw_never_takes_a_weight_it_cannot_trust(weights: list[float], seed: int) -> None:
    drawn = draw(weights, Random(seed))
    assert 0 <= drawn < len(weights)
    if any(0 < weight < inf for weight in weights):
        assert 0 < weights[drawn] < inf


def test_a_draw_is_in_proportion() -> None:
    rng = Random(5)
    weights = [1.0, 0.0, 3.0, -4.0, nan, 6.0]
    counts = [0] * 6
    for _ in range(20_000):
        counts[draw(weights, rng)] += 1
    # Standard deviation of a share at most sqrt(.25 / 20000) = 0.0035: 0.02 is more than five of them.
    assert [count / 20_000 for count in counts] == pytest.approx([0.1, 0, 0.3, 0, 0, 0.6], abs=0.02)


def test_no_weight_at_all_draws_uniformly() -> None:
    rng = Random(6)
    counts = [0] * 4
    for _ in range(8_000):
        counts[draw([0.0, -1.0, nan, 0.0], rng)] += 1
    assert [count / 8_000 for count in counts] == pytest.approx([0.25] * 4, abs=0.03)


class Edge(Random):
    """Rolls the greatest float below 1, where a product may round up to the total."""

    def random(self) -> float:
        return 1.0 - 2**-53


def test_a_draw_at_the_edge_takes_the_last_that_has_weight() -> None:
    assert draw([5e-324, 5e-324, 0.0], Edge()) == 1
    assert draw([0.0, 0.0], Edge()) == 1
    assert draw([1.7e308, 1.7e308, 0.0], Edge()) == 1


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=20), st.integers(0, 2**32))
@RUN
def test_pick_two_never_takes_the_worst_unless_tied(scores: list[float], seed: int) -> None:
    picked = pick_two(scores, Random(seed))
    worst = max(scores)
    assert scores[picked] < worst or scores.count(worst) > 1


def test_pick_two_favours_the_better_and_no_place_among_equals() -> None:
    rng = Random(7)
    counts = [0] * 3
    for _ in range(12_000):
        counts[pick_two([1.0, 2.0, 3.0], rng)] += 1
    # Of the three pairs the best is in two, the middle wins one.
    assert [count / 12_000 for count in counts] == pytest.approx([2 / 3, 1 / 3, 0], abs=0.02)
    counts = [0] * 3
    for _ in range(12_000):
        counts[pick_two([1.0, 1.0, 1.0], rng)] += 1
    assert [count / 12_000 for count in counts] == pytest.approx([1 / 3] * 3, abs=0.02)


def test_pick_two_of_one_and_of_nan() -> None:
    assert pick_two([9.0], Random(1)) == 0
    assert {pick_two([nan, 9.0], Random(seed)) for seed in range(20)} == {1}


def test_choosing_from_nothing_is_an_error() -> None:
    with pytest.raises(ValueError):
        draw([], Random(1))
    with pytest.raises(ValueError):
        pick_two([], Random(1))
