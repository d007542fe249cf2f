"""A cluster of real etcds: one leader, which can be moved, and data that survive a member but not a wipe."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.etcd import EtcdLabError
from farhop_lab.world.etcd_cluster import EtcdCluster

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
async def test_the_leader_moves_and_the_data_stay_until_they_are_wiped(tmp_path: Path) -> None:
    async with EtcdCluster(3, tmp_path) as cluster:
        assert len(set(cluster.endpoints)) == 3
        store = EtcdStore(EtcdSettings(tuple(cluster.endpoints)), Random(1))
        await store.open()
        try:
            revision = await store.put("/farhop/v1/x", b"1")
            before = await cluster.leader()
            assert await cluster.move_leader() == await cluster.leader() != before
            found = await store.get("/farhop/v1/x")
            assert found is not None
            assert found.revision == revision
            assert await cluster.compact() >= revision
            await cluster.restart(wipe=True)
            assert await store.get("/farhop/v1/x") is None
        finally:
            await store.close()
    with pytest.raises(EtcdLabError):
        await cluster.leader()
