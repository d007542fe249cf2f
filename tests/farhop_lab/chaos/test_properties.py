"""Every property finds what it is for: each is broken by hand in a world that is otherwise well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from farhop.balance.ledger import Reservation
from farhop_lab.chaos import properties, workload
from farhop_lab.chaos.properties import share_findings
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.workload import EngineTimings, OpenLoad
from farhop_lab.sim.world import World
from topology.law import Law

SCHEDULE = Schedule(2)


@pytest.fixture
def played() -> tuple[World, EngineTimings]:
    truth = EngineTimings()
    world = workload.world_of(SCHEDULE, truth)
    world.journal.violations_only()
    load = OpenLoad(world, SCHEDULE)
    world.run(22.0)
    load.stop()
    world.run(32.0)
    return world, truth


def found(world: World, truth: EngineTimings) -> set[str]:
    everything = (
        properties.estimates(world, truth),
        properties.standing(world),
        properties.answers(world, 0.0),
        properties.open_requests(world, world.now),
        properties.ledgers(world),
        properties.law(world, 1),
        properties.sound(world),
    )
    return {finding.property for some in everything for finding in some}


def break_wire(world: World) -> None:
    world.wire.set_rtt("ash", "elm", 200.0)


def eject(world: World) -> None:
    region = world.regions["elm"]
    region.flow.replicas.health["gpu-1"].eject("by hand", region.relay.clock())


def drain(world: World) -> None:
    world.drain("ash")


def silence(world: World) -> None:
    world.lose_reports("ash", 1.0)
    world.run(world.now + 5.0)


def kill(world: World) -> None:
    world.kill_regional("ash")


def fail(world: World) -> None:
    for region in world.balancers:
        world.kill_global(region)
    world.arrive("ash", "t")
    for region in world.balancers:
        world.start_global(region)
    world.run(world.now + 3.0)


def swallow(world: World) -> None:
    world.arrive("ash", "t")
    world.run(world.now + 0.01)


def leak(world: World) -> None:
    world.regions["ash"].flow.replicas.ledger.reserve("nobody's", Reservation("gpu-0", 10, 10))


def leak_globally(world: World) -> None:
    world.balancers["ash"][0].flow.ledger.reserve("nobody's", Reservation("elm", 10, 0))  # type: ignore[attr-defined]


def outrun(world: World) -> None:
    world.regions["ash"].flow.law = Law(replace(world.topology, epoch=9))


def lie(world: World) -> None:
    world.journal.violated("something")


Breaks = tuple[Callable[[World], None], str]


# Faults that show in other properties break one world, one after the other: running a world costs more than all checks.
@pytest.mark.parametrize(
    "broken",
    [
        [(break_wire, "estimates"), (eject, "standing"), (leak, "ledgers"), (outrun, "law"), (lie, "sound")],
        [(drain, "standing"), (leak_globally, "ledgers"), (swallow, "open")],
        [(silence, "standing")],
        [(kill, "standing")],
        [(fail, "answers")],
    ],
    ids=lambda broken: " ".join(breaks.__name__ for breaks, _ in broken),
)
def test_a_broken_world_is_found(played: tuple[World, EngineTimings], broken: list[Breaks]) -> None:
    world, truth = played
    so_far: set[str] = set()
    assert found(world, truth) == so_far
    for breaks, property_ in broken:
        assert property_ not in so_far
        breaks(world)
        so_far = found(world, truth)
        assert property_ in so_far


def test_an_estimate_that_is_not_the_truth_is_found(
    played: tuple[World, EngineTimings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The truth is changed, since estimates are whatever the machine keeps them in."""
    world, truth = played
    slower = [t._replace(ended_at=t.began_at + 1.5 * (t.ended_at - t.began_at)) for t in truth.by["ash", "gpu-0"]]
    truth.by["ash", "gpu-0"] = slower
    results = list(properties.estimates(world, truth))
    assert {("ash/gpu-0", "tpot")} <= {(f.subject, f.what.split()[0]) for f in results}
    assert {f.subject for f in results} == {"ash/gpu-0"}
    truth.by.clear()
    assert list(properties.estimates(world, truth)) == [], "of nothing that was measured nothing is said"
    monkeypatch.setattr(workload, "prefill_ms_per_token", lambda: 0.2)
    assert {f.what.partition(":")[0] for f in properties.estimates(world, truth)} == {"reported prefill ms/token"}


def test_a_share_is_out_for_sure_only_where_chance_does_not_explain_it() -> None:
    assert list(share_findings("ash", 100, {"gpu-0": 52, "gpu-1": 48})) == []
    assert [f.sure for f in share_findings("ash", 40, {"gpu-0": 26, "gpu-1": 14})] == [False, False]
    assert [f.sure for f in share_findings("ash", 40, {"gpu-0": 40, "gpu-1": 0})] == [True, True]
    assert [f.sure for f in share_findings("ash", 1600, {"gpu-0": 1040, "gpu-1": 560})] == [True, True]
    (elsewhere,) = share_findings("ash", 100, {"gpu-0": 30, "gpu-1": 30})
    assert (elsewhere.subject, elsewhere.sure) == ("ash", True)
    assert [f.subject for f in share_findings("ash", 50, {"gpu-0": 0, "gpu-1": 0})] == ["ash"]
