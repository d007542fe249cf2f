"""What a sender is told of its request's record."""

from __future__ import annotations

import pytest

from farhop_lab.sim.baselines.world import build
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.sites import flat, gpus, station
from farhop_lab.sim.world import World

Records = list[tuple[RequestRecord, bytes]]


def world() -> tuple[World, Records]:
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


def test_a_broken_stream_and_a_refused_connection_are_recorded() -> None:
    made, found = world()
    made.arrive("paris", "t", direct=True, on_done=lambda record, value: found.append((record, value)))
    made.at(made.now + 2.0, made.kill, "paris")
    made.run(10.0)
    made.arrive("paris", "t", direct=True, on_done=lambda record, value: found.append((record, value)))
    assert [(record.outcome, record.ttft_ms is None) for record, _ in found] == [
        ("upstream_died_mid_stream", False),
        ("connect_failed", True),
    ]


@pytest.mark.parametrize("router", ["farhop", "skywalker"])
def test_request_failed_before_it_began_is_retried_with_any_router(router: str) -> None:
    """At 0, half a second later, and a second after that: at 1.4 s somebody is there again."""
    made = build(router, 3, flat(["paris"]), {"paris": station(2, 4.0, first_s=1.0)}, stood_s=5.0)
    made.run(0.0)
    made.kill("paris")
    made.at(1.0, made.revive, "paris")
    found: Records = []
    for retries in (0, 2):
        made.arrive("paris", "t", retries=retries, on_done=lambda record, value: found.append((record, value)))
    made.run(60.0)
    (never, _), (again, _) = found
    assert (never.served, again.served, made.measures.concluded, made.measures.open) == (False, True, 2, 0)
    assert again.arrived_at == 0.0
    assert again.ttft_ms is not None
    assert again.ttft_ms > 2_000.0  # its waiting time counts
    assert made.measures.violations == 0


def test_begun_request_is_not_retried() -> None:
    made, found = world()
    made.arrive("paris", "t", direct=True, retries=2, on_done=lambda record, value: found.append((record, value)))
    made.at(made.now + 2.0, made.kill, "paris")
    made.run(20.0)
    ((record, _),) = found
    assert (record.outcome, record.attempts) == ("upstream_died_mid_stream", 1)


def test_a_client_that_leaves_before_a_retry_does_not_retry() -> None:
    made, found = world()
    made.kill("paris")
    name = made.arrive("paris", "t", direct=True, retries=2, on_done=lambda *of: found.append(of))
    made.at(made.now + 0.1, made.leave, name)
    made.run(20.0)
    ((record, _),) = found
    assert (record.outcome, record.ended_at - record.arrived_at) == ("client_left", pytest.approx(0.1))
    assert made.measures.open == 0


def test_a_prompt_that_no_engine_can_hold_is_not_asked_again() -> None:
    made = build("farhop", 3, flat(["paris"]), {"paris": gpus("l4", 1)}, stood_s=5.0)
    found: Records = []
    huge = b"x" * 4_000_000
    made.arrive("paris", "t", text=huge, retries=2, on_done=lambda record, value: found.append((record, value)))
    made.run(30.0)
    ((record, _),) = found
    assert (record.outcome, record.attempts) == ("request_refused_by_engine", 1)
