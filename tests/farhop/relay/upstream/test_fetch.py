"""A small GET: whole or a word why not, on connections that are kept, and nothing of one answer in the next."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from farhop.balance.machine import Address
from farhop.relay.upstream.fetch import Fetched, FetchError, get, post
from farhop.relay.upstream.pool import Pool, UpstreamLimits
from tests.conftest import at_once

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Plain; version=0.0.4\r\ncontent-length: 3\r\n\r\n1 2"


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[Pool, Address]]:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the pool hung up: many of these tests are about that
        finally:
            writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    pool = Pool(UpstreamLimits(connect_s=1.0))
    try:
        yield pool, Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        await pool.close()
        server.close()


def saying(*answers: bytes, then_close: bool = False) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        if not then_close:
            await reader.read()

    return script


async def test_a_post_brings_its_body_and_a_key_where_one_is_wanted() -> None:
    asked: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head + await reader.readexactly(8))
            writer.write(OK)

    async with serving(script) as (pool, address):
        for key in (None, "sk-1"):
            assert (await post(pool, address, "/v1", b'{"a": 1}', 1.0, 100, bearer=key)).status == 200
        assert pool.connections == 1
    plain, keyed = asked
    assert plain.startswith(b"POST /v1 HTTP/1.1\r\nhost: %b\r\n" % str(address).encode())
    assert plain.endswith(b"content-type: application/json\r\ncontent-length: 8\r\n\r\n" + b'{"a": 1}')
    assert keyed.endswith(b'authorization: Bearer sk-1\r\n\r\n{"a": 1}')


async def test_a_whole_answer_on_a_kept_connection() -> None:
    asked: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)

    async with serving(script) as (pool, address):
        for _ in range(3):
            assert await get(pool, address, "/metrics", 1.0, 100) == Fetched(200, b"text/plain", b"1 2")
        assert pool.connections == 1
    assert len(asked) == 3
    assert asked[0].startswith(b"GET /metrics HTTP/1.1\r\nhost: %b\r\n" % str(address).encode())


async def test_a_probe_is_asked_again_where_its_kept_connection_had_been_closed() -> None:
    """That says nothing of the replica: it was closed at rest. Once: a fresh one that dies is a failed probe."""
    asked: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(len(asked))
        if len(asked) < 3:
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with serving(script) as (pool, address):
        for _ in range(2):
            assert (await get(pool, address, "/health", 1.0, 100)).status == 200
        with pytest.raises(FetchError) as caught:
            await get(pool, address, "/health", 1.0, 100)
        assert caught.value.reason == "cut"
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 30\r\n\r\n1 2", "cut"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n1 2\r\n", "cut"),
        (b"nonsense\r\n\r\n", "cut"),
        (b"", "cut"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n" + b"x" * 101, "size"),
    ],
)
async def test_an_incomplete_answer_is_not_read(answer: bytes, reason: str) -> None:
    async with serving(saying(answer, then_close=True)) as (pool, address):
        with pytest.raises(FetchError) as caught:
            await get(pool, address, "/", 1.0, 100)
        assert caught.value.reason == reason


async def test_a_redirect_is_an_answer() -> None:
    away = b"HTTP/1.1 302 Found\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n"
    async with serving(saying(away)) as (pool, address):
        assert (await get(pool, address, "/", 1.0, 100)).status == 302


async def test_a_slow_or_unreachable_server_is_an_error_and_leaves_no_connection() -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n1")) as (pool, address):
        with pytest.raises(FetchError) as caught:
            await get(pool, address, "/", 0.05, 100)
        assert caught.value.reason == "timeout"
        await asyncio.sleep(0.01)
        assert pool.connections == 0
    pool = Pool(UpstreamLimits(connect_s=1.0))
    with pytest.raises(FetchError) as caught:
        await get(pool, address, "/", 1.0, 100)
    assert caught.value.reason == "unreachable"
    await pool.close()


async def test_failed_fetch_leaves_no_reference_cycle() -> None:
    """Of an error that a local of its own raiser holds, only the garbage collector would let go: with every probe."""
    errors: list[weakref.ref[FetchError]] = []
    async with serving(saying(b"HTTP/1.1 nonsense\r\n\r\n")) as (pool, address):
        gc.disable()
        try:
            try:
                await get(pool, address, "/health", 1.0, 100)
            except FetchError as error:
                errors.append(weakref.ref(error))
            await at_once(lambda: [error() for error in errors] == [None])
        finally:
            gc.enable()


async def test_a_late_answer_is_not_the_next_ones() -> None:
    """One that was given up closes its connection: its answer must not be read as another's."""
    calls = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        mine = calls
        await reader.readuntil(b"\r\n\r\n")
        if mine == 1:
            assert await reader.read() == b""  # it was closed without an answer
        writer.write(OK[:-3] + b"%d 9" % mine)

    async with serving(script) as (pool, address):
        with pytest.raises(FetchError):
            await get(pool, address, "/", 0.03, 100)
        assert (await get(pool, address, "/", 1.0, 100)).body == b"2 9"
