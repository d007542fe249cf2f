"""Assembles a global balancer from its configuration: makes the clock and the random generator, and hands them on.
Never decides about a request: `global_lb.routing.flow` does.

Order of starting: regions are watched, then the listener opens. Of stopping: no new connections, requests under way
finish, everything closes.
"""

from __future__ import annotations

import asyncio
from math import ceil
from random import Random
from typing import TYPE_CHECKING

from farhop.balance.estimate.estimates import BYTES_PER_TOKEN
from farhop.balance.health.pilot_light import PilotState
from farhop.balance.health.region import LivenessConfig
from farhop.balance.machine import LawChanged
from farhop.config import load, redacted
from farhop.identity import hop_token
from farhop.identity.redirect_token import RedirectTokenSigner
from farhop.relay.relay import Relay
from farhop.service.accounts.record_writer import RecordWriter
from farhop.service.admin.balancer_admin import ProcessStatus
from farhop.service.admin.server import AdminServer
from farhop.service.admission.ingress import Ingress
from farhop.service.admission.request_reader import RequestReader
from farhop.service.admission.routing_keys import AnyVersion, HeaderMatchReader, SessionReader
from farhop.service.assembly import dataplane, stores
from farhop.service.assembly.dataplane import DataPlane
from farhop.service.assembly.identities import Identities
from farhop.service.assembly.instruments import Instruments
from farhop.service.assembly.reload import LIVE as LIVE_OF_BOTH
from farhop.service.assembly.reload import Reloader
from farhop.service.assembly.store_opening import opened
from farhop.service.authentication.authenticator import KeyAuthenticator
from farhop.service.authentication.keybook import KeyBook
from farhop.service.limits.book import LimitBook
from farhop.service.limits.limiter import Limiter
from farhop.service.process.clock import Clock
from farhop.service.process.lifecycle import run as run_process
from farhop.service.process.tasks import Tasks, all_of, until
from farhop.store.contract import entry_key
from farhop.store.documents.entry import EntryReport, encode
from farhop.store.hubs import publication_status
from farhop.telemetry import logs
from farhop.telemetry.release import release
from global_lb.app.admin import GlobalAdmin
from global_lb.app.advise import Advisor
from global_lb.app.answer_cache import AnswerCacheRelay
from global_lb.app.config import GlobalConfig
from global_lb.app.drills import DrillSchedule
from global_lb.app.model_names import ModelNames
from global_lb.app.overrides import RoutingOverrides
from global_lb.app.redirect_token import OwnTokens, RedirectTokens
from global_lb.app.serve import DecisionReasons, GlobalTier
from global_lb.fleet.table import Price
from global_lb.links.latencies import LatencyTable
from global_lb.links.prefix_streams import Prefixes
from global_lb.links.roots import Roots
from global_lb.links.watch import RegionWatcher
from global_lb.routing.flow import FlowConfig, GlobalFlow, Reconfigured
from global_lb.routing.routes import Routes
from topology.law import Law, Scope

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farhop.balance.machine import Request, Usage
    from farhop.relay.active import ActiveRequest
    from farhop.store.contract import Publication, Store
    from global_lb.routing.pick import Decision
    from topology.model import Topology


# What may change while it lives. Where a region's balancers may be is checked with what their certificates prove.
LIVE = LIVE_OF_BOTH | {
    "routes": (),
    "spill": (),
    "pilot_light": (),
    "proxies": (),
    "region_hosts": ("tier_tls", "tier_insecure"),
}
ENTRY_LEASE_S = 15.0  # of the document for operators: nothing waits for its end
_PILOT = {PilotState.ASLEEP: 0.0, PilotState.WAKING: 0.5, PilotState.AWAKE: 1.0}
FIRST_REGION_S = 1.0  # how long clients are kept out while no region is known to serve
WARM_S = 2.0  # and then until the regions' caches and distances are known here: no request is routed by guesses


class GlobalBalancer:
    """One global balancer, assembled from its parts."""

    def __init__(
        self,
        config: GlobalConfig,
        topology: Topology,
        rng: Random,
        store: Store | None = None,
        path: Path | None = None,
    ) -> None:
        """`path`: the configuration file, read again on a reload; None: reloads are not possible."""
        self.config, self.topology = config, topology
        self.clock, self._rng = Clock(rng), rng
        self.instruments = instruments = Instruments(
            "global", "decide", config, self.clock, rng, DecisionReasons(config.region)
        )
        self.metrics, self.decisions = instruments.metrics, instruments.decisions
        self.telemetry, self._log = instruments.telemetry, instruments.log
        routes = Routes(config.routes_in(topology))
        self.flow = GlobalFlow(
            _flow_config(config, topology), Law(topology), rng, self._patience_s, routes, _prices(topology)
        )
        self._data_plane()
        self._entry(rng, self.redirect_tokens)
        self._watch_and_follow(rng, store)
        self.reloader = Reloader(
            path,
            config,
            topology,
            LIVE,
            self.laws,
            self._prepared,
            stores.hubs if store is None else None,
            logs.get("global"),
        )
        self.answer_cache = AnswerCacheRelay(
            self.relay, self.ingress, flow=self.flow, tier=self.tier, capacity_bytes=config.answers_bytes,
            clock=self.clock.now,
        )  # fmt: skip
        self._accounting()
        self._administration()
        self._gauges()
        self.drills: DrillSchedule | None = None
        if config.drills is not None and path is not None:
            self.drills = DrillSchedule(config.drills, path, rng, self._log)

    def _data_plane(self) -> None:
        """Build the data plane: what requests pass through on their way to regions."""
        config, now = self.config, self.clock.now
        self.plane = plane = DataPlane(config, self.instruments, "tier_tls", config.tier_tls)
        self.redirect_tokens = RedirectTokens(
            RedirectTokenSigner(config.hop.secrets(), config.hop.active, config.region), self.flow, self.clock
        )
        self.tier = GlobalTier(
            self.telemetry,
            self._log,
            flow=self.flow,
            signer=config.signer_in(self.topology),
            instance=config.balancer,
            clock=self.clock,
            redirect_tokens=self.redirect_tokens,
            mutual=config.mutual,
        )
        self.relay = Relay(
            b"global",
            self.flow,
            self.tier,
            plane.pool,
            now,
            upstream_is_tier=True,
            budget=plane.budget,
            resumption=dataplane.resumption(config.resume, lambda: self.flow.law, self.metrics, self._context_tokens),
        )

    def _context_tokens(self, region: str, model: str) -> int | None:
        """See Resumption. Whether a region's engines report ids is seen in its answer."""
        known = self.flow.regions.view.regions.get(region)
        reports = () if known is None else (i.models[model] for i in known.instances if model in i.models)
        return min((report.max_model_len for report in reports), default=0)

    def _watch_and_follow(self, rng: Random, store: Store | None) -> None:
        """Build what watches regions and follows etcd, and feeds the state machine."""
        config, topology, log, plane = self.config, self.topology, self._log, self.plane
        hubs = store if store is not None else stores.hubs(config, topology)
        keep = stores.keep(config, "global", rng, log)
        self.store = stores.sealed(hubs, config.signing.made(), self.metrics.report_refused, rng, keep)
        self.laws = stores.law_book(config, "global", self.store, self.flow.law, self._adopt, self.metrics, log, rng)
        self.prefixes = prefixes = Prefixes(self.flow.regions.trie, self.metrics.report_refused, self.flow.law.epoch)
        self._adopt_hints()
        self.flow.regions.sent.append(prefixes.sent)
        self.flow.forgotten.append(prefixes.begin_anew)
        self.watcher = RegionWatcher(
            config,
            topology,
            self.store,
            react=self.relay.react,
            refused=self.metrics.report_refused,
            clock=self.clock.now,
            rng=rng,
            prefixes=prefixes,
            certificates=plane.certificates,
            trouble=plane.tls.trouble,
            upstreams=self.relay,
            laws=self.laws,
        )
        self.relay.pool.on_use = self.watcher.on_use  # a cycle: the watcher's findings go to the relay
        self.overrides = RoutingOverrides(
            self.store, config.region, topology.regions, self.relay.react, self.metrics.report_refused, self.clock.now
        )
        self.keys = KeyBook(self.store, self.metrics.report_refused)
        self.identities = Identities(config.identity, self.keys, plane.tls, self.clock, log)
        self.identities.let_in(self.authenticator, self.ingress)
        self.roots = Roots(lambda: self.config, plane.certificates)
        self.limits = LimitBook(self.store, self.metrics.report_refused)
        self.limiter = self.ingress.limits = Limiter(
            self.limits, self.store, f"global {config.balancer}", config.balancer, self.roots.borrow, self.clock.now,
            self.metrics.report_refused, salt=config.identity.salt, may_know=self._may_know,
        )  # fmt: skip
        self.limiter.observe(self.metrics)
        self.limits.changes.append(self._limits_changed)
        self._tasks = Tasks()
        self._following: list[asyncio.Task[None]] = []

    def _accounting(self) -> None:
        """Build the usage and audit records, as far as they are configured."""
        self.accounts: RecordWriter | None = None
        if self.config.usage is not None or self.config.audit is not None:
            self.accounts = RecordWriter(
                self.config, law=lambda: self.flow.law, gpu_ms=self._gpu_ms, version=_version, judged=self._judged,
                clock=self.clock, metrics=self.metrics, log=self._log,
            )  # fmt: skip
            self.telemetry.accounts, self.ingress.gate = self.accounts, self.accounts.refusal
            self.limiter.go_by(self.accounts.price_file, self.clock.wall_s)
            self.flow.micro_usd = self._micro_usd

    def _may_know(self, request: Request, region: str) -> bool:
        """Whether the law lets records of a request be kept in this region."""
        return region in self.flow.law.request_verdict(request, Scope.LOGGING).lawful

    def _micro_usd(self, request: Request, output_tokens: float) -> int | None:
        """The most that a request may cost (microdollars), by the price book of usage; None if its model has no
        price.
        """
        prices = self.accounts.prices if self.accounts is not None else None
        rates = None if prices is None else prices.rates(request.model, self.clock.wall_s(self.clock.now()))
        prompt = ceil(request.prompt_bytes / BYTES_PER_TOKEN)
        return None if rates is None else rates.at_most(prompt, ceil(output_tokens))

    def _judged(self, active: ActiveRequest) -> tuple[int, frozenset[str] | None]:
        """The epoch that it was decided under last, and the regions that it might have gone to."""
        decision: Decision | None = active.reasons
        if decision is None:
            law = self.flow.law
            again = active.began_at and active.forward is None  # its answer was made for another request
            return law.epoch, law.request_verdict(active.request).lawful if again else None
        return decision.verdict.epoch, decision.verdict.lawful

    def _gpu_ms(self, active: ActiveRequest, usage: Usage) -> float | None:
        """The GPU time of a request, as its price counts it (fleet.table.row_of), from the tokens computed."""
        known = self.flow.regions.view.regions.get(active.forward.target) if active.forward is not None else None
        name = active.request.model
        report = None if known is None else next((i.models[name] for i in known.instances if name in i.models), None)
        if report is None:
            return None
        computed = usage.prompt_tokens - (usage.cached_tokens or 0)
        step_ms = report.tpot_ms * report.replicas_ready / max(1, report.slots_total)
        return round(computed * report.prefill_ms_per_token + usage.completion_tokens * step_ms, 3)

    def _administration(self) -> None:
        """The admin port: what operators see, and may do."""
        config = self.config
        hub = self.topology.regions[config.region].hub
        self._listed: Publication | None = None
        self.tier_admin = GlobalAdmin(
            config.instance,
            flow=self.flow,
            authenticator=self.authenticator,
            ingress=self.ingress,
            watcher=self.watcher,
            overrides=self.overrides,
            clock=self.clock,
            laws=self.laws,
            process=ProcessStatus(
                configuration=self.reloader.status,
                disk_caches=lambda: stores.disk_caches(self.store, hub),
                ignored=lambda: stores.ignored(self.store, hub),
                keys=self.identities.status,
                limits=self.limiter.status,
                accounts=dict if self.accounts is None else self.accounts.status,
            ),
            token_rejected_at=self.tier.token_rejected_at,
            other_answered_at=self.tier.other_answered_at,
            published=lambda: [
                {"hub": name, "trouble": why} for name, why in publication_status(self._listed, hub).items()
            ],
        )
        stores.observe(self.metrics, self.store, hub)
        self.admin = AdminServer(
            self.tier_admin, self.metrics, self.decisions, self.plane.tls.listener("admin", config.admin),
            config.admin.made(config.trust_domain), lambda: redacted(self.config),
            acted=None if self.accounts is None else self.accounts.acted,
            more=(("GET", "/record", self.instruments.recorder.stream, "read"),),
        )  # fmt: skip
        self.admin.show(lambda: self.flow.law, self.store)

    def _entry(self, rng: Random, redirect_tokens: RedirectTokens) -> None:
        """The clients' listener, and what it asks of the other parts."""
        config = self.config
        self.authenticator = KeyAuthenticator(
            config.region, self.flow,
            lambda regions: self.flow.regions.view.models(regions), config.limits.request_s,
        )  # fmt: skip
        self.telemetry.may_record, self.telemetry.law_holder = self.authenticator.recorded, self.flow
        self.telemetry.collector = config.collector_in(self.topology)
        self.flow.law_changes.append(self.telemetry.law_changed)
        if config.unicast is not None:  # a cycle: each asks the other, of a token
            self.tier.own_tokens = OwnTokens(config.region, self.authenticator, self.clock)
            self.authenticator.by_token = self.tier.own_tokens.caller
        self.session = session = SessionReader(**config.session.model_dump(), wanted=self.flow.routes.want_session)
        header_matches = HeaderMatchReader(AnyVersion())
        advisor = Advisor(self.flow, self.telemetry, redirect_tokens, self.clock)
        self.reader = RequestReader(
            self.authenticator,
            clock=self.clock,
            rng=rng,
            session=session,
            header_matches=header_matches,
            guard=self.plane.guard,
            large=self.plane.large,
            signs=self._hashes_bodies,
        )
        self.latencies: LatencyTable | None = None
        if config.client_latencies is not None:
            self.latencies = LatencyTable(
                config.client_latencies, config.region, config.instance, lambda: self.flow.law, self.clock.now
            )
        self.ingress = Ingress(
            self.authenticator,
            self.reader,
            telemetry=self.telemetry,
            clock=self.clock,
            rng=rng,
            advisor=advisor,
            arrivals=self.latencies,
            ready=lambda: self.tier_admin.ready() and self.tier_admin.leads_somewhere(),
            anycast=frozenset(config.unicast.anycast) if config.unicast is not None else frozenset(),
        )
        self._names = ModelNames(self.flow, self.clock)
        # A cycle: the ingress starts requests on the relay, which has it start one again for another model.
        self.ingress.relay = self.relay
        self.relay.restart_with_model = self.ingress.restart_with_model
        self.flow.routes.changed.append(self._named)
        self._named()
        self.listener = self.plane.listener("listen", self.ingress, self.plane.tls.listener("listen", config.listen))

    def _named(self) -> None:
        """Names are resolved only while some stand for other models."""
        self.reader.names = self._names if self.flow.routes.cascades else None

    def _patience_s(self, tenant: str) -> float:
        return self.flow.law.patience_s(tenant)

    def _limits_changed(self) -> None:
        """A region charges redirected clients from what its own root lends: no other tenants' clients are sent
        there."""
        self.flow.redirects.homes = {name: one.home for name, one in self.limits.tenants().items()}

    def _adopt_hints(self) -> None:
        law = self.flow.law
        self.prefixes.adopt(law.epoch, law.places_of(self.config.region))

    def _adopt(self, law: Law) -> None:
        self.relay.react(LawChanged(law))
        if self.accounts is not None:
            self.accounts.law_changed(self.laws)
        self._adopt_hints()
        if self.latencies is not None:
            self.latencies.lawful()

    def _follow(self) -> None:
        """Follow operators' overrides from the beginning: one that named an unknown region may count now."""
        for task in self._following:
            task.cancel()
        self._following = [
            self._tasks.start(self.overrides.follow_routes(), "watch the routes"),
            self._tasks.start(self.overrides.follow_overrides(), "watch the biases and pins"),
        ]

    def _hashes_bodies(self) -> bool:
        """Whether a hop token may need a body's SHA-256: for receivers that read no other kind, if there is no mutual
        TLS."""
        regions = self.flow.regions.view.regions
        return any(
            instance.hop_version < hop_token.READ and not self.config.mutual(name)
            for name, region in regions.items()
            for instance in region.instances
        )

    def reload(self) -> None:
        """See farhop.service.process.lifecycle.Daemon."""
        self._tasks.start(self.reloader.reload(), "read the configuration again")
        self._tasks.start(self.plane.tls.manager.look(), "look at the certificates now")

    def _prepared(self, config: GlobalConfig, topology: Topology) -> Callable[[Law], None]:
        """Build everything that depends on a configuration and a topology; see Reloader."""
        routes, signer, guard = config.routes_in(topology), config.signer_in(topology), config.requests.guard()
        flow_config = _flow_config(config, topology)
        redirects = RedirectTokenSigner(config.hop.secrets(), config.hop.active, config.region)
        session = SessionReader(**config.session.model_dump(), wanted=self.flow.routes.want_session)

        def put(law: Law) -> None:
            more = topology.regions.keys() - self.topology.regions.keys()
            if config.log_level != self.config.log_level:
                logs.configure("global", config.region, config.instance, config.log_level)
            self.config, self.topology = config, topology
            self.tier.resign(signer, config.mutual)
            self.redirect_tokens.resign(redirects)
            self.plane.guard.adopt(guard)
            self.session.adopt(session)
            self.plane.relimit(config.limits)
            # Decisions first: what follows evaluates requests again, and must do so by this law and this map.
            self.relay.react(Reconfigured(law, flow_config, routes, _prices(topology)))
            self._adopt_hints()
            if self.latencies is not None:
                self.latencies.lawful()
            self.overrides.regions = topology.regions
            self.watcher.reconfigure(config, topology)
            if more:
                self._follow()
            if self.accounts is not None:
                self.accounts.reconfigured()

        return put

    def _gauges(self) -> None:
        gauge, counter = self.metrics.gauge, self.metrics.counter
        gauge("prefix_trie_nodes", "Nodes of the prefix trie.", lambda: float(self.flow.regions.trie.nodes))
        gauge("region_up", "1 if the region may be chosen.", self._regions_up, "target")
        gauge("desired_replicas", "Replicas that should be there.", self._desired, ("target", "model"))
        gauge("pilot_light_awake", "Pilot-light regions: 1 awake, 0.5 waking, 0 asleep.", self._pilots, "target")
        gauge("report_age_seconds", "Age of the last report of each region.", self._ages, "target")
        self.laws.observe(self.metrics)
        self.identities.observe(self.metrics)
        self.reloader.observe(self.metrics)
        self.answer_cache.observe(self.metrics)
        counter(
            "region_prefix_predicted_tokens", "Prompt tokens expected cached there.", lambda: self._hits(0), "target"
        )
        counter("region_prefix_actual_tokens", "Prompt tokens of these found cached.", lambda: self._hits(1), "target")
        gauge(
            "region_cache_hit_calibration",
            "Share of expected hits that came true.",
            self._cache_hit_calibration,
            "target",
        )
        self.plane.observe(self.metrics)

    def _hits(self, which: int) -> dict[str, float]:
        return {
            name: (hits.predicted_tokens, hits.actual_tokens)[which] for name, hits in self.flow.regions.hits.items()
        }

    def _cache_hit_calibration(self) -> dict[str, float]:
        now = self.clock.now()
        return {name: mean.at(now) for name, mean in self.flow.regions.cache_hit_calibration.items()}

    def _desired(self) -> dict[tuple[str, str], float]:
        return {of: float(replicas) for of, replicas in self.flow.regions.scaling.desired.items()}

    def _pilots(self) -> dict[str, float]:
        return {name: _PILOT[pilot.state] for name, pilot in self.flow.regions.scaling.pilots.items()}

    def _regions_up(self) -> dict[str, float]:
        now = self.clock.now()
        return {name: float(h.read(now).state in ("up", "suspect")) for name, h in self.flow.regions.liveness.items()}

    def _ages(self) -> dict[str, float]:
        now = self.clock.now()
        return {n: now - max(i.received_at for i in r.instances) for n, r in self.flow.regions.view.regions.items()}

    async def open(self) -> str:
        """See farhop.service.process.lifecycle.Daemon."""
        config = self.config
        self.admin.starting = "starting"
        admin = await self.admin.open(config.admin.host, config.admin.port)
        if self.accounts is not None:
            await self.accounts.open()
        self.laws.remember()
        await opened(self.store, self.admin, logs.get("global"), self._rng)
        await self.watcher.open()
        self._tasks.start(self.laws.follow(), "watch the law")
        self._follow()
        self._tasks.start(self.keys.follow(), "watch the keys")
        self.limiter.open()
        await self.laws.begun()
        await self.keys.begun()
        await self.identities.open(self._tasks)
        await self.limits.begun()
        if self.accounts is not None:
            self.accounts.law_changed(self.laws)
        await self._await_regions()
        port = await dataplane.open_entry(self.listener, config.listen, self.tier_admin.ready)
        self._tasks.start(self.reloader.keep(), "look at the configuration")
        self._tasks.start(self._publish_entry(admin), "say in etcd where the admin port is")
        if self.latencies is not None:
            self._tasks.start(self.latencies.publish(self.store), "publish how far clients' networks are")
        if self.drills is not None:
            self.drills.open(self._tasks)
        self.plane.open()
        self.admin.starting = ""
        return f"region {config.region}: clients on {config.listen.host}:{port}, admin on {config.admin.host}:{admin}"

    async def _await_regions(self) -> None:
        """Wait, for a bounded time, before clients are admitted: until some region serves, and its state is known
        here."""
        for seen, patience_s in ((self.tier_admin.ready, FIRST_REGION_S), (self.watcher.caught_up, WARM_S)):
            if not await until(seen, patience_s):
                return  # without a region there is no state to wait for

    async def _publish_entry(self, admin_port: int) -> None:
        """For operators only: that this balancer exists, and where to ask it. The store deletes it as it closes."""
        config = self.config
        report = EntryReport(
            region=config.region,
            instance=config.instance,
            admin_address=config.admin.reached_at(admin_port),
            admin_tls=config.admin.tls is not None,
            version=release(),
        )
        key = entry_key(config.region, config.instance)
        self._listed = await self.store.publish(key, encode(report), ENTRY_LEASE_S)

    async def close(self) -> None:
        """See farhop.service.process.lifecycle.Daemon."""
        self.tier_admin.stopping = True
        await all_of(
            self._close_drills,
            self.plane.drain,
            self.relay.close,
            self.close_accounts,
            self.watcher.close,
            self.limiter.close,
            self.roots.close,
            self._tasks.close,
            self.telemetry.close,
            self.store.close,
            self.admin.close,
            self.plane.close,
            lambda: self.instruments.tracing.close(2.0),
        )

    async def _close_drills(self) -> None:
        if self.drills is not None:
            await self.drills.close()

    async def close_accounts(self) -> None:
        if self.accounts is not None:
            await self.accounts.close()


def _flow_config(config: GlobalConfig, topology: Topology) -> FlowConfig:
    return FlowConfig(
        config.region,
        trie_bytes=config.trie_bytes,
        liveness=LivenessConfig(report_age_s=config.watch.report_age_s),
        spill=config.spill,
        https_only=config.listen.tls is not None,
        unicast_url=config.unicast.url if config.unicast is not None else "",
        pilots=config.pilots_in(topology),
    )


def _version(active: ActiveRequest) -> str:
    """The model version that the region sent with its answer."""
    return active.version.decode("latin-1")


def _prices(topology: Topology) -> dict[str, Price]:
    return {name: Price(one.usd_per_gpu_hour, one.egress_usd_per_gb) for name, one in topology.regions.items()}


def run(path: Path) -> None:
    """Run a global balancer from its configuration file. SystemExit(2), after one line, if it cannot start."""

    def make() -> GlobalBalancer:
        config = load(GlobalConfig, path)
        logs.configure("global", config.region, config.instance, config.log_level)
        return GlobalBalancer(config, stores.topology_of(config), Random(), path=path)

    run_process("global", make)
