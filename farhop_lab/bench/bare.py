"""The baseline: the minimum that a relay on uvloop and httptools must do. Parse, forward, keep alive; nothing else.

`python -m farhop_lab.bench.bare '{"port": 9001, "targets": [["127.0.0.2", 9000]]}'`. It shows what the machine and the
event loop cost. Never a product: no limits, backpressure, timeouts, identity, choice or accounting.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from typing import cast

import httptools
import msgspec
import uvloop


class Job(msgspec.Struct, frozen=True):
    """Where to listen, and the targets, used in turn."""

    port: int
    targets: list[tuple[str, int]]


class Pool:
    """Idle connections upstream."""

    def __init__(self, targets: list[tuple[str, int]]) -> None:
        self._turn = itertools.cycle(targets)
        self.idle: list[Upstream] = []

    def taken(self) -> Upstream | None:
        """An idle one, if any."""
        while self.idle:
            upstream = self.idle.pop()
            if upstream.transport is not None:
                return upstream
        return None

    async def opened(self) -> Upstream:
        """A new one, to the next target."""
        host, port = next(self._turn)
        _, made = await asyncio.get_running_loop().create_connection(lambda: Upstream(self), host, port)
        return made


class Upstream(asyncio.Protocol):
    """One connection to the upstream; bytes are passed on as they come, the parser only finds the end of the answer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.client: Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.transport = None
        if self.client is not None:
            self.client.close()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.client is not None:
            self.client.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """The answer has ended: the connection is free."""
        if self.client is not None:
            self.client.upstream = None
            self.client = None
            self._pool.idle.append(self)


class Client(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, pool: Pool, tasks: set[asyncio.Task[None]]) -> None:
        self._pool, self._tasks = pool, tasks
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self.upstream: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        upstream, self.upstream = self.upstream, None
        if upstream is not None and upstream.transport is not None:
            upstream.client = None
            upstream.transport.close()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """A request begins."""
        self._parts = [self._parser.get_method() + b" " + url + b" HTTP/1.1\r\n"]

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field."""
        self._parts.append(name + b": " + value + b"\r\n")

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._parts.append(b"\r\n")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """The request is complete: forward it."""
        upstream = self._pool.taken()
        if upstream is not None:
            self._forward(upstream)
            return
        task = asyncio.create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        self._forward(await self._pool.opened())

    def _forward(self, upstream: Upstream) -> None:
        if self._transport is None or upstream.transport is None:
            return
        upstream.client, self.upstream = self, upstream
        upstream.transport.writelines(self._parts)

    def write(self, data: bytes) -> None:
        """Pass a piece of the answer on."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """The upstream closed, so the answer is incomplete."""
        if self._transport is not None:
            self._transport.close()


async def serve(job: Job) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    pool, tasks = Pool(job.targets), set[asyncio.Task[None]]()
    await loop.create_server(lambda: Client(pool, tasks), "127.0.0.1", job.port, backlog=4096)
    print(f"bare relay on {job.port}", flush=True)
    await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Job)))
