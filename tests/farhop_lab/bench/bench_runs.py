"""Short runs of a benchmark's parts in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from farhop_lab.bench import client
from farhop_lab.bench.client import Job, Report


@asynccontextmanager
async def listening(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    """A server of this protocol on a port of the system's choice."""
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.02)  # its connections, whose clients have hung up, hear of it


async def sent(port: int, **fields: object) -> Report:
    """What the client tells of a short run against a port of this process."""
    job = {
        "mode": "closed", "host": "127.0.0.1", "port": port, "pids": [os.getpid()], "connections": 4, "ramp_s": 0.1,
        "window_s": 0.2, "windows": 1, "timeout_s": 5.0, **fields,
    }  # fmt: skip
    return await client.run(Job(**job))


class Refuses(asyncio.Protocol):
    """Answers every read with a 429."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")  # type: ignore[attr-defined]
