"""The upstream's side: keep-alive connections, and the pool that lends them.

Invariants: a connection carries one attempt at a time; it is lent again only after a whole, well-framed answer to a
request that was sent whole; unsolicited bytes close it, and connections to that address are not kept for a while; no
address has more connections than its bound. A kept connection that turns out dead right after it was lent takes those
that rested as long with it, so that the next attempt gets one that is alive. Never retries anything: the upstream may
have seen the request, and the state machine counts retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import socket
import ssl
import struct
import sys
from collections import Counter
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from farhop.balance import outcome
from farhop.balance.estimate.cost import INIT_WINDOW_BYTES
from farhop.relay.http import head, tls
from farhop.relay.http.body import ChunkedBody, EndlessBody, FramingError, LengthBody
from farhop.relay.http.cork import Cork
from farhop.relay.upstream import tunnel
from farhop.relay.upstream.dial import dial

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Address
    from farhop.balance.outcome import Outcome
    from farhop.relay.http.body import Body
    from farhop.relay.http.head import AnswerHead


class UpstreamLimits(msgspec.Struct, frozen=True):
    """What an upstream may do, and how much of this process one address gets. Seconds, counts and bytes.

    A stream is silent while its prompt waits and is computed (`first_byte_s`), a whole answer until all of it is
    generated (`whole_answer_s`): that says nothing about the upstream's health. If the upstream is a tier, each limit
    must be longer than that tier's own: otherwise the tier that knows what happened cannot report it.

    A connection carries one stream, and a fresh one is opened only where none is at rest: `streams_max` bounds both.
    """

    connect_s: float = 3.0
    first_byte_s: float = 120.0
    whole_answer_s: float = 600.0
    between_bytes_s: float = 60.0
    idle_s: float = 50.0  # below the 60-75 s that servers commonly keep: we close first
    idle_max: int = 256  # kept connections per upstream address
    streams_max: int = 10_000  # per upstream address
    headers_max: int = 200
    head_bytes_max: int = 64 * 1024  # of heads, interim answers, trailers and chunk extensions without a body byte


class UpstreamHandler(Protocol):
    """The borrower of a connection: one attempt, one probe. `streams`: whether the answer, once its head is here, is an
    event stream."""

    streams: bool

    def connected(self, connection: UpstreamConnection) -> None:
        """The connection is yours: write the request."""

    def answered(self, answer: AnswerHead) -> None:
        """The head of the answer was received."""

    def received(self, data: bytes) -> None:
        """A part of the answer's body was received."""

    def completed(self) -> None:
        """The answer is whole; the connection is no longer yours."""

    def lost(self, reason: Outcome) -> None:
        """The connection broke, or never came to be; it is no longer yours."""

    def broke(self, error: Exception) -> None:
        """This handler raised an exception on the upstream's bytes; the connection is no longer its own."""


CROSSING_S = 1.0  # a round trip, which no wire or proxy makes longer: for a close that crosses a request
RESTED_S = 10.0  # without a request, after which the next one is reported: `Pool.on_use`
_CLOSE_S = 1.0  # what closing every connection may take
# The most read of one connection in a turn of the loop, whatever has come: 48 bytes may be an event, and each takes 10
# to 20 us if the stream is resumable. uvloop hands over 256 KB at a time, and 32 times in a turn.
EVENTS_A_TURN = 4 * 1024
BYTES_A_TURN = 64 * 1024
# An upstream that sends two answers for one request gives the second to the next request on the same connection, whose
# own goes to the one after it, and so on: for this long each request to it gets a fresh connection.
UNASKED_S = 600.0
_TIMED_OUT = (b"HTTP/1.1 408", b"HTTP/1.0 408")  # what a server may say of a connection at rest (RFC 9110 §15.5.9)
# A connection that did not come to be for want of descriptors, ports or memory here says nothing about the upstream.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))


_NOT_SENT = 0x894B  # SIOCOUTQNSD, of Linux: what a TCP socket holds that was never on the wire
_FORGET = struct.pack("ii", 1, 0)  # linger for no time: closing resets the connection


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has not sent yet; 0 if unknown."""
    sock = transport.get_extra_info("socket")
    if sock is None or sys.platform != "linux":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), _NOT_SENT, bytes(4)), sys.byteorder)
    except OSError:
        return 0


@lru_cache(maxsize=4096)
def _host(address: Address) -> bytes:
    return str(address).encode()


class UpstreamConnection(asyncio.Protocol):
    """One connection to an upstream. `host`: the value of its `Host` header."""

    __slots__ = (
        "_behind",
        "_body",
        "_due",
        "_ended",
        "_keeps",
        "_lost",
        "_partial",
        "_pool",
        "_quiet_bytes",
        "_received",
        "_taken_bytes",
        "_tcp",
        "_turn_bytes",
        "_unread",
        "address",
        "attempt",
        "carried_bytes",
        "host",
        "idle_since",
        "lent_at",
        "reused",
        "transport",
    )

    def __init__(self, pool: Pool, address: Address, tcp: asyncio.Transport | None = None) -> None:
        """`tcp`: the transport below `transport`, where that speaks TLS."""
        self._pool, self.address, self._tcp = pool, address, tcp
        self.host = _host(address)
        self.transport: asyncio.Transport | None = None
        self.attempt: UpstreamHandler | None = None
        self.reused = self._ended = False
        self.carried_bytes = 0  # of the largest body sent on it: so far its congestion window was opened
        self.idle_since = self.lent_at = 0.0
        self._partial = b""  # of a head that is not complete
        self._keeps: bool | None = None  # whether it outlives the answer whose head is here; None: no head is
        self._body: Body | None = None  # None once the head is here: the answer has none
        self._received = False
        self._quiet_bytes = 0
        self._turn_bytes = BYTES_A_TURN
        self._unread, self._taken_bytes = b"", 0  # what came, and is for the next turns but for its beginning
        self._due = self._behind = False  # the next turn is asked for; the client is behind
        self._lost: tuple[Exception | None] | None = None  # the connection is gone, and there is something unread

    @property
    def unread_bytes(self) -> int:
        """How many bytes were read and wait for their turn."""
        return len(self._unread) - self._taken_bytes

    @property
    def usable(self) -> bool:
        """Whether the connection is open, and not about to be closed."""
        return self.transport is not None and not self.transport.is_closing()

    def lend(self, attempt: UpstreamHandler) -> None:
        """Give the connection to an attempt."""
        self.attempt = attempt
        attempt.connected(self)

    def write(self, data: bytes) -> None:
        """Send bytes upstream."""
        if self.transport is not None:
            self._pool.cork.write(self.transport, data)

    @property
    def has_sent(self) -> bool:
        """Whether nothing that was written waits in this process, or in the kernel for its turn on the wire."""
        transport = self.transport
        if transport is None:
            return True
        return not (self._pool.cork.holds(transport) or self._is_behind(transport) or _unsent_bytes(transport))

    def _is_behind(self, transport: asyncio.Transport) -> bool:
        """Whether the kernel has not taken yet all that was written. TLS hands all that it encrypts to the transport
        below at once, and does not report it any more."""
        tcp = self._tcp
        return bool(transport.get_write_buffer_size() or (tcp is not None and tcp.get_write_buffer_size()))

    def _drop(self, transport: asyncio.Transport) -> None:
        """Close at once, and have the kernel discard unsent data. Otherwise it would go on sending some megabytes for
        as long as the other end takes to read them, whatever the law says by then."""
        sock = None if self.has_sent else transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # it is gone already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FORGET)
        transport.abort()

    def pause(self) -> None:
        """Stop reading: the client reads too slowly."""
        self._behind = True
        self._listen()

    def resume(self) -> None:
        """Read again."""
        self._behind = False
        self._listen()

    def _listen(self) -> None:
        """Start or stop reading from the socket, as is due now, and continue with the bytes that were read already."""
        reads, transport = not (self._behind or self._unread), self.transport
        if transport is not None and not transport.is_closing() and transport.is_reading() != reads:
            (transport.resume_reading if reads else transport.pause_reading)()
        if self._unread and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._read_deferred)

    def _read_deferred(self) -> None:
        """Process the next piece of the bytes that were read already."""
        self._due = False
        if self._unread and not self._behind:
            begin = self._taken_bytes
            end = self._taken_bytes = begin + self._turn_bytes
            data = self._unread[begin:end]
            if end >= len(self._unread):
                self._unread, self._taken_bytes = b"", 0
            self.data_received(data, deferred=True)
            self._listen()
        if self._lost is not None and not self._unread:
            self._over(*self._lost)

    @property
    def broken_off(self) -> bool:
        """Whether the upstream itself ended the answer before its end."""
        return isinstance(self._body, ChunkedBody) and self._body.broken_off

    def abort(self) -> None:
        """Close at once, without a callback: the engine sees its client leave."""
        self.attempt, self._unread, self._taken_bytes = None, b"", 0
        if self.transport is not None:
            self._drop(self.transport)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but ancestry
        if self.address.tls is not None:
            # Whatever uvloop has not handed over when the other side closes it drops: while we do not read, it reads on
            # for no more than one piece, and sees the end behind that only once we read again.
            transport.set_read_buffer_limits(1, 0)  # type: ignore[attr-defined]
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = self._tcp = None
        self._pool.forget(self)
        if self._unread:
            self._lost = (exc,)
        else:
            self._over(exc)

    def _over(self, exc: Exception | None) -> None:
        """The connection is gone, and all its bytes were read."""
        self._lost = None
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        try:
            self._end(attempt, exc)
        except Exception as error:  # noqa: BLE001 - as in data_received: nothing more comes that could end it
            attempt.broke(error)

    def _end(self, attempt: UpstreamHandler, exc: Exception | None) -> None:
        """The connection is gone: decide whether the answer is complete or lost."""
        if isinstance(self._body, EndlessBody) and exc is None and self._ended:
            self._complete(attempt)
        elif self.reused and not self._received and self._pool.died_idle(self):
            attempt.lost(outcome.KEPT_CLOSED)
        elif isinstance(exc, ssl.SSLError) and not self._received:
            self._pool.refused(
                self.address, exc
            )  # TLS 1.3: what it thinks of our certificate comes after the handshake
            attempt.lost(outcome.CONNECT_FAILED)
        else:
            # Whether the client has seen a byte is the attempt's to know.
            attempt.lost(outcome.DIED_BEFORE_START)

    def eof_received(self) -> bool:
        # Over TLS only a proper close gets here: an end that an attacker on the path could forge does not end a body.
        self._ended = True
        return False

    def data_received(self, data: bytes, *, deferred: bool = False) -> None:  # a parameter and no frame more a chunk
        if self._unread and not deferred:  # TLS had more
            self._unread, self._taken_bytes = self._unread[self._taken_bytes :] + data, 0
            return
        if len(data) > self._turn_bytes:
            data = self._defer_input(data)
        attempt = self.attempt
        if attempt is None:
            self.abort()
            if not data.startswith(_TIMED_OUT):
                self._pool.distrust(self.address)
            return
        self._received = True
        body = self._body
        try:
            if type(body) is ChunkedBody and (piece := body.single(data)) is not None:  # as most are
                self._quiet_bytes = 0
                attempt.received(piece)
                return
            rest = self._read(data, attempt)
        except (head.HeadError, FramingError):
            self.abort()
            attempt.lost(outcome.BAD_FRAMING)
            return
        except Exception as error:  # noqa: BLE001 - whatever an answer brings about, somebody waits for an outcome
            self.abort()
            attempt.broke(error)
            return
        if rest is not None and self.attempt is attempt:
            more = rest or self._unread
            if more:  # after a complete answer: unsolicited
                self._pool.distrust(self.address)
            self._detach(attempt, keep=not more)

    def _defer_input(self, data: bytes) -> bytes:
        """Keep for later turns what is too much for this turn of the event loop; returns the piece for this turn."""
        size = self._turn_bytes
        if self.attempt is None:  # it has just given up
            return data[:size]
        if self._unread:  # it is what was taken last from there, or its end
            self._taken_bytes -= len(data) - size
        else:
            self._unread, self._taken_bytes = data, size
        self._listen()
        return data[:size]

    def _read(self, data: bytes, attempt: UpstreamHandler) -> bytes | None:
        """Pass these bytes on. Returns what follows the answer once it is complete, None before."""
        if self._keeps is None:
            if self._partial:
                data = self._partial + data
            answer, data = self._read_head(data)
            if answer is None:
                return None
            if answer.status == 408 and self.reused and not answer.keep_alive and self._pool.died_idle(self):
                self.abort()  # it was said of the connection at rest, and crossed the request
                attempt.lost(outcome.KEPT_CLOSED)
                return None
            attempt.answered(answer)
            if attempt.streams:
                self._turn_bytes = EVENTS_A_TURN
                if len(data) > EVENTS_A_TURN:
                    data = self._defer_input(data)
            if self._body is None:
                return data
            if not data:
                return None
        body = self._body
        assert body is not None
        if type(body) is LengthBody and body.left == len(data):  # as mostly: all that was missing
            body.left, self._quiet_bytes = 0, 0
            attempt.received(data)
            return b""
        parts: list[bytes] = []
        rest = body.feed(data, parts)
        if parts:
            self._quiet_bytes = 0
            attempt.received(parts[0] if len(parts) == 1 else b"".join(parts))
        elif rest is None:
            self._bound_quiet(len(data))
        return rest

    def _read_head(self, data: bytes) -> tuple[AnswerHead | None, bytes]:
        """The answer's head, None while it is incomplete, and the bytes that follow it. Raises HeadError."""
        limits = self._pool.limits
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if (
                    len(data) + self._quiet_bytes > limits.head_bytes_max
                    or data[:7] != b"HTTP/1."[: len(data)]
                    or b"\n\n" in data  # its lines end with bare LF: what we wait for will never come
                ):
                    raise head.HeadError(outcome.BAD_FRAMING, "not the head of an HTTP response")
                self._partial = data
                return None, b""
            answer = head.answer(data[:end], limits.headers_max)
            data = data[end + 4 :]
            if answer.status >= 200:
                break
            # Interim answers (RFC 9110 §15.2) are for us, not for the client.
            if answer.status == 101:
                raise head.HeadError(outcome.BAD_FRAMING, "an unexpected switch of protocols")
            self._bound_quiet(end)
        self._partial = b""
        self._keeps, self._body = answer.keep_alive, answer.body
        return answer, data

    def _bound_quiet(self, size: int) -> None:
        """Bounds interim answers, trailers and chunk extensions between two bytes of body."""
        self._quiet_bytes += size
        if self._quiet_bytes > self._pool.limits.head_bytes_max:
            raise FramingError("too much framing without a body")

    def _detach(self, attempt: UpstreamHandler, keep: bool) -> None:
        self.attempt, self._unread, self._taken_bytes, self._behind = None, b"", 0, False
        transport = self.transport
        if transport is not None:
            # An answer may come before the request was sent whole: the rest is not, and must not open the next one.
            behind = transport.get_write_buffer_size() or (self._tcp is not None and self._tcp.get_write_buffer_size())
            behind = behind or (self.carried_bytes > INIT_WINDOW_BYTES and not self.has_sent)
            if behind:
                self._drop(transport)
            elif keep and self._keeps:  # `behind` is as _is_behind says, which would be a call for every answer
                self._partial, self._keeps, self._body, self._received, self._quiet_bytes = b"", None, None, False, 0
                self._turn_bytes = BYTES_A_TURN
                self._pool.give_back(self)
            else:
                transport.close()
        self._complete(attempt)

    def _complete(self, attempt: UpstreamHandler) -> None:
        try:
            attempt.completed()
        except Exception as error:  # noqa: BLE001 - as in data_received
            attempt.broke(error)


class Pool:
    """Connections to every upstream address, kept while they are of use, and lent.

    `context` gives the TLS context for the next connection to an address that wants one; `trouble` is called if TLS
    failed, or an upstream sent unsolicited bytes; `on_use`, with the address of a request that is the first after
    RESTED_S; `on_closed`, with the address and for how long the connection had rested (seconds), if the other side
    closed one that had carried several requests, and was at rest or just lent again.
    """

    def __init__(
        self,
        limits: UpstreamLimits,
        context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
    ) -> None:
        self.limits = limits
        self._context, self._trouble = context, trouble
        self._idle: dict[Address, list[UpstreamConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all: set[UpstreamConnection] = set()
        self._at: Counter[Address] = Counter()  # open, or being opened
        self._distrusted: dict[Address, float] = {}  # addresses that sent unsolicited bytes, and until when that counts
        self._loop = asyncio.get_running_loop()
        self.cork = Cork(self._loop)
        self.on_use: Callable[[Address], None] = lambda _address: None
        self.on_closed: Callable[[Address, float], None] = lambda _address, _rested_s: None

    @property
    def connections(self) -> int:
        """How many connections are open, lent or at rest."""
        return len(self._all)

    def in_use(self, address: Address, within_s: float) -> bool:
        """Whether a connection to the address is in use, or was within the last `within_s` seconds."""
        idle, since = self._idle.get(address, ()), self._loop.time() - within_s
        return self._at.get(address, 0) > len(idle) or any(one.idle_since > since for one in idle)

    def lend(self, address: Address, attempt: UpstreamHandler, body_bytes: int = 0) -> None:
        """Lend a kept connection at once, or a fresh one when it is open. Of kept ones the last used or, for a large
        body, the last one that carried as large a body: any other would start at TCP's initial window."""
        idle = self._idle.get(address)
        while idle:
            any_of_them = body_bytes <= INIT_WINDOW_BYTES or len(idle) == 1
            connection = idle.pop() if any_of_them else idle.pop(_warmest(idle, body_bytes))
            if connection.transport is not None and not connection.transport.is_closing():
                now = self._loop.time()
                connection.reused, connection.lent_at, connection.attempt = True, now, attempt
                if now - connection.idle_since > RESTED_S:
                    self.on_use(address)
                if body_bytes > connection.carried_bytes:
                    connection.carried_bytes = body_bytes
                attempt.connected(connection)
                return
        self.lend_fresh(address, attempt, body_bytes)

    def lend_fresh(self, address: Address, attempt: UpstreamHandler, body_bytes: int = 0) -> None:
        """Open a connection, then give it to the attempt."""
        if not self.in_use(address, RESTED_S):
            self.on_use(address)
        if self._at[address] >= self.limits.streams_max:
            self._loop.call_soon(attempt.lost, outcome.UPSTREAM_FULL)  # not now: the caller is still in its call
            return
        self._at[address] += 1
        task = self._loop.create_task(self._connect(address, attempt, body_bytes))
        self._tasks.add(task)
        task.add_done_callback(partial(self._tried, address))

    def _tried(self, address: Address, task: asyncio.Task[None]) -> None:
        """A connect has ended, also if it was cancelled before it began."""
        self._tasks.discard(task)
        self._left(address)

    async def _connect(self, address: Address, attempt: UpstreamHandler, body_bytes: int) -> None:
        try:
            async with asyncio.timeout(self.limits.connect_s):
                connection = await self._open(address)
        except TimeoutError:
            attempt.lost(outcome.CONNECT_TIMEOUT)
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                self.refused(address, error)
            attempt.lost(outcome.UPSTREAM_FULL if error.errno in _OURS else outcome.CONNECT_FAILED)
        except Exception as error:  # noqa: BLE001 - as in data_received: no time limit would end it
            attempt.broke(error)
        else:
            if connection.usable:
                connection.carried_bytes = body_bytes
                connection.lend(attempt)
            else:
                attempt.lost(outcome.DIED_BEFORE_START)  # accepted, and closed at once

    async def _open(self, address: Address) -> UpstreamConnection:
        context = None if address.tls is None else self._context()
        if address.via is not None:
            return await tunnel.connect(address.via, address, partial(UpstreamConnection, self, address), context)
        if context is not None:
            tcp, _ = await dial(asyncio.Protocol, address.host, address.port)
            return await tls.upgrade(tcp, partial(UpstreamConnection, self, address), context, address.tls)
        _, connection = await dial(lambda: UpstreamConnection(self, address), address.host, address.port)
        return connection

    def refused(self, address: Address, error: ssl.SSLError) -> None:
        """The TLS handshake with an address failed."""
        self._trouble(address, tls.text_of(error))

    def opened(self, connection: UpstreamConnection) -> None:
        """Register an open connection."""
        self._all.add(connection)
        self._at[connection.address] += 1

    def _left(self, address: Address) -> None:
        self._at[address] -= 1
        if not self._at[address]:
            del self._at[address]

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next attempt, unless there are enough."""
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        if not transport.is_reading():
            transport.resume_reading()
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) >= self.limits.idle_max or connection.address in self._distrusted:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Unregister a closed connection."""
        self._all.discard(connection)
        self._left(connection.address)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)
            if connection.reused:
                self.on_closed(connection.address, self._loop.time() - connection.idle_since)
        if not idle:
            self._idle.pop(connection.address, None)

    def died_idle(self, connection: UpstreamConnection) -> bool:
        """Whether a reused connection that broke without an answer had most likely been closed by the other side
        before, so that its FIN or reset was still on the way. Then connections that were idle for as long may be closed
        as well."""
        if self._loop.time() - connection.lent_at > CROSSING_S:
            return False
        self.on_closed(connection.address, connection.lent_at - connection.idle_since)
        for other in tuple(self._idle.get(connection.address, ())):
            if other.idle_since <= connection.idle_since:
                other.abort()
        return True

    def give_up(self, address: Address) -> None:
        """Close idle connections to an address: the path there broke, and a connection may be dead without notice."""
        for connection in tuple(self._idle.get(address, ())):
            connection.abort()

    def distrust(self, address: Address) -> None:
        """An address sent bytes that were not asked for: do not reuse any connection to it for a while."""
        if address not in self._distrusted:
            self._trouble(address, "it sends more than it was asked for: its connections are not kept")
        self._distrusted[address] = self._loop.time() + UNASKED_S
        self.give_up(address)

    def sweep(self, now: float) -> None:
        """Close connections that were idle for too long. `now` is the loop's time."""
        for address in [address for address, until in self._distrusted.items() if until < now]:
            del self._distrusted[address]
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


def _warmest(idle: list[UpstreamConnection], body_bytes: int) -> int:
    """Which idle connection to use: the last used of those that carried as large a body, else the one that carried the
    most."""
    most = place = 0
    for at in range(len(idle) - 1, -1, -1):
        carried_bytes = idle[at].carried_bytes
        if carried_bytes >= body_bytes:
            return at
        if carried_bytes > most:
            most, place = carried_bytes, at
    return place if most else len(idle) - 1
