"""The store over etcd. Its contract is in `farhop.store.contract`.

Watches use etcd's Watch stream directly: aetcd's watcher ends at the first error, drops watches silently when the
stream breaks, and cannot distinguish a quiet etcd from a dead one. Invariants: after any gap the watch lists all keys
again, so that no change is missed; a connection that answers nothing for `timeout_s` is abandoned, even if its socket
is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any

import aetcd.rpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs forget it

from farhop.balance.backoff import Backoff
from farhop.store.contract import (
    KEYS_LIMIT,
    Change,
    ChangeKind,
    Conflict,
    KeyValue,
    Store,
    StoreError,
    StoreUnreachable,
    check_value,
)
from farhop.store.etcd_link import REQUIRE_LEADER, EtcdLink
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.publication import LeasedPublication

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from random import Random

PAGE = 1000  # keys in one answer
QUIET_S = 15.0  # after which a silent watch is checked
TURN_EVENTS = 64  # of one message that are passed on in a turn of the event loop
_LEASE_GONE = "requested lease not found"


class EtcdStore(Store):
    """A Store on an etcd cluster. `rng` jitters its back-offs."""

    def __init__(self, settings: EtcdSettings, rng: Random) -> None:
        self.link = EtcdLink(settings)
        self._settings = settings
        self._rng = rng
        self._publications: set[LeasedPublication] = set()
        self._closed = asyncio.Event()

    async def open(self) -> None:
        """See the contract."""
        self._closed.clear()
        try:
            await self.link.open()
        except BaseException:
            await self.link.close()
            raise

    async def close(self) -> None:
        """See the contract."""
        self._closed.set()
        await asyncio.gather(*(publication.withdraw() for publication in tuple(self._publications)))
        await self.link.close()

    async def publish(self, key: str, value: bytes, ttl_s: float) -> LeasedPublication:
        """See the contract."""
        publication = LeasedPublication(self, key, value, ttl_s, self._rng, self._publications.discard)
        self._publications.add(publication)
        await publication.start()
        return publication

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """See the contract."""
        backoff = Backoff(self._rng)
        lost = False
        while not self._closed.is_set():
            try:
                async with contextlib.aclosing(self._follow(prefix)) as changes:
                    async for change in changes:
                        lost = False
                        backoff.reset()
                        yield change
            except _GapError:
                pass  # contact is not lost, only the sequence: the next snapshot gives readers everything
            except StoreError as error:
                if not lost and not self._closed.is_set():
                    lost = True
                    yield Change(ChangeKind.LOST, why=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await self._closed.wait()

    async def get(self, key: str) -> KeyValue | None:
        """See the contract."""
        reply = await self.link.call("kvstub", "Range", aetcd.rpc.RangeRequest(key=key.encode()))
        return _entry(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """See the contract."""
        return (await self.listing(prefix))[1]

    async def put(self, key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """See the contract."""
        check_value(key, value)
        lease = 0 if ttl_s is None else await self.grant(ttl_s)
        put = aetcd.rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        try:
            if expect_revision is None:
                return int((await self.link.call("kvstub", "Put", put)).header.revision)
            reply = await self._compare(key, expect_revision, aetcd.rpc.RequestOp(request_put=put))
        except Conflict:
            if lease:
                await self.revoke(lease)
            raise
        return int(reply.header.revision)

    async def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """See the contract."""
        request = aetcd.rpc.DeleteRangeRequest(key=key.encode())
        if expect_revision is None:
            return bool((await self.link.call("kvstub", "DeleteRange", request)).deleted)
        await self._compare(key, expect_revision, aetcd.rpc.RequestOp(request_delete_range=request))
        return expect_revision > 0

    async def grant(self, ttl_s: float) -> int:
        """A lease of whole seconds, at least what etcd allows. See `Leases`."""
        request = aetcd.rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        return int((await self.link.call("leasestub", "LeaseGrant", request)).ID)

    async def keep_alive(self, lease: int) -> bool:
        """See `Leases`."""
        request = aetcd.rpc.LeaseKeepAliveRequest(ID=lease)
        alive = False
        async with self.link.session() as client:
            metadata = (*(client.metadata or ()), *REQUIRE_LEADER)
            replies = client.leasestub.LeaseKeepAlive(
                iter((request,)), timeout=self._settings.timeout_s, metadata=metadata
            )
            async for reply in replies:
                alive = reply.TTL > 0  # 0: no such lease
        return alive

    async def put_leased(self, key: str, value: bytes, lease: int) -> bool:
        """See `Leases`."""
        try:
            await self.link.call("kvstub", "Put", aetcd.rpc.PutRequest(key=key.encode(), value=value, lease=lease))
        except StoreError as error:
            if _LEASE_GONE in str(error):
                return False
            raise
        return True

    async def revoke(self, lease: int) -> None:
        """See `Leases`. A lease that is gone already is what was wanted."""
        try:
            await self.link.call("leasestub", "LeaseRevoke", aetcd.rpc.LeaseRevokeRequest(ID=lease))
        except StoreError as error:
            if _LEASE_GONE not in str(error):
                raise

    async def _compare(self, key: str, expect_revision: int, operation: Any) -> Any:
        compare = aetcd.rpc.Compare(
            result=aetcd.rpc.Compare.EQUAL,
            target=aetcd.rpc.Compare.MOD,
            key=key.encode(),
            mod_revision=expect_revision,
        )
        reply = await self.link.call("kvstub", "Txn", aetcd.rpc.TxnRequest(compare=[compare], success=[operation]))
        if not reply.succeeded:
            raise Conflict(key, expect_revision)
        return reply

    async def listing(self, prefix: str) -> tuple[int, tuple[KeyValue, ...]]:
        """All entries under the prefix and the revision they are of, page by page at that one revision."""
        start, end = _range(prefix)
        entries: list[KeyValue] = []
        revision = 0
        while True:
            request = aetcd.rpc.RangeRequest(key=start, range_end=end, limit=PAGE, revision=revision)
            reply = await self.link.call("kvstub", "Range", request)
            revision = revision or int(reply.header.revision)
            entries.extend(_entry(pair) for pair in reply.kvs)
            if not reply.more:
                return revision, tuple(entries)
            if len(entries) >= KEYS_LIMIT:
                raise StoreError(f"more than {KEYS_LIMIT} keys under {prefix}: delete what does not belong there")
            start = reply.kvs[-1].key + b"\0"

    async def _follow(self, prefix: str) -> AsyncGenerator[Change, None]:
        """A snapshot and then the changes after it, until a StoreError or a _GapError ends them."""
        revision, entries = await self.listing(prefix)
        yield Change(ChangeKind.SNAPSHOT, revision, entries=entries)
        async with self.link.session() as client:
            self.link.watched(client)
            metadata = (*(client.metadata or ()), *REQUIRE_LEADER)
            stream = _WatchStream(client.watchstub.Watch(metadata=metadata), self._settings.timeout_s)
            try:
                await stream.begin(prefix, revision + 1)
                while True:
                    reply = await stream.read()
                    client.answered_at = asyncio.get_running_loop().time()
                    # A member wiped since has lower revisions, and would keep silent until they have caught up.
                    if reply.header.revision < revision:
                        raise _GapError(f"{client.endpoint} is at revision {reply.header.revision}, below {revision}")
                    revision = int(reply.header.revision) if reply.events else revision
                    for n, event in enumerate(reply.events, 1):
                        yield change_of(event)
                        if not n % TURN_EVENTS:
                            await asyncio.sleep(0)  # all keys of a prefix may have been deleted at once
            finally:
                await stream.end()


class _GapError(StoreError):
    """Changes were missed, by compaction or because the data was replaced."""


class _WatchStream:
    """One Watch call. What is silent for `quiet_s` is asked, and given up if it does not answer within `silence_s`.

    That etcd lives is proven more often, and for all watches at once, by the link: here it is only whether this watch
    is forgotten there.
    """

    def __init__(self, call: Any, silence_s: float, quiet_s: float = QUIET_S) -> None:
        self._call = call
        self._silence_s, self._quiet_s = silence_s, quiet_s
        self._reading: asyncio.Task[Any] | None = None

    async def begin(self, prefix: str, revision: int) -> None:
        """Ask for everything under `prefix` from `revision` on."""
        start, end = _range(prefix)
        create = aetcd.rpc.WatchCreateRequest(key=start, range_end=end, start_revision=revision)
        await self._write(aetcd.rpc.WatchRequest(create_request=create))

    async def read(self) -> Any:
        """The next answer. Raises _GapError, StoreError, AioRpcError or, for silence, TimeoutError."""
        # The task outlives a silence: to cancel a read of gRPC's is to cancel the whole call.
        self._reading = self._reading or asyncio.create_task(self._call.read(), name="etcd watch read")
        if not await self._answers(self._quiet_s):
            # Nothing is normal where nothing changes. A live etcd answers this at once.
            await self._write(aetcd.rpc.WatchRequest(progress_request=aetcd.rpc.WatchProgressRequest()))
            if not await self._answers(self._silence_s):
                raise TimeoutError(f"silent for {self._silence_s:g} s")
        reading, self._reading = self._reading, None
        reply = reading.result()
        if reply is EOF:
            raise StoreUnreachable(f"etcd ended the watch: {await self._call.details() or 'no reason given'}")
        if reply.compact_revision:
            raise _GapError(f"compacted up to {reply.compact_revision}")
        if reply.canceled:
            raise StoreError(f"etcd cancelled the watch: {reply.cancel_reason or 'no reason given'}")
        return reply

    async def end(self) -> None:
        """Drop the call, and what is still being read from it."""
        self._call.cancel()
        if self._reading is not None:
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()  # why it ended no longer matters

    async def _answers(self, within_s: float) -> bool:
        assert self._reading is not None
        done, _ = await asyncio.wait({self._reading}, timeout=within_s)
        return bool(done)

    async def _write(self, request: Any) -> None:
        async with asyncio.timeout(self._silence_s):
            await self._call.write(request)


def _entry(pair: Any) -> KeyValue:
    return KeyValue(pair.key.decode(errors="replace"), pair.value, int(pair.mod_revision))


def change_of(event: Any) -> Change:
    """The change that an event of etcd's watch tells of."""
    kind = ChangeKind.DELETE if event.type == aetcd.rpc.Event.EventType.DELETE else ChangeKind.PUT
    return Change(kind, int(event.kv.mod_revision), event.kv.key.decode(errors="replace"), event.kv.value)


def _range(prefix: str) -> tuple[bytes, bytes]:
    """The first key with the prefix, and the first beyond all of them; (0, 0) means all keys.

    aetcd's own end keeps the bytes behind the one it raises, and so also covers keys beyond the prefix.
    """
    # UTF-8 never holds 0xFF, so the last byte can always be raised.
    raw = prefix.encode()
    return (raw, raw[:-1] + bytes((raw[-1] + 1,))) if raw else (b"\0", b"\0")
