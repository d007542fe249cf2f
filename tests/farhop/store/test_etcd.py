"""What the etcd store has of its own: pages, key ranges, and watch answers that etcd seldom gives.

What it shares with the store in memory, and what only a real etcd can do: tests/contracts/test_store_contract.py.
"""

import asyncio
import contextlib
from random import Random

import aetcd.rpc
import pytest
from grpc.aio import EOF

from farhop.store import etcd as module
from farhop.store.contract import ChangeKind, StoreError
from farhop.store.etcd import EtcdStore, _GapError, _range, _WatchStream
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.etcd import EmbeddedEtcd


@pytest.fixture
async def store():
    async with EmbeddedEtcd() as etcd:
        made = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
        await made.open()
        yield made
        await made.close()


async def test_a_long_list_comes_whole_page_by_page_and_bounded(store, monkeypatch):
    monkeypatch.setattr(module, "PAGE", 3)
    for number in range(10):
        await store.put(f"/list/{number}", b"%d" % number)
    assert [entry.value for entry in await store.list("/list/")] == [b"%d" % number for number in range(10)]
    assert len(await store.list("")) == 10
    monkeypatch.setattr(module, "KEYS_LIMIT", 6)
    with pytest.raises(StoreError, match="more than 6 keys"):
        await store.list("/list/")


async def test_a_list_is_of_one_revision_though_writes_go_on(store, monkeypatch):
    monkeypatch.setattr(module, "PAGE", 1)
    for name in "ab":
        await store.put(f"/list/{name}", b"old")
    call = store.link.call

    async def interfering(stub, method, request):
        reply = await call(stub, method, request)
        if method == "Range":
            await call("kvstub", "Put", aetcd.rpc.PutRequest(key=b"/list/b", value=b"new"))
        return reply

    monkeypatch.setattr(store.link, "call", interfering)
    assert [entry.value for entry in await store.list("/list/")] == [b"old", b"old"]


async def test_a_lease_refused_with_its_write_does_not_stay(store):
    await store.put("/a", b"1")
    with pytest.raises(StoreError):
        await store.put("/a", b"2", expect_revision=0, ttl_s=60)
    reply = await store.link.call("leasestub", "LeaseLeases", aetcd.rpc.LeaseLeasesRequest())
    assert list(reply.leases) == []


async def test_revoking_a_lease_that_is_gone_is_no_error(store):
    lease = await store.grant(60)
    await store.revoke(lease)
    await store.revoke(lease)
    assert not await store.keep_alive(lease)
    assert not await store.put_leased("/a", b"", lease)


async def test_a_member_with_less_history_than_was_read_is_a_gap(store, monkeypatch):
    """A wipe between list and watch: the new etcd would stay silent until its revisions have caught up."""
    await store.put("/a", b"1")
    listed = store.listing
    ahead = [1000]

    async def from_a_longer_history(prefix):
        revision, entries = await listed(prefix)
        return revision + (ahead.pop() if ahead else 0), entries

    monkeypatch.setattr(store, "listing", from_a_longer_history)
    async with asyncio.timeout(60.0), contextlib.aclosing(store.watch("/")) as watch:
        assert [(await anext(watch)).kind for _ in range(2)] == [ChangeKind.SNAPSHOT, ChangeKind.SNAPSHOT]
        await store.put("/a", b"2")
        assert (await anext(watch)).value == b"2"


async def test_many_changes_at_once_leave_turns_to_others(store):
    count = 5 * module.TURN_EVENTS
    for n in range(count):
        await store.put(f"/a/{n:04}", b"1")
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(60.0), contextlib.aclosing(store.watch("/a/")) as watch:
        await anext(watch)
        all_of_it = aetcd.rpc.DeleteRangeRequest(key=b"/a/", range_end=b"/a0")
        await store.link.call("kvstub", "DeleteRange", all_of_it)
        await anext(watch)
        running = asyncio.create_task(others())
        for _ in range(count - 1):
            assert (await anext(watch)).kind is ChangeKind.DELETE
        running.cancel()
    assert turns >= 4  # one behind each but the last of five parts


@pytest.mark.parametrize(
    ("prefix", "start", "end"),
    [("", b"\0", b"\0"), ("/a/", b"/a/", b"/a0"), ("a", b"a", b"b"), ("a\u07ff", b"a\xdf\xbf", b"a\xdf\xc0")],
)
def test_the_range_of_a_prefix(prefix, start, end):
    assert _range(prefix) == (start, end)


class Call:
    """A Watch call that answers as scripted, then says nothing."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.written = []
        self.cancelled = False

    async def read(self):
        if self.answers:
            return self.answers.pop(0)
        return await asyncio.Event().wait()

    async def write(self, request):
        self.written.append(request)

    async def details(self):
        return "scripted end"

    def cancel(self):
        self.cancelled = True


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (aetcd.rpc.WatchResponse(canceled=True, compact_revision=7), _GapError, "compacted up to 7"),
        (aetcd.rpc.WatchResponse(canceled=True, cancel_reason="etcdserver: no leader"), StoreError, "no leader"),
        (aetcd.rpc.WatchResponse(canceled=True), StoreError, "no reason given"),
        (EOF, StoreError, "scripted end"),
    ],
)
async def test_answers_that_end_a_watch(answer, error, words):
    with pytest.raises(error, match=words):
        await _WatchStream(Call(answer), 1.0).read()


async def test_silence_is_asked_about_once_and_then_given_up():
    call = Call(aetcd.rpc.WatchResponse(created=True))
    stream = _WatchStream(call, 0.05, 0.05)
    await stream.begin("/a/", 5)
    assert (await stream.read()).created
    with pytest.raises(TimeoutError, match="silent"):
        await stream.read()
    created, asked = call.written
    assert (created.create_request.key, created.create_request.start_revision) == (b"/a/", 5)
    assert asked.HasField("progress_request")
    stream._reading.cancel()
    await stream.end()
    assert call.cancelled
