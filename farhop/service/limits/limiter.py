"""Enforces tenants' limits: units are lent by each tenant's root, taken by requests, and returned when requests end.

A request takes units lent to this balancer, in memory. If these do not suffice, it waits up to WAIT_S for an exchange
with the root, which it triggers and all waiting requests share. `book` holds the limits, `match` finds those of a
request, `answers` informs the client. Invariants: a tenant without limits costs one look-up; a charge is settled once,
whatever became of its request; the loans of a root that cannot be reached expire (balance.quota), and `safe` parts go
on; money is in microdollars, by this process's price book, and a model without a price is never admitted if money is
limited. Never writes to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from farhop_wire import region_pb2

from farhop.balance import outcome
from farhop.balance.quota import EACH, Grant, LeaseReply, LeaseRequest, Want
from farhop.balance.quota_holder import Holding, new_holding
from farhop.identity.jwt_tokens import hidden_user
from farhop.service.limits import answers
from farhop.service.limits.book import bucket_of, kind_and_whose
from farhop.service.limits.match import KINDS, MONEY, Lender, Matched
from farhop.service.process.tasks import Tasks
from farhop.store.contract import LIMIT_ROOT_PREFIX
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import NAME_LIMIT, kind_of, period_s
from farhop.store.follow import Documents, follow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from farhop.accounts.prices import Prices
    from farhop.balance.machine import Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop.balance.quota import Quota
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.service.limits.book import LimitBook
    from farhop.service.limits.match import Amounts
    from farhop.store.contract import Change, Store
    from farhop.store.documents.limits import Limit, RootClaim, TenantLimits
    from farhop.telemetry.metrics import TierMetrics

    # Asks a root; grpc.aio.AioRpcError or TimeoutError if it does not answer.
    Borrow = Callable[[RootClaim, region_pb2.BorrowRequest], Awaitable[region_pb2.BorrowReply]]

MATCHES_MAX = 10_000  # of tenant, key, model and user, remembered
USERS_MAX = 8192  # users of tenants that limit each, remembered; half of them, in equal parts, for each tenant alone
# What one of them takes of a request to a root; one that takes more counts as several. So all of them take 3 MiB at
# most: gRPC reads messages of 4 MiB, and the buckets of whole tenants have to fit beside them.
USER_BYTES = 3 * 1024 * 1024 // USERS_MAX
# Of a bucket in a lease request, beside its name: six numbers (of slots fewer) with a tag and 6 bytes, which is up to
# 2**42 and four times the largest limit, and two frames.
_WANT_BYTES = 6 * 7 + 2 * 4
_UNITS_MAX = 2**53  # what is lent of a limit at most
LOOKED_AT = 32  # for one that can be forgotten: a user who is idle, a match of a tenant that has many
REFRESH_S = 2.0  # between two exchanges with a root
GAP_S = 0.01  # at least
ASK_S = 1.0  # for an answer
WAIT_S = 1.0  # of a request, for units to be lent
AGAIN_S = 2.0  # Retry-After if it is unknown when there is room
PRICED_SHOWN_MAX = 1000
# By the client, for whom it is to say how long it waits; and an answer in one piece that is too long, as it asked for.
_GIVEN_UP = (outcome.CLIENT_LEFT, outcome.DEADLINE, outcome.WHOLE_ANSWER_TIMEOUT)


class ReloadablePrices(Protocol):
    """A price book that may be changed while the process lives."""

    prices: Prices
    changes: list[Callable[[], None]]


_Whose = tuple[str, str, str, str, str]  # tenant, issued key, key of the law, model, user
_OTHER_USERS = "rest"  # all users of a tenant that are not named, or come while USERS_MAX others are busy, are one
_USER_CHARS = 16


class _User:
    """One of a tenant's users: its lent units by bucket, what these take of a lease request, and its limits."""

    __slots__ = ("bytes", "holdings", "lender", "matches")

    def __init__(self, lender: Lender) -> None:
        self.lender, self.holdings, self.matches = lender, dict[str, Holding](), set[_Whose]()
        self.bytes = USER_BYTES

    def now_holds(self, holdings: dict[str, Holding]) -> int:
        """Have these. Returns how many bytes more than before a lease request may take."""
        before, self.holdings = self.bytes, holdings
        self.bytes = max(USER_BYTES, sum(map(_ask_bytes, holdings)))
        return self.bytes - before

    @property
    def idle(self) -> bool:
        return all(holding.idle for holding in self.holdings.values())

    def forget(self) -> None:
        for bucket in self.holdings:
            self.lender.holder.holdings.pop(bucket, None)


def _ask_bytes(bucket: str) -> int:
    return len(bucket.encode("utf-8", "surrogatepass")) + _WANT_BYTES


class Charge:
    """The units that a request took, until they are settled. `limits` are for the headers of its answer."""

    __slots__ = ("_amounts", "_clock", "_matched", "_taken")

    def __init__(
        self, matched: Matched, amounts: Amounts, taken: list[tuple[int, bool, Holding]], clock: Callable[[], float]
    ) -> None:
        self._matched, self._amounts, self._taken, self._clock = matched, amounts, taken, clock

    def settle(self, active: ActiveRequest | None, reason: Outcome, usage: Usage | None) -> None:
        """The request is over: return unused units; overdrawn units are owed. Idempotent."""
        taken, self._taken = self._taken, []
        if not taken:
            return
        now = self._clock()
        used, amounts = self._used(active, reason, usage, now), self._amounts
        for kind, lent, holding in taken:
            holding.settle(amounts[kind], used[kind], lent, now)

    def _used(self, active: ActiveRequest | None, reason: Outcome, usage: Usage | None, now: float) -> Amounts:
        """What the request used, by kind."""
        if active is None or not active.began_at:
            gave_up = active is not None and active.forward is not None and reason in _GIVEN_UP
            return self._unmeasured(active, now) if active is not None and gave_up else (0, 0, 0, 0, 1, 0)
        progress = active.progress
        if progress is not None and progress.counts and (usage is None or progress.resumed):
            usage = progress.usage  # it broke: what passed was counted here
        if usage is None:  # of an answer that was another's nothing was sent: it is a request, and no tokens
            unsent = active.status >= 400 or active.forward is None
            return (1, 0, 0, 0, 1, 0) if unsent else self._unmeasured(active, now)
        prompt, output, matched = usage.prompt_tokens, usage.completion_tokens, self._matched
        matched.learn(active.request, output, now - active.began_at)
        money = 0
        if matched.rates is not None:
            cached = min(usage.cached_tokens or 0, prompt)
            money = matched.rates.micro_usd(prompt - cached, cached, output)
        return 1, prompt, output, prompt + output, 1, money

    def _unmeasured(self, active: ActiveRequest, now: float) -> Amounts:
        """The usage of an answer that broke, or whose client left, before an engine reported it: the units taken; for a
        stream that had not begun, the prompt alone; and if the request set no bound, at least as much as other requests
        got in the same time. Otherwise a client that always leaves before the end would never reach its limit."""
        amounts, matched, request = self._amounts, self._matched, active.request
        _, prompt, output, *_ = amounts
        if request.stream and not active.began_at:
            output = 0
        elif not request.max_tokens:  # some engines take 0 for no limit
            since = active.began_at if request.stream else active.forwarded_at
            output = max(output, ceil(matched.tokens_per_s * max(0.0, now - since)))
        money = 0 if matched.rates is None else matched.rates.at_most(prompt, output)
        return 1, prompt, output, prompt + output, 1, money

    def headers(self) -> bytes:
        """The header lines that tell a client how much is left."""
        return answers.headers(self._matched, self._clock())


class Limiter:
    """Enforces the limits on a balancer's clients. `name` is the balancer's in the fleet, TIER REGION/INSTANCE; `safe`
    the name under which limits reserve a safe share for it, "" if none do. `borrow` asks a root. `region`: the only one
    whose root it may ask, "" any. `salt` hides users' names from roots; without it they can be guessed."""

    def __init__(
        self, book: LimitBook, store: Store, name: str, safe: str, borrow: Borrow,
        clock: Callable[[], float], refused: Callable[[str], None], region: str = "", salt: bytes = b"",
        may_know: Callable[[Request, str], bool] = lambda _request, _region: True,
    ) -> None:  # fmt: skip
        """`may_know`: whether the law lets records of a request be kept in this region: else its root gets no hash of
        its user."""
        self._region, self._salt = region, salt
        self._prices: Prices | None = None
        self._wall_s: Callable[[float], float] = float
        self._book, self._store, self._safe = book, store, safe
        self._name = f"{name} {secrets.token_hex(8)}"  # what a process of its name held before is not its own
        self.borrow, self._clock = borrow, clock
        self._roots: Documents[RootClaim] = Documents(lambda _, one: documents.decode_root(one), refused, "limit_root")
        self.lenders: dict[str, Lender] = {}
        self.tenants: dict[str, TenantLimits] = {}
        self.matches: dict[_Whose, Matched | None] = {}
        self._by_user: set[str] = set()  # tenants that limit each user
        self.may_know = may_know
        self.users: dict[tuple[str, str], _User] = {}
        self._n_matches, self._user_bytes = Counter[str](), Counter[str]()  # of these, each tenant's
        self._user_bytes_all = 0
        self._refused = Counter[tuple[str, str]]()
        self._tasks = Tasks()
        book.changes.append(self._changed)

    def go_by(self, book: ReloadablePrices | None, wall_s: Callable[[float], float]) -> None:
        """Count money by this price book, and by what it is changed to, at `wall_s` of a moment of the clock; until
        then nothing has a price."""
        self._wall_s = wall_s

        def priced() -> None:
            self._prices = None if book is None else book.prices
            for matched in self.matches.values():
                if matched is not None and matched.until_s is not None:
                    matched.until_s = -inf  # of what is under way those it began with

        if book is not None:
            book.changes.append(priced)
        priced()

    def observe(self, metrics: TierMetrics) -> None:
        """Export refusals, and roots that cannot be reached, as metrics."""
        metrics.counter(
            "limits_refused", "Requests refused by a limit, by what it counts and whose it is.",
            lambda: dict(self._refused), ("kind", "whose"),
        )  # fmt: skip
        metrics.gauge(
            "limit_root_silent", "1 while the root of a region's limits does not answer, or there is none.",
            lambda: {home: float(self.is_silent(lender)) for home, lender in self.lenders.items()}, "target",
        )  # fmt: skip

    def is_silent(self, lender: Lender) -> bool:
        return bool(lender.holder.holdings) and (lender.silent_at > -inf or self._root(lender.region) is None)

    def open(self) -> None:
        """Begin to follow the limits and their roots."""
        self._tasks.start(self._book.follow(), "watch the limits")
        self._tasks.start(self._follow_roots(), "watch the roots of limits")

    async def close(self) -> None:
        """Stop following and borrowing. Loans, and requests under way, are given up."""
        await self._tasks.close()
        leaving = [self._leave(lender) for lender in self.lenders.values()]
        await asyncio.gather(*leaving)

    # -- of a request

    def admit(
        self, context: Any, request: Request, user: str = "", *, waits: bool = True
    ) -> Reply | asyncio.Future[None] | None:
        """Take the units that a request may use, into `context.charge`. Returns None: it may go on; a Reply: it may
        not; a future: ask again, with `waits` False, once that is done. `user` is the user that the request names, if
        no token did."""
        tenant = request.tenant
        if tenant not in self.tenants:
            return None
        caller, who = context.caller, ""
        if tenant in self._by_user:
            known = self.may_know(request, self.tenants[tenant].home)
            who = self._user(tenant, (caller.user or user) if known else "")
        # A longer name is no limit's, and is not remembered as long as its client made it.
        whose = tenant, caller.key_id, request.key, request.model[: NAME_LIMIT + 1], who
        if whose not in self.matches:
            whose = self._match_known(whose)
        matched = self.matches[whose]
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
        taken = [(kind, holding.take(amounts[kind]), holding) for kind, _, _, holding in matched.of]
        context.charge = Charge(matched, amounts, taken, self._clock)
        return None

    def _short(self, matched: Matched, amounts: Amounts, now: float, *, waits: bool) -> Reply | asyncio.Future[None]:
        lender = matched.lender
        if self._region and lender.region != self._region:
            self._refused[kind_and_whose(matched.of[0][3].name)] += 1
            return answers.lent_elsewhere(lender.region)
        short = [
            (kind, size, period, amounts[kind], holding)
            for kind, size, period, holding in matched.of
            if not holding.fits(amounts[kind], now)
        ]
        for kind, size, period, n, holding in short:
            if n > holding.largest:
                self._refused[kind_and_whose(holding.name)] += 1
                return answers.refusal(matched, kind, size, period, n, None, now, largest=int(holding.largest))
        lacks_s, (kind, size, period, n, holding) = max(
            ((holding.lacks_s(n, now), (kind, size, period, n, holding)) for kind, size, period, n, holding in short),
            key=lambda one: one[0],
        )
        dry = lacks_s > 0.0 and now - holding.free_at < REFRESH_S  # others may have returned some since
        silent = now - lender.silent_at < REFRESH_S
        if waits and not dry and not silent and self._root(lender.region) is not None:
            return self._wait(lender, [(n, holding) for _, _, _, n, holding in short])
        if any(holding.used for _, _, _, _, holding in short):
            lender.wake.set()  # nothing leaks before its root knows that it was spent
        self._refused[kind_and_whose(holding.name)] += 1
        again_s = lacks_s if 0.0 < lacks_s < inf else AGAIN_S
        return answers.refusal(matched, kind, size, period, n, again_s, now, used_up=lacks_s > 0.0)

    def _wait(self, lender: Lender, lacking: list[tuple[int, Holding]]) -> asyncio.Future[None]:
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

    def _match_known(self, whose: _Whose) -> _Whose:
        """Match the limits of a request, of this user or, if there is no room for it, of the users that count as one.
        Returns whose they are."""
        user = whose[4]
        if user and user != _OTHER_USERS and not self._has_room(whose):
            whose = *whose[:4], _OTHER_USERS
            if whose in self.matches:
                return whose
        self._match(*whose)
        return whose

    def _match(self, tenant: str, key_id: str, key: str, model: str, user: str) -> Matched | None:
        one, whose = self.tenants[tenant], (tenant, key_id, key, model, user)
        lender = self.lenders[one.home]
        holdings, of = lender.holder.holdings, list[tuple[int, int, int, Holding]]()
        known = self.users.get((tenant, user)) if user else None
        if user and known is None:
            known = self.users[tenant, user] = _User(lender)
            self._hold(tenant, USER_BYTES)
        own = dict[str, Holding]()
        for limit, name, n, bucket in self._buckets(whose):
            if limit.each_user and known is not None:
                if bucket not in holdings:
                    holdings[bucket] = new_holding(bucket, one.parts(limit, name, n)[0], None, self._clock())
                own[bucket] = holdings[bucket]
            if bucket in holdings:
                of.append((KINDS[kind_of(name)], n, int(period_s(name)), holdings[bucket]))
        if known is not None:
            self._hold(tenant, known.now_holds(known.holdings | own))
        if len(self.matches) >= MATCHES_MAX:
            self._forget_match()
        self.matches[whose] = matched = Matched(lender, tuple(of)) if of else None
        self._n_matches[tenant] += 1
        money = next((holding for kind, _, _, holding in of if kind == MONEY), None)
        if matched is not None and money is not None:
            self._price(matched, money, model)
        if known is not None:
            known.matches.add(whose)
        return matched

    def _buckets(self, whose: _Whose) -> Iterator[tuple[Limit, str, int, str]]:
        """The limits that match: each with the name of its size, that size, and its bucket, of whom it is for."""
        tenant, key_id, key, model, user = whose
        for limit in self.tenants[tenant].limits:
            if limit.key in ("", key_id or key) and limit.model in ("", model):
                for name, n in limit.sizes().items():
                    bucket = bucket_of(tenant, limit, name)
                    yield limit, name, n, bucket + user if limit.each_user else bucket

    def _hold(self, tenant: str, more: int) -> None:
        self._user_bytes[tenant] += more
        self._user_bytes_all += more

    def _forget_match(self) -> None:
        """Forget the oldest match of a tenant that has its part of them or more: a tenant's clients make up models, and
        what was learned of others is to stay."""
        part, old = MATCHES_MAX // len(self.tenants), next(iter(self.matches))
        for _ in range(LOOKED_AT):
            if self._n_matches[old[0]] >= part:
                break
            self.matches[old] = self.matches.pop(old)
            old = next(iter(self.matches))
        self._unmatch(old)
        if (user := self.users.get((old[0], old[4]))) is not None:
            user.matches.discard(old)

    def _unmatch(self, whose: _Whose) -> Matched | None:
        self._n_matches[whose[0]] -= 1
        return self.matches.pop(whose)

    def _price(self, matched: Matched, money: Holding, model: str) -> None:
        at_s = self._wall_s(self._clock())
        matched.until_s = inf if self._prices is None else self._prices.until(at_s)
        matched.rates = None if self._prices is None else self._prices.rates(model, at_s)
        matched.unpriced = money if matched.rates is None else None

    def _matched_anew(self, whose: _Whose) -> Matched:
        """Match the limits again with the current prices. Requests in flight are settled with the limits they began
        with.
        """
        old, matched = self._unmatch(whose), self._match(*whose)
        assert old is not None
        assert matched is not None  # it matches the same limits
        matched.output_tokens, matched.tokens_per_s = old.output_tokens, old.tokens_per_s
        return matched

    def _not_priced(self, money: Holding, model: str) -> Reply:
        self._refused[kind_and_whose(money.name)] += 1
        return answers.not_priced(model, has_book=self._prices is not None)

    def _user(self, tenant: str, named: str) -> str:
        """Whom a request counts for among its tenant's users, by a name that is the same at all balancers."""
        if not named:
            return _OTHER_USERS
        if self._salt:  # otherwise hidden than in usage records, so that a root cannot look them up there
            return hidden_user(self._salt, f"limits\n{tenant}", named)[:_USER_CHARS]
        return hashlib.sha256(f"{tenant}\n{named}".encode("utf-8", "surrogatepass")).hexdigest()[:_USER_CHARS]

    def _has_room(self, whose: _Whose) -> bool:
        """Whether a request to a root may hold what is new of this user; idle others are dropped for it."""
        tenant, user = whose[0], whose[4]
        known = self.users.get((tenant, user))
        names = set() if known is None else set(known.holdings)
        names.update(bucket for limit, _, _, bucket in self._buckets(whose) if limit.each_user)
        more = max(USER_BYTES, sum(map(_ask_bytes, names))) - (0 if known is None else known.bytes)
        # Others' busy users, however many, leave each tenant its part.
        tenants = len(self._by_user)
        part = USERS_MAX // (2 * tenants) * USER_BYTES
        if (
            more <= 0
            or self._user_bytes_all + more <= USERS_MAX * USER_BYTES - part * (tenants - 1)
            or self._user_bytes[tenant] + more <= part
        ):
            return True
        for _ in range(LOOKED_AT):  # the first that are idle are forgotten; one that is not goes to the end
            other = next(iter(self.users))
            old = self.users.pop(other)
            if old is known or not old.idle:
                self.users[other] = old
                continue
            self._hold(other[0], -old.bytes)
            for match in old.matches & self.matches.keys():
                self._unmatch(match)
            old.forget()
            more -= old.bytes
            if more <= 0:
                return True
            if not self.users:
                break
        return False

    # -- documents in etcd

    def _changed(self) -> None:
        self.tenants, self.matches, now = self._book.tenants(), {}, self._clock()
        self._n_matches.clear()
        self._by_user = {one.tenant for one in self.tenants.values() if any(limit.each_user for limit in one.limits)}
        wanted: dict[str, set[str]] = {home: set() for home in self.lenders}
        each: dict[tuple[str, str], Quota] = {}  # by home and limit
        for one in self.tenants.values():
            lender = self.lenders.get(one.home)
            if lender is None:
                lender = self.lenders[one.home] = Lender(one.home)
                self._tasks.start(self._lend(lender), f"borrow from {one.home}")
            has_safe = bool(self._safe) and self._safe in one.safe
            for limit in one.limits:
                for name, n in limit.sizes().items():
                    lent, own = one.parts(limit, name, n)
                    safe = own if has_safe and own.depth else None
                    bucket = bucket_of(one.tenant, limit, name)
                    if limit.each_user:
                        each[one.home, bucket] = lent
                        continue
                    wanted.setdefault(one.home, set()).add(bucket)
                    known = lender.holder.holdings.get(bucket)
                    if known is None:
                        lender.holder.holdings[bucket] = new_holding(bucket, lent, safe, now)
                    elif (known.quota, known.safe and known.safe.quota) != (lent, safe):
                        known.resize(lent, safe, now)
        for home, buckets in wanted.items():
            holdings = self.lenders[home].holder.holdings
            for bucket in holdings.keys() - buckets:
                quota = each.get((home, bucket.rpartition(EACH)[0] + EACH)) if EACH in bucket else None
                if quota is None:
                    del holdings[bucket]
                elif quota != holdings[bucket].quota:
                    holdings[bucket].resize(quota, None, now)
        self.users = {whose: user for whose, user in self.users.items() if whose[0] in self._by_user}
        self._user_bytes.clear()
        self._user_bytes_all = 0
        for whose, user in self.users.items():
            user.lender = self.lenders[self.tenants[whose[0]].home]
            held = user.lender.holder.holdings
            user.now_holds({name: held[name] for name in user.holdings if name in held})
            self._hold(whose[0], user.bytes)
            user.matches.clear()

    async def _follow_roots(self) -> None:
        await follow(self._store, LIMIT_ROOT_PREFIX, self.rooted)

    def rooted(self, change: Change) -> None:
        """Apply one change from the watch of the roots."""
        for key in self._roots.take(change):
            lender = self.lenders.get(key.removeprefix(LIMIT_ROOT_PREFIX))
            if lender is not None:
                lender.silent_at = -inf
                lender.wake.set()

    def _root(self, region: str) -> RootClaim | None:
        claim = self._roots.get(f"{LIMIT_ROOT_PREFIX}{region}")
        return claim if claim is not None and claim.instance and claim.region == region else None

    # -- with the roots

    async def _lend(self, lender: Lender) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await lender.wake.wait()
            lender.wake.clear()
            waiters, lender.waiters = lender.waiters, []
            try:
                await self.exchange(lender)
            finally:
                for future in waiters:
                    _done(future)
            await asyncio.sleep(GAP_S)

    async def _leave(self, lender: Lender) -> None:
        if self._clock() - lender.silent_at >= REFRESH_S:
            await self._send_lease_request(lender, lender.holder.leaves(self._clock()))

    async def exchange(self, lender: Lender) -> None:
        await self._send_lease_request(lender, lender.holder.asked(self._clock()))

    async def _send_lease_request(self, lender: Lender, lease_request: LeaseRequest) -> None:
        claim = self._root(lender.region)
        if not lease_request.wants or claim is None:
            return
        request = region_pb2.BorrowRequest(
            holder=self._name,
            lease=lease_request.lease,
            number=lease_request.number,
            wants=[_wire(want) for want in lease_request.wants],
        )
        try:
            async with asyncio.timeout(ASK_S):
                reply = await self.borrow(claim, request)
        except (grpc.aio.AioRpcError, TimeoutError, OSError):
            lender.silent_at = self._clock()
            return
        if len(reply.grants) > len(lease_request.wants):
            lender.silent_at = self._clock()
            return
        grants = tuple(Grant(one.bucket, one.granted, one.free, one.soon) for one in reply.grants)
        if not all(0 <= one.granted <= _UNITS_MAX and -_UNITS_MAX <= one.free <= _UNITS_MAX for one in grants):
            lender.silent_at = self._clock()  # no root in its right mind says that, nor a number that is none
            return
        lender.silent_at = -inf
        lender.holder.on_reply(LeaseReply(reply.lease, grants), lease_request, self._clock())

    def status(self) -> dict[str, Any]:
        """The state as a JSON-ready value, for operators."""
        now = self._clock()
        roots = {
            name: {"root": claim.instance if (claim := self._root(name)) is not None else None,
                   "lease": lender.holder.alive(now), "buckets": len(lender.holder.holdings)}
            for name, lender in sorted(self.lenders.items())
        }  # fmt: skip
        return {**self._book.status(), "lent_by": roots, "prices": self._priced(self._wall_s(now))}

    def _priced(self, at_s: float) -> dict[str, Any] | None:
        """Which models have a price now; None without a price book. `more`: than are named."""
        epoch = None if self._prices is None else self._prices.of(self._prices.epoch_at(at_s))
        if epoch is None:
            return None
        names = sorted(epoch.models)  # `*` comes before all letters
        return {"epoch": epoch.epoch, "models": names[:PRICED_SHOWN_MAX], "more": len(names) > PRICED_SHOWN_MAX}


def lease_request_of(request: region_pb2.BorrowRequest) -> LeaseRequest:
    """A holder's message, from protobuf."""
    return LeaseRequest(request.lease, request.number, tuple(wants_of(request.wants)), 0.0)


def wants_of(wants: Iterable[region_pb2.Want]) -> list[Want]:
    """What it wants of each limit, from the wire."""
    return [
        Want(one.bucket, one.spent, one.returned, one.refunded, one.owed, one.wanted, one.least, one.held)
        for one in wants
    ]


def reply_of(reply: LeaseReply) -> region_pb2.BorrowReply:
    """A root's reply, as protobuf."""
    grants = [
        region_pb2.Grant(bucket=one.bucket, granted=one.granted, free=one.free, soon=one.soon) for one in reply.grants
    ]
    return region_pb2.BorrowReply(lease=reply.lease, grants=grants)


def _wire(want: Want) -> region_pb2.Want:
    return region_pb2.Want(
        bucket=want.bucket, spent=want.spent, returned=want.returned, refunded=want.refunded, owed=want.owed,
        wanted=want.wanted, least=want.least, held=want.held,
    )  # fmt: skip


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
