"""Assembles the DNS server that leads clients to entries: makes the clock and the random generator, and hands them on.

This process watches entries, the law and client networks, and prepares the tables of answers (views). Workers answer
questions by UDP from them, this process by TCP. Never decides what an answer says: `entry_dns.answers` does.
Order of starting: the law and a first probe of every entry, then questions. Of stopping: workers, then all else.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from entry_dns.answers import learned, prepare, zones
from entry_dns.answers.snapshot import decode, encode
from entry_dns.app.config import DnsConfig
from entry_dns.app.counters import Counters
from entry_dns.app.tcp import TcpServer
from entry_dns.app.where import where
from entry_dns.app.worker import Settings, responder
from entry_dns.app.workers import WorkerError, Workers, bind
from entry_dns.fleet.entry_health import EntryHealth, EntryHealthTracker
from entry_dns.fleet.latencies import Learned
from entry_dns.links import client_networks
from entry_dns.links.probes import Probes
from entry_dns.links.regions import RegionLinks
from entry_dns.links.view_file import load as load_view
from entry_dns.links.view_file import write
from entry_dns.links.watch import EntryWatcher
from farhop.config import ConfigError, load, redacted
from farhop.relay.http.listener import PortTakenError
from farhop.service.admin.server import AdminServer, ExplainError
from farhop.service.assembly import stores
from farhop.service.assembly.dataplane import TlsSetup
from farhop.service.assembly.reload import Live, Reloader
from farhop.service.assembly.store_opening import opened
from farhop.service.config.certificates import TlsManager
from farhop.service.observability.decisions import Decisions
from farhop.service.process.clock import Clock, wall
from farhop.service.process.lifecycle import run as run_process
from farhop.service.process.tasks import Tasks, all_of, until
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from topology.law import Law
from topology.law_document import document_of, map_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from ipaddress import IPv4Network, IPv6Network
    from socket import socket

    from entry_dns.answers.prepare import Table
    from entry_dns.answers.snapshot import Head
    from entry_dns.answers.zones import ZonePlan
    from farhop.balance.machine import Request
    from farhop.service.admin.server import Question
    from farhop.store.contract import Store
    from topology.model import Topology

Measurements: TypeAlias = "dict[IPv4Network | IPv6Network, dict[str, float]]"
Publishing: TypeAlias = "Callable[[Head, list[Table]], Awaitable[bool]]"
LOOK_S = 0.25  # how often the health of entries is read; a view is prepared if it changed
FILES_S = 5.0  # how often files of client networks are looked at
LIVE: Live = dict.fromkeys(
    ("topology", "zones", "networks", "ttl", "entries_max", "rates", "cookie_secrets", "nsid"), ()
)
"""What may change while the server lives; see farhop.service.assembly.reload."""
WORKERS_S = 5.0  # how long the start waits for the first worker process
FIRST_LOOK_S = 3.0  # how long the first answer waits for the first probes


class DnsServer:
    """One DNS server, assembled."""

    def __init__(
        self,
        config: DnsConfig,
        topology: Topology,
        rng: Random,
        store: Store | None = None,
        publish: Publishing | None = None,
        path: Path | None = None,
    ) -> None:
        """`publish`: called with each view instead of answering from it; returns whether it was published. `path`: the
        file that the configuration is read from again; None: it stays.
        """
        self._publish = publish
        self.waits = True  # for an etcd that does not answer yet; a command that shall end does not
        self.config, self._topology = config, topology
        self.clock, self._rng = Clock(rng), rng
        self._log = logs.Throttled(logs.get("dns"), 10.0, self.clock.now)
        self.metrics = TierMetrics("dns", config.region, config.instance)
        self.law_now = Law(topology)
        self._plans, self._ttls = self._checked(config, topology), config.ttls()
        self._own_secret = Random().randbytes(16)
        self._settings = self._settings_of(config)
        self._stamps = self._files()
        self.entry_health = EntryHealthTracker(config.health_config())
        self.entry_health.know({name: one.region for name, one in topology.entries.items()}, self.clock.now())
        self._follow_store(rng, store, path)
        self._watch_entries(rng)
        # By geography, and as used for answers: corrected by what entries measured.
        self.geography = self.atlas = prepare.atlas(topology, *client_networks.read(config.networks, topology))
        self._measured: Measurements = {}
        self.findings: list[learned.Finding] = []
        self._led_before: dict[str, int] = {}  # under other maps, and where the counters of this one began
        self._led_from: dict[str, int] = {}
        self._last_health: tuple[EntryHealth, ...] = ()
        self._wanted = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._tasks = Tasks()
        self._following_drains: list[asyncio.Task[None]] = []
        self._folder: Path | None = None
        self._counters: Counters | None = None
        self.workers: Workers | None = None
        self.tcp: TcpServer | None = None
        self.port = 0
        self._serial = int(wall().timestamp())
        self.prepared = {"views": 0, "ms": 0.0, "bytes": 0.0}
        self.admin = self._admin_port()
        self._gauges()

    def _follow_store(self, rng: Random, store: Store | None, path: Path | None) -> None:
        """The sources of the law, the map and the configuration: etcd and the file."""
        config, topology = self.config, self._topology
        hubs = store if store is not None else stores.hubs(config, topology)
        keep = stores.keep(config, "dns", rng, self._log)
        self.store = stores.sealed(hubs, config.signing.made(), self.metrics.report_refused, rng, keep)
        self.laws = stores.law_book(config, "dns", self.store, self.law_now, self._adopt, self.metrics, self._log, rng)
        self.reloader = Reloader(
            path,
            config,
            topology,
            LIVE,
            self.laws,
            self._made_ready,
            stores.hubs if store is None else None,
            logs.get("dns"),
        )

    def _watch_entries(self, rng: Random) -> None:
        """The sources of entries' state: etcd, probes and, if configured, their regions' reports."""
        config, topology = self.config, self._topology
        hub = topology.regions[config.region].hub
        self.learned = Learned(config.latencies.learning())
        self.watcher = EntryWatcher(
            self.store, hub, topology, self.entry_health, self.metrics.report_refused, self.clock.now,
            self.learned if config.latencies.follow else None,
        )  # fmt: skip
        self.tls = TlsSetup(TlsManager(logs.get("dns"), wall), self.metrics, self._log)
        self.links = self._region_links(rng) if config.region_links else None
        if self.links is not None:
            self.watcher.links = self.links
        self.probes = Probes(config.probe, self._probed, lambda: rng.uniform(0.8, 1.2))

    def _region_links(self, rng: Random) -> RegionLinks:
        config = self.config
        return RegionLinks(
            config, self.tls.upstream("tier_tls", config.tier_tls), self.watcher.reported,
            self.metrics.report_refused, lambda: rng.uniform(0.8, 1.2),
        )  # fmt: skip

    def _admin_port(self) -> AdminServer:
        config = self.config
        return AdminServer(
            self, self.metrics, Decisions(), self.tls.listener("admin", config.admin),
            config.admin.made(config.trust_domain), lambda: redacted(self.config),
            more=(("GET", "/where", self._where, "read"), ("GET", "/latencies", self._latencies, "read")),
        )  # fmt: skip

    # -- state

    def _adopt(self, law: Law) -> None:
        self.law_now = law
        self._wanted.set()

    def _probed(self, entry: str, good: bool, why: str) -> None:
        self.entry_health.probed(entry, good, why, self.clock.now())

    def _files(self) -> dict[str, tuple[int, int]]:
        """Of each file of client networks, what shows whether it changed."""
        networks = self.config.networks
        paths = [networks.database, *(one.file for one in networks.lists)]
        found = {}
        for path in paths:
            if path is not None and Path(path).exists():
                stat = Path(path).stat()
                found[path] = (stat.st_mtime_ns, stat.st_size)
        return found

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_S)
            stamps = self._files()
            if stamps != self._stamps:
                self._stamps = stamps
                await self._read_networks()

    async def _read_networks(self) -> None:
        config, topology = self.config, self._topology
        try:
            known = await asyncio.to_thread(
                lambda: prepare.atlas(topology, *client_networks.read(config.networks, topology))
            )
            if config is not self.config or topology is not self._topology:  # others came into force, with their files
                return
            self.geography = known
        except ConfigError as error:
            self._log.error("client networks", str(error), problem=f"{error}; those before stay")
            return
        await self._correct_geography()
        self._wanted.set()

    async def _learn(self) -> None:
        while True:
            await asyncio.sleep(self.config.latencies.every_s)
            measured = self.learned.read(self.clock.now())
            if measured != self._measured:
                self._measured = measured
                await self._correct_geography()
                self._wanted.set()

    async def _correct_geography(self) -> None:
        """Apply what entries measured to geography, in a thread."""
        while True:
            known, measured = self.geography, self._measured
            laid = await asyncio.to_thread(
                learned.corrected, known, self._topology, measured, self.config.latencies.learning()
            )
            if known is self.geography and measured is self._measured:  # otherwise one of both changed meanwhile
                self.atlas, self.findings = laid
                return

    def reload(self) -> None:
        """See farhop.service.process.lifecycle.Daemon: all files are read anew."""
        self._tasks.start(self._read_all(), "read the configuration again")

    async def _read_all(self) -> None:
        await self.reloader.reload()
        await self._read_networks()

    def _settings_of(self, config: DnsConfig) -> Settings:
        """The workers' settings besides views. Raises ConfigError."""
        return Settings(
            tuple(config.cookies()) or (self._own_secret,), (config.nsid or config.instance).encode(),
            config.rates.per_s, config.rates.slip, {zone.zone: keys for zone in config.zones if (keys := zone.keys())},
        )  # fmt: skip

    def _checked(self, config: DnsConfig, topology: Topology) -> list[ZonePlan]:
        """The zones, checked against the map. Raises ConfigError."""
        plans = config.plans()
        try:
            zones.check(plans, Law(topology))
            if self._publish is None:
                zones.check_servers(plans)
        except zones.ZoneError as error:
            raise ConfigError("zones", [str(error)]) from None
        return plans

    def _made_ready(self, config: DnsConfig, topology: Topology) -> Callable[[Law], None]:
        """See farhop.service.assembly.reload.Reloader: in a thread, all that follows from a configuration and a map."""
        plans, settings = self._checked(config, topology), self._settings_of(config)
        geography = prepare.atlas(topology, *client_networks.read(config.networks, topology))
        known, findings = learned.corrected(geography, topology, self._measured, config.latencies.learning())

        def put(law: Law) -> None:
            if known.entries != self.atlas.entries:
                self._led_before, self._led_from = self.led_so_far(), self._led_raw(known.entries)
            self.config, self._topology, self.law_now = config, topology, law
            self.geography, self.findings = geography, findings
            self._plans, self._ttls, self.atlas = plans, config.ttls(), known
            self.entry_health.know({name: one.region for name, one in topology.entries.items()}, self.clock.now())
            self.watcher.remap(topology)
            if self._following_drains:
                self._follow_drains()
            self.probes.follow(dict(topology.entries))
            self._wanted.set()
            if settings != self._settings:
                self._settings = settings
                self._tasks.start(self._renew(), "have workers go by other settings")

        return put

    async def _renew(self) -> None:
        """Have all workers use the settings in force, without a pause. One at a time; the last settings win."""
        async with self._renewing:
            if self.workers is None or self.tcp is None:
                return
            settings = self._settings
            answers = await asyncio.to_thread(responder, settings, udp=False)
            answers.tick(wall().timestamp())
            assert self._folder is not None
            view = self._folder / "view"
            if view.exists():
                answers.adopt(*decode(load_view(view)))
            self.tcp.answers = answers
            try:
                await self.workers.renew(settings)
            except WorkerError as error:
                self._log.error("workers", str(error), problem=f"{error}; the old ones go on")

    # -- views

    async def _keep_prepared(self) -> None:
        while True:
            health = self.entry_health.read(self.clock.now())
            if health != self._last_health or self._wanted.is_set():
                self._wanted.clear()
                await self._prepare(health)
            await asyncio.sleep(LOOK_S)

    async def _prepare(self, health: tuple[EntryHealth, ...]) -> None:
        """Prepare a view aside and put it in force, whole."""
        began = self.clock.now()
        self._serial += 1
        law, known, plans, ttls = self.law_now, self.atlas, self._plans, self._ttls
        most, serial = self.config.entries_max, self._serial
        by_resolver = self.config.networks.without_subnet == "resolver"

        def made() -> tuple[Head, list[Table]]:
            return zones.view(plans, law, known, health, ttls, most, serial, by_resolver=by_resolver)

        head, tables = await asyncio.to_thread(made)
        if self._publish is not None:
            if not await self._publish(head, tables):
                self._wanted.set()  # again
            self._last_health = health
            self.prepared["views"] += 1
            return
        assert self._folder is not None
        assert self._counters is not None
        data = await asyncio.to_thread(encode, head, tables)
        path = self._folder / "view"
        await asyncio.to_thread(write, path, data)
        self._counters.raise_version()
        if self.tcp is not None:
            self.tcp.answers.adopt(*decode(load_view(path)))
        self._last_health = health
        self.prepared["views"] += 1
        self.prepared["ms"] = 1e3 * (self.clock.now() - began)
        self.prepared["bytes"] = float(len(data))

    async def _tick(self) -> None:
        """Count rates of the answers by TCP anew, and hand over what was counted."""
        assert self.tcp is not None
        assert self._counters is not None
        while True:
            self.tcp.answers.tick(wall().timestamp())
            self._counters.add(self._rows - 1, self.tcp.answers.counts, self.tcp.answers.led)
            await asyncio.sleep(1.0)

    # -- life

    async def open(self) -> str:
        """See farhop.service.process.lifecycle.Daemon."""
        config = self.config
        self.admin.starting = "starting"
        admin = await self.admin.open(config.admin.host, config.admin.port)
        self.laws.remember()
        if self.waits:
            await opened(self.store, self.admin, logs.get("dns"), self._rng)
        else:
            await self.store.open()
        # Not before: resolvers go to another server at once if nothing listens here, and else only after a timeout.
        tcp = self._bind() if self._publish is None else []
        for name, work in self.watcher.follow():
            self._tasks.start(work, name)
        self._follow_drains()
        self._tasks.start(self.laws.follow(), "watch the law")
        await self.laws.begun()
        self.probes.follow(dict(self._topology.entries))
        await self._first_look()
        await self._prepare(self.entry_health.read(self.clock.now()))
        if self.workers is not None and self.tcp is not None:
            self.workers.open()
            await self.tcp.open(tcp)
            self._tasks.start(self._tick(), "count")
            await until(self.ready, WORKERS_S)
        self._tasks.start(self._keep_prepared(), "prepare the view")
        self._tasks.start(self._watch_files(), "watch the client networks")
        self._tasks.start(self.reloader.keep(), "look at the configuration")
        if config.latencies.follow:
            self._tasks.start(self._learn(), "learn from what entries measured")
        self.tls.open()
        self.admin.starting = ""
        listed = ", ".join(zone.zone for zone in config.zones)
        at = ", ".join(f"{host}:{self.port}" for host in config.listen.hosts)
        if config.publish is not None and self._publish is not None:
            at = f"{config.publish.server}:{config.publish.port}, zone {config.publish.zone}"
        return f"region {config.region}: {listed} on {at}, admin on {config.admin.host}:{admin}"

    def _follow_drains(self) -> None:
        """From the beginning: see EntryWatcher.follow_drains."""
        for task in self._following_drains:
            task.cancel()
        self._following_drains = [self._tasks.start(work, name) for name, work in self.watcher.follow_drains()]

    def _bind(self) -> list[socket]:
        """Take the ports and make what answers on them, which is not started yet. The sockets for TCP."""
        config = self.config
        udp, tcp, self.port = bind(config.listen)
        self._rows = len(udp) + 1
        self._folder = _folder()
        self._counters = Counters.make(self._folder / "counters", self._rows)
        settings = self._settings
        self.workers = Workers(udp, self._folder / "view", self._folder / "counters", settings)
        self.tcp = TcpServer(
            responder(settings, udp=False), config.listen.tcp_connections_max, config.listen.tcp_idle_s
        )
        self.tcp.answers.tick(wall().timestamp())
        return tcp

    async def _first_look(self) -> None:
        """Until every entry was probed once, or for a while."""
        end = self.clock.now() + FIRST_LOOK_S
        while self.clock.now() < end:
            if all(one.why != "not probed yet" for one in self.entry_health.read(self.clock.now())):
                return
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """See farhop.service.process.lifecycle.Daemon."""
        steps = [self._tasks.close, self.probes.close, self.store.close, self.admin.close, self.tls.close]
        if self.links is not None:
            steps.append(self.links.close)
        if self.tcp is not None:
            steps.insert(0, self.tcp.close)
        if self.workers is not None:
            steps.insert(0, self.workers.close)
        await all_of(*steps)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- farhop.service.admin.server.TierAdmin

    def ready(self) -> bool:
        """Whether questions should be sent here."""
        working = self._publish is not None or (self.workers is not None and self.workers.alive > 0)
        return working and self.prepared["views"] > 0

    def notice(self) -> str:
        """What operators should know beside that."""
        now = self.clock.now()
        if self.entry_health.cut_off(now):
            return "no entry answers: the last view holds"
        lost = "; ".join(f"hub {name}: {why}" for name, why in self.watcher.lost.items())
        return f"out of contact: {lost}" if lost else ""

    def status(self) -> dict[str, Any]:
        """The state, JSON-ready."""
        return {
            "tier": "dns",
            "region": self.config.region,
            "instance": self.config.instance,
            "zones": [zone.zone for zone in self.config.zones],
            "port": self.port,
            "law_epoch": self.law_now.epoch,
            "configuration": self.reloader.status(),
            "notice": self.notice(),
            "prepared": self.prepared,
            "regions_by_grpc": self.links.speaking if self.links is not None else 0,
            "workers": self.workers.alive if self.workers is not None else 0,
            "entries": [
                {
                    "entry": one.entry,
                    "region": self._topology.entries[one.entry].region,
                    "state": one.state,
                    "share": one.share,
                    "bias_ms": one.bias_ms,
                    "ttl_s": self._ttls.of(one),
                    "why": one.why,
                }
                for one in self.entry_health.read(self.clock.now())
            ],
        }

    def compose(self, question: Question) -> Request:
        """See TierAdmin: there is no request here."""
        raise ExplainError(f"a DNS server routes no requests ({question.path}); ask /where?client=ADDRESS")

    def explain(self, request: Request, drained: str = "") -> dict[str, Any]:  # noqa: ARG002 - it has no regions to leave
        """See TierAdmin."""
        raise ExplainError(f"a DNS server routes no requests ({request.id}); ask /where?client=ADDRESS")

    def scaling(self) -> dict[str, dict[str, int]]:
        return {}  # no replicas of its own

    def law(self) -> dict[str, Any]:
        """The law in force."""
        return {"epoch": self.law_now.epoch, **document_of(self.law_now.topology)}

    def topology(self) -> dict[str, Any]:
        """The map, with its own law."""
        return {**map_of(self._topology), **document_of(self._topology)}

    async def _where(self, request: web.Request) -> web.Response:
        try:
            found = where(
                request.query.get("client", ""), request.query.get("tenant", ""),
                self.atlas, self.law_now, self.entry_health.read(self.clock.now()), self.config.entries_max,
                self.geography, by_resolver=self.config.networks.without_subnet == "resolver",
            )  # fmt: skip
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response(found)

    async def _latencies(self, _request: web.Request) -> web.Response:
        return web.json_response({"networks": [asdict(one) for one in self.findings]})

    def _gauges(self) -> None:
        gauge, counter = self.metrics.gauge, self.metrics.counter

        def counted(which: str) -> float:
            return 0.0 if self._counters is None else float(self._counters.total(self._rows)[1][which])

        counter("dns_queries", "Queries received.", lambda: counted("queries"))
        counter("dns_events", "Queries, by what happened to them.", self._events, "event")
        counter("dns_led", "Answers by the entry that they name first.", self._led, "target")
        counter("dns_worker_faults", "Questions that met a fault of ours.", self._faults)
        counter("dns_worker_restarts", "Workers that ended and were started again.", self._restarts)
        gauge("dns_entry_share", "Share that an entry takes of the clients nearest to it.", self._shares, "target")
        gauge("dns_view_prepared_ms", "How long the last view took to prepare.", lambda: float(self.prepared["ms"]))
        gauge("dns_networks_learned", "Networks that entries measured.", lambda: float(len(self._measured)))
        gauge("dns_networks_moved", "Of those, how many are led elsewhere than by geography.", self._moved)
        self.laws.observe(self.metrics)
        self.reloader.observe(self.metrics)

    def _moved(self) -> float:
        return float(sum(one.before != one.now for one in self.findings))

    def _events(self) -> dict[str, float]:
        if self._counters is None:
            return {}
        totals = self._counters.total(self._rows)[1]
        return {name: float(total) for name, total in totals.items() if name != "queries"}

    def _faults(self) -> float:
        return 0.0 if self._counters is None else float(self._counters.total(self._rows)[0])

    def _restarts(self) -> float:
        return 0.0 if self.workers is None else float(self.workers.restarts)

    def _led(self) -> dict[str, float]:
        return {name: float(n) for name, n in self.led_so_far().items()}

    def led_so_far(self) -> dict[str, int]:
        """By entry, whatever maps it was in. What a worker still had when a map changed may be counted elsewhere."""
        raw = self._led_raw(self.atlas.entries)
        return self._led_before | {
            name: n - self._led_from.get(name, 0) + self._led_before.get(name, 0) for name, n in raw.items()
        }

    def _led_raw(self, entries: Sequence[str]) -> dict[str, int]:
        return {} if self._counters is None else self._counters.led(self._rows, entries)

    def _shares(self) -> dict[str, float]:
        return {one.entry: one.share for one in self.entry_health.read(self.clock.now())}


def _folder() -> Path:
    """A new folder for views: in memory, where there is such a place."""
    memory = Path("/dev/shm")  # noqa: S108 - see above
    return Path(tempfile.mkdtemp(prefix="farhop-dns-", dir=memory if memory.is_dir() else None))


def run(path: Path) -> None:
    """Run a DNS server from its configuration file. SystemExit(2), after one line, if it cannot start."""

    def make() -> DnsServer:
        config = load(DnsConfig, path)
        logs.configure("dns", config.region, config.instance, config.log_level)
        return DnsServer(config, stores.topology_of(config), Random(), path=path)

    run_process("dns", make)


__all__ = ["DnsServer", "PortTakenError", "run"]
