"""The store in memory: for worlds without etcd and for virtual time, under the same contract as the real one.

A MemoryCluster holds the keys; each MemoryStore is one process's connection to it, which can be cut (`outage`).
Invariants: revisions only grow, until a wipe begins a new history; no lease outlives its time on the cluster's clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from farhop.store.contract import Change, ChangeKind, Conflict, KeyValue, Store, StoreUnreachable, check_value
from farhop.store.publication import LeasedPublication

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from random import Random

HISTORY_LIMIT = 10_000  # changes kept for watchers that lag; those further behind list anew


class _Lease(msgspec.Struct):
    ttl_s: float
    ends_at: float
    keys: set[str]


class MemoryCluster:
    """Keys, leases and their history. `clock` gives monotonic seconds; None: the running loop's, with timers.

    With another clock nothing expires between calls: call `expire` after moving it.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._entries: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_of: dict[str, int] = {}
        self._last_lease = 0
        self._timer: asyncio.TimerHandle | None = None
        self._history: deque[Change] = deque()
        self._watchers: set[asyncio.Event] = set()
        self.revision = 1
        self.compacted = 1  # changes up to this revision are forgotten
        self.epoch = 0  # counts wipes

    def get(self, key: str) -> KeyValue | None:
        """The key's entry."""
        self.expire()
        return self._entries.get(key)

    def entries(self, prefix: str) -> tuple[KeyValue, ...]:
        """Entries under the prefix, by key."""
        self.expire()
        return tuple(self._entries[key] for key in sorted(self._entries) if key.startswith(prefix))

    def put(self, key: str, value: bytes, lease: int = 0, expect_revision: int | None = None) -> int:
        """Write under a lease that exists (0: none). Raises Conflict."""
        self._expect(key, expect_revision)
        self._detach(key)
        if lease:
            self._leases[lease].keys.add(key)
            self._lease_of[key] = lease
        self.revision += 1
        self._entries[key] = KeyValue(key, value, self.revision)
        self._record(Change(ChangeKind.PUT, self.revision, key, value))
        return self.revision

    def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """Remove; whether it was there. Raises Conflict."""
        self._expect(key, expect_revision)
        if key not in self._entries:
            return False
        self.revision += 1
        self._remove(key)
        return True

    def grant(self, ttl_s: float) -> int:
        """A new lease's id."""
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, self._now() + ttl_s, set())
        self._set_timer()
        return self._last_lease

    def holds(self, lease: int) -> bool:
        """Whether the lease still runs."""
        self.expire()
        return lease in self._leases

    def keep_alive(self, lease: int) -> bool:
        """Restart the lease's time; False if it is gone."""
        if not self.holds(lease):
            return False
        self._leases[lease].ends_at = self._now() + self._leases[lease].ttl_s
        return True

    def revoke(self, lease: int) -> None:
        """End a lease and its keys, all in one revision."""
        ended = self._leases.pop(lease, None)
        if ended is not None and ended.keys:
            self.revision += 1
            for key in sorted(ended.keys):
                self._remove(key)

    def expire(self) -> None:
        """End the leases whose time is over."""
        if not self._leases:
            return
        now = self._now()
        for lease in [number for number, held in self._leases.items() if held.ends_at <= now]:
            self.revoke(lease)

    def wipe(self) -> None:
        """Lose everything, as an etcd that comes back with an empty disk. Revisions start anew."""
        self._entries.clear()
        self._leases.clear()
        self._lease_of.clear()
        self._history.clear()
        self.revision = self.compacted = 1
        self.epoch += 1
        self.wake()

    def compact(self) -> None:
        """Forget the history up to now: watchers that have not read it list anew."""
        self._history.clear()
        self.compacted = self.revision

    def changes_after(self, revision: int, prefix: str) -> list[Change]:
        """Changes later than a revision not yet compacted, in order."""
        self.expire()
        return [change for change in self._history if change.revision > revision and change.key.startswith(prefix)]

    def join(self) -> asyncio.Event:
        """Returns an event that is set at every change, outage and restoration, until `leave`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def leave(self, event: asyncio.Event) -> None:
        """End `join`."""
        self._watchers.discard(event)

    def wake(self) -> None:
        """Wake every watcher."""
        for event in self._watchers:
            event.set()

    def _now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def _expect(self, key: str, revision: int | None) -> None:
        self.expire()
        entry = self._entries.get(key)
        if revision is not None and revision != (entry.revision if entry is not None else 0):
            raise Conflict(key, revision)

    def _remove(self, key: str) -> None:
        self._detach(key)
        del self._entries[key]
        self._record(Change(ChangeKind.DELETE, self.revision, key))

    def _detach(self, key: str) -> None:
        lease = self._leases.get(self._lease_of.pop(key, 0))
        if lease is not None:
            lease.keys.discard(key)

    def _record(self, change: Change) -> None:
        self._history.append(change)
        while len(self._history) > HISTORY_LIMIT:
            self.compacted = self._history.popleft().revision
        self.wake()

    def _set_timer(self) -> None:
        if self._clock is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            first = min(held.ends_at for held in self._leases.values())
            self._timer = asyncio.get_running_loop().call_at(first, self._on_timer)

    def _on_timer(self) -> None:
        self.expire()
        self._set_timer()


class MemoryStore(Store):
    """A Store on a MemoryCluster (its own, if none is given). `rng` jitters its back-offs."""

    def __init__(self, rng: Random, cluster: MemoryCluster | None = None) -> None:
        self.cluster = cluster if cluster is not None else MemoryCluster()
        self._rng = rng
        self._publications: set[LeasedPublication] = set()
        self._open = False
        self._cut = False
        self._outages = 0

    async def open(self) -> None:
        """See the contract."""
        self._reach()
        self._open = True

    async def close(self) -> None:
        """See the contract."""
        for publication in tuple(self._publications):
            await publication.withdraw()
        self._open = False
        self.cluster.wake()

    def outage(self) -> None:
        """Cut this connection: calls fail at once, watches get LOST, leases expire unless it is restored."""
        self._cut = True
        self._outages += 1
        self.cluster.wake()

    def restore(self) -> None:
        """End the outage."""
        self._cut = False
        self.cluster.wake()

    def wipe(self) -> None:
        """See MemoryCluster.wipe."""
        self.cluster.wipe()

    def compact(self) -> None:
        """See MemoryCluster.compact."""
        self.cluster.compact()

    async def publish(self, key: str, value: bytes, ttl_s: float) -> LeasedPublication:
        """See the contract."""
        publication = LeasedPublication(self, key, value, ttl_s, self._rng, self._publications.discard)
        self._publications.add(publication)
        await publication.start()
        return publication

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """See the contract."""
        cluster = self.cluster
        wake = cluster.join()
        try:
            epoch, outages, revision = -1, self._outages, 0
            lost = False
            while self._open:
                wake.clear()
                if (self._cut or outages != self._outages) and not lost:
                    lost = True
                    yield Change(ChangeKind.LOST, why=_CUT)
                elif self._cut:
                    await wake.wait()
                elif lost or epoch != cluster.epoch or revision < cluster.compacted:
                    entries = cluster.entries(prefix)
                    lost, epoch, outages, revision = False, cluster.epoch, self._outages, cluster.revision
                    yield Change(ChangeKind.SNAPSHOT, revision, entries=entries)
                elif changes := cluster.changes_after(revision, prefix):
                    revision = changes[-1].revision
                    for change in changes:
                        yield change
                else:
                    revision = cluster.revision
                    await wake.wait()
        finally:
            cluster.leave(wake)

    async def get(self, key: str) -> KeyValue | None:
        """See the contract."""
        self._reach()
        return self.cluster.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """See the contract."""
        self._reach()
        return self.cluster.entries(prefix)

    async def put(self, key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """See the contract."""
        check_value(key, value)
        self._reach()
        lease = 0 if ttl_s is None else self.cluster.grant(ttl_s)
        try:
            return self.cluster.put(key, value, lease, expect_revision)
        except Conflict:
            self.cluster.revoke(lease)
            raise

    async def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """See the contract."""
        self._reach()
        return self.cluster.delete(key, expect_revision)

    async def grant(self, ttl_s: float) -> int:
        """See `Leases`."""
        self._reach()
        return self.cluster.grant(ttl_s)

    async def keep_alive(self, lease: int) -> bool:
        """See `Leases`."""
        self._reach()
        return self.cluster.keep_alive(lease)

    async def put_leased(self, key: str, value: bytes, lease: int) -> bool:
        """See `Leases`."""
        self._reach()
        if not self.cluster.holds(lease):
            return False
        self.cluster.put(key, value, lease)
        return True

    async def revoke(self, lease: int) -> None:
        """See `Leases`."""
        self._reach()
        self.cluster.revoke(lease)

    def _reach(self) -> None:
        if self._cut:
            raise StoreUnreachable(_CUT)


_CUT = "the store in memory: cut off by an outage; restore() ends it"
