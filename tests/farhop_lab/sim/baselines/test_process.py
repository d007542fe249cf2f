from __future__ import annotations

import pytest

from farhop_lab.sim.baselines.world import RouterWorld, build
from farhop_lab.sim.sites import flat, station
from farhop_lab.sim.wire import STREAMED_BYTES

REGIONS = ["us", "eu", "asia"]
WIRES = {("us", "eu"): 90.0, ("us", "asia"): 160.0, ("eu", "asia"): 230.0}
HOME_MS = flat(["us"]).rtt_ms("us", "us")


def make(name: str, **replicas: int) -> RouterWorld:
    """A first token after 100 ms, an answer of 100 tokens after 2 s, one request at a time at each engine."""
    sites = {region: station(count, 2.0, first_s=0.1, replicas=count) for region, count in replicas.items()}
    world = build(name, 3, flat(REGIONS, WIRES), sites)
    assert isinstance(world, RouterWorld)
    return world


@pytest.mark.parametrize(("entry", "wire_ms"), [("us", 0.0), ("asia", 160.0)])
def test_a_client_of_a_far_router_pays_the_ocean_both_ways(entry: str, wire_ms: float) -> None:
    world = make("central-least-load", us=1)
    world.at(1.0, world.arrive, entry, "t")
    (record,) = world.run(10.0).records
    assert record.ttft_ms == pytest.approx(wire_ms + HOME_MS + 100.0)
    assert record.ended_at == pytest.approx(1.0 + (wire_ms + HOME_MS) / 1e3 + 2.0)
    assert (record.entry, record.region, record.attempts, record.outcome) == (entry, "us", 1, "served")


def test_a_far_engine_is_asked_over_the_wire_and_every_crossing_is_counted() -> None:
    world = make("central-round-robin", us=1, eu=1)
    for at in (1.0, 1.0):
        world.at(at, world.arrive, "asia", "t", 1000)
    first, second = sorted(world.run(10.0).records, key=lambda record: record.ttft_ms or 0.0)
    assert (first.region, second.region) == ("us", "eu")
    assert second.ttft_ms == pytest.approx(160.0 + 90.0 + 100.0)
    answer = 100 * STREAMED_BYTES
    assert world.wire.carried == {
        ("asia", "us"): 2 * 1200,
        ("us", "eu"): 1200,
        ("eu", "us"): answer,
        ("us", "asia"): 2 * answer,
    }


def test_a_router_hands_on_to_another_which_knows_it_as_forwarded() -> None:
    world = make("skywalker", us=1, eu=1)
    # The first runs in us, the second waits in the engine: from the next probe on, no more are sent there.
    for at in (1.0, 1.02, 1.5):
        world.at(at, world.arrive, "us", "t")
    world.run(1.7)
    handed_on = world.routers["eu"].relay.live["r3/1"].request
    assert handed_on.issuer == "us"
    assert handed_on.deadline - world.routers["eu"].relay.clock() == pytest.approx(600.0 - 0.2 + 0.045)
    records = {record.id: record for record in world.run(20.0).records}
    assert [records[name].region for name in ("r1", "r2", "r3")] == ["us", "us", "eu"]
    assert records["r3"].ttft_ms == pytest.approx(90.0 + HOME_MS + 100.0)
    assert world.wire.carried[("us", "eu")] == 1224
    assert world.measures.violations == 0


def test_a_client_that_leaves_frees_the_engine_in_any_region() -> None:
    for name in ("central-least-load", "skywalker"):
        world = make(name, us=1, eu=1)
        for at in (1.0, 1.02, 1.5):
            world.at(at, world.arrive, "us", "t")
        world.at(2.0, world.leave, "r3")
        world.run(2.2)
        assert world.measures.outcomes == {"client_left": 1}
        assert world.pools["eu"].samples() is not None
        running = {region: len(pool.calls) for region, pool in world.pools.items()}
        assert running == ({"us": 1, "eu": 1} if name == "central-least-load" else {"us": 2, "eu": 0})
        assert world.run(20.0).violations == 0
        assert world.measures.open == 0


def test_a_client_that_leaves_before_its_request_arrives_is_not_served() -> None:
    world = make("central-least-load", us=1)
    world.at(1.0, world.arrive, "asia", "t")
    world.at(1.05, world.leave, "r1")
    world.run(5.0)
    assert world.measures.outcomes == {"client_left": 1}
    assert not world.pools["us"].calls
    assert not world.entries["asia"].open


def test_engines_and_routers_die_and_come_back_empty() -> None:
    world = make("central-least-load", us=1, eu=1)
    for at in (1.0, 1.0, 2.5, 4.5, 9.0):
        world.at(at, world.arrive, "us", "t")
    world.at(2.0, world.kill, "eu")
    world.at(4.0, world.kill, "us")
    world.at(8.0, world.revive, "us")
    records = {record.id: (record.outcome, record.region) for record in world.run(20.0).records}
    assert records == {
        "r1": ("served", "us"),
        "r2": ("upstream_died_mid_stream", "eu"),
        "r3": ("upstream_died_mid_stream", "us"),
        "r4": ("connect_failed", ""),
        "r5": ("served", "us"),
    }
    assert world.measures.violations == 0


def test_an_engine_that_is_gone_is_asked_until_a_probe_finds_out() -> None:
    world = make("central-round-robin", us=1, eu=1)
    world.at(1.5, world.kill, "eu")
    for at in (1.6, 1.6, 4.0, 4.0):
        world.at(at, world.arrive, "us", "t")
    records = {record.id: record.outcome for record in world.run(20.0).records}
    assert records == {"r1": "served", "r2": "connect_failed", "r3": "served", "r4": "served"}


def test_pings_follow_a_changed_round_trip_time() -> None:
    world = make("gorgo", us=1, eu=1)
    world.at(40.0, world.wire.set_rtt, "us", "eu", 190.0)
    state = world.routers["us"].flow.state
    world.run(59.0)
    assert state.rtt_ms["eu"] == pytest.approx(90.0)
    world.run(61.0)
    assert state.rtt_ms["eu"] == pytest.approx(0.7 * 90.0 + 0.3 * 190.0)
    world.run(91.0)
    assert state.rtt_ms["eu"] == pytest.approx(0.7 * 120.0 + 0.3 * 190.0)


def test_utilisation_of_a_baseline_region_is_measured() -> None:
    world = make("region-local", us=2)
    world.at(1.0, world.arrive, "us", "t")
    world.run(10.0)
    assert world.measures.peak("us") == 0.5
    shares = [use.share for use in world.measures.use["us"]]
    assert sum(shares) / len(shares) == pytest.approx(0.1, abs=0.02)
