"""Assembles a global balancer from its configuration: the one place here that knows the clock, chance and sockets.

Order of starting: regions are watched, then the listener opens. Of stopping: no new connections, requests under way
finish, everything closes.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from farhop.balance.guard import GuardConfig
from farhop.balance.health import LivenessConfig
from farhop.balance.limits import ByteBudget, SlotLimit
from farhop.balance.machine import LawChanged
from farhop.identity.hop import HopSigner
from farhop.identity.passes import PassSigner
from farhop.relay.listener import Listener
from farhop.relay.relay import Relay
from farhop.shell import wiring
from farhop.shell.admin import Admin
from farhop.shell.certificates import Cabinet
from farhop.shell.clock import Clock, wall
from farhop.shell.config import ConfigError, load
from farhop.shell.decisions import Decisions
from farhop.shell.door import Door
from farhop.shell.keeper import KeyKeeper
from farhop.shell.lag import LoopLag
from farhop.shell.large import LargeBodies
from farhop.shell.marks import AnyVersion, MarkReader
from farhop.shell.observe import Observer
from farhop.shell.process import run as run_process
from farhop.shell.session import SessionReader
from farhop.shell.tasks import Tasks, all_of
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.spans import Tracing
from global_lb.advise import Advisor
from global_lb.bounds import FlowConfig, Spill
from global_lb.config import GlobalConfig
from global_lb.detours import Detours
from global_lb.flow import GlobalFlow
from global_lb.passes import Passes
from global_lb.policy import Routes
from global_lb.prefixes import Prefixes
from global_lb.row import Price
from global_lb.serve import DecisionReasons, GlobalDesk, GlobalTier
from global_lb.steering import Steering, routes_of
from global_lb.watch import Watcher
from topology.law import Law

if TYPE_CHECKING:
    from pathlib import Path

    from farhop.store.contract import Store
    from topology.model import Topology


SETTLE_S = 1.0  # how long clients are kept out while no region is known to serve


class GlobalBalancer:
    """One global balancer, assembled."""

    def __init__(self, config: GlobalConfig, topology: Topology, rng: Random, store: Store | None = None) -> None:
        self.config, self.topology = config, topology
        self.clock = Clock(rng)
        log = logs.Throttled(logs.get("global"), 10.0, self.clock.now)
        self.metrics = TierMetrics("global", config.region, config.instance)
        self.decisions = Decisions()
        self.tracing = Tracing("farhop-global", config.region, config.instance)
        for problem in self.tracing.problems:
            log.warning("telemetry", problem, problem=problem)
        liveness = LivenessConfig(report_age_s=config.watch.report_age_s)
        flow_config = FlowConfig(
            config.region, trie_bytes=config.trie_bytes, liveness=liveness, spill=_spill(config),
            https_only=config.listen.tls is not None,
        )  # fmt: skip
        self.flow = GlobalFlow(flow_config, Law(topology), rng, self._patience_s, _routes(config, topology), {
            name: Price(region.usd_per_gpu_hour, region.egress_usd_per_gb) for name, region in topology.regions.items()
        })  # fmt: skip
        self.observer = Observer(
            "farhop.global", "farhop.global.decide", self.tracing, self.metrics, self.decisions, self.clock, rng,
            DecisionReasons(config.region), config.limits.traced_per_s_max,
        )  # fmt: skip
        signer = HopSigner(config.hop.secrets(), config.hop.active, config.region)
        if lacking := [name for name in sorted(topology.regions) if not signer.reaches(name)]:
            remedy = f"derive it anew with: farhop certs hop-key --from {config.region}"
            raise ConfigError("hop.keys", [f"the active key does not reach {', '.join(lacking[:8])}; {remedy}"])
        self.secrecy = wiring.Secrecy(Cabinet(logs.get("global"), wall), self.metrics, log)
        regions = self.secrecy.upstream("tier_tls", config.tier_tls)
        pool = self.secrecy.pool(config.limits, regions)
        passes = Passes(PassSigner(config.hop.secrets(), config.hop.active, config.region), self.flow, self.clock)
        tier = GlobalTier(self.observer, log, self.flow, signer, config.balancer, self.clock, passes, config.mutual)
        self.budget, self.requests = ByteBudget(config.limits.buffered_bytes_max), SlotLimit(config.limits.requests_max)
        self.lag = LoopLag()
        self.relay = Relay(b"global", self.flow, tier, pool, self.clock.now, upstream_is_tier=True, budget=self.budget)
        self._log, self._slots = log, wiring.slots()
        self._entry(rng, passes)
        hubs = store if store is not None else wiring.hubs(config, topology)
        keep = wiring.keep(config, "global", rng, log)
        self.store = wiring.sealed(hubs, config.signing.made(), self.metrics.report_refused, rng, keep)
        self.laws = wiring.law_book(config, "global", self.store, self.flow.law, self._adopt, self.metrics, log, rng)
        self.prefixes = prefixes = Prefixes(self.flow.trie, self.metrics.report_refused, self.flow.law.epoch)
        self.flow.sent.append(prefixes.sent)
        self.flow.forgotten.append(prefixes.begin_anew)
        self.watcher = Watcher(
            config, topology, self.store, self.relay.react, self.metrics.report_refused, self.clock.now, rng, prefixes,
            regions, self.secrecy.trouble, self.relay, self.laws,
        )  # fmt: skip
        self.steering = Steering(
            self.store, config.region, topology.regions, self.relay.react, self.metrics.report_refused, self.clock.now
        )
        self.detours = Detours(
            self.store, config.region, config.instance, self._measured, self.metrics.report_refused,
            self.clock.now,
        )  # fmt: skip
        self._tasks = Tasks()
        self.desk = GlobalDesk(
            config.instance, self.flow, self.keeper, self.door, self.watcher, self.steering, self.detours, self.clock,
            self.laws,
        )  # fmt: skip
        hub = topology.regions[config.region].hub
        self.desk.kept = lambda: wiring.kept(self.store, hub)
        self.admin = Admin(self.desk, self.metrics, self.decisions, self.secrecy.listener("admin", config.admin))
        self._gauges()

    def _entry(self, rng: Random, passes: Passes) -> None:
        """Where clients come in, and who asks what of them."""
        config = self.config
        self.keeper = KeyKeeper(
            config.region, lambda: self.flow.law,
            lambda regions: self.flow.view.models(regions), config.limits.request_s,
        )  # fmt: skip
        self.observer.may_record = self.keeper.recorded
        session = SessionReader(**config.session.model_dump(), wanted=self.flow.routes.want_session)
        marks = MarkReader(AnyVersion())
        advisor = Advisor(self.flow, self.observer, passes, self.clock)
        self.guard, self.large = config.requests.guard(), LargeBodies()
        signs = not all(map(config.mutual, self.topology.regions))  # without mutual TLS tokens are bound to the body
        self.door = Door(
            self.keeper, self.observer, self.clock, rng, session, marks,
            advisor=advisor, guard=self.guard, large=self.large, signs=signs,
        )  # fmt: skip
        self.door.relay = self.relay
        self.listener = Listener(
            "listen", self.door, wiring.inbound(config.limits), self.budget, self._slots, self.requests,
            tls=self.secrecy.listener("listen", config.listen),
        )  # fmt: skip

    def _patience_s(self, tenant: str) -> float:
        return self.flow.law.patience_s(tenant)

    def _adopt(self, law: Law) -> None:
        self.relay.react(LawChanged(law))
        self.prefixes.adopt(self.flow.law.epoch)

    def _measured(self) -> dict[str, float]:
        return self.watcher.distances.measured(self.clock.now())

    def _gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("trie_nodes", "Nodes of the prefix trie.", lambda: float(self.flow.trie.nodes))
        gauge("region_up", "1 if the region may be chosen.", self._regions_up, "to")
        gauge("view_age_seconds", "Age of the last report of each region.", self._ages, "to")
        self.laws.observe(self.metrics)
        gauge("region_hit_predicted_tokens", "Expected to be cached in each region.", lambda: self._hits(0), "to")
        gauge("region_hit_actual_tokens", "Of the same requests, found cached there.", lambda: self._hits(1), "to")
        gauge("region_residence", "Share of believed hits that proved true lately.", self._residence, "to")
        wiring.observe(
            self.metrics, self.budget, self.requests, self.relay.pool, self.lag, self.guard, self.large, self.listener
        )

    def _hits(self, which: int) -> dict[str, float]:
        return {name: (hits.predicted_tokens, hits.actual_tokens)[which] for name, hits in self.flow.hits.items()}

    def _residence(self) -> dict[str, float]:
        now = self.clock.now()
        return {name: mean.at(now) for name, mean in self.flow.residence.items()}

    def _regions_up(self) -> dict[str, float]:
        now = self.clock.now()
        return {name: float(h.read(now).state in ("up", "suspect")) for name, h in self.flow.liveness.items()}

    def _ages(self) -> dict[str, float]:
        now = self.clock.now()
        return {n: now - max(i.received_at for i in r.instances) for n, r in self.flow.view.regions.items()}

    async def open(self) -> str:
        """See shell.process.Balancer."""
        config = self.config
        self.laws.remember()
        await self.store.open()
        await self.watcher.open()
        self._tasks.start(self.laws.follow(), "watch the law")
        self._tasks.start(self.steering.follow_routes(), "watch the routes")
        self._tasks.start(self.steering.follow_words(), "watch the biases and pins")
        self._tasks.start(self.detours.publish(), "publish the wire times")
        self._tasks.start(self.detours.follow(), "watch the others' wire times")
        await self.laws.begun()
        port = await wiring.open_entry(self.listener, config.listen, self.desk.ready, SETTLE_S)
        admin = await self.admin.open(config.admin.host, config.admin.port)
        self.secrecy.open()
        self.lag.open()
        wiring.check_descriptors(config.limits, self._slots, self._log)
        return f"region {config.region}: clients on {config.listen.host}:{port}, admin on {config.admin.host}:{admin}"

    async def close(self) -> None:
        """See shell.process.Balancer."""
        self.desk.stopping = True
        await all_of(
            lambda: self.listener.close(self.config.limits.drain_s),
            self.relay.close,
            self._close_readers,
            self.watcher.close,
            self._tasks.close,
            self.store.close,
            self.admin.close,
            self.secrecy.close,
            self.lag.close,
            lambda: self.tracing.close(2.0),
        )

    async def _close_readers(self) -> None:
        self.large.close()


def _routes(config: GlobalConfig, topology: Topology) -> Routes:
    try:
        return Routes(routes_of(config.routes, topology.regions))
    except ValueError as error:
        raise ConfigError("configuration", [str(error)]) from None


def _spill(config: GlobalConfig) -> Spill:
    told = config.spill
    guard = GuardConfig(spill_at=told.at, return_at=told.return_at, hold_s=told.hold_s, ramp_per_s=told.ramp_per_s)
    return Spill(guard, told.penalty_ms)


def run(path: Path) -> None:
    """Run a global balancer from its configuration file. SystemExit(2), after one line, if it cannot start."""

    def make() -> GlobalBalancer:
        config = load(GlobalConfig, path)
        logs.configure("global", config.region, config.instance, config.log_level)
        return GlobalBalancer(config, wiring.world(config), Random())

    run_process("global", make)
