"""The figures of a run: throughput, goodput, latency, hits, waiting, use, spill, bytes, cost, law and fairness.

    score = judge(world, Window(60.0, 600.0), Objective(ttft_ms=2000.0, tpot_ms=100.0), drain_s=120.0)
    cells = cell([score, ...])            # one of each seed: every figure with its confidence interval

Invariants: nothing outside the window counts (rates by when answers ended, all else by when requests came); no failure
is dropped: it counts as asked, not served, not good, and its latencies are the time that its client waited, but at
least `patience_ms`, in every mean and quantile (only complete answers have a TPOT). Changes the world only by letting
its time pass.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.sim.measures import quantile
from farhop_lab.sim.sites import MODEL
from farhop_lab.sim.stats import interval, jain, share_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from farhop_lab.sim.measures import OpenRequest, RequestRecord, Use
    from farhop_lab.sim.stats import Interval
    from farhop_lab.sim.world import World

GB = 1e9
_Z99 = 2.576  # 99 % of a normal distribution lie within


class Window(msgspec.Struct, frozen=True):
    """The seconds that count: from the end of the warm-up to `until`, excluded."""

    since: float
    until: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.since < self.until:
            raise ValueError(f"window: {self.since} to {self.until} s is none; give 0 <= since < until")

    def has(self, at: float) -> bool:
        """Whether this time lies in the window."""
        return self.since <= at < self.until

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer is good: complete, begun in time and generated fast enough. `patience_ms`: what a failure counts
    as.
    """

    ttft_ms: float = 2_000.0
    tpot_ms: float = 150.0
    patience_ms: float = 100_000.0


class Spread(msgspec.Struct, frozen=True):
    """A latency in milliseconds; all 0 if nothing was measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Share(msgspec.Struct, frozen=True):
    """The outcome of some requests: all, or one region's (by entry) or one tenant's.

    `good` met the objective; `failed` is `asked` less `served`, unfinished ones included. `hit` is cached over prompt
    tokens of served requests.
    """

    asked: int
    served: int
    good: int
    failed: int
    hit: float
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread

    @property
    def good_share(self) -> float:
        """Good over asked; 1 if there were no requests."""
        return self.good / self.asked if self.asked else 1.0


class Load(msgspec.Struct, frozen=True):
    """A region's means over the window: requests waiting and running in its engines, engines with requests, KV in use,
    and requests there over slots.
    """

    waiting: float
    running: float
    busy: float
    kv: float
    used: float
    used_peak: float


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures. Rates are per second of the window; `usd` is the cost of bytes between regions in it, at the
    egress price of the sending region; `gpu_usd` that of its GPUs. `unlawful`: answered where the law forbids it.
    `ejections`: of replicas for failed requests, in the whole run; `ejections_healthy`: of replicas without a fault.
    """

    whole: Share
    regions: dict[str, Share]
    tenants: dict[str, Share]
    loads: dict[str, Load]
    requests_per_s: float
    answer_tokens_per_s: float
    tokens_per_s: float
    good_per_s: float
    good_tokens_per_s: float
    waiting: float
    busy: float
    kv: float
    spill: float
    crossed_gb: float
    usd: float
    gpu_usd: float
    attempts: float
    unlawful: int
    violations: int
    ejections: int
    ejections_healthy: int
    jain_regions: float
    jain_tenants: float
    outcomes: dict[str, int]

    def figures(self) -> dict[str, float]:
        """All single numbers by name: those of the whole (`ttft_p90_ms`), and those of regions and tenants with a
        prefix (`region.paris.ttft_p90_ms`).
        """
        found = {name: float(getattr(self, name)) for name in _PLAIN}
        found |= _flat("", self.whole)
        for kind, shares in (("region", self.regions), ("tenant", self.tenants)):
            for name, share in shares.items():
                found |= _flat(f"{kind}.{name}.", share)
        for name, load in self.loads.items():
            found |= {f"region.{name}.{field}": value for field, value in msgspec.structs.asdict(load).items()}
        return found


_PLAIN = tuple(
    name for name in Score.__struct_fields__ if name not in ("whole", "regions", "tenants", "loads", "outcomes")
)


def _flat(before: str, share: Share) -> dict[str, float]:
    found: dict[str, float] = {
        f"{before}{name}": float(getattr(share, name)) for name in ("asked", "served", "good", "failed", "hit")
    }
    found[f"{before}good_share"] = share.good_share
    for what in ("ttft", "tpot", "e2e"):
        spread: Spread = getattr(share, f"{what}_ms")
        found |= {f"{before}{what}_{part}_ms": value for part, value in msgspec.structs.asdict(spread).items()}
    return found


def judge(
    world: World,
    window: Window,
    objective: Objective,
    *,
    drain_s: float = 120.0,
    until_sure: Callable[[], tuple[Window, float]] | None = None,
) -> Score:
    """Let the window pass, and up to `drain_s` more until its requests are answered; then compute the figures.
    `until_sure` may let only a part of it pass, and returns the window and drain of that part.
    """
    world.run(window.since)
    before = world.wire.carried.copy()
    if until_sure is not None:
        window, drain_s = until_sure()
    world.run(window.until)
    carried = world.wire.carried - before
    end, step_s = window.until + drain_s, max(1.0, drain_s / 20)
    while world.measures.open and world.now < end:
        world.run(min(end, world.now + step_s))
    return _score(world, window, objective, carried)


def _score(world: World, window: Window, objective: Objective, carried: Counter[tuple[str, str]]) -> Score:
    measures, topology = world.measures, world.topology
    if measures.concluded > len(measures.records):
        raise ValueError(f"{measures.concluded} requests ended and {len(measures.records)} were kept; shorten the run")
    came = [record for record in measures.records if window.has(record.arrived_at)]
    open_ = [pending for pending in measures.unfinished() if window.has(pending.arrived_at)]
    ended = [record for record in measures.records if record.served and window.has(record.ended_at)]
    good = [record for record in ended if is_good(record, objective)]
    regions = _by(came, open_, "entry", objective)
    tenants = _by(came, open_, "tenant", objective)
    loads = {name: _load(uses, window) for name, uses in measures.use.items()}
    whole = share_of(came, len(open_), objective)
    prices = {name: region.egress_usd_per_gb for name, region in topology.regions.items()}
    replicas = world.replicas
    count = max(1, sum(replicas.values()))
    hours = window.seconds / 3600.0
    return Score(
        whole=whole,
        regions=regions,
        tenants=tenants,
        loads=loads,
        requests_per_s=len(ended) / window.seconds,
        answer_tokens_per_s=sum(record.answer_tokens for record in ended) / window.seconds,
        tokens_per_s=sum(record.answer_tokens + record.prompt_tokens for record in ended) / window.seconds,
        good_per_s=len(good) / window.seconds,
        good_tokens_per_s=sum(record.answer_tokens for record in good) / window.seconds,
        waiting=sum(load.waiting for load in loads.values()),
        busy=sum(load.busy * replicas.get(name, 0) for name, load in loads.items()) / count,
        kv=sum(load.kv * replicas.get(name, 0) for name, load in loads.items()) / count,
        spill=_part([record.region != record.entry for record in came if record.served]),
        crossed_gb=sum(carried.values()) / GB,
        usd=sum(n_bytes / GB * prices[a] for (a, _), n_bytes in carried.items()),
        gpu_usd=sum(n * topology.regions[name].usd_per_gpu_hour * hours for name, n in replicas.items()),
        attempts=fmean([record.attempts for record in came]) if came else 0.0,
        unlawful=_unlawful(world, came),
        violations=measures.violations,
        ejections=measures.ejections.total(),
        ejections_healthy=measures.ejections_healthy,
        jain_regions=jain([share.good_share for share in regions.values()]),
        jain_tenants=jain([share.good_share for share in tenants.values()]),
        outcomes=_outcomes(came, len(open_)),
    )


def is_good(record: RequestRecord, objective: Objective) -> bool:
    """Whether it met the objective. An answer of a single token has no time between tokens."""
    if not record.served or record.ttft_ms is None or record.ttft_ms > objective.ttft_ms:
        return False
    return record.tpot_ms is None or record.tpot_ms <= objective.tpot_ms


def is_enough(world: World, window: Window, objective: Objective, good: float) -> bool | None:
    """True if surely enough of the window's requests are good in every region, False if surely not, None if neither is
    sure yet. With 99 %; unfinished requests count against either.
    """
    good_by, asked_by, open_by = Counter[str](), Counter[str](), Counter[str]()
    for record in world.measures.records:
        if window.has(record.arrived_at):
            asked_by[record.entry] += 1
            good_by[record.entry] += is_good(record, objective)
    for pending in world.measures.unfinished():
        if window.has(pending.arrived_at):
            asked_by[pending.entry] += 1
            open_by[pending.entry] += 1
    surely = bool(asked_by)
    for region, asked in asked_by.items():
        if share_interval(good_by[region] + open_by[region], asked, _Z99)[1] < good:
            return False
        surely &= share_interval(good_by[region], asked, _Z99)[0] >= good
    return True if surely else None


def share_of(records: Sequence[RequestRecord], unfinished: int, objective: Objective) -> Share:
    """The outcome of these requests, and of this many unfinished ones."""
    served = [record for record in records if record.served]
    patience_ms = objective.patience_ms
    endless = [patience_ms] * unfinished
    prompt_tokens = sum(record.prompt_tokens for record in served)
    tpots = [record.tpot_ms for record in served if record.tpot_ms is not None]
    return Share(
        asked=len(records) + unfinished,
        served=len(served),
        good=sum(is_good(record, objective) for record in served),
        failed=len(records) - len(served) + unfinished,
        hit=sum(record.cached_tokens for record in served) / prompt_tokens if prompt_tokens else 0.0,
        ttft_ms=_spread([_ttft_ms(record, patience_ms) for record in records] + endless),
        tpot_ms=_spread(tpots),
        e2e_ms=_spread([_e2e_ms(record, patience_ms) for record in records] + endless),
    )


def _ttft_ms(record: RequestRecord, patience_ms: float) -> float:
    return record.ttft_ms if record.ttft_ms is not None else max(patience_ms, _waited_ms(record))


def _e2e_ms(record: RequestRecord, patience_ms: float) -> float:
    return _waited_ms(record) if record.served else max(patience_ms, _waited_ms(record))


def _waited_ms(record: RequestRecord) -> float:
    return (record.ended_at - record.arrived_at) * 1e3


def _spread(values: list[float]) -> Spread:
    if not values:
        return Spread()
    values.sort()
    return Spread(fmean(values), *(quantile(values, share) for share in (0.50, 0.90, 0.95, 0.99)))


def _by(
    records: Iterable[RequestRecord], open_: Iterable[OpenRequest], field: str, objective: Objective
) -> dict[str, Share]:
    groups: dict[str, list[RequestRecord]] = {}
    unfinished: Counter[str] = Counter(getattr(pending, field) for pending in open_)
    for record in records:
        groups.setdefault(getattr(record, field), []).append(record)
    names = sorted(groups.keys() | unfinished.keys())
    return {name: share_of(groups.get(name, []), unfinished[name], objective) for name in names}


def _load(uses: Iterable[Use], window: Window) -> Load:
    # A sample represents the interval that ends with it: the one at the window's first moment is the warm-up's.
    seen = [use for use in uses if window.since < use.at <= window.until]
    if not seen:
        return Load(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Load(
        waiting=fmean([use.waiting for use in seen]),
        running=fmean([use.running for use in seen]),
        busy=fmean([use.busy for use in seen]),
        kv=fmean([use.kv for use in seen]),
        used=fmean([use.share for use in seen]),
        used_peak=max(use.peak for use in seen),
    )


def _unlawful(world: World, records: Iterable[RequestRecord]) -> int:
    lawful: dict[str, frozenset[str]] = {}
    count = 0
    for record in records:
        if record.tenant not in lawful:
            lawful[record.tenant] = frozenset(world.law.verdict(record.tenant, MODEL).lawful)
        count += bool(record.region) and record.region not in lawful[record.tenant]
    return count


def _outcomes(records: Iterable[RequestRecord], unfinished: int) -> dict[str, int]:
    counts = Counter(record.outcome for record in records)
    if unfinished:
        counts["unfinished"] = unfinished
    return dict(sorted(counts.items()))


def _part(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def cell(scores: Sequence[Score]) -> dict[str, Interval]:
    """Every figure that all of these runs have, with its confidence interval over them. ValueError for no runs."""
    if not scores:
        raise ValueError("a cell of no run; give the score of at least one seed")
    rows: list[dict[str, Any]] = [score.figures() for score in scores]
    return {name: interval([row[name] for row in rows]) for name in rows[0] if all(name in row for row in rows)}
