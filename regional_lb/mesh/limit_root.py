"""The root of limits: the one balancer of a region that lends out the units of the tenants whose home is the region.

The region's hub names the root, under one key that only its writer, or a balancer that saw it unchanged for TAKEOVER_S,
may write: by compare-and-set, so that two cannot at once. Invariants: a loan ends at most TERM_S after the start of the
last successful write, so two roots never lend at once; nothing is lent that a successor would not count as used
(balance.quota). Clocks of two hosts are never compared. Never reads a request.
"""

from __future__ import annotations

import asyncio
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import grpc
from msgspec.structs import replace

from farhop.balance.quota import EACH, LeaseRequest
from farhop.balance.quota_root import Root
from farhop.service.limits.book import kind_and_whose
from farhop.service.limits.limiter import reply_of, wants_of
from farhop.service.process.tasks import Tasks
from farhop.store.contract import Conflict, StoreError, limit_root_key
from farhop.store.documents import limits as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.limits import RootClaim

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_wire import region_pb2

    from farhop.balance.quota import Want
    from farhop.service.limits.book import LimitBook
    from farhop.store.contract import KeyValue, Store
    from farhop.telemetry.metrics import TierMetrics

WRITE_S = 3.0
TERM_S = 15.0
TAKEOVER_S = 18.0  # above TERM_S, by more than two clocks may differ in it
LEASES = 1 << 40  # of one root
LOOK_S = 10.0  # between two looks at how full the buckets are
NEARLY = 0.9  # of a limit, used
_HOLDER_CHARS_MAX = 512
# What no holder in its right mind says is not answered: it may be a balancer that was taken over.
_WANTS_MAX = 100_000
TURN_WANTS = 2000  # read in a turn of the loop: 3 ms
_BUCKET_CHARS_MAX = 4096
_UNITS_MAX = 2**53
HOLDERS_MAX = 256  # alive, of one tier and region: each life of a balancer is another, for LEASE_S
_units = attrgetter("spent", "returned", "refunded", "owed", "wanted", "least", "held")


class LimitRoot:
    """This balancer's part in it. `store` is the region's own hub; `address` is where holders ask."""

    def __init__(self, book: LimitBook, store: Store, region: str, instance: str, clock: Callable[[], float]) -> None:
        self._book, self._store, self._region, self._instance = book, store, region, instance
        self._clock, self.address = clock, ""
        self._root: Root | None = None
        self._claim: RootClaim | None = None
        self._until, self._revision = -inf, 0
        self._seen: tuple[int, float] | None = None  # another's revision, and since when it is unchanged
        self._wake, self._tasks = asyncio.Event(), Tasks()
        self._looked_at, self._fullest = -inf, dict[str, float]()  # of the limits of each kind
        self._nearly: dict[str, float] = {}  # since when buckets are nearly used
        self.trouble = ""
        book.changes.append(self._configure)

    def observe(self, metrics: TierMetrics) -> None:
        """Export the used shares of limits as metrics. Their tenants are only in `status`."""
        metrics.gauge(
            "limit_used_ratio", "Used share of the most used limit of each kind, of those lent out here.",
            lambda: dict(self._fullest), "kind",
        )  # fmt: skip
        metrics.gauge(
            "limit_nearly_used_seconds", "How long one of the limits lent out here has been used to 90 % or more.",
            lambda: max((self._looked_at - since for since in self._nearly.values()), default=0.0),
        )  # fmt: skip

    def look(self) -> None:
        """Those of users are left out: one user that has all it may is no news."""
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return
        lends = self._root is not None and now <= self._until
        levels = self._root.levels(now) if self._root is not None and lends else {}
        self._looked_at, self._fullest, before = now, {}, self._nearly
        self._nearly = {}
        for bucket, level in levels.items():
            if EACH in bucket:
                continue
            kind, used = kind_and_whose(bucket)[0], level["used"] / max(1.0, level["depth"])
            self._fullest[kind] = max(used, self._fullest.get(kind, 0.0))
            if used >= NEARLY:
                self._nearly[bucket] = before.get(bucket, now)

    def open(self, address: str) -> None:
        """Begin to stand for election as root, with this address."""
        self.address = address
        self._tasks.start(self._keep(), "keep the root of limits")

    async def close(self) -> None:
        """Lend no more, and let another do it at once."""
        await self._tasks.close()
        claim, self._until = self._claim, -inf
        if self._root is not None and claim is not None:
            done = replace(claim, instance="", address="", seq=claim.seq + 1, marks=self._root.snapshot(self._clock()))
            self._root = None
            try:
                async with asyncio.timeout(1.0):
                    await self._store.put(done.place, documents.encode_root(done), expect_revision=self._revision)
            except (StoreError, TimeoutError, DocumentError):
                pass  # another balancer sees that it stops changing

    def borrowed(
        self, request: region_pb2.BorrowRequest, wants: list[Want] | None = None
    ) -> region_pb2.BorrowReply | None:
        """Lend to a holder; None: this is not the root now. `wants`: the request's, if they were read and are sound."""
        now = self._clock()
        if not self._answers(request):
            return None
        if wants is None:
            wants = wants_of(request.wants)
            if not _are_sound(wants):
                return None
        lease_request = LeaseRequest(request.lease, request.number, tuple(wants), 0.0)
        if not _is_sound(lease_request) or self._has_too_many_holders(request, now):
            return None
        assert self._root is not None
        reply = reply_of(self._root.exchange(request.holder, lease_request, now))
        if self._root.runs_out:
            self._wake.set()
        return reply

    def _answers(self, request: region_pb2.BorrowRequest) -> bool:
        """Whether this is the root, and the request one that a holder may make."""
        named = 0 < len(request.holder) <= _HOLDER_CHARS_MAX and len(request.wants) <= _WANTS_MAX
        return named and self._root is not None and self._clock() <= self._until

    def _has_too_many_holders(self, request: region_pb2.BorrowRequest, now: float) -> bool:
        """Whether the caller is new, and its tier and region already have the most holders allowed."""
        assert self._root is not None
        if self._root.knows(request.holder, request.lease):
            return False
        tier_and_region = request.holder.partition("/")[0]
        return self._root.leases_of(f"{tier_and_region}/", now) >= HOLDERS_MAX

    async def answer(self, request: region_pb2.BorrowRequest, context: Any) -> region_pb2.BorrowReply:
        """Lend units over gRPC. Aborts the call if this process is not the root."""
        wants: list[Want] = []
        sound = self._answers(request)
        for at in range(0, len(request.wants) if sound else 0, TURN_WANTS):
            if at:
                await asyncio.sleep(0)
            part = wants_of(request.wants[at : at + TURN_WANTS])
            sound = _are_sound(part)
            if not sound:
                break
            wants += part
        reply = self.borrowed(request, wants) if sound else None
        if reply is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this balancer is not the root of these limits")
            raise AssertionError("abort raises")
        return reply

    def status(self) -> dict[str, Any]:
        """The state as a JSON-ready value, for operators."""
        now = self._clock()
        lends = self._root is not None and now <= self._until
        levels = self._root.levels(now) if self._root is not None and lends else {}
        for bucket, since in self._nearly.items():
            if bucket in levels:
                levels[bucket]["nearly_used_s"] = round(now - since, 1)
        return {"lends": lends, "trouble": self.trouble or None, "buckets": levels}

    # -- which balancer is the root

    def _configure(self) -> None:
        if self._root is not None:
            self._root.configure(self._book.lent_by(self._region), self._clock())
        self._wake.set()

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            if self._book.answered and (self._root is not None or self._book.lent_by(self._region)):
                await self.step()
            self.look()
            try:
                async with asyncio.timeout(WRITE_S):
                    await self._wake.wait()
                await asyncio.sleep(0.02)
            except TimeoutError:
                pass  # it was not woken: it is written every WRITE_S

    async def step(self) -> None:
        """Renew the claim in etcd, or take it over if it is free."""
        try:
            async with asyncio.timeout(WRITE_S):
                if self._root is not None:
                    await self._write()
                else:
                    await self._stand()
            self.trouble = ""
        except Conflict:
            await self._conflicted()
        except (StoreError, TimeoutError, DocumentError) as error:
            self.trouble = str(error) or type(error).__name__
        if self._clock() > self._until:
            self._root = None

    async def _conflicted(self) -> None:
        """Another balancer wrote, or we did without learning of it: then continue from there."""
        try:
            async with asyncio.timeout(WRITE_S):
                entry = await self._store.get(limit_root_key(self._region))
        except (StoreError, TimeoutError) as error:
            self.trouble = str(error) or type(error).__name__
            return
        claim, ours = _read(entry), self._claim
        if None not in (self._root, entry, claim, ours):
            assert entry is not None
            assert claim is not None
            assert ours is not None
            if (claim.instance, claim.first_lease) == (ours.instance, ours.first_lease):
                self._claim, self._revision = replace(ours, seq=claim.seq), entry.revision
                self._wake.set()
                return
        self._root, self._until = None, -inf

    async def _stand(self) -> None:
        now = self._clock()
        entry = await self._store.get(limit_root_key(self._region))
        claim = _read(entry)
        revision = entry.revision if entry is not None else 0
        free = entry is None or (claim is not None and not claim.instance)
        if not free and (self._seen is None or self._seen[0] != revision):
            self._seen = revision, self._clock()  # from when the answer was here: it stood no later than that
            return
        if not free and self._seen is not None and now - self._seen[1] < TAKEOVER_S:
            return
        marks = claim.marks if claim is not None else {}
        first = claim.first_lease + LEASES if claim is not None else 1
        self._claim = RootClaim(
            region=self._region, instance=self._instance, address=self.address, seq=claim.seq if claim else 0,
            first_lease=first, marks=marks,
        )  # fmt: skip
        self._revision = revision
        root = Root(marks, now, first)
        root.configure(self._book.lent_by(self._region), now)
        self._root = root
        try:
            await self._write()
        except BaseException:
            self._root = None
            raise

    async def _write(self) -> None:
        root, claim, began_at = self._root, self._claim, self._clock()
        assert root is not None
        assert claim is not None
        claim = replace(claim, seq=claim.seq + 1, marks=root.snapshot(began_at))
        self._revision = await self._store.put(
            claim.place, documents.encode_root(claim), expect_revision=self._revision
        )
        self._claim, self._until, self._seen = claim, began_at + TERM_S, None
        root.written()


def _is_sound(request: LeaseRequest) -> bool:
    """Whether its numbers are some that a holder may come to, and no bucket is named twice."""
    return (
        request.lease >= 0
        and request.number >= 0
        and len({want.bucket for want in request.wants}) == len(request.wants)
    )


def _are_sound(wants: list[Want]) -> bool:
    """Whether a holder may come to these numbers."""
    return all(
        0 < len(want.bucket) <= _BUCKET_CHARS_MAX and all(0 <= n <= _UNITS_MAX for n in _units(want)) for want in wants
    )


def _read(entry: KeyValue | None) -> RootClaim | None:
    """The claim of the root; None for an unreadable one, which may be taken over like one that does not change."""
    if entry is None:
        return None
    try:
        return documents.decode_root(entry.value)
    except DocumentError:
        return None
