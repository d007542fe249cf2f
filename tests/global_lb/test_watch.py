from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import msgspec
import pytest
from farhop_wire import region_pb2, region_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import HOP, HOP_KEY, topology, until

from farhop.balance.health import LivenessConfig
from farhop.balance.machine import Address, Event
from farhop.store.contract import report_key
from farhop.store.memory import MemoryStore
from farhop.store.report import ModelReport, RegionReport, encode, to_wire
from global_lb import watch
from global_lb.config import GlobalConfig
from global_lb.flow import FlowConfig, GlobalFlow
from global_lb.view import ChannelChanged, RegionHeard, View, ViewSwapped
from global_lb.watch import Watcher
from topology.law import Law

WORLD = topology()
OURS = ("watch ", "forget ", "ping ", "read ", "close ")
NOWHERE = "127.0.0.1:9"  # the discard port: nobody listens there
MODEL = ModelReport(
    model="m", replicas_ready=1, replicas_total=1, slots_total=8, slots_free=8, kv_tokens_total=100, kv_tokens_free=100,
    wait_ms=7.0, prefill_ms_per_token=0.1, tpot_ms=20.0, bytes_per_token=4.0,
)  # fmt: skip


def told(region: str = "tokyo", instance: str = "r1", **fields: Any) -> RegionReport:
    return RegionReport(
        region=region, instance=instance,
        **{"incarnation": 1, "seq": 1, "clock_ms": 5000.0, "tier_address": "10.0.0.1:80", "control_address": NOWHERE,
           "models": (MODEL,), **fields},
    )  # fmt: skip


class Heard:
    """What the flow would be told."""

    def __init__(self) -> None:
        self.view = View({})
        self.views = 0
        self.heard: list[str] = []
        self.channels: list[tuple[str, bool]] = []
        self.refused: list[str] = []

    def react(self, event: Event) -> None:
        if isinstance(event, ViewSwapped):
            self.view = event.view
            self.views += 1
        elif isinstance(event, RegionHeard):
            self.heard.append(event.region)
        elif isinstance(event, ChannelChanged):
            self.channels.append((event.region, event.up))

    def names(self, region: str = "tokyo") -> list[str]:
        return [i.name for i in self.view.regions[region].instances] if region in self.view.regions else []


class Clock:
    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


@pytest.fixture(autouse=True)
def _hop_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)


def config(**more: Any) -> GlobalConfig:
    return GlobalConfig.model_validate({
        "region": "virginia", "instance": "g1", "admin": {"port": 0}, "listen": {"port": 0}, "hop": HOP,
        "watch": {"ping_s": 0.05, "ping_timeout_s": 0.3, "report_age_s": 0.5, **more},
    })  # fmt: skip


@asynccontextmanager
async def watching(
    store: MemoryStore | None = None,
    clock: Callable[[], float] | None = None,
    react: Callable[[Event], None] | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Watcher, MemoryStore, Heard]]:
    given_store = store or MemoryStore(Random(1))
    await given_store.open()
    heard = Heard()

    def both(event: Event) -> None:
        heard.react(event)
        if react is not None:
            react(event)

    watcher = Watcher(
        config(**more), WORLD, given_store, both, heard.refused.append,
        clock or asyncio.get_running_loop().time, Random(2),
    )  # fmt: skip
    await watcher.open()
    try:
        yield watcher, given_store, heard
    finally:
        await watcher.close()
        ours = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(OURS)]
        assert ours == []
        await given_store.close()


async def put(store: MemoryStore, report: RegionReport, key: str | None = None) -> None:
    await store.put(key or report_key(report.region, report.instance), encode(report))


class Region(region_pb2_grpc.RegionServicer):
    """A regional balancer's gRPC side, as it is told to be."""

    def __init__(self) -> None:
        self.latest: RegionReport | None = None
        self.news = asyncio.Condition()
        self.pinged: list[str] = []
        self.readers = 0
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        region_pb2_grpc.add_RegionServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def say(self, report: RegionReport) -> None:
        async with self.news:
            self.latest = report
            self.news.notify_all()

    async def Ping(self, request: region_pb2.PingRequest, _context: Any) -> region_pb2.PingReply:
        self.pinged.append(request.balancer)
        return region_pb2.PingReply(nonce=request.nonce, clock_ms=1.0, incarnation=1)

    async def Prefixes(self, _request: Any, context: Any) -> AsyncIterator[region_pb2.PrefixDelta]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older build")
        yield region_pb2.PrefixDelta()

    async def Reports(self, _request: Any, _context: Any) -> AsyncIterator[region_pb2.Report]:
        self.readers += 1
        seen: RegionReport | None = None
        try:
            while True:
                async with self.news:
                    while self.latest is seen:
                        await self.news.wait()
                    seen = self.latest
                assert seen is not None
                yield to_wire(seen)
        finally:
            self.readers -= 1


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.stop()


# -- by etcd


async def test_a_report_becomes_an_instance_of_the_view() -> None:
    clock = Clock(100.0)
    async with watching(clock=clock) as (_, store, heard):
        accepted = {"virginia/g1": 11.0, "g1": 99.0, "tokyo/g1": 22.0}
        await put(store, told(tier_address="[fd00::1]:80", accepted_bytes=accepted, draining=True))
        await until(lambda: heard.names() == ["r1"])
        region = heard.view.regions["tokyo"]
        (one,) = region.instances
        assert region.rtt_ms == 166.0
        assert (one.tier, one.draining, one.incarnation, one.received_at) == (Address("fd00::1", 80), True, 1, 100.0)
        assert one.clock_offset_ms == 5000.0 - 100_000.0
        assert one.accepted == 11.0  # what it acknowledges to us, not to our namesake elsewhere
        assert one.models["m"].wait_ms == 7.0
        assert heard.heard == ["tokyo"]


async def test_what_was_there_before_us_is_read_too() -> None:
    store = MemoryStore(Random(1))
    await store.open()
    await put(store, told())
    await put(store, told("frankfurt"))
    async with watching(store) as (_, _, heard):
        await until(lambda: set(heard.view.regions) == {"tokyo", "frankfurt"})


async def test_each_instance_has_its_own_clock() -> None:
    clock = Clock(10.0)
    async with watching(clock=clock) as (_, store, heard):
        await put(store, told(instance="a", clock_ms=1_000.0))
        await until(lambda: heard.names() == ["a"])
        clock.at = 10.25
        await put(store, told(instance="b", clock_ms=900_000.0))
        await until(lambda: heard.names() == ["a", "b"])
        a, b = heard.view.regions["tokyo"].instances
        assert (a.clock_offset_ms, b.clock_offset_ms) == (1_000.0 - 10_000.0, 900_000.0 - 10_250.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (report_key("tokyo", "r1"), b"", "malformed"),
        (report_key("tokyo", "r1"), b"{}", "malformed"),
        (report_key("tokyo", "r1"), b"\xff", "malformed"),
        (report_key("tokyo", "r1"), encode(told()).replace(b'"wait_ms":7.0', b'"wait_ms":-7.0'), "malformed"),
        (report_key("tokyo", "r1"), encode(told()).replace(b'"slots_free":8', b'"slots_free":9'), "malformed"),
        (report_key("tokyo", "r2"), encode(told()), "misplaced"),
        (report_key("frankfurt", "r1"), encode(told()), "misplaced"),
        ("/farhop/v1/region/tokyo/other/r1", encode(told()), "misplaced"),
        ("/farhop/v1/region/", encode(told()), "misplaced"),
        (report_key("atlantis", "r1"), encode(told("atlantis")), "unknown_region"),
    ],
)
async def test_what_cannot_be_believed_is_dropped_and_counted(key: str, value: bytes, why: str) -> None:
    async with watching() as (_, store, heard):
        await store.put(key, value)
        await until(lambda: heard.refused == [why])
        await put(store, told("frankfurt"))
        await until(lambda: set(heard.view.regions) == {"frankfurt"})
        assert heard.refused == [why]


async def test_there_is_a_bound_on_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INSTANCES_MAX", 2)
    async with watching() as (_, store, heard):
        for name in "abc":
            await put(store, told(instance=name))
        await until(lambda: heard.refused == ["too_many_instances"])
        await put(store, told(instance="b", seq=2, draining=True))
        await until(lambda: [i.draining for i in heard.view.regions["tokyo"].instances] == [False, True])


async def test_a_deleted_key_is_not_a_death() -> None:
    async with watching() as (_, store, heard):
        await put(store, told())
        await until(lambda: heard.names() == ["r1"])
        await store.delete(report_key("tokyo", "r1"))
        await put(store, told("frankfurt"))
        await until(lambda: "frankfurt" in heard.view.regions)
        assert heard.names() == ["r1"]


async def test_what_is_gone_and_silent_is_forgotten_and_the_view_says_so() -> None:
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, heard):
        await put(store, told(instance="a"))
        await put(store, told(instance="b"))
        await until(lambda: heard.names() == ["a", "b"])
        await store.delete(report_key("tokyo", "a"))
        await until(lambda: ("tokyo", "a") not in watcher._listed)
        clock.at += watch.FORGET_S
        watcher.forget()
        assert heard.names() == ["a", "b"]  # not yet
        clock.at += 0.1
        watcher.forget()
        assert heard.names() == ["b"]  # its key is there still
        await store.delete(report_key("tokyo", "b"))
        await until(lambda: not watcher._listed)
        watcher.forget()
        assert heard.view.regions == {}
        assert watcher._links == {}


async def test_an_outage_of_the_store_keeps_the_view_and_its_trouble_is_told() -> None:
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, heard):
        await put(store, told())
        await until(lambda: heard.names() == ["r1"])
        store.outage()
        await until(lambda: watcher.store_trouble is not None)
        clock.at += 10 * watch.FORGET_S
        watcher.forget()
        assert heard.names() == ["r1"]
        store.restore()
        await put(store, told(seq=2))
        await until(lambda: watcher.store_trouble is None)


async def test_a_silent_instance_does_not_draw_requests_while_another_speaks() -> None:
    """Its report is old and its channel broken: two signals. A region's last instance stays; its liveness judges."""
    clock = Clock()
    async with watching(clock=clock) as (_, store, heard):
        await put(store, told(instance="a"))
        await put(store, told(instance="b"))
        await until(lambda: heard.names() == ["a", "b"] and ("tokyo", False) in heard.channels)
        clock.at += 1.0
        await put(store, told(instance="b", seq=2))
        await until(lambda: heard.names() == ["b"])
        clock.at += 100.0
        await put(store, told("frankfurt"))
        await until(lambda: "frankfurt" in heard.view.regions)
        assert heard.names() == ["a", "b"]


# -- whichever path, whatever order

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "link"]),
        st.sampled_from(["tokyo", "frankfurt", "atlantis"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 3),  # incarnation
        st.integers(1, 5),  # seq
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(STEPS)
def test_the_newest_report_wins_by_whatever_path_and_in_whatever_order(
    steps: list[tuple[str, str, str, int, int]],
) -> None:
    async def run() -> None:
        heard = Heard()
        clock = Clock()
        store = MemoryStore(Random(1))
        watcher = Watcher(config(ping_s=60.0), WORLD, store, heard.react, heard.refused.append, clock, Random(2))
        newest: dict[tuple[str, str], tuple[int, int]] = {}
        received: dict[tuple[str, str], float] = {}
        for path, region, instance, incarnation, seq in steps:
            clock.at += 0.001
            name, report = (region, instance), told(region, instance, incarnation=incarnation, seq=seq)
            if region != "atlantis" and (incarnation, seq) > newest.get(name, (0, 0)):
                newest[name], received[name] = (incarnation, seq), clock.at
            if path == "store":
                watcher._read(report_key(region, instance), encode(report))
            else:
                watcher.heard_by_link(to_wire(report), name)
        known = {(i.region, i.name): i for r in heard.view.regions.values() for i in r.instances}
        assert {name: one.incarnation for name, one in known.items()} == {n: v[0] for n, v in newest.items()}
        assert {name: one.received_at for name, one in known.items()} == received
        assert heard.refused == ["unknown_region"] * sum(step[1] == "atlantis" for step in steps)
        assert len(heard.heard) == heard.views
        await watcher.close()

    asyncio.run(run())


async def test_a_link_that_speaks_for_another_is_not_believed() -> None:
    async with watching() as (watcher, _, heard):
        watcher.heard_by_link(to_wire(told(instance="r2")), ("tokyo", "r1"))
        absurd = to_wire(told())
        absurd.models[0].wait_ms = float("nan")
        watcher.heard_by_link(absurd, ("tokyo", "r1"))
        assert heard.refused == ["misplaced", "malformed"]
        assert heard.view.regions == {}


# -- by gRPC


async def test_a_link_brings_reports_and_tells_whether_it_is_up(region: Region) -> None:
    async with watching() as (_, store, heard):
        await put(store, told(control_address=region.address))
        await until(lambda: ("tokyo", True) in heard.channels)
        assert set(region.pinged) == {"virginia/g1"}
        await region.say(told(control_address=region.address, seq=5, draining=True))
        await until(lambda: heard.view.regions["tokyo"].instances[0].draining)
        await region.stop()
        await until(lambda: heard.channels[-1] == ("tokyo", False))
        await region.start()
        await until(lambda: heard.channels[-1] == ("tokyo", True))
        await region.say(told(control_address=region.address, seq=6))
        await until(lambda: not heard.view.regions["tokyo"].instances[0].draining)
    await until(lambda: region.readers == 0)


async def test_a_link_follows_a_changed_address(region: Region) -> None:
    other = Region()
    await other.start()
    async with watching() as (watcher, store, heard):
        await put(store, told(control_address=region.address))
        await until(lambda: region.readers == 1)
        await region.say(told(control_address=other.address, seq=2))  # told by the link that this ends
        await until(lambda: other.readers == 1)
        await until(lambda: region.readers == 0)
        assert len(watcher._links) == 1
        await until(lambda: len(watcher._retired) == 0)
        await other.say(told(control_address=other.address, seq=3, draining=True))
        await until(lambda: heard.view.regions["tokyo"].instances[0].draining)
    await other.stop()


async def test_a_region_is_up_while_one_of_its_instances_is(region: Region) -> None:
    async with watching() as (_, store, heard):
        await put(store, told(instance="a", control_address=region.address))
        await until(lambda: heard.channels == [("tokyo", True)])
        await put(store, told(instance="b", control_address=NOWHERE))
        await until(lambda: len(heard.channels) >= 2)
        assert set(heard.channels) == {("tokyo", True)}


async def test_a_forgotten_instance_takes_its_channel_along(region: Region) -> None:
    clock = Clock()
    async with watching(clock=clock) as (watcher, store, heard):
        await put(store, told(control_address=region.address))
        await until(lambda: heard.channels == [("tokyo", True)])
        await store.delete(report_key("tokyo", "r1"))
        await until(lambda: not watcher._listed)
        clock.at += watch.FORGET_S + 1.0
        watcher.forget()
        assert heard.channels[-1] == ("tokyo", False)
        assert heard.view.regions == {}
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
    async with watching() as (_, store, heard):
        await put(store, told(control_address=hole.address))
        await until(lambda: heard.channels == [("tokyo", True)])
        hole.swallow()
        await until(lambda: heard.channels[-1] == ("tokyo", False))
        await until(lambda: heard.channels[-1] == ("tokyo", True), within_s=8.0)
        await region.say(told(control_address=hole.address, seq=9, draining=True))
        await until(lambda: heard.view.regions["tokyo"].instances[0].draining)
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
            report = told(control_address=self.region.address, seq=self.seq)
            if self.by_store:
                await put(self.store, report)
            if self.by_link:
                await self.region.say(report)
            await asyncio.sleep(0.05)

    def state(self) -> str:
        liveness = self.flow.liveness.get("tokyo")
        return liveness.read(asyncio.get_running_loop().time()).state if liveness is not None else "unheard"

    async def stays(self, state: str, for_s: float) -> None:
        until_at = asyncio.get_running_loop().time() + for_s
        while asyncio.get_running_loop().time() < until_at:
            assert self.state() == state
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


async def test_without_etcd_the_links_carry_on(life: Life) -> None:
    life.store.outage()
    life.by_store = False
    await life.stays("up", 1.2)


async def test_without_grpc_a_region_is_suspect(life: Life) -> None:
    await life.region.stop()
    await until(lambda: life.state() == "suspect")
    await life.stays("suspect", 1.0)


async def test_without_both_it_is_down_within_the_reports_age(life: Life) -> None:
    began = asyncio.get_running_loop().time()
    life.store.outage()
    life.by_store = False
    await life.region.stop()
    await until(lambda: life.state() == "down")
    assert asyncio.get_running_loop().time() - began <= 0.5 + 0.3
    life.store.restore()
    life.by_store = True
    await life.region.start()
    await until(lambda: life.state() == "up")


def test_a_model_report_is_complete() -> None:
    """Every field of a capacity comes from the report: a new one must not be left at its default."""
    made = msgspec.structs.replace(MODEL, usd_per_mtok=3.0)
    heard = Heard()
    watcher = Watcher(config(), WORLD, MemoryStore(Random(1)), heard.react, heard.refused.append, Clock(), Random(2))
    capacity = watcher._instance(told(models=(made,)), 1.0).models["m"]
    for name in capacity.__struct_fields__:
        assert getattr(capacity, name) == getattr(made, name)
