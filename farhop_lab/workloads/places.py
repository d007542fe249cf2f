"""Rules that give a session its region. No public trace says where work comes from, so it is synthesised, and varied.

uniform · by_weight (population, or any share) · zipf (one region has most) · following_sun (by local time of day)

A rule is a pure function of (session, time in seconds), by the hash of the session's name, so a session keeps its
region (under following_sun that of the time when it began) and every policy gets the same. A region of weight 0 never
gets a session.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import isfinite

from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.daylight import Daylight
from farhop_lab.workloads.program import WorkloadError

PlaceRule = Callable[[str, float], str]
"""(session, seconds) -> region."""


def chance(session: str, salt: str = "") -> float:
    """A number in [0, 1) that is fixed for this session and `salt`."""
    # 53 bits: what a float holds; 64 would round up to 1.
    return (xxh3_64_intdigest(f"{salt}\0{session}".encode()) >> 11) / 2.0**53


def by_weight(weights: Mapping[str, float], salt: str = "") -> PlaceRule:
    """Sessions by these weights (any unit). WorkloadError if there is none, one is negative, or all are 0."""
    names, marks = _marks(weights)

    def place(session: str, _at: float) -> str:
        return names[bisect_right(marks, chance(session, salt) * marks[-1])]

    return place


def uniform(regions: Sequence[str], salt: str = "") -> PlaceRule:
    """Each region alike."""
    return by_weight(dict.fromkeys(regions, 1.0), salt)


def zipf(regions: Sequence[str], exponent: float = 1.0, salt: str = "") -> PlaceRule:
    """The first region most, the n-th 1/n^exponent of that."""
    return by_weight({name: rank**-exponent for rank, name in enumerate(regions, 1)}, salt)


def following_sun(regions: Mapping[str, Daylight], salt: str = "") -> PlaceRule:
    """Weighted by how awake each region is at that time."""

    def place(session: str, at: float) -> str:
        names, marks = _marks({name: day.level(at) for name, day in regions.items()})
        return names[bisect_right(marks, chance(session, salt) * marks[-1])]

    return place


def _marks(weights: Mapping[str, float]) -> tuple[list[str], list[float]]:
    """Names with a weight above 0, and the running sums."""
    for name, weight in weights.items():
        if not (isfinite(weight) and weight >= 0.0):
            raise WorkloadError(f"weight of {name}: {weight!r} is not a number of 0 or more")
    names = [name for name, weight in weights.items() if weight > 0.0]
    if not names:
        raise WorkloadError("weights: no region has any; give at least one above 0")
    return names, list(accumulate(weights[name] for name in names))
