"""Streams to this region's other balancers our requests under way and recently cached prefixes: the serving side of
peers.

Invariants: messages contain our own totals, never differences, so that a lost message is repaired by the next; a
stream's first message has every replica; the rate of cached prefixes is bounded, and a reader continues from its
position as long as that is remembered. Never leaves the region, never decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from farhop_wire import peers_pb2, peers_pb2_grpc

from farhop.service.authentication.peer_authenticator import ANY_PEER
from regional_lb.fleet.view import model_of
from regional_lb.mesh.config import PEERS_MAX
from regional_lb.mesh.messages import cached_to_wire, learned_to_wire, load_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from farhop.service.authentication.peer_authenticator import PeerAuthenticator
    from regional_lb.fleet.shares import Shares
    from regional_lb.scheduler.flow import RegionalFlow

SEND_S = 0.02
HEARTBEAT_S = 0.5
SLICE_NODES = 2000
SLICES = 4  # at a time, while one catches up: 400,000 nodes a second, for two seconds at most


class AskedCallback(Protocol):
    """Is called with the instance and control address of each asker; `proven`: TLS proves that it is a peer."""

    def __call__(self, instance: str, address: str, /, *, proven: bool) -> None: ...


class PeerFeed(peers_pb2_grpc.PeersServicer):
    """The streams of one balancer. `on_asked` is called for each asker, which `peer_authenticator` identifies."""

    def __init__(
        self,
        flow: RegionalFlow,
        shares: Shares,
        incarnation: int,
        clock: Callable[[], float],
        on_asked: AskedCallback,
        peer_authenticator: PeerAuthenticator = ANY_PEER,
    ) -> None:
        self._flow, self._shares, self._clock, self._on_asked = flow, shares, clock, on_asked
        self._peer_authenticator = peer_authenticator
        self.incarnation = incarnation
        self.draining = False
        self.readers = 0

    @property
    def known_cached_seq(self) -> int:
        """How far we have come in what is known to be cached."""
        return self._shares.recent.seq

    def everything(self) -> Iterator[peers_pb2.PeerUpdate]:
        """What a starting peer would receive, except for what is under way and waits here, and for prefixes of which
        the law does not let hashes be known in this region: it computes such prompts, and writes down nothing of them.
        """
        stream, region = _Stream(self, peers_pb2.FollowRequest()), self._flow.config.region
        while (update := stream.update()) is not None:
            for load in update.loads:
                load.in_flight = load.prefill_tokens = load.kv_tokens = 0
            update.queued.clear()
            lawful = [path for path in update.cached if not path.restricted or region in path.regions]
            del update.cached[:]
            update.cached.extend(lawful)
            yield update
            if update.caught_up:
                return

    async def Follow(  # noqa: N802 - the service's name for it
        self, request: peers_pb2.FollowRequest, context: Any
    ) -> AsyncIterator[peers_pb2.PeerUpdate]:
        """Stream updates until the peer disconnects."""
        if self.readers >= PEERS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {PEERS_MAX} peers")
        if request.region != self._flow.config.region:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "region: peers are balancers of one region")
        peer = await self._peer_authenticator.proven(context, "regional", request.region)
        self._on_asked(request.instance, request.control_address, proven=peer is not None)
        self.readers += 1
        self._shares.watched = True
        try:
            stream = _Stream(self, request)
            while True:
                for _ in range(SLICES):
                    update = stream.update()
                    if update is None:
                        break
                    yield update
                await asyncio.sleep(SEND_S)
        finally:
            self.readers -= 1
            self._shares.watched = self.readers > 0


class _Stream:
    """One reader: what it was sent, and when."""

    def __init__(self, feed: PeerFeed, request: peers_pb2.FollowRequest) -> None:
        self._feed, self._shares, self._flow = feed, feed._shares, feed._flow
        self._seq = self._change = 0
        self._queued: dict[str, int] = {}
        self._draining = False
        self._sent_at = -HEARTBEAT_S
        recent = self._shares.recent
        same = request.known_incarnation == feed.incarnation and recent.reaches(request.known_cached_seq)
        self._at = request.known_cached_seq if same else recent.floor
        # The others' cached prefixes are sent only to new readers: the rest get them from the others directly.
        self._all_until = self._at if same else recent.seq
        self._until = recent.seq
        self._teaches = request.known_incarnation != feed.incarnation
        self._caught_up = False

    def update(self) -> peers_pb2.PeerUpdate | None:
        """The next update to send; None if there is nothing new."""
        feed, shares, flow = self._feed, self._shares, self._flow
        self._change, moved = shares.moved(self._change)
        queued: dict[str, int] = {}  # by model, whichever version of it is waited for
        for variant in flow.queue.models():
            queued[model_of(variant)] = queued.get(model_of(variant), 0) + flow.wait_estimate.in_line(variant)
        self._at, cached = shares.recent.read(self._at, self._all_until, SLICE_NODES)
        caught_up = self._at >= self._until
        now = feed._clock()
        same = queued == self._queued and feed.draining == self._draining and caught_up == self._caught_up
        if same and not moved and not cached and now - self._sent_at < HEARTBEAT_S:
            return None
        self._sent_at, self._queued, self._draining, self._caught_up = now, queued, feed.draining, caught_up
        self._seq += 1
        learned = learned_to_wire(flow.replicas.learned(now)) if self._teaches else None
        self._teaches = False
        return peers_pb2.PeerUpdate(
            region=flow.config.region,
            instance=shares.instance,
            incarnation=feed.incarnation,
            seq=self._seq,
            draining=feed.draining,
            loads=[self._load(name) for name in moved],
            queued=queued,
            cached=[cached_to_wire(entry) for entry in cached],
            cached_seq=self._at,
            caught_up=caught_up,
            law_epoch=flow.law.epoch,
            law_fingerprint=flow.law.fingerprint,
            learned=learned,
        )

    def _load(self, name: str) -> peers_pb2.ReplicaLoad:
        return load_to_wire(name, self._shares.own(name, self._flow.replicas.ledger.load(name)))
