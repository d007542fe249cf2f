"""Several hubs as one store, while some of them fail."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from farhop.store import hubs
from farhop.store.contract import Conflict, StoreError, StoreUnreachable
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.hubs import Hubs, publication_status, store_of, stores_of, unreached
from farhop_lab.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from farhop.store.contract import Store

KEY = "/farhop/v1/test/k"


async def value(store: Store) -> bytes:
    found = await store.get(KEY)
    assert found is not None
    return found.value


@pytest.fixture
async def two() -> AsyncIterator[tuple[Hubs, MemoryStore, MemoryStore]]:
    a, b = MemoryStore(Random(1)), MemoryStore(Random(2))
    store = Hubs({"b": b, "a": a}, Random(3))
    await store.open()
    yield store, a, b
    await store.close()


async def test_one_hub_that_answers_is_enough_and_the_other_is_opened_when_it_does() -> None:
    class Closed(MemoryStore):
        tries = 0

        async def open(self) -> None:
            self.tries += 1
            if self.tries < 3:
                self.outage()
                raise StoreUnreachable("not yet")
            self.restore()
            await super().open()

    a, b = Closed(Random(1)), MemoryStore(Random(2))
    store = Hubs({"a": a, "b": b}, Random(3))
    await store.open()
    try:
        assert await store.put(KEY, b"1") > 0
        assert list(store.unreached) == ["a"]
        async with asyncio.timeout(60.0):
            while await store.put(KEY, b"2") and store.unreached:
                await asyncio.sleep(0.01)
        assert await value(a) == b"2"
        await asyncio.sleep(0.3)
        assert a.tries == 3  # once open, it is left alone
    finally:
        await store.close()


@pytest.mark.parametrize(("kinds", "raised"), [("uu", StoreUnreachable), ("us", StoreError)])
async def test_if_none_answers_all_of_them_are_named(kinds: str, raised: type[StoreError]) -> None:
    class Closed(MemoryStore):
        def __init__(self, kind: str) -> None:
            super().__init__(Random(1))
            self.error = {"u": StoreUnreachable("nobody there"), "s": StoreError("wrong password")}[kind]

        async def open(self) -> None:
            raise self.error

    store = Hubs({f"hub-{n}": Closed(kind) for n, kind in enumerate(kinds)}, Random(3))
    with pytest.raises(StoreError, match="hub hub-0: nobody there; hub hub-1: ") as caught:
        await store.open()
    assert type(caught.value) is raised


async def test_a_published_value_is_in_every_hub_and_a_returning_hub_gets_the_newest(
    two: tuple[Hubs, MemoryStore, MemoryStore],
) -> None:
    store, a, b = two
    a.outage()
    publication = await store.publish(KEY, b"1", 5.0)
    assert publication_status(publication, "")["b"] is None
    assert "hub a: " in (publication.trouble or "")
    for n in range(2, 5):
        assert await publication.update(b"%d" % n)
    assert await value(b) == b"4"
    a.restore()
    async with asyncio.timeout(60.0):
        while publication.trouble is not None or await a.get(KEY) is None:
            await asyncio.sleep(0.01)
    assert await value(a) == b"4"
    await publication.withdraw()
    assert (await a.get(KEY), await b.get(KEY)) == (None, None)
    with pytest.raises(StoreError, match="withdrawn"):
        await publication.update(b"5")


async def test_a_hub_that_hangs_holds_up_no_update(two: tuple[Hubs, MemoryStore, MemoryStore]) -> None:
    store, a, b = two
    publication = await store.publish(KEY, b"0", 5.0)
    let_go, put_leased = asyncio.Event(), a.put_leased

    async def hang(key: str, value: bytes, lease: int) -> bool:
        await let_go.wait()
        return await put_leased(key, value, lease)

    a.put_leased = hang  # type: ignore[method-assign]
    async with asyncio.timeout(60.0):
        for n in range(1, 50):
            assert await publication.update(b"%d" % n)
            assert await value(b) == b"%d" % n
    assert await value(a) == b"0"
    let_go.set()
    async with asyncio.timeout(60.0):
        while await value(a) != b"49":
            await asyncio.sleep(0.01)


async def test_a_hub_that_hangs_as_publishing_begins_has_the_newest_value_next(
    two: tuple[Hubs, MemoryStore, MemoryStore],
) -> None:
    store, a, _ = two
    let_go, grant = asyncio.Event(), a.grant

    async def hang(ttl_s: float) -> int:
        await let_go.wait()
        return await grant(ttl_s)

    a.grant = hang  # type: ignore[method-assign]
    publication = await store.publish(KEY, b"1", 5.0)
    assert publication_status(publication, "") == {"a": "no answer yet", "b": None}
    assert await publication.update(b"2")
    let_go.set()
    async with asyncio.timeout(60.0):
        while publication.trouble is not None:
            await asyncio.sleep(0.01)
    assert await value(a) == b"2"


async def test_an_entry_counts_if_any_hub_holds_it_and_is_taken_back_in_all(
    two: tuple[Hubs, MemoryStore, MemoryStore],
) -> None:
    store, a, b = two
    await b.put(KEY, b'{"why": "only there"}')
    found = await store.get(KEY)
    assert found is not None
    assert [entry.key for entry in await store.list("/farhop/")] == [KEY]
    with pytest.raises(Conflict):
        await store.put(KEY, b"{}", expect_revision=0)
    await store.put(KEY, b'{"why": "mine"}', expect_revision=found.revision)
    assert [await value(hub) for hub in (a, b)] == [b'{"why": "mine"}'] * 2
    found = await store.get(KEY)
    assert found is not None
    assert await store.delete(KEY, expect_revision=found.revision)
    assert [await a.get(KEY), await b.get(KEY)] == [None, None]
    assert not await store.delete(KEY)


async def test_a_write_reports_the_hubs_it_did_not_reach(two: tuple[Hubs, MemoryStore, MemoryStore]) -> None:
    store, a, b = two
    await store.put(KEY, b"{}")
    a.outage()
    assert await store.delete(KEY)
    assert list(unreached(store)) == ["a"]
    assert unreached(a) == {}
    b.outage()
    with pytest.raises(StoreUnreachable, match=r"hub a: .*hub b: "):
        await store.put(KEY, b"{}")
    a.restore()
    b.restore()
    assert await value(store) == b"{}"  # an unreachable hub's state remains, and counts


async def test_a_hub_that_refuses_a_write_is_named_and_the_others_have_it(
    two: tuple[Hubs, MemoryStore, MemoryStore],
) -> None:
    store, a, b = two

    async def refuse(*_: object) -> int:
        raise StoreError("permission denied")

    a.put = refuse  # type: ignore[method-assign]
    await store.put(KEY, b"1", expect_revision=0)
    assert unreached(store) == {"a": "permission denied"}
    assert await value(b) == b"1"


async def test_an_unexpected_error_of_one_hub_is_not_swallowed(two: tuple[Hubs, MemoryStore, MemoryStore]) -> None:
    store, a, _ = two

    async def broken(_: str) -> None:
        raise ZeroDivisionError

    a.get = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        await store.get(KEY)


def test_a_single_hub_is_its_store_without_a_wrapper() -> None:
    one = EtcdSettings(("127.0.0.1:1",))
    assert isinstance(store_of({"main": one}, Random(1)), EtcdStore)
    several = store_of({"a": one, "b": one}, Random(1))
    assert list(stores_of(several, "main")) == ["a", "b"]
    single = MemoryStore(Random(1))
    assert stores_of(single, "main") == {"main": single}
    assert publication_status(None, "main") == {"main": "not published"}
    with pytest.raises(ValueError, match="at least one hub"):
        Hubs({}, Random(1))
    assert hubs.CHANGES_WAITING > 0
