"""A whole world on this machine: real etcd, both tiers and emulated engines in every region, each its own process.

Used by `farhop up`, the demo and the tests of whole worlds. Traffic between regions crosses an emulated WAN; round-trip
times and engines are sped up alike. Never used by a balancer, and leaves no process behind: children die with their
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import yaml

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.wan.network import Network
from farhop_lab.world.child import Child, ChildError
from farhop_lab.world.collector import Collector
from farhop_lab.world.etcd_cluster import EtcdCluster
from farhop_lab.world.ports import PortsError, free_ports
from farhop_lab.world.world_file import RegionFile, WorldFile
from topology import load as topologies

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from farhop_lab.world.etcd import EmbeddedEtcd

HOST = "127.0.0.1"
ZONE, EU_ENTRY = "entry.example", "eu-entry"
DNS_TTL_S = 5  # the TTL of DNS answers while nothing is uncertain: the least that is allowed
DEMO_KEYS = ("anywhere", "eu-only", "japan-only", "not-us")  # in the shipped world; their keys are sk-farhop-<tenant>


class WorldError(Exception):
    """A world that cannot be run; the text names the remedy."""


class WorldSettings(msgspec.Struct, frozen=True):
    """A world's settings. `engines` are URLs by region; a region without them gets `replicas` emulated ones.

    Every hub of the topology is an etcd of its own, of one member or as many as `members` says; `etcd` is one for all.
    """

    topology: str = "three-regions"
    model: str = "llama-3.1-8b"
    profile: str = "a100"
    replicas: int = 2
    speedup: float = 10.0
    wide: bool = False  # emulated engines write more than ASCII
    engine: str | None = None  # the engine kind that regional balancers are configured with; None: they detect it
    engines: dict[str, list[str]] = {}
    etcd: str | None = None
    members: dict[str, int] = {}
    global_config: dict[str, Any] = {}  # overrides parts of every global balancer's configuration
    regional_config: dict[str, Any] = {}  # likewise of every regional balancer's
    seed: int = 0
    dns: bool = False  # `farhop dns` in addition, and for each region's entry an address of its own on one port
    dns_config: dict[str, Any] = {}  # overrides parts of its configuration
    entry_port: int = 0  # of the first region's entry; the others follow. 0: any free ones


class RegionRun:
    """One region's processes; `engines` are the emulated ones."""

    def __init__(
        self, name: str, entry: int, global_admin: int, regional_admin: int, client: int, entry_host: str = HOST
    ) -> None:
        self.name, self.entry_host = name, entry_host
        self.entry = f"http://{entry_host}:{entry}"
        self.global_admin = f"http://{HOST}:{global_admin}"
        self.regional_admin = f"http://{HOST}:{regional_admin}"
        self.client = f"http://{HOST}:{client}"  # of its regional balancer: the target of redirects
        self.ports = {
            "entry": entry, "global_admin": global_admin, "regional_admin": regional_admin, "client": client
        }  # fmt: skip
        self.engines: list[Child] = []
        self.engine_urls: list[str] = []
        self.regional: Child | None = None
        self.global_: Child | None = None


class World:
    """Start it, use it, stop it. `folder` holds configurations, logs and etcd's data."""

    def __init__(self, settings: WorldSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.collector = Collector()
        self.hubs: dict[str, EtcdCluster] = {}
        self.regions: dict[str, RegionRun] = {}
        self.topology_file = folder / "topology.yaml"
        self.fleet = f"world-{secrets.token_hex(4)}"  # no law of an earlier world is valid in this one
        self.network: Network | None = None
        self.dns: Child | None = None
        self.dns_port = self.dns_admin_port = 0
        self._secret = secrets.token_urlsafe(32)
        self.document: dict[str, Any] = {}  # the topology's

    @property
    def etcd(self) -> EmbeddedEtcd | None:
        """Our etcd, if there is only one."""
        clusters = list(self.hubs.values())
        return clusters[0].members[0] if len(clusters) == 1 and len(clusters[0].members) == 1 else None

    # -- life cycle

    async def __aenter__(self) -> World:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything, in order; returns when every global balancer sees every region. Raises WorldError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            await self.collector.start(HOST)
            self._lay_out()
            assert self.network is not None
            await self.network.start()
            await self._start_etcd()
            # All at once: a balancer finds its engines whenever they start.
            engines = [self.start_engines(name) for name in self.regions]
            dns = [self.start_dns()] if self.settings.dns else []
            await together(*engines, *(self.start_balancers(name) for name in self.regions), *dns)
            await self.wait_until_serving(frozenset(self.regions))
        except (ChildError, PortsError) as error:
            raise WorldError(str(error)) from None

    async def stop(self) -> None:
        """Stop everything, in reverse order."""
        runs = list(self.regions.values())
        if self.dns is not None:
            await self.dns.stop()
        for tier in ("global_", "regional"):
            await asyncio.gather(*(getattr(r, tier).stop() for r in runs if getattr(r, tier) is not None))
        await asyncio.gather(*(engine.stop(1.0) for r in runs for engine in r.engines))
        await asyncio.gather(*(cluster.stop() for cluster in self.hubs.values()))
        if self.network is not None:
            await self.network.close()
        await self.collector.stop()

    # -- parts, also for drills

    async def start_engines(self, region: str) -> None:
        """Start the region's emulated replicas, each a process of its own; none if engines were given."""
        await together(*(self.start_engine(region, i) for i in range(len(self.regions[region].engines))))

    async def start_engine(self, region: str, index: int) -> None:
        """Start one replica; one that ran before comes back on its old port, with an empty cache."""
        await self.regions[region].engines[index].start()

    async def start_balancers(self, region: str) -> None:
        """The region's two balancers."""
        await together(self.start_regional(region), self.start_global(region))

    async def start_regional(self, region: str) -> None:
        """The region's regional balancer."""
        run, profile = self.regions[region], PROFILES[self.settings.profile].scaled(self.settings.speedup)
        options = {} if self.settings.engine is None else {"engine": self.settings.engine}
        replicas = [
            {
                "url": url,
                "name": f"{region}-{index}",
                "models": [self.settings.model],
                "gpu": self.settings.profile,
                "kv_tokens": profile.kv_tokens,
                "prefill_tokens_max": profile.prefill_tokens_per_step,
                "prefill_ms_per_token": profile.prefill_ms_per_token,
                "tpot_ms": profile.step_ms(0, 1),
                **options,
            }
            for index, url in enumerate(run.engine_urls)
        ]
        config = {
            **self._common(region, f"{region}-regional", run.ports["regional_admin"]),
            "tier": {"host": HOST, "port": 0},
            "control": {"host": HOST, "port": 0},
            "client": {"host": HOST, "port": run.ports["client"], "url": run.client},
            "replicas": replicas,
            **self.settings.regional_config,
        }
        run.regional = await self._run_tier("regional", region, config)

    async def start_global(self, region: str) -> None:
        """The region's global balancer."""
        run = self.regions[region]
        assert self.network is not None
        config = {
            **self._common(region, f"{region}-global", run.ports["global_admin"]),
            # Ramp and penalty of the retry guard are sped up like network and engines.
            "spill": {"ramp_per_s": 0.05 * self.settings.speedup, "penalty_ms": 300.0 / self.settings.speedup},
            "proxies": {other: self.network.link(region, other).url for other in self.regions if other != region},
            "listen": {"host": run.entry_host, "port": run.ports["entry"]},
            **self.settings.global_config,
        }
        run.global_ = await self._run_tier("global", region, config)

    async def start_dns(self) -> None:
        """Start the DNS server for entries: names in ZONE that lead to all (`api`) and to those in the EU (`eu`).

        The client network 198.18.N.0/24 is near the Nth region, from 0; this machine, by the resolver here, is near the
        last one.
        """
        first = next(iter(self.regions))
        names = [
            {"name": f"{name}.{ZONE}", "tenant": tenant, "families": ["ipv4"]}
            for name, tenant in (("api", ""), ("eu", EU_ENTRY))
        ]
        near = [{"cidrs": [client_network(at)], "near": name} for at, name in enumerate(self.regions)]
        near.append({"cidrs": ["127.0.0.0/8"], "near": list(self.regions)[-1]})
        common = self._common(first, "dns", self.dns_admin_port)
        config = {
            **{field: value for field, value in common.items() if field not in ("hop", "limits")},
            "listen": {"hosts": [HOST], "port": self.dns_port},
            "zones": [{"zone": ZONE, "servers": [f"ns1.{ZONE}"], "addresses": {f"ns1.{ZONE}": [HOST]}, "names": names}],
            "probe": {"scheme": "http", "every_s": 0.25},
            "ttl": {"least": 1, "most": DNS_TTL_S},
            "ramp_s": 0,
            "networks": {"lists": near},
            **self.settings.dns_config,
        }
        path = self.folder / "dns.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        self.dns = Child("DNS server", ["dns", "--config", str(path)], self._log("dns"), self._environment())
        await self.dns.start()

    async def wait_until_serving(self, regions: frozenset[str], timeout_s: float = 30.0) -> None:
        """Wait until every global balancer has these regions up with a ready replica. Raises WorldError."""
        try:
            async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
                for run in self.regions.values():
                    while not regions <= await serving(session, run.global_admin):
                        await asyncio.sleep(0.05)
        except TimeoutError:
            raise WorldError(f"not every region serves within {timeout_s:g} s; logs are in {self.folder}") from None

    def ended(self) -> dict[str, str]:
        """Processes of this world that have ended, with their exit and their log."""
        children = [
            run for region in self.regions.values() for run in (region.regional, region.global_, *region.engines)
        ]
        children.append(self.dns)
        found = {
            one.name: f"{_how(one.ended)}; its log is {one.log}" for one in children if one and one.ended is not None
        }
        for name, cluster in self.hubs.items():
            for at, member in enumerate(cluster.members):
                if member.ended is not None:
                    which = f"etcd {name}" if len(cluster.members) == 1 else f"etcd {name}/{at}"
                    found[which] = f"{_how(member.ended)}; its log is {member.log}"
        return found

    def describe(self, pid: int, control: tuple[str, str] = ("", "")) -> WorldFile:
        """The world's file for other commands. `control`: the address for faults, and its token."""
        hubs = {name: cluster.endpoints[0] for name, cluster in self.hubs.items()}
        return WorldFile(
            pid=pid,
            speedup=self.settings.speedup,
            topology=str(self.topology_file),
            etcd=next(iter(hubs.values()), self.settings.etcd or ""),
            hubs=hubs if len(hubs) > 1 else {},
            collector="" if exports_elsewhere(os.environ) else self.collector.endpoint,
            model=self.settings.model,
            keys={tenant: f"sk-farhop-{tenant}" for tenant in DEMO_KEYS},
            regions={
                name: RegionFile(
                    entry=run.entry,
                    global_admin=run.global_admin,
                    regional_admin=run.regional_admin,
                    engines=list(run.engine_urls),
                )
                for name, run in self.regions.items()
            },
            emulated=not self.settings.engines,
            control=control[0],
            control_token=control[1],
        )

    # -- details

    def _lay_out(self) -> None:
        """Choose ports and write the world's topology, with round-trip times sped up like its engines."""
        settings = self.settings
        name = settings.topology
        path = Path(name) if name.endswith((".yaml", ".yml")) else topologies.shipped(name)
        topology = topologies.load(path)  # all errors at once, before anything runs
        self.network = Network(topology.rtt, topology.local_rtt_ms, speedup=settings.speedup, seed=settings.seed)
        document: dict[str, Any] = topologies.document(path.read_text(), str(path))
        names = [region["name"] for region in document["regions"]]
        unknown = sorted(set(settings.engines) - set(names))
        if unknown:
            raise WorldError(f"--engine: no region {unknown[0]!r} in the topology; it has {', '.join(names)}")
        ports = iter(free_ports((4 + settings.replicas) * len(names) + 3, HOST))
        self.dns_port, self.dns_admin_port, entry_port = islice(ports, 3)
        for index, region in enumerate(document["regions"]):
            entry, global_admin, regional_admin, client, *engines = islice(ports, 4 + settings.replicas)
            if settings.entry_port:
                entry = settings.entry_port + index
            host = HOST
            if settings.dns:
                entry, host = entry_port, entry_host(index)
            run = RegionRun(region["name"], entry, global_admin, regional_admin, client, host)
            self._lay_out_engines(run, engines)
            self.regions[region["name"]] = run
            region["entry"] = [run.entry]
        document["local_rtt_ms"] = document.get("local_rtt_ms", 1.0) / settings.speedup
        document["rtt_ms"] = {
            a: {b: ms / settings.speedup for b, ms in row.items()} for a, row in document["rtt_ms"].items()
        }
        if settings.dns:
            document["entries"] = [
                {"name": run.name, "region": run.name, "ipv4": [run.entry_host], "port": entry_port}
                for run in self.regions.values()
            ]
            eu = {"processing": {"allow": ["eu"]}, "entry": {"allow": ["eu"]}}
            document["tenants"].append({"name": EU_ENTRY, "residency": eu})
        self.document = document
        hubs = {} if settings.etcd is not None else topology.hubs
        self.hubs = {hub: EtcdCluster(settings.members.get(hub, 1), self.folder / f"etcd-{hub}") for hub in hubs}

    def _lay_out_engines(self, run: RegionRun, ports: list[int]) -> None:
        """The engines given for the region, or emulated ones on these ports."""
        settings = self.settings
        run.engine_urls = list(settings.engines.get(run.name, [f"http://{HOST}:{port}" for port in ports]))
        for index, port in enumerate(ports) if run.name not in settings.engines else ():
            arguments = ["engine", "--host", HOST, "--port", str(port), "--model", settings.model]
            arguments += ["--profile", settings.profile, "--speedup", str(settings.speedup)]
            arguments += ["--wide"] if settings.wide else []
            log = self._log(f"{run.name}-engine-{index}")
            run.engines.append(Child(f"engine {run.name}/{index}", arguments, log, self._environment()))

    async def _start_etcd(self) -> None:
        """Start every hub; their endpoints are in the topology's file, which balancers read."""
        await together(*(cluster.start() for cluster in self.hubs.values()))
        if self.hubs:
            self.document["hubs"] = {name: cluster.endpoints for name, cluster in self.hubs.items()}
        self.topology_file.write_text(yaml.safe_dump(self.document, sort_keys=False))

    def _common(self, region: str, instance: str, admin_port: int) -> dict[str, Any]:
        return {
            "region": region,
            "instance": instance,
            "topology": str(self.topology_file),
            "admin": {"host": HOST, "port": admin_port},
            "etcd": {"endpoints": [self.settings.etcd]} if self.settings.etcd is not None else {},
            "hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"},
            "fleet": self.fleet,
            "state_dir": str(self.folder / "state"),
            "limits": {"drain_s": 2.0},
        }

    async def _run_tier(self, tier: str, region: str, config: dict[str, Any]) -> Child:
        path = self.folder / f"{region}-{tier}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        log = self._log(f"{region}-{tier}")
        child = Child(f"{tier} balancer of {region}", [tier, "--config", str(path)], log, self._environment())
        await child.start()
        return child

    def _environment(self) -> dict[str, str]:
        return {
            "FARHOP_HOP_KEY": self._secret,
            **telemetry(os.environ, self.collector.endpoint),
            # All use plain HTTP on this machine, and to load its certificates would cost each 30 ms of CPU.
            "SSL_CERT_FILE": os.devnull,
        }

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"has ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"


ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def telemetry(environ: Mapping[str, str], endpoint: str) -> dict[str, str]:
    """Where the processes of a world send their spans: to its own collector, unless the user's environment says
    otherwise. OTEL_* variables that are set there are kept.
    """
    ours = {"OTEL_TRACES_SAMPLER": "parentbased_always_on", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    if not exports_elsewhere(environ):
        ours |= {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    return {name: value for name, value in ours.items() if name not in environ}


def exports_elsewhere(environ: Mapping[str, str]) -> str:
    """Where the user's own environment sends spans; "" if it does not say."""
    return next((environ[name] for name in ENDPOINTS if environ.get(name)), "")


def entry_host(index: int) -> str:
    """The loopback address of a region's entry, if each has its own; Linux has all of 127/8."""
    return f"127.77.{index // 250}.{index % 250 + 1}"


def client_network(index: int) -> str:
    """A client network that DNS takes as near the region of this number."""
    return f"198.18.{index}.0/24"


def has_entry_hosts() -> bool:
    """Whether this machine has addresses for entries of their own."""
    with contextlib.suppress(OSError), socket.socket() as one:
        one.bind((entry_host(0), 0))
        return True
    return False


async def together(*starts: Coroutine[Any, Any, None]) -> None:
    """Run them at once. The first that fails cancels the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def serving(session: aiohttp.ClientSession, admin: str) -> set[str]:
    """The regions that a global balancer would choose: up, with a ready replica of some model."""
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with session.get(f"{admin}/status") as answer:
            status = await answer.json()
            return {
                region["region"]
                for region in status["regions"]
                if region["state"] == "up"
                and any(m["replicas_ready"] for i in region["instances"] for m in i["models"].values())
            }
    return set()
