"""A regional balancer's reporter with its two readers: a store that remembers, and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from farhop_wire import region_pb2_grpc

from farhop.store.documents.report import RegionReport, decode
from farhop_lab.memory_store import MemoryStore
from regional_lb.mesh.report import Reporter
from regional_lb.scheduler.flow import RegionalFlow

ADDRESSES = ("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")


def reporter(flow: RegionalFlow, clock: Any = lambda: 10.0) -> Reporter:
    return Reporter(flow, region="london", instance="r1", addresses=ADDRESSES, clock=clock, incarnation=7)


def live(flow: RegionalFlow) -> Reporter:
    return reporter(flow, asyncio.get_running_loop().time)


class Watched(MemoryStore):
    """Keeps what is written, and when; not what an outage swallowed."""

    def __init__(self) -> None:
        super().__init__(Random(1))
        self.written: list[tuple[float, RegionReport]] = []
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def put_leased(self, key: str, value: bytes, lease: int) -> bool:
        await self.hangs.wait()
        written = await super().put_leased(key, value, lease)
        self.written.append((asyncio.get_running_loop().time(), decode(value)))
        return written

    @property
    def seqs(self) -> list[int]:
        return [one.seq for _, one in self.written]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for (a, _), (b, _) in zip(self.written, self.written[1:], strict=False)]


@asynccontextmanager
async def publishing(flow: RegionalFlow, value: Reporter | None = None) -> AsyncIterator[tuple[Reporter, Watched]]:
    """`told`: another reporter of it than one by the loop's clock."""
    store = Watched()
    await store.open()
    value = value or live(flow)
    await value.open(store)
    try:
        yield value, store
    finally:
        store.hangs.set()
        await value.withdraw()
        await store.close()


@asynccontextmanager
async def calling(value: Reporter) -> AsyncIterator[region_pb2_grpc.RegionStub]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    region_pb2_grpc.add_RegionServicer_to_server(value, server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield region_pb2_grpc.RegionStub(channel)
    finally:
        await server.stop(None)
