"""The two ends of what passes between regional and global balancers, each to be watched alone in a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from farhop_wire import region_pb2, region_pb2_grpc
from inprocess import HOP, topology

from farhop.balance.machine import Event
from farhop.store.contract import report_key
from farhop.store.documents.report import ModelReport, RegionReport, encode, to_wire
from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.ports import free_ports
from global_lb.app.config import GlobalConfig
from global_lb.fleet.view import ChannelChanged, RegionKnown, RegionReported, View
from global_lb.links.watch import RegionWatcher

WORLD = topology()
OURS = ("watch ", "forget ", "ping ", "read ", "close ")
NOWHERE = "127.0.0.1:9"  # the discard port: nothing listens there
MODEL = ModelReport(
    model="m", replicas_ready=1, replicas_total=1, slots_total=8, slots_free=8, kv_tokens_total=100, kv_tokens_free=100,
    wait_ms=7.0, prefill_ms_per_token=0.1, tpot_ms=20.0, bytes_per_token=4.0,
)  # fmt: skip


def a_report(region: str = "tokyo", instance: str = "r1", **fields: Any) -> RegionReport:
    return RegionReport(
        region=region, instance=instance,
        **{"incarnation": 1, "seq": 1, "clock_ms": 5000.0, "tier_address": "10.0.0.1:80", "control_address": NOWHERE,
           "models": (MODEL,), **fields},
    )  # fmt: skip


class Recorded:
    """What the flow would be told."""

    def __init__(self) -> None:
        self.view = View({})
        self.views = 0
        self.reported: list[str] = []
        self.channels: list[tuple[str, bool]] = []
        self.refused: list[str] = []

    def react(self, event: Event) -> None:
        if isinstance(event, RegionKnown | RegionReported | ChannelChanged):
            self.views += 1
            if event.known is not None or isinstance(event, RegionKnown):
                self.view = self.view.put(event.region, event.known)
        if isinstance(event, RegionReported):
            self.reported.append(event.region)
        elif isinstance(event, ChannelChanged):
            self.channels.append((event.region, event.up))

    def names(self, region: str = "tokyo") -> list[str]:
        return [i.name for i in self.view.regions[region].instances] if region in self.view.regions else []


class Clock:
    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def config(**more: Any) -> GlobalConfig:
    return GlobalConfig.model_validate({
        "region": "virginia", "instance": "g1", "admin": {"port": 0}, "listen": {"port": 0}, "hop": HOP,
        "tier_insecure": True,
        "watch": {"ping_s": 0.05, "ping_timeout_s": 0.3, "report_age_s": 0.5, **more},
    })  # fmt: skip


@asynccontextmanager
async def watching(
    store: MemoryStore | None = None,
    clock: Callable[[], float] | None = None,
    react: Callable[[Event], None] | None = None,
    **more: Any,
) -> AsyncIterator[tuple[RegionWatcher, MemoryStore, Recorded]]:
    given_store = store or MemoryStore(Random(1))
    await given_store.open()
    found = Recorded()

    def both(event: Event) -> None:
        found.react(event)
        if react is not None:
            react(event)

    watcher = RegionWatcher(
        config(**more), WORLD, given_store, react=both, refused=found.refused.append,
        clock=clock or asyncio.get_running_loop().time, rng=Random(2),
    )  # fmt: skip
    await watcher.open()
    try:
        yield watcher, given_store, found
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
        self.known: dict[str, int] = {}  # attempts here, and how long they have been silent, ms
        self.readers = 0
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        region_pb2_grpc.add_RegionServicer_to_server(self, self._server)
        self.address = self.address or f"127.0.0.1:{free_ports(1)[0]}"  # it may come back there
        self._server.add_insecure_port(self.address)
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
        quiet_ms = [self.known.get(attempt, -1) for attempt in request.attempts]
        return region_pb2.PingReply(nonce=request.nonce, clock_ms=1.0, incarnation=1, quiet_ms=quiet_ms)

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
