"""One balancer's `Peers` with a store in memory, and scripted peers on real gRPC."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from farhop_wire import peers_pb2, peers_pb2_grpc
from inprocess import common
from worlds import MODEL, regional, replica

from farhop.store.contract import report_key
from farhop.store.documents.report import RegionReport, encode
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.ports import free_ports
from regional_lb.app.config import RegionalConfig
from regional_lb.mesh.peers import Peers


class Other(peers_pb2_grpc.PeersServicer):
    """A peer. `says` are the fields of its messages; it goes on with `more` until it `hangs`."""

    def __init__(self, instance: str = "r3", incarnation: int = 5, **says: Any) -> None:
        self.instance, self.incarnation, self.says = instance, incarnation, says
        self.asked: list[peers_pb2.FollowRequest] = []
        self.more: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.region = "london"
        self.silent = False
        (self.port,) = free_ports(1)  # it may come back there
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def load(self, name: str, in_flight: int = 0, **fields: Any) -> peers_pb2.ReplicaLoad:
        return peers_pb2.ReplicaLoad(replica=name, address=f"{name}.example:8000", known=True, in_flight=in_flight)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._server.add_insecure_port(self.address)
        peers_pb2_grpc.add_PeersServicer_to_server(self, self._server)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def Follow(self, request: Any, context: Any) -> AsyncIterator[peers_pb2.PeerUpdate]:
        self.asked.append(request)
        seq = 1
        loads = [self.load("g1"), self.load("g2"), self.load("g3")]
        yield self._news(**{"seq": seq, "loads": loads, "caught_up": True, **self.says})
        while True:
            try:
                async with asyncio.timeout(0.1):
                    fields = await self.more.get()
            except TimeoutError:
                fields = {}
                if self.silent:
                    continue
            seq += 1
            yield self._news(**{"seq": seq, "caught_up": True, **fields})

    def _news(self, **fields: Any) -> peers_pb2.PeerUpdate:
        known = {"region": self.region, "instance": self.instance, "incarnation": self.incarnation, "law_epoch": 1}
        return peers_pb2.PeerUpdate(**{**known, **fields})


class Stage:
    """`peers` is r1's; `refused` and `troubles` are what it was told."""

    def __init__(self, **config: Any) -> None:
        replicas = [{"url": f"http://g{n}.example:8000", "models": [MODEL], "name": f"g{n}"} for n in (1, 2, 3)]
        ports = {name: {"port": 0} for name in ("tier", "control")}
        document = {**common("london", "r1"), **ports, "replicas": replicas, **config}
        made = RegionalConfig.model_validate(document)
        self.flow = regional(replica("g1"), replica("g2"), replica("g3"), instance="r1")
        assert self.flow.replicas.shares is not None
        self.store = MemoryStore(Random(1), MemoryCluster())
        self.refused: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.clock = asyncio.get_running_loop().time

        def react(event: Any) -> None:
            self.flow.handle(event, self.clock())

        self.peers = Peers(
            made, self.flow, self.flow.replicas.shares, self.store,
            react=react, refused=lambda why: self.refused.update([why]), clock=self.clock,
            rng=Random(3), incarnation=7, trouble=lambda _address, why: self.troubles.append(why),
        )  # fmt: skip

    async def reports(self, instance: str, address: str, seq: int = 1, incarnation: int = 5, **fields: Any) -> None:
        """A balancer's report in the store."""
        report = RegionReport(
            region="london", instance=instance, incarnation=incarnation, seq=seq, clock_ms=1.0,
            tier_address="127.0.0.1:1", control_address=address, **fields,
        )  # fmt: skip
        await self.store.put(report_key("london", instance), encode(report))

    @property
    def owned(self) -> int:
        assert self.flow.replicas.shares is not None
        return sum(map(self.flow.replicas.shares.owns, self.flow.replicas.view.replicas))

    def one(self, instance: str = "r3") -> dict[str, Any]:
        """What an operator is told of a peer."""
        return next((p for p in self.peers.status() if p["instance"] == instance), {})


@asynccontextmanager
async def stage(*others: Other, opened: bool = True, **config: Any) -> AsyncIterator[Stage]:
    """r1 with these peers listening; `opened`: it has begun, and they report to the store."""
    made = None
    try:
        for other in others:
            await other.start()
        made = Stage(**config)
        await made.store.open()
        if opened:
            for other in others:
                await made.reports(other.instance, other.address, incarnation=other.incarnation)
            await made.peers.open("127.0.0.1:1")
        yield made
    finally:
        if made is not None:
            await made.peers.close()
            await made.store.close()
        for other in others:
            await other.stop()
