"""`farhop plan`: how many replicas each region needs for a scenario's demand and objective, and what they cost. By
simulation alone; never contacts a balancer.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.sim import found, interrupted, shortened
from farhop_lab.scenarios.schema import FaultDoc
from farhop_lab.sim.stats import fewest, share_interval
from farhop_lab.studies import pool, routers
from farhop_lab.studies.planning import REPLICAS_MAX, Outcome, Planned, Search, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.studies.cell import Result
    from farhop_lab.studies.planning import Need

LOCAL = "region-local"
SEEDS_MAX = 5  # of a fleet, by default
_REQUESTS_MAX = 1_000_000
_DOUBT_MIN = 0.01  # no number of requests shows that not one is bad


class TooFewRequestsError(Exception):
    """The requests cannot show whether a fleet is enough; the text says what could."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    scenario: str
    good: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    for_s: float | None = None
    seeds: int | None = None
    most: int = REPLICAS_MAX
    within_s: float = 1800.0
    out: Path | None = None
    as_json: bool = False


def run(options: Options) -> int:
    """Plan and print; the exit code, 1 if with routing no fleet within the bounds is enough, for N or for N-1."""
    scenario = _aimed(shortened(found(options.scenario), options.for_s), options)
    until = time.monotonic() + options.within_s
    prices = {name: scenario.topology.regions[name].usd_per_gpu_hour for name in scenario.doc.sites}
    try:
        folder = pool.opened(options.out) if options.out is not None else None
        with show.progress(f"plan {scenario.doc.name}") as progress:
            ask = TrialRunner(scenario, options.seeds, folder, progress)
            search = Search(
                prices, scenario.doc.objective.good, ask, most=options.most, over=lambda: time.monotonic() > until
            )
            planned = search.run()
    except (pool.CellError, TooFewRequestsError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted(options.out)
        raise
    if options.as_json:
        show.json({"scenario": scenario.document(), "plan": planned})
    else:
        print_plan(scenario, planned)
    needs = [planned.together, planned.together_spare][: len(scenario.doc.sites)]  # one region has no N-1
    enough = all(need.replicas is not None and need.worst >= scenario.doc.objective.good for need in needs)
    return 0 if enough else NEGATIVE


def _aimed(scenario: Scenario, options: Options) -> Scenario:
    given = {"good": options.good, "ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms}
    objective = scenario.doc.objective.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    return scenario.but(objective=objective, loads=[1.0], faults=[])


def needed(good: float) -> int:
    """How many requests of a region determine the share of good answers to within the share that may be bad, near
    `good`: with fewer, one bad answer more or less decides how large a fleet must be.
    """
    doubt = max(1.0 - good, _DOUBT_MIN)
    return fewest(lambda n: _doubt(good, n) <= doubt, 1, _REQUESTS_MAX) or _REQUESTS_MAX


def _doubt(good: float, asked: int) -> float:
    low, high = share_interval(good * asked, asked)
    return (high - low) / 2.0


class TrialRunner:
    """Runs trials, all cells of one round in parallel. `seeds`: the most runs of a fleet; None: as many as it takes for
    enough requests. TooFewRequestsError, after the first, if that is impossible.
    """

    def __init__(
        self, scenario: Scenario, seeds: int | None, out: Path | None, progress: Callable[[str], None]
    ) -> None:
        self._scenario, self._out, self._progress = scenario, out, progress
        self._given, self._seeds = seeds, 0
        self._ran = 0

    def _settle_seeds(self, first: Result) -> None:
        """By the requests of a run, up to its end."""
        doc = self._scenario.doc
        good, whole_s = doc.objective.good, doc.duration_s - doc.warm_up_s
        asked = {name: share.asked * whole_s / first.window.seconds for name, share in first.score.regions.items()}
        if not asked:
            raise TooFewRequestsError(
                f"no request came in the {whole_s:g} s that count; give a longer --for, or the scenario a shorter "
                "warm_up_s"
            )
        region = min(asked, key=lambda name: asked[name])
        few, need = max(asked[region], 0.1), needed(good)
        runs = ceil(need / few)
        again = any(not work.path for work in doc.work)  # a trace gives the same requests in every run
        most = (self._given or SEEDS_MAX) if again else 1
        if runs > most:
            for_m = ceil((doc.warm_up_s + need * whole_s / few) / 60.0)
            remedy = f"--for {for_m}m" + (f" or --seeds {runs}" if again and runs <= 100 else ", if the trace goes on")
            doubt = _doubt(good, max(1, round(few)))
            raise TooFewRequestsError(
                f"{region} has {few:.0f} requests in the {whole_s:g} s that count: they show the share "
                f"of good answers to within ± {100 * doubt:.1f} %, where {100 * (1 - good):.3g} % may be bad; "
                f"{need} requests would do: {remedy}"
            )
        self._seeds = self._given or runs

    def __call__(self, trials: Sequence[Trial]) -> list[Outcome]:
        self._ran += len(trials)
        fleets = "; ".join(_summary(trial) for trial in trials[:1])
        self._progress(f"{self._ran} fleets tried, now {fleets}")
        jobs = [self.jobs(trial) for trial in trials]
        found: list[list[Result]] = [[] for _ in trials]
        good = self._scenario.doc.objective.good
        if not self._seeds:
            (first,) = pool.run([jobs[0][0]], out=self._out)
            found[0].append(first)
            self._settle_seeds(first)
        for seed in range(self._seeds):
            # Another seed only if those before leave it open.
            open_ = [
                n
                for n, results in enumerate(found)
                if len(results) == seed and (not results or not is_sure(_outcome(results), good))
            ]
            for n, result in zip(open_, pool.run([jobs[n][seed] for n in open_], out=self._out), strict=True):
                found[n].append(result)
        return [_outcome(results) for results in found]

    def jobs(self, trial: Trial) -> list[pool.Job]:
        doc = self._scenario.doc
        sites = {name: doc.sites[name].model_copy(update={"replicas": n}) for name, n in trial.replicas}
        faults = [FaultDoc(at_s=0.0, what="kill", region=trial.lost)] if trial.lost else []
        name = f"plan-{xxhash.xxh3_64_hexdigest(msgspec.json.encode((doc.name, trial)))}"
        scenario = self._scenario.but(name=name, work_name=self._scenario.work_name, sites=sites, faults=faults)
        seeds = range(1, (self._seeds or self._given or SEEDS_MAX) + 1)
        return pool.jobs(scenario, [routers.FARHOP if trial.routed else LOCAL], seeds, sure=True)


def _summary(trial: Trial) -> str:
    fleet = ", ".join(f"{name} {n}" for name, n in trial.replicas)
    return f"{fleet}{f' without {trial.lost}' if trial.lost else ''}{'' if trial.routed else ', each alone'}"


def _outcome(results: Sequence[Result]) -> Outcome:
    shares = [(region, share) for result in results for region, share in sorted(result.score.regions.items())]
    good, asked = Counter[str](), Counter[str]()
    for region, share in shares:
        good[region] += share.good
        asked[region] += share.asked
    usd_per_hour = sum(result.usd_per_hour for result in results) / len(results)
    return Outcome({name: good[name] / n for name, n in asked.items() if n}, usd_per_hour, dict(asked))


def is_sure(outcome: Outcome, good: float) -> bool:
    """Whether more runs would hardly change the verdict."""
    ranges = [share_interval(outcome.good[name] * n, n) for name, n in outcome.asked.items() if n]
    return any(high < good for _, high in ranges) or all(low >= good for low, _ in ranges)


def print_plan(scenario: Scenario, planned: Planned) -> None:
    """The table."""
    doc = scenario.doc
    aim = doc.objective
    rows = [
        ["without routing", "N", *_row(doc.sites, planned.alone, aim.good)],
        ["without routing", "N-1", *_row(doc.sites, planned.alone_spare, aim.good)],
        ["with routing", "N", *_row(doc.sites, planned.together, aim.good)],
        ["with routing", "N-1", *_row(doc.sites, planned.together_spare, aim.good)],
    ]
    title = (
        f"{doc.name}: replicas for {aim.good:.0%} of answers in every region within TTFT {aim.ttft_ms:g} ms and TPOT "
        f"{aim.tpot_ms:g} ms"
    )
    show.table(title, ["fleet", "for", *(f">{name}" for name in doc.sites), ">total", ">$/h", ">good %", ""], rows)
    show.line(
        "N: all regions well; N-1: any one lost. $/h: GPUs and egress at the topology's prices; good: worst region, "
        "± its 95 % interval"
    )
    together, alone = planned.together, planned.alone
    if together.replicas is not None and alone.replicas is not None:
        saved = 1.0 - together.usd_per_hour / alone.usd_per_hour if alone.usd_per_hour else 0.0
        text = f"{saved:.0%} less to pay" if saved >= 0.005 else "no less to pay"
        show.line(f"routing between regions needs {together.total} of {alone.total} replicas: {text}")


def _row(regions: Iterable[str], need: Need, good: float) -> list[str]:
    if need.replicas is None:
        return [*(show.NONE for _ in regions), show.NONE, show.NONE, show.NONE, need.why]
    counts = [str(need.replicas[name]) for name in regions]
    note = "" if need.settled else "time was up: no more than this"
    if need.worst < good:
        note = f"misses {good:.0%}{' when time was up' if not need.settled else ''}: give more replicas or --seeds"
    share = f"{100 * need.worst:.1f}" + (f" ± {100 * need.half:.1f}" if need.half else "")
    return [*counts, str(need.total), f"{need.usd_per_hour:,.2f}", share, note]
