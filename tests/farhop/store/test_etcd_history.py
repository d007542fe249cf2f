"""What etcd remembers of a prefix, against a real etcd: puts, deletions, ended leases, and no more once compacted."""

import asyncio
from random import Random

import aetcd.rpc
import pytest

from farhop.store.contract import ChangeKind, StoreError
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_history import history
from farhop.store.etcd_link import EtcdLink
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.etcd import EmbeddedEtcd


def values(found):
    return [(change.kind, change.key, change.value) for change in found.changes]


async def test_all_that_was_put_and_deleted_until_it_is_compacted():
    async with EmbeddedEtcd() as etcd:
        settings = EtcdSettings((etcd.endpoint,))
        assert values(await history(settings, "/a/")) == []
        store = EtcdStore(settings, Random(1))
        await store.open()
        try:
            await store.put("/a/one", b"1")
            await store.put("/b", b"elsewhere")
            await store.delete("/a/one")
            await store.put("/a/two", b"2", ttl_s=1.0)
            async with asyncio.timeout(20.0):
                while await store.get("/a/two") is not None:
                    await asyncio.sleep(0.05)
            revision = await store.put("/a/one", b"3")
            found = await history(settings, "/a/")
            assert found.since == 1
            assert values(found) == [
                (ChangeKind.PUT, "/a/one", b"1"), (ChangeKind.DELETE, "/a/one", b""), (ChangeKind.PUT, "/a/two", b"2"),
                (ChangeKind.DELETE, "/a/two", b""), (ChangeKind.PUT, "/a/one", b"3"),
            ]  # fmt: skip
            link = EtcdLink(settings)
            await link.open()
            await link.call("kvstub", "Compact", aetcd.rpc.CompactionRequest(revision=revision))
            await link.close()
            found = await history(settings, "/a/")
            assert (found.since, values(found)[-1:]) == (revision, [(ChangeKind.PUT, "/a/one", b"3")])
        finally:
            await store.close()


async def test_an_etcd_that_is_not_there_is_reported():
    with pytest.raises(StoreError):
        await history(EtcdSettings(("127.0.0.1:1",), timeout_s=0.3), "/a/")
