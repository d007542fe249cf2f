"""What tenants may use, held to here: limits as etcd tells them, units lent by each tenant's root, a refusal that says
when to come again.

A request takes what is lent to this balancer, in memory; one for which that is not enough waits WAIT_S at most for the
exchange with the root that it hastens, shared by all who wait. Invariants: a tenant without limits costs one look-up; a
reservation is settled once, whatever became of its request; limits that cannot be read leave those before them; a root
that is not reached ends what it lent (balance.quota), and `safe` parts go on; money is in microdollars, by the price
book of this process, and what has no price there never passes where money is limited. Never writes to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
from farhop_wire import region_pb2

from farhop.accounts.usage import usd
from farhop.balance import outcome
from farhop.balance.estimate.estimates import BYTES_PER_TOKEN
from farhop.balance.quota import EACH, Ask, Grant, Holder, Holding, Told, Want, new_holding
from farhop.relay import answers
from farhop.service.tasks import Tasks
from farhop.store.contract import LIMIT_PREFIX, LIMIT_ROOT_PREFIX
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import NAME_LIMIT, kind_of, period_s
from farhop.store.follow import Documents, Refused, follow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from farhop.accounts.usage import Prices, Rates
    from farhop.balance.machine import Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.balance.quota import Quota
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.store.contract import Change, Store
    from farhop.store.documents.limits import Limit, RootClaim, TenantLimits
    from farhop.telemetry.metrics import TierMetrics

    # Asks a root; grpc.aio.AioRpcError or TimeoutError if it does not answer.
    Borrow = Callable[[RootClaim, region_pb2.BorrowRequest], Awaitable[region_pb2.BorrowReply]]

TENANTS_MAX = 10_000
MATCHES_MAX = 10_000  # of tenant, key, model and user, remembered
USERS_MAX = 8192  # users of tenants that limit each, remembered
USERS_LOOKED_AT = 32  # for one that is idle and can be forgotten
SPANS_MAX = 1024  # lengths of time in whole seconds, as clients are told them, remembered
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
PROBLEMS_TOLD_MAX, TENANTS_TOLD_MAX, PRICED_TOLD_MAX = 20, 1000, 1000
REQUESTS, INPUT, OUTPUT, TOKENS, CONCURRENCY, MONEY = range(6)
_KINDS = {
    "requests": REQUESTS, "input_tokens": INPUT, "output_tokens": OUTPUT, "tokens": TOKENS, "concurrency": CONCURRENCY,
    "usd": MONEY,
}  # fmt: skip


def bucket_of(tenant: str, limit: Limit, name: str) -> str:
    """The name of a limit's bucket, alike in all processes."""
    named = msgspec.json.encode((tenant, limit.key, limit.model, name)).decode()
    return named + EACH if limit.each_user else named


def kind_and_whose(bucket: str) -> tuple[str, str]:
    """What a bucket counts, by its name, and of whom: tenant, key, model or user."""
    _, key, model, name = msgspec.json.decode(bucket.partition(EACH)[0])
    return kind_of(name), "user" if EACH in bucket else "key" if key else "model" if model else "tenant"


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
            bucket_of(one.tenant, limit, name): one.parts(limit, name, n)[0]
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


_Whose = tuple[str, str, str, str, str]  # tenant, issued key, key of the law, model, user
_REST = "rest"  # all users of a tenant that are not named, or come while USERS_MAX others are busy, are one
_USER_CHARS = 16


class _User:
    """One of a tenant's users: what is lent for it, by bucket, and where that is matched."""

    __slots__ = ("holdings", "lender", "matches")

    def __init__(self, lender: _Lender) -> None:
        self.lender, self.holdings, self.matches = lender, dict[str, Holding](), set[_Whose]()

    @property
    def idle(self) -> bool:
        return all(holding.idle for holding in self.holdings.values())

    def forget(self, matches: dict[_Whose, _Matched | None]) -> None:
        for bucket in self.holdings:
            self.lender.holder.holdings.pop(bucket, None)
        for whose in self.matches:
            matches.pop(whose, None)


class _Matched:
    """The limits of one tenant's key and model: (kind, units per period, period in seconds, holding). `rates`: what the
    model costs, where one of them is of money; `unpriced` is that holding, if it costs nobody knows what."""

    __slots__ = ("by_word", "forms", "lender", "of", "output_tokens", "rates", "told", "told_at", "unpriced", "until_s")

    def __init__(self, lender: _Lender, of: tuple[tuple[int, int, int, Holding], ...]) -> None:
        self.lender, self.of = lender, of
        self.rates: Rates | None = None
        self.unpriced: Holding | None = None
        self.until_s: float | None = None  # of the wall clock, when its price may be another; None: it matters not
        self.told, self.told_at = b"", -inf  # to clients, and when that was made
        words: dict[str, list[tuple[int, int, Holding]]] = {}
        for kind, size, period, holding in of:
            words.setdefault(_WORDS[kind], []).append((size, period, holding))
        self.by_word = tuple(words.items())
        self.forms: dict[tuple[int, ...], bytes] = {}  # of what is told, by which limits of each word are the tightest
        self.output_tokens = -1.0  # of an answer, on average; below 0: none was seen

    def amounts(self, request: Request) -> tuple[int, int, int, int, int, int]:
        """What a request may use, by kind."""
        rates = self.rates
        prompt = ceil(request.prompt_bytes / BYTES_PER_TOKEN)
        output = request.max_tokens
        if output is None:
            seen = self.output_tokens
            output = OUTPUT_TOKENS if seen < 0 else min(OUTPUT_TOKENS, max(OUTPUT_FLOOR, 2 * ceil(seen)))
            for kind, size, _, _ in self.of:
                if kind in (OUTPUT, TOKENS):
                    output = min(output, max(1, size - prompt * (kind == TOKENS)))
                elif kind == MONEY and rates is not None:
                    output = min(output, max(1, rates.output_within(size, prompt)))
        return 1, prompt, output, prompt + output, 1, 0 if rates is None else rates.at_most(prompt, output)


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
            return 0, 0, 0, 0, 1, 0
        progress = active.progress
        if progress is not None and progress.counts and (usage is None or progress.resumed):
            usage = progress.usage  # it broke: what passed was counted here
        if usage is None:  # of an answer that was another's nothing was sent: it is a request, and no tokens
            return (1, 0, 0, 0, 1, 0) if active.status >= 400 or active.forward is None else None
        prompt, output, matched = usage.prompt_tokens, usage.completion_tokens, self._matched
        seen = matched.output_tokens
        matched.output_tokens = output if seen < 0 else seen + _LEARN * (output - seen)
        money = 0
        if matched.rates is not None:
            cached = min(usage.cached_tokens or 0, prompt)
            money = matched.rates.micro_usd(prompt - cached, cached, output)
        return 1, prompt, output, prompt + output, 1, money

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
        self._prices: Prices | None = None
        self._wall_s: Callable[[float], float] = float
        self._book, self._store, self._safe = book, store, safe
        self._name = f"{name} {secrets.token_hex(8)}"  # what a process of its name held before is not its own
        self._borrow, self._clock = borrow, clock
        self._roots: Documents[RootClaim] = Documents(lambda _, one: documents.decode_root(one), refused, "limit_root")
        self._lenders: dict[str, _Lender] = {}
        self._tenants: dict[str, TenantLimits] = {}
        self._matches: dict[_Whose, _Matched | None] = {}
        self._by_user: set[str] = set()  # tenants that limit each user
        self._users: dict[tuple[str, str], _User] = {}
        self._refused = Counter[tuple[str, str]]()
        self._tasks = Tasks()
        book.changes.append(self._changed)

    def go_by(self, prices: Prices | None, wall_s: Callable[[float], float]) -> None:
        """Count money by this price book, at `wall_s` of a moment of the clock; until then nothing has a price."""
        self._prices, self._wall_s = prices, wall_s
        self._matches.clear()

    def observe(self, metrics: TierMetrics) -> None:
        """Show what is refused, and which roots are not reached."""
        metrics.counter(
            "limits_refused", "Requests refused by a limit, by what it counts and whose it is.",
            lambda: dict(self._refused), ("kind", "whose"),
        )  # fmt: skip
        metrics.gauge(
            "limit_root_silent", "1 while the root of a region's limits does not answer, or there is none.",
            lambda: {home: float(self._is_silent(lender)) for home, lender in self._lenders.items()}, "target",
        )  # fmt: skip

    def _is_silent(self, lender: _Lender) -> bool:
        return bool(lender.holder.holdings) and (lender.silent_at > -inf or self._root(lender.region) is None)

    def open(self) -> None:
        """Follow the limits and their roots."""
        self._tasks.start(self._book.follow(), "watch the limits")
        self._tasks.start(self._follow_roots(), "watch the roots of limits")

    async def close(self) -> None:
        """Follow, and borrow, no more. What is lent here, and what was under way, is over."""
        await self._tasks.close()
        leaving = [self._leave(lender) for lender in self._lenders.values()]
        await asyncio.gather(*leaving)

    # -- of a request

    def admit(
        self, context: Any, request: Request, user: str = "", *, waits: bool = True
    ) -> Reply | asyncio.Future[None] | None:
        """Take what a request may use, into `context.reserved`. None: it may go on. A Reply: it may not. A future:
        ask again, with `waits` False, once that is done. `user` is whom the request names, if no token did."""
        tenant = request.tenant
        if tenant not in self._tenants:
            return None
        caller = context.caller
        who = self._user(tenant, caller.user or user) if tenant in self._by_user else ""
        # A longer name is no limit's, and is not remembered as long as its client made it.
        whose = tenant, caller.key_id, request.key, request.model[: NAME_LIMIT + 1], who
        matched = self._matches[whose] if whose in self._matches else self._match(*whose)
        if matched is None:
            return None
        now = self._clock()
        if matched.until_s is not None:
            if self._wall_s(now) >= matched.until_s:
                matched = self._matched_anew(whose)
            if matched.unpriced is not None:
                return self._not_priced(matched.unpriced, request.model)
        amounts = matched.amounts(request)
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
                self._refused[kind_and_whose(holding.name)] += 1
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
        self._refused[kind_and_whose(holding.name)] += 1
        again_s = lacks_s if 0.0 < lacks_s < inf else AGAIN_S
        return _refusal(matched, kind, size, period, n, again_s, now, used_up=lacks_s > 0.0)

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

    def _match(self, tenant: str, key_id: str, key: str, model: str, user: str) -> _Matched | None:
        one, whose = self._tenants[tenant], (tenant, key_id, key, model, user)
        lender = self._lenders[one.home]
        holdings, of = lender.holder.holdings, list[tuple[int, int, int, Holding]]()
        known = self._users.setdefault((tenant, user), _User(lender)) if user else None
        for limit in one.limits:
            if limit.key not in ("", key_id or key) or limit.model not in ("", model):
                continue
            for name, n in limit.sizes().items():
                bucket = bucket_of(tenant, limit, name)
                if limit.each_user and known is not None:
                    bucket += user
                    if bucket not in holdings:
                        holdings[bucket] = new_holding(bucket, one.parts(limit, name, n)[0], None, self._clock())
                    known.holdings[bucket] = holdings[bucket]
                if bucket in holdings:
                    of.append((_KINDS[kind_of(name)], n, int(period_s(name)), holdings[bucket]))
        if len(self._matches) >= MATCHES_MAX:
            del self._matches[old := next(iter(self._matches))]
            if (user_of_old := self._users.get((old[0], old[4]))) is not None:
                user_of_old.matches.discard(old)
        self._matches[whose] = matched = _Matched(lender, tuple(of)) if of else None
        money = next((holding for kind, _, _, holding in of if kind == MONEY), None)
        if matched is not None and money is not None:
            self._price(matched, money, model)
        if known is not None:
            known.matches.add(whose)
        return matched

    def _price(self, matched: _Matched, money: Holding, model: str) -> None:
        at_s = self._wall_s(self._clock())
        matched.until_s = inf if self._prices is None else self._prices.until(at_s)
        matched.rates = None if self._prices is None else self._prices.rates(model, at_s)
        matched.unpriced = money if matched.rates is None else None

    def _matched_anew(self, whose: _Whose) -> _Matched:
        """The same at the prices of now: what is under way is settled by those it began with."""
        old, matched = self._matches.pop(whose), self._match(*whose)
        assert old is not None
        assert matched is not None  # it matches the same limits
        matched.output_tokens = old.output_tokens
        return matched

    def _not_priced(self, money: Holding, model: str) -> Reply:
        self._refused[kind_and_whose(money.name)] += 1
        held = "no price book is configured here" if self._prices is None else "it has no price in the price book"
        detail = f"the use of `{model[:128]}` is limited in money, and {held}; ask for another model, or your operator"
        extra = b"x-should-retry: false\r\n"
        return answers.refusal(
            outcome.RATE_LIMITED, detail, param="model", extra=extra, kind=_NO_MONEY, code="model_not_priced"
        )

    def _user(self, tenant: str, named: str) -> str:
        """Whom a request counts for among its tenant's users, by a name that is the same at all balancers."""
        if not named:
            return _REST
        user = hashlib.sha256(f"{tenant}\n{named}".encode("utf-8", "surrogatepass")).hexdigest()[:_USER_CHARS]
        if (tenant, user) in self._users or len(self._users) < USERS_MAX:
            return user
        for _ in range(USERS_LOOKED_AT):  # who came first, and is idle, is forgotten; who is not comes to the end
            whose = next(iter(self._users))
            old = self._users.pop(whose)
            if old.idle:
                old.forget(self._matches)
                return user
            self._users[whose] = old
        return _REST

    # -- what stands in etcd

    def _changed(self) -> None:
        self._tenants, self._matches, now = self._book.tenants(), {}, self._clock()
        self._by_user = {one.tenant for one in self._tenants.values() if any(limit.each_user for limit in one.limits)}
        wanted: dict[str, set[str]] = {home: set() for home in self._lenders}
        each: dict[str, Quota] = {}
        for one in self._tenants.values():
            lender = self._lenders.get(one.home)
            if lender is None:
                lender = self._lenders[one.home] = _Lender(one.home)
                self._tasks.start(self._lend(lender), f"borrow from {one.home}")
            has_safe = bool(self._safe) and self._safe in one.safe
            for limit in one.limits:
                for name, n in limit.sizes().items():
                    lent, own = one.parts(limit, name, n)
                    safe = own if has_safe and own.depth else None
                    bucket = bucket_of(one.tenant, limit, name)
                    if limit.each_user:
                        each[bucket] = lent
                        continue
                    wanted.setdefault(one.home, set()).add(bucket)
                    known = lender.holder.holdings.get(bucket)
                    if known is None:
                        lender.holder.holdings[bucket] = new_holding(bucket, lent, safe, now)
                    elif (known.quota, known.safe and known.safe.quota) != (lent, safe):
                        known.resize(lent, safe, now)
        for home, buckets in wanted.items():
            holdings = self._lenders[home].holder.holdings
            for bucket in holdings.keys() - buckets:
                quota = each.get(bucket.rpartition(EACH)[0] + EACH) if EACH in bucket else None
                if quota is None:
                    del holdings[bucket]
                elif quota != holdings[bucket].quota:
                    holdings[bucket].resize(quota, None, now)
        self._users = {whose: user for whose, user in self._users.items() if whose[0] in self._by_user}
        for whose, user in self._users.items():
            user.lender = self._lenders[self._tenants[whose[0]].home]
            held = user.lender.holder.holdings
            user.holdings = {name: held[name] for name in user.holdings if name in held}
            user.matches.clear()

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

    async def _leave(self, lender: _Lender) -> None:
        if self._clock() - lender.silent_at >= REFRESH_S:
            await self._tell(lender, lender.holder.leaves(self._clock()))

    async def _exchange(self, lender: _Lender) -> None:
        await self._tell(lender, lender.holder.asked(self._clock()))

    async def _tell(self, lender: _Lender, ask: Ask) -> None:
        claim = self._root(lender.region)
        if not ask.wants or claim is None:
            return
        request = region_pb2.BorrowRequest(
            holder=self._name, lease=ask.lease, number=ask.number, wants=[_wire(want) for want in ask.wants]
        )
        try:
            async with asyncio.timeout(ASK_S):
                reply = await self._borrow(claim, request)
        except (grpc.aio.AioRpcError, TimeoutError, OSError):
            lender.silent_at = self._clock()
            return
        lender.silent_at = -inf
        grants = tuple(Grant(one.bucket, one.granted, one.free, one.soon) for one in reply.grants)
        lender.holder.told(Told(reply.lease, grants), ask, self._clock())

    def status(self) -> dict[str, Any]:
        """For people."""
        now = self._clock()
        roots = {
            name: {"root": claim.instance if (claim := self._root(name)) is not None else None,
                   "lease": lender.holder.alive(now), "buckets": len(lender.holder.holdings)}
            for name, lender in sorted(self._lenders.items())
        }  # fmt: skip
        return {**self._book.status(), "lent_by": roots, "prices": self._priced(self._wall_s(now))}

    def _priced(self, at_s: float) -> dict[str, Any] | None:
        """Which models have a price now; None without a price book. `more`: than are named."""
        epoch = None if self._prices is None else self._prices.of(self._prices.epoch_at(at_s))
        if epoch is None:
            return None
        names = sorted(epoch.models)  # `*` comes before all letters
        return {"epoch": epoch.epoch, "models": names[:PRICED_TOLD_MAX], "more": len(names) > PRICED_TOLD_MAX}


def ask_of(request: region_pb2.BorrowRequest) -> Ask:
    """What a holder tells, from the wire."""
    wants = tuple(
        Want(one.bucket, one.spent, one.returned, one.refunded, one.owed, one.wanted, one.least, one.held)
        for one in request.wants
    )
    return Ask(request.lease, request.number, wants, 0.0)


def reply_of(told: Told) -> region_pb2.BorrowReply:
    """A root's answer, for the wire."""
    grants = [
        region_pb2.Grant(bucket=one.bucket, granted=one.granted, free=one.free, soon=one.soon) for one in told.grants
    ]
    return region_pb2.BorrowReply(lease=told.lease, grants=grants)


def _wire(want: Want) -> region_pb2.Want:
    return region_pb2.Want(
        bucket=want.bucket, spent=want.spent, returned=want.returned, refunded=want.refunded, owed=want.owed,
        wanted=want.wanted, least=want.least, held=want.held,
    )  # fmt: skip


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# -- what clients are told

_WORDS = {
    REQUESTS: "requests", INPUT: "tokens", OUTPUT: "tokens", TOKENS: "tokens", CONCURRENCY: "concurrency",
    MONEY: "micro-usd",
}  # fmt: skip
_UNITS = {
    REQUESTS: "requests", INPUT: "input tokens", OUTPUT: "output tokens", TOKENS: "tokens", CONCURRENCY: "requests",
    MONEY: "USD",
}  # fmt: skip
_NO_MONEY = "insufficient_quota"
_PERIODS = {60: "per minute", 86_400: "per day", 2_592_000: "per 30 days", 0: "at once"}


def _refusal(
    matched: _Matched, kind: int, size: int, period: int, n: int, retry_s: float | None, now: float,
    *, used_up: bool = True,
) -> Reply:  # fmt: skip
    """429. `retry_s` None: it would never fit. Where money is `used_up`, clients should not come again by themselves;
    where it was not lent in time, they may."""
    money = kind == MONEY
    size_told, n_told, uses = (usd(size), usd(n), "cost") if money else (str(size), str(n), "use")
    limit = f"{size_told} {_UNITS[kind]} {_PERIODS[period]}"
    word, code = (_NO_MONEY, _NO_MONEY) if money else (_WORDS[kind], "")
    matched.told_at = -inf  # it is to say what it is refused for
    extra = _headers(matched, now)
    if retry_s is None:
        detail = f"request too large: it may {uses} {n_told} {_UNITS[kind]}, and the limit is {limit}; ask for less"
        extra += b"x-should-retry: false\r\n"
        return answers.refusal(outcome.RATE_LIMITED, detail, extra=extra, kind=word, code=code)
    needs = f", and this request may {uses} {n_told}" if period else ""
    what = ("budget used up" if used_up else "budget not lent in time") if money else "rate limit reached"
    detail = f"{what}: {limit}{needs}; try again in {_span(retry_s)}"
    extra += b"retry-after-ms: %d\r\nx-should-retry: %b\r\n" % (
        ceil(retry_s * 1e3), b"false" if money and used_up else b"true"
    )  # fmt: skip
    return answers.refusal(outcome.RATE_LIMITED, detail, retry_after_s=retry_s, extra=extra, kind=word, code=code)


def _headers(matched: _Matched, now: float) -> bytes:
    """OpenAI's, and those of draft-ietf-httpapi-ratelimit-headers-11, of the tightest limit on requests, on tokens and
    on requests at once. What is left is what this balancer has and what the root had to lend when it was asked last; it
    is looked at every TOLD_S, as it costs more than all the rest."""
    if 0.0 <= now - matched.told_at < TOLD_S:
        return matched.told
    tightest: list[int] = []  # list[int]() costs as much as the rest of a limit
    lines: list[int | bytes] = []
    states: list[int] = []
    for _, limits in matched.by_word:
        least, place = 2.0, 0
        for at, (size, _, holding) in enumerate(limits):
            left = holding.available + int(holding.free)
            left = size if left > size else left if left > 0 else 0  # two calls cost more than the rest
            if left < least * size:
                least, place, told = left / size, at, left
        tightest.append(place)
        lines.append(told)
        states.append(told)
        if period := limits[place][1]:
            reset_s = (1.0 - least) * period
            whole_s = ceil(reset_s)
            lines.append(_whole_span(whole_s) if reset_s >= 1.0 else b"%dms" % ceil(reset_s * 1e3))
            states.append(whole_s)
    form = matched.forms.get(which := tuple(tightest))
    if form is None:
        form = matched.forms[which] = _form(
            [(word, *limits[place][:2]) for (word, limits), place in zip(matched.by_word, tightest, strict=True)]
        )
    matched.told = form % (*lines, *states)
    matched.told_at = now
    return matched.told


def _form(of: list[tuple[str, int, int]]) -> bytes:
    """The header lines of these limits, of a word, size and period each, with places for what is left of each and when
    it is whole again: in the lines, and once more in the states."""
    lines, policies, states = "", list[str](), list[str]()
    for word, size, period in of:
        lines += f"x-ratelimit-limit-{word}: {size}\r\nx-ratelimit-remaining-{word}: %d\r\n"
        if period:
            lines += f"x-ratelimit-reset-{word}: %b\r\n"
        # Of requests at once nobody knows when one ends.
        policies.append(f'"{word}";q={size};w={period}' if period else f'"{word}";q={size};qu="concurrent-requests"')
        states.append(f'"{word}";r=%d;t=%d' if period else f'"{word}";r=%d')
    return f"{lines}ratelimit-policy: {', '.join(policies)}\r\nratelimit: {', '.join(states)}\r\n".encode()


@lru_cache(SPANS_MAX)
def _whole_span(seconds: int) -> bytes:
    return _span(float(seconds)).encode()


def _span(seconds: float) -> str:
    """As OpenAI writes a length of time: 120ms, 6s, 1m30s, 2h0m0s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
