"""Which router did better in a world, and over all worlds: rivals, verdicts, and every router held to the same goals.

Good answers to what was asked within the window count, whenever they end: counting answers that end within it would
favour a router that let more requests wait before it. A world's rival is the best router on the screening seeds; it is
judged on the others, so that it is not chosen by the luck that it is judged by. On the first seed all routers run,
Farhop too: over all worlds that compares it with each single rival.

Pure: reads results (`cell`) and the worlds they are of (`random_worlds`).
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.outcome import DIED_MID_STREAM, REFUSED_BY_ENGINE
from farhop_lab.sim.baselines.catalogue import ROUTERS
from farhop_lab.sim.stats import Interval, interval
from farhop_lab.sim.study import Objective, share_of
from farhop_lab.studies import bound, routers, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.scenarios.schema import ScenarioDoc, WorkDoc
    from farhop_lab.sim.study import Share
    from farhop_lab.studies.cell import Result
    from farhop_lab.studies.random_worlds import World

NEVER = frozenset(("omniscient", "region-local"))
"""Not rivals: one has no network delay, the other no other region."""
LOSS, SLOWER = 0.99, 1.05
GAIN = 1.03
"""The goal over the best single rival's good answers."""
FULL = 0.95
"""Share of capacity below which no request may be refused, except in floods."""


class RouterResult(msgspec.Struct, frozen=True):
    """One router's results in a world, means over seeds: shares of requests that were good and that failed, and the
    90th percentile of the time to the first token. Of the failures, `cut` had begun and ended with their balancer or
    engine, which clients do not retry; `refused` are the rest, except prompts that no engine of the world can hold.
    """

    good: float
    failed: float
    ttft_p90_ms: float
    refused: float = 0.0
    cut: float = 0.0


class Verdict(msgspec.Struct, frozen=True):
    """The verdict on one world, on the seeds that did not choose the rival. `good`, `ttft_p90` and `answer` (the mean
    time to the end of an answer) are ours over theirs; `of_bound` our share of the bound; `asked` requests, the mean
    over seeds. `all`: results by router, on the first seed.
    """

    number: int
    kind: str
    load: float
    rival: str
    good: Interval | None
    ttft_p90: Interval | None
    of_bound: float
    asked: float
    ours: RouterResult
    theirs: RouterResult
    lost: bool
    slower: bool
    about: str
    all: dict[str, RouterResult] = {}
    answer: Interval | None = None


class RivalComparison(msgspec.Struct, frozen=True):
    """Farhop against one rival over all worlds, on the seed that both ran in each. `good`: the rival's mean share of
    good answers; `more`: ours less theirs, world by world; `over`: the same less GAIN times theirs; `ttft_p90`: ours
    over theirs.
    """

    rival: str
    good: float
    ours: float
    more: Interval
    over: Interval
    ttft_p90: Interval | None


class GoalCounts(msgspec.Struct, frozen=True):
    """A router held to Farhop's goals, on the first seed: of all worlds, those in which it has at least LOSS times the
    good answers of the best of all other routers, and those in which its TTFT p90 is at most SLOWER times that one's.
    """

    router: str
    level: int
    soon: int


def rivals() -> list[str]:
    """The catalogue's routers that route between regions, one of each family and its variants; new ones are included
    automatically.
    """
    return sorted(name for name in ROUTERS if name not in NEVER and not name.startswith(("local-", "central-")))


def best(results: Sequence[Result], names: Sequence[str], count: int, tenant: str = "") -> list[str]:
    """The routers with the most good answers; between equals the lower TTFT p90 first. `tenant`: see World.judged."""
    left = list(names)
    found: list[str] = []
    while left and len(found) < count:
        found.append(chosen(results, left, tenant))
        left.remove(found[-1])
    return found


def chosen(results: Sequence[Result], names: Sequence[str], tenant: str = "") -> str:
    """The rival with the most good answers; between equals the lower TTFT p90. ValueError for no result."""

    def worth(name: str) -> tuple[float, float]:
        mine = [result.figures() for result in results if result.key.router == name]
        of = _figure_of(tenant)
        return sum(one.get(of + "good", 0.0) for one in mine), -sum(one.get(of + "ttft_p90_ms", 0.0) for one in mine)

    if not results:
        raise ValueError("no router to choose from; run the screening first")
    return max(names, key=worth)


def _figure_of(tenant: str) -> str:
    """What the names of its figures begin with."""
    return f"tenant.{tenant}." if tenant else ""


def _share_of(result: Result, tenant: str) -> Share:
    return result.score.tenants.get(tenant, share_of([], 0, Objective())) if tenant else result.score.whole


def router_result(results: Sequence[Result], tenant: str = "", *, alike: bool = False) -> RouterResult:
    """A router's means over these seeds (at least one). `alike`: all engines are of one kind, so a prompt that one
    refused as too long would have been refused by all.
    """
    shares = [_share_of(one, tenant) for one in results]
    asked = max(1, sum(one.asked for one in shares))
    failed = sum(one.failed for one in shares)
    if tenant:  # outcomes are of all tenants together
        cut = too_long = 0
    else:
        cut = sum(one.score.outcomes.get(DIED_MID_STREAM.reason, 0) for one in results)
        too_long = sum(one.score.outcomes.get(REFUSED_BY_ENGINE.reason, 0) for one in results) if alike else 0
    return RouterResult(
        good=sum(one.good for one in shares) / asked,
        failed=failed / asked,
        ttft_p90_ms=fmean(one.ttft_ms.p90 for one in shares),
        refused=(failed - too_long - cut) / asked,
        cut=cut / asked,
    )


def judged(world: World, results: Sequence[Result], rival: str, first: Sequence[Result] = ()) -> Verdict:
    """Farhop against its rival on the same seeds. `first`: all routers on the seed that all ran."""
    ours = [one for one in results if one.key.router == routers.FARHOP]
    theirs = [one for one in results if one.key.router == rival]
    tenant = world.judged
    of = _figure_of(tenant)
    good, p90 = tables.ratio(ours, theirs, of + "good"), tables.ratio(ours, theirs, of + "ttft_p90_ms")
    tops = [bound.of(world.scenario, one.key.seed, world.factor) for one in ours]
    of_top = [sum(one.good) / top for one, top in zip(ours, tops, strict=True) if top > 0.0]
    doc = world.scenario.doc
    return Verdict(
        number=world.number,
        kind=world.kind,
        load=world.load,
        rival=rival,
        good=good,
        ttft_p90=p90,
        of_bound=fmean(of_top) if of_top else 0.0,
        asked=fmean(_share_of(one, tenant).asked for one in ours),
        ours=router_result(ours, tenant, alike=len({site.gpu for site in doc.sites.values()}) == 1),
        theirs=router_result(theirs, tenant),
        lost=good is not None and good.half is not None and good.high < LOSS,
        slower=p90 is not None and p90.mean > SLOWER,
        about=_about(doc),
        answer=tables.ratio(ours, theirs, of + "e2e_mean_ms"),
        all={one.key.router: router_result([one], tenant) for one in first},
    )


def _about(doc: ScenarioDoc) -> str:
    sites = " ".join(f"{name}:{site.replicas}x{site.gpu}" for name, site in doc.sites.items())
    also = [f"balancers {max(doc.balancers.values())}", *(f"{fault.what} {fault.region}" for fault in doc.faults)]
    also += sorted({work.tenant for work in doc.work} - {"anywhere"})
    pieces = (dict(work.figures) | _bursts(work) for work in doc.work)
    return f"{sites}; {', '.join(also)}; {' + '.join(dict.fromkeys(map(str, pieces)))}"


def _bursts(work: WorkDoc) -> dict[str, Any]:
    return {"bursts": work.bursts.model_dump()} if work.bursts is not None else {}


def summary(verdicts: Sequence[Verdict]) -> dict[str, float | Interval | int | None]:
    """Over all worlds: shares of those without a loss and within the TTFT limit, and the mean ratio."""
    ratios = [one.good.mean for one in verdicts if one.good is not None]
    return {
        "worlds": len(verdicts),
        "without_loss": sum(not one.lost for one in verdicts) / len(verdicts) if verdicts else None,
        "ttft_p90_within": sum(not one.slower for one in verdicts) / len(verdicts) if verdicts else None,
        "good_ratio": interval(ratios) if ratios else None,
        "refused_below_capacity": len(refused_below_capacity(verdicts)),
    }


def refused_below_capacity(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Worlds below capacity in which we refused requests that could be served."""
    return [one for one in verdicts if one.ours.refused > 0.0 and one.load < FULL and one.kind != "flood"]


def rival_comparisons(verdicts: Sequence[Verdict]) -> list[RivalComparison]:
    """Farhop against each rival that ran in every world, the best rival first."""
    everywhere = set.intersection(*(set(one.all) for one in verdicts)) if verdicts else set()
    if routers.FARHOP not in everywhere:
        return []
    ours = [one.all[routers.FARHOP] for one in verdicts]
    found = []
    for rival in everywhere - {routers.FARHOP}:
        theirs = [one.all[rival] for one in verdicts]
        pairs = list(zip(ours, theirs, strict=True))
        p90 = [a.ttft_p90_ms / b.ttft_p90_ms for a, b in pairs if b.ttft_p90_ms]
        found.append(
            RivalComparison(
                rival=rival,
                good=fmean(one.good for one in theirs),
                ours=fmean(one.good for one in ours),
                more=interval([a.good - b.good for a, b in pairs]),
                over=interval([a.good - GAIN * b.good for a, b in pairs]),
                ttft_p90=interval(p90) if p90 else None,
            )
        )
    return sorted(found, key=lambda one: (-one.good, one.rival))


def goal_counts(verdicts: Sequence[Verdict]) -> dict[str, GoalCounts]:
    """Of every router that ran in every world, Farhop too: what the goals say little about without it."""
    found = {}
    for router in set.intersection(*(set(one.all) for one in verdicts)) if verdicts else set():
        level = soon = 0
        for one in verdicts:
            mine, others = one.all[router], [other for name, other in one.all.items() if name != router]
            best = max(others, key=lambda other: (other.good, -other.ttft_p90_ms), default=mine)
            level += mine.good >= LOSS * best.good
            soon += mine.ttft_p90_ms <= SLOWER * best.ttft_p90_ms
        found[router] = GoalCounts(router, level, soon)
    return found


__all__ = [
    "FULL", "GAIN", "LOSS", "SLOWER", "GoalCounts", "RivalComparison", "RouterResult", "Verdict", "best", "chosen",
    "goal_counts", "judged", "refused_below_capacity", "rival_comparisons", "rivals", "router_result", "summary",
]  # fmt: skip
