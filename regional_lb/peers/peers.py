"""The other balancers of this region: finds them, follows what they tell, and says who takes part.

They are found in etcd, in the configuration, and by their asking us, so that one that knows is enough. Invariants: a
peer takes part once it has told us what it serves, and as long as it speaks, be it to us or to etcd, and is not
draining; what it has under way counts while it speaks to us; losing etcd loses nobody who still speaks; of a message
that is not what it must be nothing is believed. Never decides about a request, never lets a hint leave the region.
"""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING, Any

import grpc
from farhop_wire import peers_pb2

from farhop.identity import names
from farhop.shell.callers import ANYBODY
from farhop.shell.tasks import Tasks
from farhop.store.contract import REGION_PREFIX, ChangeKind, StoreError
from farhop.store.report import TEXT_LIMIT, ReportError, check_address, decode
from regional_lb.config.peers import PEERS_MAX
from regional_lb.peers.feed import PeerFeed
from regional_lb.peers.follow import FORGET_S, Link, address_of
from regional_lb.peers.news import NewsError, event_of
from regional_lb.peers.shares import PeersChanged, TurnsPassed

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Address, Event
    from farhop.shell.callers import Callers
    from farhop.shell.certificates import Certificates
    from farhop.shell.lawbook import LawBook
    from farhop.store.contract import Change, Store
    from farhop.store.report import RegionReport
    from regional_lb.config import RegionalConfig
    from regional_lb.flow import RegionalFlow
    from regional_lb.peers.shares import Shares

GONE_S = 3.0  # a peer that nobody heard for this long takes part no more
WARM_S = 2.0  # how long a start waits for what the others know
TICK_S = 0.05
LIST_S = 1.0
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


class _Instance:
    """What is known of one peer. `stream_at` and `reported_at`: when it last spoke to us, and to etcd."""

    __slots__ = (
        "address", "cached_seq", "draining", "incarnation", "link", "reported", "reported_at", "stream_at", "told",
    )  # fmt: skip

    def __init__(self) -> None:
        self.address = ""
        self.incarnation = self.cached_seq = 0
        self.reported = (0, 0)
        self.stream_at = self.reported_at = -inf
        self.draining = self.told = False
        self.link: Link | None = None  # that which is connected

    def renewed(self, incarnation: int) -> None:
        """A new process under the name."""
        if incarnation > self.incarnation:
            self.incarnation, self.cached_seq, self.draining = incarnation, 0, False


class Peers:
    """All of them. `react` is told events; `refused` counts what was not believed, by reason.

    `certificates` are for peers that speak TLS, `trouble` is told where that fails, or cannot even be tried.
    """

    def __init__(
        self,
        config: RegionalConfig,
        flow: RegionalFlow,
        shares: Shares,
        store: Store,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
        incarnation: int,
        certificates: Certificates | None = None,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
        laws: LawBook | None = None,
        callers: Callers = ANYBODY,
    ) -> None:
        self._config, self._flow, self.shares, self._store = config, flow, shares, store
        self._react, self.refused, self.clock, self.rng = react, refused, clock, rng
        self._certificates, self.trouble, self._laws = certificates, trouble, laws
        self.feed = PeerFeed(flow, shares, incarnation, clock, self._met, callers)
        self._known: dict[str, _Instance] = {}
        self._links: dict[str, Link] = {}
        self._taking_part: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._tasks = Tasks()
        self.control_address = ""
        self.warm = False

    async def open(self, control_address: str) -> None:
        """Find the others and learn from them, within WARM_S; `control_address` is where they find us."""
        self.control_address = control_address
        for address in self._config.peers.addresses:
            self._link(address)
        with contextlib.suppress(StoreError, TimeoutError):  # the watch goes on trying
            async with asyncio.timeout(LIST_S):
                for entry in await self._store.list(self._prefix):
                    self._read(entry.key, entry.value)
        self._tasks.start(self._follow(), "watch the peers' reports")
        self._tasks.start(self._tick(), "judge who takes part")
        end = self.clock() + WARM_S
        while self.clock() < end and not all(link.settled for link in self._links.values()):
            await asyncio.sleep(0.01)
        self.warm = True

    def withdraw(self) -> None:
        """Hand everything over that we own; what is under way here is still told."""
        self.feed.draining = True
        self._judge(anyway=True)

    async def close(self) -> None:
        """Follow nobody any more."""
        await self._tasks.close()
        for link in tuple(self._links.values()):
            await link.close()
        self._links.clear()

    # -- finding them

    @property
    def _prefix(self) -> str:
        return f"{REGION_PREFIX}{self._config.region}/lb/"

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._store.watch(self._prefix)) as changes:
            async for change in changes:
                self.changed(change)

    def changed(self, change: Change) -> None:
        """Take one step of the watch. A key that goes is no death: its lease may have ended before its process."""
        if change.kind is ChangeKind.SNAPSHOT:
            for entry in change.entries:
                self._read(entry.key, entry.value)
        elif change.kind is ChangeKind.PUT:
            self._read(change.key, change.value)

    def _read(self, key: str, value: bytes) -> None:
        try:
            report = decode(value)
        except ReportError:
            self.refused("peer_report_malformed")
            return
        if key != f"{self._prefix}{report.instance}":
            self.refused("peer_report_misplaced")
        elif report.instance == self._config.instance:
            if report.incarnation > self.feed.incarnation:
                self.namesake(report.control_address)
        else:
            self._reported(report)

    def _reported(self, report: RegionReport) -> None:
        known = self._instance(report.instance)
        if known is None or (report.incarnation, report.seq) <= known.reported:
            return
        if report.incarnation < known.incarnation:
            return  # of the process before
        known.reported, known.reported_at = (report.incarnation, report.seq), self.clock()
        known.renewed(report.incarnation)
        known.draining |= report.draining
        known.address = report.control_address
        self._link(report.control_address)

    def _met(self, instance: str, address: str, *, proven: bool) -> None:
        """Somebody follows us: follow them, where they are if they proved who they are, else where we know them."""
        if instance == self._config.instance or not address:
            return
        try:
            check_address("control_address", address)
        except ReportError:
            self.refused("peer_address")
            return
        if proven:
            self._link(address)
        elif address not in self._links:
            self.refused("peer_unproven_address")
        if address in self._links:
            self._links[address].hurry()

    def _link(self, address: str) -> None:
        if address in self._links:
            return
        if len(self._links) < PEERS_MAX:
            self._links[address] = Link(self, address)
        else:
            self.refused("peer_too_many")

    def _instance(self, name: str) -> _Instance | None:
        known = self._known.get(name)
        if known is None and len(self._known) < PEERS_MAX:
            known = self._known[name] = _Instance()
        if known is None:
            self.refused("peer_too_many")
        return known

    def namesake(self, address: str) -> None:
        """Another process has our name: whoever reads reports would take the two for one."""
        self.refused("peer_namesake")
        self.trouble(address_of(address), f"it is instance {self._config.instance!r} as we are: give each its own")

    # -- who takes part

    async def _tick(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(TICK_S)
            if self.shares.contended:
                self._react(TurnsPassed())
            turn += 1
            if turn % 5 == 0:
                self._judge()
                await self._forget()

    def _judge(self, *, anyway: bool = False) -> None:
        now = self.clock()
        speaking = frozenset(n for n, known in self._known.items() if now - known.stream_at < GONE_S)
        live = frozenset(n for n, known in self._known.items() if known.told and _lives(known, now))
        if anyway or (live, speaking) != self._taking_part:
            self._taking_part = live, speaking
            self._react(PeersChanged(live, speaking, serving=not self.feed.draining))

    async def _forget(self) -> None:
        now = self.clock()
        for name, known in tuple(self._known.items()):
            if known.link is None and now - max(known.stream_at, known.reported_at) > FORGET_S:
                del self._known[name]
                if self._laws is not None:
                    self._laws.left(f"peer {name}")
        wanted = {known.address for known in self._known.values()} | set(self._config.peers.addresses)
        for address, link in tuple(self._links.items()):
            if address not in wanted and not link.connected and now - link.idle_since > FORGET_S:
                del self._links[address]
                await link.close()

    # -- what they say

    def request(self) -> peers_pb2.FollowRequest:
        """What a peer is asked that is not known yet."""
        return peers_pb2.FollowRequest(
            region=self._config.region, instance=self._config.instance, control_address=self.control_address
        )

    def channel(self, address: str) -> grpc.aio.Channel | None:
        """A channel there, encrypted as our own control port is; None if that cannot be."""
        if self._config.control.tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        tls = self._config.peers.tls
        if tls is None or self._certificates is None:
            self.trouble(address_of(address), "control.tls is given and peers.tls is not: add it, to share with peers")
            return None
        name = tls.server_name or names.host(self._config.trust_domain, "regional", self._config.region)
        other = ("grpc.ssl_target_name_override", name)
        return grpc.aio.secure_channel(address, self._certificates.material.channel(), options=(*_OPTIONS, other))

    def spoken_to_by(self, link: Link, news: peers_pb2.PeerNews) -> bool:
        """A stream began: whether it is worth following. Raises NewsError."""
        name = news.instance
        if news.region != self._config.region or not 0 < len(name) <= TEXT_LIMIT or news.incarnation <= 0:
            raise NewsError("peer_misplaced")
        if name == self._config.instance:
            if news.incarnation != self.feed.incarnation:
                self.namesake(link.address)
            return False
        known = self._instance(name)
        if known is None or news.incarnation < known.incarnation:
            return False
        if news.incarnation == known.incarnation and known.link not in (None, link):
            return False  # it is followed by another of its addresses
        known.renewed(news.incarnation)
        known.link, known.address = link, link.address
        return True

    def take(self, name: str, news: peers_pb2.PeerNews, *, first: bool) -> None:
        """Believe one message. Raises NewsError."""
        known = self._known[name]
        event = event_of(news, self._flow.law.epoch, first=first)
        if news.instance != name or news.incarnation != known.incarnation:
            raise NewsError("peer_misplaced")
        known.draining = news.draining
        known.cached_seq = news.cached_seq
        known.stream_at, known.told = self.clock(), True
        self._react(event)
        if first or (name in self._taking_part[0]) == known.draining:
            self._judge(anyway=first)

    def law_to_ask_for(self, news: peers_pb2.PeerNews) -> LawBook | None:
        """Where to offer the law that a peer goes by, if it is a later one than ours and could be believed."""
        laws = self._laws
        if laws is None or not laws.named(f"peer {news.instance}", news.law_epoch):
            return None
        return laws if laws.may_believe(proven=self.proven) else None

    @property
    def proven(self) -> bool:
        """Whether peers prove by TLS who they are."""
        return self._config.control.tls is not None

    def hung_up(self, name: str, link: Link) -> None:
        """The stream of a peer ended. It may be back at once: what it said stands for a while."""
        known = self._known.get(name)
        if known is not None and known.link is link:
            known.link = None

    def nobody_at(self, address: str) -> None:
        """Nobody listens there: what lived there is gone, unless it says something hereafter. Operators still see it
        for FORGET_S."""
        gone_at = self.clock() - GONE_S
        for known in self._known.values():
            if known.address == address and known.link is None and known.stream_at > -inf:
                known.stream_at, known.reported_at = min(known.stream_at, gone_at), min(known.reported_at, gone_at)
                self._judge()

    # -- for operators

    @property
    def up(self) -> int:
        """Peers whose stream is open."""
        return sum(known.link is not None for known in self._known.values())

    def ages_s(self) -> dict[str, float]:
        """Seconds since each peer last spoke to us, of those that ever did."""
        now = self.clock()
        return {name: now - known.stream_at for name, known in self._known.items() if known.stream_at > -inf}

    def status(self) -> list[dict[str, Any]]:
        """Each peer."""
        ages_s, loads = self.ages_s(), {name: (at, queued) for name, at, queued in self.shares.told()}
        return [
            {
                "instance": name,
                "control": known.address,
                "connected": known.link is not None,
                "age_s": ages_s.get(name),
                "takes_part": name in self._taking_part[0],
                "draining": known.draining,
                "in_flight": loads.get(name, (0, 0))[0],
                "queued_requests": loads.get(name, (0, 0))[1],
            }
            for name, known in sorted(self._known.items())
        ]

    def resume(self, name: str) -> tuple[int, int]:
        """From where a peer's stream may go on: its incarnation, and how far it had come."""
        known = self._known.get(name)
        return (known.incarnation, known.cached_seq) if known is not None else (0, 0)


def _lives(known: _Instance, now: float) -> bool:
    return not known.draining and now - max(known.stream_at, known.reported_at) < GONE_S
