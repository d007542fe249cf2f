"""A report costs what it costs, however many regions there are and however many requests wait."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from farhop_wire import region_pb2

from farhop.store.documents.report import from_wire
from farhop_lab.bench import intake as bench


async def calls(regions: int, held: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Python functions called to take in one report of a world that has settled."""
    monkeypatch.setattr(bench, "HELD", held)
    monkeypatch.setattr(bench, "UNDER_WAY", 10)
    world = bench.World(regions, 2, random.Random(1))
    try:
        for number in range(3):
            world.round(number)
        report = from_wire(region_pb2.Report.FromString(world.report("r1", 3).SerializeToString()))
        seen: list[str] = []

        def note(frame: Any, what: str, _argument: object) -> None:
            if what == "call":
                seen.append(frame.f_code.co_name)

        world.now += 0.05
        sys.setprofile(note)
        try:
            assert world.watcher.on_report(report) is None
        finally:
            sys.setprofile(None)
        return len(seen)
    finally:
        await world.close()


async def test_a_report_costs_the_same_among_many_regions_and_with_many_on_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = await calls(2, 1, monkeypatch)
    assert 10 < few < 200
    assert await calls(40, 1, monkeypatch) == few
    assert await calls(2, 100, monkeypatch) == few


def test_every_row_is_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"REPEATS": 2, "ROUNDS": 3, "HELD": 5, "UNDER_WAY": 5}.items():
        monkeypatch.setattr(bench, name, few)
    found = bench.measure(regions=3, models=2)
    assert [row.what.split()[0] for row in found.rows] == ["read", "taken", "rows"]
    assert all(0.0 <= row.least_us <= row.median_us <= row.most_us for row in found.rows)
    assert found.core_share == pytest.approx(sum(row.median_us for row in found.rows[:2]) * 3 * 20 / 1e6)
