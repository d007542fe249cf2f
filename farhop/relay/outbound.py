"""The upstream's side: keep-alive connections, and the pool that lends them.

Invariants: a connection carries one attempt at a time; it is lent again only after a whole, well-framed answer; bytes
that nobody asked for close it. A kept connection that turns out dead before it said a word is replaced by a fresh one
without the attempt noticing. Never retries anything else.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools
import msgspec

from farhop.balance import outcome
from farhop.balance.machine import Address
from farhop.balance.outcome import Outcome
from farhop.relay.head import Headers


class OutboundLimits(msgspec.Struct, frozen=True):
    """What an upstream may do. Seconds and counts."""

    connect_s: float = 3.0
    first_byte_s: float = 120.0
    between_bytes_s: float = 60.0
    idle_s: float = 50.0  # below the 60-75 s that servers commonly keep: we close first
    idle_max: int = 256  # kept connections per upstream address
    headers_max: int = 200


class Attempt(Protocol):
    """Who a connection is lent to."""

    def connected(self, connection: Outbound) -> None:
        """The connection is yours: write the request."""

    def answered(self, status: int, headers: Headers, length: int | None) -> None:
        """The answer's head is here. `length` is its Content-Length, None where framing tells the end."""

    def received(self, data: bytes) -> None:
        """Some of the answer's body."""

    def completed(self) -> None:
        """The answer is whole; the connection is no longer yours."""

    def lost(self, reason: Outcome) -> None:
        """The connection broke, or never came to be; it is no longer yours."""


class Outbound(asyncio.Protocol):
    """One connection to an upstream."""

    __slots__ = (
        "_complete",
        "_headers",
        "_headers_done",
        "_heard",
        "_length",
        "_parser",
        "_parts",
        "_pool",
        "_transport",
        "_until_eof",
        "address",
        "attempt",
        "idle_since",
        "reused",
    )

    def __init__(self, pool: Pool, address: Address) -> None:
        self._pool, self.address = pool, address
        self._transport: asyncio.Transport | None = None
        self.attempt: Attempt | None = None
        self.reused = False
        self.idle_since = 0.0
        self._parts: list[bytes] = []
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._headers_done = self._complete = self._heard = self._until_eof = False
        self._length: int | None = None

    @property
    def usable(self) -> bool:
        """Open, and not about to close."""
        return self._transport is not None and not self._transport.is_closing()

    def lend(self, attempt: Attempt) -> None:
        """Give the connection to an attempt."""
        self.attempt = attempt
        attempt.connected(self)

    def write(self, data: bytes) -> None:
        """Send bytes upstream."""
        if self._transport is not None:
            self._transport.write(data)

    def pause(self) -> None:
        """Stop reading: the client is behind."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once and tell nobody: the engine sees its client leave."""
        self.attempt = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but ancestry

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        if self._until_eof and exc is None:
            attempt.completed()
        elif self.reused and not self._heard:
            self._pool.lend_fresh(self.address, attempt)
        else:
            # Whether the client has seen a byte is the attempt's to know.
            attempt.lost(outcome.DIED_BEFORE_START)

    def data_received(self, data: bytes) -> None:
        attempt = self.attempt
        if attempt is None:
            self.abort()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.attempt = None
            self.abort()
            attempt.lost(outcome.BAD_FRAMING)
            return
        if self._parts:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            attempt.received(body)
        if self._complete and self.attempt is attempt:
            self._settle(attempt)

    def _settle(self, attempt: Attempt) -> None:
        keep = self._parser.should_keep_alive()
        self.attempt = None
        self._reset()
        if keep:
            self._pool.give_back(self)
        elif self._transport is not None:
            self._transport.close()
        attempt.completed()

    # -- httptools

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        if len(self._headers) > self._pool.limits.headers_max:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return  # interim answers (RFC 9110 §15.2) are for us, not for the client
        lengths = {value for name, value in self._headers if name == b"content-length"}
        chunked = any(name == b"transfer-encoding" for name, _ in self._headers)
        if len(lengths) > 1 or (lengths and chunked):
            raise ValueError("ambiguous framing")
        self._length = int(lengths.pop()) if lengths else None
        self._headers_done = True
        self._until_eof = self._length is None and not chunked and status not in (204, 304)
        if self.attempt is not None:
            self.attempt.answered(status, self._headers, self._length)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._headers_done:
            self._complete = True


class Pool:
    """Connections to every upstream address, kept while they are of use."""

    def __init__(self, limits: OutboundLimits) -> None:
        self.limits = limits
        self._idle: dict[Address, list[Outbound]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all: set[Outbound] = set()
        self._loop = asyncio.get_running_loop()

    def lend(self, address: Address, attempt: Attempt) -> None:
        """Lend a kept connection now, or a fresh one when it is there."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.usable:
                connection.reused = True
                connection.lend(attempt)
                return
        self.lend_fresh(address, attempt)

    def lend_fresh(self, address: Address, attempt: Attempt) -> None:
        """Connect, then lend."""
        task = self._loop.create_task(self._connect(address, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, address: Address, attempt: Attempt) -> None:
        try:
            async with asyncio.timeout(self.limits.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Outbound(self, address), address.host, address.port
                )
        except TimeoutError:
            attempt.lost(outcome.CONNECT_TIMEOUT)
        except OSError:
            attempt.lost(outcome.CONNECT_FAILED)
        else:
            self._all.add(connection)
            connection.lend(attempt)

    def give_back(self, connection: Outbound) -> None:
        """Keep a connection for the next attempt, unless there are enough."""
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) >= self.limits.idle_max or not connection.usable:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        connection.resume()
        idle.append(connection)

    def forget(self, connection: Outbound) -> None:
        """The connection is closed."""
        self._all.discard(connection)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.address, None)

    def sweep(self, now: float) -> None:
        """Close what has rested too long. `now` is the loop's time."""
        for idle in tuple(self._idle.values()):
            for connection in tuple(idle):
                if now - connection.idle_since > self.limits.idle_s:
                    connection.abort()

    async def close(self) -> None:
        """Close everything."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in tuple(self._all):
            connection.abort()
