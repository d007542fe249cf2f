"""Worlds drawn at random by number, the routers that are run in them, and which router lost where.

World n of a seed and of the same traces is the same everywhere: sites, mixed GPUs, network, lengths, sharing, arrivals,
tenants who may not go everywhere, balancers, some of which restart in the window, and a load that is a share of what
`bound` says the fleet can do of this work. Open loops alone: arrivals depend on no router, so the bound holds and a
ratio is paired. Good answers to what was asked within the window count, whenever they end: counting answers that end
within it would favour a router that let more requests wait before it. A world's rival is the best router on the
screening seeds; it is judged on the others, so that it is not chosen by the luck that it is judged by. On the first
seed all routers run, Farhop too: over all worlds that compares it with each single rival.

Never reads a result to draw a world. `pool` runs the cells and keeps the results.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.outcome import DIED_MID_STREAM, REFUSED_BY_ENGINE
from farhop_lab.scenarios.load import Scenario, built
from farhop_lab.sim.baselines.catalogue import ROUTERS
from farhop_lab.sim.stats import Interval, interval
from farhop_lab.studies import bound, pool, routers, tables
from farhop_lab.workloads import load
from farhop_lab.workloads.load import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.scenarios.schema import ScenarioDoc
    from farhop_lab.studies.cell import Result

REGIONS = ("virginia", "tokyo", "frankfurt", "oregon", "singapore")
CONFINED = {"frankfurt": "eu-only", "tokyo": "japan-only"}
"""By region, the topology's tenant that may not leave it."""
KINDS = ("single", "system-prompt", "chat", "agents", "long-head", "flood")
TRACES = {"azure": "*.csv*", "mooncake": "mooncake*.jsonl*", "servegen": "servegen-[!r]*.tar.gz"}
"""By the kind of a trace, the names of its files (ServeGen's `rates` have no lengths)."""
NEVER = frozenset(("omniscient", "region-local"))
"""Not rivals: one has no network delay, the other no other region."""
LOSS, SLOWER = 0.99, 1.05
GAIN = 1.03
"""The goal over the best single rival's good answers."""
FULL = 0.95
"""Share of capacity below which no request may be refused, except in floods."""
SIZES = (1, 1, 4)
"""Multiples of replicas: a fleet of three replicas a region cannot show what one of eight or twelve does (many caches
for one prefix, lasting queues, regions that send each other work).
"""
RETRIES = 2
"""How often clients retry: the default of OpenAI's SDKs."""
WARM_UP_S = 10.0
FACTOR_MAX = 100.0  # the limit of a scenario's loads; work that is light at it then has a lower load than drawn
_ROUNDS = 6
_CLIENTS = "deepseek-r1"  # ServeGen's reasoning clients: the only ones whose archive has lengths


class Trace(msgspec.Struct, frozen=True):
    """A trace to draw worlds from: its kind, its file, and the seconds of it in which a piece may begin."""

    kind: str
    path: Path
    seconds: float


class World(msgspec.Struct, frozen=True):
    """A drawn world: its number, its document, its load as a share of `capacity` (the bound's), and its factor on the
    rates in the scenario.
    """

    number: int
    kind: str
    scenario: Scenario
    load: float
    factor: float


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


class Standing(msgspec.Struct, frozen=True):
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


def traces(folder: Path) -> list[Trace]:
    """The traces in a folder, by name. TraceError if one cannot be read, or if there is none."""
    found = [
        Trace(kind, path, _seconds(kind, path)) for kind, names in TRACES.items() for path in sorted(folder.glob(names))
    ]
    if not found:
        names = ", ".join(TRACES.values())
        raise TraceError(f"{folder}: there is no trace in it; give a folder with any of {names}")
    return sorted(found, key=lambda trace: trace.path.name)


def _seconds(kind: str, path: Path) -> float:
    if kind == "azure":
        return load.azure(path)[-1].at
    if kind == "mooncake":
        return load.mooncake(path)[-1].at_ms / 1e3
    return max(one.bursts[-1].at for one in load.servegen(path, _CLIENTS))


def drawn(number: int, seed: int, window_s: float, traces: Sequence[Trace] = ()) -> World:
    """World `number` of a seed. Raises TraceError and WorkloadError."""
    rng = Random(f"world {seed} {number}")
    place = number % (len(KINDS) + len(traces))
    trace = traces[place - len(KINDS)] if place >= len(KINDS) else None
    kind = trace.path.name.split(".")[0] if trace is not None else KINDS[place]
    regions = REGIONS[: rng.choice((1, 2, 3, 3, 4, 5))]
    large = trace is not None or kind in ("agents", "long-head")
    gpus = ("a100", "h100") if trace is not None else ("h100",) if large else ("l4", "a100")
    sites: dict[str, dict[str, Any]] = {
        name: {"gpu": rng.choice(gpus), "replicas": rng.randint(1, 3)} for name in regions
    }
    weights = {name: rng.choice((0.2, 1.0, 1.0, 3.0)) for name in regions}
    document: dict[str, Any] = {
        "name": f"world-{seed}-{number}",
        "topology": "five-regions",
        "sites": sites,
        "balancers": dict.fromkeys(regions, rng.choice((1, 1, 2, 4, 8))),
        "work": _work(kind, rng, weights, regions) if trace is None else _traced(trace, rng, regions),
        "wire": {"jitter": rng.choice((0.0, 0.2)), "drift": rng.choice((0.0, 0.3))},
        "duration_s": WARM_UP_S + window_s,
        "retries": RETRIES,
        "warm_up_s": WARM_UP_S,
        "objective": {"ttft_ms": rng.choice((2000, 5000)), "tpot_ms": rng.choice((150, 250))},
    }
    if trace is None and rng.random() < 0.3:
        document["work"] += _confined(document["work"][0], regions)
    if rng.random() < 0.2:
        fault = rng.choice(("restart-regional", "restart-global"))
        document["balancers"] = dict.fromkeys(regions, 1)  # as many as a rival has: no other balancer serves meanwhile
        # In the middle: at the beginning it would break requests that were asked before, which count for no router.
        at_s = WARM_UP_S + window_s / 2
        document["faults"] = [{"what": fault, "region": rng.choice(regions), "at_s": at_s, "for_s": 1.0}]
    share = round(rng.uniform(0.3, 1.1), 2)
    size = rng.choice(SIZES)  # drawn last, so that all else is as in the worlds before there were large ones
    for site in sites.values():
        site["replicas"] *= size
    scenario = built(document, trace.path.parent if trace is not None else Path())
    return World(number, kind, scenario, share, _factor(scenario, seed, share))


def _factor(scenario: Scenario, seed: int, load: float) -> float:
    """A factor on the rates, so that the work is this share of what the bound allows. Found in rounds: rare requests
    may be missing at rates far from the final ones.
    """
    factor, fleet = load, bound.fleet_of(scenario)
    for _ in range(_ROUNDS):
        capacity = bound.share_max(bound.demands(scenario, seed, factor), fleet, scenario.doc.duration_s)
        # Half of the way in logarithms: with bursty arrivals the whole of it oscillates.
        factor = min(FACTOR_MAX, factor * sqrt(load * capacity))
    return round(factor, 4)


def _traced(trace: Trace, rng: Random, regions: Sequence[str]) -> list[dict[str, Any]]:
    since_s = rng.uniform(0.0, 0.8 * trace.seconds)
    figures = {"clients": _CLIENTS} if trace.kind == "servegen" else {}
    piece = {"kind": trace.kind, "path": trace.path.name, "regions": list(regions), "since_s": since_s}
    return [{**piece, "place": rng.choice(("uniform", "zipf")), "figures": figures}]


def _confined(piece: dict[str, Any], regions: Sequence[str]) -> list[dict[str, Any]]:
    """A sixth as much of the work in addition, of tenants who may not leave a region."""
    weights = piece["per_s"]
    return [
        {**piece, "tenant": tenant, "per_s": {region: weights[region] / 6}}
        for region, tenant in CONFINED.items()
        if region in regions
    ]


def _work(kind: str, rng: Random, weights: dict[str, float], regions: Sequence[str]) -> list[dict[str, Any]]:
    """Rates sum up to a few a second at factor 1; the factor does the rest."""
    if kind == "chat":
        figures = {"like": rng.choice(("arena", "wildchat")), "think_s": rng.choice((0.0, 3.0, 10.0))}
        return [{"kind": "chat", "figures": figures, "per_s": weights}]
    if kind == "agents":
        first = rng.choice((5_000, 20_000))
        figures = {"first_tokens": first, "last_tokens": 2 * first, "tool_s": rng.choice((0.5, 2.0, 8.0))}
        return [{"kind": "agents", "figures": figures, "per_s": {name: w / 5 for name, w in weights.items()}}]
    prompt = int(10 ** rng.uniform(2.3, 3.7))
    shares = {"system-prompt": 0.9, "flood": 0.5}.get(kind, rng.choice((0.0, 0.3, 0.8)))
    answer = int(10 ** rng.uniform(1.3, 2.6))
    figures = {
        "prompt_tokens": prompt,
        "shared_tokens": int(prompt * shares),
        "groups": 1 if kind == "system-prompt" else rng.choice((3, 20, 100)),
        "answer_tokens": answer,
        "max_tokens": 512,
    }
    work: list[dict[str, Any]] = [{"kind": "requests", "figures": figures, "per_s": weights}]
    if kind == "long-head":
        long = {"prompt_tokens": 100_000, "answer_tokens": 50}
        work.append({"kind": "requests", "figures": long, "per_s": {regions[0]: 0.02}})
    if kind == "flood":
        work.append({"kind": "requests", "figures": figures, "per_s": {regions[-1]: 4.0 * sum(weights.values())}})
    return work


# -- running


def jobs(world: World, names: Sequence[str], seeds: Sequence[int]) -> list[pool.Job]:
    """Its cells."""
    return pool.jobs(world.scenario.but(loads=[world.factor]), names, seeds)


def best(results: Sequence[Result], names: Sequence[str], count: int) -> list[str]:
    """The routers with the most good answers; between equals the lower TTFT p90 first."""
    left = list(names)
    found: list[str] = []
    while left and len(found) < count:
        found.append(chosen(results, left))
        left.remove(found[-1])
    return found


def chosen(results: Sequence[Result], names: Sequence[str]) -> str:
    """The rival with the most good answers; between equals the lower TTFT p90. ValueError for no result."""

    def worth(name: str) -> tuple[float, float]:
        mine = [result.figures() for result in results if result.key.router == name]
        return sum(one["good"] for one in mine), -sum(one.get("ttft_p90_ms", 0.0) for one in mine)

    if not results:
        raise ValueError("no router to choose from; run the screening first")
    return max(names, key=worth)


def router_result(results: Sequence[Result], *, alike: bool = False) -> RouterResult:
    """A router's means over these seeds (at least one). `alike`: all engines are of one kind, so a prompt that one
    refused as too long would have been refused by all.
    """
    asked = max(1, sum(one.score.whole.asked for one in results))
    failed = sum(one.score.whole.failed for one in results)
    cut = sum(one.score.outcomes.get(DIED_MID_STREAM.reason, 0) for one in results)
    too_long = sum(one.score.outcomes.get(REFUSED_BY_ENGINE.reason, 0) for one in results) if alike else 0
    return RouterResult(
        good=sum(one.score.whole.good for one in results) / asked,
        failed=failed / asked,
        ttft_p90_ms=fmean(one.score.whole.ttft_ms.p90 for one in results),
        refused=(failed - too_long - cut) / asked,
        cut=cut / asked,
    )


def judged(world: World, results: Sequence[Result], rival: str, first: Sequence[Result] = ()) -> Verdict:
    """Farhop against its rival on the same seeds. `first`: all routers on the seed that all ran."""
    ours = [one for one in results if one.key.router == routers.FARHOP]
    theirs = [one for one in results if one.key.router == rival]
    good, p90 = tables.ratio(ours, theirs, "good"), tables.ratio(ours, theirs, "ttft_p90_ms")
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
        asked=fmean(one.score.whole.asked for one in ours),
        ours=router_result(ours, alike=len({site.gpu for site in doc.sites.values()}) == 1),
        theirs=router_result(theirs),
        lost=good is not None and good.half is not None and good.high < LOSS,
        slower=p90 is not None and p90.mean > SLOWER,
        about=_about(doc),
        answer=tables.ratio(ours, theirs, "e2e_mean_ms"),
        all={one.key.router: router_result([one]) for one in first},
    )


def _about(doc: ScenarioDoc) -> str:
    sites = " ".join(f"{name}:{site.replicas}x{site.gpu}" for name, site in doc.sites.items())
    also = [f"balancers {max(doc.balancers.values())}", *(f"{fault.what} {fault.region}" for fault in doc.faults)]
    also += [work.tenant for work in doc.work if work.tenant in CONFINED.values()]
    return f"{sites}; {', '.join(also)}; {dict(doc.work[0].figures)}"


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


def standings(verdicts: Sequence[Verdict]) -> dict[str, Standing]:
    """Of every router that ran in every world, Farhop too: what the goals say little about without it."""
    found = {}
    for router in set.intersection(*(set(one.all) for one in verdicts)) if verdicts else set():
        level = soon = 0
        for one in verdicts:
            mine, others = one.all[router], [other for name, other in one.all.items() if name != router]
            best = max(others, key=lambda other: (other.good, -other.ttft_p90_ms), default=mine)
            level += mine.good >= LOSS * best.good
            soon += mine.ttft_p90_ms <= SLOWER * best.ttft_p90_ms
        found[router] = Standing(router, level, soon)
    return found


__all__ = [
    "KINDS", "RivalComparison", "RouterResult", "Standing", "Trace", "Verdict", "World", "best", "chosen", "drawn",
    "jobs", "judged", "refused_below_capacity", "rival_comparisons", "rivals", "router_result", "standings", "summary",
    "traces",
]  # fmt: skip
