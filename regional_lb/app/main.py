"""Assembles a regional balancer from its configuration: the one place here that knows the clock, chance and sockets.

Order of starting: replicas are watched, the region's other balancers tell what they know, clients are let in, the world
is told. Of stopping: peers and the world are told, no new connections, requests under way finish, everything closes.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from farhop.balance.limits import ByteBudget, SlotLimit
from farhop.balance.machine import LawChanged
from farhop.config import ConfigError, load
from farhop.identity.hop_token import HopVerifier
from farhop.identity.redirect_token import RedirectTokenVerifier, holder
from farhop.relay.http.listener import Listener
from farhop.relay.relay import Relay
from farhop.relay.upstream.resumable import MODES, ResumeMode, Resumption
from farhop.service import dataplane, stores
from farhop.service.accounts import Accounts
from farhop.service.admin import AdminServer
from farhop.service.authenticator import GatewayAuthenticator, KeyAuthenticator
from farhop.service.certificates import TlsManager
from farhop.service.clock import Clock, wall
from farhop.service.decisions import Decisions
from farhop.service.identities import Identities
from farhop.service.ingress import Ingress
from farhop.service.keybook import KeyBook
from farhop.service.large_bodies import LargeBodyReader
from farhop.service.limit_book import LimitBook
from farhop.service.limits import Limiter
from farhop.service.loop_lag import LoopLag
from farhop.service.peer_authenticator import peer_authenticator_of
from farhop.service.process import run as run_process
from farhop.service.prompt_tokens import PromptTokens
from farhop.service.recorder import Recorder
from farhop.service.reload import LIVE as LIVE_OF_BOTH
from farhop.service.reload import Reloader
from farhop.service.request_reader import RequestReader
from farhop.service.request_telemetry import RequestTelemetry
from farhop.service.routing_keys import HeaderMatchReader, SessionReader
from farhop.service.tasks import Tasks, all_of
from farhop.service.tokenizer import Files, Tokenizers
from farhop.store.hubs import stores_of
from farhop.store.sealed import inner
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.spans import Tracing
from regional_lb.app import gauges, overrides
from regional_lb.app.config import RegionalConfig
from regional_lb.app.control_port import ControlPort
from regional_lb.app.model_names import ModelNames
from regional_lb.app.redirect_token import RedirectedCallers
from regional_lb.app.refusals import RefusalBook
from regional_lb.app.serve import HopAuthenticator, PickReasons, RegionalAdmin, RegionalTier
from regional_lb.engines.discovery import Discovery
from regional_lb.engines.watch import Watcher
from regional_lb.mesh.limit_root import LimitRoot
from regional_lb.mesh.peers import Peers
from regional_lb.mesh.report import Reporter
from regional_lb.mesh.warm_restart import WarmRestart
from regional_lb.scheduler.flow import FlowConfig, Reconfigured, RegionalFlow
from regional_lb.scheduler.overdue import CHECK_S, OverdueCheckDue
from regional_lb.scheduler.policy import Policies
from regional_lb.scheduler.split import Splits
from topology.law import Law

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop_wire import region_pb2

    from farhop.balance.machine import Request, Usage
    from farhop.balance.model_facts import ModelFacts
    from farhop.relay.active import ActiveRequest
    from farhop.relay.http.connection import ClientLimits
    from farhop.service.authenticator import Authenticator
    from farhop.service.certificates import Certificates
    from farhop.store.contract import Store
    from farhop.store.documents.limits import RootClaim
    from farhop.store.etcd_settings import EtcdSettings
    from regional_lb.engines.config import ReplicaConfig
    from regional_lb.engines.kv.events import KvListener
    from regional_lb.picker.config import PickerConfig
    from regional_lb.picker.server import PickerServer
    from regional_lb.scheduler.pick import Pick
    from topology.model import Topology

# What may change while it lives. What refers to the replicas of the file goes with them.
LIVE = LIVE_OF_BOTH | {
    "policy": (), "policies": (), "scaling": (), "scalings": (), "splits": (), "routes": (), "queue": (), "foreign": (),
    "replicas": ("discovery",),
}  # fmt: skip
FOUND_EXPECTED = 256  # replicas that discovery may bring before their probes take descriptors from clients' share


class RegionalBalancer:
    """One regional balancer, assembled."""

    def __init__(
        self,
        config: RegionalConfig,
        topology: Topology,
        rng: Random,
        store: Store | None = None,
        path: Path | None = None,
    ) -> None:
        """`path`: the file that the configuration is read from anew; None: it stays."""
        self.config, self.topology = config, topology
        self.clock = Clock(rng)
        self._incarnation = time.time_ns() // 1_000_000
        self._instruments(rng)
        policies, splits = Policies({"": config.policy, **config.policies}), Splits(config.splits)
        self.flow = RegionalFlow(_flow_config(config), Law(topology), rng, self._weight, policies, splits)
        engines = self._data_plane()
        self._listeners(rng)
        self._watch_replicas(rng, engines)
        self._follow_store(rng, store)
        self._limit_tenants()
        self._discover(rng)
        self._tasks = Tasks()
        self._meet_peers(rng)
        self.reloader = Reloader(
            path, config, topology, LIVE, self.laws, self._prepared, _clusters if store is None else None
        )
        self.reloader.log = logs.get("regional")
        self._accounting()
        self._administration()
        self.reporter: Reporter | None = None
        self._gauges()

    def _instruments(self, rng: Random) -> None:
        """Logs, metrics, spans and decisions: what watches the process and its requests."""
        config = self.config
        self._log = log = logs.Throttled(logs.get("regional"), 10.0, self.clock.now)
        self.metrics = TierMetrics("regional", config.region, config.instance)
        self.decisions = Decisions()
        self.tracing = Tracing("farhop-regional", config.region, config.instance)
        for problem in self.tracing.problems:
            log.warning("telemetry", problem, problem=problem)
        self.telemetry = RequestTelemetry(
            "farhop.regional",
            "farhop.regional.pick",
            tracing=self.tracing,
            metrics=self.metrics,
            decisions=self.decisions,
            clock=self.clock,
            rng=rng,
            reasons=PickReasons(),
            traced_per_s_max=config.limits.traced_per_s_max,
        )

    def _data_plane(self) -> Certificates | None:
        """What requests pass through to engines; the engines' certificates."""
        config, log = self.config, self._log
        self.budget, self.requests = ByteBudget(config.limits.buffered_bytes_max), SlotLimit(config.limits.requests_max)
        self.lag = LoopLag()
        engine_key = config.engine_key.get_secret_value() if config.engine_key else None
        tier = RegionalTier(self.telemetry, log, config.region, engine_key)
        self.tls = dataplane.TlsSetup(TlsManager(logs.get("regional"), wall), self.metrics, log)
        engines = self.tls.upstream("engine_tls", config.engine_tls)
        pool = self.tls.pool(config.limits, engines)
        self._slots = dataplane.slots(aside=_descriptors(config))
        self.relay = Relay(
            b"regional",
            self.flow,
            tier,
            pool,
            self.clock.now,
            upstream_is_tier=False,
            budget=self.budget,
            asks_load=config.watch.orca,
        )
        if config.resume.on:
            self.relay.resumption = resumption = Resumption(
                self._context_tokens, mode=self._resume_mode, writes_on=self._writes_on
            )
            dataplane.resume_metrics(self.metrics, resumption)
        return engines

    def _resume_mode(self, tenant: str, model: str) -> ResumeMode:
        """See Resumption. The stricter of what is configured here and what the tenant says."""
        known = self.flow.law.topology.tenants.get(tenant)
        return min(self.config.resume.of(model), "off" if known is None else known.resume, key=MODES.index)

    def _writes_on(self, replica: str) -> bool:
        """See Resumption."""
        known = self.flow.fleet.view.replicas.get(replica)
        return known is not None and bool(known.writes_on)

    def _context_tokens(self, replica: str, model: str) -> int | None:
        """See Resumption."""
        known = self.flow.fleet.view.replicas.get(replica)
        if known is None or not known.token_ids:
            return None
        facts = known.facts.get(model)
        return facts.max_model_len if facts is not None else 0

    def _accounting(self) -> None:
        """What is written down of requests, where anything is to be."""
        self.accounts: Accounts | None = None
        if self.config.usage is None and self.config.audit is None:
            return
        self.accounts = Accounts(
            self.config, law=lambda: self.flow.law, gpu_ms=self._gpu_ms, version=_version, judged=self._judged,
            clock=self.clock, metrics=self.metrics, log=self._log,
        )  # fmt: skip
        self.telemetry.accounts = self.accounts
        self.limiter.go_by(self.accounts.price_file, self.clock.wall_s)
        if (book := self.accounts.price_file) is not None:
            self.model_names.prices = lambda: book.prices
        for ingress in self.ingresses:
            ingress.gate = self.accounts.refusal

    def _judged(self, active: ActiveRequest) -> tuple[int, frozenset[str] | None]:
        """The epoch that it was sent on under, and where the tier above said that it might go."""
        return active.context.law_epoch or self.flow.law.epoch, active.request.lawful

    def _gpu_ms(self, active: ActiveRequest, usage: Usage) -> float | None:
        """What a request took of its replica's GPU: its prompt's prefill, and a slot's share of each step."""
        pick: Pick | None = active.reasons
        chosen = pick.chosen if pick is not None else None
        replica = self.flow.fleet.view.replicas.get(chosen.replica) if chosen is not None else None
        if chosen is None or replica is None:
            return None
        computed = usage.prompt_tokens - (usage.cached_tokens or 0)
        step_ms = chosen.tpot_ms / max(1, replica.slots)
        return round(computed * chosen.prefill_ms_per_token + usage.completion_tokens * step_ms, 3)

    def _administration(self) -> None:
        """The admin port: what operators see, and may do."""
        config = self.config
        self.tier_admin = RegionalAdmin(
            config.instance,
            flow=self.flow,
            authenticator=self.authenticator,
            ingress=self.client_ingress,
            clock=self.clock,
            overrides=self.overrides,
            peers=self.peers,
            laws=self.laws,
            configuration=self.reloader.status,
            problems=self.watcher.problems,
        )
        self.tier_admin.newest_epoch = lambda: self.hop_authenticator.newest_epoch
        self.tier_admin.origins = self._origins
        self.tier_admin.issued = self.identities.status
        self.tier_admin.limits = lambda: {**self.limiter.status(), "root": self.limit_root.status()}
        hub = self.topology.regions[config.region].hub
        self.tier_admin.kept = lambda: stores.kept(self.store, hub)
        if self.accounts is not None:
            self.tier_admin.accounts = self.accounts.status
        self.admin = AdminServer(
            self.tier_admin, self.metrics, self.decisions, self.tls.listener("admin", config.admin),
            config.admin.made(config.trust_domain),
        )  # fmt: skip
        if self.accounts is not None:
            self.admin.acted = self.accounts.acted
        self.telemetry.recorder = Recorder(config.region)
        self.admin.more = (("GET", "/record", self.telemetry.recorder.stream, "read"),)
        self.admin.show(lambda: self.flow.law, self.store)

    def _watch_replicas(self, rng: Random, engines: Certificates | None) -> None:
        """What looks at replicas and tells the machine. Which there are is found by `_discover`."""
        config = self.config
        self.watcher = Watcher(
            config,
            react=self.relay.react,
            refused=self.metrics.report_refused,
            clock=self.clock.now,
            rng=rng,
            context=dataplane.context_of(engines),
            trouble=self.tls.trouble,
            credentials=grpc.ssl_channel_credentials if engines is None else lambda: engines.material.channel(),
            answered_at=self.flow.fleet.standing.answered_at,
            in_flight=self._in_flight_at,
            warn=self._warn,
            watched=self._listen_to_kv_events,
        )
        self.kv_listener: KvListener | None = None

    def _follow_store(self, rng: Random, store: Store | None) -> None:
        """What stands in etcd and binds us: the law, overrides, names of models, keys."""
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
        self.identities = Identities(config.identity, self.keys, self.tls, self.clock, self._log)
        self.identities.let_in(self.authenticator, self.client_ingress)

    def _limit_tenants(self) -> None:
        """What tenants may use: their limits, the root that lends, and what is borrowed of it here."""
        config = self.config
        own = self.topology.regions[config.region].hub
        hub = inner(stores_of(self.store, own)[own])
        self.limits = LimitBook(self.store, self.metrics.report_refused)
        self.limit_root = LimitRoot(self.limits, hub, config.region, config.instance, self.clock.now)
        self.limiter = self.client_ingress.limits = Limiter(
            self.limits, self.store, f"regional {config.region}/{config.instance}", "", self._borrow, self.clock.now,
            self.metrics.report_refused,
        )  # fmt: skip
        self.limiter.observe(self.metrics)
        self.limit_root.observe(self.metrics)

    def _discover(self, rng: Random) -> None:
        """Which replicas there are."""
        self.discovery = Discovery(
            self.config, self.store, self.watcher.announce, self.metrics.report_refused, self._warn, rng
        )
        self.authenticator.objective = self.discovery.objective
        if isinstance(self.picker_authenticator, KeyAuthenticator):
            self.picker_authenticator.objective = self.discovery.objective

    def _meet_peers(self, rng: Random) -> None:
        """The region's other balancers, and what a restart is to know without them."""
        config = self.config
        assert self.flow.fleet.shares is not None  # it has a name
        self.peer_authenticator = peer_authenticator_of(config.control, config.trust_domain)
        self.peers = Peers(
            config,
            self.flow,
            self.flow.fleet.shares,
            self.store,
            react=self.relay.react,
            refused=self.metrics.report_refused,
            clock=self.clock.now,
            rng=rng,
            incarnation=self._incarnation,
            certificates=self.tls.upstream("peers.tls", config.peers.tls),
            trouble=self.tls.trouble,
            laws=self.laws,
            peer_authenticator=self.peer_authenticator,
        )
        self.warm_restart = WarmRestart(
            stores.state(config, "regional"), self.flow, self.peers.feed, self.relay.react,
            self.metrics.report_refused, lambda: wall().timestamp(),
        )  # fmt: skip

    async def _borrow(self, claim: RootClaim, request: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        """Of this region's root, which may be this very process."""
        if claim.region != self.config.region:
            raise OSError("a regional balancer borrows in its own region alone")
        if claim.instance == self.config.instance:
            reply = self.limit_root.borrowed(request)
            if reply is None:
                raise OSError("not the root any more")
            return reply
        return await self.peers.borrow(claim.address, request)

    def _adopt(self, law: Law) -> None:
        self.relay.react(LawChanged(law))
        if self.accounts is not None:
            self.accounts.law_changed(self.laws)

    def _origins(self) -> dict[str, Any]:
        hub = self.topology.regions[self.config.region].hub
        published = {} if self.reporter is None else self.reporter.published(hub)
        picker = {} if self.picker is None else {"picker": self.picker.status(self.discovery.failing_open())}
        return {
            **self.discovery.status(),
            **picker,
            "hubs": [{"hub": name, "trouble": why} for name, why in published.items()],
        }

    def _weight(self, tenant: str) -> float:
        known = self.flow.law.topology.tenants.get(tenant)
        return known.weight if known is not None else 1.0

    def _in_flight_at(self, replica: str) -> int:
        return self.flow.fleet.ledger.load(replica).in_flight

    def _wants_tokens(self, request: Request) -> bool:
        return self.flow.wants_tokens(request, self.clock.now())

    def _warn(self, whom: str, problem: str) -> None:
        self._log.warning("replicas", f"{whom}: {problem}", source=whom, problem=problem)

    def _listeners(self, rng: Random) -> None:
        config, limits = self.config, dataplane.client_limits(self.config.limits)
        verifier = HopVerifier(config.hop.secrets(), config.region)
        above = peer_authenticator_of(config.tier, config.trust_domain)
        self.hop_authenticator = HopAuthenticator(verifier, self.flow, self.clock, names_body=not above.mutual)
        policies, splits = self.flow.policies, self.flow.splits
        self.session = session = SessionReader(
            **config.session.model_dump(), wanted=lambda: splits.wants_session or policies.wants_session
        )
        header_matches = HeaderMatchReader(splits)
        self.tokenizers, self.prompt_tokens = _tokenizers(config), None
        if self.tokenizers is not None:
            lineages = self.flow.fleet.lineages
            self.tokenizers.bases_of = lambda model: lineages.of.get(model) or ()
            self.prompt_tokens = PromptTokens(self.tokenizers, self._wants_tokens, self.clock, self.telemetry)
        self.guard, self.large = config.requests.guard(), LargeBodyReader()

        def ingress(authenticator: Authenticator, ready: Callable[[], bool] | None = None) -> Ingress:
            reader = RequestReader(
                authenticator,
                clock=self.clock,
                rng=rng,
                session=session,
                header_matches=header_matches,
                guard=self.guard,
                large=self.large,
                to_engines=True,
            )
            return Ingress(
                authenticator, reader, telemetry=self.telemetry, clock=self.clock, rng=rng, tokens=self.prompt_tokens,
                ready=ready,
            )  # fmt: skip

        self.hop_ingress = ingress(self.hop_authenticator)
        self.authenticator = KeyAuthenticator(
            config.region, lambda: self.flow.law, self._offered, config.limits.request_s
        )
        self.telemetry.may_record, self.telemetry.under = self.authenticator.recorded, self.flow
        self.hop_verifier = verifier
        self.redirect_tokens = redirect_tokens = RedirectTokenVerifier(
            config.hop.secrets(), config.region, holder(config.instance, self._incarnation)
        )
        self.authenticator.by_token = RedirectedCallers(redirect_tokens, self.flow, self.clock).caller
        self.client_ingress = ingress(self.authenticator, ready=self._ready)
        self.hop_ingress.relay = self.client_ingress.relay = self.relay
        self.relay.begin_anew = self.client_ingress.begin_anew  # names stand for models at this port alone
        self.ingresses = [self.hop_ingress, self.client_ingress]
        self.tier_listener = Listener(
            "tier", self.hop_ingress, limits, self.budget, self._slots, self.requests, is_hop=True,
            tls=self.tls.listener("tier", config.tier, partial(above.admits, "global") if above.mutual else None),
        )  # fmt: skip
        self.client_listener = Listener(
            "client", self.client_ingress, limits, self.budget, self._slots, self.requests,
            tls=self.tls.listener("client", config.client),
        )  # fmt: skip
        self.control = ControlPort(config.control, self.tls.listened("control", config.control))
        self.picker: PickerServer | None = None
        self.picker_authenticator: Authenticator | None = None
        if config.picker is not None:
            self._make_picker(config.picker, ingress, limits)

    def _make_picker(self, config: PickerConfig, ingress: Callable[..., Ingress], limits: ClientLimits) -> None:
        """Another way in, of those whom a gateway asks for."""
        from regional_lb.picker.server import PickerServer  # brings HTTP/2: only where it is wanted

        authenticator: Authenticator = self.authenticator
        if config.callers == "hop":  # the gateway's certificate is not that of the balancer that signed
            authenticator = HopAuthenticator(self.hop_verifier, self.flow, self.clock, names_body=True)
        elif config.callers == "gateway":
            authenticator = GatewayAuthenticator(
                self.config.region,
                lambda: self.flow.law,
                self._offered,
                self.config.limits.request_s,
                config.tenant_header,
            )
        self.picker_authenticator = authenticator
        handler = ingress(authenticator, ready=self._ready)
        self.ingresses.append(handler)
        handler.relay = self.picker = PickerServer(
            config, handler, self.relay, limits, self.budget, self.requests,
            tls=self.tls.listener("picker", config, protocol="h2"), view=lambda: self.flow.fleet.view,
            ready=self._ready, log=self._log,
        )  # fmt: skip

    def reload(self) -> None:
        """See farhop.service.process.Balancer."""
        self._tasks.start(self.reloader.reload(), "read the configuration anew")
        self._tasks.start(self.tls.manager.look(), "look at the certificates now")

    def _prepared(self, config: RegionalConfig, topology: Topology) -> Callable[[Law], None]:
        """What a configuration and a map come to, made ready; see Reloader."""
        hop, guard = HopVerifier(config.hop.secrets(), config.region), config.requests.guard()
        redirects = RedirectTokenVerifier(config.hop.secrets(), config.region, "")
        session = SessionReader(**config.session.model_dump(), wanted=lambda: False)
        policies = {"": config.policy, **config.policies}

        def put(law: Law) -> None:
            another = config.replicas != self.config.replicas
            if config.log_level != self.config.log_level:
                logs.configure("regional", config.region, config.instance, config.log_level)
            self.config, self.topology = config, topology
            self.hop_verifier.adopt(hop)
            self.redirect_tokens.adopt(redirects)
            self.guard.adopt(guard)
            self.session.adopt(session)
            self.model_names.configure(config.routes)
            dataplane.relimit(config.limits, self.relay.pool, self.tier_listener, self.client_listener)
            # Decisions first: whoever is looked at again by what follows is looked at by this law and this map.
            self.relay.react(Reconfigured(law, _flow_config(config), policies, dict(config.splits)))
            if another:
                self.discovery.fix(config.replicas)
            if self.accounts is not None:
                self.accounts.reconfigured()

        return put

    def _named(self, names: ModelNames) -> None:
        """At the clients' own port; names are looked up only while some stand for other models."""
        self.client_ingress.reader.names = names if names.in_force else None

    def _ready(self) -> bool:
        return self.tier_admin.ready()

    def _offered(self, regions: frozenset[str]) -> dict[str, ModelFacts]:
        view = self.flow.fleet.view
        return {model: view.facts(model) for model in view.by_model} if self.config.region in regions else {}

    def _gauges(self) -> None:
        metrics, peers = self.metrics, self.peers
        gauges.observe_flow(metrics, self.flow, self.clock.now)
        metrics.gauge("peers_connected", "Other balancers of the region whose stream is open.", lambda: float(peers.up))
        metrics.gauge("peer_age_seconds", "Since the last message of each peer.", peers.ages_s, "peer")
        if self.tokenizers is not None:
            gauges.observe_tokenizers(metrics, self.flow, self.tokenizers)
        if self.picker is not None:
            gauges.observe_picker(metrics, self.picker, self.discovery.failing_open)
        self.laws.observe(metrics)
        self.identities.observe(metrics)
        self.reloader.observe(metrics)
        dataplane.observe(
            metrics,
            self.budget,
            self.requests,
            self.relay.pool,
            self.lag,
            self.guard,
            self.large,
            self.tier_listener,
            self.client_listener,
        )

    async def _look(self) -> None:
        """Have the machine look, while anybody waits for an answer to begin, at who should have begun long ago."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self.flow.overdue_check_due <= self.clock.now():
                self.relay.react(OverdueCheckDue())

    async def open(self) -> str:
        """See farhop.service.process.Balancer."""
        config = self.config
        await self._open_store()
        tier = await self.tier_listener.open(config.tier.host, config.tier.port)
        admin = await self.admin.open(config.admin.host, config.admin.port)
        self.reporter = reporter = await self._open_control(tier, admin)
        entries = await self._open_entries()
        await reporter.open(self.store)
        self.tls.open()
        self._tasks.start(self.reloader.keep(), "look at the configuration")
        self._tasks.start(self._look(), "look who should have begun")
        self.lag.open()
        dataplane.check_descriptors(config.limits, self._slots, self._log)
        return (
            f"region {config.region}: tier on {config.tier.host}:{tier}{entries}, admin on {config.admin.host}:{admin}"
        )

    async def _open_store(self) -> None:
        """Replicas are watched, and what stands in etcd is known: the law, overrides, keys, limits."""
        if self.accounts is not None:
            await self.accounts.open()
        self.laws.remember()
        await self.store.open()
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

    async def _open_control(self, tier: int, admin: int) -> Reporter:
        """Global balancers and peers are answered, and the peers have told what they know. `tier` and `admin` are the
        ports where this process is reached."""
        config = self.config
        advertised, port = config.advertise, self.control.listen()
        addresses = (f"{advertised}:{tier}", f"{advertised}:{port}", config.admin.reached_at(admin, advertised))
        reporter = Reporter(
            self.flow,
            region=config.region,
            instance=config.instance,
            addresses=addresses,
            clock=self.clock.now,
            incarnation=self._incarnation,
            prefix_nodes_per_s=config.prefix_nodes_per_s,
            client_url=(config.client.url or "") if config.client is not None else "",
            quiet_s=self.telemetry.quiet_s,
            laws=self.laws,
            peer_authenticator=self.peer_authenticator,
            signer=config.report_signer,
            admin_tls=config.admin.tls is not None,
        )
        reporter.limit_root = self.limit_root
        reporter.hold()
        await self.control.start(reporter, self.peers.feed)
        self.limit_root.open(addresses[1])
        await self.warm_restart.restore()  # before the peers, who know it better
        await self.peers.open(addresses[1])
        self._tasks.start(self.warm_restart.keep(), "write down what a restart is to know")
        return reporter

    async def _open_entries(self) -> str:
        """Clients and gateways are let in, where the configuration has ports for them; which ports, for people."""
        config, where = self.config, ""
        if self.picker is not None and config.picker is not None:
            at = config.picker
            where = f", gateways on {at.host}:{await self.picker.open(at.host, at.port)}"
        if config.client is not None:
            port = await dataplane.open_entry(self.client_listener, config.client, self.tier_admin.ready)
            where = f", clients on {config.client.host}:{port}{where}"
        return where

    async def close(self) -> None:
        """See farhop.service.process.Balancer."""
        self.tier_admin.stopping = True
        await all_of(
            self._withdraw,
            self._drain,
            self.discovery.close,
            self.limiter.close,
            self.limit_root.close,
            self.warm_restart.save,
            self.peers.close,
            self.watcher.close,
            self._stop_listening,
            self._tasks.close,
            self.relay.close,
            self._close_accounts,
            self.control.close,
            self.store.close,
            self.admin.close,
            self.tls.close,
            self.lag.close,
            lambda: self.tracing.close(2.0),
        )

    def _listen_to_kv_events(self, watched: Mapping[str, ReplicaConfig]) -> None:
        """Listen to the KV events of those who have them."""
        if self.kv_listener is None:
            if not any(replica.kv_events for replica in watched.values()):
                return
            from regional_lb.engines.kv.events import KvListener  # brings ZeroMQ: only where it is wanted

            self.kv_listener = KvListener(self.relay.react, self.metrics.report_refused, self.clock.now)
        self.kv_listener.listen(watched.values())

    async def _stop_listening(self) -> None:
        if self.kv_listener is not None:
            await self.kv_listener.close()
        if self.tokenizers is not None:
            self.tokenizers.close()
        self.large.close()

    async def _close_accounts(self) -> None:
        if self.accounts is not None:
            await self.accounts.close()

    async def _withdraw(self) -> None:
        self.peers.withdraw()
        if self.reporter is not None:
            await self.reporter.withdraw()

    async def _drain(self) -> None:
        drain_s = self.config.limits.drain_s
        picked = () if self.picker is None else (self.picker.close(drain_s),)
        await asyncio.gather(self.tier_listener.close(drain_s), self.client_listener.close(drain_s), *picked)


def _flow_config(config: RegionalConfig) -> FlowConfig:
    health = config.health.thresholds(config.watch.rise, config.watch.fall)
    return FlowConfig(
        config.region, config.instance, config.queue, health, config.foreign, config.scaling, config.scalings,
        config.resume.move_over_s if config.resume.on else None,
    )  # fmt: skip


def _version(active: ActiveRequest) -> str:
    """That of the replica that was picked."""
    pick: Pick | None = active.reasons
    return pick.version if pick is not None else ""


def _clusters(config: RegionalConfig, topology: Topology) -> dict[str, EtcdSettings]:
    return stores.home_hubs(config, topology, config.remote_hub)


def _tokenizers(config: RegionalConfig) -> Tokenizers | None:
    """Those configured. Raises ConfigError."""
    files = {model: Files(named.file, named.template or "") for model, named in config.tokenizer_of().items()}
    return Tokenizers(files, wall) if files else None


def _descriptors(config: RegionalConfig) -> int:
    """What it takes beside the relay: a probe, a scrape, a token of each replica, and its sockets of KV events."""
    expected = len(config.replicas) + (FOUND_EXPECTED if config.discovery else 0)
    return 3 * expected + 6 * sum(len(replica.kv_sources) for replica in config.replicas)


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
        return RegionalBalancer(config, stores.world(config), Random(), path=path)

    run_process("regional", make)
