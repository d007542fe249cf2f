"""Both tiers start while their store is silent: by the last view and law on disk, and they say so; else they wait."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from inprocess import HOP_KEY, Engine, chat, global_config, regional_config, send, serving, topology, until

from farhop.service.assembly import stores
from farhop.store import disk_cache
from farhop.store.contract import LAW_KEY, REGION_PREFIX
from farhop.store.disk_cache import DiskCachedStore
from farhop.store.sealed import inner
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.ports import free_ports
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Etcd(MemoryStore):
    """As EtcdStore: one whose opening fails can be watched all the same, and is told to be lost."""

    async def open(self) -> None:
        self._open = True
        await super().open()


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setattr(disk_cache, "SAVE_S", 0.0)
    async with Engine().running() as running:
        yield running


class Fleet:
    """Both tiers of Virginia on ports of their own, with their state in a folder."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._cluster, self._folder, self._engine = MemoryCluster(), folder, engine
        tier, control, client, admin = free_ports(4)
        self._ports: dict[str, Any] = {
            "tier": {"port": tier}, "control": {"port": control}, "client": {"port": client}, "admin": {"port": admin},
        }  # fmt: skip

    def made(self, *, silent: bool) -> tuple[RegionalBalancer, GlobalBalancer, list[Etcd]]:
        world, etcds = topology(), [Etcd(Random(n), self._cluster) for n in (2, 4)]
        common = {"state_dir": str(self._folder), "fleet": "test"}
        below_config = regional_config(self._engine, **self._ports, **common)
        above_config = global_config(watch={"ping_s": 0.1}, **common)
        if silent:
            for store in etcds:
                store.outage()
        keepers = [
            DiskCachedStore(store, "test", state, Random(5), lambda _: None)
            for store, state in (
                (etcds[0], stores.state(below_config, "regional")),
                (etcds[1], stores.state(above_config, "global")),
            )
            if state is not None
        ]
        below = RegionalBalancer(below_config, world, Random(1), keepers[0])
        return below, GlobalBalancer(above_config, world, Random(3), keepers[1]), etcds


async def served(below: RegionalBalancer, above: GlobalBalancer) -> tuple[int, str]:
    """How a request through both is answered, and where."""
    await below.open()
    line = await above.open()
    entry = int(line.partition("clients on ")[2].split(",")[0].rpartition(":")[2])
    await until(lambda: serving(above))
    answer = await send(entry, chat())
    return answer.status, answer.headers["x-farhop-region"]


async def test_both_tiers_start_without_etcd_and_report_it(engine: Engine, tmp_path: Path) -> None:
    fleet = Fleet(engine, tmp_path)
    below, above, _ = fleet.made(silent=True)
    for nothing_known in (below, above):
        opening = asyncio.create_task(nothing_known.open())
        await until(lambda: "nor was anything kept yet" in nothing_known.admin.starting)  # noqa: B023 - used here
        opening.cancel()
        await asyncio.wait((opening,))
        await nothing_known.close()
    below, above, _ = fleet.made(silent=False)
    try:
        assert await served(below, above) == (200, "virginia")
        assert above.tier_admin.notice() == below.tier_admin.notice() == ""
        store = inner(above.store)
        assert isinstance(store, DiskCachedStore)
        await until(lambda: {LAW_KEY, REGION_PREFIX} <= store.saved.keys())
    finally:
        await above.close()
        await below.close()

    below, above, etcds = fleet.made(silent=True)
    try:
        assert await served(below, above) == (200, "virginia")  # through the channel: etcd holds nothing
        for tier_admin in (above.tier_admin, below.tier_admin):
            assert tier_admin.ready()
            assert "etcd is silent" in tier_admin.notice()
            assert [one["from_disk"] for one in tier_admin.status()["kept"]] == [True]
        for store in etcds:
            store.restore()
        await until(lambda: above.tier_admin.notice() == below.tier_admin.notice() == "")
    finally:
        await above.close()
        await below.close()
