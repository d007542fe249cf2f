"""The simulator's own pace, on worlds so small and short that only what is counted is looked at."""

from __future__ import annotations

import gc

import pytest

from farhop_lab.bench import sim as bench
from farhop_lab.sim import huge_pages


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SINCE_S", 3.0)
    monkeypatch.setattr(bench, "UNTIL_S", 9.0)
    monkeypatch.setattr(bench, "AGENTS_UNTIL_S", 8.0)
    monkeypatch.setattr(bench, "CLIENTS_PER_REPLICA", 4)
    for name, value in {"REGIONS": 4, "REPLICAS_EACH": 2, "BALANCERS": 2, "RATE_PER_S": 40.0}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "LARGE_UNTIL_S", 3.0)
    monkeypatch.setattr(huge_pages, "ask", lambda: 0)  # among all objects that this process keeps (tests/conftest.py)


def test_every_world_is_measured_after_its_warm_up() -> None:
    seen: list[str] = []
    frozen = gc.get_freeze_count()
    sizes = [bench.Size(bench.FARHOP, 3), bench.Size(bench.CHEAP, 3), bench.Size(bench.FARHOP)]
    sizes.append(bench.Size(bench.FARHOP, 6, bench.AGENTS))
    rows = bench.measure(sizes, seen.append)
    assert [(row.what, row.router, row.simulated_s) for row in rows] == [
        ("arena, 3 regions, 3 replicas", "farhop", 6.0),
        ("arena, 3 regions, 3 replicas", "spill-least-load", 6.0),
        ("4 regions x 2 replicas, 2 global balancers", "farhop", 2.0),
        ("agentic, 3 regions, 6 replicas", "farhop", 5.0),
    ]
    assert len(seen) == 4
    for row in rows:
        assert row.violations == 0
        assert row.requests > 0
        assert row.as_dict()["requests_per_cpu_s"] == pytest.approx(row.requests / row.cpu_s)
    assert 40 <= rows[2].requests <= 120
    assert (gc.get_freeze_count() > 0) == (frozen > 0)


def test_a_world_that_is_too_much_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LIMIT_S", 0.0)
    (row,) = bench.measure([bench.Size(bench.FARHOP)])
    assert (row.requests, row.simulated_s, row.per_s) == (0, 0.0, 0.0)
