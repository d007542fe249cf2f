from __future__ import annotations

import dataclasses

import pytest

from farhop.balance.machine import Request
from farhop_lab.sim.baselines.world import FARHOP, build
from farhop_lab.sim.sites import flat, station
from farhop_lab.sim.world import World
from topology.model import Residency, Rule, Tenant

REGIONS = ["us", "eu", "asia", "oz"]
WIRES = {
    ("us", "eu"): 90.0,
    ("us", "asia"): 160.0,
    ("us", "oz"): 200.0,
    ("eu", "asia"): 230.0,
    ("eu", "oz"): 250.0,
    ("asia", "oz"): 100.0,
}
ROUTERS = (FARHOP, "region-local")


def world_of(name: str, dead: tuple[str, ...]) -> World:
    """Engines and a router in every region; the routers of `dead` die at 5 s."""
    world = build(name, 1, flat(REGIONS, WIRES), {region: station(4, 2.0, first_s=0.1) for region in REGIONS})
    for region in dead:
        world.at(5.0, world.kill_global, region)
    return world


@pytest.mark.parametrize("name", ROUTERS)
def test_refused_clients_of_every_router_try_the_next_entry(name: str) -> None:
    world = world_of(name, ("us", "eu"))
    world.at(6.0, world.arrive, "us", "t")
    measures = world.run(20.0)
    (record,) = measures.records
    assert (record.outcome, record.entry) == ("served", "us")
    # Refused beside it at once, by eu a round trip later; then to asia, where it is computed or sent on from.
    assert record.ttft_ms is not None
    assert record.ttft_ms >= 90.0 + 160.0 + 100.0 - 1e-6
    if name == "region-local":
        assert (record.region, record.ttft_ms) == ("asia", pytest.approx(90.0 + 160.0 + 1.0 + 100.0))
        assert world.wire.carried == {("us", "asia"): 1224, ("asia", "us"): 100 * 250}
    assert not world.entries["us"].open
    assert measures.violations == 0


@pytest.mark.parametrize("name", ROUTERS)
def test_clients_know_three_addresses_and_give_up_after_the_last(name: str) -> None:
    world = world_of(name, ("us", "eu", "asia"))
    world.at(6.0, world.arrive, "us", "t")
    (record,) = world.run(20.0).records
    assert (record.outcome, record.ended_at) == ("connect_failed", pytest.approx(6.0 + 0.09 + 0.16))


@pytest.mark.parametrize("name", ROUTERS)
def test_accepted_request_is_not_sent_to_another_balancer(name: str) -> None:
    world = world_of(name, ("us",))
    world.at(4.5, world.arrive, "us", "t")
    (record,) = world.run(20.0).records
    assert (record.outcome, record.ended_at) == ("upstream_died_mid_stream", 5.0)


@pytest.mark.parametrize("name", ROUTERS)
def test_leaving_client_causes_no_more_events_in_any_state(name: str) -> None:
    world = world_of(name, ("us",))
    for leaves_at in (6.01, 6.07, 6.2, 7.0):  # on its way, at a router beyond, while its answer comes
        world.at(6.0, lambda at=leaves_at: world.at(at, world.leave, world.arrive("us", "t")))
    measures = world.run(20.0)
    assert [record.outcome for record in measures.records] == ["client_left"] * 4
    assert not world.entries["us"].open
    assert not any(world.balancers[region][0].relay.live for region in world.balancers)
    assert measures.violations == 0


def test_client_gets_no_entry_address_its_law_forbids() -> None:
    topology = flat(REGIONS, WIRES)
    within = Residency(Rule(("world",)), entry=Rule(("us", "asia", "oz"), deny=("oz",)))
    tenants = {"t": Tenant("t", residency=within)}
    sites = {region: station(4, 2.0) for region in REGIONS}
    world = build(FARHOP, 1, dataclasses.replace(topology, tenants=tenants), sites)
    request = Request("q", "t", "m", 1, 1, chain=(), deadline=1.0)
    assert [one.region for one in world.entries["us"].addresses(request)] == ["us", "asia"]
    assert [one.region for one in world.entries["eu"].addresses(request)] == ["us", "asia"]
