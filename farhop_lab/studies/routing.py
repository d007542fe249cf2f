"""The standing comparison: which scenarios are run under which routers, and the fleet that a day needs.

Names and figures; `pool` runs them, `aims` judges. The quick comparison is the same scenarios for a shorter time, with
fewer seeds and the most important rivals: rough, and labelled so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop_lab.scenarios import load
from farhop_lab.studies import pool, routers
from farhop_lab.studies.ablations import ABLATIONS
from farhop_lab.studies.aims import ORACLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.studies.cell import Result

SCENARIOS = ("arena", "wildchat", "tree-2", "tree-mixed", "diurnal", "agentic", "push", "gorgo", "loss")
ABLATED = ("arena", "tree-2", "gorgo")
FLEETS = (6, 7, 8, 9, 10, 12)
LOCAL = "region-local"
QUICK_S = {"diurnal": 1500.0, "loss": 420.0}
# Of every family the variants that may be its strongest: which one is, differs by scenario.
QUICK_RIVALS = frozenset((
    "farhop", "skywalker", "skywalker-unpaced", "skywalker-ch", "spill-consistent-hash", "spill-least-load",
    "spill-llm-d", "spill-aibrix", "spill-dynamo", "spill-kvaware", "spill-preble",
    "gorgo-each", "gorgo-each-long", "gorgo-each-tuned", "gorgo-each-calibrated", "omniscient",
))  # fmt: skip


class Plan(msgspec.Struct, frozen=True):
    """The extent of the comparison."""

    quick: bool = False
    quick_s: float = 90.0
    seeds: int | None = None
    only: tuple[str, ...] = ()


def scenarios(plan: Plan) -> list[tuple[Scenario, list[str]]]:
    """Each scenario with its routers, ablations and fleets included."""
    found: list[tuple[Scenario, list[str]]] = []
    for name in SCENARIOS:
        if plan.only and name not in plan.only:
            continue
        scenario = load.find(name, routers.names())
        names = list(scenario.doc.routers)
        if name in ABLATED:
            names += [ablated for ablated in ABLATIONS if ablated not in names]
        if plan.quick:
            scenario, names = _quick(scenario, names, plan.quick_s)
        found.append((scenario, names))
        if name == "diurnal":
            found += [(fleet(scenario, replicas), [routers.FARHOP]) for replicas in FLEETS]
            found.append((fleet(scenario, 12), [LOCAL]))
    return found


def _quick(scenario: Scenario, names: list[str], quick_s: float) -> tuple[Scenario, list[str]]:
    doc = scenario.doc
    time_s = QUICK_S.get(doc.name, quick_s)
    loads = [doc.loads[0], *doc.loads[-2:]] if len(doc.loads) > 3 else doc.loads
    scenario = scenario.but(duration_s=time_s, warm_up_s=min(doc.warm_up_s, time_s / 3), loads=loads)
    few = [name for name in names if name in QUICK_RIVALS or name.startswith(routers.FARHOP)]
    return scenario, few


def fleet(scenario: Scenario, replicas: int) -> Scenario:
    """The same work for this many replicas in all, spread evenly, the first sites first; at least one in each."""
    sites = scenario.doc.sites
    each, rest = divmod(replicas, len(sites))
    spread = {
        name: site.model_copy(update={"replicas": max(1, each + (place < rest))})
        for place, (name, site) in enumerate(sites.items())
    }
    name = f"{scenario.doc.name}-{replicas}"
    return scenario.but(name=name, work_name=scenario.work_name, sites=spread, routers=[routers.FARHOP])


def jobs(plan: Plan) -> list[pool.Job]:
    """All cells."""
    found: list[pool.Job] = []
    for scenario, names in scenarios(plan):
        seeds = plan.seeds or (2 if plan.quick else scenario.doc.seeds)
        found += pool.jobs(scenario, names, range(1, seeds + 1))
    return found


def needed(results: Sequence[Result], figure: str = "good_per_s") -> tuple[int | None, dict[int, float]]:
    """The smallest fleet whose mean of the figure is no less than region-local's with 12; and the share of that by
    fleet.
    """
    means: dict[str, list[float]] = {}
    for result in results:
        if result.key.scenario.startswith("diurnal-"):
            name = "local" if result.key.router == LOCAL else result.key.scenario.rpartition("-")[2]
            means.setdefault(name, []).append(result.figures()[figure])
    local = means.pop("local", None)
    if not local or not sum(local):
        return None, {}
    bar = sum(local) / len(local)
    shares = {int(name): sum(those) / len(those) / bar for name, those in means.items()}
    enough = [replicas for replicas, share in shares.items() if share >= 1.0]
    return (min(enough) if enough else None), dict(sorted(shares.items()))


def loss() -> tuple[float, int, int]:
    """Of the scenario `loss`: what the remaining replicas can carry, per second (its rate at load 1 is what all can, as
    measured when it was written), and the seconds in which the region dies and is back.
    """
    doc = load.find("loss", routers.names()).doc
    lost_at, back_at = doc.faults[0].at_s, doc.faults[1].at_s
    whole = sum(per_s for work in doc.work for per_s in work.per_s.values())
    replicas = {name: site.replicas for name, site in doc.sites.items()}
    share = 1.0 - replicas[doc.faults[0].region] / sum(replicas.values())
    return whole * share, int(lost_at), int(back_at)


__all__ = ["ABLATED", "FLEETS", "ORACLE", "SCENARIOS", "Plan", "fleet", "jobs", "loss", "needed", "scenarios"]
