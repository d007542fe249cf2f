"""The writes and deletions under a prefix since etcd was last compacted. Read-only.

etcd keeps every revision of a key until it is compacted (`--auto-compaction-retention`), so the history reaches back as
far as the cluster is configured to remember, and no further.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aetcd.rpc
import grpc.aio
import msgspec
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs forget it

from farhop.store.contract import Change, StoreError, StoreUnreachable
from farhop.store.etcd import change_of
from farhop.store.etcd_link import REQUIRE_LEADER, EtcdLink

if TYPE_CHECKING:
    from farhop.store.etcd_settings import EtcdSettings

CHANGES_LIMIT = 10_000
PROGRESS_S = 0.1  # between two questions whether the watch has caught up
# etcd before 3.5.8 says so of a watch that it has not served yet; it serves the old ones every 0.1 s.
SERVED_WITHIN_S = 0.5
HISTORY_S_MAX = 15.0  # all of it
_MOD, _DESCENDING = aetcd.rpc.RangeRequest.SortTarget.MOD, aetcd.rpc.RangeRequest.SortOrder.DESCEND


class History(msgspec.Struct, frozen=True):
    """Puts and deletions, oldest first. `since`: the revision from which on etcd remembers."""

    since: int
    changes: tuple[Change, ...]


async def history(settings: EtcdSettings, prefix: str) -> History:
    """All changes under `prefix` that etcd remembers. Raises StoreError, also for more than CHANGES_LIMIT of them."""
    link = EtcdLink(settings)
    await link.open()
    try:
        start, end = prefix.encode(), prefix.encode()[:-1] + bytes((prefix.encode()[-1] + 1,))
        request = aetcd.rpc.RangeRequest(key=start, range_end=end, limit=1, sort_target=_MOD, sort_order=_DESCENDING)
        now = await link.call("kvstub", "Range", request)
        last = max((int(pair.mod_revision) for pair in now.kvs), default=0)
        since = 1
        while True:
            async with asyncio.timeout(HISTORY_S_MAX):
                found = await _since(link, start, end, since, last)
            if isinstance(found, tuple):
                return History(since, found)
            since = found  # compacted up to there; and perhaps further by the time it is asked again
    except TimeoutError:
        raise StoreUnreachable(f"etcd did not tell its history within {HISTORY_S_MAX:g} s") from None
    finally:
        await link.close()


async def _since(link: EtcdLink, start: bytes, end: bytes, since: int, last: int) -> tuple[Change, ...] | int:
    """The changes from revision `since` to `last`; if etcd has compacted `since`, the first revision available."""
    changes: list[Change] = []
    loop = asyncio.get_running_loop()
    served_at = loop.time() + SERVED_WITHIN_S
    async with link.session() as client:
        call = client.watchstub.Watch(metadata=(*(client.metadata or ()), *REQUIRE_LEADER))
        asking = asyncio.create_task(_ask(call, start, end, since), name="ask for etcd's history")
        try:
            while True:
                reply = await call.read()
                if reply is EOF:
                    raise StoreUnreachable("etcd ended the watch of its history")
                if reply.compact_revision:
                    return int(reply.compact_revision)
                if reply.canceled:
                    raise StoreError(f"etcd refused its history: {reply.cancel_reason or 'no reason given'}")
                changes.extend(map(change_of, reply.events))
                if len(changes) > CHANGES_LIMIT:
                    raise StoreError(f"more than {CHANGES_LIMIT} changes since revision {since}: compact etcd")
                progress = not reply.created and not reply.events  # all there is has been sent
                seen = last <= since or (bool(changes) and changes[-1].revision >= last)
                if progress and seen and loop.time() >= served_at:
                    return tuple(changes)
        finally:
            asking.cancel()
            call.cancel()


async def _ask(call: grpc.aio.StreamStreamCall[Any, Any], start: bytes, end: bytes, since: int) -> None:
    """Begin the watch, then ask how far it is until somebody has enough: etcd answers once it has caught up."""
    create = aetcd.rpc.WatchCreateRequest(key=start, range_end=end, start_revision=since)
    await call.write(aetcd.rpc.WatchRequest(create_request=create))
    while True:
        await call.write(aetcd.rpc.WatchRequest(progress_request=aetcd.rpc.WatchProgressRequest()))
        await asyncio.sleep(PROGRESS_S)
