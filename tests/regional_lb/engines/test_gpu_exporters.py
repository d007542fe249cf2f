"""DCGM exporters on real sockets: one look for all replicas of a host, for as long as one of them names it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from inprocess import HOP, HOP_KEY, until

from farhop.relay.upstream.pool import Pool, UpstreamLimits
from farhop.service.process.tasks import Tasks
from regional_lb.app.config import RegionalConfig
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.gpu_exporters import GpuExporters
from regional_lb.engines.pages import Pages

PAGE = (Path(__file__).parent / "signals" / "pages" / "dcgm.txt").read_text()
BROKEN = "GPU 1: XID 79, fell off the bus"


class Exporter:
    """Gives `page`, or 500 while there is none. `now` is the watcher's clock."""

    def __init__(self) -> None:
        self.page, self.asked, self.now = PAGE, 0, 0.0
        self.refused = Counter[str]()
        self.url = ""
        self.watcher: GpuExporters
        self.tasks = Tasks()

    async def answer(self, _request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=self.page, status=200 if self.page else 500)

    def replica(self, **fields: Any) -> ReplicaConfig:
        return ReplicaConfig.model_validate({"url": "http://127.0.0.1:9", "models": ["m"], "dcgm": self.url} | fields)

    async def looked(self) -> None:
        """A whole round later."""
        seen = self.asked
        await until(lambda: self.asked >= seen + 2)


@asynccontextmanager
async def watching(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Exporter]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    config = RegionalConfig.model_validate({
        "region": "virginia", "instance": "r1", "admin": {"port": 0}, "tier": {"port": 0}, "control": {"port": 0},
        "hop": HOP, "watch": {"gpus_s": 10.0}, "health": {"gpu_temperature_c_max": 90},
        "replicas": [{"url": "http://127.0.0.1:9", "models": ["m"]}],
    })  # fmt: skip
    made, app, pool = Exporter(), web.Application(), Pool(UpstreamLimits(connect_s=1.0))
    app.router.add_get("/metrics", made.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    made.watcher = GpuExporters(
        config, tasks=made.tasks, pages=Pages(pool, 20.0, None), pause=lambda _seconds: asyncio.sleep(0.001),
        refused=lambda reason: made.refused.update([reason]), clock=lambda: made.now,
    )  # fmt: skip
    try:
        yield made
    finally:
        await made.tasks.close()
        await pool.close()
        await runner.cleanup()


async def test_a_fault_and_a_strain_are_told_of_the_replicas_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(monkeypatch) as found:
        watcher = found.watcher
        assert watcher.health_of(found.replica()) == ("", "")
        watcher.watch({found.url})
        await until(lambda: watcher.health_of(found.replica()) == (BROKEN, "GPU 1: 92 °C, above 90"))
        assert watcher.health_of(found.replica(gpus=["0"])) == ("", "")
        assert watcher.health_of(found.replica(dcgm="")) == ("", "")


async def test_a_report_holds_for_a_few_rounds_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(monkeypatch) as found:
        found.watcher.watch({found.url})
        await until(lambda: found.watcher.health_of(found.replica())[0] == BROKEN)
        found.page = ""
        await until(lambda: found.refused["gpus_status"] >= 2)
        found.now = 39.9
        assert found.watcher.health_of(found.replica())[0] == BROKEN
        found.now = 40.0
        assert found.watcher.health_of(found.replica()) == ("", "")
        found.page = PAGE
        await until(lambda: found.watcher.health_of(found.replica())[0] == BROKEN)


async def test_an_exporter_is_asked_once_for_all_and_no_longer_than_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with watching(monkeypatch) as found:
        for _ in range(3):
            found.watcher.watch({found.url})
            await found.looked()
            assert len(found.tasks) == 1
        found.watcher.watch(set())
        await found.tasks.join()
        assert found.watcher.health_of(found.replica()) == ("", "")
