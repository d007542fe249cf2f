"""The links to regional balancers on real sockets, and what becomes of a region's life when paths to it break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
from inprocess import HOP_KEY, Engine, both, chat, send, topology, until
from regions import NOWHERE, WORLD, Clock, Region, a_report, put, watching

from farhop.balance.health.region import LivenessConfig
from farhop.relay.upstream import pool
from farhop.store.contract import report_key
from farhop_lab.memory_store import MemoryStore
from global_lb.links import watch
from global_lb.links.link import BalancerLink
from global_lb.routing.flow import FlowConfig, GlobalFlow
from tests.conftest import unhindered
from topology.law import Law


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.stop()


# -- by gRPC


async def test_link_is_notified_of_the_first_request_after_an_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its region is asked less often."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setattr(pool, "RESTED_S", -1.0)
    engine, told = Engine(), list[str]()
    async with engine.running(), both(engine, topology()) as up:
        monkeypatch.setattr(BalancerLink, "used", lambda link: told.append(link.address))
        assert (await send(up.entry, chat())).status == 200
        assert told[-1] == up.global_.watcher.links["virginia", "r1"].address


async def test_link_delivers_reports_and_its_state(region: Region) -> None:
    async with watching() as (_, store, found):
        await put(store, a_report(control_address=region.address))
        await until(lambda: ("tokyo", True) in found.channels)
        assert set(region.pinged) == {"virginia/g1"}
        await region.say(a_report(control_address=region.address, seq=5, draining=True))
        await until(lambda: found.view.regions["tokyo"].instances[0].draining)
        await region.stop()
        await until(lambda: found.channels[-1] == ("tokyo", False))
        await region.start()
        await until(lambda: found.channels[-1] == ("tokyo", True))
        await region.say(a_report(control_address=region.address, seq=6))
        await until(lambda: not found.view.regions["tokyo"].instances[0].draining)
    await until(lambda: region.readers == 0)


async def test_a_link_follows_a_changed_address(region: Region) -> None:
    other = Region()
    await other.start()
    async with watching() as (watcher, store, found):
        await put(store, a_report(control_address=region.address))
        await until(lambda: region.readers == 1)
        await region.say(a_report(control_address=other.address, seq=2))  # the link reports that this ends
        await until(lambda: other.readers == 1)
        await until(lambda: region.readers == 0)
        assert len(watcher.links) == 1
        await until(lambda: len(watcher.retired) == 0)
        await other.say(a_report(control_address=other.address, seq=3, draining=True))
        await until(lambda: found.view.regions["tokyo"].instances[0].draining)
    await other.stop()


async def test_a_region_is_up_while_one_of_its_instances_is(region: Region) -> None:
    async with watching() as (_, store, found):
        await put(store, a_report(instance="a", control_address=region.address))
        await until(lambda: found.channels == [("tokyo", True)])
        await put(store, a_report(instance="b", control_address=NOWHERE))
        await until(lambda: len(found.channels) >= 2)
        assert set(found.channels) == {("tokyo", True)}


async def test_forgetting_an_instance_closes_its_channel(region: Region) -> None:
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, found):
        await put(store, a_report(control_address=region.address))
        await until(lambda: found.channels == [("tokyo", True)])
        await store.delete(report_key("tokyo", "r1"))
        await until(lambda: not watcher.listed)
        clock.at += watch.FORGET_S + 1.0
        watcher.forget()
        assert found.channels[-1] == ("tokyo", False)
        assert found.view.regions == {}
        await until(lambda: region.readers == 0)


class Hole:
    """A path to an address that can be made to swallow what goes over it; connections made later are good again."""

    def __init__(self, address: str) -> None:
        self._host, self._port = address.split(":")
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._good = asyncio.Event()
        self._good.set()
        self.address = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, up_writer]
        good = self._good
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pump(source, sink, good)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, good: asyncio.Event) -> None:
        while data := await source.read(65536):
            if good.is_set():
                sink.write(data)

    def swallow(self) -> None:
        """From now on nothing passes over the connections there are."""
        self._good.clear()
        self._good = asyncio.Event()
        self._good.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_path_that_swallows_everything_is_left_for_a_new_one(region: Region) -> None:
    hole = Hole(region.address)
    await hole.open()
    async with watching() as (_, store, found):
        await put(store, a_report(control_address=hole.address))
        await until(lambda: found.channels == [("tokyo", True)])
        hole.swallow()
        await until(lambda: found.channels[-1] == ("tokyo", False))
        took_s = unhindered()
        await until(lambda: found.channels[-1] == ("tokyo", True))
        assert took_s() < 8.0
        await region.say(a_report(control_address=hole.address, seq=9, draining=True))
        await until(lambda: found.view.regions["tokyo"].instances[0].draining)
    await hole.close()


# -- liveness in practice


class Life:
    """A global machine fed by the watcher, and a region that reports by both paths every 50 ms, unless told not to."""

    def __init__(self, store: MemoryStore, region: Region, flow: GlobalFlow) -> None:
        self.store, self.region, self.flow = store, region, flow
        self.by_store = self.by_link = True
        self.seq = 1

    async def speak(self) -> None:
        while True:
            self.seq += 1
            report = a_report(control_address=self.region.address, seq=self.seq)
            if self.by_store:
                await put(self.store, report)
            if self.by_link:
                await self.region.say(report)
            await asyncio.sleep(0.05)

    def state(self) -> str:
        liveness = self.flow.regions.liveness.get("tokyo")
        return liveness.read(asyncio.get_running_loop().time()).state if liveness is not None else "unheard"

    async def stays(self, state: str, for_s: float) -> None:
        """But for what a pause of this process makes of it: then nobody has said or heard anything."""
        clock = asyncio.get_running_loop().time
        until_at = calm_at = seen_at = clock()
        until_at += for_s
        looks = 0
        while (now := clock()) < until_at or not looks:
            calm_at = now + 0.2 if now - seen_at > 0.1 else calm_at
            if now >= calm_at:
                looks += 1
                assert self.state() == state
            seen_at = now
            await asyncio.sleep(0.02)


@pytest.fixture
async def life(region: Region) -> AsyncIterator[Life]:
    liveness = LivenessConfig(report_age_s=0.5)
    flow = GlobalFlow(FlowConfig("virginia", liveness=liveness), Law(WORLD), Random(1), lambda _tenant: 0.0)
    clock = asyncio.get_running_loop().time
    store = MemoryStore(Random(3))
    async with watching(store, react=lambda event: flow.handle(event, clock())):
        made = Life(store, region, flow)
        speaking = asyncio.create_task(made.speak())
        await until(lambda: made.state() == "up")
        yield made
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


async def test_links_continue_without_etcd(life: Life) -> None:
    life.store.outage()
    life.by_store = False
    await life.stays("up", 1.2)


async def test_region_is_suspect_without_grpc(life: Life) -> None:
    await life.region.stop()
    await until(lambda: life.state() == "suspect")
    await life.stays("suspect", 1.0)


async def test_region_is_down_without_grpc_and_etcd_within_the_reports_age(life: Life) -> None:
    life.store.outage()
    life.by_store = False
    await life.region.stop()
    await until(lambda: life.state() == "down")
    liveness = life.flow.regions.liveness["tokyo"]
    assert liveness.read(liveness.report_at + 0.499).state == "suspect"
    assert liveness.read(liveness.report_at + 0.5).state == "down"
    life.store.restore()
    life.by_store = True
    await life.region.start()
    await until(lambda: life.state() == "up")
