"""Follows one address at which another balancer of this region may answer, again and again, at a polite pace.

Invariants: a stream that says nothing for SILENT_S is given up; messages are believed in order and without a gap, or
the stream begins anew; a channel is never reused, so that certificates and addresses are those of now. Never decides
what is believed: `Peers` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING

import grpc
from farhop_wire import peers_pb2_grpc, region_pb2, region_pb2_grpc

from farhop.balance.machine import Address
from farhop.shell.tasks import Tasks
from farhop.store.backoff import Backoff
from regional_lb.peers.news import NewsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from farhop_wire import peers_pb2

    from farhop.shell.lawbook import LawBook
    from regional_lb.peers.peers import Peers

SILENT_S = 2.0  # four heartbeats
LAW_AGAIN_S = 2.0
FORGET_S = 60.0


class Link:
    """Follows whoever answers at one address, for as long as the address is wanted."""

    def __init__(self, peers: Peers, address: str) -> None:
        self._peers, self.address = peers, address
        self._backoff = Backoff(peers.rng, 0.05, 2.0)
        self._name = ""
        self._soon = asyncio.Event()
        self.settled = False  # it has told all it knew, or cannot be reached
        self.connected = False
        self.idle_since = peers.clock()
        self._tasks = Tasks()
        self._tasks.start(self._run(), f"follow the peer at {address}")

    async def close(self) -> None:
        """Follow no more."""
        await self._tasks.close()

    def hurry(self) -> None:
        """There is reason to believe that it can be reached now."""
        self._soon.set()

    async def _run(self) -> None:
        while True:
            pause_s = None
            try:
                worthwhile = await self._once()
                pause_s = None if worthwhile else FORGET_S / 4
            except NewsError as error:
                self._peers.refused(str(error))
            except grpc.aio.AioRpcError as error:
                pause_s = self._failed(error)
            except TimeoutError:
                pass  # nobody answered in time: asked again after the pause
            self.settled = True
            self._soon.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s or self._backoff.next_s()):
                    await self._soon.wait()

    def _failed(self, error: grpc.aio.AioRpcError) -> float | None:
        why = error.details() or ""
        if "refused" in why:
            self._peers.nobody_at(self.address)
        elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return FORGET_S / 4  # an older build: it shares nothing, and reports all it has
        elif "andshake failed" in why or "Hostname Verification" in why:
            self._peers.trouble(address_of(self.address), why)
        elif error.code() is not grpc.StatusCode.UNAVAILABLE:
            self._peers.refused(f"peer_{error.code().name.lower()}")
        return None

    async def _once(self) -> bool:
        """One stream, to its end. False if there is no point in another one soon."""
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

    async def _read(self, messages: AsyncIterator[peers_pb2.PeerNews], channel: grpc.aio.Channel) -> bool:
        seq, asked_at = 0, -inf
        while True:
            async with asyncio.timeout(SILENT_S):
                news = await anext(messages, None)
            if news is None:
                return True
            if news.seq != seq + 1:
                raise NewsError("peer_gap")
            if seq == 0:
                if not self._peers.spoken_to_by(self, news):
                    return False
                self._name, self.connected = news.instance, True
                self._backoff.reset()
            self._peers.take(self._name, news, first=seq == 0)
            seq = news.seq
            if self._peers.clock() - asked_at >= LAW_AGAIN_S and (laws := self._peers.law_to_ask_for(news)) is not None:
                asked_at = self._peers.clock()
                await self._ask_law(laws, channel)
            self.settled = self.settled or news.caught_up

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
