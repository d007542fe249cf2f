"""Drills' records in etcd: the lock, the emergency stop, orders to stop, documents, schedules and the history.

Invariants: one run holds the lock at a time, under a lease that ends with its runner; while the emergency stop is
engaged no run begins; a run that cannot read the emergency stop for a while ends, unless it stops etcd itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from farhop.store.contract import DRILL_PREFIX, Conflict, StoreError
from farhop_drill.windows import Planned

if TYPE_CHECKING:
    from farhop.store.contract import KeyValue, Store

LOCK = f"{DRILL_PREFIX}lock"
EMERGENCY_STOP = f"{DRILL_PREFIX}lever"  # the key's name is a contract: older releases read it
STOP = f"{DRILL_PREFIX}stop/"
DOCUMENTS = f"{DRILL_PREFIX}document/"
SCHEDULES = f"{DRILL_PREFIX}schedule/"
HISTORY = f"{DRILL_PREFIX}history/"
LEASE_S = 6.0
STOP_S = 3600.0  # an order to stop is forgotten after that
HISTORY_MAX = 200
T = TypeVar("T")


class DrillLock(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of the lock: the run, its drill, who runs it, since when (epoch seconds)."""

    run: str
    drill: str
    author: str
    since_s: float

    def __str__(self) -> str:
        return f"{self.run} by {self.author}"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order to stop."""

    author: str
    why: str
    at_s: float

    def __str__(self) -> str:
        return f"by {self.author}: {self.why}"


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over, as history keeps it."""

    run: str
    drill: str
    title: str
    author: str
    began_s: float
    took_s: float
    verdict: str
    why: str
    measures: dict[str, float]
    hypotheses: list[dict[str, Any]] = []
    values: dict[str, str] = {}


class Records:
    """All of them, on an open store. Every method raises StoreError if etcd does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- the lock

    async def holder(self) -> DrillLock | None:
        """The present holder of the lock."""
        return _read(await self._store.get(LOCK), DrillLock)

    async def lock(self, held: DrillLock) -> bool:
        """Take the lock if nobody has it. It ends by itself after LEASE_S unless renewed."""
        try:
            await self._store.put(LOCK, msgspec.json.encode(held), expect_revision=0, ttl_s=LEASE_S)
        except Conflict:
            return False
        return True

    async def renew(self, held: DrillLock) -> bool:
        """Keep it; False: somebody else has it. A lock that was lost with etcd is taken again."""
        there = await self._store.get(LOCK)
        other = _read(there, DrillLock)
        if other is not None and other.run != held.run:
            return False
        try:
            revision = there.revision if there is not None else 0
            await self._store.put(LOCK, msgspec.json.encode(held), expect_revision=revision, ttl_s=LEASE_S)
        except Conflict:
            return False
        return True

    async def release(self, held: DrillLock) -> None:
        """Give it back."""
        other = await self.holder()
        if other is not None and other.run == held.run:
            await self._store.delete(LOCK)

    # -- the emergency stop, and orders to stop one run

    async def emergency_stop(self) -> Order | None:
        """The order that engaged the emergency stop; None if it is not engaged."""
        return _read(await self._store.get(EMERGENCY_STOP), Order)

    async def engage(self, order: Order) -> None:
        """Engage the emergency stop: stop all runs, and let none begin."""
        await self._store.put(EMERGENCY_STOP, msgspec.json.encode(order))

    async def disengage(self) -> bool:
        """Disengage the emergency stop, so that drills may begin again. Returns whether it was engaged."""
        return await self._store.delete(EMERGENCY_STOP)

    async def stop(self, run: str, order: Order) -> None:
        """Stop this run."""
        await self._store.put(f"{STOP}{run}", msgspec.json.encode(order), ttl_s=STOP_S)

    async def stop_reason(self, run: str) -> str:
        """Why a run must end now; "" if it need not."""
        engaged = await self.emergency_stop()
        if engaged is not None:
            return f"the emergency stop was engaged {engaged}"
        order = _read(await self._store.get(f"{STOP}{run}"), Order)
        return f"stopped {order}" if order is not None else ""

    # -- documents and schedules

    async def documents(self) -> dict[str, bytes]:
        """Drills kept in etcd, by name."""
        return {one.key.removeprefix(DOCUMENTS): one.value for one in await self._store.list(DOCUMENTS)}

    async def keep(self, name: str, document: bytes) -> None:
        """Keep a drill in etcd."""
        await self._store.put(f"{DOCUMENTS}{name}", document)

    async def schedules(self) -> list[Planned]:
        """What is planned."""
        found = (_read(one, Planned) for one in await self._store.list(SCHEDULES))
        return [one for one in found if one is not None]

    async def plan(self, planned: Planned) -> None:
        """Put a drill on the schedule, or change that."""
        await self._store.put(f"{SCHEDULES}{planned.drill}", msgspec.json.encode(planned))

    async def unplan(self, drill: str) -> bool:
        """Take it off; whether it was on it."""
        return await self._store.delete(f"{SCHEDULES}{drill}")

    # -- history

    async def history(self) -> list[Past]:
        """Runs that are over, the newest first."""
        found = (_read(one, Past) for one in await self._store.list(HISTORY))
        return sorted((one for one in found if one is not None), key=lambda one: -one.began_s)

    async def remember(self, past: Past) -> None:
        """Keep a run's result, and of all the newest HISTORY_MAX."""
        await self._store.put(f"{HISTORY}{past.run}", msgspec.json.encode(past))
        for old in (await self.history())[HISTORY_MAX:]:
            await self._store.delete(f"{HISTORY}{old.run}")


def _read(entry: KeyValue | None, kind: type[T]) -> T | None:
    """The value there; None for nothing, and for a value that this build cannot have written."""
    try:
        return msgspec.json.decode(entry.value, type=kind) if entry is not None else None
    except msgspec.DecodeError:
        return None


__all__ = ["LEASE_S", "DrillLock", "Order", "Past", "Records", "StoreError"]
