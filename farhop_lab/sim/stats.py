"""Statistics over several seeds: means with confidence intervals, ratios of pairs, fairness, the least that is enough.

Pure. Worlds of one seed get the same programs, so two policies are compared seed by seed (`ratio`): the seed's effect
on both drops out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, sqrt
from statistics import fmean, stdev

import msgspec

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any table, e.g. NIST's handbook, 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
CORRELATED = 2.0


def t95(freedom: int) -> float:
    """Student's t for a two-sided 95 % interval. ValueError below 1 degree of freedom."""
    if freedom < 1:
        raise ValueError(f"freedom: {freedom} is below 1; an interval needs two values")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    # Beyond the table: 1.96 plus the first terms of its expansion, right to 0.001 from 30 on.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


class Interval(msgspec.Struct, frozen=True):
    """A mean of `n` values and half the width of its 95 % confidence interval; None for a single value."""

    mean: float
    half: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.half is None else f"{self.mean:.4g} ± {self.half:.2g}"

    @property
    def low(self) -> float:
        """Its lower end; minus infinity for a single value."""
        return -inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """Its upper end; infinity for a single value."""
        return inf if self.half is None else self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean and its confidence interval (Student's t: values taken as normal and independent). ValueError for no
    values, or for a value that is not finite.
    """
    if not values or not all(map(isfinite, values)):
        raise ValueError(f"values: {list(values)[:5]} have no mean; give at least one, all of them finite")
    if len(values) == 1:
        return Interval(values[0], None, 1)
    return Interval(fmean(values), t95(len(values) - 1) * stdev(values) / sqrt(len(values)), len(values))


def share_interval(good: float, asked: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of the share that is estimated from `good` of `asked` (Wilson's; `z` 1.96: 95 %). Requests of one
    run are not independent, since one that waits delays others: two count as one. ValueError for none.
    """
    if not 0.0 <= good <= asked or not asked:
        raise ValueError(f"{good} of {asked} is no share; give at least one request")
    n, share = asked / CORRELATED, good / asked
    centre = share + z * z / (2.0 * n)
    half = z * sqrt(max(0.0, share * (1.0 - share)) / n + z * z / (4.0 * n * n))
    return (centre - half) / (1.0 + z * z / n), (centre + half) / (1.0 + z * z / n)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours over theirs, seed by seed: both in the order of the same seeds. ValueError if their lengths differ or a
    value of theirs is 0.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values against {len(theirs)}; run both on the same seeds")
    if 0.0 in theirs:
        raise ValueError("a ratio to 0; compare differences instead")
    return interval([a / b for a, b in zip(ours, theirs, strict=True)])


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index (Jain et al. 1984): (sum x)^2 / (n sum x^2), 1/n if one has all, 1 if all are equal. 1 for
    an empty sequence and for zeros only.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0.0 else 1.0


def fewest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number within [low, high] that is enough, None if `high` is not; by bisection, so everything above an
    enough number must be enough, too. Asks about log2(high - low) times. ValueError for an empty range.
    """
    if low > high:
        raise ValueError(f"low {low} is above high {high}; give a range")
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
