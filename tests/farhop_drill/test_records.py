"""The lock, the emergency stop and the history, in a store."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from farhop_drill.records import HISTORY, HISTORY_MAX, LEASE_S, LOCK, DrillLock, Order, Past, Records
from farhop_drill.windows import Planned
from farhop_lab.memory_store import MemoryCluster, MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ME = DrillLock(run="r1", drill="d", author="me", since_s=1.0)
OTHER = DrillLock(run="r2", drill="d", author="other", since_s=1.0)
ORDER = Order(author="ops", why="incident", at_s=2.0)
NOW = [0.0]


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    NOW[0] = 0.0
    made = MemoryStore(Random(1), MemoryCluster(lambda: NOW[0]))
    await made.open()
    yield made
    await made.close()


async def test_one_run_holds_the_lock_and_it_ends_with_its_runner(store: MemoryStore) -> None:
    records = Records(store)
    assert await records.lock(ME)
    assert not await records.lock(OTHER)
    NOW[0] = LEASE_S - 1
    assert await records.renew(ME)
    NOW[0] = 2 * LEASE_S - 2
    assert not await records.lock(OTHER)
    NOW[0] = 2 * LEASE_S
    assert await records.holder() is None
    assert await records.lock(OTHER)
    assert not await records.renew(ME)  # another run holds it
    await records.release(ME)
    assert await records.holder() == OTHER


async def test_a_lock_lost_with_etcd_is_taken_again(store: MemoryStore) -> None:
    records = Records(store)
    assert await records.lock(ME)
    await store.delete(LOCK)
    assert await records.renew(ME)
    assert await records.holder() == ME


async def test_a_run_is_stopped_by_name_or_by_the_lever(store: MemoryStore) -> None:
    records = Records(store)
    assert await records.stop_reason("r1") == ""
    await records.stop("r2", ORDER)
    assert await records.stop_reason("r1") == ""
    assert await records.stop_reason("r2") == "stopped by ops: incident"
    await records.engage(ORDER)
    assert await records.stop_reason("r1") == "the emergency stop was engaged by ops: incident"
    assert await records.disengage()
    assert not await records.disengage()


async def test_documents_and_schedules_are_kept_and_nonsense_is_nothing(store: MemoryStore) -> None:
    records = Records(store)
    planned = Planned(drill="d", windows=("mon 09:00-10:00",), every_s=86_400.0, since_s=1.0)
    await records.keep("d", b"drill: d")
    await records.plan(planned)
    assert await records.documents() == {"d": b"drill: d"}
    assert await records.schedules() == [planned]
    assert await records.unplan("d")
    await store.put(LOCK, b"nonsense")
    assert await records.holder() is None


async def test_history_is_bounded_and_the_newest_comes_first(store: MemoryStore) -> None:
    records = Records(store)
    for n in range(HISTORY_MAX + 3):
        past = Past(run=f"r{n}", drill="d", title="t", author="me", began_s=float(n), took_s=1.0, verdict="PASS",
                    why="", measures={})  # fmt: skip
        if n < HISTORY_MAX:  # as `remember` would leave it
            await store.put(f"{HISTORY}{past.run}", msgspec.json.encode(past))
        else:
            await records.remember(past)
    found = await records.history()
    assert len(found) == HISTORY_MAX
    assert found[0].run == f"r{HISTORY_MAX + 2}"
