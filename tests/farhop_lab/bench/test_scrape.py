"""The benchmark reads what the shipped reader reads, and drives the shipped watcher."""

from __future__ import annotations

import pytest

from farhop_lab.bench import decide
from farhop_lab.bench import scrape as bench
from regional_lb.engines.signals.engines import ENGINES


def test_every_row_is_a_measurement_of_the_shipped_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "REPEATS", 2)
    monkeypatch.setattr(bench, "PAGES", 3)
    rows = bench.read()
    read = [name for name in ENGINES for _ in range(2)]
    assert [row.what.partition(",")[0] for row in rows] == [*read, "triton", "dcgm"]
    for row in rows:
        assert 0.0 < row.least_us <= row.median_us <= row.most_us


def test_the_shipped_watcher_takes_pages_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPLICAS", 20)
    monkeypatch.setattr(bench, "SECONDS", 1.0)
    monkeypatch.setattr(bench, "_WARM_S", 0.5)
    found = bench.watch()
    assert found.replicas == 20
    assert found.page_bytes > 50_000
    assert found.pages_per_s > 5.0
    assert found.cpu_us > 0.0
    assert found.core_share == pytest.approx(found.cpu_us / 1000.0)
    assert found.refused == {}
