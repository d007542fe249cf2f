"""Tables of results: by scenario, router and load, each figure over its seeds, and ratios on the same work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.stats import Interval, interval
from farhop_lab.sim.stats import ratio as ratio_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farhop_lab.studies.cell import Result

Row = tuple[str, str, float]
"""Scenario, router, load."""


def rows(results: Iterable[Result]) -> dict[Row, list[Result]]:
    """By row, in order of appearance; seeds ascending."""
    found: dict[Row, list[Result]] = {}
    for result in results:
        key = result.key
        found.setdefault((key.scenario, key.router, key.load), []).append(result)
    return {row: sorted(those, key=lambda result: result.key.seed) for row, those in found.items()}


def figure(results: Iterable[Result], name: str) -> Interval | None:
    """A figure over the results that have it; None if none has."""
    found = [figures[name] for figures in (result.figures() for result in results) if name in figures]
    return interval(found) if found else None


def ratio(ours: Iterable[Result], theirs: Iterable[Result], name: str) -> Interval | None:
    """Ours over theirs, seed by seed, where both have the figure and theirs is not 0; None if no seed has."""
    by_seed = {result.key.seed: result.figures().get(name) for result in theirs}
    pairs = [
        (mine, other)
        for mine, other in ((result.figures().get(name), by_seed.get(result.key.seed)) for result in ours)
        if mine is not None and other
    ]
    return ratio_of([mine for mine, _ in pairs], [other for _, other in pairs]) if pairs else None
