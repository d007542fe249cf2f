"""Arrival times of an open loop: times from rates, and schedules made, merged, thinned and sped up.

Pure: takes random generators. Invariants: times ascend; the random numbers of one stream do not depend on another's;
what a schedule starts does not depend on the world's answers. Rates are per second of the timeline, times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isfinite
from random import Random

import msgspec

from farhop_lab.workloads.places import PlaceRule, chance
from farhop_lab.workloads.program import Program, Schedule, Start, WorkloadError

Maker = Callable[[str, Random], Program]
"""(name, random generator) -> program."""


def poisson(per_s: float, rng: Random, *, since: float = 0.0, until: float = inf) -> Iterator[float]:
    """Times at a constant rate; none at a rate of 0."""
    _rate(per_s)
    at = since
    while per_s > 0.0:
        at += rng.expovariate(per_s)
        if at >= until:
            return
        yield at


def varying(per_s: Callable[[float], float], most_per_s: float, rng: Random, *, until: float = inf) -> Iterator[float]:
    """Times at a varying rate, by thinning (Lewis and Shedler 1979): `per_s` of a time must never exceed `most_per_s`
    (WorkloadError).
    """
    for at in poisson(most_per_s, rng, until=until):
        rate = per_s(at)
        if not 0.0 <= rate <= most_per_s * (1.0 + 1e-9):
            raise WorkloadError(f"a rate of {rate} a second at {at} s is not within 0 and {most_per_s}; give its bound")
        if rng.random() * most_per_s < rate:
            yield at


class Burst(msgspec.Struct, frozen=True):
    """An interval of `seconds` from `at` on with the rate `per_s`, and gaps of this coefficient of variation (1:
    Poisson; above: bursty).
    """

    at: float
    seconds: float
    per_s: float
    cv: float = 1.0


def renewals(bursts: Iterator[Burst], rng: Random) -> Iterator[float]:
    """Times in intervals, gaps gamma-distributed with each one's rate and variation (as ServeGen models clients)."""
    for burst in bursts:
        _rate(burst.per_s)
        if burst.per_s <= 0.0 or burst.seconds <= 0.0:
            continue
        shape = 1.0 / max(burst.cv, 0.05) ** 2
        scale = 1.0 / (burst.per_s * shape)
        # The first gap is the rest of one that began before: a random share of it.
        at = burst.at + rng.random() * rng.gammavariate(shape, scale)
        while at < burst.at + burst.seconds:
            yield at
            at += rng.gammavariate(shape, scale)


def bunched(moments: Iterator[float], every_s: float, for_s: float) -> Iterator[float]:
    """The same arrivals, but those of each `every_s` all come within its first `for_s`, in their order; 0: at one
    instant. The mean rate stays. WorkloadError unless 0 <= for_s <= every_s, with every_s above 0.
    """
    if not (isfinite(every_s) and 0.0 <= for_s <= every_s and every_s > 0.0):
        raise WorkloadError(f"bursts of {for_s} s every {every_s} s: give every_s above 0, and for_s from 0 up to it")
    before = -inf
    for moment in moments:
        number, rest = divmod(moment, every_s)
        before = max(before, number * every_s + rest * (for_s / every_s))  # rounding must not put them out of order
        yield before


def programs(moments: Iterator[float], place: PlaceRule, make: Maker, name: str) -> Schedule:
    """A program at each time: the n-th is called "<name> n", and has the random generator and region of that name.
    `name` should contain the seed: equal names give equal requests.
    """
    for number, at in enumerate(moments):
        called = f"{name} {number}"
        yield Start(at, place(called, at), _later(make, called))


def placed(moments: Iterator[tuple[float, str]], make: Maker, name: str) -> Schedule:
    """The same with times that have regions."""
    for number, (at, region) in enumerate(moments):
        yield Start(at, region, _later(make, f"{name} {number}"))


def thinned(schedule: Schedule, share: float, rng: Random) -> Schedule:
    """This share (0..1) of a schedule. Sessions are kept or left out whole: a part of one would reuse what was never
    asked before.
    """
    if not 0.0 <= share <= 1.0:
        raise WorkloadError(f"share: {share} is not within 0 and 1")
    salt = f"{rng.random()}"
    return (s for s in schedule if (chance(s.session, salt) if s.session else rng.random()) < share)


def sped(schedule: Schedule, speed: float, *, since: float = 0.0) -> Schedule:
    """A schedule's starts from `since` on, `speed` times as fast; `since` becomes 0."""
    if not (isfinite(speed) and speed > 0.0):
        raise WorkloadError(f"speed: {speed} is not a number above 0; 2 is twice as fast")
    for start in schedule:
        if start.at >= since:
            yield Start((start.at - since) / speed, start.region, start.make, start.session)


def _later(make: Maker, name: str) -> Callable[[], Program]:
    return lambda: make(name, Random(name))


def _rate(per_s: float) -> None:
    if not (isfinite(per_s) and per_s >= 0.0):
        raise WorkloadError(f"per_s: {per_s!r} is no rate; give 0 or more a second")
