"""What a tenant's request costs in addition: limits, a usage record, an audit entry. Never a test.

CPU time of this process with all its threads, so that a writer counts, too, until all is on the disk; opening the
files, once in a process's life, does not. Limits are lent by a root in this process, enough of them: the measured
requests are admitted.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farhop.accounts import usage
from farhop.accounts.audit import AuditLog, Decided
from farhop.accounts.segments import Bounds, Segments
from farhop.balance import outcome
from farhop.balance.machine import Request, Usage
from farhop.balance.quota_root import Root
from farhop.service.limits.book import LimitBook
from farhop.service.limits.limiter import Limiter, lease_request_of, reply_of
from farhop.service.process.clock import wall
from farhop.store.contract import Change, ChangeKind
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, RootClaim, TenantLimits
from farhop_lab.bench.decide import Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_wire import region_pb2

T = TypeVar("T")
REPEATS = 7
REQUESTS = 2000
MANY = 1_000_000_000
_WALL = 1_800_000_000.0
_TWO = Limit(requests_per_minute=MANY, tokens_per_minute=MANY)
_THREE = Limit(requests_per_minute=MANY, tokens_per_minute=MANY, concurrency=MANY)
_SIX = Limit(requests_per_minute=MANY, requests_per_day=MANY, input_tokens_per_minute=MANY,
             output_tokens_per_minute=MANY, tokens_per_minute=MANY, tokens_per_day=MANY)  # fmt: skip


def tenants() -> list[Row]:
    """A row for each part of it, and one for all: six limits, usage and audit."""
    rows = [
        asyncio.run(_limits(f"{what}, taken, settled and told", limit))
        for what, limit in (("two limits", _TWO), ("three, one of requests at once", _THREE), ("six limits", _SIX))
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows += [_usage(Path(folder) / "usage"), _audit(Path(folder) / "audit")]
    of = rows[2:]
    total = [sum(getattr(row, field) for row in of) for field in ("median_us", "least_us", "most_us")]
    return [*rows, Row("six limits, usage and audit", *total)]


async def _limits(what: str, limit: Limit) -> Row:
    now = time.monotonic
    book = LimitBook(None, lambda _: None)  # type: ignore[arg-type]  # nothing is followed
    root = Root({}, now(), 1)

    async def borrow(_claim: RootClaim, asked: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        root.snapshot(now())
        root.written()
        return reply_of(root.exchange(asked.holder, lease_request_of(asked), now()))

    limiter = Limiter(book, None, "global here/g1", "", borrow, now, lambda _: None)  # type: ignore[arg-type]
    claim = RootClaim(region="here", instance="r1", address="", seq=1, first_lease=1, marks={})
    limiter.rooted(Change(ChangeKind.PUT, 1, claim.place, documents.encode_root(claim)))
    one = TenantLimits(
        tenant="acme", home="here", limits=(limit,), author="bench", why="bench", at=datetime.fromtimestamp(_WALL, UTC)
    )
    book.changed(Change(ChangeKind.PUT, 1, one.place, documents.encode(one)))
    root.configure(book.lent_by("here"), now())
    request = Request("1", "acme", "m", 4000, 5000, (), 9e9, 100, key="k")
    caller = SimpleNamespace(key_id="", user="")
    over: Any = SimpleNamespace(
        began_at=now(), forwarded_at=now(), status=200, progress=None, forward=object(), request=request
    )
    used, samples = Usage(1000, 90), list[float]()
    try:
        while len(samples) < REPEATS:
            began, waits = time.process_time(), None
            for _ in range(REQUESTS):
                context: Any = SimpleNamespace(caller=caller, charge=None)
                waits = limiter.admit(context, request)
                if waits is not None:
                    break
                context.charge.headers()
                context.charge.settle(over, outcome.SERVED, used)
            if waits is None:
                samples.append((time.process_time() - began) / REQUESTS * 1e6)
            elif isinstance(waits, asyncio.Future):
                await waits  # more is lent the next time
            else:
                await asyncio.sleep(0.05)
    finally:
        await limiter.close()
    return Row(what, statistics.median(samples), min(samples), max(samples))


def _usage(folder: Path) -> Row:
    def lines(some: list[usage.Record]) -> list[bytes]:
        return usage.lines(some, "farhop/bench", None)

    def opened(name: str) -> Segments:
        files = Segments(folder / name, Bounds(sync="never"), lines, time.monotonic, lambda: wall().timestamp())
        files.open()
        return files

    def write(files: Segments) -> None:
        for n in range(REQUESTS):
            files.put(usage.Record(f"{n:016x}-1", _WALL, False, (
                "acme", "k", "m", "", "here", "here", 200, "served", True, "engine", 1000, 200, 90, None, 0, 1, 900.0,
                50.0, 80.0, 5000, "",
            )))  # fmt: skip
        files.close()

    return _written("a usage record, on the disk", opened, write)


def _audit(folder: Path) -> Row:
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    lawful = frozenset(("here", "there"))  # as in the law's verdict

    def opened(name: str) -> AuditLog:
        log = AuditLog(folder / name, "farhop.internal/bench", key, time.monotonic, lambda: wall().timestamp())
        log.open()
        return log

    def write(log: AuditLog) -> None:
        for n in range(REQUESTS):
            log.put(Decided(
                _WALL, f"{n:016x}", 7, "acme", "m", "k", "here", "there", "served", 200, lawful
            ))  # fmt: skip
        log.close()

    return _written("an audit entry, on the disk and signed", opened, write)


def _written(what: str, opened: Callable[[str], T], write: Callable[[T], None]) -> Row:
    samples = list[float]()
    for n in range(REPEATS):
        files = opened(str(n))
        began = time.process_time()
        write(files)
        samples.append((time.process_time() - began) / REQUESTS * 1e6)
    return Row(what, statistics.median(samples), min(samples), max(samples))
