"""All exchange with other balancers: reports and prefixes for global balancers, state for the region's other balancers,
what a limit root lends, and the state that a restart begins with.

All of it uses the control port, except for documents in etcd. Never decides: received data go to the flow as events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.service.assembly import stores
from farhop.service.authentication.peer_authenticator import peer_authenticator_of
from farhop.service.process.clock import cpu_s, wall
from farhop.service.process.tasks import Tasks, all_of
from farhop.store.hubs import stores_of
from farhop.store.sealed import inner
from regional_lb.app.control_port import ControlPort
from regional_lb.mesh.limit_root import LimitRoot
from regional_lb.mesh.peers import Peers
from regional_lb.mesh.report import Reporter
from regional_lb.mesh.warm_restart import WarmRestart

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop_wire import region_pb2

    from farhop.balance.machine import Event
    from farhop.service.assembly.dataplane import DataPlane
    from farhop.service.assembly.instruments import Instruments
    from farhop.service.law.lawbook import LawBook
    from farhop.service.limits.book import LimitBook
    from farhop.service.process.clock import Clock
    from farhop.store.contract import Store
    from farhop.store.documents.limits import RootClaim
    from regional_lb.app.config import RegionalConfig
    from regional_lb.scheduler.flow import RegionalFlow


class Mesh:
    """The connections of one balancer to its peers. `hub`: the etcd cluster of its region; `react` passes an event to
    its flow.
    """

    def __init__(
        self,
        config: RegionalConfig,
        flow: RegionalFlow,
        plane: DataPlane,
        instruments: Instruments,
        store: Store,
        hub: str,
        *,
        laws: LawBook,
        limits: LimitBook,
        react: Callable[[Event], None],
        clock: Clock,
        rng: Random,
        incarnation: int,
    ) -> None:
        assert flow.replicas.shares is not None  # it has a name
        self._config, self._flow, self._instruments, self._store, self._hub = config, flow, instruments, store, hub
        self._laws, self._clock, self._incarnation = laws, clock, incarnation
        refused = instruments.metrics.report_refused
        self._control = ControlPort(config.control, plane.tls.listened("control", config.control))
        self._peer_authenticator = peer_authenticator_of(config.control, config.trust_domain)
        self.limit_root = LimitRoot(
            limits, inner(stores_of(store, hub)[hub]), config.region, config.instance, clock.now
        )
        self.peers = Peers(
            config,
            flow,
            flow.replicas.shares,
            store,
            react=react,
            refused=refused,
            clock=clock.now,
            rng=rng,
            incarnation=incarnation,
            certificates=plane.tls.upstream("peers.tls", config.peers.tls),
            trouble=plane.tls.trouble,
            laws=laws,
            peer_authenticator=self._peer_authenticator,
        )
        self._warm_restart = WarmRestart(
            stores.state(config, "regional"), flow, self.peers.feed, react, refused, lambda: wall().timestamp(), cpu_s
        )
        self.reporter: Reporter | None = None
        self._tasks = Tasks()

    def observe(self) -> None:
        """Export the state of peers and of lent units as metrics."""
        metrics, peers = self._instruments.metrics, self.peers
        metrics.gauge("peers_connected", "Other balancers of the region whose stream is open.", lambda: float(peers.up))
        metrics.gauge("peer_age_seconds", "Since the last message of each peer.", peers.ages_s, "peer")
        self.limit_root.observe(metrics)

    async def open(self, tier_port: int, admin_port: int) -> None:
        """Answer on the control port and learn from peers; returns once they have sent their state, or after a time
        limit. The ports are those at which others reach this process. Nothing is published yet. Raises
        PortTakenError."""
        config, advertised, port = self._config, self._config.advertise, self._control.listen()
        control = f"{advertised}:{port}"
        self.reporter = reporter = Reporter(
            self._flow,
            region=config.region,
            instance=config.instance,
            addresses=(f"{advertised}:{tier_port}", control, config.admin.reached_at(admin_port, advertised)),
            clock=self._clock.now,
            incarnation=self._incarnation,
            prefix_nodes_per_s=config.prefix_nodes_per_s,
            client_url=(config.client.url or "") if config.client is not None else "",
            quiet_s=self._instruments.telemetry.quiet_s,
            laws=self._laws,
            peer_authenticator=self._peer_authenticator,
            signer=config.report_signer,
            admin_tls=config.admin.tls is not None,
            limit_root=self.limit_root,
        )
        reporter.hold()
        await self._control.start(reporter, self.peers.feed)
        self.limit_root.open(control)
        await self._warm_restart.restore()  # before the peers, whose knowledge is newer
        await self.peers.open(control)
        self._tasks.start(self._warm_restart.keep(), "write down what a restart is to know")

    async def publish(self) -> None:
        """Publish that this balancer accepts work from now on."""
        assert self.reporter is not None  # it is open
        await self.reporter.open(self._store)

    def published(self) -> list[dict[str, Any]]:
        """For operators: why this balancer's reports are missing in a hub."""
        troubles = {} if self.reporter is None else self.reporter.published(self._hub)
        return [{"hub": name, "trouble": why} for name, why in troubles.items()]

    async def borrow(self, claim: RootClaim, request: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        """Borrow from this region's root, which may be this process. Raises OSError."""
        if claim.region != self._config.region:
            raise OSError("a regional balancer borrows in its own region alone")
        if claim.instance == self._config.instance:
            reply = self.limit_root.borrowed(request)
            if reply is None:
                raise OSError("not the root any more")
            return reply
        return await self.peers.borrow(claim.address, request)

    async def withdraw(self) -> None:
        """Inform all others that this balancer leaves; they are still answered."""
        self.peers.withdraw()
        if self.reporter is not None:
            await self.reporter.withdraw()

    async def close(self) -> None:
        """Stop answering. May be called at any time."""
        await all_of(
            self._tasks.close, self.limit_root.close, self._warm_restart.save, self.peers.close, self._control.close
        )
