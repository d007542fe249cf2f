"""One cell: a scenario under one router, one seed and one load, run in virtual time, and its figures.

Invariants: equal cells give equal results in every process; `sim.study` defines what counts. Reads no clock except for
`wall_s`.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.scenarios.load import Scenario, built
from farhop_lab.scenarios.schema import LASTING
from farhop_lab.scenarios.work import days_of, send
from farhop_lab.sim.clients import ClientPool, ProgramCounts
from farhop_lab.sim.faults import Fault, FaultInjector
from farhop_lab.sim.huge_pages import Growing
from farhop_lab.sim.measures import quantile
from farhop_lab.sim.sites import Reporting, gpus
from farhop_lab.sim.study import Objective, Score, Window, is_enough, is_good, judge
from farhop_lab.studies import routers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farhop_lab.scenarios.schema import ScenarioDoc
    from farhop_lab.sim.measures import Measures, RequestRecord
    from farhop_lab.sim.world import World

POINTS = 120
"""The most points of a curve over time that a result keeps."""
PARTS = 20
ANSWERED_S = 20.0
"""A good answer comes within this time."""
STOOD_S = 5.0
"""Clients are sent only to balancers that are ready: when they come, every router has run for this long and knows its
regions. Failures after that count.
"""
GARBAGE = (50_000, 20, 20)
"""How many objects may pile up before a collection: a request leaves some 100, nearly all freed by reference counts."""


class Key(msgspec.Struct, frozen=True, order=True):
    """Identifies a cell."""

    scenario: str
    router: str
    load: float
    seed: int

    @property
    def slug(self) -> str:
        """A file name."""
        return f"{self.scenario}.{self.router}.x{self.load:g}.s{self.seed}"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A cell's result. `recipe` identifies what it was made of. `flows` are requests answered, by "entry>region";
    `curves` the share of a region's slots in use, at most POINTS, `curve_s` apart; `good` the good answers of each
    second of the whole run; `ttft_quantiles` 1 %, 2 %, ... 100 % of those that began.
    """

    key: Key
    recipe: str
    score: Score
    window: Window
    usd_per_hour: float
    replicas: int
    flows: dict[str, int]
    ttft_quantiles: list[float]
    curves: dict[str, list[float]]
    curve_s: float
    good: list[int]
    program_counts: ProgramCounts
    first_violations: list[str]
    wall_s: float

    def figures(self) -> dict[str, float]:
        """Every single number by name."""
        return self.score.figures() | {"usd_per_hour": self.usd_per_hour, "replicas": float(self.replicas)}


def run(
    document: dict[str, Any],
    folder: Path,
    key: Key,
    recipe: str,
    progress: Callable[[float], None] | None = None,
    *,
    sure: bool = False,
) -> Result:
    """Run the cell of a scenario's document. `progress` is called with the share done. `sure`: only until it is sure
    whether enough answers are good (`_EarlyStop`); the result's window shows how far that was.
    """
    scenario = built(document, folder)
    doc = scenario.doc
    began = time.perf_counter()
    world, clients = prepared(scenario, key)
    world.journal.violations_only()
    if progress is not None:
        for part in range(1, PARTS + 1):
            world.at(doc.duration_s * part / PARTS, progress, part / PARTS)
    growing = Growing(world)
    for part in range(1, PARTS):
        world.at(doc.duration_s * part / PARTS, growing)
    window = Window(doc.warm_up_s, doc.duration_s)
    aims = Objective(ttft_ms=doc.objective.ttft_ms, tpot_ms=doc.objective.tpot_ms, patience_ms=doc.timeout_s * 1e3)
    watch = (
        _EarlyStop(world, clients, window, aims, doc.objective.good, doc.timeout_s) if sure and _steady(doc) else None
    )
    with rare_collections():
        score = judge(world, window, aims, drain_s=doc.timeout_s, until_sure=watch)
    window = watch.window if watch is not None else window
    measures = world.measures
    ttft = sorted(f.ttft_ms for f in measures.records if f.ttft_ms is not None and window.has(f.arrived_at))
    curves, curve_s = _curves(measures, window.until)
    return Result(
        key=key,
        recipe=recipe,
        score=score,
        window=window,
        usd_per_hour=(score.usd + score.gpu_usd) * 3600.0 / window.seconds,
        replicas=sum(world.replicas.values()),
        flows=_flows(measures.records, window),
        ttft_quantiles=[round(quantile(ttft, percent / 100), 3) for percent in range(1, 101)] if ttft else [],
        curves=curves,
        curve_s=curve_s,
        good=_good(measures.records, aims, window.until),
        program_counts=clients.counts,
        first_violations=measures.journal.first_violations[:20],
        wall_s=round(time.perf_counter() - began, 3),
    )


def _steady(doc: ScenarioDoc) -> bool:
    """Whether all parts of the run are alike: no days, no trace with its own hours, no faults."""
    return not doc.days and all(not work.path for work in doc.work) and all(not fault.at_s for fault in doc.faults)


class _EarlyStop:
    """Ends a run once it is certain whether enough answers are good. A positive result is not concluded before half of
    it: a fleet that is a little too small falls behind slowly. `window` is the part that was used.
    """

    def __init__(
        self, world: World, clients: ClientPool, window: Window, aims: Objective, good: float, drain_s: float
    ) -> None:
        self._world, self._clients, self._aims, self._good, self._drain_s = world, clients, aims, good, drain_s
        self.window = window

    def __call__(self) -> tuple[Window, float]:
        """See study.judge."""
        whole, world = self.window, self._world
        for part in range(1, PARTS):
            at = whole.since + whole.seconds * part / PARTS
            world.run(at)
            enough = is_enough(world, Window(whole.since, at), self._aims, self._good)
            if enough is None and 2 * part >= PARTS and at - ANSWERED_S > whole.since:
                enough = is_enough(world, Window(whole.since, at - ANSWERED_S), self._aims, self._good)
            if enough is False or (enough and 2 * part >= PARTS):
                self.window, self._clients.until = Window(whole.since, at), at
                return self.window, self._drain_s if enough else 0.0
        return whole, self._drain_s


_found_frozen = False  # by a caller, once: to count frozen objects is to walk them, 40 ms for a million


@contextmanager
def rare_collections() -> Iterator[None]:
    """The garbage collector runs rarely: at the usual pace it takes up to a third of a run's time. What a caller has
    frozen stays frozen: thawed, each later collection would walk it.
    """
    global _found_frozen
    before, _found_frozen = gc.get_threshold(), _found_frozen or gc.get_freeze_count() > 0
    freezes = not _found_frozen
    if freezes:
        gc.collect()  # the world of the run before: frozen and thawed with the rest it would stay, 10 MB a run
        gc.freeze()
    gc.set_threshold(*GARBAGE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()


def prepared(scenario: Scenario, key: Key) -> tuple[World, ClientPool]:
    """The world of a cell with its clients and faults, before its first moment."""
    doc = scenario.doc
    sites = {name: gpus(site.gpu, site.replicas, seed=key.seed, token_ids=True) for name, site in doc.sites.items()}
    world = routers.build(
        key.router,
        key.seed,
        scenario.topology,
        sites,
        balancers=_balancers(scenario),
        reporting=Reporting(lost=doc.wire.lost),
        stood_s=STOOD_S,
    )
    if doc.wire.jitter or doc.wire.drift:
        world.wire.disturb(world.rng("wire"), doc.wire.jitter, doc.wire.drift, doc.wire.drift_every_s)
    for fault in doc.faults:
        _plan(world, fault)
    ttft_s = doc.objective.ttft_ms / 1e3 if doc.objective.declared else None
    clients = ClientPool(world, until=doc.duration_s, timeout_s=doc.timeout_s, ttft_s=ttft_s, retries=doc.retries)
    days = days_of(doc.days, doc.day_s)
    for i, work in enumerate(doc.work):
        send(clients, work, f"{scenario.work_name} {i}", key.seed, key.load, days, scenario.folder)
    return world, clients


def _balancers(scenario: Scenario) -> dict[str, int]:
    """As in the file; if it says nothing, one in each region with a site or clients."""
    doc = scenario.doc
    places = dict.fromkeys(doc.sites, 1)
    for work in doc.work:
        places.update(dict.fromkeys([*work.clients, *work.per_s, *work.regions], 1))
    return {**places, **doc.balancers}


def _plan(world: World, fault: Any) -> None:
    region = fault.region
    if fault.what in LASTING:
        lasting = Fault(fault.at_s, fault.for_s, fault.what, region, fault.replica or "", fault.to or "", fault.factor)
        FaultInjector(world).plan([lasting])
        return
    acts: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "kill": (world.kill, (region,)),
        "revive": (world.revive, (region,)),
        "freeze": (world.freeze, (region, fault.to)),
        "blackhole": (world.blackhole, (region, fault.to)),
        "heal": (world.heal, (region, fault.to)),
        "drain": (world.drain, (region, "scenario", fault.for_s)),
        "undrain": (world.undrain, (region,)),
        "lose_reports": (world.lose_reports, (region, fault.share)),
    }
    act, args = acts[fault.what]
    world.at(fault.at_s, act, *args)


# -- results


def _flows(records: Iterable[RequestRecord], window: Window) -> dict[str, int]:
    return dict(
        sorted(Counter(f"{f.entry}>{f.region}" for f in records if f.region and window.has(f.arrived_at)).items())
    )


def _good(records: Iterable[RequestRecord], aims: Objective, until: float) -> list[int]:
    """Good answers by the second in which they ended."""
    counts = [0] * max(1, int(until))
    for record in records:
        if record.ended_at < len(counts) and is_good(record, aims):
            counts[int(record.ended_at)] += 1
    return counts


def _curves(measures: Measures, until: float) -> tuple[dict[str, list[float]], float]:
    """Means over equal intervals of the whole run."""
    step_s = max(1.0, until / POINTS)
    curves: dict[str, list[float]] = {}
    for region, uses in measures.use.items():
        parts: dict[int, list[float]] = {}
        for use in uses:
            if 0.0 <= use.at < until:
                parts.setdefault(int(use.at / step_s), []).append(use.share)
        curves[region] = [round(fmean(parts[part]), 4) for part in sorted(parts)]
    return curves, step_s
