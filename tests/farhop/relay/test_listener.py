"""A port: bounded, swept, and drained without breaking an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from relay_wire import SSE, Line, chunk, post, until

from farhop.relay.inbound import InboundLimits
from farhop.relay.listener import Listener, PortTakenError


def held(s: Any, go: asyncio.Event) -> Any:
    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await line.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        await s.upstream.request(line)

    return script


async def test_connections_beyond_the_limit_are_told_so(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(connections_max=1, linger_s=60.0))
    first = await s.client()
    await first.send(post())
    assert (await first.read()).status == 200
    for _ in range(3):
        over = await s.client()
        answer = await over.read()
        assert (answer.status, answer.get("connection"), answer.get("retry-after")) == (503, "close", "1")
        assert b"too_many_connections" in answer.body
    first.abort()
    await until(lambda: s.listener.connections == 0)
    assert (await s.ask(post())).status == 200, "those turned away do not count"


async def test_a_port_that_is_taken_is_named(stage: Any) -> None:
    s = await stage()
    second = Listener("client", s.gate, InboundLimits(), s.budget)
    with pytest.raises(PortTakenError, match=rf"client: cannot listen on 127\.0\.0\.1:{s.port}: .*another port"):
        await second.open("127.0.0.1", s.port)


async def test_draining_waits_for_streams_and_refuses_the_new(stage: Any) -> None:
    s = await stage()
    go = asyncio.Event()
    s.upstream.script = held(s, go)
    idle, busy, reading = await s.client(), await s.client(), await s.client()
    await busy.send(post())
    await busy.reader.readuntil(b"data: 1\n\n\r\n")
    await reading.send(post(b"abc", path="/here")[:-1])
    await until(lambda: s.listener.connections == 3)
    await until(lambda: len([e for e in s.listener._connections if e._state == "body"]) == 1)
    closing = asyncio.create_task(s.listener.close(5.0))
    assert await idle.ended() == b""
    with pytest.raises(OSError):
        await s.client()
    await reading.send(b"c")
    answer = await reading.read()
    assert (answer.status, answer.get("connection")) == (200, "close")
    assert not closing.done()
    go.set()
    assert await busy.ended() == chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    await closing
    assert s.tier.concluded_with == [("served", 200, None)]


async def test_draining_ends_at_its_deadline(stage: Any) -> None:
    s = await stage()
    s.upstream.script = held(s, asyncio.Event())
    c = await s.client()
    await c.send(post())
    await c.reader.readuntil(b"data: 1\n\n")
    await s.listener.close(0.05)
    assert s.listener.connections == 0
    assert s.tier.concluded_with == [("client_left", 0, None)]


async def test_an_idle_connection_is_closed(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(idle_s=0.3))
    c = await s.client()
    await c.send(post())
    assert (await c.read()).status == 200
    assert await c.ended() == b""


async def test_a_long_answer_is_not_idleness(stage: Any) -> None:
    s = await stage(inbound=InboundLimits(idle_s=0.3))
    go = asyncio.Event()
    s.upstream.script = held(s, go)
    c = await s.client()
    await c.send(post())
    await asyncio.sleep(0.8)
    go.set()
    assert (await c.read()).whole
    await c.send(post(path="/here"))
    assert (await c.read()).status == 200
