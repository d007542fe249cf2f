"""Short runs of a benchmark's parts in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from farhop_lab.bench import client
from farhop_lab.bench.client import Job, Report, Window


class _Recorded(asyncio.Protocol):
    """A protocol whose connection is among the `open` ones while it is."""

    def __init__(self, of: asyncio.Protocol, open_: set[asyncio.BaseTransport]) -> None:
        self._of, self._open = of, open_
        self.data_received, self.eof_received = of.data_received, of.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = of.pause_writing, of.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._open.add(transport)
        self._of.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self._transport)
        self._of.connection_lost(exc)


@asynccontextmanager
async def listening(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    """A server of this protocol on a port of the system's choice."""
    open_: set[asyncio.BaseTransport] = set()
    server = await asyncio.get_running_loop().create_server(lambda: _Recorded(protocol(), open_), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        async with asyncio.timeout(60.0):
            while open_:  # its clients have hung up, and it learns that later
                await asyncio.sleep(0.002)


async def sent(port: int, **fields: object) -> Report:
    """What the client tells of a short run against a port of this process."""
    job = {
        "mode": "closed", "host": "127.0.0.1", "port": port, "pids": [os.getpid()], "connections": 4, "ramp_s": 0.1,
        "window_s": 0.2, "windows": 1, "timeout_s": 5.0, **fields,
    }  # fmt: skip
    return await client.run(Job(**job))


RUNS_MAX = 200  # on a machine that lets no process run


async def passed(port: int, *, of_requests: int = 0, of_chunks: int = 0, **fields: object) -> list[Window]:
    """The windows of as many such runs as it takes until so many have passed: how many do in one is this machine's
    affair."""
    windows: list[Window] = []
    while sum(one.requests for one in windows) < of_requests or sum(one.chunks for one in windows) < of_chunks:
        assert len(windows) < RUNS_MAX, windows
        windows += (await sent(port, **fields)).windows
    return windows


class Refuses(asyncio.Protocol):
    """Answers every read with a 429."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")  # type: ignore[attr-defined]
