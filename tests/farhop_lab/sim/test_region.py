from __future__ import annotations

from itertools import pairwise

import pytest

from farhop.store.documents.report import RegionReport
from farhop_lab.engine.core.faults import Fault
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.sites import MODEL, Reporting, Watching, flat, gpus, station
from farhop_lab.sim.world import World
from regional_lb.mesh.warm_restart import EVERY_S


def lonely(reporting: Reporting | None = None, *, slots: int = 4, replicas: int = 2) -> World:
    """One region that clients come to directly; nobody stands before it."""
    return World(
        5,
        flat(["paris"]),
        {"paris": station(slots, 2.0, first_s=0.1, replicas=replicas)},
        balancers={},
        reporting=reporting or Reporting(),
    )


def reports_of(world: World) -> list[tuple[float, RegionReport]]:
    """What the region reports from now on, and when."""
    seen: list[tuple[float, RegionReport]] = []
    world.regions["paris"].on_report = lambda report: seen.append((world.now, report))
    return seen


def ask(world: World, count: int, **fields: int) -> None:
    for _ in range(count):
        world.arrive("paris", "t", direct=True, **fields)  # type: ignore[arg-type]


def test_requests_are_placed_by_the_shipped_machine_and_wait_in_the_region_not_in_the_engine() -> None:
    world = lonely()
    region = world.regions["paris"]
    world.at(1.0, ask, world, 6)
    world.run(1.5)
    assert region.relay.under_way == 6
    assert [engine.metrics()[:2] for engine in region.engines.values()] == [(0, 2), (0, 2)]
    assert len(region.flow.queue) == 2
    measures = world.run(10.0)
    assert measures.outcomes == {"served": 6}
    assert measures.peak("paris") == 1.5
    assert [round(ms) for ms in measures.ttft_ms()] == [101, 101, 101, 101, 2102, 2102]


def test_region_learns_model_facts_from_its_engines() -> None:
    world = lonely()
    world.at(1.0, ask, world, 4)
    world.run(10.0)
    flow = world.regions["paris"].flow
    sample = flow.replicas.view.replicas["gpu-0"].sample
    assert sample is not None
    assert (sample.waiting, sample.running) == (0, 0)
    assert abs(flow.replicas.estimates.bytes_per_token(MODEL) - 4.0) < 0.1
    assert 1900.0 < flow.replicas.speeds["gpu-0"].service_ms < 26_000.0


def test_region_extends_chains_by_answers_and_predicts_hits_of_the_next_turn() -> None:
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 1)}, balancers={})
    talk, turns = b"who are you? " * 100, list[RequestRecord]()

    def on_answer(record: RequestRecord, data: bytes) -> None:
        nonlocal talk
        turns.append(record)
        assert data
        talk += data + b"and then? " * 10
        if len(turns) < 3:
            say()

    def say() -> None:
        world.arrive("paris", "t", direct=True, text=talk, answer_tokens=200, on_done=on_answer)

    world.at(1.0, say)
    world.run(60.0)
    assert [record.outcome for record in turns] == ["served"] * 3
    flow = world.regions["paris"].flow
    found = sum(record.cached_tokens for record in turns)
    assert found > sum(record.prompt_tokens + record.answer_tokens - 32 for record in turns[:2])
    assert abs(flow.learning.predicted_tokens - found) < 2 * (64 + 16)  # a block of ours and one of theirs, twice


def test_reports_keep_their_interval_after_a_restart() -> None:
    world = lonely(Reporting(every_s=2.0))
    found = reports_of(world)
    world.at(3.1, world.kill, "paris")
    world.at(6.5, world.revive, "paris")
    world.run(9.0)
    assert [(round(at, 6), r.incarnation) for at, r in found] == [(2.0, 1), (6.5, 2), (8.0, 2)]
    assert found[1][1].seq < found[2][1].seq


def test_region_reports_on_change_and_every_second() -> None:
    world = lonely()
    found = reports_of(world)
    world.at(3.0, ask, world, 3)
    world.run(2.95)
    quiet = len(found)
    assert 3 <= quiet <= 4
    world.run(3.2)
    assert len(found) > quiet, "three of four slots are taken: that is told within 100 ms"
    assert found[-1][1].models[0].slots_free == 1
    gaps_s = [later - at for (at, _), (later, _) in pairwise(found)]
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


def test_a_balancer_that_restarts_finds_its_engines_as_they_were() -> None:
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 2)}, balancers={})
    region = world.regions["paris"]
    world.at(1.0, lambda: world.arrive("paris", "t", 4096, answer_tokens=200, direct=True))
    world.run(2.0)
    engines, flow = dict(region.engines), region.flow
    assert sum(engine.metrics()[1] for engine in engines.values()) == 1
    world.kill_regional("paris")
    world.run(3.0)
    assert sum(engine.metrics()[1] for engine in engines.values()) == 0, "nobody is there for it any more"
    world.arrive("paris", "t", direct=True)
    world.revive("paris")
    world.run(4.0)
    assert region.engines == engines
    assert region.flow is not flow
    world.arrive("paris", "t", direct=True)
    measures = world.run(20.0)
    assert [record.outcome for record in measures.records] == [
        "upstream_died_mid_stream", "connect_failed", "served"
    ]  # fmt: skip


def test_a_balancer_that_restarts_begins_with_the_prompts_that_its_disk_has() -> None:
    """Those whose answers ended long enough before its death to be written down."""
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 2)}, balancers={})
    region, nodes = world.regions["paris"], list[int]()
    world.at(1.0, lambda: world.arrive("paris", "t", 4096, answer_tokens=20, direct=True))
    for at_s in (2.0 + EVERY_S, 20.0):
        world.run(at_s)
        world.kill_regional("paris")
        world.revive("paris")
        nodes.append(region.flow.replicas.trie.nodes)
        world.run(at_s + 1.0)  # it has found its engines
        world.arrive("paris", "t", 8192, answer_tokens=20, direct=True)
    assert 0 < nodes[0] < nodes[1]
    world.run(24.0)
    world.kill_regional("paris")
    world.revive("paris")
    assert region.flow.replicas.trie.nodes == nodes[1]  # the last prompt was not written yet
    world.kill("paris")
    world.revive("paris")
    assert region.flow.replicas.trie.nodes == 0  # engines that start anew have nothing


def test_view_of_a_replica_matches_its_state() -> None:
    """Probes and scrapes of a paused, a stopped, a stuck replica and of one whose GPU fell off the bus."""
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 5)}, balancers={})
    region, processes = world.regions["paris"], world.regions["paris"].processes
    world.run(2.0)
    processes["gpu-0"].pause()
    processes["gpu-1"].stop()
    processes["gpu-2"].command(Fault("stuck"))
    processes["gpu-3"].command(Fault("xid", xid=79))

    def seen() -> list[tuple[str, str]]:
        healths = [region.flow.replicas.health_tracker.read(f"gpu-{n}", region.relay.clock()) for n in range(5)]
        return [(str(health.state), health.why) for health in healths]

    world.run(14.0)
    assert [state for state, _ in seen()] == ["down"] * 4 + ["up"]
    assert seen()[3][1] == "GPU 0: XID 79, fell off the bus"
    sample = region.flow.replicas.view.replicas["gpu-0"].sample
    assert sample is not None
    assert region.relay.clock() - sample.at > 11.0, "a paused process says nothing"
    processes["gpu-0"].resume()
    processes["gpu-1"].start()
    processes["gpu-2"].command(None)
    processes["gpu-3"].command(None)
    world.run(24.0)
    assert {state for state, _ in seen()} == {"up"}


def test_an_engine_that_never_begins_or_goes_silent_is_given_up() -> None:
    watching = Watching(engine_first_byte_s=4.0, engine_between_bytes_s=5.0)
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 1)}, balancers={}, watching=watching)
    process = world.regions["paris"].processes["gpu-0"]
    world.at(1.0, lambda: world.arrive("paris", "t", direct=True, answer_tokens=100))
    world.at(2.0, process.command, Fault("dead-green"))
    world.at(2.5, lambda: world.arrive("paris", "t", direct=True))
    measures = world.run(40.0)
    stalled, late = measures.records
    assert (stalled.outcome, late.outcome) == ("upstream_stalled", "first_byte_timeout")
    assert stalled.ended_at == pytest.approx(7.0, abs=0.01), "5 s after the last token"
    assert late.attempts > 1, "nobody else is there: it was asked again"
    assert process.engine.metrics()[:2] == (0, 0)


def test_engine_facts_are_read_as_in_the_relay() -> None:
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 3)}, balancers={})
    region = world.regions["paris"]
    world.at(1.0, lambda: world.arrive("paris", "t", direct=True, answer_tokens=100))
    world.run(2.0)
    (busy,) = [process for process in region.processes.values() if process.engine.metrics()[1]]
    busy.command(Fault("oom"))
    (record,) = world.run(2.5).records
    assert record.outcome == "engine_error"
    assert region.flow.replicas.health_tracker.ejections == {"engine_out_of_memory": 1.0}


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("fault", ["stop", "pause"])
def test_streams_continue_at_another_replica_if_engines_report_token_ids(token_ids: bool, fault: str) -> None:
    """And use what they would have used, had nothing broken."""
    watching = Watching(engine_between_bytes_s=2.0)

    def run(breaks: bool) -> World:
        site = gpus("l4", 2, token_ids=token_ids)
        world = World(5, flat(["paris"]), {"paris": site}, balancers={}, watching=watching)
        world.at(1.0, lambda: ask(world, 8, answer_tokens=400))
        if breaks:
            world.at(4.0, lambda: getattr(world.process("paris", "gpu-0"), fault)())
        world.run(120.0)
        return world

    whole, broken = run(False), run(True)
    assert whole.measures.outcomes == {"served": 8}
    assert broken.journal.violations == 0
    if token_ids:
        assert broken.measures.outcomes == {"served": 8}
        used, expected = (
            sorted((one.id, one.prompt_tokens, one.answer_tokens) for one in world.measures.records)
            for world in (broken, whole)
        )
        assert used == expected
        assert broken.regions["paris"].relay.under_way == 0
    else:
        assert broken.measures.outcomes["served"] < 8
