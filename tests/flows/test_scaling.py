"""The scaling signal in simulated regions whose replicas follow it: it tracks a day, pilot lights wake."""

from __future__ import annotations

from itertools import pairwise
from math import cos, pi
from random import Random
from typing import TYPE_CHECKING

from farhop.balance.health.pilot_light import PilotConfig
from farhop_lab.sim.autoscaler import Autoscaler
from farhop_lab.sim.sites import Reporting, Watching, flat, station
from farhop_lab.sim.world import World
from global_lb.routing import flow as global_flow
from regional_lb.scheduler import flow as regional_flow
from regional_lb.scheduler.scaling import ScalingConfig

if TYPE_CHECKING:
    from topology.law import Law

MODEL = "llama"
SLOTS = 4  # of a replica
SERVICE_S = 4.0
WARM_UP_S = 15.0
PROMPT = 100  # bytes: less than a block, so that no prefix counts


def regional(scaling: ScalingConfig):
    return lambda region, law, rng: regional_flow.RegionalFlow(
        regional_flow.FlowConfig(region, scaling=scaling), law, rng, lambda _tenant: 1.0
    )


def site(replicas: int):
    return station(SLOTS * replicas, SERVICE_S, replicas=replicas, first_s=0.01)


def desired(world: World, region: str) -> int | None:
    """What the region's own balancer asks for."""
    return world.regions[region].flow.scaling.desired().get(MODEL)


def arrivals(world: World, entry: str, until: float, per_s, *, direct: bool = False) -> None:
    """Clients whose rate is a function of time: drawn at the highest and thinned."""
    rng, most = Random(7), max(per_s(second) for second in range(int(until)))

    def come() -> None:
        if rng.random() < per_s(world.now) / most:
            world.arrive(entry, "t", PROMPT, direct=direct)

    world.stream(most, come, since=10.0, until=until)  # the present replicas have been discovered by then


def test_replicas_follow_a_day() -> None:
    """A day of swing 6 in six minutes: nobody waits long, and at night far fewer replicas are kept."""
    scaling = ScalingConfig(warm_up_s=10.0, down_after_s=40.0, replicas_max=12)
    world = World(
        3, flat(["paris"]), {"paris": site(12)}, balancers={}, make_regional=regional(scaling),
        reporting=Reporting(every_s=1.0), watching=Watching(scrape_s=2.0, probe_s=1.0),
    )  # fmt: skip
    scaler = Autoscaler(world, "paris", lambda: desired(world, "paris"), first=3, warm_up_s=10.0)
    day_s = 360.0

    def per_s(at: float) -> float:
        return 2.0 * 6.0 ** (-0.5 * cos(2 * pi * at / day_s))

    arrivals(world, "paris", 1.2 * day_s, per_s, direct=True)
    records = world.run(1.2 * day_s + 30.0).records
    assert len(records) > 900
    assert all(record.served for record in records)
    waits_ms = sorted(record.ttft_ms for record in records)
    assert waits_ms[int(0.99 * len(waits_ms))] < 2000.0
    history = [(at, now, there) for at, now, there in scaler.history if 60.0 < at < 1.2 * day_s]
    peak = max(now for _, now, _ in history)
    trough = min(now for at, now, _ in history if at > day_s * 0.9)
    needed = 2.0 * 6.0**0.5 * SERVICE_S / SLOTS / scaling.target_share
    assert needed <= peak <= 1.6 * needed + 1
    assert trough <= 0.5 * peak
    steps = [b - a for (_, a, _), (_, b, _) in pairwise(history) if a != b]
    turns = sum(a * b < 0 for a, b in pairwise(steps))
    assert turns <= 6, steps  # up the hill and down again, without oscillation
    assert world.measures.violations == 0


def pilot_world(seed: int, sleep_after_s: float = 20.0) -> tuple[World, Autoscaler]:
    """Paris serves, Rome is its pilot light: one replica of six, and the others come up as Paris' balancer says."""
    scaling = ScalingConfig(warm_up_s=WARM_UP_S, down_after_s=30.0, replicas_max=6)
    pilots = {"rome": PilotConfig(sleep_after_s=sleep_after_s)}

    def make_global(region: str, law: Law, rng: Random) -> global_flow.GlobalFlow:
        config = global_flow.FlowConfig(region, pilots=pilots)
        return global_flow.GlobalFlow(config, law, rng, lambda _tenant: 30.0)

    world = World(
        seed, flat(["paris", "rome"], 20.0), {"paris": site(6), "rome": site(6)},
        make_regional=regional(scaling), make_global=make_global, reporting=Reporting(every_s=0.5),
    )  # fmt: skip

    def wanted() -> int | None:
        for region in ("paris", "rome"):
            balancer = world.balancers[region][0]
            if balancer.alive:
                answer = balancer.relay.flow.regions.scaling.desired.get(("rome", MODEL))
                if answer is not None:
                    return answer
        return None

    return world, Autoscaler(world, "rome", wanted, first=1, warm_up_s=WARM_UP_S)


def pilot(world: World, at: str = "rome") -> str:
    return world.balancers[at][0].relay.flow.regions.scaling.pilots["rome"].state.value


def test_a_pilot_light_sleeps_wakes_and_sleeps_again() -> None:
    """Its neighbour dies: it wakes, its replicas come, it is admitted what is there; some time after, it sleeps."""
    world, scaler = pilot_world(5)
    arrivals(world, "rome", 165.0, lambda _at: 1.5)
    seen: list[tuple[float, str, float]] = []

    def look() -> None:
        world.at(world.now + 1.0, look)
        flow = world.balancers["rome"][0].relay.flow
        seen.append(
            (world.now, pilot(world), flow.regions.admitted_share("rome", world.balancers["rome"][0].relay.clock()))
        )

    world.at(1.0, look)
    world.at(50.0, world.kill, "paris")
    world.at(110.0, world.revive, "paris")
    world.run(49.0)
    before = list(world.measures.records)
    assert pilot(world) == "asleep"
    assert {record.region for record in before} <= {"paris"}
    world.run(175.0)
    states = [state for _, state, _ in seen]
    order = [state for n, state in enumerate(states) if n == 0 or states[n - 1] != state]
    assert order == ["asleep", "waking", "awake", "asleep"]
    waking = next(at for at, state, _ in seen if state == "waking")
    asleep = max(at for at, state, _ in seen if state == "awake")
    assert 50.0 <= waking <= 55.0
    assert 110.0 + 20.0 <= asleep <= 110.0 + 20.0 + 10.0
    # Its admitted share grows as its replicas come, and they come a warm-up after they were requested.
    shares = [share for at, state, share in seen if waking + 1 < at and state == "waking"]
    assert shares[0] < 0.6
    assert all(b >= a - 0.35 for a, b in pairwise(shares))
    assert max(there for at, _, there in scaler.history if 80.0 < at < 110.0) >= 4
    assert scaler.serving() == 1
    assert {record.region for record in world.measures.records if 145.0 < record.arrived_at < 165.0} == {"paris"}
    lost = [record for record in world.measures.records if not record.served]
    assert all(record.arrived_at < 50.0 and record.ttft_ms is not None for record in lost), lost  # begun in Paris
    assert world.measures.violations == 0


def test_a_pilot_light_wakes_when_more_is_needed_than_the_others_may_have() -> None:
    """Nobody is down: Paris may have six replicas and is asked for more than they hold."""
    world, _ = pilot_world(6)
    arrivals(world, "paris", 100.0, lambda at: 1.5 if at < 40.0 else 7.0)
    world.run(39.0)
    assert pilot(world, "paris") == "asleep"
    world.run(99.0)
    assert pilot(world, "paris") == "awake"
    assert {record.region for record in world.measures.records if record.arrived_at > 80.0} == {"paris", "rome"}
    world.run(200.0)
    assert pilot(world, "paris") == "asleep"
