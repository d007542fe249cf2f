from __future__ import annotations

import pytest

from farhop_lab.bench import relay, soak, wrk
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.proxies import PROXIES
from farhop_lab.bench.soak import MemorySample, SoakReport


def test_growth_is_that_of_the_last_stretch() -> None:
    marks = [
        MemorySample(0.0, 0, 1000, 0.0),
        MemorySample(0.1, 100, 9000, 1.0),
        MemorySample(0.5, 500, 9500, 1.0),
        MemorySample(1.0, 1000, 10_500, 1.0),
    ]
    assert SoakReport(1000, 1000, 0, marks).per_request_bytes == 2.0


@pytest.mark.long
async def test_marks_are_set_along_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrk, "find", lambda: None)
    monkeypatch.setattr(soak, "SOAKED", PROXIES[0])  # the bare relay: it starts at once
    monkeypatch.setattr(soak, "_SLICE_S", (0.1, 0.2))
    monkeypatch.setattr(soak, "_WARM_S", 0.1)
    monkeypatch.setattr(relay, "_SETTLE_S", 0.0)
    found = await soak.measure(1000)
    assert found.errors == 0
    assert found.requests >= found.asked == 1000
    assert [mark.requests for mark in found.marks] == sorted({mark.requests for mark in found.marks})
    assert found.marks[-1].requests == found.requests
    assert all(mark.rss_bytes > 1_000_000 for mark in found.marks)


async def test_missing_tools_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(soak.SOAKED), "missing", lambda _self: "no etcd binary: install one")
    with pytest.raises(BenchError, match="no etcd binary"):
        await soak.measure(1000)
