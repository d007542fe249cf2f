"""What was seen, and must not be seen again: a law set, etcd wiped, one balancer restarted, and laws of several epochs
side by side until somebody set the law anew. On real hubs in memory, real disks, and over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from inprocess import HOP_KEY, Engine, both, chat, regional_config, send, tenant, topology, until

from farhop.service.law import lawbook
from farhop.service.law.lawbook import LawBook
from farhop.store.contract import LAW_KEY
from farhop.store.envelope import Signer
from farhop.store.sealed import inner
from farhop.store.state import StateDir
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from regional_lb.app.main import RegionalBalancer
from topology import law_document
from topology.law import Law

WORLD = topology()
OPS = Signer(
    "ops",
    Ed25519PrivateKey.from_private_bytes(bytes(32)).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
)
SIGNING = {"keys": {"ops": {"public": OPS.public, "may": ["law"]}}}


def law(epoch: int, *tenants: dict[str, Any]) -> bytes:
    fields = {"tenants": list(tenants or (tenant("anywhere"),))}
    return law_document.encode(fields, epoch, "ann", "drill", "2026-05-01T12:00:00Z")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setattr(lawbook, "MEND_S", 0.02)


class LawFollower:
    """The book of one balancer, with its disk and its own connections to the hubs."""

    def __init__(self, name: str, clusters: dict[str, MemoryCluster], folder: Path) -> None:
        self.stores = {hub: MemoryStore(Random(1), cluster) for hub, cluster in clusters.items()}
        state = StateDir(folder, "fleet", name)
        self.book = LawBook(self.stores, Law(WORLD), lambda _: None, lambda _: None, state=state, rng=Random(name))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LawFollower]:
        self.book.remember()
        for store in self.stores.values():
            await store.open()
        task = asyncio.create_task(self.book.follow())
        try:
            await self.book.begun()
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            for store in self.stores.values():
                await store.close()


async def test_balancers_agree_on_the_law_after_etcd_is_wiped_and_one_restarts(tmp_path: Path) -> None:
    clusters = {"a": MemoryCluster(), "b": MemoryCluster()}

    def started(name: str) -> Any:
        return LawFollower(name, clusters, tmp_path).running()

    def one_law(epoch: int, *those: LawFollower) -> Callable[[], bool]:
        def holds() -> bool:
            held = [cluster.get(LAW_KEY) for cluster in clusters.values()]
            even = all(entry is not None and json.loads(entry.value)["epoch"] == epoch for entry in held)
            books = [one.book for one in those]
            return even and all(book.law.epoch == epoch and not book.trouble for book in books)

        return holds

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(started("first"))
        async with started("second") as second:
            clusters["a"].put(LAW_KEY, law(5))
            clusters["b"].put(LAW_KEY, law(5))
            await until(one_law(5, first, second))
        for cluster in clusters.values():
            cluster.wipe()
        again = await stack.enter_async_context(started("second"))
        assert again.book.law.epoch == 5  # before any law was set
        await until(one_law(5, first, again))
        newcomer = await stack.enter_async_context(started("third"))  # that has never been here
        assert newcomer.book.law.epoch == 5
        # A hub restored from a backup, and one that was away while a law was set.
        first.stores["b"].outage()
        again.stores["b"].outage()
        newcomer.stores["b"].outage()
        clusters["b"].put(LAW_KEY, law(4))
        clusters["a"].put(LAW_KEY, law(6))
        await until(lambda: first.book.law.epoch == again.book.law.epoch == newcomer.book.law.epoch == 6)
        for one in (first, again, newcomer):
            one.stores["b"].restore()
        await until(one_law(6, first, again, newcomer))


async def test_restart_keeps_the_law_while_all_of_etcd_is_gone(tmp_path: Path) -> None:
    clusters = {"a": MemoryCluster()}
    clusters["a"].put(LAW_KEY, law(5))
    async with LawFollower("one", clusters, tmp_path).running() as one:
        await until(lambda: one.book.law.epoch == 5)
    again = LawFollower("one", clusters, tmp_path)
    again.book.remember()
    assert again.book.law.epoch == 5


# -- over gRPC, where a hub tells nothing


async def test_a_signed_law_reaches_a_balancer_without_etcd_over_grpc_in_either_direction(engine: Engine) -> None:
    signed = {"signing": SIGNING}
    async with both(engine, WORLD, regional=signed, global_=signed) as up:
        above, below = inner(up.global_.store), inner(up.regional.store)
        assert isinstance(above, MemoryStore)
        assert isinstance(below, MemoryStore)
        above.outage()
        above.cluster.put(LAW_KEY, OPS.seal(LAW_KEY, law(5, tenant("newcomer"))))
        await until(lambda: up.regional.flow.law.epoch == 5)
        await until(lambda: up.global_.flow.law.epoch == 5)
        assert (await send(up.entry, chat(key="sk-farhop-newcomer"))).status == 200
        assert up.global_.laws.status()["source"] == "virginia/r1"
        above.restore()
        below.outage()
        above.cluster.put(LAW_KEY, OPS.seal(LAW_KEY, law(6)))
        await until(lambda: up.global_.flow.law.epoch == 6)
        await until(lambda: up.regional.flow.law.epoch == 6)
        below.restore()
        above.cluster.put(LAW_KEY, law(50))  # without a signature
        await until(lambda: any("not signed" in one for one in up.global_.laws.trouble))
        assert (up.global_.flow.law.epoch, up.regional.flow.law.epoch) == (6, 6)
        await up.at_rest()


async def test_unproven_later_law_is_only_reported(engine: Engine) -> None:
    async with both(engine, WORLD) as up:
        above = inner(up.global_.store)
        assert isinstance(above, MemoryStore)
        above.outage()
        above.cluster.put(LAW_KEY, law(5))
        await until(lambda: up.regional.flow.law.epoch == 5)
        await until(
            lambda: "virginia/r1 uses a law of epoch 5, which has not arrived here yet" in up.global_.laws.trouble
        )
        assert (await send(up.entry, chat())).status == 200  # both laws allow it
        assert up.global_.flow.law.epoch == 1
        above.restore()
        await until(lambda: not up.global_.laws.trouble and up.global_.flow.law.epoch == 5)
        await up.at_rest()


async def test_balancers_of_a_region_exchange_the_later_law(engine: Engine) -> None:
    cluster = MemoryCluster()
    stores = [MemoryStore(Random(n), cluster) for n in range(2)]
    first = RegionalBalancer(regional_config(engine, signing=SIGNING), WORLD, Random(1), stores[0])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(first.close)
        await first.open()
        peers = {"addresses": [first.mesh.peers.control_address]}
        made = regional_config(engine, instance="r2", signing=SIGNING, peers=peers)
        second = RegionalBalancer(made, WORLD, Random(2), stores[1])
        stack.push_async_callback(second.close)
        await second.open()
        await until(lambda: second.mesh.peers.up == 1)
        stores[1].outage()
        cluster.put(LAW_KEY, OPS.seal(LAW_KEY, law(5)))
        await until(lambda: first.flow.law.epoch == 5)
        await until(lambda: second.flow.law.epoch == 5)
        assert second.laws.status()["source"] == "peer r1"
