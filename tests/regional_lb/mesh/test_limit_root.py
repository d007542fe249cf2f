"""The root that lends tenants' quota: one at a time, over a store that fails, is lost, or was written by another."""

import asyncio
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from farhop_wire import region_pb2

from farhop.service.limits.book import LimitBook
from farhop.store.contract import Change, ChangeKind, StoreUnreachable, limit_root_key
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, TenantLimits
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from regional_lb.mesh.limit_root import HOLDERS_MAX, LOOK_S, TAKEOVER_S, TERM_S, TURN_WANTS, LimitRoot

NOW = datetime(2026, 11, 23, tzinfo=UTC)


class Stage:
    """Balancers of one region that stand for it, each with a clock of its own that moves with true time."""

    def __init__(self, *names: str, concurrency: int | None = None) -> None:
        self.concurrency = concurrency
        self.now, self.cluster, self.lost = 0.0, MemoryCluster(), False
        self.lease = self.spent = 0
        self.stores = {name: MemoryStore(Random(1), self.cluster) for name in names}
        self.roots = {name: self.stands(name, 1000.0 * n) for n, name in enumerate(names)}

    def stands(self, name: str, offset: float) -> LimitRoot:
        book = LimitBook(None, lambda _: None)  # type: ignore[arg-type]
        limit = Limit(requests_per_day=1000, concurrency=self.concurrency)
        one = TenantLimits(tenant="acme", home="tokyo", limits=(limit,), author="a", why="w", at=NOW)
        book.changed(Change(ChangeKind.PUT, 1, one.place, documents.encode(one)))
        self.buckets = list(book.lent_by("tokyo"))  # the same in all their books
        made = LimitRoot(book, self.stores[name], "tokyo", name, lambda: self.now + offset)
        made.address = f"{name}:1"
        return made

    async def open(self) -> None:
        for store in self.stores.values():
            await store.open()

    def borrow(self, name: str, least: int = 1) -> region_pb2.BorrowReply | None:
        wants = [region_pb2.Want(bucket=self.buckets[0], wanted=least, least=least)]
        return self.roots[name].borrowed(region_pb2.BorrowRequest(holder="h", wants=wants))

    async def claim(self) -> Any:
        entry = await self.stores["r1"].get(limit_root_key("tokyo"))
        return None if entry is None else documents.decode_root(entry.value)


async def test_a_second_limit_root_takes_over_once_the_first_stopped_writing() -> None:
    stage = Stage("r1", "r2")
    await stage.open()
    r1, r2 = stage.roots.values()
    await r1.step()
    await r2.step()
    reply = stage.borrow("r1", 15)
    assert reply is not None
    assert reply.grants[0].granted == 15
    assert stage.borrow("r2") is None
    stage.now += TERM_S + 0.1
    assert stage.borrow("r1") is None, "it has not written for too long"
    await r2.step()
    assert stage.borrow("r2") is None, "it must see for itself that nobody writes"
    stage.now += TAKEOVER_S - TERM_S
    await r2.step()
    reply = stage.borrow("r2")
    assert reply is not None
    assert r2.status()["buckets"].popitem()[1]["used"] == 20, "what the other may have lent by its mark"
    await r1.step()
    assert (r1.status()["lends"], (await stage.claim()).instance) == (False, "r2")


async def test_a_root_that_stops_lets_another_begin_at_once() -> None:
    stage = Stage("r1", "r2")
    await stage.open()
    r1, r2 = stage.roots.values()
    await r1.step()
    await r2.step()
    await r1.close()
    await r2.step()
    assert stage.borrow("r1") is None
    assert stage.borrow("r2") is not None
    assert r2.status()["lends"]


async def test_unacknowledged_own_write_is_recognised_and_anothers_ends_the_root(monkeypatch: Any) -> None:
    stage = Stage("r1")
    await stage.open()
    r1 = stage.roots["r1"]
    await r1.step()
    put = stage.stores["r1"].put

    async def unheard(*given: Any, **more: Any) -> int:
        await put(*given, **more)
        raise StoreUnreachable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(stage.stores["r1"], "put", unheard)
        await r1.step()
        assert r1.trouble == "no answer"
    await r1.step()  # a conflict, with itself
    await r1.step()
    assert (r1.trouble, r1.status()["lends"]) == ("", True)
    claim = await stage.claim()
    other = documents.encode_root(documents.RootClaim(
        region="tokyo", instance="r9", address="r9:1", seq=99, first_lease=claim.first_lease + 1, marks=claim.marks
    ))  # fmt: skip
    await put(claim.place, other)
    await r1.step()
    assert stage.borrow("r1") is None


async def test_a_borrow_request_for_too_much_is_not_answered() -> None:
    stage = Stage("r1")
    await stage.open()
    await stage.roots["r1"].step()
    assert stage.roots["r1"].borrowed(region_pb2.BorrowRequest(holder="")) is None
    assert stage.roots["r1"].borrowed(region_pb2.BorrowRequest(holder="h" * 513)) is None


async def test_a_long_ask_is_read_in_turns_of_the_loop() -> None:
    """4 MiB of them, which one message may have, held it for 130 ms."""
    stage = Stage("r1")
    await stage.open()
    root, turns = stage.roots["r1"], 0
    await root.step()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count())
    wants = [region_pb2.Want(bucket=f"b{n}", spent=n) for n in range(5 * TURN_WANTS)]
    wants.append(region_pb2.Want(bucket=stage.buckets[0], wanted=3, least=3))
    reply = await root.answer(region_pb2.BorrowRequest(holder="h", number=1, wants=wants), None)
    assert [grant.bucket for grant in reply.grants] == stage.buckets[:1]
    assert turns >= 4
    wants[-1].spent = -1
    turned, refused = turns, AsyncMock(side_effect=LookupError)
    with pytest.raises(LookupError):
        await root.answer(region_pb2.BorrowRequest(holder="h", number=2, wants=wants), SimpleNamespace(abort=refused))
    assert turns >= turned + 4
    others.cancel()


@pytest.mark.parametrize("number", ["spent", "returned", "refunded", "owed", "wanted", "least", "held"])
@pytest.mark.parametrize("value", [-1, -(2**62), 2**53 + 1, 2**63 - 1])
async def test_numbers_that_no_holder_comes_to_are_not_counted(number: str, value: int) -> None:
    stage = Stage("r1", concurrency=10)
    await stage.open()
    root = stage.roots["r1"]
    await root.step()
    before = root.status()["buckets"]
    for bucket in stage.buckets:
        want = region_pb2.Want(bucket=bucket, wanted=1)
        setattr(want, number, value)
        assert root.borrowed(region_pb2.BorrowRequest(holder="h", number=1, wants=[want])) is None
    assert root.status()["buckets"] == before


async def test_what_holders_say_is_written_down_or_refused_and_ends_nothing() -> None:
    stage = Stage("r1", concurrency=10)
    await stage.open()
    root = stage.roots["r1"]
    await root.step()
    twice = [region_pb2.Want(bucket=stage.buckets[0], wanted=1)] * 2
    assert root.borrowed(region_pb2.BorrowRequest(holder="h", wants=twice)) is None
    named_at_length = [region_pb2.Want(bucket="x" * 5000, wanted=1)]
    assert root.borrowed(region_pb2.BorrowRequest(holder="h", wants=named_at_length)) is None
    most = [region_pb2.Want(bucket=bucket, held=2**53, owed=2**53) for bucket in stage.buckets]
    for n in range(HOLDERS_MAX):
        ask = region_pb2.BorrowRequest(holder=f"global virginia/g{n} x", number=1, wants=most)
        assert root.borrowed(ask) is not None
        if n % 64 == 0:
            await root.step()
            assert root.trouble == ""
    one_more = region_pb2.BorrowRequest(holder="global virginia/g x", number=1, wants=most)
    assert root.borrowed(one_more) is None, "each life of a balancer is a holder, but not so many"
    one_more.holder = "global tokyo/g x"
    assert root.borrowed(one_more) is not None, "others are not kept out"
    await root.step()
    assert (root.trouble, root.status()["lends"]) == ("", True)
    documents.decode_root(documents.encode_root(await stage.claim()))


async def test_a_limit_that_is_nearly_used_is_shown_with_since_when() -> None:
    stage = Stage("r1")
    await stage.open()
    r1, metrics = stage.roots["r1"], TierMetrics("regional", "tokyo", "r1")
    r1.observe(metrics)
    await r1.step()
    (bucket, *_) = stage.buckets

    async def spend(total: int) -> str:
        for _ in range(60):  # it lends 2 % of a day's limit ahead of the written state
            reply = r1.borrowed(region_pb2.BorrowRequest(holder="h", lease=stage.lease, wants=[
                region_pb2.Want(bucket=bucket, spent=stage.spent, wanted=total, least=total)
            ]))  # fmt: skip
            assert reply is not None
            stage.lease, stage.spent = reply.lease, min(total, reply.grants[0].granted)
            await r1.step()
        stage.now += LOOK_S
        await r1.step()
        r1.look()
        return metrics.render().decode()

    assert 'farhop_limit_used_ratio{kind="requests",region="tokyo",tier="regional"}' in await spend(100)
    assert "nearly_used_s" not in r1.status()["buckets"][bucket]
    assert 'farhop_limit_nearly_used_seconds{region="tokyo",tier="regional"} 0.0' in await spend(950)
    assert 'farhop_limit_nearly_used_seconds{region="tokyo",tier="regional"} 10.0' in await spend(950)
    assert r1.status()["buckets"][bucket]["nearly_used_s"] == LOOK_S
    stage.now += 10_000.0
    await r1.step()
    assert 'farhop_limit_nearly_used_seconds{region="tokyo",tier="regional"} 0.0' in await spend(0)
