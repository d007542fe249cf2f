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
from farhop.shell.tasks import Tasks
from farhop.store.contract import REGION_PREFIX, ChangeKind, parse_report_key
from farhop.store.report import ReportError, decode, from_wire
from global_lb.overrides import Overrides
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
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Else channels to one address share a connection, and a new link is handed the dead one of the link before.
    ("grpc.use_local_subchannel_pool", 1),
)


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
        self._listed: set[tuple[str, str]] = set()
        self._tasks = Tasks()
        self._retired = Tasks()
        self._closed = False
        self.overrides = Overrides(store, topology.regions, react, refused, clock)
        self.store_trouble: str | None = None

    async def open(self) -> None:
        """Begin."""
        self._tasks.start(self._follow(), "watch the reports of all regions")
        self._tasks.start(self.overrides.follow(), "watch the operators' words")
        self._tasks.start(self._tidy(), "forget what is gone")

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        await self._tasks.close()
        for link in self._links.values():
            self._retire(link)
        await self._retired.settle()

    def _retire(self, link: _Link) -> None:
        """Close a link without waiting for it."""
        self._retired.start(link.close(), f"close the link to {link.address}")

    # -- by etcd

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._store.watch(REGION_PREFIX)) as changes:
            async for change in changes:
                self._changed(change)

    def _changed(self, change: Change) -> None:
        if change.kind is ChangeKind.LOST:
            self.store_trouble = change.why
            return
        self.store_trouble = None
        if change.kind is ChangeKind.SNAPSHOT:
            names = (parse_report_key(entry.key) for entry in change.entries)
            self._listed = {name for name in names if name is not None}
            for entry in change.entries:
                self._read(entry.key, entry.value)
        elif change.kind is ChangeKind.PUT:
            name = parse_report_key(change.key)
            if name is not None:
                self._listed.add(name)
            self._read(change.key, change.value)
        elif change.kind is ChangeKind.DELETE:
            self._listed.discard(parse_report_key(change.key) or ("", ""))

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

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(FORGET_S / 10.0)
            self.forget()

    def forget(self) -> None:
        """Drop instances that are gone from etcd and silent; a link that still speaks keeps one alive."""
        now = self._clock()
        gone = [
            name
            for name, (_, received_at) in self._reports.items()
            if name not in self._listed and now - received_at > FORGET_S
        ]
        for name in gone:
            del self._reports[name]
            self._retire(self._links.pop(name))
            if self._up.pop(name, False):
                self._channel_of(name[0])
        if gone:
            self._react(ViewSwapped(self._view()))

    # -- by either path

    def heard(self, report: RegionReport) -> None:
        """Take a report if it is newer than what is known, and swap the view."""
        if self._closed:
            return  # a link may still speak while it is being closed
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
        now = self._clock()
        speaking = {name for name in self._reports if not self._silent(name, now)}
        regions = {region for region, _ in speaking}
        instances: dict[str, list[Instance]] = {}
        for name, (report, received_at) in self._reports.items():
            # A silent one is left out where another speaks; a region's last one is the liveness's to judge.
            if name in speaking or name[0] not in regions:
                instances.setdefault(name[0], []).append(self._instance(report, received_at))
        here = self._config.region
        return View({r: Region(r, self._topology.rtt_ms(here, r), tuple(i)) for r, i in instances.items()})

    def _silent(self, name: tuple[str, str], now: float) -> bool:
        """Two signals against one instance: it does not report, and its channel is broken."""
        return now - self._reports[name][1] > self._config.watch.report_age_s and not self._up.get(name, False)

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
            accepted=report.accepted_bytes.get(self._config.balancer, 0.0),
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
            self._retire(known)
        self._links[name] = _Link(self, name, report.control_address, self._config)

    def link_changed(self, name: tuple[str, str], up: bool) -> None:
        """One instance's channel broke, or is back."""
        if name not in self._reports or self._up.get(name) == up:
            return
        self._up[name] = up
        self._channel_of(name[0])
        self._react(ViewSwapped(self._view()))

    def _channel_of(self, region: str) -> None:
        """A region's channel is up while that of any of its instances is."""
        self._react(ChannelChanged(region, any(up for (r, _), up in self._up.items() if r == region)))

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
        # Without these pings a path that swallows everything would look open for as long as TCP goes on trying.
        idle_ms = max(1000, int(2e3 * config.watch.ping_s))
        keepalive = (("grpc.keepalive_time_ms", idle_ms), ("grpc.keepalive_timeout_ms", idle_ms))
        self._channel = grpc.aio.insecure_channel(address, options=(*_OPTIONS, *keepalive))
        self._stub = region_pb2_grpc.RegionStub(self._channel)
        self._tasks = Tasks()
        self._tasks.start(self._ping(), f"ping {address}")
        self._tasks.start(self._reports(), f"read the reports of {address}")

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close()
        await self._channel.close(None)

    async def _ping(self) -> None:
        watch, nonce = self._config.watch, 0
        while True:
            nonce += 1
            request = region_pb2.PingRequest(nonce=nonce, balancer=self._config.balancer)
            try:
                await self._stub.Ping(request, timeout=watch.ping_timeout_s)
                self._watcher.link_changed(self._name, True)
            except grpc.aio.AioRpcError:
                self._watcher.link_changed(self._name, False)
            await asyncio.sleep(watch.ping_s * self._watcher.jitter())

    async def _reports(self) -> None:
        request = region_pb2.ReportsRequest(balancer=self._config.balancer, region=self._config.region)
        while True:
            try:
                async for message in self._stub.Reports(request):
                    self._watcher.heard_by_link(message, self._name)
            except grpc.aio.AioRpcError:
                pass  # the ping tells; here only the next try counts
            await asyncio.sleep(self._config.watch.ping_s * self._watcher.jitter())
