"""A store with a copy of its last known keys on this process's disk, so that it can be opened while etcd is silent.

A watcher first gets the copy as a snapshot, then the loss of contact, then etcd's own snapshot once etcd answers, as if
the process had run all along. Invariants: only keys from etcd are kept; a start without etcd is possible only if a law
was read before, or none is known to have been set, since an outage must not widen a law; a document that differs from
the one written is refused, and logged. Never a second source of truth: etcd's first snapshot replaces everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.backoff import Backoff
from farhop.store.contract import (
    LAW_KEY,
    REGION_PREFIX,
    ROOT,
    Change,
    ChangeKind,
    KeyValue,
    Store,
    StoreError,
    StoreUnreachable,
)
from farhop.store.state import StateError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from random import Random

    from farhop.store.contract import Publication
    from farhop.store.state import StateDir

SAVE_S = 1.0  # changes within this time go to the disk together
LAZY_S = 30.0  # for values that change all the time, if only the set of keys matters: keys that come or go do not wait
LAZY = (REGION_PREFIX,)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    revision: int
    entries: tuple[KeyValue, ...]


_encode, decode_snapshot = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Snapshot).decode


class DiskCachedStore(Store):
    """`inner`, the hub called `hub`, with its watched keys kept in `state`. `rng` jitters its back-off.

    `silent`: why it was opened from disk, until it is open in truth. `trouble`: why something cannot be kept or read.
    `warn` is called with what an operator should know.
    """

    def __init__(self, inner: Store, hub: str, state: StateDir, rng: Random, warn: Callable[[str], None]) -> None:
        self.inner, self._hub, self._state, self._rng, self._warn = inner, hub, state, rng, warn
        self.silent: str | None = None
        self.trouble: str | None = None
        self.written_at: float | None = None  # of the law that a start without etcd rests on
        self._known: dict[str, tuple[int, dict[str, KeyValue]]] = {}  # by prefix watched
        self.saved: dict[str, tuple[float, bytes]] = {}  # by prefix, when and what
        self._dirty: dict[str, bool] = {}  # prefixes to save; whether at once
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None  # the last that was begun

    # -- life

    async def open(self) -> None:
        """See the contract. If no cluster answers and enough was kept, it opens from disk, and retries until one
        does."""
        try:
            await self.inner.open()
        except StoreUnreachable as error:
            try:
                law = await asyncio.to_thread(self._state.load, self.name(LAW_KEY))
            except StateError as broken:
                raise StoreUnreachable(f"{error}; nor can what was kept stand in for it: {broken}") from None
            if law is None:
                path = self._state.path(self.name(LAW_KEY))
                raise StoreUnreachable(f"{error}; nor was anything kept yet in {path.parent}") from None
            self.silent, self.written_at = str(error), law.written_at
            self._warn(f"hub {self._hub}: started from what was kept on disk, as etcd is silent: {error}")
            self._start(self._reopen(), f"open hub {self._hub}")
        self._start(self._save(), f"keep hub {self._hub}")

    def _start(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reopen(self) -> None:
        backoff = Backoff(self._rng)
        while self.silent is not None:
            await asyncio.sleep(backoff.next_s())
            try:
                await self.inner.open()
            except StoreError as error:
                self.silent = str(error)
                continue  # its watches and publications say so, each where it is shown
            self.silent = None
            self._warn(f"hub {self._hub}: etcd speaks again")

    async def close(self) -> None:
        """See the contract. First writes pending data to disk."""
        ending = tuple(self._tasks)
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        if self._writing is not None:
            with contextlib.suppress(StateError):
                await self._writing
        for prefix in tuple(self._dirty):
            await self._keep(prefix)
        await self.inner.close()

    # -- watching

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """See the contract."""
        if self.silent is not None:
            snapshot = await self._recall(prefix)
            if snapshot is not None:
                yield Change(ChangeKind.SNAPSHOT, snapshot.revision, entries=snapshot.entries, from_disk=True)
        async with contextlib.aclosing(self.inner.watch(prefix)) as changes:
            async for change in changes:
                self._note(prefix, change)
                yield change

    async def _recall(self, prefix: str) -> _Snapshot | None:
        """The snapshot on disk; None if there is none."""
        try:
            saved = await asyncio.to_thread(self._state.load, self.name(prefix))
            return decode_snapshot(saved.document) if saved is not None else None
        except (StateError, msgspec.DecodeError) as error:
            self._troubled(str(error))
            return None

    def _note(self, prefix: str, change: Change) -> None:
        _, known = self._known.get(prefix, (0, {}))
        at_once = True
        if change.kind is ChangeKind.LOST:
            return
        if change.kind is ChangeKind.PUT:
            at_once = prefix not in LAZY or change.key not in known
        for key in change.ended(known):
            del known[key]
        known.update((entry.key, entry) for entry in change.written)
        self._known[prefix] = change.revision, known
        self._dirty[prefix] = at_once or self._dirty.get(prefix, False)
        self._woken.set()

    # -- keeping

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAZY_S if self._dirty else None):
                    await self._woken.wait()
            await asyncio.sleep(SAVE_S)
            self._woken.clear()
            for prefix, at_once in tuple(self._dirty.items()):
                if at_once or loop.time() - self.saved.get(prefix, (0.0, b""))[0] >= LAZY_S:
                    await self._keep(prefix)

    async def _keep(self, prefix: str) -> None:
        del self._dirty[prefix]
        revision, known = self._known[prefix]
        document = _encode(_Snapshot(revision, tuple(known[key] for key in sorted(known))))
        before = self.saved.get(prefix, (0.0, b""))[1]
        if document == before:
            return
        self._writing = asyncio.create_task(asyncio.to_thread(self._state.save, self.name(prefix), document))
        try:
            await asyncio.shield(self._writing)  # where this is cancelled meanwhile, `close` waits for it
        except StateError as error:
            self._troubled(str(error))
            self.saved[prefix] = asyncio.get_running_loop().time(), before
            self._dirty.setdefault(prefix, False)  # once more, after LAZY_S
            return
        self.saved[prefix] = asyncio.get_running_loop().time(), document
        self.trouble = None

    def _troubled(self, why: str) -> None:
        self.trouble = why
        self._warn(f"hub {self._hub}: {why}")

    def name(self, prefix: str) -> str:
        """The document's file name. Our prefixes differ in their letters, so no two have the same."""
        return _UNSAFE.sub(".", f"{self._hub}.{prefix.removeprefix(ROOT)}").strip(".")

    def status(self) -> dict[str, Any]:
        """For people: `from_disk` until etcd has spoken, `written_at` (epoch seconds) of what that rests on."""
        return {
            "hub": self._hub,
            "from_disk": self.silent is not None,
            "why": self.silent,
            "written_at": self.written_at if self.silent is not None else None,
            "trouble": self.trouble,
        }

    # -- as it is

    async def publish(self, key: str, value: bytes, ttl_s: float) -> Publication:
        """See the contract."""
        return await self.inner.publish(key, value, ttl_s)

    async def get(self, key: str) -> KeyValue | None:
        """See the contract."""
        return await self.inner.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """See the contract."""
        return await self.inner.list(prefix)

    async def put(self, key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """See the contract."""
        return await self.inner.put(key, value, expect_revision, ttl_s)

    async def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """See the contract."""
        return await self.inner.delete(key, expect_revision)


def disk_cache_status(stores: Iterable[Store]) -> list[dict[str, Any]]:
    """The status of those stores that have a disk cache."""
    return [store.status() for store in stores if isinstance(store, DiskCachedStore)]


def notice(statuses: Iterable[dict[str, Any]]) -> str:
    """What a readiness check should report of it, too; "" if there is nothing."""
    silent = [f"hub {one['hub']}: {one['why']}" for one in statuses if one["from_disk"]]
    return f"started from what was kept on disk, as etcd is silent: {'; '.join(silent)}" if silent else ""
