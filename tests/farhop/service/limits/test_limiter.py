"""Limits of requests, over a root in this process: which limits match, what is taken, given back and reported."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from farhop_wire import region_pb2
from msgspec.structs import replace

from farhop.accounts.prices import PriceEpoch, Prices
from farhop.balance import outcome, quota_root
from farhop.balance.machine import Request, Usage
from farhop.balance.quota import LEASE_S
from farhop.balance.quota_root import Root
from farhop.identity.jwt_tokens import hidden_user
from farhop.relay.answers import Reply
from farhop.service.limits import limiter, match
from farhop.service.limits.book import LimitBook, bucket_of, kind_and_whose
from farhop.service.limits.limiter import Limiter, lease_request_of, reply_of
from farhop.store.contract import Change, ChangeKind
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import NAME_LIMIT, Limit, RootClaim, TenantLimits
from farhop.telemetry.metrics import TierMetrics

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def request(model: str = "m", tokens: int | None = 10, prompt_bytes: int = 40, **more: Any) -> Request:
    return Request("1", "acme", model, prompt_bytes, 100, (), 9e9, tokens, key="law-key", **more)


def prices(*of: dict[str, Any]) -> Prices:
    """A book with an epoch for each of these models' prices, a minute of the wall clock each."""
    return Prices([
        PriceEpoch.model_validate({"epoch": n + 1, "since": datetime.fromtimestamp(60.0 * n, UTC), "models": models})
        for n, models in enumerate(of)
    ])  # fmt: skip


def book(*of: dict[str, Any]) -> Any:
    """The same, as a process has it."""
    return SimpleNamespace(prices=prices(*of), changes=[])


class Stage:
    """A limiter, the root it borrows from, and a clock that stands."""

    def __init__(self, *given: Limit, **more: Any) -> None:
        self.now, self.asked, self.refused = 100.0, 0, list[str]()
        self.longest_ask = 0  # bytes
        self.book = LimitBook(None, self.refused.append)  # type: ignore[arg-type]
        self.root: Root | None = Root({}, self.now, 1)
        self.limiter = Limiter(
            self.book,
            None,
            "global tokyo/g1",
            "tokyo/g1",
            self.borrow,
            lambda: self.now,
            self.refused.append,  # type: ignore[arg-type]
        )
        self.limit(*given, **more)
        claim = RootClaim(region="tokyo", instance="r1", address="", seq=1, first_lease=1, marks={})
        self.limiter.rooted(Change(ChangeKind.PUT, 1, claim.place, documents.encode_root(claim)))

    def limit(self, *given: Limit, tenant: str = "acme", home: str = "tokyo", **more: Any) -> None:
        one = TenantLimits(tenant=tenant, home=home, limits=given, author="a", why="w", at=NOW, **more)
        self.book.changed(Change(ChangeKind.PUT, 1, one.place, documents.encode(one)))
        if self.root is not None:
            self.root.configure(self.book.lent_by("tokyo"), self.now)

    async def borrow(self, claim: RootClaim, asked: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        self.asked += 1
        self.longest_ask = max(self.longest_ask, asked.ByteSize())
        if self.root is None:
            raise OSError(claim.instance)
        self.root.snapshot(self.now)
        self.root.written()
        return reply_of(self.root.exchange(asked.holder, lease_request_of(asked), self.now))

    async def admit(self, one: Request | None = None, key_id: str = "", sub: str = "", user: str = "") -> Any:
        """The context of a request that is let in, or the reply."""
        context = SimpleNamespace(caller=SimpleNamespace(key_id=key_id, user=sub), charge=None)
        text = self.limiter.admit(context, one or request(), user)
        while isinstance(text, asyncio.Future):
            await text
            text = self.limiter.admit(context, one or request(), user, waits=False)
        return context if text is None else text

    def used(self) -> list[int]:
        assert self.root is not None
        return [round(one["used"] + one["lent"]) for one in self.root.levels(self.now).values()]

    async def settled(self) -> None:
        """Until the root was told."""
        for lender in self.limiter.lenders.values():
            await self.limiter.exchange(lender)


async def staged(stage: Stage, work: Callable[[], Any]) -> None:
    try:
        await work()
    finally:
        await stage.limiter.close()


def ended(began: float = 1.0, status: int = 200, *, sent: bool = True, of: Request | None = None) -> Any:
    return SimpleNamespace(
        began_at=began, forwarded_at=1.0, status=status, progress=None, forward=object() if sent else None,
        request=of or request(),
    )  # fmt: skip


async def test_an_unlimited_tenant_costs_one_look_up() -> None:
    stage = Stage(Limit(model="other", requests_per_minute=1), Limit(key="k1", requests_per_minute=1))
    try:
        context = await stage.admit()
        assert (context.charge, stage.asked) == (None, 0)
        assert (await stage.admit(request("other"))).charge is not None
        assert (await stage.admit(key_id="k1")).charge is not None
        assert isinstance(await stage.admit(key_id="k1"), Reply)
        assert (await stage.admit(key_id="k2")).charge is None
    finally:
        await stage.limiter.close()


@pytest.mark.parametrize("said", [
    {"free": float("nan")}, {"free": float("inf")}, {"free": float("-inf")}, {"granted": -1}, {"granted": 2**62}, None,
])  # fmt: skip
@pytest.mark.parametrize("limit", [Limit(requests_per_minute=5), Limit(concurrency=5)])
async def test_invalid_message_of_a_root_is_ignored_and_the_next_valid_one_counts(
    limit: Limit, said: dict[str, Any] | None
) -> None:
    """None: of a limit that it was not asked about, beside the right word."""
    stage = Stage(limit)

    async def astray(_claim: RootClaim, asked: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        rightly = {"granted": 5, "free": 1.0}
        grants = [region_pb2.Grant(**{"bucket": want.bucket} | rightly | (said or {})) for want in asked.wants]
        if said is None:
            grants.append(region_pb2.Grant(bucket="another", **rightly))
        return region_pb2.BorrowReply(lease=7, grants=grants)

    try:
        honest, stage.limiter.borrow = stage.limiter.borrow, astray
        refused = await stage.admit()
        assert isinstance(refused, Reply)
        assert refused.status == 429
        assert stage.limiter.is_silent(stage.limiter.lenders["tokyo"])
        stage.limiter.borrow, stage.now = honest, stage.now + limiter.REFRESH_S
        context = await stage.admit()
        assert b"ratelimit" in context.charge.headers()
    finally:
        await stage.limiter.close()


async def test_all_that_match_must_have_room_and_nothing_is_taken_of_any_else() -> None:
    stage = Stage(
        Limit(requests_per_minute=5, output_tokens_per_minute=25), Limit(key="law-key", requests_per_minute=3)
    )
    try:
        for _ in range(2):
            assert (await stage.admit()).charge is not None
        refused = await stage.admit()
        assert isinstance(refused, Reply)
        assert (refused.status, refused.outcome) == (429, outcome.RATE_LIMITED)
        assert b"25 output tokens per minute" in refused.body
        assert b'"type":"tokens"' in refused.body
        assert b"retry-after-ms: 12" in refused.extra, "5 more leak in 12 s"
        assert (await stage.admit(request(tokens=5))).charge is not None
    finally:
        await stage.limiter.close()


@pytest.mark.parametrize(
    ("active", "reason", "usage", "used"),
    [
        (None, outcome.NO_REGION, None, [0, 0]),
        (ended(0.0, sent=False), outcome.CLIENT_LEFT, None, [0, 0]),  # it waited here
        (ended(0.0), outcome.CLIENT_LEFT, None, [1, 20]),
        (ended(0.0), outcome.DEADLINE, None, [1, 20]),
        (ended(0.0), outcome.WHOLE_ANSWER_TIMEOUT, None, [1, 20]),
        (ended(0.0, of=request(stream=True)), outcome.CLIENT_LEFT, None, [1, 10]),
        (ended(0.0), outcome.CONNECT_FAILED, None, [0, 0]),
        (ended(), outcome.SERVED, Usage(7, 2), [1, 9]),
        (ended(), outcome.SERVED, Usage(30, 20), [1, 50]),
        (ended(), outcome.CLIENT_LEFT, None, [1, 20]),
        (ended(status=400), outcome.REFUSED_BY_ENGINE, None, [1, 0]),
        (None, outcome.REDIRECTED, None, [0, 0]),  # the region that it is sent to charges it
        (ended(sent=False), outcome.SERVED, None, [1, 0]),  # an answer that was made for another request
        (ended(sent=False), outcome.CLIENT_LEFT, None, [1, 0]),
    ],
)
async def test_a_request_is_settled_once_by_what_became_of_it(
    active: Any, reason: outcome.Outcome, usage: Usage | None, used: list[int]
) -> None:
    stage = Stage(Limit(requests_per_minute=5, tokens_per_minute=100))
    try:
        context = await stage.admit()
        for holding in stage.limiter.lenders["tokyo"].holder.holdings.values():
            holding.want = 0
        for _ in range(2):
            context.charge.settle(active, reason, usage)
        for _ in range(9):  # the amount borrowed ahead is returned
            await stage.settled()
        assert stage.used() == used
    finally:
        await stage.limiter.close()


async def test_without_a_root_the_safe_part_is_used_and_refusals_have_retry_after() -> None:
    stage = Stage(Limit(requests_per_minute=10), safe_share=0.2, safe=("tokyo/g1",))
    try:
        assert (await stage.admit()).charge is not None
        stage.root = None
        stage.now += LEASE_S + 5.0
        refused = await stage.admit()
        assert isinstance(refused, Reply), "its own part began full"
        assert b"x-should-retry: true" in refused.extra
        stage.now += 60.0
        assert (await stage.admit()).charge is not None
        assert stage.limiter.status()["lent_by"]["tokyo"]["lease"] is False
    finally:
        await stage.limiter.close()


async def test_a_limit_that_is_safe_share_alone_still_counts_what_was_spent() -> None:
    stage = Stage(Limit(requests_per_minute=2), safe_share=1.0, safe=("tokyo/g1",))
    served = 0
    try:
        stage.now += 60.0
        for _ in range(10):
            answer = await stage.admit()
            if isinstance(answer, Reply):
                assert b"try again in 30s" in answer.body
                assert b"x-should-retry: true" in answer.extra
            else:
                answer.charge.settle(ended(), outcome.SERVED, Usage(10, 10))
                served += 1
        assert served == 2, "a spent unit does not come back with the end of its request"
        stage.limit(Limit(requests_per_minute=2))
        stage.now += 60.0
        answers = [await stage.admit() for _ in range(10)]
        assert sum(not isinstance(answer, Reply) for answer in answers) == 2, "nor once nothing is reserved any more"
    finally:
        await stage.limiter.close()


@pytest.mark.parametrize(("size", "share"), [(5000, 0.2), (60, 0.5), (60, 0.9), (1, 0.2)])
async def test_a_request_without_a_bound_fits_beside_a_safe_share(size: int, share: float) -> None:
    stage = Stage(Limit(output_tokens_per_minute=size), safe_share=share, safe=("tokyo/g1",))
    try:
        stage.now += 60.0
        assert (await stage.admit(request(tokens=None))).charge is not None
    finally:
        await stage.limiter.close()


async def test_a_request_too_large_for_what_is_lent_is_told_how_much_it_may_take() -> None:
    stage = Stage(Limit(output_tokens_per_minute=5000), safe_share=0.2, safe=("tokyo/g1",))
    try:
        assert (await stage.admit(request(tokens=4000))).charge is not None
        refused = await stage.admit(request(tokens=4500))
        assert b"the limit is 5000 output tokens per minute, of which one request may take 4000" in refused.body
    finally:
        await stage.limiter.close()


async def test_users_of_a_tenant_whose_home_changed_are_forgotten_there() -> None:
    stage = Stage(Limit(each_user=True, requests_per_minute=10))
    try:
        (await stage.admit(user="ann")).charge.settle(ended(), outcome.SERVED, Usage(10, 10))
        await stage.settled()
        stage.limit(Limit(each_user=True, requests_per_minute=10), home="virginia")
        assert {home: len(one.holder.holdings) for home, one in stage.limiter.lenders.items()} == {
            "tokyo": 0, "virginia": 0,
        }  # fmt: skip
    finally:
        await stage.limiter.close()


async def test_an_answer_without_a_limit_of_its_own_is_expected_to_be_as_those_before() -> None:
    stage = Stage(Limit(output_tokens_per_minute=20_000))
    try:
        first = await stage.admit(request(tokens=None))
        first.charge.settle(ended(), outcome.SERVED, Usage(10, 100))
        await stage.settled()
        before = (
            stage.limiter.lenders["tokyo"].holder.holdings[bucket_of("acme", Limit(), "output_tokens_per_minute")].spent
        )
        await stage.admit(request(tokens=None))
        after = (
            stage.limiter.lenders["tokyo"].holder.holdings[bucket_of("acme", Limit(), "output_tokens_per_minute")].spent
        )
        assert (before, after - before) == (match.OUTPUT_TOKENS, 200)
    finally:
        await stage.limiter.close()


async def test_each_of_several_answers_is_taken_for_and_learned_from() -> None:
    stage = Stage(Limit(output_tokens_per_minute=20_000))
    try:
        first = await stage.admit(request(tokens=50, answers=6))
        (holding,) = stage.limiter.lenders["tokyo"].holder.holdings.values()
        assert holding.spent == 300
        first.charge.settle(ended(of=request(tokens=50, answers=6)), outcome.SERVED, Usage(10, 240))
        assert holding.refunded == 60
        await stage.admit(request(tokens=None, answers=3))
        assert holding.spent == 300 + 3 * 2 * 40
        assert b"it may use 30000 output tokens" in (await stage.admit(request(tokens=10, answers=3000))).body
    finally:
        await stage.limiter.close()


async def test_a_client_that_leaves_before_the_usage_is_charged_as_much_as_others_get_in_that_time() -> None:
    stage, free = Stage(Limit(tokens_per_minute=20_000)), request(tokens=None, stream=True)
    try:
        first = await stage.admit(free)
        (holding,) = stage.limiter.lenders["tokyo"].holder.holdings.values()
        stage.now += 2.0
        first.charge.settle(ended(stage.now - 2.0, of=free), outcome.SERVED, Usage(10, 100))  # 50 a second
        second, bounded = await stage.admit(free), await stage.admit(request(tokens=20, stream=True))
        stage.now += 30.0
        holding.owed = holding.refunded = 0
        second.charge.settle(ended(stage.now - 30.0, of=free), outcome.CLIENT_LEFT, None)
        assert (holding.owed, holding.refunded) == (1500 - 200, 0)
        bounded.charge.settle(ended(stage.now - 30.0, of=request(tokens=20, stream=True)), outcome.CLIENT_LEFT, None)
        assert (holding.owed, holding.refunded) == (1300, 0), "it got no more than it asked for"
        none = await stage.admit(nothing := request(tokens=0, stream=True))
        none.charge.settle(ended(stage.now - 30.0, of=nothing), outcome.CLIENT_LEFT, None)
        assert holding.owed == 1500, "an engine may have taken 0 for no limit"
    finally:
        await stage.limiter.close()


async def test_answer_headers_show_the_tightest_limit_of_each_kind() -> None:
    stage = Stage(
        Limit(output_tokens_per_minute=50, tokens_per_minute=50),
        Limit(model="m", requests_per_minute=10),
    )
    try:
        found = (await stage.admit()).charge.headers()
        assert found == (
            b"x-ratelimit-limit-tokens: 50\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %b\r\n"
            b"x-ratelimit-limit-requests: 10\r\nx-ratelimit-remaining-requests: 9\r\nx-ratelimit-reset-requests: 6s\r\n"
            b'ratelimit-policy: "tokens";q=50;w=60, "requests";q=10;w=60\r\n'
            b'ratelimit: "tokens";r=%d;t=%d, "requests";r=9;t=6\r\n'
        ) % (30, b"24s", 30, 24)
    finally:
        await stage.limiter.close()


async def test_requests_at_once_are_counted_from_admission_to_whatever_end_they_take() -> None:
    stage = Stage(Limit(concurrency=3), Limit(model="m", requests_per_minute=100))
    try:
        contexts = [await stage.admit() for _ in range(3)]
        refused = await stage.admit()
        assert isinstance(refused, Reply)
        assert (refused.status, refused.outcome) == (429, outcome.RATE_LIMITED)
        assert b'"type":"concurrency"' in refused.body
        assert b"3 requests at once; try again in 1s" in refused.body
        assert b"x-ratelimit-limit-concurrency: 3\r\nx-ratelimit-remaining-concurrency: 0\r\n" in refused.extra
        assert b'"concurrency";q=3;qu="concurrent-requests"' in refused.extra
        assert b"x-should-retry: true" in refused.extra
        assert stage.limiter.matches["acme", "", "law-key", "m", ""].of[0][3].available == 0  # type: ignore[union-attr]
        ends = [
            (ended(), outcome.SERVED, Usage(7, 2)),
            (ended(), outcome.CLIENT_LEFT, None),
            (None, outcome.NO_REGION, None),
        ]  # fmt: skip
        for context, end in zip(contexts, ends, strict=True):
            context.charge.settle(*end)
            context.charge.settle(*end)
            again = await stage.admit()
            assert again.charge is not None
            assert isinstance(await stage.admit(), Reply)
    finally:
        await stage.limiter.close()


async def test_a_balancer_that_stops_gives_its_slots_to_the_others_at_once() -> None:
    stage = Stage(Limit(concurrency=3))
    context = await stage.admit()
    assert stage.used() == [1]
    context.charge.settle(ended(), outcome.SERVED, Usage(7, 2))
    await stage.limiter.close()
    assert stage.used() == [0]


async def test_a_limit_that_is_raised_lowered_or_taken_away_does_not_lose_count() -> None:
    stage = Stage(Limit(concurrency=2))
    try:
        first, second = await stage.admit(), await stage.admit()
        stage.limit(Limit(concurrency=4))
        third = await stage.admit()
        stage.limit(Limit(concurrency=2))
        second.charge.settle(ended(), outcome.SERVED, None)
        await stage.settled()
        assert isinstance(await stage.admit(), Reply), "2 are under way"
        first.charge.settle(ended(), outcome.SERVED, None)
        await stage.settled()
        stage.now += 2.0
        assert (await stage.admit()).charge is not None
        third.charge.settle(ended(), outcome.SERVED, None)
        stage.limit()
        assert (await stage.admit()).charge is None
    finally:
        await stage.limiter.close()


async def test_each_user_of_a_tenant_has_a_limit_of_its_own_and_all_together_that_of_the_tenant() -> None:
    stage = Stage(Limit(requests_per_minute=5), Limit(each_user=True, requests_per_minute=2, concurrency=1))
    try:
        for name in ("ann", "bob"):
            first = await stage.admit(sub=name, user="whoever it says")
            refused = await stage.admit(sub=name)
            assert b'"type":"concurrency"' in refused.body
            first.charge.settle(ended(), outcome.SERVED, Usage(7, 2))
            (await stage.admit(sub=name)).charge.settle(ended(), outcome.SERVED, Usage(7, 2))
            assert b"2 requests per minute" in (await stage.admit(sub=name)).body
        assert (await stage.admit(user="cid")).charge is not None
        assert b"5 requests per minute" in (await stage.admit(user="dan")).body
        stage.limit(Limit(each_user=True, requests_per_minute=3))
        assert (await stage.admit(sub="ann")).charge is not None, "the limit was raised"
        assert isinstance(await stage.admit(sub="ann"), Reply)
        assert all("ann" not in name for name in stage.root.levels(stage.now)), "names do not travel"  # type: ignore[union-attr]
        stage.limit(Limit(requests_per_minute=100))
        assert stage.limiter.users == {}
        assert (await stage.admit(sub="ann")).charge is not None
    finally:
        await stage.limiter.close()


async def test_with_a_salt_no_root_can_guess_users_names_and_balancers_with_the_same_agree() -> None:
    def user_of(salt: bytes) -> str:
        return Limiter(book(), None, "", "", None, float, print, salt=salt)._user("acme", "ann@acme.example")  # type: ignore[arg-type]

    guessed = hashlib.sha256(b"acme\nann@acme.example").hexdigest()
    hidden = user_of(b"a salt of sixteen")
    assert hidden not in guessed
    assert hidden not in hidden_user(b"a salt of sixteen", "acme", "ann@acme.example"), "nor find them in usage records"
    assert hidden == user_of(b"a salt of sixteen") != user_of(b"another salt, new")
    assert user_of(b"") == guessed[:16], "as older builds"


async def test_of_a_user_nothing_goes_to_a_root_where_the_law_allows_no_records_of_the_request() -> None:
    stage = Stage(Limit(each_user=True, requests_per_minute=2))
    stage.limiter.may_know = lambda one, region: (one.model, region) != ("kept in the EU", "tokyo")
    try:
        for name in ("ann", "bob"):  # whom it may not know count as one
            assert (await stage.admit(request("kept in the EU"), sub=name)).charge is not None
        assert b"2 requests per minute" in (await stage.admit(request("kept in the EU"), user="cid")).body
        assert stage.root is not None
        assert all(name.endswith("rest") for name in stage.root.levels(stage.now) if limiter.EACH in name)
        for _ in range(2):
            assert (await stage.admit(sub="ann")).charge is not None
    finally:
        await stage.limiter.close()


async def test_unnamed_users_count_as_one_and_so_do_those_beyond_the_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(limiter, "USERS_MAX", 3)
    stage = Stage(Limit(each_user=True, requests_per_minute=1))
    try:
        assert (await stage.admit()).charge is not None
        assert isinstance(await stage.admit(), Reply)
        held = [await stage.admit(user=name) for name in ("ann", "bob")]
        assert isinstance(await stage.admit(user="cid"), Reply), "ann and bob are busy"
        for one in held:
            one.charge.settle(ended(), outcome.SERVED, Usage(7, 2))
        for _ in range(3):
            await stage.settled()
        assert (await stage.admit(user="cid")).charge is not None
        assert len(stage.limiter.users) == 3
        assert isinstance(await stage.admit(user="ann"), Reply), "its root did not forget it"
    finally:
        await stage.limiter.close()


async def test_models_that_strangers_name_fill_no_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(limiter, "MATCHES_MAX", 3)
    stage = Stage(Limit(model="x" * NAME_LIMIT, requests_per_day=1), Limit(each_user=True, requests_per_day=1000))
    try:
        for n in range(20):
            assert (await stage.admit(request(f"{n}" + "y" * 10_000), user="ann")).charge is not None
        (known,) = stage.limiter.users.values()
        assert len(known.matches) <= len(stage.limiter.matches) == 3
        assert all(len(model) <= NAME_LIMIT + 1 for _, _, _, model, _ in stage.limiter.matches)
        # A name longer than the limit on names is not a limit's name.
        assert (await stage.admit(request("x" * NAME_LIMIT), user="ann")).charge is not None
        assert isinstance(await stage.admit(request("x" * NAME_LIMIT), user="ann"), Reply)
        assert (await stage.admit(request("x" * (NAME_LIMIT + 1)), user="ann")).charge is not None
    finally:
        await stage.limiter.close()


async def test_another_tenant_s_made_up_models_forget_nothing_that_was_learned_of_a_tenant(monkeypatch: Any) -> None:
    monkeypatch.setattr(limiter, "MATCHES_MAX", 8)
    stage = Stage(Limit(requests_per_day=1000))
    stage.limit(Limit(tokens_per_minute=5000), tenant="globex")
    asked = replace(request(tokens=None), tenant="globex")
    try:
        first = await stage.admit(asked)
        first.charge.settle(ended(of=asked), outcome.SERVED, Usage(10, 40))
        for n in range(50):
            await stage.admit(request(f"made up {n}"))
        assert len(stage.limiter.matches) == 8
        known = [await stage.admit(asked) for _ in range(10)]  # of 4,096 tokens only one would fit
        assert [one for one in known if isinstance(one, Reply)] == []
    finally:
        await stage.limiter.close()


async def test_another_tenant_s_busy_users_leave_each_tenant_its_part_of_those_that_are_known(monkeypatch: Any) -> None:
    monkeypatch.setattr(limiter, "USERS_MAX", 12)
    stage = Stage(Limit(each_user=True, requests_per_minute=1))
    stage.limit(Limit(each_user=True, requests_per_minute=1), tenant="globex")
    of_globex = replace(request(), tenant="globex")
    try:
        busy = [await stage.admit(user=f"made up {n}") for n in range(20)]
        assert sum(isinstance(one, Reply) for one in busy) == 20 - 9 - 1  # and all others as one
        for user in ("ann", "bob", "cid"):
            assert (await stage.admit(of_globex, user=user)).charge is not None
            assert isinstance(await stage.admit(of_globex, user=user), Reply)
        assert len(stage.limiter.users) <= 12 + 1  # and who stands for all others
    finally:
        await stage.limiter.close()


@pytest.mark.parametrize("model", ["m", "m" * NAME_LIMIT])
async def test_an_ask_is_within_its_bytes_however_many_limits_each_user_has(model: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(limiter, "USERS_MAX", 32)
    per_day = {f"{kind}_per_day": 10**12 for kind in ("requests", "input_tokens", "output_tokens", "tokens")}
    each = {"each_user": True, "requests_per_minute": 9, "tokens_per_minute": 10**9, "concurrency": 9, **per_day}
    stage = Stage(Limit(**each), Limit(model=model, **each))
    try:
        asked = [stage.admit(request(model), user=f"user {n}") for n in range(40)]
        answers = await asyncio.gather(*asked)
        assert sum(not isinstance(one, Reply) for one in answers) > 9, (
            "those beyond are one together, and served as one"
        )
        for _ in range(3):
            await stage.settled()
        rest = 14 * (limiter._WANT_BYTES + len(model) + 64)
        assert stage.longest_ask <= 32 * limiter.USER_BYTES + rest
        other = request("another")
        assert not isinstance(await stage.admit(other, user="user 1"), Reply), "others' limits go on"
    finally:
        await stage.limiter.close()


async def test_a_known_user_shares_the_rest_bucket_of_a_model_whose_own_buckets_are_full(monkeypatch: Any) -> None:
    monkeypatch.setattr(limiter, "USERS_MAX", 2)
    long = "m" * NAME_LIMIT
    wide = Limit(model=long, each_user=True, requests_per_minute=1, requests_per_day=9, tokens_per_day=10**9)
    stage = Stage(Limit(each_user=True, requests_per_minute=3), wide)
    try:
        assert (await stage.admit(user="ann")).charge is not None
        assert (await stage.admit(request(long), user="ann")).charge is not None
        assert isinstance(await stage.admit(request(long), user="bob"), Reply), "both are the rest there"
        assert (await stage.admit(user="ann")).charge is not None
        assert {user for _, user in stage.limiter.users} == {stage.limiter._user("acme", "ann"), "rest"}
    finally:
        await stage.limiter.close()


async def test_what_is_refused_is_counted_by_what_and_whose_and_so_are_roots_that_are_silent() -> None:
    stage, metrics = Stage(
        Limit(concurrency=9), Limit(key="law-key", output_tokens_per_minute=25), Limit(each_user=True, concurrency=1)
    ), TierMetrics("global", "tokyo", "g1")  # fmt: skip
    stage.limiter.observe(metrics)
    try:
        assert 'farhop_limit_root_silent{region="tokyo",target="tokyo",tier="global"} 0.0' in metrics.render().decode()
        await stage.admit(user="ann")
        for one, user in ((request(), "ann"), (request(tokens=20), "bob"), (request(tokens=99), "bob")):
            assert isinstance(await stage.admit(one, user=user), Reply)
        document = metrics.render().decode()
        for kind, whose, n in (("concurrency", "user", 1.0), ("output_tokens", "key", 2.0)):
            assert (
                f'farhop_limits_refused_total{{kind="{kind}",region="tokyo",tier="global",whose="{whose}"}} {n}'
                in document
            )
        stage.root = None
        await stage.settled()
        assert 'farhop_limit_root_silent{region="tokyo",target="tokyo",tier="global"} 1.0' in metrics.render().decode()
    finally:
        await stage.limiter.close()


async def test_a_hundred_tenants_are_each_held_to_their_own_limit_while_one_asks_without_end() -> None:
    now, names = 100.0, [f"t{n}" for n in range(100)]
    given = {
        name: (Limit(requests_per_minute=20, concurrency=12), Limit(each_user=True, requests_per_minute=15))
        if n % 2 else (Limit(requests_per_minute=20),)
        for n, name in enumerate(names)
    }  # fmt: skip
    root = Root({}, now, 1)

    async def borrow(_claim: RootClaim, asked: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        root.snapshot(now)
        root.written()
        return reply_of(root.exchange(asked.holder, lease_request_of(asked), now))

    entries, refused = list[Limiter](), list[str]()
    claim = RootClaim(region="tokyo", instance="r1", address="", seq=1, first_lease=1, marks={})
    for n in range(6):
        book = LimitBook(None, refused.append)  # type: ignore[arg-type]
        entries.append(Limiter(book, None, f"global tokyo/g{n}", "", borrow, lambda: now, refused.append))  # type: ignore[arg-type]
        for name, sizes in given.items():
            one = TenantLimits(tenant=name, home="tokyo", limits=sizes, author="a", why="w", at=NOW)
            book.changed(Change(ChangeKind.PUT, 1, one.place, documents.encode(one)))
        entries[-1].rooted(Change(ChangeKind.PUT, 1, claim.place, documents.encode_root(claim)))
    root.configure(book.lent_by("tokyo"), now)
    served, under_way = Counter[str](), Counter[str]()

    async def ask(tenant: str, nth: int) -> None:
        asked = Request("1", tenant, "m", 40, 100, (), 9e9, 10)
        context = SimpleNamespace(caller=SimpleNamespace(key_id="", user=f"u{nth % 2}"), charge=None)
        limiter = entries[nth % len(entries)]
        text = limiter.admit(context, asked)
        for more in range(9, -1, -1):  # as an ingress does, for a second
            if isinstance(text, asyncio.Future):
                await text
                text = limiter.admit(context, asked, waits=more > 0)
        if text is not None:
            return
        served[tenant] += 1
        under_way[tenant] += 1
        assert tenant in names[::2] or under_way[tenant] <= 12
        await asyncio.sleep(0.001)
        under_way[tenant] -= 1
        context.charge.settle(ended(), outcome.SERVED, Usage(7, 2))

    async def modest(tenant: str) -> None:
        for nth in range(8):
            await ask(tenant, nth)

    try:
        await asyncio.gather(*map(modest, names[2:]), *(ask(names[n % 2], n) for n in range(2000)))
    finally:
        for limiter in entries:
            await limiter.close()
    assert [served[name] for name in names[2:]] == [8] * 98, "who asks for less than it may is never refused"
    assert served["t0"] == 20
    assert 0 < served["t1"] <= 20, "in one instant slots may go where no requests are left to use them"
    used = root.levels(now)
    slots = [level for name, level in used.items() if kind_and_whose(name)[0] == "concurrency"]
    assert all(level["used"] + level["lent"] == 0 for level in slots), "nothing leaks"
    assert not refused


M = {"m": {"input": 1.0, "cached": 0.5, "output": 4.0}}  # 10 of prompt and 10 of answer: 50 microdollars


async def test_money_is_taken_at_most_settled_by_what_it_cost_and_refused_as_a_quota(monkeypatch: Any) -> None:
    monkeypatch.setattr(quota_root, "AHEAD_SHARE", 1.0)  # such a small budget is not lent in parts
    stage = Stage(Limit(requests_per_minute=9), Limit(model="m", micro_usd_per_day=120))
    stage.limiter.go_by(book(M), lambda _: 1.0)
    try:
        first, second = await stage.admit(), await stage.admit()
        refused = await stage.admit()
        assert isinstance(refused, Reply)
        assert (refused.status, refused.outcome) == (429, outcome.RATE_LIMITED)
        assert b'"type":"insufficient_quota"' in refused.body
        assert b'"code":"insufficient_quota"' in refused.body
        assert b"budget used up: 0.00012 USD per day, and this request may cost 0.00005; try again in" in refused.body
        assert b"x-should-retry: false" in refused.extra
        assert b"retry-after: " in refused.extra
        assert b"x-ratelimit-limit-micro-usd: 120\r\nx-ratelimit-remaining-micro-usd: 20\r\n" in refused.extra
        assert b'"micro-usd";q=120;w=86400' in refused.extra
        first.charge.settle(ended(), outcome.SERVED, Usage(10, 2, cached_tokens=6))
        second.charge.settle(None, outcome.NO_REGION, None)
        await stage.settled()
        stage.limiter.lenders["tokyo"].holder.holdings[
            bucket_of("acme", Limit(model="m"), "micro_usd_per_day")
        ].want = 0
        for _ in range(9):
            await stage.settled()
        assert stage.used()[1] == 4 + 3 + 8
        refused = await stage.admit(request(tokens=99))
        assert b"request too large: it may cost 0.000406 USD, and the limit is 0.00012 USD per day" in refused.body
        assert b"retry-after" not in refused.extra
        stage.now += 86_400.0
        assert (await stage.admit(request(tokens=None))).charge is not None, "it may be as long as all of it pays for"
        assert stage.limiter.status()["prices"] == {"epoch": 1, "models": ["m"], "more": False}
    finally:
        await stage.limiter.close()


async def test_a_model_without_a_price_is_refused_only_where_money_is_limited() -> None:
    stage, metrics = Stage(Limit(key="k1", micro_usd_per_month=10**9)), TierMetrics("global", "tokyo", "g1")
    stage.limiter.observe(metrics)
    try:
        assert b"no price book is configured here" in (await stage.admit(key_id="k1")).body
        assert stage.limiter.status()["prices"] is None
        stage.limiter.go_by(book(M), lambda _: 1.0)
        refused = await stage.admit(request("other"), key_id="k1")
        assert refused.status == 429
        assert b'"type":"insufficient_quota","param":"model","code":"model_not_priced"' in refused.body
        assert b"x-should-retry: false" in refused.extra
        assert (await stage.admit(request("other"))).charge is None
        assert (await stage.admit(key_id="k1")).charge is not None
        assert 'limits_refused_total{kind="usd",region="tokyo",tier="global",whose="key"} 2.0' in (
            metrics.render().decode()
        )
        stage.limiter.go_by(book({"*": {"input": 0.0, "output": 0.0}}), lambda _: 1.0)
        assert (await stage.admit(request("other"), key_id="k1")).charge is not None, "0 is a price"
    finally:
        await stage.limiter.close()


async def test_prices_change_with_their_epoch_and_what_is_under_way_is_settled_by_those_it_began_with() -> None:
    stage, now_s = Stage(Limit(micro_usd_per_day=10**9)), [1.0]
    stage.limiter.go_by(book(M, {"m": {"input": 2.0, "output": 8.0}}, {}), lambda _: now_s[0])
    (holding,) = stage.limiter.lenders["tokyo"].holder.holdings.values()
    try:
        first = await stage.admit()
        assert holding.spent == 50
        now_s[0] = 60.0
        await stage.admit()
        assert holding.spent == 150
        first.charge.settle(ended(), outcome.SERVED, Usage(10, 5))
        assert holding.refunded == 20
        now_s[0] = 120.0
        assert b"model_not_priced" in (await stage.admit()).body
    finally:
        await stage.limiter.close()


async def test_a_new_price_book_applies_to_new_requests_and_not_to_those_under_way() -> None:
    stage, one = Stage(Limit(micro_usd_per_day=10**9)), book(M)
    stage.limiter.go_by(one, lambda _: 1.0)
    (holding,) = stage.limiter.lenders["tokyo"].holder.holdings.values()
    try:
        first = await stage.admit()
        one.prices = prices({"m": {"input": 2.0, "output": 8.0}})
        for change in one.changes:
            change()
        await stage.admit()
        assert holding.spent == 50 + 100
        first.charge.settle(ended(), outcome.SERVED, Usage(10, 5))
        assert holding.refunded == 20
    finally:
        await stage.limiter.close()


async def test_money_has_no_safe_part_so_that_no_partition_spends_it_twice() -> None:
    stage = Stage(Limit(micro_usd_per_day=10_000, requests_per_minute=100), safe_share=0.5, safe=("tokyo/g1",))
    stage.limiter.go_by(book(M), lambda _: 1.0)
    try:
        assert (await stage.admit()).charge is not None
        stage.root = None
        stage.now += LEASE_S + 70.0
        refused = await stage.admit()
        assert b"budget not lent in time" in refused.body
        assert b"x-should-retry: true" in refused.extra, "there is money, and nobody to lend it"
    finally:
        await stage.limiter.close()


async def test_each_user_may_have_a_budget_of_its_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(quota_root, "AHEAD_SHARE", 1.0)
    stage = Stage(Limit(each_user=True, micro_usd_per_day=60), Limit(micro_usd_per_day=120))
    stage.limiter.go_by(book(M), lambda _: 1.0)
    try:
        assert (await stage.admit(user="ann")).charge is not None
        assert b"budget used up: 0.00006 USD per day" in (await stage.admit(user="ann")).body
        assert (await stage.admit(user="bob")).charge is not None
        assert b"budget used up: 0.00012 USD per day" in (await stage.admit(user="cid")).body
    finally:
        await stage.limiter.close()
