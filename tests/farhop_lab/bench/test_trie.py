from __future__ import annotations

import pytest

from farhop_lab.bench import trie as bench


def test_every_row_is_a_measurement_of_the_shipped_trie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "NODES_QUICK", 4000)
    lines: list[str] = []
    rows = {row.what: row for row in bench.measure(quick=True, progress=lines.append)}
    assert lines == ["repeat 1 of 1, 4,000 nodes"]
    assert [what for what, *_ in bench.ROWS] == list(rows)
    for row in rows.values():
        assert 0.0 <= row.least <= row.median <= row.most
    assert rows["insert, new nodes"].median > 0.0
    assert rows["match of 32 KB, warm"].median > 0.0
