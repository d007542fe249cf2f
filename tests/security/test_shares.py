"""No tenant starves others: each bounded resource has a share per tenant, which others may borrow while it is idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_wire import Line, post, until

from farhop.balance.bounds import SHARE, ByteBudget, Limit, SlotLimit
from farhop.relay.http import listener
from farhop.relay.http.connection import ClientLimits
from farhop.relay.http.listener import ConnectionSlots

TENANTS = "abcdef"


def test_a_single_tenant_borrows_and_leaves_room_for_the_next() -> None:
    limit = SlotLimit(1000)
    alone = sum(limit.take(1, "a") for _ in range(1000))
    assert alone == 1000 * SHARE // (1 + SHARE)
    assert sum(limit.take(1, "b") for _ in range(1000)) == (1000 - alone) * SHARE // (1 + SHARE)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans(), st.integers(0, 40)), max_size=200))
def test_no_tenant_has_more_than_its_share_and_the_counts_balance(calls: list[tuple[str, bool, int]]) -> None:
    limit, held = ByteBudget(400), dict.fromkeys(TENANTS, 0)
    for who, takes, n in calls:
        if takes and limit.take(n, who):
            held[who] += n
            free = limit.capacity - limit.used
            assert n == 0 or held[who] <= max(SHARE * free, limit.capacity // 64)
        elif not takes and n <= held[who]:
            limit.give(n, who)
            held[who] -= n
        assert limit.used == sum(held.values()) <= limit.capacity
        assert {who: limit.held(who) for who in TENANTS} == held


def test_the_greedy_come_to_have_equal_shares_and_the_modest_get_all_they_want() -> None:
    """Max-min fairness: each takes what it can get and gives back one in turn, as requests come and go."""
    limit, greedy = Limit(1200), ("a", "b", "c")
    modest = 50
    for _ in range(1000):
        limit.take(1, "a")  # the first client has as much as one client alone may
    assert sum(limit.take(1, "m") for _ in range(modest)) == modest
    for _ in range(2000):
        for who in greedy:
            if limit.held(who):
                limit.give(1, who)
        for who in greedy:
            while limit.take(1, who):
                pass
    shares = [limit.held(who) for who in greedy]
    assert max(shares) - min(shares) <= 0.05 * limit.capacity
    assert min(shares) > 3 * modest


def test_a_slot_moves_to_its_tenant_once_that_is_known() -> None:
    limit = SlotLimit(10)
    assert limit.take(1, "")
    assert limit.move(1, "", "a")
    assert (limit.held(""), limit.held("a"), limit.used) == (0, 1, 1)
    while limit.take(1, "a"):
        pass
    assert limit.take(1, "")
    assert not limit.move(1, "", "a")
    assert (limit.held(""), limit.used) == (1, limit.held("a") + 1)


class Tenants:
    """The scripted handler, with a tenant by header."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def head(self, exchange: Any) -> Any:
        exchange.tenant = "bad" if b"x-bad" in exchange.head.onward else "good"
        return self._handler.head(exchange)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


async def test_one_tenants_bodies_leave_room_for_anothers(stage: Any) -> None:
    s = await stage(budget_bytes=1_000_000)
    s.listener._handler = Tenants(s.handler)
    unfinished = post(b"x" * 500_000, headers=b"X-Bad: 1\r\n")[:-100]
    first, second = await s.client(), await s.client()
    await first.send(unfinished)
    await until(lambda: s.budget.held("bad") > 400_000)
    await second.send(unfinished)
    refused = await second.read()
    assert refused.status == 429
    assert b"tenant_over_its_share" in refused.body
    assert (await s.ask(post(b"y" * 30_000))).status == 200


async def test_one_tenants_requests_leave_room_for_anothers(stage: Any) -> None:
    s = await stage()
    s.listener._handler, s.listener.requests = Tenants(s.handler), SlotLimit(5)
    go = asyncio.Event()

    async def script(line: Line) -> None:
        asked = await s.upstream.request(line)
        if asked.get("accept-language") == "bad":
            await go.wait()
        await line.send(s.upstream.answer(asked))

    s.upstream.script = script
    bad = [asyncio.create_task(s.ask(post(headers=b"X-Bad: 1\r\nAccept-Language: bad\r\n"))) for _ in range(6)]
    await until(lambda: s.relay.under_way == 4 and sum(task.done() for task in bad) == 2)
    assert (await s.ask(post())).status == 200
    go.set()
    assert sorted([(await task).status for task in bad]) == [200] * 4 + [429] * 2
    assert s.listener.requests.used == 0


@pytest.mark.parametrize("sends", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nX: "], ids=["none", "some"])
@pytest.mark.parametrize("bound", ["slots", "connections_max"])
async def test_silent_connections_do_not_keep_tenants_out(
    stage: Any, monkeypatch: pytest.MonkeyPatch, sends: bytes, bound: str
) -> None:
    """All that a listener has are taken by strangers: the oldest gives way, and none by which a tenant has asked."""
    monkeypatch.setattr(listener, "GIVES_WAY_S", 60.0)
    slots = ConnectionSlots(10 if bound == "slots" else 100)
    most = 20_000 if bound == "slots" else 8
    s = await stage(slots=slots, client_limits=ClientLimits(connections_max=most))
    s.listener._handler = Tenants(s.handler)
    tenants = [await s.client() for _ in range(2)]
    for one in tenants:
        await one.send(post(b"{}"))
        assert (await one.read()).status == 200
    strangers = [await s.client() for _ in range(6)]
    for one in strangers:
        await one.send(sends)
    await until(lambda: s.listener.connections == 8 and len(s.listener.unproven) == 6)
    refused = await s.client()
    assert (await refused.read()).status == 503, "they came just now"
    monkeypatch.setattr(listener, "GIVES_WAY_S", 0.0)  # now they are long enough there
    assert (await s.ask(post(b"{}"))).status == 200
    for one in tenants:
        await one.send(post(b"{}"))
        assert (await one.read()).status == 200
    assert await strangers[0].ended() == b""
    assert s.listener.refused == {"too_many_connections": 2}
    for one in (*strangers, *tenants):
        one.abort()
    await until(lambda: s.listener.connections == 1)  # that of `ask`
    assert (slots.used, len(s.listener.unproven)) == (1, 0)


@pytest.mark.parametrize(("sent", "after_s", "slow"), [(2000, 11.0, False), (900, 11.0, True), (2000, 13.0, True)])
async def test_an_upload_has_a_least_rate(stage: Any, sent: int, after_s: float, slow: bool) -> None:
    """1,024 bytes a second once ten seconds are over; the clock is told, not waited for."""
    s = await stage(client_limits=ClientLimits())
    c = await s.client()
    await c.send(post(b"x" * 50_000)[: sent - 50_000])
    await until(lambda: any(i._reading and i._reading.body_bytes >= sent for i in s.listener.open_connections))
    (connection,) = s.listener.open_connections
    connection.check(connection._request_since + after_s, 75.0)
    if slow:
        assert b"bytes a second" in (await c.read()).body
    else:
        assert connection._reading is not None
