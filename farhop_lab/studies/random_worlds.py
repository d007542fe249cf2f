"""Worlds drawn at random by number: sites, mixed GPUs, network, work, balancers, and how much of the fleet it takes.

World n of a seed, a family and the same traces is the same everywhere. Load is a share of what `bound` says the fleet
can do of this work. Open loops alone: arrivals depend on no router, so the bound holds and a ratio is paired. There are
two families. Worlds of the *usual* kinds have tenants who may not go everywhere and balancers that restart in the
window; those of the *special* ones (`special_kinds`) one difficulty each.

Never reads a result to draw a world. `verdicts` judges what routers did in them.
"""

from __future__ import annotations

from math import ceil, sqrt
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.scenarios.load import Scenario, built
from farhop_lab.studies import bound, pool, special_kinds
from farhop_lab.studies.special_kinds import CONFINED, REGIONS
from farhop_lab.workloads import load
from farhop_lab.workloads.load import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("single", "system-prompt", "chat", "agents", "long-head", "flood")
TRACES = {"azure": "*.csv*", "mooncake": "mooncake*.jsonl*", "servegen": "servegen-[!r]*.tar.gz"}
"""By the kind of a trace, the names of its files (ServeGen's `rates` have no lengths)."""
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
    rates in the scenario. `judged`: the tenant whose requests count; "" for all.
    """

    number: int
    kind: str
    scenario: Scenario
    load: float
    factor: float
    judged: str = ""


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
    """World `number` of a seed, of a usual kind or a trace. Raises TraceError and WorkloadError."""
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


def special(number: int, seed: int, window_s: float) -> World:
    """World `number` of a seed, of a special kind. Raises WorkloadError."""
    rng = Random(f"special world {seed} {number}")
    kind = tuple(special_kinds.KINDS)[number % len(special_kinds.KINDS)]
    parts = special_kinds.KINDS[kind](rng)
    document: dict[str, Any] = {
        "name": f"special-{seed}-{number}",
        "topology": "five-regions",
        "sites": parts.sites,
        "balancers": dict.fromkeys(parts.sites, rng.choice((1, 1, 2, 4, 8))),
        "work": parts.work,
        "wire": {"jitter": rng.choice((0.0, 0.2)), "drift": rng.choice((0.0, 0.3))},
        "duration_s": parts.warm_up_s + window_s,
        "retries": RETRIES,
        "warm_up_s": parts.warm_up_s,
        "timeout_s": parts.timeout_s,
        "objective": {"ttft_ms": rng.choice((2000, 5000)), "tpot_ms": rng.choice((150, 250))},
    }
    share = round(rng.uniform(0.3, 1.1), 2)
    scenario = built(document, Path())
    return World(number, kind, scenario, share, _factor(scenario, seed, share), parts.judged)


def _busy_s(scenario: Scenario) -> float:
    """The seconds in which requests come: all but the pauses between bursts that last. Those at one instant stand for
    the time until the next.
    """
    duration_s = scenario.doc.duration_s
    spans_s = [
        work.bursts.for_s * ceil(duration_s / work.bursts.every_s)
        for work in scenario.doc.work
        if work.bursts is not None and work.bursts.for_s > 0.0
    ]
    return max(spans_s) if len(spans_s) == len(scenario.doc.work) else duration_s


def _factor(scenario: Scenario, seed: int, load: float) -> float:
    """A factor on the rates, so that the work is this share of what the bound allows in the time in which it comes.
    Found in rounds: rare requests may be missing at rates far from the final ones.
    """
    factor, fleet, seconds = load, bound.fleet_of(scenario), _busy_s(scenario)
    for _ in range(_ROUNDS):
        capacity = bound.share_max(bound.demands(scenario, seed, factor), fleet, seconds)
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


def jobs(world: World, names: Sequence[str], seeds: Sequence[int]) -> list[pool.Job]:
    """Its cells."""
    return pool.jobs(world.scenario.but(loads=[world.factor]), names, seeds)


__all__ = ["KINDS", "Trace", "World", "drawn", "jobs", "special", "traces"]
