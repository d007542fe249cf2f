"""The channel to one regional balancer: streams of reports and prefixes, and pings that show whether it is alive.

Invariants: a channel counts as broken only after PINGS_LOST lost pings in a row without any message in between; a
broken stream or a silence triggers a ping at once. A region that gets no requests is pinged less often. Never judges
the messages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import grpc
from farhop_wire import region_pb2, region_pb2_grpc

from farhop.relay.upstream.pool import RESTED_S
from farhop.service.assembly.region_channel import channel
from farhop.service.process.tasks import Tasks, in_turns
from global_lb.links.prefix_streams import PrefixGapError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.service.config.certificates import Certificates
    from farhop.service.law.lawbook import LawBook
    from global_lb.fleet.distances import Distances
    from global_lb.links.config import LinksConfig
    from global_lb.links.prefix_streams import Prefixes

PINGS_LOST = 2  # in a row, before a channel counts as broken: one may be lost by chance
HURRY = 0.25  # of the time between pings, while the round-trip time moves, or the channel is broken
AGAIN = 0.1  # of that time, after a lost one
SILENCE = 0.5  # of that time without a message on the channel, and it is asked: reports come once a second, too
# The same of a region that nothing was sent to for IDLE_S: its reports say that it lives, so only a missing one is
# asked about, and nothing waits for an answer that comes half a second later.
IDLE_S, IDLE, IDLE_SILENCE = RESTED_S, 2.0, 1.25
LAW_AGAIN_S = 2.0  # between two attempts to agree on one law
LAW_TIMEOUT_S = 10.0
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_TLS_FAILURES = ("andshake failed", "Hostname Verification")  # in what gRPC says where TLS fails


class SilentAttempt(Protocol):
    """An attempt that is silent: farhop.relay.upstream.attempt.AttemptRun."""

    @property
    def id(self) -> str:
        """The attempt's id in the hop token."""
        ...

    def on_inquiry_answer(self, asked_at: float, quiet_s: float | None, rtt_s: float) -> None:
        """What its upstream said, when asked at `asked_at` (the watcher's clock), a round trip of `rtt_s` away."""
        ...


class LinkEvents(Protocol):
    """Handles what happens on a link: the watcher."""

    distances: Distances
    prefixes: Prefixes
    certificates: Certificates | None
    laws: LawBook | None

    def now(self) -> float:
        """The time of this process's monotonic clock, in seconds."""
        ...

    def jitter(self) -> float:
        """A random factor from 0.8 to 1.2, to spread what would happen at the same time."""
        ...

    def on_link_report(self, message: region_pb2.Report, name: tuple[str, str]) -> None:
        """A report was received."""
        ...

    def on_ping(self, name: tuple[str, str], reply: region_pb2.PingReply, sent_at: float) -> None:
        """A ping was answered."""
        ...

    def on_channel(self, name: tuple[str, str], up: bool) -> None:
        """The channel broke, or works again."""
        ...

    def quiet(self, name: tuple[str, str]) -> Sequence[SilentAttempt]:
        """Attempts at it that are silent: to ask about."""
        ...

    def in_use(self, name: tuple[str, str], within_s: float) -> bool:
        """Whether requests are in progress there, or were within the last `within_s` seconds."""
        ...

    def on_tls_failure(self, address: str, why: str) -> None:
        """A TLS handshake failed."""
        ...

    def on_stream_failed(self, what: str, code: grpc.StatusCode) -> None:
        """A stream ended in an error."""
        ...


class BalancerLink:
    """See the module's docstring. `name` is (region, instance)."""

    def __init__(self, watcher: LinkEvents, name: tuple[str, str], address: str, config: LinksConfig) -> None:
        self._watcher, self._name, self.address, self._config = watcher, name, address, config
        self.channel = channel(config, name[0], address, watcher.certificates, config.watch.ping_s)
        self._stub = region_pb2_grpc.RegionStub(self.channel)
        self._alive_at = _loop_time()  # anything at all
        self._wake = asyncio.Event()  # to see whether to ping
        self._stream_broke = False  # a stream, since the last ping
        self._laws_differ = asyncio.Event()  # it applies another law than this balancer
        self._tasks = Tasks()
        self._tasks.start(self._ping(), f"ping {address}")
        self._tasks.start(self._reports(), f"read the reports of {address}")
        self._tasks.start(self._prefixes(), f"read the prefixes of {address}")
        if watcher.laws is not None:
            self._tasks.start(self._law(watcher.laws), f"share the law with {address}")

    async def close(self) -> None:
        """Stop all calls."""
        await self._tasks.close()
        await self.channel.close(None)

    async def _ping(self) -> None:
        watch, watcher, nonce = self._config.watch, self._watcher, 0
        lost = PINGS_LOST
        while True:
            nonce += 1
            asked = watcher.quiet(self._name)
            ids = [attempt.id for attempt in asked]
            request = region_pb2.PingRequest(nonce=nonce, balancer=self._config.balancer, attempts=ids)
            asked_at = _loop_time()
            try:
                sent_at = watcher.now()
                reply = await self._stub.Ping(request, timeout=max(watch.ping_timeout_s, self._two_round_trips_s()))
                if lost == 0:  # else it may have waited for the connection, too
                    watcher.on_ping(self._name, reply, sent_at)
                lost, self._alive_at = 0, _loop_time()
                watcher.on_channel(self._name, True)
                apply_quiet_ms(asked, reply.quiet_ms, sent_at, watcher.now() - sent_at)
            except grpc.aio.AioRpcError as error:
                lost += self._alive_at < asked_at  # else it speaks, and only this was lost
                why = error.details() or ""
                if any(text in why for text in _TLS_FAILURES):
                    watcher.on_tls_failure(self.address, why)
                if lost >= PINGS_LOST:
                    watcher.on_channel(self._name, False)
            await self._until_next_ping(lost)

    def _two_round_trips_s(self) -> float:
        """Twice the round-trip time: what takes longer is lost, however far the region."""
        return 2.0 * self._watcher.distances.rtt_ms(self._name[0], self._watcher.now()) / 1e3

    async def _until_next_ping(self, lost: int) -> None:
        """Wait until the next ping is due; less long if a stream breaks, or if a healthy channel falls silent."""
        watcher, ping_s, now = self._watcher, self._config.watch.ping_s, _loop_time()
        pause_s, silence_s = ping_s * watcher.jitter(), SILENCE * ping_s
        moving = watcher.distances.moving(self._name[0])
        if lost:
            end = now + (AGAIN if lost < PINGS_LOST else HURRY) * pause_s
        elif moving:
            end = now + HURRY * pause_s
        else:
            end = now + pause_s
        least = now + AGAIN * pause_s

        def due(in_use: bool) -> float:
            if lost:
                return end
            if in_use or moving:
                return max(least, min(end, self._alive_at + silence_s))
            return max(least, min(end + (IDLE - 1.0) * pause_s, self._alive_at + IDLE_SILENCE * ping_s))

        # asyncio.timeout does more, at several times the cost; and uvloop's timers may fire a millisecond early.
        loop = asyncio.get_running_loop()
        while not self._stream_broke and (at := due(watcher.in_use(self._name, IDLE_S))) > loop.time():
            timer = loop.call_at(at + 1e-3, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
        self._stream_broke = False

    def used(self) -> None:
        """A request was sent there after a while without any: from now on it is asked as one in use."""
        self._wake.set()

    async def _reports(self) -> None:
        request = region_pb2.ReportsRequest(balancer=self._config.balancer, region=self._config.region, begins=True)
        while True:
            try:
                async for message in self._stub.Reports(request):
                    self._alive_at = _loop_time()
                    self._watcher.on_link_report(message, self._name)
                    request.begins = False
                    laws = self._watcher.laws
                    if laws is not None and message.law_epoch not in (0, laws.law.held_epoch):
                        self._laws_differ.set()
            except grpc.aio.AioRpcError as error:
                self._watcher.on_stream_failed("reports", error.code())
            self._stream_broke = True
            self._wake.set()
            await asyncio.sleep(self._config.watch.ping_s * self._watcher.jitter())

    async def _law(self, laws: LawBook) -> None:
        """If its law has another epoch than ours, the side with the later law sends it; until then both continue."""
        proven = self._config.certified_name(self._name[0]) is not None
        while True:
            await self._laws_differ.wait()
            self._laws_differ.clear()
            if not laws.may_believe(proven=proven):
                await asyncio.sleep(LAW_AGAIN_S)
                continue
            try:
                theirs = await self._exchange(laws.law.held_epoch, b"")
                if theirs.document:
                    await laws.offer(theirs.document, "/".join(self._name), proven=proven)
                elif theirs.epoch < laws.law.held_epoch:
                    await self._exchange(laws.law.held_epoch, laws.document_after(theirs.epoch))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # else an older build
                    self._watcher.on_stream_failed("law", error.code())
            await asyncio.sleep(LAW_AGAIN_S * self._watcher.jitter())

    async def _exchange(self, epoch: int, document: bytes) -> region_pb2.LawExchange:
        ours = region_pb2.LawExchange(sender=self._config.balancer, epoch=epoch, document=document)
        return await self._stub.Law(ours, timeout=LAW_TIMEOUT_S)

    async def _prefixes(self) -> None:
        config, watcher = self._config, self._watcher
        while True:
            stream = watcher.prefixes.begin(self._name)
            call = self._stub.Prefixes(
                region_pb2.PrefixesRequest(
                    balancer=config.balancer,
                    region=config.region,
                    known_incarnation=stream.known_incarnation,
                    known_seq=stream.known_seq,
                    law_epoch=watcher.prefixes.law_epoch,
                    places=watcher.prefixes.places,
                )
            )
            pause_s = config.watch.ping_s
            try:
                async for message in call:
                    await in_turns(stream.take(message))
            except PrefixGapError:
                pass  # counted where it was seen; the next stream begins with what is missing
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    pause_s *= 10  # an older build
                else:
                    watcher.on_stream_failed("prefixes", error.code())
            finally:
                call.cancel()
                stream.ended(watcher.now())
            await asyncio.sleep(pause_s * watcher.jitter())


def apply_quiet_ms(asked: Sequence[SilentAttempt], quiet_ms: Sequence[int], sent_at: float, rtt_s: float) -> None:
    """Give each attempt its part of the answer; an answer that does not cover all of them counts as none."""
    if len(quiet_ms) == len(asked):
        for attempt, ms in zip(asked, quiet_ms, strict=True):
            attempt.on_inquiry_answer(sent_at, None if ms < 0 else ms / 1e3, rtt_s)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
