"""The regions that stand in a benchmark report as real ones do."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from random import Random

import yaml

from farhop.store.contract import REGION_PREFIX
from farhop.store.documents.report import decode
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.bench import regions, tiers
from farhop_lab.bench.harness import module
from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd


async def test_each_region_reports_ready_replicas_and_where_it_takes_requests(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(yaml.safe_dump(tiers.topology()))
    etcd = EmbeddedEtcd(folder=tmp_path / "etcd")
    await etcd.start()
    addresses = dict.fromkeys(tiers.REGIONS[:2], ("127.0.0.2", 9000))
    job = regions.Job(
        topology=str(file),
        etcd=etcd.endpoint,
        tiers=addresses,
        replicas=3,
        slots=8,
        kv_tokens=1000,
        prefill_tokens_max=100,
    )
    program, arguments = module("regions", job)
    child = Child("regions", arguments, tmp_path / "log", {}, program)
    store = EtcdStore(EtcdSettings(endpoints=(etcd.endpoint,)), Random(1))
    try:
        assert await child.start() == "2 regions report"
        await store.open()
        async with asyncio.timeout(60.0), aclosing(store.watch(REGION_PREFIX)) as changes:
            first = await anext(changes)
    finally:
        await store.close()
        await child.stop()
        await etcd.stop()
    fields = {report.region: report for report in (decode(entry.value) for entry in first.entries)}
    assert set(fields) == set(addresses)
    for report in fields.values():
        assert report.tier_address == "127.0.0.2:9000"
        assert [(m.model, m.replicas_ready, m.slots_free) for m in report.models] == [("bench", 3, 24)]
