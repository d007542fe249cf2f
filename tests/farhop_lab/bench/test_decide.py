from __future__ import annotations

import pytest

from farhop_lab.bench import decide as bench


def test_every_row_is_a_measurement_of_the_shipped_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "REQUESTS", 10)
    monkeypatch.setattr(bench, "MANY", (100, 200))
    rows = bench.decide()
    assert [row.what for row in rows][:6] == [
        "regional, 2 replicas",
        "regional, 16 replicas",
        "regional, 64 replicas",
        "global, 3 regions",
        "global, 12 regions",
        "global, 60 regions",
    ]
    for row in rows:
        assert 0.0 < row.least_us <= row.median_us <= row.most_us
