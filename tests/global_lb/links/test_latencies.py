"""Measured latencies of an entry's clients: within the law, bounded, once a connection, published under a lease."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from farhop.store.contract import latency_key
from farhop.store.documents.latencies import decode
from farhop_lab.memory_store import MemoryStore
from global_lb.links.latencies import SAMPLES_PER_S_MAX, ClientLatencies, LatencyTable
from tests.entry_dns.conftest import world
from topology.law import Law
from topology.model import Residency, Rule


class Entry:
    def __init__(self, **config: Any) -> None:
        self.now, self.law = 100.0, Law(world())
        given = ClientLatencies(samples_min=2, **config)
        self.table = LatencyTable(given, "tokyo", "g1", lambda: self.law, lambda: self.now)

    def came(self, host: str = "8.8.8.8", tenant: str = "anywhere", narrow: Any = (), key: str = "", **known: bytes):
        found = [(host, 12_300)]
        exchange = SimpleNamespace(
            client_rtt=lambda: found.pop() if found else None,
            head=SimpleNamespace(known={name.replace("_", "-").encode(): value for name, value in known.items()}),
        )
        caller = SimpleNamespace(tenant=tenant, narrow=narrow, key=key)
        for _ in range(3):  # requests of one connection
            self.table.arrived(exchange, caller, "m")  # type: ignore[arg-type]

    def published(self) -> dict[str, Any]:
        return self.table.report().networks


def test_a_network_is_reported_after_some_connections_of_it() -> None:
    entry = Entry()
    entry.came("8.8.8.8")
    assert entry.published() == {}
    entry.came("8.8.8.200")
    assert {network: one.samples for network, one in entry.published().items()} == {"8.8.8.0/24": 2}


@pytest.mark.parametrize(
    "who",
    [
        {"tenant": "eu-only"},
        {"tenant": "nobody"},
        {"narrow": (("eu",),)},
        {"key": "not-one-of-its"},
        {"host": "10.0.0.1"},
        {"x_forwarded_for": b"9.9.9.9"},
        {"forwarded": b"for=9.9.9.9"},
    ],
)
def test_a_client_hidden_by_law_or_a_proxy_is_not_measured(who: Any) -> None:
    entry = Entry()
    for _ in range(4):
        entry.came(**who)
    assert entry.published() == {}


def test_a_law_that_takes_away_has_all_forgotten() -> None:
    entry = Entry()
    for _ in range(4):
        entry.came()
    before, tenants = entry.law, dict(world().tenants)
    entry.law = Law(replace(world(), epoch=before.epoch + 1))
    assert entry.published(), "nobody lost anything"
    stays = tenants["anywhere"].residency
    assert isinstance(stays, Residency)
    tenants["anywhere"] = replace(tenants["anywhere"], residency=replace(stays, logging=Rule(("eu",))))
    entry.law = Law(replace(world(), epoch=before.epoch + 2, tenants=tenants))
    assert entry.published() == {}
    entry.came()
    entry.came()
    assert entry.published() == {}


def test_a_map_with_another_region_has_all_forgotten() -> None:
    """What is told would be read there, too, and nobody asked whether it may."""
    entry, whole = Entry(), world()
    fewer = {name: one for name, one in whole.regions.items() if name != "tokyo"}
    entry.law = Law(replace(whole, regions=fewer, entries={}))
    for _ in range(4):
        entry.came()
    assert entry.published()
    entry.law = Law(replace(whole, epoch=whole.epoch + 1))
    assert entry.published() == {}


def test_only_so_many_are_measured_in_a_second() -> None:
    entry = Entry()
    for n in range(3 * SAMPLES_PER_S_MAX):
        entry.came(f"8.8.{n % 50}.1")
    assert sum(one.samples for one in entry.published().values()) <= SAMPLES_PER_S_MAX
    entry.now += 1.0
    entry.came("9.9.9.9")
    entry.came("9.9.9.9")
    assert "9.9.9.0/24" in entry.published()


async def test_latencies_are_published_under_a_lease_and_deleted_with_it() -> None:
    entry, store = Entry(every_s=0.001), MemoryStore(Random(1))
    await store.open()
    publishing = asyncio.create_task(entry.table.publish(store))
    key = latency_key("tokyo", "g1")

    async def stands() -> dict[str, Any] | None:
        found = await store.get(key)
        return None if found is None else decode(found.value).networks

    entry.came()
    entry.came()
    async with asyncio.timeout(60.0):
        while not await stands():
            await asyncio.sleep(0.001)
    publishing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await publishing
    await store.close()
