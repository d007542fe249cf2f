"""Overrides that end by themselves, and are nobody else's; faults by a world's control port."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from drill_documents import made

from farhop.store.contract import ENTRY_DRAIN_PREFIX, REFUSE_PREFIX, STEER_PREFIX, override_key
from farhop.store.documents import overrides
from farhop_drill.injectors import FaultInjector, InjectError, TrafficInjector
from farhop_drill.records import LEASE_S
from farhop_lab.memory_store import MemoryCluster, MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NOW = [0.0]
VIRGINIA = override_key("virginia")


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    NOW[0] = 0.0
    made_ = MemoryStore(Random(1), MemoryCluster(lambda: NOW[0]))
    await made_.open()
    yield made_
    await made_.close()


def injector(store: MemoryStore) -> TrafficInjector:
    async def raise_epoch() -> int:
        return 7

    return TrafficInjector(
        store, "me", "drill r1", {"virginia": "virginia"}, lambda: datetime(2026, 1, 1, tzinfo=UTC), raise_epoch
    )


async def kept(store: MemoryStore) -> float | None:
    entry = await store.get(VIRGINIA)
    return overrides.decode_drain(entry.value).keep_share if entry is not None else None


async def test_a_later_step_takes_the_place_of_an_earlier_one_and_all_of_it_is_taken_back(store: MemoryStore) -> None:
    drill, made_ = made(), injector(store)
    await made_.inject(drill.steps[0])
    assert await kept(store) == 0.75
    await made_.inject(drill.steps[1])
    assert await kept(store) == 0.0
    await made_.restore()
    assert await kept(store) is None
    await made_.restore()


async def test_an_injection_ends_by_itself_unless_renewed(store: MemoryStore) -> None:
    made_ = injector(store)
    await made_.inject(made().steps[1])
    NOW[0] = LEASE_S - 1
    await made_.renew()
    NOW[0] = 2 * LEASE_S - 2
    assert await kept(store) == 0.0
    NOW[0] = 2 * LEASE_S
    assert await kept(store) is None  # its runner is dead


async def test_an_operators_override_is_never_overwritten_nor_removed(store: MemoryStore) -> None:
    await store.put(VIRGINIA, b"an operator's")
    made_ = injector(store)
    with pytest.raises(InjectError, match="an operator's override"):
        await made_.inject(made().steps[0])
    await made_.restore()
    entry = await store.get(VIRGINIA)
    assert entry is not None
    assert entry.value == b"an operator's"


@pytest.mark.parametrize("after", ["renewing", "restoring", "a later step"])
async def test_an_override_that_an_operator_sets_in_the_middle_of_a_drill_stays(store: MemoryStore, after: str) -> None:
    drill, made_ = made(), injector(store)
    await made_.inject(drill.steps[0])
    entry = await store.get(VIRGINIA)
    assert entry is not None
    mine = overrides.decode_drain(entry.value)
    theirs = overrides.encode(msgspec.structs.replace(mine, author="ann", why="it burns", for_s=3600.0))
    await store.put(VIRGINIA, theirs, ttl_s=3600.0)
    if after != "restoring":
        with pytest.raises(InjectError, match="an operator's override"):
            await (made_.renew() if after == "renewing" else made_.inject(drill.steps[1]))
    await made_.restore()
    entry = await store.get(VIRGINIA)
    assert entry is not None
    assert entry.value == theirs


async def test_what_ended_by_its_lease_is_injected_again_by_a_late_renewal(store: MemoryStore) -> None:
    made_ = injector(store)
    await made_.inject(made().steps[1])
    NOW[0] = LEASE_S + 1
    assert await kept(store) is None
    await made_.renew()
    assert await kept(store) == 0.0
    await made_.restore()
    assert await kept(store) is None


async def test_every_kind_of_override_is_one_that_balancers_read(store: MemoryStore) -> None:
    injections = [
        {"do": "bias", "region": "virginia", "ms": 50},
        {"do": "pin", "region": "virginia", "tenant": "anywhere"},
        {"do": "drain-entry", "entry": "virginia"},
        {"do": "refuse", "region": "virginia", "share": 0.5, "model": "meta/llama"},
        {"do": "refuse", "region": "virginia"},
        {"do": "law-epoch"},
    ]
    made_ = injector(store)
    await made_.inject(made(steps=[{"name": "all", "soak_s": 1, "inject": injections}]).steps[0])
    for entry in await store.list(STEER_PREFIX):
        assert overrides.decode_routing(entry.value).key == entry.key
    (drain,) = await store.list(ENTRY_DRAIN_PREFIX)
    assert overrides.decode_entry_drain(drain.value).for_s == LEASE_S
    refusals = [overrides.decode_refusal(entry.value) for entry in await store.list(REFUSE_PREFIX)]
    assert [(one.model, one.share, one.for_s) for one in refusals] == [("", 1.0, LEASE_S), ("meta/llama", 0.5, LEASE_S)]
    assert made_.law_epoch == 7
    await made_.restore()
    assert [*await store.list(STEER_PREFIX), *await store.list(REFUSE_PREFIX)] == []


async def test_a_store_that_is_gone_is_reported(store: MemoryStore) -> None:
    made_ = injector(store)
    await made_.inject(made().steps[0])
    store.outage()
    with pytest.raises(InjectError):
        await made_.restore()
    store.restore()
    await made_.restore()  # it did not forget
    assert await kept(store) is None


async def test_a_control_port_that_is_gone_is_reported_and_what_may_stand_is_taken_back_later() -> None:
    made_ = FaultInjector("http://127.0.0.1:9", "token", "r1", 10.0)
    steps = made(kind="fault", steps=[{"name": "x", "soak_s": 1, "inject": [{"do": "stop-etcd"}]}]).steps
    with pytest.raises(InjectError, match="control port"):
        await made_.inject(steps[0])
    with pytest.raises(InjectError, match="control port"):
        await made_.restore()
    await made_.close()
