"""This region's report: its capacity by model, to etcd under a lease and to every global balancer by gRPC.

At most every 250 ms if a figure changed by 5 %, and at least every second. Over gRPC a change is sent within 100 ms.
Invariants: `seq` only grows; a replica that several balancers share is counted in its owner's report; queue, waits and
accepted requests are this instance's own; `usable_share` and `used_share` are of all replicas that it can send to,
whichever instance owns them (`model_reports` has what is said of a model). The answer to a ping also lists which of the
asker's attempts are here. Never reads a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from functools import partial
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import grpc
from farhop_wire import region_pb2, region_pb2_grpc
from msgspec.structs import replace

from farhop.balance.health.inquiry import ASKED_MAX
from farhop.identity import hop_token
from farhop.service.authentication.peer_authenticator import ANY_PEER
from farhop.service.process.tasks import Tasks
from farhop.store.contract import StoreError, report_key
from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import (
    TEXT_LIMIT,
    RegionReport,
    encode,
    to_wire,
)
from farhop.store.hubs import publication_status
from regional_lb.mesh.model_reports import ModelReports
from regional_lb.mesh.prefix_stream import NODES_PER_S, Pause, PrefixPublisher
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from farhop.identity.certificate_names import BalancerIdentity
    from farhop.service.authentication.peer_authenticator import PeerAuthenticator
    from farhop.service.law.lawbook import LawBook
    from farhop.store.contract import Publication, Store
    from farhop.store.documents.report import ModelReport
    from farhop.store.envelope import Signer
    from regional_lb.mesh.limit_root import LimitRoot
    from regional_lb.scheduler.flow import RegionalFlow

LEASE_S = 5.0  # etcd grants none below 1.5 times its election timeout; a report in etcd is no sign of life anyway
LOOK_S = 0.05
STORE_GAP_S = 0.25  # at most 4 a second into etcd
LONGEST_GAP_S = 1.0
RECHECK_S = 0.5  # how often what depends only on time is checked
CHANGE = 0.05
UNKNOWN = -1  # in place of a time, as region.proto has it
QUIET_LIMIT_S = 86_400.0
FINAL_REPORT_S = 1.0  # how long a store may take to hear that we are going
STREAMS_MAX = 256
REGION_STREAMS_MAX = 64  # of them, those of one region's global balancers: the rest is for others, whatever it does


class Reporter(region_pb2_grpc.RegionServicer):
    """Decides when to report, publishes reports, and answers global balancers over gRPC: with reports, prefixes, pings,
    the law, and units of limits. What a report says of a model is in `model_reports`."""

    def __init__(
        self,
        flow: RegionalFlow,
        *,
        region: str,
        instance: str,
        addresses: tuple[str, str, str],
        clock: Callable[[], float],
        incarnation: int,
        prefix_nodes_per_s: int = NODES_PER_S,
        client_url: str = "",
        quiet_s: Callable[[str, str], float | None] | None = None,
        laws: LawBook | None = None,
        peer_authenticator: PeerAuthenticator = ANY_PEER,
        signer: Signer | None = None,
        admin_tls: bool = False,
        limit_root: LimitRoot | None = None,
    ) -> None:
        """With a `signer`, documents in etcd are signed by it. `peer_authenticator` identifies callers over gRPC.

        `addresses` are those of the tier, control and admin ports; the last one "" if operators cannot reach it.
        `limit_root` lends units of tenants' limits.
        """
        self._admin_tls = admin_tls
        self.limit_root = limit_root
        self.quiet_s, self._laws, self._peer_authenticator, self._signer = quiet_s, laws, peer_authenticator, signer
        self._region, self._instance, self._flow, self._clock = region, instance, flow, clock
        self._tier, self._control, self._admin = addresses
        self._incarnation, self._client_url = incarnation, client_url
        self._seq = 0
        self._models = ModelReports(flow)
        self.draining = False
        self._changed = asyncio.Condition()
        self._published_at, self._news_reported = -inf, -1  # when, and up to which of the flow's `news`
        self.latest = self.build()
        self._tasks = Tasks()
        self._publication: Publication | None = None
        self._store_problem = ""  # why the last report is not in etcd
        self.report_readers, self.prefix_readers = Readers(), Readers()
        self.prefixes = PrefixPublisher(instance, flow, clock, incarnation, prefix_nodes_per_s)

    # -- the report

    def build(self) -> RegionReport:
        """The current report."""
        self._seq += 1
        now = self._clock()
        return RegionReport(
            region=self._region,
            instance=self._instance,
            incarnation=self._incarnation,
            seq=self._seq,
            clock_ms=now * 1e3,
            tier_address=self._tier,
            control_address=self._control,
            admin_address=self._admin,
            draining=self.draining,
            models=tuple(self._models.of(model, now) for model in sorted(self._flow.replicas.view.by_model)),
            accepted_bytes=dict(self._flow.accepted_bytes),  # within ACCEPTED_LIMIT: the flow keeps no more
            client_url=self._client_url,
            law_epoch=self._flow.law.held_epoch,
            admin_tls=self._admin_tls,
            hop_version=hop_token.READ,
        )

    # -- to the world

    def published(self, hub: str) -> dict[str, str | None]:
        """By hub, why this balancer's report is missing there; None if it is published. `hub`: the name of a single
        hub.
        """
        status = publication_status(self._publication, hub)
        return status if not self._store_problem else {name: why or self._store_problem for name, why in status.items()}

    def hold(self) -> None:
        """Show callers, before this balancer is open, that no work is accepted yet."""
        self.draining = True
        self.latest = self.build()

    async def open(self, store: Store) -> None:
        """Begin to publish."""
        self.draining = False
        self._published_at = self._clock()
        await self._set_latest(self.build())
        key = report_key(self._region, self._instance)
        stored = self.latest
        self._publication = await store.publish(key, self._document(stored) or self._bare(stored), LEASE_S)
        self._tasks.start(self._look(), "look for changes to report")
        self._tasks.start(self._write_to_store(self._publication, stored.seq), "report to the store")

    def _document(self, report: RegionReport) -> bytes | None:
        """As it is written to etcd; None if it is too large for that, since engines may name many models: gRPC carries
        all of it. Signing takes some 50 us, at most four times a second."""
        try:
            document, self._store_problem = encode(report), ""
        except DocumentError as error:
            self._store_problem = f"the report is not renewed in etcd, only over gRPC: {error}"
            return None
        return (
            document if self._signer is None else self._signer.seal(report_key(self._region, self._instance), document)
        )

    def _bare(self, report: RegionReport) -> bytes:
        """A minimal report: where this balancer is, and whether it accepts requests."""
        unfit, document = self._store_problem, self._document(replace(report, models=(), accepted_bytes={}))
        assert document is not None  # addresses and names alone
        self._store_problem = unfit
        return document

    def look(self) -> RegionReport | None:
        """The report to be sent now; None if the last one is still accurate. Called every LOOK_S."""
        flow, now = self._flow, self._clock()
        self.prefixes.tidy()
        flow.scaling.look(now)
        # A look early rather than late: the gap is then never longer than it may be. Half a look for rounding.
        due = now - self._published_at >= LONGEST_GAP_S - 1.5 * LOOK_S
        if not due and flow.report_holds_until(self._news_reported, now) > now and self._unchanged():
            return None
        self._news_reported, fresh = flow.news, self.build()
        if not due and not moved(self.latest, fresh):
            self._seq -= 1  # it was not sent: the number is free again
            return None
        self._published_at, self.latest = now, fresh
        return fresh

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if (fresh := self.look()) is not None:
                await self._set_latest(fresh)
            now = self._clock()
            latest_at = self._published_at + LONGEST_GAP_S - 2 * LOOK_S
            holds_until = min(self._flow.report_holds_until(self._news_reported, now), latest_at)
            if holds_until > now + LOOK_S and self._unchanged():
                await self._news(min(holds_until - now, RECHECK_S))

    async def _news(self, seconds: float) -> None:
        """Wait for a change, for at most `seconds`."""
        loop = asyncio.get_running_loop()
        news = loop.create_future()
        wake = partial(_set_result, news)
        self._flow.wake = wake
        timer = loop.call_later(seconds, wake)
        try:
            await news
        finally:
            timer.cancel()
            self._flow.wake = None

    def _unchanged(self) -> bool:
        """Whether everything besides the models is as it was last reported."""
        latest, flow = self.latest, self._flow
        return latest.draining == self.draining and latest.accepted_bytes == flow.accepted_bytes

    async def _set_latest(self, report: RegionReport) -> None:
        self.latest = report
        async with self._changed:
            self._changed.notify_all()

    async def _write_to_store(self, publication: Publication, stored: int) -> None:
        """Its own task: a store that hangs must not hold up what goes out over gRPC."""
        while True:
            await asyncio.sleep(STORE_GAP_S)
            async with self._changed:
                while self.latest.seq == stored:
                    await self._changed.wait()
                latest = self.latest
            stored = latest.seq
            if (document := self._document(latest)) is not None:
                await publication.update(document)

    async def withdraw(self) -> None:
        """Say on both paths that nothing more is taken, then take the report away."""
        self.draining = True
        await self._tasks.close()
        await self._set_latest(self.build())
        if self._publication is not None:
            with contextlib.suppress(TimeoutError, StoreError):  # then its lease ends it
                async with asyncio.timeout(FINAL_REPORT_S):
                    await self._publication.update(self._document(self.latest) or self._bare(self.latest))
            await self._publication.withdraw()

    # -- over gRPC

    async def Ping(  # noqa: N802 - the service's name for it
        self, request: region_pb2.PingRequest, context: Any
    ) -> region_pb2.PingReply:
        """Our clock, at once, and what is known of the attempts asked about."""
        peer, asker = await self._peer_authenticator.proven(context), request.balancer
        own = peer is None or (peer.tier, peer.region) == (
            "global",
            asker.partition("/")[0],
        )  # never the attempts of others
        return region_pb2.PingReply(
            nonce=request.nonce,
            clock_ms=self._clock() * 1e3,
            incarnation=self._incarnation,
            quiet_ms=self.quiet_ms(asker, request.attempts) if own else [],
        )

    def quiet_ms(self, balancer: str, attempts: Sequence[str]) -> list[int]:
        """For each attempt of this balancer, ms since there was a sign of it; UNKNOWN for one that is not here.

        [] if more are asked about than allowed, or nothing here knows.
        """
        if self.quiet_s is None or len(attempts) > ASKED_MAX:
            return []
        known = (self.quiet_s(balancer, attempt) for attempt in attempts)
        return [UNKNOWN if s is None else int(1e3 * min(max(s, 0.0), QUIET_LIMIT_S)) for s in known]

    async def Law(  # noqa: N802 - the service's name for it
        self, request: region_pb2.LawExchange, context: Any
    ) -> region_pb2.LawExchange:
        """Exchange laws: both sides get the later one."""
        if self._laws is None or len(request.sender) > TEXT_LIMIT or not request.sender.isprintable():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sender: a printable name, at most 256 characters")
        assert self._laws is not None
        proven = await self._peer_authenticator.proven(context) is not None
        exchanged = await self._laws.exchanged(request.epoch, request.document, request.sender, proven=proven)
        return region_pb2.LawExchange(sender=self._instance, epoch=exchanged[0], document=exchanged[1])

    async def Borrow(  # noqa: N802 - the service's name for it
        self, request: region_pb2.BorrowRequest, context: Any
    ) -> region_pb2.BorrowReply:
        """Lend units of tenants' limits, if their root is here."""
        peer = await self._peer_authenticator.proven(context)
        if peer is not None and not request.holder.startswith(f"{peer.tier} {peer.region}/"):
            why = f"holder: is not of the {peer.tier} balancer of region {peer.region} that the certificate names"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        if self.limit_root is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no limits are lent out here")
        assert self.limit_root is not None
        return await self.limit_root.answer(request, context)

    async def Prefixes(  # noqa: N802 - the service's name for it
        self, request: region_pb2.PrefixesRequest, context: Any
    ) -> AsyncIterator[region_pb2.PrefixDelta]:
        """The cached prefixes, and every change, as far as the asker may know them."""
        peer = await self._peer_authenticator.proven(context, "global", request.region)
        changed, region = asyncio.Event(), await self.prefix_readers.enter(peer, context)
        try:
            if not self.prefixes.knows(request.region):
                # No law lets a hint go to a place where the world has no region.
                why = "region: not in this region's topology; compare both"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
            self.prefixes.wakes[changed.set] = None
            with contextlib.closing(self.prefixes.subscribe(request)) as steps:
                for step in steps:
                    if not isinstance(step, Pause):
                        yield step
                    elif not step.wakes:
                        await asyncio.sleep(step.seconds)
                    else:
                        if step.rest_s:
                            await asyncio.sleep(step.rest_s)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(step.seconds):
                                await changed.wait()
                    changed.clear()
        finally:
            self.prefixes.wakes.pop(changed.set, None)
            self.prefix_readers.leave(region)

    async def Reports(  # noqa: N802 - the service's name for it
        self, request: region_pb2.ReportsRequest, context: Any
    ) -> AsyncIterator[region_pb2.Report]:
        """The latest report, and every one after it. A slow reader skips some: each is whole."""
        peer = await self._peer_authenticator.proven(context, "global")
        teaches = request.begins and (peer is None or peer.region == request.region)
        region = await self.report_readers.enter(peer, context)
        try:
            seen = 0
            while True:
                async with self._changed:
                    while self.latest.seq == seen:
                        await self._changed.wait()
                    latest = self.latest
                seen = latest.seq
                message = to_wire(latest)
                if teaches:
                    message.outputs.extend(self.outputs(request.region))
                    teaches = False
                yield message
        finally:
            self.report_readers.leave(region)

    def outputs(self, region: str) -> list[region_pb2.OutputLearned]:
        """The learned answer lengths of tenants whose law lets this region have their hints."""
        law = self._flow.law
        return [
            region_pb2.OutputLearned(tenant=tenant, model=model, tokens=tokens)
            for (tenant, model), tokens in self._flow.replicas.estimates.learned().output_tokens.items()
            if region in law.verdict(tenant, model, Scope.HINTS).lawful
        ]


class Readers:
    """The open streams of one kind: at most STREAMS_MAX, and of one region's balancers REGION_STREAMS_MAX."""

    def __init__(self) -> None:
        self._by_region: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_region.total()

    async def enter(self, peer: BalancerIdentity | None, context: Any) -> str:
        """Count one more, by what to `leave`. Aborts the call (RESOURCE_EXHAUSTED) if there are too many. Who need not
        prove a region counts for none."""
        region = "" if peer is None else peer.region
        if len(self) >= STREAMS_MAX or (region and self._by_region[region] >= REGION_STREAMS_MAX):
            most = f"at most {STREAMS_MAX} global balancers, and {REGION_STREAMS_MAX} of one region"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, most)
        self._by_region[region] += 1
        return region

    def leave(self, region: str) -> None:
        """One of them is over."""
        self._by_region[region] -= 1


def _set_result(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)


_AMOUNTS_OF = attrgetter(
    "wait_ms", "slots_free", "kv_tokens_free", "queued_tokens", "used_share", "tpot_ms", "bytes_per_token",
    "foreign_wait_ms",
)  # fmt: skip


def moved(old: RegionReport, new: RegionReport) -> bool:
    """Whether something in it changed by 5 % or more, or a yes became a no."""
    if (old.draining, old.law_epoch) != (new.draining, new.law_epoch):
        return True
    if len(old.models) != len(new.models) or old.accepted_bytes != new.accepted_bytes:
        return True
    return any(_model_moved(a, b) for a, b in zip(old.models, new.models, strict=True))


def _model_moved(old: ModelReport, new: ModelReport) -> bool:
    if (old.model, old.replicas_ready, old.replicas_total) != (new.model, new.replicas_ready, new.replicas_total):
        return True
    if (old.bases, old.base_unknown, old.context_tokens) != (new.bases, new.base_unknown, new.context_tokens):
        return True
    # From none to some or back: the amount is that of the KV cache.
    were, are = ((one.headroom_foreign_tokens > 0, one.usable_share > 0.0) for one in (old, new))
    if were != are:
        return True
    for a, b in zip(_AMOUNTS_OF(old), _AMOUNTS_OF(new), strict=True):
        if abs(a - b) >= CHANGE * max(abs(a), abs(b), 1.0):
            return True
    present, was = new.prefill_ms_per_token * 1e3, old.prefill_ms_per_token * 1e3
    return abs(present - was) >= CHANGE * max(abs(present), abs(was), 1.0)
