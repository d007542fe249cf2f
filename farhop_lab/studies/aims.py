"""Farhop's goals against other routers on the same work, and whether they were met. Pure: runs nothing.

A ratio is taken seed by seed and has its confidence interval: `met` or `missed` if the whole interval says so, `open,
met` or `open, missed` if only its mean does.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.studies import routers, tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farhop_lab.sim.stats import Interval
    from farhop_lab.studies.cell import Result
    from farhop_lab.studies.tables import Row

ORACLE = "omniscient"
BEST = "best"
"""Instead of a router's name: of all published ones, the best at that figure."""
GORGO = "best gorgo"
OPEN_SHARE, SWING_SHARE = 0.9, 0.8
"""A region's loss is overcome once means over SMOOTH_S reach this share of the ceiling and stay there for twice as
long; there is a swing if one falls below the other share afterwards.
"""
SMOOTH_S = 5


class Aim(msgspec.Struct, frozen=True):
    """A figure of Farhop's over another's. `least` and `most` bound the ratio."""

    scenario: str
    against: str
    figure: str
    least: float | None = None
    most: float | None = None
    load: float = 1.0

    @property
    def text(self) -> str:
        """As text for people."""
        bound = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return f"{self.figure} {bound} x {self.against}"


class AimResult(msgspec.Struct, frozen=True):
    """A goal and its result. `against` is the router it was compared with; `verdict` is empty if nothing was run."""

    scenario: str
    load: float
    asked: str
    against: str
    ratio: Interval | None
    verdict: str


def _never_worse(*scenarios: str) -> list[Aim]:
    return [
        aim
        for name in scenarios
        for aim in (Aim(name, BEST, "requests_per_s", least=0.98), Aim(name, BEST, "ttft_p90_ms", most=1.05))
    ]


GORGO_LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
LIGHT = 0.4
AIMS: tuple[Aim, ...] = (
    *(
        aim
        for name in ("arena", "wildchat")
        for aim in (
            Aim(name, "skywalker", "requests_per_s", least=1.10),
            Aim(name, "skywalker", "ttft_p90_ms", most=0.5),
        )
    ),
    Aim("tree-2", "skywalker-ch", "requests_per_s", least=1.05),
    Aim("tree-mixed", "skywalker-ch", "requests_per_s", least=1.05),
    *_never_worse("arena", "wildchat", "tree-2", "tree-mixed", "diurnal", "agentic", "push"),
    *(
        aim
        for load in GORGO_LOADS
        for aim in (
            Aim("gorgo", GORGO, "ttft_p95_ms", most=1.02 if load <= LIGHT else 1.0, load=load),
            Aim("gorgo", GORGO, "e2e_p95_ms", most=1.0, load=load),
        )
    ),
)


def judged(results: Sequence[Result]) -> list[AimResult]:
    """Every goal whose cells were run."""
    rows = tables.rows(results)
    found = [_judged(aim, rows) for aim in AIMS]
    return [result for result in found if result is not None]


def _judged(aim: Aim, rows: Mapping[Row, list[Result]]) -> AimResult | None:
    ours = rows.get((aim.scenario, routers.FARHOP, aim.load))
    names = [router for scenario, router, load in rows if (scenario, load) == (aim.scenario, aim.load)]
    against = _rival(aim, names, rows)
    if ours is None or against is None:
        return None
    ratio = tables.ratio(ours, rows[aim.scenario, against, aim.load], aim.figure)
    return AimResult(aim.scenario, aim.load, aim.text, against, ratio, verdict(aim, ratio))


def _rival(aim: Aim, names: Sequence[str], rows: Mapping[Row, list[Result]]) -> str | None:
    """The router to compare with: the named one, or the best of its kind at the figure."""
    if aim.against not in (BEST, GORGO):
        return aim.against if aim.against in names else None
    found: list[tuple[float, str]] = []
    for name in names:
        wanted = published(name) if aim.against == BEST else name.startswith("gorgo")
        mean = tables.figure(rows[aim.scenario, name, aim.load], aim.figure) if wanted else None
        if mean is not None:
            found.append((-mean.mean if aim.least is not None else mean.mean, name))
    return min(found)[1] if found else None


def published(name: str) -> bool:
    """Whether it is a published router: neither Farhop, whole or in part, nor the greedy oracle."""
    return name != ORACLE and not name.startswith(routers.FARHOP)


def verdict(aim: Aim, ratio: Interval | None) -> str:
    """One word, or two if the interval leaves it open."""
    if ratio is None:
        return "nothing to compare"

    def holds(value: float) -> bool:
        return (aim.least is None or value >= aim.least) and (aim.most is None or value <= aim.most)

    outcome = "met" if holds(ratio.mean) else "missed"
    sure = holds(ratio.low) == holds(ratio.high) == holds(ratio.mean)
    return outcome if sure else f"open, {outcome}"


# -- a region's loss


class Recovery(msgspec.Struct, frozen=True):
    """After a region died: seconds until goodput reached its new ceiling (None: never), the lowest and the mean share
    of it from then on, and whether it swung.
    """

    seed: int
    recovered_s: int | None
    lowest: float
    mean: float

    @property
    def steady(self) -> bool:
        """No swing after it."""
        return self.recovered_s is not None and self.lowest >= SWING_SHARE


def recovery(mine: Result, top: float, lost_at: int, back_at: int) -> Recovery:
    """The recovery in one run; `top` is the ceiling, good answers per second."""
    # By the second in which an interval of SMOOTH_S begins.
    smooth = [fmean(mine.good[at : at + SMOOTH_S]) / top for at in range(lost_at, back_at - SMOOTH_S + 1)]
    for after in range(len(smooth)):
        # Answers in the first moments were begun before the loss: it counts only if it stays at the ceiling for a
        # while.
        if min(smooth[after : after + 2 * SMOOTH_S]) >= OPEN_SHARE:
            return Recovery(mine.key.seed, after, min(smooth[after:]), fmean(smooth[after:]))
    return Recovery(mine.key.seed, None, min(smooth), fmean(smooth))
