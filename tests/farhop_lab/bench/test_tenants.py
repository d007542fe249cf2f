from __future__ import annotations

import pytest

from farhop_lab.bench import tenants as bench


def test_every_part_is_measured_and_all_are_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "REQUESTS", 20)
    rows = bench.tenants()
    assert [row.what.partition(",")[0] for row in rows] == [
        "two limits", "three", "six limits", "a usage record", "an audit entry", "six limits",
    ]  # fmt: skip
    for row in rows:
        assert 0.0 < row.least_us <= row.median_us <= row.most_us
    assert rows[-1].least_us == pytest.approx(sum(row.least_us for row in rows[2:-1]))
