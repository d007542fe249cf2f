"""Simulates the regions under a global balancer in a benchmark: real reports of many regions, no balancers.

`python -m farhop_lab.bench.regions JOB`. Each region is a shipped RegionalFlow with healthy replicas and a shipped
Reporter over it: to etcd under a lease, and by gRPC to subscribers. The requests themselves go to an upstream in place
of the tier listeners. Never relays.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import grpc
import msgspec
import uvloop
from farhop_wire import region_pb2_grpc

from farhop.balance.machine import Address
from farhop.service.process.tasks import Tasks
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.bench.bodies import MODEL
from regional_lb.app.control_port import CONTROL_OPTIONS
from regional_lb.fleet.view import Replica, ReplicaProbed, ReplicaSampled, Sample, ViewSwapped, view_of
from regional_lb.mesh.report import Reporter
from regional_lb.scheduler.flow import FlowConfig, RegionalFlow
from topology import load as topologies
from topology.law import Law

if TYPE_CHECKING:
    from topology.model import Topology

_TICK_S = 0.5


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`tiers` gives each region's host and port for requests; each has `replicas` replicas of this size."""

    topology: str
    etcd: str
    tiers: dict[str, tuple[str, int]]
    replicas: int
    slots: int
    kv_tokens: int
    prefill_tokens_max: int


class Regions:
    """The regions, to open and close. `tiers` gives each region's address for requests."""

    def __init__(self, topology: Topology, tiers: dict[str, tuple[str, int]], replicas: list[Replica]) -> None:
        self._law, self._tiers, self._replicas = Law(topology), tiers, replicas
        self._flows: dict[str, RegionalFlow] = {}
        self._reporters: list[Reporter] = []
        self._servers: list[grpc.aio.Server] = []
        self._store: EtcdStore | None = None
        self._tasks = Tasks()

    async def open(self, etcd: str) -> None:
        """Publish from now on."""
        self._store = EtcdStore(EtcdSettings(endpoints=(etcd,)), Random(1))
        await self._store.open()
        for seed, region in enumerate(self._tiers):
            flow = RegionalFlow(FlowConfig(region), self._law, Random(seed), lambda _tenant: 1.0)
            flow.handle(ViewSwapped(view_of(self._replicas)), time.monotonic())
            self._flows[region] = flow
        self._look()
        for region, (host, port) in self._tiers.items():
            server = grpc.aio.server(options=CONTROL_OPTIONS)
            control = server.add_insecure_port("127.0.0.1:0")
            addresses = (f"{host}:{port}", f"127.0.0.1:{control}", "")
            reporter = Reporter(
                self._flows[region], region=region, instance=f"{region}-bench", addresses=addresses,
                clock=time.monotonic, incarnation=time.time_ns() // 1_000_000,
            )  # fmt: skip
            region_pb2_grpc.add_RegionServicer_to_server(reporter, server)
            self._servers.append(server)
            await server.start()
            await reporter.open(self._store)
            self._reporters.append(reporter)
        self._tasks.start(self._watch(), "look after the benchmark's regions")

    async def close(self) -> None:
        """Withdraw them all."""
        await self._tasks.close()
        await asyncio.gather(*(reporter.withdraw() for reporter in self._reporters))
        await asyncio.gather(*(server.stop(0.2) for server in self._servers))
        if self._store is not None:
            await self._store.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._look()

    def _look(self) -> None:
        """What a watcher would see: idle, healthy replicas."""
        now = time.monotonic()
        sample = Sample(now, waiting=0, running=1, kv_usage=0.1)
        for flow in self._flows.values():
            for replica in self._replicas:
                flow.handle(ReplicaSampled(replica.name, sample), now)
                flow.handle(ReplicaProbed(replica.name, ok=True), now)


def replicas(job: Job) -> list[Replica]:
    """The replicas of every region: they get no requests, and only appear in reports."""
    return [
        Replica(
            name=f"gpu-{i}",
            address=Address("127.0.0.1", 9),
            models=frozenset((MODEL,)),
            gpu="h100",
            slots=job.slots,
            kv_tokens=job.kv_tokens,
            prefill_tokens_max=job.prefill_tokens_max,
            prefill_ms_per_token=0.04,
            tpot_ms=10.0,
        )
        for i in range(job.replicas)
    ]


async def serve(job: Job) -> None:
    """Report until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    regions = Regions(topologies.load(Path(job.topology)), job.tiers, replicas(job))
    try:
        await regions.open(job.etcd)
        print(f"{len(job.tiers)} regions report", flush=True)
        await stop.wait()
    finally:
        await regions.close()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Job)))
