"""One suite over all stores: what farhop.store.contract promises, by memory, by several hubs and by a real etcd.

A world (conftest.py) has `near`, a store whose connection can be cut, and `far`, another connection that never is.
"""

import asyncio
import contextlib
import re
from random import Random

import pytest
import pytest_asyncio

from farhop.store.contract import ChangeKind, Conflict, StoreError, StoreUnreachable
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.hubs import Hubs
from tests.conftest import unhindered

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 60.0
TIMEOUT_S = 1.2


@pytest.fixture
def root(request):
    return f"/farhop/v1/test/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}/"


class Watching:
    """A watch whose changes are kept, and waited for."""

    def __init__(self, store, prefix):
        self.changes = []
        self._news = asyncio.Event()
        self._generator = store.watch(prefix)
        self.task = None

    async def __aenter__(self):
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait({self.task})
        await self._generator.aclose()

    async def _run(self):
        async for change in self._generator:
            self.changes.append(change)
            self._news.set()

    async def until(self, condition):
        """Wait for condition(changes); returns the changes so far."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition(self.changes):
                    assert not self.task.done(), "a watch never ends by itself"
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pytest.fail(f"not seen; seen instead: {self.changes}")
        return list(self.changes)

    def kinds(self):
        return [change.kind for change in self.changes]


def seen(key, value):
    """The changes end in a state where key has this value (None: absent), by what they tell alone."""

    def holds(changes):
        state = {}
        for change in changes:
            match change.kind:
                case ChangeKind.SNAPSHOT:
                    state = {entry.key: entry.value for entry in change.entries}
                case ChangeKind.PUT:
                    state[change.key] = change.value
                case ChangeKind.DELETE:
                    state.pop(change.key, None)
        return any(change.kind == ChangeKind.SNAPSHOT for change in changes) and state.get(key) == value

    return holds


def ends_with(kind):
    return lambda changes: bool(changes) and changes[-1].kind == kind


async def eventually(condition):
    """Poll an async condition, bounded."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail("did not come about in time")


async def test_a_watch_begins_with_all_there_is_and_goes_on_in_order(world, root):
    await world.far.put(root + "a", b"1")
    await world.far.put(root + "b", b"2")
    await world.far.put(root[:-1] + "0", b"beside the prefix, not under it")
    async with Watching(world.near, root) as watching:
        first = (await watching.until(ends_with(ChangeKind.SNAPSHOT)))[0]
        assert [(entry.key, entry.value) for entry in first.entries] == [(root + "a", b"1"), (root + "b", b"2")]
        await world.far.put(root[:-1] + "0", b"again")
        for number in range(20):
            await world.far.put(root + "a", b"%d" % number)
        await world.far.delete(root + "b")
        changes = await watching.until(ends_with(ChangeKind.DELETE))
    assert [change.value for change in changes[1:-1]] == [b"%d" % number for number in range(20)]
    assert changes[-1].key == root + "b"
    revisions = [change.revision for change in changes]
    assert revisions == sorted(set(revisions))


async def test_get_list_and_delete(world, root):
    assert await world.near.get(root + "a") is None
    assert await world.near.list(root) == ()
    revision = await world.near.put(root + "b", b"\x00\xff")
    await world.near.put(root + "a", b"")
    assert [entry.key for entry in await world.far.list(root)] == [root + "a", root + "b"]
    entry = await world.far.get(root + "b")
    assert (entry.value, entry.revision) == (b"\x00\xff", revision)
    assert await world.near.delete(root + "b")
    assert not await world.near.delete(root + "b")


async def test_compare_and_set_lets_one_writer_win(world, root):
    key = root + "policy"
    first = await world.near.put(key, b"epoch 1", expect_revision=0)
    with pytest.raises(Conflict):
        await world.far.put(key, b"me too", expect_revision=0)
    outcomes = await asyncio.gather(
        *(store.put(key, b"epoch 2", expect_revision=first) for store in (world.near, world.far) * 3),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict"] * 5 + ["int"]
    with pytest.raises(Conflict):
        await world.near.delete(key, expect_revision=first)
    assert await world.near.delete(key, expect_revision=(await world.near.get(key)).revision)
    assert await world.near.get(key) is None


async def test_a_key_with_a_time_to_live_expires_by_itself_and_watchers_see_it(world, root):
    async with Watching(world.near, root) as watching:
        await watching.until(ends_with(ChangeKind.SNAPSHOT))
        await world.far.put(root + "drain", b"why", ttl_s=1.0)
        with pytest.raises(Conflict):
            await world.far.put(root + "drain", b"", expect_revision=0, ttl_s=1.0)
        await watching.until(seen(root + "drain", b"why"))
        changes = await watching.until(ends_with(ChangeKind.DELETE))
    assert [change.kind for change in changes[1:]] == [ChangeKind.PUT, ChangeKind.DELETE]
    assert await world.near.get(root + "drain") is None


async def test_publications_outlive_their_time_idle_or_busy_and_go_when_withdrawn(world, root):
    async with Watching(world.far, root) as watching:
        idle = await world.near.publish(root + "idle", b"0", ttl_s=1.0)
        busy = await world.near.publish(root + "busy", b"0", ttl_s=1.0)
        assert (idle.trouble, busy.trouble) == (None, None)
        # For three lifetimes, with an update more often than any refresh is due.
        ends_at = asyncio.get_running_loop().time() + 3.0
        number = 0
        while asyncio.get_running_loop().time() < ends_at:
            number += 1
            assert await busy.update(b"%d" % number)
            await asyncio.sleep(0.05)
        assert ChangeKind.DELETE not in watching.kinds()
        assert (await world.far.get(root + "busy")).value == b"%d" % number
        await busy.withdraw()
        await busy.withdraw()
        changes = await watching.until(ends_with(ChangeKind.DELETE))
        assert changes[-1].key == root + "busy"
        assert await world.far.get(root + "idle") is not None
        with pytest.raises(StoreError, match="withdrawn"):
            await busy.update(b"x")


async def test_the_last_of_many_updates_at_once_is_what_stays(world, root):
    publication = await world.near.publish(root + "a", b"", ttl_s=5.0)
    assert all(await asyncio.gather(*(publication.update(b"%d" % number) for number in range(50))))
    assert (await world.far.get(root + "a")).value == b"49"


@pytest.mark.parametrize("wipe", [False, True], ids=["restarted", "wiped"])
async def test_publication_and_watch_survive(world, root, wipe):
    await world.far.put(root + "old", b"1")
    publication = await world.near.publish(root + "a", b"1", ttl_s=2.0)
    async with Watching(world.near, root) as watching:
        await watching.until(seen(root + "a", b"1"))
        await world.restart(wipe=wipe)
        changes = await watching.until(lambda changes: changes[-1].kind != ChangeKind.LOST and len(changes) > 2)
        assert [change.kind for change in changes].count(ChangeKind.LOST) == 1
        assert next(change for change in changes if change.kind == ChangeKind.LOST).why
        await watching.until(seen(root + "a", b"1"))
        await watching.until(seen(root + "old", None if wipe else b"1"))
        await eventually(lambda: publication.update(b"2"))
        await watching.until(seen(root + "a", b"2"))
        await eventually(lambda: asyncio.sleep(0, publication.trouble is None))


async def test_an_outage_is_reported_once_and_ends_in_a_snapshot_of_what_happened_meanwhile(world, root):
    await world.far.put(root + "gone", b"1")
    async with Watching(world.near, root) as watching:
        await watching.until(ends_with(ChangeKind.SNAPSHOT))
        await world.cut()
        await watching.until(ends_with(ChangeKind.LOST))
        with pytest.raises(StoreUnreachable):
            await world.near.get(root + "gone")
        with pytest.raises(StoreUnreachable):
            await world.near.put(root + "x", b"")
        await world.far.delete(root + "gone")
        await world.far.put(root + "new", b"2")
        await world.compact()
        await world.heal()
        await watching.until(ends_with(ChangeKind.SNAPSHOT))
        changes = await watching.until(seen(root + "gone", None))  # of several hubs the first may be back alone
        assert [entry.key for entry in changes[-1].entries] == [root + "new"]
        back = watching.kinds()[2:]
        assert watching.kinds() == [ChangeKind.SNAPSHOT, ChangeKind.LOST, *[ChangeKind.SNAPSHOT] * len(back)]
        assert len(back) <= (len(world.near.stores) if isinstance(world.near, Hubs) else 1)
        await world.far.put(root + "new", b"3")
        await watching.until(seen(root + "new", b"3"))


async def test_a_watch_that_is_behind_a_compaction_lists_again_without_an_outage(world, root):
    if isinstance(world.near, Hubs):
        pytest.skip("reads ahead of its reader, and so is not behind")
    await world.far.put(root + "a", b"1")
    async with contextlib.aclosing(world.near.watch(root)) as watch:
        assert (await anext(watch)).kind == ChangeKind.SNAPSHOT
        # The reader is slow: later changes are forgotten before it comes back.
        await world.far.put(root + "a", b"2")
        await world.far.put(root + "a", b"3")
        await world.compact()
        change = await asyncio.wait_for(anext(watch), PATIENCE_S)
        while change.kind == ChangeKind.PUT:  # one may be in time where the compaction keeps the newest revision
            change = await asyncio.wait_for(anext(watch), PATIENCE_S)
    assert change.kind == ChangeKind.SNAPSHOT
    assert [entry.value for entry in change.entries] == [b"3"]


async def test_watch_opened_during_an_outage_first_yields_lost(world, root):
    await world.cut()
    async with Watching(world.near, root) as watching:
        await watching.until(ends_with(ChangeKind.LOST))
        await world.far.put(root + "a", b"1")
        await world.heal()
        await watching.until(seen(root + "a", b"1"))
        assert watching.kinds()[:2] == [ChangeKind.LOST, ChangeKind.SNAPSHOT]


async def test_a_publication_comes_back_after_an_outage_longer_than_its_lease(world, root):
    publication = await world.near.publish(root + "a", b"1", ttl_s=1.0)
    async with Watching(world.far, root) as watching:
        await watching.until(seen(root + "a", b"1"))
        await world.cut()
        await watching.until(seen(root + "a", None))
        took_s = unhindered()
        async with asyncio.timeout(PATIENCE_S):
            assert not await publication.update(b"2")
        assert took_s() < 2 * TIMEOUT_S + 1
        assert publication.trouble
        await world.heal()
        await watching.until(seen(root + "a", b"2"))
    await eventually(lambda: asyncio.sleep(0, publication.trouble is None))


async def test_a_publication_may_begin_in_an_outage(world, root):
    await world.cut()
    publication = await world.near.publish(root + "a", b"1", ttl_s=2.0)
    assert publication.trouble
    assert await world.far.get(root + "a") is None
    await world.heal()
    async with Watching(world.far, root) as watching:
        await watching.until(seen(root + "a", b"1"))


async def test_withdrawing_in_an_outage_returns_and_the_lease_does_the_rest(world, root):
    publication = await world.near.publish(root + "a", b"1", ttl_s=1.0)
    await world.cut()
    took_s = unhindered()
    async with asyncio.timeout(PATIENCE_S):
        await publication.withdraw()
    assert took_s() < 3 * TIMEOUT_S
    assert (await world.far.get(root + "a")) is not None
    async with Watching(world.far, root) as watching:
        await watching.until(seen(root + "a", None))


async def test_close_ends_watches_and_takes_publications_away(world, root):
    await world.near.publish(root + "a", b"1", ttl_s=30.0)
    watching = Watching(world.near, root)
    async with watching:
        await watching.until(seen(root + "a", b"1"))
        await world.near.close()
        async with asyncio.timeout(PATIENCE_S):
            await watching.task
    assert await world.far.get(root + "a") is None
    assert ChangeKind.LOST not in watching.kinds()
    await world.near.close()


async def test_a_value_too_large_is_refused_before_it_is_sent(world, root):
    with pytest.raises(StoreError, match="at most"):
        await world.near.put(root + "a", bytes(2 * 1024 * 1024))
    with pytest.raises(StoreError, match="at most"):
        await world.near.publish(root + "a", bytes(2 * 1024 * 1024), ttl_s=1.0)


# Cases that only a real etcd covers.


@pytest_asyncio.fixture(loop_scope="module")
async def store(etcd):
    made = EtcdStore(EtcdSettings((etcd.endpoint,), timeout_s=TIMEOUT_S), Random(3))
    await made.open()
    yield made
    await made.close()


async def test_a_frozen_etcd_is_noticed_and_its_return_too(etcd, store, root):
    publication = await store.publish(root + "a", b"1", ttl_s=5.0)
    async with Watching(store, root) as watching:
        await watching.until(seen(root + "a", b"1"))
        etcd.pause()
        try:
            took_s = unhindered()
            await watching.until(ends_with(ChangeKind.LOST))
            assert took_s() < 3 * TIMEOUT_S
            with pytest.raises(StoreUnreachable):
                await store.get(root + "a")
        finally:
            etcd.resume()
        await watching.until(ends_with(ChangeKind.SNAPSHOT))
        await eventually(lambda: publication.update(b"2"))
        await watching.until(seen(root + "a", b"2"))
        assert watching.kinds().count(ChangeKind.LOST) == 1


async def test_a_quiet_prefix_is_not_taken_for_a_dead_etcd(store, root):
    async with Watching(store, root) as watching:
        await watching.until(ends_with(ChangeKind.SNAPSHOT))
        await asyncio.sleep(3 * TIMEOUT_S)  # nothing to wait for: nothing must happen
        assert watching.kinds() == [ChangeKind.SNAPSHOT]


async def test_a_frozen_endpoint_is_left_for_the_next(etcd, wire_to, root):
    async with wire_to(etcd) as first, wire_to(etcd) as second:
        store = EtcdStore(EtcdSettings((first.endpoint, second.endpoint), timeout_s=TIMEOUT_S), Random(4))
        await store.open()
        try:
            publication = await store.publish(root + "a", b"1", ttl_s=2.0)
            async with Watching(store, root) as watching:
                await watching.until(seen(root + "a", b"1"))
                assert (first.accepted, second.accepted) == (1, 0)
                first.freeze()
                await watching.until(lambda changes: ChangeKind.LOST in [change.kind for change in changes])
                await eventually(lambda: publication.update(b"2"))
                await watching.until(seen(root + "a", b"2"))
                assert second.accepted >= 1
        finally:
            await store.close()


async def test_a_stranded_connection_is_replaced_though_there_is_one_endpoint(etcd, wire_to, root):
    async with wire_to(etcd) as wire, contextlib.AsyncExitStack() as stack:
        store, bystander = (EtcdStore(EtcdSettings((wire.endpoint,), timeout_s=TIMEOUT_S), Random(5)) for _ in "ab")
        for each in (store, bystander):
            await each.open()
            stack.push_async_callback(each.close)
        async with Watching(store, root) as watching:
            await watching.until(ends_with(ChangeKind.SNAPSHOT))
            wire.strand()
            await watching.until(ends_with(ChangeKind.LOST))
            await watching.until(ends_with(ChangeKind.SNAPSHOT))
            await store.put(root + "a", b"1")
            await watching.until(seen(root + "a", b"1"))
            # A new connection, not the bystander's, which is just as dead without noticing it.
            assert wire.accepted == 3
