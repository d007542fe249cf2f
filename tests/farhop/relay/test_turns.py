"""Pipelined requests are answered in order, however each of them ends, and none waits without a bound."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from relay_wire import SSE, Line, chunk, plain, post, until

from farhop.relay.inbound import InboundLimits

GET = b"GET /here HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_pipelined_requests_are_answered_in_order(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda m: plain(m.body)
    c = await s.client()
    await c.send(post(b"1") + GET + post(b"3", path="/refused") + post(b"4") + GET)
    said = [await c.read() for _ in range(5)]
    assert [a.status for a in said] == [200, 200, 404, 200, 200]
    assert [a.body for a in said if a.status == 200] == [b"1", b'{"here":2}', b"4", b'{"here":4}']


async def test_a_stream_is_not_torn_by_what_follows_it(stage: Any) -> None:
    s = await stage()
    go = asyncio.Event()

    async def streams(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await line.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        await s.upstream.request(line)

    s.upstream.script = streams
    c = await s.client()
    await c.send(post() + post(path="/refused") + b"GARBAGE\r\n\r\n")
    await until(lambda: len(s.gate.exchanges) == 1)
    go.set()
    stream, refused, garbage = [await c.read() for _ in range(3)]
    assert stream.body == b"data: 1\n\ndata: 2\n\n"
    assert (refused.status, garbage.status) == (404, 400)
    assert garbage.get("connection") == "close"
    assert await c.ended() == b""


async def test_a_slow_request_is_refused_in_its_turn(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(head_s=0.05, linger_s=0.05))
    go = asyncio.Event()

    async def slow(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            await go.wait()
            await line.send(plain(asked.body))

    s.upstream.script = slow
    c = await s.client()
    await c.send(post(b"1") + post(b"2") + post(b"3")[:20])
    await asyncio.sleep(0.7)  # two sweeps beyond every limit
    go.set()
    said = [await c.read() for _ in range(3)]
    assert [a.status for a in said] == [200, 200, 408]
    assert [a.body for a in said[:2]] == [b"1", b"2"]
    assert await c.ended() == b""


async def test_very_many_pipelined_requests_are_cut_off_at_the_bound(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(pipelined_max=4))
    c = await s.client()
    await c.send(post() + GET * 2000)
    said = [await c.read() for _ in range(5)]
    assert [a.status for a in said] == [200] * 5
    assert [a.get("connection") for a in said] == [None] * 4 + ["close"]
    assert await c.ended() == b""
    assert len(s.gate.exchanges) == 5


async def test_many_that_wait_do_not_exhaust_the_stack(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(pipelined_max=100_000))
    c = await s.client()
    await c.send(post() + GET * 3000)
    said = [await c.read() for _ in range(3001)]
    assert said[-1].body == b'{"here":3001}'


async def test_a_client_that_asks_and_does_not_read_gets_no_more_answers(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    c.reader._transport.pause_reading()  # type: ignore[attr-defined]
    sending = asyncio.create_task(c.send(GET * 200_000))
    await until(lambda: [i for i in s.listener._connections if i._turns.deaf])
    (inbound,) = s.listener._connections
    assert len(inbound._turns._waiting) == 32
    served = len(s.gate.exchanges)
    assert inbound._turns._transport.get_write_buffer_size() < 1 << 20
    c.reader._transport.resume_reading()  # type: ignore[attr-defined]
    said = [await c.read() for _ in range(served + 32)]
    assert said[-1].body == b'{"here":%d}' % (served + 32)
    assert said[-1].get("connection") == "close"
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(send_s=0.1))
    s.upstream.answer = lambda _m: plain(b"x" * (32 << 20))
    c = await s.client()
    c.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await c.send(post())
    await until(lambda: s.tier.concluded_with)
    assert s.tier.concluded_with[0][0] == "client_left"
    await until(lambda: s.listener.connections == 0)


async def test_a_large_last_answer_is_sent_whole_to_a_slow_client(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(linger_s=0.05))
    body = b"x" * (8 << 20)
    s.upstream.answer = lambda _m: plain(body)
    c = await s.client()
    await c.send(post(headers=b"Connection: close\r\n"))
    received = 0
    while data := await c.reader.read(1 << 20):
        received += len(data)
        await asyncio.sleep(0.05)
    assert received > len(body)


async def test_a_client_that_half_closes_has_left(stage: Any) -> None:
    s = await stage()

    async def silent(line: Line) -> None:
        await s.upstream.request(line)
        await s.upstream.request(line)

    s.upstream.script = silent
    c = await s.client()
    await c.send(post())
    await until(lambda: s.upstream.asked)
    c.writer.write_eof()
    await until(lambda: s.upstream.gone == 1)
    assert s.tier.concluded_with == [("client_left", 0, None)]


async def test_those_who_wait_leave_with_the_connection(stage: Any) -> None:
    s = await stage()

    async def silent(line: Line) -> None:
        await s.upstream.request(line)
        await s.upstream.request(line)

    s.upstream.script = silent
    c = await s.client()
    await c.send(post(b"1" * 100) + post(b"2" * 100))
    await until(lambda: s.upstream.asked)
    assert s.budget.used_bytes >= 200
    c.abort()
    await until(lambda: s.listener.connections == 0)
    assert s.gate.abandoned == [("client_left", 0)]
    assert s.budget.used_bytes == 0


@pytest.mark.parametrize("where", ["head", "arrived"])
async def test_a_gate_that_breaks_answers_500_and_says_so(stage: Any, where: str) -> None:
    s = await stage()
    s.expected_errors = 1
    s.gate.break_at = where
    c = await s.client()
    await c.send(post())
    answer = await c.read()
    assert (answer.status, b"internal_error" in answer.body) == (500, True)
    s.gate.break_at = ""
    await c.send(post())
    assert (await c.read()).status == 200
    assert str(s.errors[0]["exception"]) == "the gate broke"
