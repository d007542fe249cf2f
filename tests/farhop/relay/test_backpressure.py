"""A side that does not read stops the other side, at a bounded cost: measured by transports and budget."""

from __future__ import annotations

import asyncio
from typing import Any

from relay_wire import SSE, Line, chunk, plain, post, until

from farhop.relay.http.connection import ClientLimits

MIB = 1 << 20
# uvloop reads up to 256 KiB at a time, and writing pauses at 64 KiB.
UNSENT_BYTES_MAX = 512 * 1024


def unsent(s: Any) -> int:
    """Bytes that the listener's connections hold for their clients."""
    transports = [c._transport for c in s.listener.open_connections]
    return sum(t.get_write_buffer_size() for t in transports if t is not None)


def unsent_upstream(s: Any) -> int:
    """Bytes that the pool's connections hold for the engine."""
    return sum(c.transport.get_write_buffer_size() for c in s.pool._all if c.transport is not None)


async def test_a_client_that_reads_nothing_holds_the_engine_up(stage: Any) -> None:
    s = await stage()
    event = b"data: " + b"x" * (64 * 1024) + b"\n\n"
    events = 34 * MIB // len(event)
    sent = 0

    async def streams(line: Line) -> None:
        nonlocal sent
        await s.upstream.request(line)
        await line.send(SSE)
        for _ in range(events):
            await line.send(chunk(event))
            sent += 1
        await line.send(b"0\r\n\r\n")
        await s.upstream.request(line)

    s.upstream.script = streams
    c = await s.client()
    await c.send(post())
    most = still = before = 0
    while still < 50:
        await asyncio.sleep(0.005)
        most = max(most, unsent(s))
        still, before = (still + 1 if sent == before and sent else 0), sent
    assert sent * len(event) < 30 * MIB, "the kernel's buffers, and no more"
    assert 0 < most <= UNSENT_BYTES_MAX
    assert s.budget.used_bytes < 1024
    passed, last = 0, b""
    while not last.endswith(b"0\r\n\r\n"):
        last = await asyncio.wait_for(c.reader.read(MIB), 60.0)
        passed += last.count(b"x")
        most = max(most, unsent(s))
    assert passed >= events * 64 * 1024
    assert most <= UNSENT_BYTES_MAX


async def test_an_engine_that_reads_nothing_costs_one_body(stage: Any) -> None:
    s = await stage()
    go = asyncio.Event()

    async def deaf(line: Line) -> None:
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go.wait()
        line.writer.transport.resume_reading()  # type: ignore[attr-defined]
        asked = await s.upstream.request(line)
        await line.send(plain(b"%d" % len(asked.body)))
        await s.upstream.request(line)

    s.upstream.script = deaf
    c = await s.client()
    body = b"x" * (16 * MIB)
    await c.send(post(body))
    await until(lambda: unsent_upstream(s) > 0)
    assert unsent_upstream(s) <= 16 * MIB
    assert 16 * MIB <= s.budget.used_bytes <= 16 * MIB + 1024
    go.set()
    assert (await c.read()).body == b"%d" % len(body)
    await until(lambda: s.budget.used_bytes == 0)


async def test_pipelined_bytes_behind_an_answer_are_bounded(stage: Any) -> None:
    """An active body, less than one that waits, and one more that was being read: three, however many were sent."""
    s = await stage(client_limits=ClientLimits(body_bytes_max=10_000, pipelined_max=32))
    go = asyncio.Event()

    async def slow(line: Line) -> None:
        while True:
            await s.upstream.request(line)
            await go.wait()
            await line.send(plain(b"1"))

    s.upstream.script = slow
    c = await s.client()
    most = 0
    for _ in range(10):
        await c.send(post(b"x" * 9_000))
        await asyncio.sleep(0.01)
        most = max(most, s.budget.used_bytes)
    assert 27_000 <= most < 30_000
    go.set()
    found = [await c.read() for _ in range(3)]
    assert [(a.status, a.get("connection")) for a in found] == [(200, None), (200, None), (200, "close")]
    assert await c.ended() == b""
