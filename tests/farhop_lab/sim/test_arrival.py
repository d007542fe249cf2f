"""What a sender is told of its request's record."""

from __future__ import annotations

from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.sites import flat, station
from farhop_lab.sim.world import World


def world() -> tuple[World, list[tuple[RequestRecord, bytes]]]:
    made = World(3, flat(["paris"]), {"paris": station(2, 4.0, first_s=1.0)})
    made.run(5.0)
    return made, []


def test_a_whole_answer() -> None:
    made, found = world()
    made.arrive("paris", "t", on_done=lambda record, value: found.append((record, value)))
    made.run(20.0)
    ((record, value),) = found
    assert (record.outcome, record.region, record.attempts, value) == ("served", "paris", 1, b"")
    assert record.ttft_ms is not None
    assert 1000.0 < record.ttft_ms < 1200.0
    assert 4.0 < record.ended_at - record.arrived_at < 4.2


def test_one_that_dies_while_it_is_answered_and_one_that_finds_nobody() -> None:
    made, found = world()
    made.arrive("paris", "t", direct=True, on_done=lambda record, value: found.append((record, value)))
    made.at(made.now + 2.0, made.kill, "paris")
    made.run(10.0)
    made.arrive("paris", "t", direct=True, on_done=lambda record, value: found.append((record, value)))
    assert [(record.outcome, record.ttft_ms is None) for record, _ in found] == [
        ("upstream_died_mid_stream", False),
        ("connect_failed", True),
    ]
