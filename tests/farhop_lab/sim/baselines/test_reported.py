"""What the papers report, in small: each baseline's own claim must come out in its direction, or it is not that one."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import fmean

import msgspec
import pytest

from farhop_lab.sim.baselines import gorgo
from farhop_lab.sim.baselines.catalogue import ROUTERS
from farhop_lab.sim.baselines.world import RouterWorld, build
from farhop_lab.sim.clients import ClientPool
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.sim.study import Objective, Score, Window, judge
from farhop_lab.workloads.chat import ARENA, chats
from farhop_lab.workloads.program import Programs
from farhop_lab.workloads.trees import BRANCH_2, trees

REGIONS = ["us", "asia", "eu"]
WIRES = {("us", "eu"): 91.0, ("us", "asia"): 166.0, ("asia", "eu"): 230.0}
ABLATION = ("skywalker", "skywalker-blind")
# Thoughts so long that the trees of a replica's clients do not all fit its memory; the paper's end at 512 tokens.
LONG_TREE = msgspec.structs.replace(BRANCH_2, thought_tokens=300.0)


def programs(work: str, client: str, seed: int) -> Programs:
    if work == "arena":
        return chats(ARENA, client, seed)
    return trees(LONG_TREE if work == "long trees" else BRANCH_2, client, seed)


@cache
def score(
    name: str, work: str, replicas: tuple[int, ...], counts: tuple[int, ...], until: float, seed: int = 1
) -> Score:
    """A closed loop, of which the first quarter does not count."""
    sites = {region: gpus("l4", n) for region, n in zip(REGIONS, replicas, strict=False)}
    world = build(name, seed, flat(REGIONS, WIRES), sites)
    clients = ClientPool(world, until=until)
    for region, count in zip(REGIONS, counts, strict=False):
        for n in range(count):
            clients.closed(region, programs(work, f"{region} {n}", seed), since=0.05 * n)
    return judge(world, Window(until / 4.0, until), Objective(), drain_s=60.0)


def rate(scores: list[Score]) -> float:
    return fmean(one.requests_per_s for one in scores)


@pytest.mark.long
def test_selective_pushing_beats_blind_pushing() -> None:
    """Trees on 4 replicas of one region, 30 clients: 1.27 x the throughput, P90 TTFT 18 x better, hits 89.86 : 68.89 %.
    (Here it needs trees that fill the memory: with thoughts of 100 tokens blind pushing has the better P90.)"""
    selective, blind = ([score(name, "long trees", (4,), (30,), 120.0, n) for n in (1, 2)] for name in ABLATION)
    assert rate(selective) > 1.05 * rate(blind)
    assert fmean(one.whole.ttft_ms.p90 for one in blind) > 3.0 * fmean(one.whole.ttft_ms.p90 for one in selective)
    assert fmean(one.whole.hit for one in selective) > fmean(one.whole.hit for one in blind)


def test_skywalker_hits_more_than_least_load_and_that_more_than_round_robin() -> None:
    """Chat: 36.96-46.55 : 28.29-31.13 : 10.78-16.57 %; least load reaches 97.38 % of its throughput."""
    names = ("skywalker", "central-least-load", "central-round-robin")
    skywalker, least_load, round_robin = (score(name, "arena", (3, 3, 2), (25, 25, 25), 80.0) for name in names)
    assert skywalker.whole.hit > 1.1 * least_load.whole.hit
    assert least_load.whole.hit > 1.5 * round_robin.whole.hit
    assert skywalker.tokens_per_s > least_load.tokens_per_s > round_robin.tokens_per_s
    assert skywalker.whole.ttft_ms.p90 < least_load.whole.ttft_ms.p90


@pytest.mark.long
def test_plain_consistent_hashing_beats_skywalker_on_uniform_trees() -> None:
    """By 2 % of throughput in the paper, with a single router in the US. (Here by 4 and 5 % with seeds 1 and 2.)"""
    skywalker, hashing = (
        score(name, "trees", (2, 2, 2), (20, 10, 10), 60.0).requests_per_s
        for name in ("skywalker", "central-consistent-hash")
    )
    assert hashing >= skywalker


def flood(queue: float) -> tuple[Counter[str], float]:
    """Where GORGO answers more than one region can take, and the mean seconds to the end."""
    spec = msgspec.structs.replace(
        ROUTERS["gorgo"], picker=lambda _pools, _rng: gorgo.Central(gorgo.Weights(gorgo.WILDCHAT.rtt, queue))
    )
    world = RouterWorld(1, flat(REGIONS, WIRES), {region: gpus("l4", 1) for region in REGIONS}, spec)
    world.stream(2.0, lambda: world.arrive("us", "t", 4000, answer_tokens=100), until=60.0)
    records = world.run(400.0).records
    return Counter(record.region for record in records), fmean(
        record.ended_at - record.arrived_at for record in records
    )


def test_gorgo_without_a_queue_term_sends_all_to_the_nearest_and_the_end_comes_late() -> None:
    nearest, collapsed_s = flood(0.0)
    spread, tuned_s = flood(gorgo.LONG_CONTEXT.queue)
    assert nearest["us"] / nearest.total() > 0.95
    assert spread["us"] / spread.total() < 0.8
    assert collapsed_s > 1.5 * tuned_s
