"""What tenants may use, held to here: limits as etcd tells them, units lent by each tenant's root, a refusal that says
when to come again.

A request takes what is lent to this balancer, in memory; one for which that is not enough waits WAIT_S at most for the
exchange with the root that it hastens, shared by all who wait. Invariants: a tenant without limits costs one look-up; a
reservation is settled once, whatever became of its request; limits that cannot be read leave those before them; a root
that is not reached ends what it lent (balance.quota), and `safe` parts go on. Never writes to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
from farhop_wire import region_pb2

from farhop.balance import outcome
from farhop.balance.estimate.estimates import BYTES_PER_TOKEN
from farhop.balance.quota import Grant, Holder, Holding, Quota, Told, Want
from farhop.relay import answers
from farhop.service.tasks import Tasks
from farhop.store.contract import LIMIT_PREFIX, LIMIT_ROOT_PREFIX
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import period_s
from farhop.store.follow import Documents, Refused, follow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from farhop.balance.machine import Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.store.contract import Change, Store
    from farhop.store.documents.limits import Limit, RootClaim, TenantLimits

    # Asks a root; grpc.aio.AioRpcError or TimeoutError if it does not answer.
    Borrow = Callable[[RootClaim, region_pb2.BorrowRequest], Awaitable[region_pb2.BorrowReply]]

TENANTS_MAX = 10_000
MATCHES_MAX = 10_000  # of tenant, key and model, remembered
FORMS_MAX = 1024  # of limits, as clients are told them, remembered
BEGIN_S = 5.0
REFRESH_S = 2.0  # between two exchanges with a root
GAP_S = 0.01  # at least
ASK_S = 1.0  # for an answer
TOLD_S = 0.05  # between two looks at what clients are told is left
WAIT_S = 1.0  # of a request, for units to be lent
AGAIN_S = 2.0  # what a client is told where it is not known when there is room
OUTPUT_TOKENS = 4096  # reserved for a request that does not say how long its answer may be, until others were seen
OUTPUT_FLOOR = 64
_LEARN = 0.1
PROBLEMS_TOLD_MAX, TENANTS_TOLD_MAX = 20, 1000
REQUESTS, INPUT, OUTPUT, TOKENS = range(4)
_KINDS = {"requests": REQUESTS, "input_tokens": INPUT, "output_tokens": OUTPUT, "tokens": TOKENS}


def bucket_of(tenant: str, limit: Limit, name: str) -> str:
    """The name of a limit's bucket, alike in all processes."""
    return msgspec.json.encode((tenant, limit.key, limit.model, name)).decode()


class LimitBook:
    """The limits that stand in etcd. `refused` counts documents not believed; `changes` are called at each change."""

    def __init__(self, store: Store, refused: Callable[[str], None]) -> None:
        self._store = store
        self.changes: list[Callable[[], None]] = []
        self._documents: Documents[TenantLimits] = Documents(self._read, refused, "limit")
        self._answered = asyncio.Event()

    async def follow(self) -> None:
        """Until cancelled, or the store is closed."""
        await follow(self._store, LIMIT_PREFIX, self.changed)

    async def begun(self) -> None:
        """Until etcd, or this process's own disk, has said what limits there are; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                await self._answered.wait()

    @property
    def answered(self) -> bool:
        """Whether it is known what limits there are."""
        return self._answered.is_set()

    def changed(self, change: Change) -> None:
        """Take one step of the watch."""
        first = not self._answered.is_set()
        self._answered.set()
        if self._documents.take(change) or first:
            for told in self.changes:
                told()

    def tenants(self) -> dict[str, TenantLimits]:
        """The limits by tenant."""
        return {one.tenant: one for one in self._documents.values() if one.limits}

    def lent_by(self, home: str) -> dict[str, Quota]:
        """The buckets that the root of a region lends from."""
        return {
            bucket_of(one.tenant, limit, name): Quota(float(n), n / period_s(name)).part(1.0 - one.safe_share)
            for one in self.tenants().values() if one.home == home
            for limit in one.limits
            for name, n in limit.sizes().items()
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """For people."""
        newest = sorted(self._documents.values(), key=lambda one: one.at, reverse=True)[:TENANTS_TOLD_MAX]
        problems = dict(sorted(self._documents.problems.items())[:PROBLEMS_TOLD_MAX])
        return {
            "limited": len(self.tenants()),
            "tenants": {one.tenant: one.at.isoformat() for one in newest},
            "problems": problems,
        }

    def _read(self, key: str, document: bytes) -> TenantLimits:
        one = documents.decode(document)
        if one.place != key:
            raise Refused("limit_misplaced", f"{key}: holds the limits of {one.tenant}, whose place is {one.place}")
        if key not in self._documents and len(self._documents) >= TENANTS_MAX:
            raise Refused("too_many_limits", f"limits of more than {TENANTS_MAX} tenants: take some away")
        return one


class _Lender:
    """The root of a region, as a balancer sees it. `silent_at`: when it was asked in vain, -inf since it answered."""

    def __init__(self, region: str) -> None:
        self.region, self.holder = region, Holder()
        self.wake, self.waiters = asyncio.Event(), list[asyncio.Future[None]]()
        self.silent_at = -inf


class _Matched:
    """The limits of one tenant's key and model: (kind, units per period, period in seconds, holding)."""

    __slots__ = ("lender", "of", "output_tokens", "told", "told_at")

    def __init__(self, lender: _Lender, of: tuple[tuple[int, int, int, Holding], ...]) -> None:
        self.lender, self.of = lender, of
        self.told, self.told_at = b"", -inf  # to clients, and when that was made
        self.output_tokens = -1.0  # of an answer, on average; below 0: none was seen

    def amounts(self, request: Request) -> tuple[int, int, int, int]:
        """What a request may use, by kind."""
        prompt = ceil(request.prompt_bytes / BYTES_PER_TOKEN)
        output = request.max_tokens
        if output is None:
            seen = self.output_tokens
            output = OUTPUT_TOKENS if seen < 0 else min(OUTPUT_TOKENS, max(OUTPUT_FLOOR, 2 * ceil(seen)))
            for kind, size, _, _ in self.of:
                if kind in (OUTPUT, TOKENS):
                    output = min(output, max(1, size - prompt * (kind == TOKENS)))
        return 1, prompt, output, prompt + output


class Reservation:
    """What a request took, until it is settled. `limits` are for the headers of its answer."""

    __slots__ = ("_clock", "_matched", "_taken")

    def __init__(
        self, matched: _Matched, taken: list[tuple[int, int, bool, Holding]], clock: Callable[[], float]
    ) -> None:
        self._matched, self._taken, self._clock = matched, taken, clock

    def settle(self, active: ActiveRequest | None, reason: Outcome, usage: Usage | None) -> None:
        """It is over: what it did not use is given back, what it used beyond is owed. Idempotent."""
        taken, self._taken = self._taken, []
        if not taken:
            return
        used = self._used(active, reason, usage)
        now = self._clock()
        for kind, n, lent, holding in taken:
            holding.settle(n, n if used is None else used[kind], lent, now)

    def _used(self, active: ActiveRequest | None, reason: Outcome, usage: Usage | None) -> tuple[int, ...] | None:
        """By kind; None: as taken, since it is not known."""
        if reason is outcome.REDIRECTED:  # the region that it is sent to serves it, and charges nothing
            return None
        if active is None or not active.began_at:
            return 0, 0, 0, 0
        progress = active.progress
        if progress is not None and progress.prompt and (usage is None or progress.resumed):
            usage = progress.usage  # it broke: what passed was counted here
        if usage is None:
            return (1, 0, 0, 0) if active.status >= 400 else None
        output, matched = usage.completion_tokens, self._matched
        seen = matched.output_tokens
        matched.output_tokens = output if seen < 0 else seen + _LEARN * (output - seen)
        return 1, usage.prompt_tokens, output, usage.prompt_tokens + output

    def headers(self) -> bytes:
        """The header lines that tell a client what is left."""
        return _headers(self._matched, self._clock())


class Limiter:
    """Holds a balancer's clients to the limits. `name` is the balancer's in the fleet, TIER REGION/INSTANCE; `safe`
    that under which limits give it a part of its own, "" where none do. `borrow` asks a root."""

    def __init__(
        self, book: LimitBook, store: Store, name: str, safe: str, borrow: Borrow,
        clock: Callable[[], float], refused: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._book, self._store, self._name, self._safe = book, store, name, safe
        self._borrow, self._clock = borrow, clock
        self._roots: Documents[RootClaim] = Documents(lambda _, one: documents.decode_root(one), refused, "limit_root")
        self._lenders: dict[str, _Lender] = {}
        self._tenants: dict[str, TenantLimits] = {}
        self._matches: dict[tuple[str, str, str, str], _Matched | None] = {}
        self._tasks = Tasks()
        book.changes.append(self._changed)

    def open(self) -> None:
        """Follow the limits and their roots."""
        self._tasks.start(self._book.follow(), "watch the limits")
        self._tasks.start(self._follow_roots(), "watch the roots of limits")

    async def close(self) -> None:
        """Follow, and borrow, no more."""
        await self._tasks.close()

    # -- of a request

    def admit(self, context: Any, request: Request, *, waits: bool = True) -> Reply | asyncio.Future[None] | None:
        """Take what a request may use, into `context.reserved`. None: it may go on. A Reply: it may not. A future:
        ask again, with `waits` False, once that is done."""
        tenant = request.tenant
        if tenant not in self._tenants:
            return None
        caller = context.caller
        whose = tenant, caller.key_id, request.key, request.model
        matched = self._matches[whose] if whose in self._matches else self._match(*whose)
        if matched is None:
            return None
        amounts, now = matched.amounts(request), self._clock()
        matched.lender.holder.alive(now)
        for kind, _, _, holding in matched.of:
            if not holding.fits(amounts[kind], now):
                return self._short(matched, amounts, now, waits=waits)
        taken = [(kind, amounts[kind], holding.take(amounts[kind]), holding) for kind, _, _, holding in matched.of]
        context.reserved = Reservation(matched, taken, self._clock)
        return None

    def _short(
        self, matched: _Matched, amounts: tuple[int, ...], now: float, *, waits: bool
    ) -> Reply | asyncio.Future[None]:
        lender = matched.lender
        short = [
            (kind, size, period, amounts[kind], holding)
            for kind, size, period, holding in matched.of
            if not holding.fits(amounts[kind], now)
        ]
        for kind, size, period, n, holding in short:
            if n > holding.quota.depth:
                return _refusal(matched, kind, size, period, n, None, now)
        lacks_s, (kind, size, period, n, holding) = max(
            ((holding.lacks_s(n, now), (kind, size, period, n, holding)) for kind, size, period, n, holding in short),
            key=lambda one: one[0],
        )
        dry = lacks_s > 0.0 and now - holding.told_at < REFRESH_S  # others may have returned some since
        silent = now - lender.silent_at < REFRESH_S
        if waits and not dry and not silent and self._root(lender.region) is not None:
            return self._wait(lender, [(n, holding) for _, _, _, n, holding in short])
        if any(holding.used for _, _, _, _, holding in short):
            lender.wake.set()  # nothing leaks before its root knows that it was spent
        return _refusal(matched, kind, size, period, n, lacks_s if 0.0 < lacks_s < inf else AGAIN_S, now)

    def _wait(self, lender: _Lender, lacking: list[tuple[int, Holding]]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        for n, holding in lacking:
            holding.waiting += n

        def over(_: asyncio.Future[None]) -> None:
            timer.cancel()
            for n, holding in lacking:
                holding.waiting -= n

        timer = asyncio.get_running_loop().call_later(WAIT_S, _done, future)
        future.add_done_callback(over)
        lender.waiters.append(future)
        lender.wake.set()
        return future

    def _match(self, tenant: str, key_id: str, key: str, model: str) -> _Matched | None:
        one = self._tenants[tenant]
        lender = self._lenders[one.home]
        of = tuple(
            (_KINDS[name.rpartition("_per_")[0]], n, int(period_s(name)), lender.holder.holdings[bucket])
            for limit in one.limits
            if limit.key in ("", key_id or key) and limit.model in ("", model)
            for name, n in limit.sizes().items()
            if (bucket := bucket_of(tenant, limit, name)) in lender.holder.holdings
        )
        if len(self._matches) >= MATCHES_MAX:
            del self._matches[next(iter(self._matches))]
        self._matches[tenant, key_id, key, model] = matched = _Matched(lender, of) if of else None
        return matched

    # -- what stands in etcd

    def _changed(self) -> None:
        self._tenants, self._matches, now = self._book.tenants(), {}, self._clock()
        wanted: dict[str, set[str]] = {home: set() for home in self._lenders}
        for one in self._tenants.values():
            lender = self._lenders.get(one.home)
            if lender is None:
                lender = self._lenders[one.home] = _Lender(one.home)
                self._tasks.start(self._lend(lender), f"borrow from {one.home}")
            share = one.safe_share / len(one.safe) if self._safe and self._safe in one.safe else 0.0
            for limit in one.limits:
                for name, n in limit.sizes().items():
                    whole = Quota(float(n), n / period_s(name))
                    lent, safe = whole.part(1.0 - one.safe_share), whole.part(share) if share else None
                    bucket = bucket_of(one.tenant, limit, name)
                    wanted.setdefault(one.home, set()).add(bucket)
                    known = lender.holder.holdings.get(bucket)
                    if known is None:
                        lender.holder.holdings[bucket] = Holding(bucket, lent, safe, now)
                    elif (known.quota, known.safe and known.safe.quota) != (lent, safe):
                        known.resize(lent, safe, now)
        for home, buckets in wanted.items():
            holdings = self._lenders[home].holder.holdings
            for bucket in holdings.keys() - buckets:
                del holdings[bucket]

    async def _follow_roots(self) -> None:
        await follow(self._store, LIMIT_ROOT_PREFIX, self._rooted)

    def _rooted(self, change: Change) -> None:
        for key in self._roots.take(change):
            lender = self._lenders.get(key.removeprefix(LIMIT_ROOT_PREFIX))
            if lender is not None:
                lender.silent_at = -inf
                lender.wake.set()

    def _root(self, region: str) -> RootClaim | None:
        claim = self._roots.get(f"{LIMIT_ROOT_PREFIX}{region}")
        return claim if claim is not None and claim.instance and claim.region == region else None

    # -- with the roots

    async def _lend(self, lender: _Lender) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await lender.wake.wait()
            lender.wake.clear()
            waiters, lender.waiters = lender.waiters, []
            try:
                await self._exchange(lender)
            finally:
                for future in waiters:
                    _done(future)
            await asyncio.sleep(GAP_S)

    async def _exchange(self, lender: _Lender) -> None:
        asked_at = self._clock()
        lease, wants = lender.holder.asked(asked_at)
        claim = self._root(lender.region)
        if not wants or claim is None:
            return
        request = region_pb2.BorrowRequest(holder=self._name, lease=lease, wants=[_wire(want) for want in wants])
        try:
            async with asyncio.timeout(ASK_S):
                reply = await self._borrow(claim, request)
        except (grpc.aio.AioRpcError, TimeoutError, OSError):
            lender.silent_at = self._clock()
            return
        lender.silent_at = -inf
        grants = tuple(Grant(one.bucket, one.granted, one.free, one.soon) for one in reply.grants)
        lender.holder.told(Told(reply.lease, grants), lease, asked_at, self._clock())

    def status(self) -> dict[str, Any]:
        """For people."""
        now = self._clock()
        roots = {
            name: {"root": claim.instance if (claim := self._root(name)) is not None else None,
                   "lease": lender.holder.alive(now), "buckets": len(lender.holder.holdings)}
            for name, lender in sorted(self._lenders.items())
        }  # fmt: skip
        return {**self._book.status(), "lent_by": roots}


def wants_of(request: region_pb2.BorrowRequest) -> tuple[Want, ...]:
    """What a holder tells, from the wire."""
    return tuple(
        Want(one.bucket, one.spent, one.returned, one.refunded, one.owed, one.wanted, one.least)
        for one in request.wants
    )


def reply_of(told: Told) -> region_pb2.BorrowReply:
    """A root's answer, for the wire."""
    grants = [
        region_pb2.Grant(bucket=one.bucket, granted=one.granted, free=one.free, soon=one.soon) for one in told.grants
    ]
    return region_pb2.BorrowReply(lease=told.lease, grants=grants)


def _wire(want: Want) -> region_pb2.Want:
    return region_pb2.Want(
        bucket=want.bucket, spent=want.spent, returned=want.returned, refunded=want.refunded, owed=want.owed,
        wanted=want.wanted, least=want.least,
    )  # fmt: skip


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# -- what clients are told

_TYPES = {REQUESTS: "requests", INPUT: "tokens", OUTPUT: "tokens", TOKENS: "tokens"}
_UNITS = {REQUESTS: "requests", INPUT: "input tokens", OUTPUT: "output tokens", TOKENS: "tokens"}
_PERIODS = {60: "minute", 86_400: "day"}


def _refusal(matched: _Matched, kind: int, size: int, period: int, n: int, retry_s: float | None, now: float) -> Reply:
    """429. `retry_s` None: it would never fit."""
    limit = f"{size} {_UNITS[kind]} per {_PERIODS[period]}"
    matched.told_at = -inf  # it is to say what it is refused for
    extra = _headers(matched, now)
    if retry_s is None:
        detail = f"request too large: it may use {n} {_UNITS[kind]}, and the limit is {limit}; ask for less"
        return answers.refusal(
            outcome.RATE_LIMITED, detail, extra=extra + b"x-should-retry: false\r\n", kind=_TYPES[kind]
        )
    detail = f"rate limit reached: {limit}, and this request may use {n}; try again in {_span(retry_s)}"
    extra += b"retry-after-ms: %d\r\nx-should-retry: true\r\n" % ceil(retry_s * 1e3)
    return answers.refusal(outcome.RATE_LIMITED, detail, retry_after_s=retry_s, extra=extra, kind=_TYPES[kind])


def _headers(matched: _Matched, now: float) -> bytes:
    """OpenAI's, and those of draft-ietf-httpapi-ratelimit-headers-11, of the tightest limit on requests and that on
    tokens. What is left is what this balancer has and what the root had to lend when it was asked last; it is looked at
    every TOLD_S, as it costs more than all the rest."""
    if 0.0 <= now - matched.told_at < TOLD_S:
        return matched.told
    tightest: dict[str, tuple[float, int, int, int]] = {}
    for kind, size, period, holding in matched.of:
        left = holding.available + int(holding.free)
        left = size if left > size else left if left > 0 else 0  # two calls cost more than the rest
        share, word = left / size, _TYPES[kind]
        known = tightest.get(word)
        if known is None or share < known[0]:
            tightest[word] = share, size, period, left
    lines, policies, states = b"", b"", b""
    for word, (share, size, period, left) in tightest.items():
        reset_s = (1.0 - share) * period
        line, policy, state = _forms(word, size, period)
        lines += line % (left, _span(reset_s).encode())
        policies += b", " + policy if policies else policy
        states += b", " + state % (left, ceil(reset_s)) if states else state % (left, ceil(reset_s))
    matched.told = b"%bratelimit-policy: %b\r\nratelimit: %b\r\n" % (lines, policies, states)
    matched.told_at = now
    return matched.told


@lru_cache(FORMS_MAX)
def _forms(word: str, size: int, period: int) -> tuple[bytes, bytes, bytes]:
    """What stands of one limit in the header lines, its policy and its state, with places for what is left."""
    line = f"x-ratelimit-limit-{word}: {size}\r\nx-ratelimit-remaining-{word}: %d\r\nx-ratelimit-reset-{word}: %b\r\n"
    return line.encode(), f'"{word}";q={size};w={period}'.encode(), f'"{word}";r=%d;t=%d'.encode()


def _span(seconds: float) -> str:
    """As OpenAI writes a length of time: 120ms, 6s, 1m30s, 2h0m0s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
