"""A link and far sides on real sockets, on both kinds of loop, and the few words a client says to it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
import uvloop

from farhop_lab.wan.link import Link
from farhop_lab.wan.shaper import Shaper, Signal

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE_S = 60.0


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A link serves lab processes on either."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Peer:
    """One connection, seen from whoever holds it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> tuple[int, str]:
        """The status and body of the answer to CONNECT."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        status = int(head.split()[1])
        return status, "" if status == 200 else (await self.read_to_end()).decode()

    async def exactly(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), PATIENCE_S)

    async def read_to_end(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)

    async def silent(self, within_s: float) -> bool:
        """Whether neither a byte nor an end comes."""
        try:
            await asyncio.wait_for(self.reader.read(1), within_s)
        except TimeoutError:
            return True
        return False

    def reset(self) -> None:
        """Go away with RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.writer.transport.abort()


class Lab:
    """Makes links, far sides and clients, and takes all down."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._peers: list[Peer] = []

    async def link(self, delay_ms: float = 10.0, jitter_ms: float = 0.0, **settings: Any) -> Link:
        made = Link("here>there", delay_ms, jitter_ms, rng=Random(7), **settings)
        return await self._stack.enter_async_context(made)

    async def far(self, **options: Any) -> tuple[str, asyncio.Queue[Peer]]:
        """A listening far side: its address, and the connections it accepts."""
        accepted: asyncio.Queue[Peer] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.put_nowait(self._hold(Peer(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0, **options)
        self._stack.callback(server.close)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}", accepted

    def _hold(self, peer: Peer) -> Peer:
        self._peers.append(peer)
        return peer

    async def client(self, link: Link, data: bytes = b"") -> Peer:
        peer = self._hold(Peer(*await asyncio.open_connection("127.0.0.1", link.port)))
        peer.writer.write(data)
        return peer

    async def connect(self, link: Link, target: str, more: bytes = b"") -> Peer:
        """A client that has said CONNECT."""
        return await self.client(link, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() + more)

    async def pair(self, link: Link, **far: Any) -> tuple[Peer, Peer]:
        """A client and a far side that are connected through the link."""
        address, accepted = await self.far(**far)
        near = await self.connect(link, address)
        assert await near.head() == (200, "")
        return near, await asyncio.wait_for(accepted.get(), PATIENCE_S)

    async def close(self) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()
        await self._stack.aclose()
        # Transports close in a callback of the next iterations of the loop.
        await _until(lambda: all(peer.writer.is_closing() for peer in self._peers))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def _until(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for a condition, within a bound."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.001)


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    made = Lab(AsyncExitStack())
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """All that is put on a wire, in order: a signal's name or "bytes", and the seconds until it comes out.

    How long a crossing takes in the end is the machine's affair; how many there are, and how long each is to be, is the
    link's."""
    seen: list[tuple[str, float]] = []
    put, here = Shaper.put, threading.get_ident()

    def noted(shaper: Shaper, item: bytes | Signal, now: float) -> None:
        put(shaper, item, now)
        if threading.get_ident() != here:
            return  # the wires of a world that other tests share, in a thread of its own
        seen.append((item.value if isinstance(item, Signal) else "bytes", round(shaper.queue[-1][0] - now, 6)))

    monkeypatch.setattr(Shaper, "put", noted)
    return seen


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Under --import-mode=importlib test files do not see this one: they get it as a fixture."""
    return _until
