"""What the store in memory has of its own: a clock passed in, and a bounded history."""

import contextlib
from random import Random

import pytest

from farhop.store.contract import ChangeKind, Conflict, StoreUnreachable
from farhop_lab import memory_store
from farhop_lab.memory_store import MemoryCluster, MemoryStore


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


async def test_leases_end_on_the_clock_passed_in_all_keys_in_one_revision():
    clock = Clock()
    cluster = MemoryCluster(clock)
    lease = cluster.grant(10.0)
    cluster.put("/a", b"", lease)
    cluster.put("/b", b"", lease)
    revision = cluster.revision
    clock.now += 9.9
    assert cluster.keep_alive(lease)
    clock.now += 9.9
    assert len(cluster.entries("/")) == 2
    clock.now += 0.1
    cluster.expire()
    assert [(change.key, change.revision) for change in cluster.changes_after(revision, "/")] == [
        ("/a", revision + 1),
        ("/b", revision + 1),
    ]
    assert not cluster.keep_alive(lease)
    assert cluster.get("/a") is None


async def test_a_key_written_again_leaves_its_old_lease():
    cluster = MemoryCluster(Clock())
    old, new = cluster.grant(10.0), cluster.grant(10.0)
    cluster.put("/a", b"1", old)
    cluster.put("/a", b"2", new)
    cluster.revoke(old)
    assert cluster.get("/a").value == b"2"
    cluster.put("/a", b"3")
    cluster.revoke(new)
    assert cluster.get("/a").value == b"3"


async def test_a_wipe_begins_a_new_history():
    cluster = MemoryCluster(Clock())
    lease = cluster.grant(10.0)
    cluster.put("/a", b"1", lease)
    cluster.wipe()
    assert (cluster.revision, cluster.entries("/"), cluster.keep_alive(lease)) == (1, (), False)
    with pytest.raises(Conflict):
        cluster.put("/a", b"", expect_revision=2)


async def test_a_watcher_further_behind_than_the_history_lists_again(monkeypatch):
    monkeypatch.setattr(memory_store, "HISTORY_LIMIT", 3)
    store = MemoryStore(Random(1), MemoryCluster(Clock()))
    await store.open()
    async with contextlib.aclosing(store.watch("/")) as watch:
        assert (await anext(watch)).kind == ChangeKind.SNAPSHOT
        for number in range(3):
            await store.put("/a", b"%d" % number)
        assert [(await anext(watch)).value for _ in range(3)] == [b"0", b"1", b"2"]
        for number in range(4):
            await store.put("/a", b"%d" % number)
        change = await anext(watch)
    assert change.kind == ChangeKind.SNAPSHOT
    assert [entry.value for entry in change.entries] == [b"3"]


async def test_an_outage_between_two_reads_is_reported():
    store = MemoryStore(Random(1), MemoryCluster(Clock()))
    await store.open()
    async with contextlib.aclosing(store.watch("/")) as watch:
        await anext(watch)
        store.outage()
        store.restore()
        assert (await anext(watch)).kind == ChangeKind.LOST
        assert (await anext(watch)).kind == ChangeKind.SNAPSHOT


async def test_opening_in_an_outage_is_refused():
    store = MemoryStore(Random(1))
    store.outage()
    with pytest.raises(StoreUnreachable, match="restore"):
        await store.open()
    store.restore()
    await store.open()
    await store.close()
