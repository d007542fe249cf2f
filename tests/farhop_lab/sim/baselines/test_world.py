from __future__ import annotations

from functools import partial

import pytest

from farhop.balance.machine import Request
from farhop_lab.sim.baselines.world import FARHOP, RouterWorld, build, names
from farhop_lab.sim.faults import Fault, FaultInjector
from farhop_lab.sim.measures import Measures
from farhop_lab.sim.sites import flat, gpus, station
from farhop_lab.sim.world import World
from topology import load as topologies

REGIONS = ["us", "eu", "asia"]
OTHER = 2  # seed
WIRES = {("us", "eu"): 90.0, ("us", "asia"): 160.0, ("eu", "asia"): 230.0}


def busy(name: str, seed: int) -> tuple[Measures, str, str]:
    """Two regions with engines, three with clients, some of whom leave, and a loss that is made good: what came of it,
    and its digest after 2 s, which is where another seed ends."""
    world = build(name, seed, flat(REGIONS, WIRES), {region: gpus("l4", 2) for region in ("us", "eu")})
    for region in REGIONS:
        world.stream(
            2.0,
            lambda region=region: world.arrive(region, "t", 1200, prefix=region, answer_tokens=20),
            until=8.0,
        )
    world.stream(0.5, lambda: world.leave(world.arrive("us", "t")), until=8.0)
    world.at(3.0, world.kill, "eu")
    world.at(4.0, world.revive, "eu")
    early = world.run(2.0), world.digest
    if seed == OTHER:
        return *early, early[1]
    measures = world.run(10.0)
    while measures.open and world.now < 40.0:  # unused features cost most if routers look around by themselves
        measures = world.run(world.now + 1.0)
    return measures, early[1], world.digest


@pytest.mark.parametrize("name", names())
def test_every_router_runs_and_one_seed_is_one_run(name: str) -> None:
    (measures, early, digest), (_, _, again), (_, other, _) = (busy(name, seed) for seed in (1, 1, OTHER))
    assert measures.arrived > 40
    assert measures.open == 0
    assert measures.violations == 0, measures.journal.first_violations
    assert measures.outcomes["served"] > 0.7 * measures.arrived
    assert digest == again
    assert early != other


@pytest.mark.parametrize("name", names())
def test_every_router_keeps_the_law(name: str) -> None:
    """A rival that let EU prompts be computed on idle GPUs in Tokyo was compared with Farhop, which may not."""
    sites = {"frankfurt": gpus("l4", 1), "tokyo": gpus("a100", 2)}
    world = build(name, 1, topologies.load(topologies.shipped("five-regions")), sites)
    for tenant in ("eu-only", "anywhere"):
        ask = partial(world.arrive, "frankfurt", tenant, 6000, prefix=tenant, answer_tokens=20)
        world.stream(3.0, ask, until=6.0)
    world.run(60.0)
    served = {one.region for one in world.measures.records if one.tenant == "eu-only" and one.outcome == "served"}
    assert served == {"frankfurt"}
    assert sum(one.outcome == "served" for one in world.measures.records if one.tenant == "anywhere") > 10


def test_an_unknown_router_or_place_is_named() -> None:
    topology, sites = flat(REGIONS, WIRES), {"us": station(2, 2.0)}
    with pytest.raises(LookupError, match="'best' is none of farhop, region-local"):
        build("best", 1, topology, sites)
    with pytest.raises(ValueError, match="regions: mars not in the topology"):
        build("skywalker", 1, topology, {"mars": station(2, 2.0)})
    with pytest.raises(ValueError, match="center: 'eu' is none of the sites"):
        build("gorgo", 1, topology, sites, center="eu")
    with pytest.raises(ValueError, match="'mars' is not in the topology"):
        build("gorgo", 1, topology, sites).arrive("mars", "t")


def test_a_baseline_has_no_reports_and_no_drains() -> None:
    world = build("gorgo", 1, flat(REGIONS, WIRES), {"us": station(2, 2.0)})
    with pytest.raises(ValueError, match="lose_reports: us"):
        world.lose_reports("us", 0.5)
    with pytest.raises(ValueError, match="drain: us"):
        world.drain("us")


def test_the_shipped_tiers_are_one_of_the_names() -> None:
    world = build(FARHOP, 1, flat(REGIONS, WIRES), {"us": station(2, 2.0)}, balancers={"us": 2})
    assert type(world) is World
    assert len(world.balancers["us"]) == 2


def first_addresses(world: RouterWorld) -> dict[str, str]:
    """Where each region's clients find their router."""
    request = Request("q", "t", "m", 1, 1, chain=(), deadline=1.0)
    return {region: next(iter(entry.addresses(request))).region for region, entry in world.entries.items()}


def test_a_central_router_is_in_its_region_and_clients_find_the_nearest() -> None:
    sites = {region: station(2, 2.0) for region in ("us", "asia")}
    central = build("gorgo", 1, flat(REGIONS, WIRES), sites, center="asia")
    each = build("region-local", 1, flat(REGIONS, WIRES), sites)
    assert isinstance(central, RouterWorld)
    assert isinstance(each, RouterWorld)
    assert first_addresses(central) == dict.fromkeys(REGIONS, "asia")
    assert first_addresses(each) == {"us": "us", "eu": "us", "asia": "asia"}
    assert each.replicas == {"us": 1, "asia": 1}


def test_the_omniscient_router_has_no_network_delay() -> None:
    world = build("omniscient", 1, flat(REGIONS, WIRES), {"us": station(2, 2.0, first_s=0.1)})
    for region in REGIONS:
        world.arrive(region, "t")
    assert world.run(20.0).ttft_ms() == pytest.approx([100.0, 100.0, 2100.0])


def test_a_deadline_may_pass_while_a_request_is_queued() -> None:
    world = build("skywalker", 1, flat(["us"]), {"us": station(1, 50.0)})
    for at, deadline_s in ((1.0, 20.0), (1.02, 20.0), (1.3, 10.0)):
        world.at(at, lambda deadline_s=deadline_s: world.arrive("us", "t", deadline_s=deadline_s))
    assert world.run(200.0).outcomes == {"served": 1, "deadline_exceeded": 1, "queue_timeout": 1}


def test_a_baselines_links_are_frozen_and_not_cut() -> None:
    world = build("region-local", 1, flat(["us", "eu"], 90.0), {"us": gpus("l4", 1), "eu": gpus("l4", 1)})
    for breaks in (world.cut, world.blackhole):
        with pytest.raises(ValueError, match="freeze them"):
            breaks("us", "eu")


def asked_beside_a_fault(name: str, fault: Fault | None) -> Measures:
    world = build(name, 3, flat(["us", "eu"], 90.0), {region: gpus("l4", 2) for region in ("us", "eu")})
    for region in ("us", "eu"):
        world.stream(4.0, lambda region=region: world.arrive(region, "t", 1200, answer_tokens=20), until=12.0)
    if fault is not None:
        FaultInjector(world).plan([fault])
    return world.run(60.0)


def whole_answers_s(measures: Measures) -> float:
    return sum(record.ended_at - record.arrived_at for record in measures.records)


@pytest.mark.parametrize("name", [FARHOP, "spill-llm-d", "gorgo-each", "skywalker"])
def test_a_slow_replica_is_slow_under_every_router(name: str) -> None:
    slow = asked_beside_a_fault(name, Fault(2.0, 10.0, "slow", "us", "gpu-1", factor=10.0))
    assert whole_answers_s(slow) > 1.1 * whole_answers_s(asked_beside_a_fault(name, None))
    assert slow.outcomes == {"served": slow.arrived}


@pytest.mark.parametrize("name", ["spill-llm-d", "gorgo-each", "skywalker"])
@pytest.mark.parametrize("what", ["restart", "refuse", "pause"])
def test_requests_at_a_broken_replica_fail_and_the_router_notices_at_its_next_probe(name: str, what: str) -> None:
    measures = asked_beside_a_fault(name, Fault(6.4, 4.0, what, "us", "gpu-1"))
    hurt = [record for record in measures.records if not record.served or record.attempts > 1]
    assert hurt or what != "restart"
    assert all(6.4 - 3.0 <= record.arrived_at <= 6.4 + 1.5 for record in hurt)
    assert measures.open == 0
    assert measures.violations == 0, measures.journal.first_violations
