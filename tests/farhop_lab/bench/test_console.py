"""What the console costs: the made-up fleet is what it says, the server is measured, and a trace is read."""

from __future__ import annotations

from typing import Any

import pytest

from farhop_lab.bench import console
from farhop_lab.bench.harness import BenchError


def test_a_map_of_any_size() -> None:
    assert len(console.world(60).regions) == 60
    assert len({(one.latitude, one.longitude) for one in console.world(60).regions.values()}) > 50


async def test_every_figure_of_the_world_changes() -> None:
    fleet = console.ChangingFleet(3, 2)
    one, other = await fleet.snapshots(), await fleet.snapshots()
    assert len(one) == 6
    for name in one:
        assert one[name].snapshot != other[name].snapshot


@pytest.mark.long
async def test_the_server_is_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SETTLE_S", 1.0)  # CPU of the start is not measured
    rows = {row.what: row for row in await console.costs(1.0)}
    sent = rows["to each viewer"]
    assert sent.value > 1_000
    assert sent.held  # CPU is not asserted here: the clock ticks are too coarse for a second


def _event(name: str, ts: float, dur: float, tdur: float | None = None, tid: int = 1) -> dict[str, Any]:
    fields = {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}
    return fields if tdur is None else {**fields, "tdur": tdur}


def test_a_trace_is_frames_of_the_pages_thread() -> None:
    events = [
        _event("FireAnimationFrame", 0.0, 100.0),
        _event("FunctionCall", 1_500_000.0, 9_000.0, 4_000.0),
        _event("Layout", 1_500_100.0, 1_000.0, 1_000.0),  # inside the call: counted with it
        _event("Layout", 1_520_000.0, 2_000.0, 1_500.0),
        _event("Paint", 1_523_000.0, 2_000.0, 1_500.0),  # none of script, style, layout
        _event("FunctionCall", 1_524_000.0, 2_000.0, 1_500.0, tid=2),
        _event("Layerize", 1_530_000.0, 10.0),
        _event("FireAnimationFrame", 1_540_000.0, 500.0, 250.0),
        _event("Layerize", 1_541_000.0, 10.0),
        {"ph": "I", "name": "Mark"},
    ]
    assert console.of_trace(events, 1.0) == [5.5, 0.25]
    with pytest.raises(BenchError, match="no frame"):
        console.of_trace([], 1.0)
