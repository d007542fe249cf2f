"""Through a proxy: a real CONNECT proxy that takes a round trip, one that lies, one that never answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from farhop.balance.machine import Address
from farhop.relay.upstream import tunnel
from farhop_lab.wan.link import Link

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Collected(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None
        self.received = asyncio.Queue[bytes]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received.put_nowait(data)


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[Address]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
    writer.close()


async def test_a_connection_through_a_link_takes_its_round_trip_and_then_is_the_upstreams() -> None:
    async with listening(echo) as upstream, Link("a-b", 20.0, rng=random.Random(1)) as link:
        began = asyncio.get_running_loop().time()
        got = await tunnel.connect(Address("127.0.0.1", link.port), upstream, lambda _tcp: Collected())
        assert asyncio.get_running_loop().time() - began >= 0.035
        assert isinstance(got.transport, asyncio.BaseTransport) or got.transport is not None
        got.transport.write(b"hello")  # type: ignore[union-attr]
        assert await asyncio.wait_for(got.received.get(), 60.0) == b"hello"
        got.transport.abort()  # type: ignore[union-attr]


async def test_a_far_side_that_refuses_is_a_refused_connect() -> None:
    async with listening(echo) as gone:
        pass
    async with Link("a-b", 1.0, rng=random.Random(1)) as link:
        with pytest.raises(ConnectionRefusedError, match="502"):
            await tunnel.connect(Address("127.0.0.1", link.port), gone, lambda _tcp: Collected())


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 403 Forbidden\r\n\r\n",
        b"SSH-2.0-nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nearly",
        b"x" * 20_000,
        b"",
    ],
)
async def test_a_proxy_that_does_not_say_yes_is_a_failed_connect(says: bytes) -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(says)
        writer.close()

    async with listening(lie) as via:
        with pytest.raises(ConnectionError):
            await tunnel.connect(via, Address("127.0.0.1", 9), lambda _tcp: Collected())


async def test_a_frozen_link_is_left_to_the_callers_time_limit_and_leaves_no_connection() -> None:
    async with listening(echo) as upstream, Link("a-b", 1.0, rng=random.Random(1)) as link:
        link.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await tunnel.connect(Address("127.0.0.1", link.port), upstream, lambda _tcp: Collected())


async def test_the_proxys_answer_may_come_in_pieces() -> None:
    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in b"HTTP/1.1 200 Connection established\r\nx: y\r\n\r\n":
            writer.write(bytes((byte,)))
            await writer.drain()
        await echo(reader, writer)

    async with listening(dribble) as via:
        got = await tunnel.connect(via, Address("127.0.0.1", 9), lambda _tcp: Collected())
        got.transport.write(b"x")  # type: ignore[union-attr]
        assert await asyncio.wait_for(got.received.get(), 60.0) == b"x"
        got.transport.abort()  # type: ignore[union-attr]
