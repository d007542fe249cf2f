"""Turning scores into one choice: a draw by weight, the better of two.

Never writes what it reads and never rolls its own dice. Invariants: an index returned is a valid one; a weight that is
not a positive finite number is never drawn while another is.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random


def draw(weights: Sequence[float], rng: Random) -> int:
    """One index in proportion to `weights`, by one call of rng.random(); uniform if no weight is positive.

    Negative, NaN and infinite weights count as 0: what cannot be trusted draws nothing. ValueError if empty.
    """
    n = len(weights)
    if n == 0:
        raise ValueError("draw() needs at least one weight")
    total = 0.0
    running: list[float] = []
    last = -1
    for i, weight in enumerate(weights):
        if 0.0 < weight < inf:
            total += weight
            last = i
        running.append(total)
    if last < 0:
        return int(rng.random() * n)
    if total == inf:
        # Only weights near the largest float can get here; a common factor leaves the proportions as they are.
        return draw([weight / (2.0 * n) if 0.0 < weight < inf else 0.0 for weight in weights], rng)
    # First running total above the point, so that an index of no weight, whose total repeats, is stepped over. The
    # product may round up to the total itself: then the point belongs to the last index that has weight.
    return min(bisect_right(running, rng.random() * total), last)


def pick_two(scores: Sequence[float], rng: Random) -> int:
    """Power of two choices: draw two distinct indices, return the one with the lower score. ValueError if empty.

    Mitzenmacher 2001. The first drawn wins a tie; as it is drawn uniformly, ties favour no index. NaN loses.
    """
    n = len(scores)
    if n <= 1:
        if n == 0:
            raise ValueError("pick_two() needs at least one score")
        return 0
    first, second = two_of(n, rng)
    a, b = scores[first], scores[second]
    return second if b < a or a != a else first


def two_of(n: int, rng: Random) -> tuple[int, int]:
    """Two distinct indices below `n`, which is 2 at least, each order of each pair as likely."""
    first = int(rng.random() * n)
    second = int(rng.random() * (n - 1))
    return first, second + (second >= first)
