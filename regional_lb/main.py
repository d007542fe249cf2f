"""Assembles a regional balancer from its configuration: the one place here that knows the clock, chance and sockets.

Order of starting: replicas are watched, the region's other balancers tell what they know, clients are let in, the world
is told. Of stopping: peers and the world are told, no new connections, requests under way finish, everything closes.
"""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
from farhop_wire import peers_pb2_grpc, region_pb2_grpc

from farhop.balance.health import HealthConfig, Mode
from farhop.balance.limits import ByteBudget, SlotLimit
from farhop.balance.machine import LawChanged
from farhop.identity.hop import HopVerifier
from farhop.identity.passes import PassVerifier, holder
from farhop.relay.listener import Listener, PortTakenError
from farhop.relay.relay import Relay
from farhop.shell import wiring
from farhop.shell.admin import Admin
from farhop.shell.callers import callers_of
from farhop.shell.certificates import Cabinet
from farhop.shell.clock import Clock, wall
from farhop.shell.config import load
from farhop.shell.decisions import Decisions
from farhop.shell.door import Door
from farhop.shell.keeper import KeyKeeper
from farhop.shell.lag import LoopLag
from farhop.shell.large import LargeBodies
from farhop.shell.marks import MarkReader
from farhop.shell.observe import Observer
from farhop.shell.process import run as run_process
from farhop.shell.session import SessionReader
from farhop.shell.tasks import Tasks, all_of
from farhop.shell.tokens import Files, Tokenizers
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.spans import Tracing
from regional_lb import overrides
from regional_lb.admission import Foreign
from regional_lb.config import RegionalConfig
from regional_lb.discovery import Discovery
from regional_lb.flow import FlowConfig, RegionalFlow
from regional_lb.passes import PassKeeper
from regional_lb.peers.peers import Peers
from regional_lb.policy import Choice, Policies
from regional_lb.report import Reporter
from regional_lb.serve import HopKeeper, PickReasons, RegionalDesk, RegionalTier
from regional_lb.split import Splits, terms_said
from regional_lb.watch import Watcher
from topology.law import Law

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.shell.certificates import Certificates
    from farhop.shell.config import Listen
    from farhop.store.contract import Store
    from regional_lb.config import ReplicaConfig
    from regional_lb.kv.events import KvListener
    from topology.model import Topology

_CONTROL = (
    # By default gRPC shares a port with whoever else listens there: two balancers would each get half of the pings.
    ("grpc.so_reuseport", 0),
    # Global balancers ping an idle channel, too: only so do they notice a path that swallows everything.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # And a global balancer behind such a path must not hold its stream here for hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)


FOUND_EXPECTED = 256  # replicas that discovery may bring before their probes take descriptors from clients' share


class RegionalBalancer:
    """One regional balancer, assembled."""

    def __init__(self, config: RegionalConfig, topology: Topology, rng: Random, store: Store | None = None) -> None:
        self.config, self.topology = config, topology
        self.clock = Clock(rng)
        log = logs.Throttled(logs.get("regional"), 10.0, self.clock.now)
        self.metrics = TierMetrics("regional", config.region, config.instance)
        self.decisions = Decisions()
        self.tracing = Tracing("farhop-regional", config.region, config.instance)
        for problem in self.tracing.problems:
            log.warning("telemetry", problem, problem=problem)
        queue = config.queue
        flow_config = FlowConfig(
            config.region,
            config.instance,
            queue_requests_max=queue.requests_max,
            queue_tokens_max=queue.tokens_max,
            queue_wait_s=queue.wait_s,
            queue_stands_s=queue.stands_s,
            queue_standing_wait_s=queue.standing_wait_s,
            starvation_s=queue.starvation_s,
            health=_health(config),
            foreign=Foreign(**config.foreign.model_dump()),
        )
        chosen = {"": config.policy, **config.policies}
        policies = Policies({model: Choice(**policy.model_dump()) for model, policy in chosen.items()})
        splits = Splits({model: terms_said(split) for model, split in config.splits.items()})
        self.flow = RegionalFlow(flow_config, Law(topology), rng, self._weight, policies, splits)
        self.observer = Observer(
            "farhop.regional", "farhop.regional.pick", self.tracing, self.metrics, self.decisions, self.clock, rng,
            PickReasons(), config.limits.traced_per_s_max,
        )  # fmt: skip
        self.budget, self.requests = ByteBudget(config.limits.buffered_bytes_max), SlotLimit(config.limits.requests_max)
        self.lag = LoopLag()
        engine_key = config.engine_key.get_secret_value() if config.engine_key else None
        tier = RegionalTier(self.observer, log, config.region, engine_key)
        self.secrecy = wiring.Secrecy(Cabinet(logs.get("regional"), wall), self.metrics, log)
        engines = self.secrecy.upstream("engine_tls", config.engine_tls)
        pool = self.secrecy.pool(config.limits, engines)
        self._log, self._slots = log, wiring.slots(aside=_descriptors(config))
        self.relay = Relay(
            b"regional", self.flow, tier, pool, self.clock.now, upstream_is_tier=False, budget=self.budget
        )
        self._incarnation = time.time_ns() // 1_000_000
        self._doors(rng)
        self._eyes(rng, engines, store)
        self.desk = RegionalDesk(
            config.instance, self.flow, self.keeper, self.key_door, self.clock, self.overrides, self.peers, self.laws
        )
        self.desk.newest_epoch = lambda: self.hop_keeper.newest_epoch
        self.desk.origins = self._origins
        hub = topology.regions[config.region].hub
        self.desk.kept = lambda: wiring.kept(self.store, hub)
        self.admin = Admin(self.desk, self.metrics, self.decisions, self.secrecy.listener("admin", config.admin))
        self.control: grpc.aio.Server | None = None
        self.reporter: Reporter | None = None
        self._gauges()

    def _eyes(self, rng: Random, engines: Certificates | None, store: Store | None) -> None:
        """What looks at replicas, at the store and at the region's other balancers, and tells the machine."""
        config = self.config
        self.watcher = Watcher(
            config, self.relay.react, self.metrics.report_refused, self.clock.now, rng,
            wiring.context_of(engines), self.secrecy.trouble,
            grpc.ssl_channel_credentials if engines is None else lambda: engines.material.channel(),
            self.flow.standing.answered_at, self._works_on, self._say, self._hear,
        )  # fmt: skip
        self.kv_listener: KvListener | None = None
        hubs = store if store is not None else wiring.home_hubs(config, self.topology, config.remote_hub)
        keep = wiring.keep(config, "regional", rng, self._log)
        self.store = wiring.sealed(hubs, config.signing.made(), self.metrics.report_refused, rng, keep)
        self.laws = wiring.law_book(
            config, "regional", self.store, self.flow.law, self._adopt, self.metrics, self._log, rng
        )
        followed = (self.store, config.region, self.relay.react, self.metrics.report_refused)
        self.overrides = (overrides.policies(*followed), overrides.splits(*followed))
        self.discovery = Discovery(
            config, self.store, self.watcher.announce, self.metrics.report_refused, self._say, rng
        )
        self._tasks = Tasks()
        assert self.flow.shares is not None  # it has a name
        self.callers = callers_of(config.control, config.trust_domain)
        self.peers = Peers(
            config, self.flow, self.flow.shares, self.store, self.relay.react, self.metrics.report_refused,
            self.clock.now, rng, self._incarnation, self.secrecy.upstream("peers.tls", config.peers.tls),
            self.secrecy.trouble, self.laws, self.callers,
        )  # fmt: skip

    def _adopt(self, law: Law) -> None:
        self.relay.react(LawChanged(law))

    def _origins(self) -> dict[str, Any]:
        hub = self.topology.regions[self.config.region].hub
        published = {} if self.reporter is None else self.reporter.published(hub)
        return {**self.discovery.told(), "hubs": [{"hub": name, "trouble": why} for name, why in published.items()]}

    def _weight(self, tenant: str) -> float:
        known = self.flow.law.topology.tenants.get(tenant)
        return known.weight if known is not None else 1.0

    def _works_on(self, replica: str) -> int:
        return self.flow.ledger.load(replica).in_flight

    def _say(self, whom: str, problem: str) -> None:
        self._log.warning("replicas", f"{whom}: {problem}", source=whom, problem=problem)

    def _doors(self, rng: Random) -> None:
        config, limits = self.config, wiring.inbound(self.config.limits)
        verifier = HopVerifier(config.hop.secrets(), config.region)
        above = callers_of(config.tier, config.trust_domain)
        self.hop_keeper = HopKeeper(verifier, self.flow, self.clock, names_body=not above.mutual)
        policies, splits = self.flow.policies, self.flow.splits
        session = SessionReader(
            **config.session.model_dump(), wanted=lambda: splits.wants_session or policies.want_session()
        )
        marks = MarkReader(splits)
        self.tokenizers = _tokenizers(config)
        self.guard, self.large = config.requests.guard(), LargeBodies()
        common = (self.observer, self.clock, rng, session, marks, self.tokenizers, None, self.guard, self.large)
        self.hop_door = Door(self.hop_keeper, *common, to_engines=True)
        self.keeper = KeyKeeper(config.region, lambda: self.flow.law, self._offered, config.limits.request_s)
        self.observer.may_record = self.keeper.recorded
        passes = PassVerifier(config.hop.secrets(), config.region, holder(config.instance, self._incarnation))
        pass_keeper = PassKeeper(self.keeper, passes, self.flow, self.clock)
        self.key_door = Door(pass_keeper, *common, to_engines=True)
        self.hop_door.relay = self.key_door.relay = self.relay
        self.tier_listener = Listener(
            "tier", self.hop_door, limits, self.budget, self._slots, self.requests, is_hop=True,
            tls=self.secrecy.listener("tier", config.tier, partial(above.admits, "global") if above.mutual else None),
        )  # fmt: skip
        self.client_listener = Listener(
            "client", self.key_door, limits, self.budget, self._slots, self.requests,
            tls=self.secrecy.listener("client", config.client),
        )  # fmt: skip
        self.control_certificates = self.secrecy.listened("control", config.control)

    def _offered(self, regions: frozenset[str]) -> list[str]:
        return sorted(self.flow.view.by_model) if self.config.region in regions else []

    def _gauges(self) -> None:
        flow, gauge = self.flow, self.metrics.gauge
        gauge("queued_requests", "Requests that wait here.", lambda: float(len(flow.queue)))
        gauge("queued_tokens", "Prompt tokens that wait here.", lambda: flow.queue.tokens)
        gauge("trie_nodes", "Nodes of the prefix trie.", lambda: float(flow.trie.nodes))
        gauge("peers", "Other balancers of the region whose stream is open.", lambda: float(self.peers.up))
        gauge("peer_age_seconds", "Since each of them last spoke to us.", self.peers.ages_s, "peer")
        gauge("kv_blocks", "Blocks of KV cache that replicas told of.", lambda: float(len(flow.blocks)))
        gauge("kv_exact_replicas", "Replicas that told all they cache.", lambda: float(flow.blocks.exact))
        gauge("kv_blocks_ignored", "Blocks told of that made no sense, by why.", lambda: flow.blocks.ignored, "reason")
        if (tokenizers := self.tokenizers) is not None:
            gauge("tokenized_prompts", "Prompts read as tokens.", lambda: float(tokenizers.prompts))
            gauge("untokenized_prompts", "Prompts that could not be, by why.", lambda: tokenizers.unread, "reason")
            gauge("miscounted_prompts", "Prompts of which an engine counts other tokens.", lambda: flow.miscounts)
        gauge("replica_in_flight", "Requests at each replica.", self._in_flight, "replica")
        gauge("replica_kv_share", "Of its KV cache, what is in use, in its own words.", self._kv_shares, "replica")
        gauge("replica_share", "Of its slots, what each replica may use; 0: none.", self._shares, "replica")
        gauge("replicas", "Replicas by state.", lambda: flow.standing.states(self.clock.now()), "state")
        gauge("replica_ejections", "Ejections since the start, by what for.", flow.standing.ejections.copy, "reason")
        gauge("models_by_mode", "Models by how their replicas may be used.", self._modes, "mode")
        self.laws.observe(self.metrics)
        wiring.observe(
            self.metrics,
            self.budget,
            self.requests,
            self.relay.pool,
            self.lag,
            self.guard,
            self.large,
            self.tier_listener,
            self.client_listener,
        )

    def _in_flight(self) -> dict[str, float]:
        return {name: float(self.flow.ledger.load(name).in_flight) for name in self.flow.view.replicas}

    def _kv_shares(self) -> dict[str, float]:
        told = ((name, replica.sample) for name, replica in self.flow.view.replicas.items())
        return {name: sample.kv_usage for name, sample in told if sample is not None and sample.kv_usage is not None}

    def _shares(self) -> dict[str, float]:
        now, standing = self.clock.now(), self.flow.standing
        return {name: standing.offered(name, now) for name in standing.health}

    def _modes(self) -> dict[str, float]:
        now = self.clock.now()
        modes = [self.flow.outlook.mode(model, now) for model in self.flow.view.by_model]
        return {mode: float(modes.count(mode)) for mode in (Mode.NORMAL, Mode.PANIC, Mode.ALL_DOWN)}

    async def open(self) -> str:
        """See shell.process.Balancer."""
        config = self.config
        self.laws.remember()
        await self.store.open()
        await self.watcher.open()
        self.discovery.open()
        self._tasks.start(self.laws.follow(), "watch the law")
        for followed in self.overrides:
            self._tasks.start(followed.follow(), f"watch the {followed.what}")
        await self.laws.begun()
        tier = await self.tier_listener.open(config.tier.host, config.tier.port)
        admin = await self.admin.open(config.admin.host, config.admin.port)
        self.control = grpc.aio.server(options=(*_CONTROL, *_handshake_limit(config.control)))
        control = _listen(self.control, config.control.host, config.control.port, self.control_certificates)
        addresses = tuple(f"{config.advertise}:{port}" for port in (tier, control, admin))
        assert len(addresses) == 3
        self.reporter = Reporter(
            config.region,
            config.instance,
            addresses,
            self.flow,
            self.clock.now,
            incarnation=self._incarnation,
            prefix_nodes_per_s=config.prefix_nodes_per_s,
            client_url=(config.client.url or "") if config.client is not None else "",
            quiet_s=self.observer.quiet_s,
            laws=self.laws,
            callers=self.callers,
            signer=config.report_signer,
        )
        region_pb2_grpc.add_RegionServicer_to_server(self.reporter, self.control)
        self.reporter.hold()
        peers_pb2_grpc.add_PeersServicer_to_server(self.peers.feed, self.control)
        await self.control.start()
        await self.peers.open(addresses[1])
        client = ""
        if config.client is not None:
            port = await wiring.open_entry(self.client_listener, config.client, self.desk.ready)
            client = f", clients on {config.client.host}:{port}"
        await self.reporter.open(self.store)
        self.secrecy.open()
        self.lag.open()
        wiring.check_descriptors(config.limits, self._slots, self._log)
        return (
            f"region {config.region}: tier on {config.tier.host}:{tier}{client}, admin on {config.admin.host}:{admin}"
        )

    async def close(self) -> None:
        """See shell.process.Balancer."""
        self.desk.stopping = True
        await all_of(
            self._withdraw,
            self._drain,
            self.discovery.close,
            self.peers.close,
            self.watcher.close,
            self._deafen,
            self._tasks.close,
            self.relay.close,
            self._hang_up,
            self.store.close,
            self.admin.close,
            self.secrecy.close,
            self.lag.close,
            lambda: self.tracing.close(2.0),
        )

    def _hear(self, watched: Mapping[str, ReplicaConfig]) -> None:
        """Listen to the KV events of those who have them."""
        if self.kv_listener is None:
            if not any(replica.kv_events for replica in watched.values()):
                return
            from regional_lb.kv.events import KvListener  # brings ZeroMQ: only where it is wanted

            self.kv_listener = KvListener(self.relay.react, self.metrics.report_refused, self.clock.now)
        self.kv_listener.listen(watched.values())

    async def _deafen(self) -> None:
        if self.kv_listener is not None:
            await self.kv_listener.close()
        if self.tokenizers is not None:
            self.tokenizers.close()
        self.large.close()

    async def _withdraw(self) -> None:
        self.peers.withdraw()
        if self.reporter is not None:
            await self.reporter.withdraw()

    async def _drain(self) -> None:
        drain_s = self.config.limits.drain_s
        await asyncio.gather(self.tier_listener.close(drain_s), self.client_listener.close(drain_s))

    async def _hang_up(self) -> None:
        if self.control is not None:
            await self.control.stop(0.5)


def _health(config: RegionalConfig) -> HealthConfig:
    """Health's thresholds from the two parts of the file that say them."""
    watch, health = config.watch, config.health
    return HealthConfig(
        rise=watch.rise,
        fall=watch.fall,
        streak=health.streak,
        eject_s=health.eject_s,
        slow_start_s=health.slow_start_s,
        eject_share_max=health.eject_share_max,
        panic_share=health.panic_share,
        outlier_factor=health.outlier_factor,
    )


def _tokenizers(config: RegionalConfig) -> Tokenizers | None:
    """Those configured. Raises ConfigError."""
    files = {model: Files(named.file, named.template or "") for model, named in config.tokenizer_of().items()}
    return Tokenizers(files, wall) if files else None


def _descriptors(config: RegionalConfig) -> int:
    """What it takes beside the relay: a probe, a scrape, a token of each replica, and its sockets of KV events."""
    expected = len(config.replicas) + (FOUND_EXPECTED if config.discovery else 0)
    return 3 * expected + 6 * sum(len(replica.kv_sources) for replica in config.replicas)


def _handshake_limit(control: Listen) -> tuple[tuple[str, int], ...]:
    return () if control.tls is None else (("grpc.server_handshake_timeout_ms", int(1e3 * control.tls.handshake_s)),)


def _listen(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None) -> int:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass  # gRPC would say why it cannot, too, but in lines of its own on stderr and not to us
        if certificates is not None:
            return server.add_secure_port(where, certificates.server_credentials())
        return server.add_insecure_port(where)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is taken"
        raise PortTakenError(f"control: cannot listen on {where}: {reason}; choose another port") from None


def run(path: Path) -> None:
    """Run a regional balancer from its configuration file. SystemExit(2), after one line, if it cannot start."""

    def make() -> RegionalBalancer:
        config = load(RegionalConfig, path)
        logs.configure("regional", config.region, config.instance, config.log_level)
        return RegionalBalancer(config, wiring.world(config), Random())

    run_process("regional", make)
