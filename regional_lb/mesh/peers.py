"""The other balancers of this region: finds them, follows their messages, and determines which of them take part.

They are found in etcd, in the configuration, and when they contact us, so one that knows the others is enough.
Invariants: a peer takes part once it has reported the models that it serves, and as long as it sends to us or to etcd
and is not draining; its requests under way count while it sends to us; losing etcd loses no peer that still sends; an
invalid message is rejected whole; messages are applied in order and without gaps, or their stream begins again; a
channel is never reused, so that certificates and addresses are current. Never decides about a request, never lets a
prefix fingerprint leave the region.
"""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING, Any

import grpc
from farhop_wire import peers_pb2, peers_pb2_grpc, region_pb2, region_pb2_grpc

from farhop.balance.backoff import Backoff
from farhop.balance.machine import Address
from farhop.identity import certificate_names
from farhop.service.assembly.region_channel import answers_at_most
from farhop.service.authentication.peer_authenticator import ANY_PEER
from farhop.service.process.tasks import Tasks, until
from farhop.store.contract import REGION_PREFIX, StoreError
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import TEXT_LIMIT, check_address, decode
from farhop.store.follow import follow
from farhop.store.grpc_options import FIXED_WINDOW
from regional_lb.fleet.shares import PeersChanged, TurnTimerFired
from regional_lb.mesh.config import PEERS_MAX
from regional_lb.mesh.feed import PeerFeed
from regional_lb.mesh.messages import PeerUpdateError, event_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from random import Random

    from farhop.balance.machine import Event
    from farhop.service.authentication.peer_authenticator import PeerAuthenticator
    from farhop.service.config.certificates import Certificates
    from farhop.service.law.lawbook import LawBook
    from farhop.store.contract import Change, Store
    from farhop.store.documents.report import RegionReport
    from regional_lb.fleet.shares import Shares
    from regional_lb.mesh.config import MeshConfig
    from regional_lb.scheduler.flow import RegionalFlow

GONE_S = 3.0  # a peer that was silent for this long no longer takes part
WARM_S = 2.0  # how long a start waits for what the others know
TICK_S = 0.05
_TURN = 5  # ticks between two looks at which peers take part
LIST_S = 1.0
SILENT_S = 2.0  # a stream that is silent for this long, four heartbeats, is given up
LAW_AGAIN_S = 2.0
FORGET_S = 60.0
# gRPC reads a message whole before anybody may judge it: 4 MiB of a map held the loop for up to 1.7 s. The first one of
# a stream has all loads, of 8,192 replicas some 0.5 MB, and what was learned; the others are short.
UPDATE_BYTES_MAX = 1024 * 1024
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    *FIXED_WINDOW,
    ("grpc.service_config", answers_at_most("Peers", {"Follow": UPDATE_BYTES_MAX})),
)


class _Instance:
    """The known state of one peer. `stream_at` and `reported_at`: when it last sent to us, and to etcd."""

    __slots__ = (
        "address", "cached_seq", "draining", "incarnation", "link", "reported", "reported_at", "stream_at", "synced",
    )  # fmt: skip

    def __init__(self) -> None:
        self.address = ""
        self.incarnation = self.cached_seq = 0
        self.reported = (0, 0)
        self.stream_at = self.reported_at = -inf
        self.draining = self.synced = False
        self.link: PeerLink | None = None  # that which is connected

    def renewed(self, incarnation: int) -> None:
        """A new process has this name."""
        if incarnation > self.incarnation:
            self.incarnation, self.cached_seq, self.draining = incarnation, 0, False


class Peers:
    """All of them. `react` takes events; `refused` counts rejected messages by reason.

    `certificates` are for peers that use TLS; `trouble` is called if that fails, or cannot even be tried.
    """

    def __init__(
        self,
        config: MeshConfig,
        flow: RegionalFlow,
        shares: Shares,
        store: Store,
        *,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
        incarnation: int,
        certificates: Certificates | None = None,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
        laws: LawBook | None = None,
        peer_authenticator: PeerAuthenticator = ANY_PEER,
    ) -> None:
        self._config, self._flow, self.shares, self._store = config, flow, shares, store
        self.react, self.refused, self.clock, self.rng = react, refused, clock, rng
        self._certificates, self.trouble, self._laws = certificates, trouble, laws
        self.feed = PeerFeed(flow, shares, incarnation, clock, self.met, peer_authenticator)
        self.known: dict[str, _Instance] = {}
        self.links: dict[str, PeerLink] = {}
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
                for entry in await self._store.list(self.prefix):
                    self._read(entry.key, entry.value)
        self._tasks.start(self._follow(), "watch the peers' reports")
        self._tasks.start(self._tick(), "judge who takes part")
        await until(lambda: all(link.settled for link in self.links.values()), WARM_S)
        self.warm = True

    def withdraw(self) -> None:
        """Hand over all replicas that we own; our requests under way are still reported."""
        self.feed.draining = True
        self._update_participants(anyway=True)

    async def close(self) -> None:
        """Stop following."""
        await self._tasks.close()
        for link in tuple(self.links.values()):
            await link.close()
        self.links.clear()

    # -- finding them

    @property
    def prefix(self) -> str:
        return f"{REGION_PREFIX}{self._config.region}/lb/"

    async def _follow(self) -> None:
        await follow(self._store, self.prefix, self.changed)

    def changed(self, change: Change) -> None:
        """Take one step of the watch. A key that goes is no death: its lease may have ended before its process."""
        for entry in change.written:
            self._read(entry.key, entry.value)

    def _read(self, key: str, value: bytes) -> None:
        try:
            report = decode(value)
        except DocumentError:
            self.refused("peer_report_malformed")
            return
        if key != f"{self.prefix}{report.instance}":
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

    def met(self, instance: str, address: str, *, proven: bool) -> None:
        """A peer follows us: follow it, at its own address if it proved its identity, else at the known one."""
        if instance == self._config.instance or not address:
            return
        try:
            check_address("control_address", address)
        except DocumentError:
            self.refused("peer_address")
            return
        if proven:
            self._link(address)
        elif address not in self.links:
            self.refused("peer_unproven_address")
        if address in self.links:
            self.links[address].retry_soon()

    def _link(self, address: str) -> None:
        if address in self.links:
            return
        if len(self.links) < PEERS_MAX:
            self.links[address] = PeerLink(self, address)
        else:
            self.refused("peer_too_many")

    def _instance(self, name: str) -> _Instance | None:
        known = self.known.get(name)
        if known is None and len(self.known) < PEERS_MAX:
            known = self.known[name] = _Instance()
        if known is None:
            self.refused("peer_too_many")
        return known

    def namesake(self, address: str) -> None:
        """Another process has our name: readers of reports would take the two for one."""
        self.refused("peer_namesake")
        self.trouble(address_of(address), f"it is instance {self._config.instance!r} as we are: give each its own")

    # -- which peers take part

    async def _tick(self) -> None:
        turn = 0
        while True:
            ticks = 1 if self.known else _TURN  # alone, there is no other to leave slots to
            await asyncio.sleep(ticks * TICK_S)
            if self.shares.contended:
                self.react(TurnTimerFired())
            turn += ticks
            if turn % _TURN < ticks:
                self._update_participants()
                await self._forget()

    def _update_participants(self, *, anyway: bool = False) -> None:
        now = self.clock()
        speaking = frozenset(n for n, known in self.known.items() if now - known.stream_at < GONE_S)
        live = frozenset(n for n, known in self.known.items() if known.synced and _lives(known, now))
        if anyway or (live, speaking) != self._taking_part:
            self._taking_part = live, speaking
            self.react(PeersChanged(live, speaking, serving=not self.feed.draining))

    async def _forget(self) -> None:
        now = self.clock()
        for name, known in tuple(self.known.items()):
            if known.link is None and now - max(known.stream_at, known.reported_at) > FORGET_S:
                del self.known[name]
                if self._laws is not None:
                    self._laws.left(f"peer {name}")
        wanted = {known.address for known in self.known.values()} | set(self._config.peers.addresses)
        for address, link in tuple(self.links.items()):
            if address not in wanted and not link.connected and now - link.idle_since > FORGET_S:
                del self.links[address]
                await link.close()

    async def borrow(self, address: str, request: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        """Ask the root of limits, if that is a peer. AioRpcError if it does not answer; OSError where it cannot be.

        By a channel of its own, as all of ours: it is asked every few seconds, and only where clients come here.
        """
        opened = self.channel(address)
        if opened is None:
            raise OSError("peers.tls is not given")
        async with opened:
            return await region_pb2_grpc.RegionStub(opened).Borrow(request)

    # -- what they say

    def request(self) -> peers_pb2.FollowRequest:
        """The request to a peer: what is not known yet."""
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
        name = tls.server_name or certificate_names.host(self._config.trust_domain, "regional", self._config.region)
        other = ("grpc.ssl_target_name_override", name)
        return grpc.aio.secure_channel(address, self._certificates.material.channel(), options=(*_OPTIONS, other))

    def on_first_update(self, link: PeerLink, update: peers_pb2.PeerUpdate) -> bool:
        """A stream began: whether it is worth following. Raises PeerUpdateError."""
        name = update.instance
        if update.region != self._config.region or not 0 < len(name) <= TEXT_LIMIT or update.incarnation <= 0:
            raise PeerUpdateError("peer_misplaced")
        if name == self._config.instance:
            if update.incarnation != self.feed.incarnation:
                self.namesake(link.address)
            return False
        known = self._instance(name)
        if known is None or update.incarnation < known.incarnation:
            return False
        if update.incarnation == known.incarnation and known.link not in (None, link):
            return False  # it is followed by another of its addresses
        known.renewed(update.incarnation)
        known.link, known.address = link, link.address
        return True

    def take(self, name: str, update: peers_pb2.PeerUpdate, *, first: bool) -> None:
        """Believe one message. Raises PeerUpdateError."""
        known = self.known[name]
        event = event_of(update, self._flow.law, first=first)
        if update.instance != name or update.incarnation != known.incarnation:
            raise PeerUpdateError("peer_misplaced")
        known.draining = update.draining
        known.cached_seq = update.cached_seq
        known.stream_at, known.synced = self.clock(), True
        self.react(event)
        if first or (name in self._taking_part[0]) == known.draining:
            self._update_participants(anyway=first)

    def law_to_ask_for(self, update: peers_pb2.PeerUpdate) -> LawBook | None:
        """The law book through which to exchange laws, if the peer's law is later than ours and could be trusted; else
        None.
        """
        laws = self._laws
        if laws is None or not laws.named(f"peer {update.instance}", update.law_epoch):
            return None
        return laws if laws.may_believe(proven=self.proven) else None

    @property
    def proven(self) -> bool:
        """Whether peers prove their identity by TLS."""
        return self._config.control.tls is not None

    def hung_up(self, name: str, link: PeerLink) -> None:
        """The stream of a peer ended. It may be back at once, so its state is kept for a while."""
        known = self.known.get(name)
        if known is not None and known.link is link:
            known.link = None

    def refused_at(self, address: str) -> None:
        """Nothing listens there: the peer is gone, unless it sends something later. Operators still see it for
        FORGET_S."""
        gone_at = self.clock() - GONE_S
        for known in self.known.values():
            if known.address == address and known.link is None and known.stream_at > -inf:
                known.stream_at, known.reported_at = min(known.stream_at, gone_at), min(known.reported_at, gone_at)
                self._update_participants()

    # -- for operators

    @property
    def up(self) -> int:
        """The number of peers with an open stream."""
        return sum(known.link is not None for known in self.known.values())

    def ages_s(self) -> dict[str, float]:
        """Seconds since the last message of each peer that ever sent one."""
        now = self.clock()
        return {name: now - known.stream_at for name, known in self.known.items() if known.stream_at > -inf}

    def status(self) -> list[dict[str, Any]]:
        """Each peer."""
        ages_s, loads = self.ages_s(), {name: (at, queued) for name, at, queued in self.shares.status()}
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
            for name, known in sorted(self.known.items())
        ]

    def resume(self, name: str) -> tuple[int, int]:
        """From where a peer's stream may go on: its incarnation, and how far it had come."""
        known = self.known.get(name)
        return (known.incarnation, known.cached_seq) if known is not None else (0, 0)


def _lives(known: _Instance, now: float) -> bool:
    return not known.draining and now - max(known.stream_at, known.reported_at) < GONE_S


class PeerLink:
    """Follows the peer at one address, for as long as the address is wanted."""

    def __init__(self, peers: Peers, address: str) -> None:
        self._peers, self.address = peers, address
        self._backoff = Backoff(peers.rng, 0.05, 2.0)
        self._name = ""
        self._soon = asyncio.Event()
        self.settled = False  # it has sent all it knew, or cannot be reached
        self.connected = False
        self.idle_since = peers.clock()
        self._tasks = Tasks()
        self._tasks.start(self._run(), f"follow the peer at {address}")

    async def close(self) -> None:
        """Follow no more."""
        await self._tasks.close()

    def retry_soon(self) -> None:
        """Retry soon: the peer has probably become reachable."""
        self._soon.set()

    async def _run(self) -> None:
        while True:
            pause_s = None
            try:
                worthwhile = await self._once()
                pause_s = None if worthwhile else FORGET_S / 4
            except PeerUpdateError as error:
                self._peers.refused(str(error))
            except grpc.aio.AioRpcError as error:
                pause_s = self._failed(error)
            except TimeoutError:
                pass  # no answer in time: ask again after the pause
            self.settled = True
            self._soon.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s or self._backoff.next_s()):
                    await self._soon.wait()

    def _failed(self, error: grpc.aio.AioRpcError) -> float | None:
        why = error.details() or ""
        if "refused" in why:
            self._peers.refused_at(self.address)
        elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return FORGET_S / 4  # an older build: it shares nothing, and reports all it has
        elif "andshake failed" in why or "Hostname Verification" in why:
            self._peers.trouble(address_of(self.address), why)
        elif error.code() is not grpc.StatusCode.UNAVAILABLE:
            self._peers.refused(f"peer_{error.code().name.lower()}")
        return None

    async def _once(self) -> bool:
        """Follow one stream to its end. Returns False if an early retry is pointless."""
        channel = self._peers.channel(self.address)
        if channel is None:
            return False
        request = self._peers.request()
        request.known_incarnation, request.known_cached_seq = self._peers.resume(self._name)
        async with channel:
            call = peers_pb2_grpc.PeersStub(channel).Follow(request)
            try:
                return await self._read(aiter(call), channel)
            finally:
                call.cancel()
                if self.connected:
                    self.connected, self.idle_since = False, self._peers.clock()
                    self._peers.hung_up(self._name, self)

    async def _read(self, messages: AsyncIterator[peers_pb2.PeerUpdate], channel: grpc.aio.Channel) -> bool:
        seq, asked_at = 0, -inf
        while True:
            async with asyncio.timeout(SILENT_S):
                update = await anext(messages, None)
            if update is None:
                return True
            if update.seq != seq + 1:
                raise PeerUpdateError("peer_gap")
            if seq == 0:
                if not self._peers.on_first_update(self, update):
                    return False
                self._name, self.connected = update.instance, True
                self._backoff.reset()
            self._peers.take(self._name, update, first=seq == 0)
            seq = update.seq
            if (
                self._peers.clock() - asked_at >= LAW_AGAIN_S
                and (laws := self._peers.law_to_ask_for(update)) is not None
            ):
                asked_at = self._peers.clock()
                await self._ask_law(laws, channel)
            self.settled = self.settled or update.caught_up

    async def _ask_law(self, laws: LawBook, channel: grpc.aio.Channel) -> None:
        request = region_pb2.LawExchange(sender=self._peers.shares.instance, epoch=laws.law.held_epoch)
        with contextlib.suppress(grpc.aio.AioRpcError):  # it is asked again
            theirs = await region_pb2_grpc.RegionStub(channel).Law(request, timeout=SILENT_S / 2)
            if theirs.document:
                await laws.offer(theirs.document, f"peer {self._name}", proven=self._peers.proven)


def address_of(text: str) -> Address:
    """A checked host:port."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))
