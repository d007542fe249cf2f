from __future__ import annotations

from itertools import pairwise

from farhop.store.report import RegionReport
from farhop_lab.sim.measures import Fate
from farhop_lab.sim.scenery import MODEL, Reporting, flat, gpus, station
from farhop_lab.sim.world import World


def lonely(reporting: Reporting | None = None, *, slots: int = 4, replicas: int = 2) -> World:
    """One region that clients come to directly; nobody stands before it."""
    return World(
        5,
        flat(["paris"]),
        {"paris": station(slots, 2.0, first_s=0.1, replicas=replicas)},
        balancers={},
        reporting=reporting or Reporting(),
    )


def told(world: World) -> list[tuple[float, RegionReport]]:
    """What the region reports from now on, and when."""
    heard: list[tuple[float, RegionReport]] = []
    world.regions["paris"]._tell = lambda report: heard.append((world.now, report))
    return heard


def ask(world: World, count: int, **fields: int) -> None:
    for _ in range(count):
        world.arrive("paris", "t", direct=True, **fields)  # type: ignore[arg-type]


def test_requests_are_placed_by_the_shipped_machine_and_wait_in_the_region_not_in_the_engine() -> None:
    world = lonely()
    region = world.regions["paris"]
    world.at(1.0, ask, world, 6)
    world.run(1.5)
    assert region.carrier.under_way == 6
    assert [engine.metrics()[:2] for engine in region.engines.values()] == [(0, 2), (0, 2)]
    assert len(region.flow.queue) == 2
    measures = world.run(10.0)
    assert measures.outcomes == {"served": 6}
    assert measures.peak("paris") == 1.5
    assert [round(ms) for ms in measures.ttft_ms()] == [101, 101, 101, 101, 2102, 2102]


def test_it_learns_what_its_engines_say() -> None:
    world = lonely()
    world.at(1.0, ask, world, 4)
    world.run(10.0)
    flow = world.regions["paris"].flow
    sample = flow.view.replicas["gpu-0"].sample
    assert sample is not None
    assert (sample.waiting, sample.running) == (0, 0)
    assert abs(flow.estimates.bytes_per_token(MODEL) - 4.0) < 0.1
    assert 1900.0 < flow.speeds["gpu-0"].service_ms < 26_000.0


def test_it_hears_what_its_engines_answer_and_expects_it_to_be_found_by_the_next_turn() -> None:
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 1)}, balancers={})
    talk, turns = b"who are you? " * 100, list[Fate]()

    def heard(fate: Fate, said: bytes) -> None:
        nonlocal talk
        turns.append(fate)
        assert said
        talk += said + b"and then? " * 10
        if len(turns) < 3:
            say()

    def say() -> None:
        world.arrive("paris", "t", direct=True, text=talk, answer_tokens=200, heard=heard)

    world.at(1.0, say)
    world.run(60.0)
    assert [fate.outcome for fate in turns] == ["served"] * 3
    flow = world.regions["paris"].flow
    found = sum(fate.cached_tokens for fate in turns)
    assert found > sum(fate.prompt_tokens + fate.answer_tokens - 32 for fate in turns[:2])
    assert abs(flow.predicted_tokens - found) < 2 * (64 + 16)  # a block of ours and of theirs, twice


def test_it_reports_in_step_however_it_lived() -> None:
    world = lonely(Reporting(every_s=2.0))
    heard = told(world)
    world.at(3.1, world.kill, "paris")
    world.at(6.5, world.revive, "paris")
    world.run(9.0)
    assert [(round(at, 6), r.incarnation) for at, r in heard] == [(2.0, 1), (6.5, 2), (8.0, 2)]
    assert heard[1][1].seq < heard[2][1].seq


def test_it_reports_on_change_and_every_second_as_it_does_live() -> None:
    world = lonely()
    heard = told(world)
    world.at(3.0, ask, world, 3)
    world.run(2.95)
    quiet = len(heard)
    assert 3 <= quiet <= 4
    world.run(3.2)
    assert len(heard) > quiet, "three of four slots are taken: that is told within 100 ms"
    assert heard[-1][1].models[0].slots_free == 1
    gaps_s = [later - at for (at, _), (later, _) in pairwise(heard)]
    assert max(gaps_s) <= 1.0001


def test_a_region_that_dies_breaks_what_it_had_and_comes_back_empty() -> None:
    world = lonely()
    world.at(1.0, ask, world, 6)
    world.at(1.5, world.kill, "paris")
    world.at(1.6, ask, world, 1)
    world.at(2.0, world.revive, "paris")
    world.at(2.0, world.revive, "paris")
    world.at(4.0, ask, world, 1)
    measures = world.run(10.0)
    assert measures.outcomes == {
        "upstream_died_mid_stream": 4,
        "upstream_died_before_first_byte": 2,
        "connect_failed": 1,
        "served": 1,
    }
    assert (measures.open, measures.violations) == (0, 0)
    assert all(engine.metrics()[:2] == (0, 0) for engine in world.regions["paris"].engines.values())


def test_a_client_that_leaves_frees_its_slot() -> None:
    world = lonely(slots=1, replicas=1)
    first = []
    world.at(1.0, lambda: first.append(world.arrive("paris", "t", direct=True)))
    world.at(1.1, ask, world, 1)
    world.at(1.5, lambda: world.leave(first[0]))
    measures = world.run(1.7)
    assert measures.outcomes == {"client_left": 1}
    assert world.regions["paris"].engines["gpu-0"].metrics()[1] == 1
    world.run(3.6)
    assert measures.outcomes == {"client_left": 1, "served": 1}
