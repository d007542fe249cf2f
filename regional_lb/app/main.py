"""Assembles a regional balancer from its configuration: makes the clock and the random generator, and hands them on.
Never decides about a request: `regional_lb.scheduler.flow` does.

Order of starting: watch the replicas, learn from the region's other balancers, admit clients, publish reports. Order of
stopping: tell peers and global balancers, refuse new connections, finish requests under way, close everything.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from farhop.balance.machine import LawChanged
from farhop.config import ConfigError, load
from farhop.relay.relay import Relay
from farhop.service.accounts.record_writer import RecordWriter
from farhop.service.admin.balancer_admin import ProcessStatus
from farhop.service.admin.server import AdminServer
from farhop.service.assembly import dataplane, stores
from farhop.service.assembly.dataplane import DataPlane
from farhop.service.assembly.identities import Identities
from farhop.service.assembly.instruments import Instruments
from farhop.service.assembly.reload import LIVE as LIVE_OF_BOTH
from farhop.service.assembly.reload import Reloader
from farhop.service.assembly.store_opening import opened
from farhop.service.authentication.keybook import KeyBook
from farhop.service.limits.book import LimitBook
from farhop.service.limits.limiter import Limiter
from farhop.service.process.clock import Clock
from farhop.service.process.lifecycle import run as run_process
from farhop.service.process.tasks import Tasks, all_of
from farhop.telemetry import logs
from regional_lb.app import control_port, gauges, overrides
from regional_lb.app.admin import RegionalAdmin
from regional_lb.app.config import RegionalConfig
from regional_lb.app.listeners import Listeners
from regional_lb.app.mesh import Mesh
from regional_lb.app.model_names import ModelNames
from regional_lb.app.refusals import RefusalBook
from regional_lb.app.serve import PickReasons, RegionalTier
from regional_lb.engines.discovery import Discovery
from regional_lb.engines.kv.events import KvListener
from regional_lb.engines.watch import ReplicaWatcher
from regional_lb.scheduler.flow import FlowConfig, Reconfigured, RegionalFlow
from regional_lb.scheduler.overdue import CHECK_S, OverdueCheckDue
from regional_lb.scheduler.policy import Policies
from regional_lb.scheduler.split import Splits
from topology.law import Law, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.balance.machine import Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest
    from farhop.store.contract import Store
    from farhop.store.etcd_settings import EtcdSettings
    from regional_lb.engines.config import ReplicaConfig
    from regional_lb.scheduler.pick import Pick
    from topology.model import Topology

# What may change while it lives. What refers to the replicas of the file goes with them.
LIVE = LIVE_OF_BOTH | {
    "policy": (), "policies": (), "scaling": (), "scalings": (), "splits": (), "routes": (), "queue": (), "foreign": (),
    "replicas": ("discovery",),
}  # fmt: skip
FOUND_EXPECTED = 256  # replicas that discovery may bring before their probes take descriptors from clients' share


class RegionalBalancer:
    """One regional balancer, assembled from its parts."""

    def __init__(
        self,
        config: RegionalConfig,
        topology: Topology,
        rng: Random,
        store: Store | None = None,
        path: Path | None = None,
    ) -> None:
        """`path`: the configuration file, read again on a reload; None: reloads are not possible."""
        self.config, self.topology = config, topology
        self.clock, self._rng = Clock(rng), rng
        self.incarnation = time.time_ns() // 1_000_000  # distinguishes this process from earlier ones of its name
        self.instruments = instruments = Instruments("regional", "pick", config, self.clock, rng, PickReasons())
        self.metrics, self.decisions = instruments.metrics, instruments.decisions
        self.telemetry, self._log = instruments.telemetry, instruments.log
        policies, splits = Policies({"": config.policy, **config.policies}), Splits(config.splits)
        self.flow = RegionalFlow(_flow_config(config), Law(topology), rng, self._weight, policies, splits)
        self._data_plane()
        self.listeners = Listeners(
            config, self.flow, self.relay, self.plane, instruments, self.clock, rng, incarnation=self.incarnation,
            ready=lambda: self.tier_admin.ready(),
        )  # fmt: skip
        self._watch_replicas(rng)
        self._follow_store(rng, store)
        self._discover(rng)
        self._tasks = Tasks()
        self.limits = LimitBook(self.store, self.metrics.report_refused)
        self.mesh = Mesh(
            config, self.flow, self.plane, instruments, self.store, topology.regions[config.region].hub, laws=self.laws,
            limits=self.limits, react=self.relay.react, clock=self.clock, rng=rng, incarnation=self.incarnation,
        )  # fmt: skip
        self._limit_tenants()
        self.reloader = Reloader(
            path,
            config,
            topology,
            LIVE,
            self.laws,
            self._prepared,
            _clusters if store is None else None,
            logs.get("regional"),
        )
        self._accounting()
        self._administration()
        self._gauges()

    def _data_plane(self) -> None:
        """Build the data plane: what requests pass through on their way to engines."""
        config, aside = self.config, _descriptors(self.config)
        self.plane = plane = DataPlane(config, self.instruments, "engine_tls", config.engine_tls, aside)
        engine_key = config.engine_key.get_secret_value() if config.engine_key else None
        self.relay = Relay(
            b"regional",
            self.flow,
            RegionalTier(self.telemetry, self._log, config.region, engine_key),
            plane.pool,
            self.clock.now,
            upstream_is_tier=False,
            budget=plane.budget,
            asks_load=config.watch.orca,
            resumption=dataplane.resumption(
                config.resume, lambda: self.flow.law, self.metrics, self._context_tokens, self._writes_on
            ),
        )

    def _writes_on(self, replica: str) -> bool:
        """See Resumption."""
        known = self.flow.replicas.view.replicas.get(replica)
        return known is not None and bool(known.writes_on)

    def _context_tokens(self, replica: str, model: str) -> int | None:
        """See Resumption."""
        known = self.flow.replicas.view.replicas.get(replica)
        if known is None or not known.token_ids:
            return None
        facts = known.facts.get(model)
        return facts.max_model_len if facts is not None else 0

    def _accounting(self) -> None:
        """Build the usage and audit records, as far as they are configured."""
        self.accounts: RecordWriter | None = None
        if self.config.usage is None and self.config.audit is None:
            return
        self.accounts = RecordWriter(
            self.config, law=lambda: self.flow.law, gpu_ms=self._gpu_ms, version=_version, judged=self._judged,
            clock=self.clock, metrics=self.metrics, log=self._log,
        )  # fmt: skip
        self.telemetry.accounts = self.accounts
        self.limiter.go_by(self.accounts.price_file, self.clock.wall_s)
        if (book := self.accounts.price_file) is not None:
            self.model_names.prices = lambda: book.prices
        self.listeners.gate(self.accounts.refusal)

    def _judged(self, active: ActiveRequest) -> tuple[int, frozenset[str] | None]:
        """The epoch that it was forwarded under, and the regions that the tier above allowed."""
        return active.context.law_epoch or self.flow.law.epoch, active.request.lawful

    def _gpu_ms(self, active: ActiveRequest, usage: Usage) -> float | None:
        """What a request took of its replica's GPU: its prompt's prefill, and a slot's share of each step."""
        pick: Pick | None = active.reasons
        chosen = pick.chosen if pick is not None else None
        replica = self.flow.replicas.view.replicas.get(chosen.replica) if chosen is not None else None
        if chosen is None or replica is None:
            return None
        computed = usage.prompt_tokens - (usage.cached_tokens or 0)
        step_ms = chosen.tpot_ms / max(1, replica.slots)
        return round(computed * chosen.prefill_ms_per_token + usage.completion_tokens * step_ms, 3)

    def _administration(self) -> None:
        """The admin port: what operators see, and may do."""
        config = self.config
        hub = self.topology.regions[config.region].hub
        self.tier_admin = RegionalAdmin(
            config.instance,
            flow=self.flow,
            authenticator=self.listeners.authenticator,
            ingress=self.listeners.client_ingress,
            clock=self.clock,
            overrides=self.overrides,
            peers=self.mesh.peers,
            laws=self.laws,
            process=ProcessStatus(
                configuration=self.reloader.status,
                disk_caches=lambda: stores.disk_caches(self.store, hub),
                ignored=lambda: stores.ignored(self.store, hub),
                keys=self.identities.status,
                limits=lambda: {**self.limiter.status(), "root": self.mesh.limit_root.status()},
                accounts=dict if self.accounts is None else self.accounts.status,
            ),
            problems=self.watcher.problems,
            origins=self._origins,
            newest_epoch=lambda: self.listeners.hop_authenticator.newest_epoch,
        )
        stores.observe(self.metrics, self.store, hub)
        self.admin = AdminServer(
            self.tier_admin, self.metrics, self.decisions, self.plane.tls.listener("admin", config.admin),
            config.admin.made(config.trust_domain),
            acted=None if self.accounts is None else self.accounts.acted,
            more=(("GET", "/record", self.instruments.recorder.stream, "read"),),
        )  # fmt: skip
        self.admin.show(lambda: self.flow.law, self.store)

    def _watch_replicas(self, rng: Random) -> None:
        """Build what watches replicas, and feeds the state machine. `_discover` finds the replicas."""
        config, plane = self.config, self.plane
        engines = plane.certificates
        self.watcher = ReplicaWatcher(
            config,
            react=self.relay.react,
            refused=self.metrics.report_refused,
            clock=self.clock.now,
            rng=rng,
            context=dataplane.context_of(engines),
            trouble=plane.tls.trouble,
            credentials=grpc.ssl_channel_credentials if engines is None else lambda: engines.material.channel(),
            answered_at=self.flow.replicas.health_tracker.answered_at,
            in_flight=self._in_flight_at,
            models_ruled=lambda: bool(self.flow.law.bound_models),
            warn=self._warn,
            watched=self._listen_to_kv_events,
        )
        self.flow.replicas.recheck_engine = self._recheck
        self.kv_listener: KvListener | None = None

    def _recheck(self, name: str, reason: Outcome) -> None:
        asyncio.get_running_loop().call_soon(self.watcher.recheck, name, reason)  # the machine is amid an event now

    def _follow_store(self, rng: Random, store: Store | None) -> None:
        """Build what follows etcd: the law, overrides, model names, keys."""
        config = self.config
        hubs = store if store is not None else stores.home_hubs(config, self.topology, config.remote_hub)
        keep = stores.keep(config, "regional", rng, self._log)
        self.store = stores.sealed(hubs, config.signing.made(), self.metrics.report_refused, rng, keep)
        self.laws = stores.law_book(
            config, "regional", self.store, self.flow.law, self._adopt, self.metrics, self._log, rng
        )
        followed = (self.store, config.region, self.relay.react, self.metrics.report_refused)
        refusals = RefusalBook(*followed, self.clock.now)
        self.model_names = ModelNames(
            self.store, self.flow, config.routes, self.clock, rng, self.metrics.report_refused, self._named
        )  # fmt: skip
        self.overrides = (overrides.policies(*followed), overrides.splits(*followed), refusals, self.model_names)
        self.keys = KeyBook(self.store, self.metrics.report_refused)
        self.identities = Identities(config.identity, self.keys, self.plane.tls, self.clock, self._log)
        self.identities.let_in(self.listeners.authenticator, self.listeners.client_ingress)

    def _limit_tenants(self) -> None:
        """Build tenants' limits, whose units are borrowed."""
        self.limiter = self.listeners.client_ingress.limits = Limiter(
            self.limits, self.store, f"regional {self.config.region}/{self.config.instance}", "", self.mesh.borrow,
            self.clock.now, self.metrics.report_refused, self.config.region, self.config.identity.salt,
            self._may_know,
        )  # fmt: skip
        self.limiter.observe(self.metrics)

    def _may_know(self, request: Request, region: str) -> bool:
        """Whether the law lets records of a request be kept in this region."""
        return region in self.flow.law.request_verdict(request, Scope.LOGGING).lawful

    def _discover(self, rng: Random) -> None:
        """Build the discovery of replicas."""
        self.discovery = Discovery(
            self.config, self.store, self.watcher.announce, self.metrics.report_refused, self._warn, rng
        )
        self.listeners.prioritise(self.discovery.objective)

    def _adopt(self, law: Law) -> None:
        if law.bound_models:
            self.watcher.models_bound()
        self.relay.react(LawChanged(law))
        if self.accounts is not None:
            self.accounts.law_changed(self.laws)

    def _origins(self) -> dict[str, Any]:
        gate = self.listeners.picker
        picker = {} if gate is None else {"picker": gate.status(self.discovery.failing_open())}
        return {**self.discovery.status(), **picker, "hubs": self.mesh.published()}

    def _weight(self, tenant: str) -> float:
        known = self.flow.law.topology.tenants.get(tenant)
        return known.weight if known is not None else 1.0

    def _in_flight_at(self, replica: str) -> int:
        return self.flow.replicas.ledger.load(replica).in_flight

    def _warn(self, whom: str, problem: str, what: str = "") -> None:
        # By what was asked, where an engine's own words are in the problem: else it could have a line for each of them.
        self._log.warning("replicas", f"{whom}: {what or problem}", source=whom, problem=problem)

    def reload(self) -> None:
        """See farhop.service.process.lifecycle.Daemon."""
        self._tasks.start(self.reloader.reload(), "read the configuration again")
        self._tasks.start(self.plane.tls.manager.look(), "look at the certificates now")

    def _prepared(self, config: RegionalConfig, topology: Topology) -> Callable[[Law], None]:
        """Build everything that depends on a configuration and a topology; see Reloader."""
        listeners = self.listeners.prepared(config)
        policies = {"": config.policy, **config.policies}

        def put(law: Law) -> None:
            another = config.replicas != self.config.replicas
            if config.log_level != self.config.log_level:
                logs.configure("regional", config.region, config.instance, config.log_level)
            self.config, self.topology = config, topology
            self.model_names.configure(config.routes)
            listeners()
            # Decisions first: what follows evaluates requests again, and must do so by this law and this map.
            if law.bound_models:
                self.watcher.models_bound()
            self.relay.react(Reconfigured(law, _flow_config(config), policies, dict(config.splits)))
            if another:
                self.discovery.fix(config.replicas)
            if self.accounts is not None:
                self.accounts.reconfigured()

        return put

    def _named(self, names: ModelNames) -> None:
        """Take new model names, for the clients' own port. They are looked up only while there are any."""
        self.listeners.client_ingress.reader.names = names if names.in_force else None

    def _gauges(self) -> None:
        metrics = self.metrics
        gauges.observe_flow(metrics, self.flow, self.clock.now)
        self.mesh.observe()
        if self.listeners.tokenizers is not None:
            gauges.observe_tokenizers(metrics, self.flow, self.listeners.tokenizers)
        if self.listeners.picker is not None:
            gauges.observe_picker(metrics, self.listeners.picker, self.discovery.failing_open)
        self.laws.observe(metrics)
        self.identities.observe(metrics)
        self.reloader.observe(metrics)
        self.plane.observe(metrics)

    async def _look(self) -> None:
        """While requests wait for their answer to begin, have the machine look for those that should have begun long
        ago."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self.flow.overdue_check_due <= self.clock.now():
                self.relay.react(OverdueCheckDue())

    async def open(self) -> str:
        """See farhop.service.process.lifecycle.Daemon."""
        config = self.config
        self.admin.starting = "starting"
        admin = await self.admin.open(config.admin.host, config.admin.port)
        await self._open_store()
        tier = await self.listeners.open_tier()
        await self.mesh.open(tier, admin)
        entries = await self.listeners.open_entries()
        await self.mesh.publish()
        self._tasks.start(self.reloader.keep(), "look at the configuration")
        self._tasks.start(self._look(), "look who should have begun")
        self.plane.open()
        self.admin.starting = ""
        return (
            f"region {config.region}: tier on {config.tier.host}:{tier}{entries}, admin on {config.admin.host}:{admin}"
        )

    async def _open_store(self) -> None:
        """Begin to watch replicas, and wait until the documents in etcd are known: law, overrides, keys, limits."""
        if self.accounts is not None:
            await self.accounts.open()
        self.laws.remember()
        await opened(self.store, self.admin, logs.get("regional"), self._rng)
        await self.watcher.open()
        self.discovery.open()
        self._tasks.start(self.laws.follow(), "watch the law")
        for followed in self.overrides:
            self._tasks.start(followed.follow(), f"watch the {followed.what}")
        self._tasks.start(self.keys.follow(), "watch the keys")
        self.limiter.open()
        await self.laws.begun()
        await self.keys.begun()
        await self.identities.open(self._tasks)
        await self.limits.begun()
        if self.accounts is not None:
            self.accounts.law_changed(self.laws)

    async def close(self) -> None:
        """See farhop.service.process.lifecycle.Daemon."""
        self.tier_admin.stopping = True
        await all_of(
            self.mesh.withdraw,
            self.listeners.drain,
            self.discovery.close,
            self.limiter.close,
            self.mesh.close,
            self.watcher.close,
            self._close_kv_listener,
            self.listeners.close,
            self._tasks.close,
            self.instruments.telemetry.close,
            self.relay.close,
            self.close_accounts,
            self.store.close,
            self.admin.close,
            self.plane.close,
            lambda: self.instruments.tracing.close(2.0),
        )

    def _listen_to_kv_events(self, watched: Mapping[str, ReplicaConfig]) -> None:
        """Listen to the KV events of the replicas that publish them."""
        if self.kv_listener is None:
            if not any(replica.kv_events for replica in watched.values()):
                return
            self.kv_listener = KvListener(self.relay.react, self.metrics.report_refused, self.clock.now)
        self.kv_listener.listen(watched.values())

    async def _close_kv_listener(self) -> None:
        if self.kv_listener is not None:
            await self.kv_listener.close()

    async def close_accounts(self) -> None:
        if self.accounts is not None:
            await self.accounts.close()


def _flow_config(config: RegionalConfig) -> FlowConfig:
    health = config.health.thresholds(config.watch.rise, config.watch.fall)
    return FlowConfig(
        config.region, config.instance, config.queue, health, config.foreign, config.scaling, config.scalings,
        config.resume.move_over_s if config.resume.on else None,
    )  # fmt: skip


def _version(active: ActiveRequest) -> str:
    """The version of the replica that was picked."""
    pick: Pick | None = active.reasons
    return pick.version if pick is not None else ""


def _clusters(config: RegionalConfig, topology: Topology) -> dict[str, EtcdSettings]:
    return stores.home_hubs(config, topology, config.remote_hub)


def _descriptors(config: RegionalConfig) -> int:
    """What it takes beside the relay: a probe, a scrape, a token of each replica, its sockets of KV events, and the
    control port's connections."""
    expected = len(config.replicas) + (FOUND_EXPECTED if config.discovery else 0)
    of_replicas = 3 * expected + 6 * sum(len(replica.kv_sources) for replica in config.replicas)
    return of_replicas + control_port.connections_max()


def run(path: Path, *, picks: bool = False) -> None:
    """Run a regional balancer from its configuration file. SystemExit(2), after one line, if it cannot start. `picks`:
    gateways must be able to ask it."""

    def make() -> RegionalBalancer:
        config = load(RegionalConfig, path)
        if picks and config.picker is None:
            raise ConfigError(
                str(path), ["picker: is not given; say where gateways come, such as picker: {port: 9003}"]
            )
        logs.configure("regional", config.region, config.instance, config.log_level)
        return RegionalBalancer(config, stores.topology_of(config), Random(), path=path)

    run_process("regional", make)
