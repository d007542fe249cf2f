"""Limits of requests, over a root in this process: which limits match, what is taken, given back and told."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from farhop_wire import region_pb2

from farhop.balance import outcome
from farhop.balance.machine import Request, Usage
from farhop.balance.quota import LEASE_S, Quota, Root
from farhop.relay.answers import Reply
from farhop.service import limits
from farhop.service.limits import LimitBook, Limiter, reply_of, wants_of
from farhop.store.contract import Change, ChangeKind, limit_key
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, RootClaim, TenantLimits

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def request(model: str = "m", tokens: int | None = 10, prompt_bytes: int = 40) -> Request:
    return Request("1", "acme", model, prompt_bytes, 100, (), 9e9, tokens, key="law-key")


class Stage:
    """A limiter, the root it borrows from, and a clock that stands."""

    def __init__(self, *given: Limit, **more: Any) -> None:
        self.now, self.asked, self.refused = 100.0, 0, list[str]()
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
        self.limiter._rooted(Change(ChangeKind.PUT, 1, claim.place, documents.encode_root(claim)))

    def limit(self, *given: Limit, **more: Any) -> None:
        one = TenantLimits(tenant="acme", home="tokyo", limits=given, author="a", why="w", at=NOW, **more)
        self.book.changed(Change(ChangeKind.PUT, 1, one.place, documents.encode(one)))
        if self.root is not None:
            self.root.configure(self.book.lent_by("tokyo"), self.now)

    async def borrow(self, claim: RootClaim, asked: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        self.asked += 1
        if self.root is None:
            raise OSError(claim.instance)
        self.root.snapshot(self.now)
        self.root.written()
        return reply_of(self.root.exchange(asked.holder, asked.lease, wants_of(asked), self.now))

    async def admit(self, one: Request | None = None, key_id: str = "") -> Any:
        """The context of a request that is let in, or the reply."""
        context = SimpleNamespace(caller=SimpleNamespace(key_id=key_id), reserved=None)
        said = self.limiter.admit(context, one or request())
        while isinstance(said, asyncio.Future):
            await said
            said = self.limiter.admit(context, one or request(), waits=False)
        return context if said is None else said

    def used(self) -> list[int]:
        assert self.root is not None
        return [round(one["used"] + one["lent"]) for one in self.root.levels(self.now).values()]

    async def settled(self) -> None:
        """Until the root was told."""
        for lender in self.limiter._lenders.values():
            await self.limiter._exchange(lender)


async def staged(stage: Stage, work: Callable[[], Any]) -> None:
    try:
        await work()
    finally:
        await stage.limiter.close()


def ended(began: float = 1.0, status: int = 200, *, sent: bool = True) -> Any:
    return SimpleNamespace(began_at=began, status=status, progress=None, forward=object() if sent else None)


async def test_who_is_not_limited_costs_a_look_up() -> None:
    stage = Stage(Limit(model="other", requests_per_minute=1), Limit(key="k1", requests_per_minute=1))
    try:
        context = await stage.admit()
        assert (context.reserved, stage.asked) == (None, 0)
        assert (await stage.admit(request("other"))).reserved is not None
        assert (await stage.admit(key_id="k1")).reserved is not None
        assert isinstance(await stage.admit(key_id="k1"), Reply)
        assert (await stage.admit(key_id="k2")).reserved is None
    finally:
        await stage.limiter.close()


async def test_all_that_match_must_have_room_and_nothing_is_taken_of_any_else() -> None:
    stage = Stage(
        Limit(requests_per_minute=5, output_tokens_per_minute=25), Limit(key="law-key", requests_per_minute=3)
    )
    try:
        for _ in range(2):
            assert (await stage.admit()).reserved is not None
        refused = await stage.admit()
        assert isinstance(refused, Reply)
        assert (refused.status, refused.outcome) == (429, outcome.RATE_LIMITED)
        assert b"25 output tokens per minute" in refused.body
        assert b'"type":"tokens"' in refused.body
        assert b"retry-after-ms: 12" in refused.extra, "5 more leak in 12 s"
        assert (await stage.admit(request(tokens=5))).reserved is not None
    finally:
        await stage.limiter.close()


@pytest.mark.parametrize(
    ("active", "reason", "usage", "used"),
    [
        (None, outcome.NO_REGION, None, [0, 0]),
        (ended(0.0), outcome.CONNECT_FAILED, None, [0, 0]),
        (ended(), outcome.SERVED, Usage(7, 2), [1, 9]),
        (ended(), outcome.SERVED, Usage(30, 20), [1, 50]),
        (ended(), outcome.CLIENT_LEFT, None, [1, 20]),
        (ended(status=400), outcome.REFUSED_BY_ENGINE, None, [1, 0]),
        (None, outcome.REDIRECTED, None, [1, 20]),
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
        for holding in stage.limiter._lenders["tokyo"].holder.holdings.values():
            holding.want = 0
        for _ in range(2):
            context.reserved.settle(active, reason, usage)
        for _ in range(9):  # what was borrowed ahead goes back
            await stage.settled()
        assert stage.used() == used
    finally:
        await stage.limiter.close()


async def test_without_its_root_a_balancer_has_its_safe_part_and_says_when_to_come_again() -> None:
    stage = Stage(Limit(requests_per_minute=10), safe_share=0.2, safe=("tokyo/g1",))
    try:
        assert (await stage.admit()).reserved is not None
        stage.root = None
        stage.now += LEASE_S + 5.0
        refused = await stage.admit()
        assert isinstance(refused, Reply), "its own part began full"
        assert b"x-should-retry: true" in refused.extra
        stage.now += 60.0
        assert (await stage.admit()).reserved is not None
        assert stage.limiter.status()["lent_by"]["tokyo"]["lease"] is False
    finally:
        await stage.limiter.close()


async def test_an_answer_without_a_limit_of_its_own_is_expected_to_be_as_those_before() -> None:
    stage = Stage(Limit(output_tokens_per_minute=20_000))
    try:
        first = await stage.admit(request(tokens=None))
        first.reserved.settle(ended(), outcome.SERVED, Usage(10, 100))
        await stage.settled()
        before = (
            stage.limiter._lenders["tokyo"]
            .holder.holdings[limits.bucket_of("acme", Limit(), "output_tokens_per_minute")]
            .spent
        )
        await stage.admit(request(tokens=None))
        after = (
            stage.limiter._lenders["tokyo"]
            .holder.holdings[limits.bucket_of("acme", Limit(), "output_tokens_per_minute")]
            .spent
        )
        assert (before, after - before) == (limits.OUTPUT_TOKENS, 200)
    finally:
        await stage.limiter.close()


def test_documents_of_another_place_and_nonsense_change_nothing() -> None:
    refused: list[str] = []
    book = LimitBook(None, refused.append)  # type: ignore[arg-type]
    one = TenantLimits(
        tenant="acme", home="tokyo", limits=(Limit(tokens_per_day=86_400),), author="a", why="w", at=NOW,
        safe_share=0.5, safe=("tokyo/g1",),
    )  # fmt: skip
    book.changed(Change(ChangeKind.PUT, 1, limit_key("acme"), documents.encode(one)))
    book.changed(Change(ChangeKind.PUT, 2, limit_key("other"), documents.encode(one)))
    book.changed(Change(ChangeKind.PUT, 3, limit_key("acme"), b"nonsense"))
    assert refused == ["limit_misplaced", "limit_malformed"]
    assert list(book.lent_by("tokyo").values()) == [Quota(43_200.0, 0.5)]
    assert book.lent_by("virginia") == {}
    assert set(book.status()["problems"]) == {limit_key("acme"), limit_key("other")}
    book.changed(Change(ChangeKind.SNAPSHOT, 4))
    assert book.tenants() == {}


def test_lengths_of_time_are_written_as_openai_does() -> None:
    assert [limits._span(s) for s in (0.12, 1.0, 6.0, 90.0, 7200.0)] == ["120ms", "1s", "6s", "1m30s", "2h0m0s"]


async def test_an_answers_headers_tell_the_tightest_limit_of_each_kind() -> None:
    stage = Stage(
        Limit(output_tokens_per_minute=50, tokens_per_minute=50),
        Limit(model="m", requests_per_minute=10),
    )
    try:
        told = (await stage.admit()).reserved.headers()
        assert told == (
            b"x-ratelimit-limit-tokens: 50\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %b\r\n"
            b"x-ratelimit-limit-requests: 10\r\nx-ratelimit-remaining-requests: 9\r\nx-ratelimit-reset-requests: 6s\r\n"
            b'ratelimit-policy: "tokens";q=50;w=60, "requests";q=10;w=60\r\n'
            b'ratelimit: "tokens";r=%d;t=%d, "requests";r=9;t=6\r\n'
        ) % (30, b"24s", 30, 24)
    finally:
        await stage.limiter.close()
