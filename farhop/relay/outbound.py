"""The upstream's side: keep-alive connections, and the pool that lends them.

Invariants: a connection carries one attempt at a time; it is lent again only after a whole, well-framed answer to a
request that was sent whole; bytes that nobody asked for close it. A kept connection that turns out dead before it said
a word is replaced by a fresh one without the attempt noticing. Never retries anything else.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import httptools
import msgspec

from farhop.balance import outcome
from farhop.relay import tunnel

if TYPE_CHECKING:
    from farhop.balance.machine import Address
    from farhop.balance.outcome import Outcome
    from farhop.relay.head import Headers


class OutboundLimits(msgspec.Struct, frozen=True):
    """What an upstream may do. Seconds, counts and bytes."""

    connect_s: float = 3.0
    first_byte_s: float = 120.0
    between_bytes_s: float = 60.0
    idle_s: float = 50.0  # below the 60-75 s that servers commonly keep: we close first
    idle_max: int = 256  # kept connections per upstream address
    headers_max: int = 200
    head_bytes_max: int = 64 * 1024  # of heads, interim answers, trailers and chunk extensions without a body byte


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


_CLOSE_S = 1.0  # what closing every connection may take


class _BadFramingError(Exception):
    """Raised into the parser: the answer cannot be delimited, or is followed by what nobody asked for."""


class Outbound(asyncio.Protocol):
    """One connection to an upstream. `host` is its `Host` header's value."""

    __slots__ = (
        "_answer_headers",
        "_complete",
        "_fresh_head",
        "_headers",
        "_headers_done",
        "_heard",
        "_keep",
        "_length",
        "_parser",
        "_parts",
        "_pool",
        "_quiet_bytes",
        "_status",
        "_transport",
        "_until_eof",
        "address",
        "attempt",
        "host",
        "idle_since",
        "reused",
    )

    def __init__(self, pool: Pool, address: Address) -> None:
        self._pool, self.address = pool, address
        self.host = str(address).encode()
        self._transport: asyncio.Transport | None = None
        self.attempt: Attempt | None = None
        self.reused = False
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._reset()

    def _reset(self) -> None:
        self._headers: Headers = []
        self._answer_headers = self._headers
        self._headers_done = self._fresh_head = self._complete = self._keep = False
        self._heard = self._until_eof = False
        self._status = self._quiet_bytes = 0
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
        if self._transport is not None and not self._transport.is_closing() and self._transport.is_reading():
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
        self._pool.opened(self)

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
            if not self._complete:
                self.abort()
                attempt.lost(outcome.BAD_FRAMING)
                return
            self._keep = False  # a whole answer, and then bytes that nobody asked for
        if self._fresh_head:
            self._fresh_head = False
            attempt.answered(self._status, self._answer_headers, self._length)
        if self._parts:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._quiet_bytes = 0
            attempt.received(body)
        else:
            self._bound_quiet(len(data), attempt)
        if self._complete and self.attempt is attempt:
            self._settle(attempt)

    def _bound_quiet(self, size: int, attempt: Attempt) -> None:
        """The parser bounds neither heads, nor how many interim answers, trailers or chunk extensions there are."""
        self._quiet_bytes += size
        if self._quiet_bytes > self._pool.limits.head_bytes_max and not self._complete:
            self.abort()
            attempt.lost(outcome.BAD_FRAMING)

    def _settle(self, attempt: Attempt) -> None:
        self.attempt = None
        transport = self._transport
        if transport is not None:
            # An answer may come before the request was sent whole: the rest of it must not open the next one.
            if self._keep and not transport.get_write_buffer_size():
                self._reset()
                self._pool.give_back(self)
            else:
                transport.close()
        attempt.completed()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise _BadFramingError("bytes after the answer")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise _BadFramingError("nobody asked for another protocol")
            return  # interim answers (RFC 9110 §15.2) are for us, not for the client
        if len(self._headers) > self._pool.limits.headers_max:
            raise _BadFramingError("too many headers")
        length, coding = b"", b""
        for name, value in self._headers:
            if name == b"content-length":
                length = value.strip()
            elif name == b"transfer-encoding":
                coding = value.strip().lower()
        if coding not in (b"", b"chunked"):
            raise _BadFramingError("a transfer coding that nobody asked for")
        self._status = status
        self._length = int(length) if length else None
        self._answer_headers, self._headers = self._headers, []  # what still comes here are trailers: dropped
        self._headers_done = self._fresh_head = True
        self._until_eof = self._length is None and not coding and status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._headers_done:
            self._complete = True
            self._keep = self._parser.should_keep_alive()  # known only here: the parser forgets it after this call


class Pool:
    """Connections to every upstream address, kept while they are of use, and lent."""

    def __init__(self, limits: OutboundLimits) -> None:
        self.limits = limits
        self._idle: dict[Address, list[Outbound]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all: set[Outbound] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def connections(self) -> int:
        """How many connections are open, lent or at rest."""
        return len(self._all)

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
                connection = await self._open(address)
        except TimeoutError:
            attempt.lost(outcome.CONNECT_TIMEOUT)
        except OSError:
            attempt.lost(outcome.CONNECT_FAILED)
        else:
            if connection.usable:
                connection.lend(attempt)
            else:
                attempt.lost(outcome.DIED_BEFORE_START)  # accepted, and closed at once

    async def _open(self, address: Address) -> Outbound:
        if address.via is not None:
            return await tunnel.connect(address.via, address, lambda: Outbound(self, address))
        _, connection = await self._loop.create_connection(lambda: Outbound(self, address), address.host, address.port)
        return connection

    def opened(self, connection: Outbound) -> None:
        """Count a connection in."""
        self._all.add(connection)

    def give_back(self, connection: Outbound) -> None:
        """Keep a connection for the next attempt, unless there are enough."""
        if not connection.usable:
            return
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) >= self.limits.idle_max:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        connection.resume()
        idle.append(connection)

    def forget(self, connection: Outbound) -> None:
        """Count a connection out."""
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
        end = self._loop.time() + _CLOSE_S
        while self._all and self._loop.time() < end:
            await asyncio.sleep(0.01)
