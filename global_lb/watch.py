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
from farhop.balance.trie import PrefixTrie
from farhop.shell.tasks import Tasks
from farhop.store.contract import REGION_PREFIX, ChangeKind, parse_report_key
from farhop.store.report import ReportError, decode, from_wire
from global_lb.distance import Distances
from global_lb.overrides import Overrides
from global_lb.prefixes import Prefixes, PrefixGapError
from global_lb.view import ChannelChanged, Instance, Region, RegionHeard, View, ViewSwapped, instance_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Event
    from farhop.shell.certificates import Certificates
    from farhop.store.contract import Change, Store
    from farhop.store.report import RegionReport
    from global_lb.config import GlobalConfig
    from topology.model import Topology

FORGET_S = 60.0  # an instance not heard of for this long, and gone from etcd, is forgotten
INSTANCES_MAX = 1024
PINGS_LOST = 2  # in a row, before a channel counts as broken: one may be lost by chance
HURRY = 0.25  # of the time between pings, after a lost one and while the wire time moves
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_DISBELIEVED = ("andshake failed", "Hostname Verification")  # in what gRPC says where TLS fails
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Else channels to one address share a connection, and a new link is handed the dead one of the link before.
    ("grpc.use_local_subchannel_pool", 1),
)


class Watcher:
    """Keeps the view. `react` is told events; `refused` counts reports not believed, by reason.

    `certificates` are for the links to regions that speak TLS; `trouble` is told where that fails, and why.
    """

    def __init__(
        self,
        config: GlobalConfig,
        topology: Topology,
        store: Store,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
        prefixes: Prefixes | None = None,
        certificates: Certificates | None = None,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
    ) -> None:
        self.certificates, self._trouble = certificates, trouble
        if certificates is not None:
            certificates.changed = self._relink
        self._config, self._topology, self._store = config, topology, store
        self.prefixes = prefixes if prefixes is not None else Prefixes(PrefixTrie(), refused)
        self._react, self._refused, self._clock, self._rng = react, refused, clock, rng
        self._reports: dict[tuple[str, str], tuple[RegionReport, float]] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._up: dict[tuple[str, str], bool] = {}
        self._listed: set[tuple[str, str]] = set()
        self._tasks = Tasks()
        self._retired = Tasks()
        self._closed = False
        self.distances = Distances(topology, config.region)
        self.overrides = Overrides(store, topology.regions, react, refused, clock)
        self.store_trouble: str | None = None

    async def open(self) -> None:
        """Begin."""
        self._tasks.start(self._follow(), "watch the reports of all regions")
        self._tasks.start(self.overrides.follow(), "watch the operators' words")
        self._tasks.start(self._tidy(), "forget what is gone")
        self._tasks.start(self.prefixes.keep(self._clock), "forget prefixes that are gone")

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
            self.distances.forget(name)
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
        renewed = known is None or known[0].incarnation < report.incarnation
        self._react(RegionHeard(report.region, renewed))
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
        return View({r: Region(r, self.distances.rtt_ms(r), tuple(i)) for r, i in instances.items()})

    def _silent(self, name: tuple[str, str], now: float) -> bool:
        """Two signals against one instance: it does not report, and its channel is broken."""
        return now - self._reports[name][1] > self._config.watch.report_age_s and not self._up.get(name, False)

    def _instance(self, report: RegionReport, received_at: float) -> Instance:
        at = _address(report.tier_address)
        name = self._config.certified_name(report.region, at.host)
        tier = Address(at.host, at.port, self._config.proxy(report.region), name)
        offset_ms = self.distances.offset_ms((report.region, report.instance), report.incarnation)
        return instance_of(report, tier, received_at, offset_ms, self._config.balancer)

    # -- by gRPC

    def _link(self, name: tuple[str, str], report: RegionReport) -> None:
        known = self._links.get(name)
        if known is not None and known.address == report.control_address:
            return
        if known is not None:
            self._retire(known)
        self._links[name] = _Link(self, name, report.control_address, self._config)

    def _relink(self) -> None:
        # A gRPC channel keeps the certificates it was opened with.
        for name, link in tuple(self._links.items()):
            self._retire(link)
            self._links[name] = _Link(self, name, link.address, self._config)

    def link_refused(self, address: str, why: str) -> None:
        """TLS with a regional balancer failed."""
        self._trouble(_address(address), why)

    def pinged(self, name: tuple[str, str], reply: region_pb2.PingReply, sent_at: float) -> None:
        """A ping over a standing connection came back."""
        if not self.distances.pinged(name, reply.incarnation, reply.clock_ms, sent_at, self._clock()):
            self._refused("absurd_ping")

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

    def stream_failed(self, what: str, code: grpc.StatusCode) -> None:
        """A link's stream ended in an error. That nobody is there the ping tells; any other reason is counted."""
        if code not in _GONE:
            self._refused(f"{what}_{code.name.lower()}")

    def now(self) -> float:
        """This process's monotonic clock, seconds."""
        return self._clock()

    def jitter(self) -> float:
        """0.8 to 1.2, so that many balancers do not ask one region in step."""
        return 0.8 + 0.4 * self._rng.random()


class _Link:
    """The channel to one regional balancer: streams of reports and prefixes, and a ping that tells whether it lives."""

    def __init__(self, watcher: Watcher, name: tuple[str, str], address: str, config: GlobalConfig) -> None:
        self._watcher, self._name, self.address, self._config = watcher, name, address, config
        self._channel = _channel(config, name[0], address, watcher.certificates)
        self._stub = region_pb2_grpc.RegionStub(self._channel)
        self._tasks = Tasks()
        self._tasks.start(self._ping(), f"ping {address}")
        self._tasks.start(self._reports(), f"read the reports of {address}")
        self._tasks.start(self._prefixes(), f"read the prefixes of {address}")

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close()
        await self._channel.close(None)

    async def _ping(self) -> None:
        watch, watcher, nonce = self._config.watch, self._watcher, 0
        lost = PINGS_LOST
        while True:
            nonce += 1
            request = region_pb2.PingRequest(nonce=nonce, balancer=self._config.balancer)
            try:
                sent_at = watcher.now()
                reply = await self._stub.Ping(request, timeout=watch.ping_timeout_s)
                if lost == 0:  # else it may have waited for the connection, too
                    watcher.pinged(self._name, reply, sent_at)
                lost = 0
                watcher.link_changed(self._name, True)
            except grpc.aio.AioRpcError as error:
                lost += 1
                why = error.details() or ""
                if any(words in why for words in _DISBELIEVED):
                    watcher.link_refused(self.address, why)
                if lost >= PINGS_LOST:
                    watcher.link_changed(self._name, False)
            soon = 0 < lost < PINGS_LOST or watcher.distances.moving(self._name[0])
            await asyncio.sleep(watch.ping_s * watcher.jitter() * (HURRY if soon else 1.0))

    async def _reports(self) -> None:
        request = region_pb2.ReportsRequest(balancer=self._config.balancer, region=self._config.region)
        while True:
            try:
                async for message in self._stub.Reports(request):
                    self._watcher.heard_by_link(message, self._name)
            except grpc.aio.AioRpcError as error:
                self._watcher.stream_failed("reports", error.code())
            await asyncio.sleep(self._config.watch.ping_s * self._watcher.jitter())

    async def _prefixes(self) -> None:
        config, watcher = self._config, self._watcher
        while True:
            stream = watcher.prefixes.begin(self._name)
            call = self._stub.Prefixes(
                region_pb2.PrefixesRequest(
                    balancer=config.balancer,
                    region=config.region,
                    known_incarnation=stream.known_incarnation,
                    known_seq=stream.known_seq,
                )
            )
            pause_s = config.watch.ping_s
            try:
                async for message in call:
                    await stream.take(message)
            except PrefixGapError:
                pass  # counted where it was seen; the next stream begins with what is missing
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    pause_s *= 10  # an older build
                else:
                    watcher.stream_failed("prefixes", error.code())
            finally:
                call.cancel()
                stream.ended(watcher.now())
            await asyncio.sleep(pause_s * watcher.jitter())


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def _channel(config: GlobalConfig, region: str, address: str, certificates: Certificates | None) -> grpc.aio.Channel:
    """The channel to a regional balancer, encrypted where the configuration says so."""
    # Without these pings a path that swallows everything would look open for as long as TCP goes on trying.
    idle_ms = max(1000, int(2e3 * config.watch.ping_s))
    waits = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    options = (*_OPTIONS, *((name, idle_ms) for name in waits), *_proxy_options(config.proxy(region)))
    host = _address(address).host
    certified = config.certified_name(region, host)
    if certified is None:
        return grpc.aio.insecure_channel(address, options=options)
    assert certificates is not None  # where there is a name to verify there is whom to believe
    other = () if certified == host else (("grpc.ssl_target_name_override", certified),)
    return grpc.aio.secure_channel(address, certificates.material.channel(), options=(*options, *other))


def _proxy_options(proxy: Address | None) -> tuple[tuple[str, str], ...]:
    """Channel arguments for a proxy. By address, for any target: `grpc.http_proxy` would heed a stray no_proxy."""
    if proxy is None:
        return ()
    return (
        ("grpc.address_http_proxy", str(proxy)),
        ("grpc.address_http_proxy_enabled_addresses", "0.0.0.0/0,::/0"),
    )
