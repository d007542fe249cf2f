"""Every fault breaks what it names, and its end mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from farhop_lab.chaos import properties, workload
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.workload import EngineTimings
from farhop_lab.sim.faults import KINDS, LINK_KINDS, REPLICA_KINDS, Fault, FaultInjector

if TYPE_CHECKING:
    from farhop_lab.sim.world import World


def shown(world: World) -> dict[str, object]:
    """What of a world a fault may change, as whoever looks from outside would see it."""
    seen: dict[str, object] = {}
    for name, region in world.regions.items():
        seen[f"{name} alive"] = region.alive
        for replica, process in region.processes.items():
            seen[f"{name}/{replica}"] = (
                process.listens,
                process.answers,
                process.healthy,
                process.xid,
                process.engine.faults.kind,
            )
    for name, (balancer,) in world.balancers.items():
        seen[f"global {name}"] = (balancer.alive, sorted(balancer.cut_off))
    seen["frozen"] = world.wire.frozen_since("ash", "elm")
    seen["swallows"] = world.wire.swallows("elm", "ash")
    seen["drained"], seen["lost"] = dict(world.drained), {n: s for n, s in world.lost.items() if s}
    seen["etcd"] = world.etcd_silent
    verdicts = [region.flow.law.verdict("t", "llama").lawful for region in world.regions.values()]
    seen["law"] = sorted(map(sorted, verdicts))
    return seen


@pytest.mark.parametrize("what", KINDS)
def test_each_fault_is_injected_and_repaired(what: str) -> None:
    replica = "gpu-1" if what in REPLICA_KINDS else ""
    factor = {"slow": 3.0, "lose-reports": 1.0}.get(what, 1.0)
    fault = Fault(1.0, 2.0, what, "ash", replica, "elm" if what in LINK_KINDS else "", factor)
    schedule = Schedule(1, faults=(fault,))
    world = workload.world_of(schedule, EngineTimings())
    injector = FaultInjector(world)
    injector.plan(schedule.faults)
    world.run(0.9)
    before = shown(world)
    world.run(2.0)
    assert shown(world) != before
    world.run(4.0)
    assert shown(world) == before
    assert list(properties.law(world, injector.law_epoch)) == []
    assert injector.law_epoch == (3 if what == "law" else 1)
    assert world.measures.violations == 0


def test_a_replica_fault_in_a_dead_region_is_over_with_its_process() -> None:
    faults = (
        Fault(1.0, 4.0, "kill", "ash"),
        Fault(2.0, 1.0, "pause", "ash", "gpu-0"),
        Fault(0.5, 9.0, "dead-green", "ash", "gpu-1"),
        Fault(0.5, 3.0, "refuse", "ash", "gpu-0"),
    )
    world = workload.world_of(Schedule(1, faults=faults), EngineTimings())
    before = shown(world)
    FaultInjector(world).plan(faults)
    world.run(6.0)
    assert shown(world) == before
