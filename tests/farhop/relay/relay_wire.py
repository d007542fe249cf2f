"""Raw connections: clients that send given bytes, and an upstream that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from farhop.balance.machine import Address

PATIENCE_S = 60.0


async def until(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    """Wait for a condition, within a bound."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.002)


@dataclass
class Message:
    """A request or an answer as read from the wire. `whole` is False if it broke off."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = True

    @property
    def status(self) -> int:
        return int(self.line.split()[1])

    def get(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key == name]
        assert len(found) < 2, f"{name} stands {len(found)} times"
        return found[0] if found else None


class Line:
    """One end of a raw connection. Notices nothing by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read(self) -> Message:
        """The next message, whole or as far as it came."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            line, *fields = head.decode("latin-1").split("\r\n")[:-2]
            pairs = [(f.partition(":")[0].lower(), f.partition(":")[2].strip()) for f in fields]
            message = Message(line, pairs)
            try:
                await self._read_body(message)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                message.body += getattr(error, "partial", b"")
                message.whole = False
        return message

    async def _read_body(self, message: Message) -> None:
        length = message.get("content-length")
        if message.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).strip().partition(b";")[0], 16):
                message.body += await self.reader.readexactly(size)
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readexactly(2) == b"\r\n"
        elif length is not None:
            message.body += await self.reader.readexactly(int(length))
        elif message.line.startswith("HTTP/") and message.status not in (204, 304):
            message.body += await self.reader.read()

    async def ended(self, within_s: float = PATIENCE_S) -> bytes:
        """What still comes until the other side closes or breaks."""
        async with asyncio.timeout(within_s):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def abort(self) -> None:
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


Script = Callable[[Line], Awaitable[None]]


def plain(body: bytes, status: str = "200 OK", headers: bytes = b"content-type: application/json\r\n") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status.encode(), headers, len(body), body)


SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


AS_TARGET_0 = b"x-farhop-region: target-0\r\n"  # as a region says it that a tier asks first


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def post(body: bytes = b"{}", path: str = "/v1/chat/completions", headers: bytes = b"", version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: farhop\r\nContent-Length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


class Upstream:
    """A server that plays a script on every connection, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.lines: list[Line] = []
        self.script: Script = self.serve
        self.answer: Callable[[Message], bytes] = lambda _m: plain(b'{"ok":true}')
        self.gone = 0  # connections that the relay closed
        self.address = Address("127.0.0.1", 0)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, context: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._play, "127.0.0.1", 0, limit=1 << 20, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        self.address = Address("127.0.0.1", port, tls=None if context is None else "127.0.0.1")

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line = Line(reader, writer)
        self.lines.append(line)
        try:
            await self.script(line)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self.gone += 1
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def request(self, line: Line) -> Message:
        """The next request on a connection."""
        while True:
            try:
                message = await line.read()
            except TimeoutError:
                continue
            if not message.whole:
                raise asyncio.IncompleteReadError(message.body, None)
            self.asked.append(message)
            return message

    async def serve(self, line: Line) -> None:
        """The plain script: answer whatever comes."""
        while True:
            asked = await self.request(line)
            await line.send(self.answer(asked))

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
