"""Watches the regions: their reports in etcd, and a gRPC link to each balancer that reported.

Reports are merged by (region, instance, incarnation, seq), never by a clock, whichever path they came by. Invariants: a
report that is absurd, of an unknown region or under another's key is dropped and counted; a key's presence is not
liveness and its deletion is not death; when etcd is gone the last view stands and the links carry on. Never decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
from farhop_wire import region_pb2, region_pb2_grpc

from farhop.balance.machine import Address
from farhop.store.contract import REGION_PREFIX, ChangeKind, parse_report_key
from farhop.store.report import ReportError, decode, from_wire
from global_lb.view import Capacity, ChannelChanged, Instance, Region, RegionHeard, View, ViewSwapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store
    from farhop.store.report import RegionReport
    from global_lb.config import GlobalConfig
    from topology.model import Topology

FORGET_S = 60.0  # an instance not heard of for this long, and gone from etcd, is forgotten
INSTANCES_MAX = 1024
_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))


class Watcher:
    """Keeps the view. `react` is told events; `refused` counts reports not believed, by reason."""

    def __init__(
        self,
        config: GlobalConfig,
        topology: Topology,
        store: Store,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._config, self._topology, self._store = config, topology, store
        self._react, self._refused, self._clock, self._rng = react, refused, clock, rng
        self._reports: dict[tuple[str, str], tuple[RegionReport, float]] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._up: dict[tuple[str, str], bool] = {}
        self._listed: frozenset[tuple[str, str]] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self.store_trouble: str | None = None

    async def open(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    # -- by etcd

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._store.watch(REGION_PREFIX)) as changes:
            async for change in changes:
                await self._changed(change)

    async def _changed(self, change: Change) -> None:
        if change.kind is ChangeKind.LOST:
            self.store_trouble = change.why
            return
        self.store_trouble = None
        if change.kind is ChangeKind.SNAPSHOT:
            names = (parse_report_key(entry.key) for entry in change.entries)
            self._listed = frozenset(name for name in names if name is not None)
            for entry in change.entries:
                self._read(entry.key, entry.value)
        elif change.kind is ChangeKind.PUT:
            name = parse_report_key(change.key)
            self._listed |= {name} if name is not None else set()
            self._read(change.key, change.value)
        else:
            self._listed -= {parse_report_key(change.key) or ("", "")}
        await self._forget()

    def _read(self, key: str, value: bytes) -> None:
        try:
            report = decode(value)
        except ReportError:
            self._refused("malformed")
            return
        if (report.region, report.instance) != parse_report_key(key):
            self._refused("misplaced")
            return
        self.heard(report)

    async def _forget(self) -> None:
        """Drop instances that are gone from etcd and silent; a link that still speaks keeps one alive."""
        now = self._clock()
        for name, (_, received_at) in list(self._reports.items()):
            if name not in self._listed and now - received_at > FORGET_S:
                del self._reports[name]
                self._up.pop(name, None)
                link = self._links.pop(name, None)
                if link is not None:
                    await link.close()

    # -- by either path

    def heard(self, report: RegionReport) -> None:
        """Take a report if it is newer than what is known, and swap the view."""
        if report.region not in self._topology.regions:
            self._refused("unknown_region")
            return
        name = (report.region, report.instance)
        known = self._reports.get(name)
        if known is not None and (known[0].incarnation, known[0].seq) >= (report.incarnation, report.seq):
            return  # the other path was faster, or it is late
        if known is None and len(self._reports) >= INSTANCES_MAX:
            self._refused("too_many_instances")
            return
        now = self._clock()
        self._reports[name] = (report, now)
        self._link(name, report)
        self._react(RegionHeard(report.region))
        self._react(ViewSwapped(self._view()))

    def _view(self) -> View:
        instances: dict[str, list[Instance]] = {}
        for (region, _), (report, received_at) in self._reports.items():
            instances.setdefault(region, []).append(self._instance(report, received_at))
        here = self._config.region
        return View({r: Region(r, self._topology.rtt_ms(here, r), tuple(i)) for r, i in instances.items()})

    def _instance(self, report: RegionReport, received_at: float) -> Instance:
        host, _, port = report.tier_address.rpartition(":")
        return Instance(
            name=report.instance,
            region=report.region,
            tier=Address(host.strip("[]"), int(port)),
            incarnation=report.incarnation,
            received_at=received_at,
            clock_offset_ms=report.clock_ms - received_at * 1e3,
            draining=report.draining,
            accepted=report.accepted_bytes.get(self._config.instance, 0.0),
            models={
                m.model: Capacity(
                    wait_ms=m.wait_ms,
                    prefill_ms_per_token=m.prefill_ms_per_token,
                    tpot_ms=m.tpot_ms,
                    bytes_per_token=m.bytes_per_token,
                    replicas_ready=m.replicas_ready,
                    slots_free=m.slots_free,
                    usd_per_mtok=m.usd_per_mtok,
                )
                for m in report.models
            },
        )

    # -- by gRPC

    def _link(self, name: tuple[str, str], report: RegionReport) -> None:
        known = self._links.get(name)
        if known is not None and known.address == report.control_address:
            return
        if known is not None:
            known.retire()
        self._links[name] = _Link(self, name, report.control_address, self._config)

    def link_changed(self, name: tuple[str, str], up: bool) -> None:
        """A region's channel is up while that of any of its instances is."""
        if self._up.get(name) == up:
            return
        self._up[name] = up
        region = name[0]
        self._react(ChannelChanged(region, any(u for (r, _), u in self._up.items() if r == region)))

    def heard_by_link(self, message: region_pb2.Report, name: tuple[str, str]) -> None:
        """A report over gRPC, judged as one from etcd is."""
        try:
            report = from_wire(message)
        except ReportError:
            self._refused("malformed")
            return
        if (report.region, report.instance) != name:
            self._refused("misplaced")
            return
        self.heard(report)

    def jitter(self) -> float:
        """0.8 to 1.2, so that many balancers do not ask one region in step."""
        return 0.8 + 0.4 * self._rng.random()


class _Link:
    """The channel to one regional balancer: a stream of reports, and a ping that tells whether it lives."""

    def __init__(self, watcher: Watcher, name: tuple[str, str], address: str, config: GlobalConfig) -> None:
        self._watcher, self._name, self.address, self._config = watcher, name, address, config
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = region_pb2_grpc.RegionStub(self._channel)
        self._tasks = [asyncio.create_task(self._ping()), asyncio.create_task(self._reports())]

    def retire(self) -> None:
        """Close, without waiting for it."""
        task = asyncio.create_task(self.close())
        self._tasks.append(task)

    async def close(self) -> None:
        """Stop asking."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(None)

    async def _ping(self) -> None:
        watch, nonce = self._config.watch, 0
        while True:
            nonce += 1
            request = region_pb2.PingRequest(nonce=nonce, balancer=self._config.instance)
            try:
                await self._stub.Ping(request, timeout=watch.ping_timeout_s)
                self._watcher.link_changed(self._name, True)
            except grpc.aio.AioRpcError:
                self._watcher.link_changed(self._name, False)
            await asyncio.sleep(watch.ping_s * self._watcher.jitter())

    async def _reports(self) -> None:
        request = region_pb2.ReportsRequest(balancer=self._config.instance, region=self._config.region)
        while True:
            try:
                async for message in self._stub.Reports(request):
                    self._watcher.heard_by_link(message, self._name)
            except grpc.aio.AioRpcError:
                pass  # the ping tells; here only the next try counts
            await asyncio.sleep(self._config.watch.ping_s * self._watcher.jitter())
