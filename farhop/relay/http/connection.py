"""One connection of a client: reads its requests within limits, answers them in their order, and ends.

Invariants of reading: every byte held is taken from the process's one budget and given back when its exchange is over;
every wait for the client is bounded; after a head that cannot be trusted nothing more is read.
Of answering: answers leave in the order of requests; none is begun while the client does not read the last; no more
exchanges wait for their turn than `pipelined_max`, nor more bytes than one body may have.
Of ending: only after an answer that said so, or a long rest. Never decides what an answer is, nor anything about
routing; never stops listening to the socket: a client that leaves must be noticed.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import socket
import struct
import sys
import termios
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from farhop.balance import outcome
from farhop.relay import answers
from farhop.relay.http import head
from farhop.relay.http.body import ChunkedBody, FramingError, LengthBody
from farhop.relay.http.cork import CROWD
from farhop.relay.http.exchange import Exchange

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from farhop.balance.bounds import ByteBudget, SlotLimit
    from farhop.balance.outcome import Outcome
    from farhop.relay.answers import Reply
    from farhop.relay.http.cork import Cork
    from farhop.relay.http.exchange import RequestHandler


class ClientLimits(msgspec.Struct, frozen=True):
    """What a client may do. Bytes, counts and seconds.

    `connections_per_client_max` counts by address (IPv6: by /64) and not on the tier above's listener. `idle_s` is how
    long a connection may rest, `drain_idle_s` how long once we stop; `head_s` how long a head may take, `body_s` the
    pause between two segments of a body, `upload_s` what a whole request may take to arrive, `upload_bytes_per_s_min`
    how fast its body must come once `head_s` is over, `send_s` how long a client may take nothing of its answer,
    `linger_s` how long it may be silent after its last one and not close; if it goes on sending, `upload_s`.
    """

    head_bytes_max: int = 32 * 1024
    headers_max: int = 100
    body_bytes_max: int = 16 * 1024 * 1024
    connections_max: int = 20_000
    connections_per_client_max: int = 4096
    pipelined_max: int = 32
    idle_s: float = 75.0
    drain_idle_s: float = 5.0
    head_s: float = 10.0
    body_s: float = 30.0
    upload_s: float = 300.0
    upload_bytes_per_s_min: int = 1024
    send_s: float = 60.0
    linger_s: float = 2.0


# A refused body up to this size is read and dropped, so that the connection stays of use.
_DRAIN_BYTES_MAX = 64 * 1024
_READING_FACTOR = 5  # times its own size: what reading a large body takes beside it
_HEADS_A_TURN = 16  # of one connection: refused at once they take 0.1 ms each, from any client
_BYTES_A_TURN = 16 * 1024  # of more than one request: the worst bodies of 8 KiB take 1 to 2 ms each to read
_LARGE_BYTES = 64 * 1024  # read in a turn of its own; far larger ones in another process (admission.large_bodies)
_READ_A_TURN = 128 * 1024  # more from one client waits a turn: uvloop would read up to 8 MB, which takes 10 to 40 ms
# What no valid head contains, however much of it is still to come: bare line ends, control characters.
_NEVER = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_END = b"\r\n\r\n"
# Of struct tcp_info (linux/tcp.h): tcpi_min_rtt, microseconds; all bits set where nothing was measured.
_TCP_INFO_BYTES, _MIN_RTT, _NO_RTT = 152, 148, 0xFFFFFFFF
_ANYBODY = ""  # the holder that it counts to before the tenant is known
_TOO_MANY = {
    outcome.TOO_MANY_CONNECTIONS: "too many connections: retry later, or at another entry",
    outcome.TOO_MANY_CONNECTIONS_OF_CLIENT: "too many connections from your address: close some, or reuse them",
}


class SupportsOptions(Protocol):
    """A socket, of asyncio or uvloop."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """As socket.socket's."""


class LargeBodyQueue:
    """Reads large bodies one per turn of the event loop, so that other requests are served between them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        """Do it in a turn of its own, after those that wait."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._loop.call_soon(self._next)


class ConnectionOwner(Protocol):
    """The listener, as its connections see it. `refused` counts, by reason, what its handler never sees; `slots` bound
    connections, `requests` those under way, each with a share for every tenant; `unproven`: the connections that have
    not authenticated yet."""

    stopping: bool
    is_hop: bool
    cork: Cork
    large_bodies: LargeBodyQueue
    refused: Counter[str]
    slots: SlotLimit | None
    requests: SlotLimit
    unproven: dict[ClientConnection, float]

    def admit(self, connection: ClientConnection, peer: object) -> Outcome | None:
        """Count a new connection; None, or which limit it exceeds. `peer` is its socket address."""

    def forget(self, connection: ClientConnection) -> None:
        """The connection is closed."""


class ClientConnection(asyncio.Protocol):
    """A client's connection: idle, reading a head, or reading a body; one exchange is being answered, others wait for
    their turn. `client`: the key by which its client's connections are counted, "" if they are not; `tenant`: of the
    latest request."""

    __slots__ = (
        "_advancing",
        "_blind",
        "_body",
        "_budget",
        "_certificate",
        "_close_after",
        "_handler",
        "_limits",
        "_listener",
        "_loop",
        "_partial",
        "_reading",
        "_reads_no_more",
        "_request_since",
        "_rtt_taken",
        "_since",
        "_transport",
        "_unsent",
        "_unsent_since",
        "_waiting",
        "_write_paused",
        "answering",
        "client",
        "is_hop",
        "tenant",
    )

    def __init__(
        self, listener: ConnectionOwner, handler: RequestHandler, limits: ClientLimits, budget: ByteBudget
    ) -> None:
        self._listener, self._handler, self._limits, self._budget = listener, handler, limits, budget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.client, self.tenant = "", _ANYBODY
        self.is_hop = listener.is_hop  # whether that is for the tier above
        self._rtt_taken = False
        self._certificate: bytes | None = None  # b"": there is none; None: not looked up yet
        self._since = self._loop.time()  # the last sign of life
        # Reading.
        self._request_since = 0.0
        self._partial = b""  # of a head that is not complete; taken from the budget
        self._reading: Exchange | None = None  # the exchange whose body is being read
        self._body: LengthBody | ChunkedBody | None = None
        self._reads_no_more = False
        # Answering, and ending.
        self.answering: Exchange | None = None
        self._waiting: tuple[Exchange, ...] = ()  # few, and mostly none: an empty deque takes 600 bytes
        self._close_after: Exchange | None = None
        self._advancing = self._write_paused = self._blind = False
        self._unsent, self._unsent_since = 0, 0.0

    @property
    def local_host(self) -> str:
        """See exchange.AnsweringConnection."""
        name = self._transport.get_extra_info("sockname") if self._transport is not None else None
        return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""

    @property
    def certificate(self) -> bytes | None:
        """See exchange.AnsweringConnection."""
        if self._certificate is None and self._transport is not None:
            session = self._transport.get_extra_info("ssl_object")
            self._certificate = b"" if session is None else session.getpeercert(binary_form=True) or b""
        return self._certificate or None

    def client_rtt(self) -> tuple[str, int] | None:
        """See exchange.AnsweringConnection."""
        if self._rtt_taken or self._transport is None:
            return None
        self._rtt_taken = True
        peer, sock = self._transport.get_extra_info("peername"), self._transport.get_extra_info("socket")
        if not isinstance(peer, tuple) or sock is None:
            return None
        rtt_us = handshake_us(sock)
        return (str(peer[0]), rtt_us) if rtt_us is not None else None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but ancestry
        reason = self._listener.admit(self, transport.get_extra_info("peername"))
        if reason is not None:
            self._refuse(answers.refusal(reason, _TOO_MANY[reason], retry_after_s=1.0))

    def connection_lost(self, _exc: Exception | None) -> None:
        """The connection is gone, and with it everybody's answer."""
        self._listener.forget(self)
        self._release_head()
        reading, self._reading = self._reading, None
        if reading is not None:
            self._give_back(reading)
            reading.abandon(outcome.CLIENT_LEFT, 0)
        self._transport = self._close_after = None  # else the two are a cycle for the collector
        answering, self.answering = self.answering, None
        self._abandon_waiting()
        if answering is not None:
            self._give_back(answering)
            if answering.waits:
                answering.abandon(outcome.CLIENT_LEFT, 0)
            if answering.callbacks is not None:
                answering.callbacks.client_left()

    def data_received(self, data: bytes) -> None:
        self._since = self._loop.time()
        heads, whole = 0, data
        while data and not self._reads_no_more:
            if self._reading is not None:
                data = self._read_body(data, self._reading)
            elif heads and (heads == _HEADS_A_TURN or len(whole) - len(data) > _BYTES_A_TURN):
                self._defer_input(data)
                return
            else:
                heads += 1
                try:
                    data = self._read_head(data)
                except head.HeadError as error:
                    self._refuse(answers.refusal(error.outcome, error.detail))
        transport = self._transport
        if len(whole) > _READ_A_TURN and transport is not None and not transport.is_closing():
            transport.pause_reading()
            self._loop.call_soon(self._listen)

    def _listen(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _defer_input(self, data: bytes) -> None:
        """Continue with the rest in another turn of the loop: 64 KiB may hold 2,000 heads, and other clients must be
        served, too."""
        if not self._budget.take(len(data), _ANYBODY):
            self._refuse(_no_buffer())
        elif self._transport is not None:
            self._partial = data
            self._transport.pause_reading()
            self._loop.call_soon(self._read_deferred)

    def _read_deferred(self) -> None:
        data = self._partial
        self._release_head()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(data)

    def eof_received(self) -> bool:
        """The client sends no more. If its request waits for an engine, the client counts as gone: not worth an
        engine's time."""
        if self.answering is not None and self.answering.callbacks is not None:
            self.abort()
        return False

    def pause_writing(self) -> None:
        """The client does not read."""
        self._write_paused, self._unsent = True, -1
        if self.answering is not None and self.answering.callbacks is not None:
            self.answering.callbacks.pause()

    def resume_writing(self) -> None:
        """The client has read what was sent: send more."""
        self._write_paused = False
        if self.answering is not None and self.answering.callbacks is not None:
            self.answering.callbacks.resume()
        self._advance()

    # -- reading; each takes what is here and returns what it leaves

    def _read_head(self, data: bytes) -> bytes:
        seen = len(self._partial)
        if seen:
            data = self._partial + data
        else:
            self._request_since = self._since
        if data.startswith(b"\r\n"):  # RFC 9112 §2.2: some clients end a body with empty lines
            self._release_head()
            start = 2
            while data.startswith(b"\r\n", start):
                start += 2
            return data[start:]
        end = data.find(_END, max(0, seen - 3))
        if (len(data) if end < 0 else end) > self._limits.head_bytes_max:
            most = f"{self._limits.head_bytes_max} bytes"
            raise head.HeadError(outcome.HEAD_TOO_LARGE, f"the request's head is too large: at most {most}")
        if end < 0:
            return self._hold_head(data, seen)
        if seen:
            self._release_head()
        return self._begin(head.read(data[:end], self._limits.headers_max), data[end + 4 :])

    def _hold_head(self, data: bytes, seen: int) -> bytes:
        """Keep an incomplete head, unless it can never become a valid one."""
        if data.count(b"\r\n") > self._limits.headers_max + 1:
            raise head.HeadError(outcome.HEAD_TOO_LARGE, f"too many headers: at most {self._limits.headers_max}")
        if _NEVER.search(data, max(0, seen - 1)) or data[0] in b" \t:":
            raise head.HeadError(outcome.MALFORMED_HTTP, "not HTTP/1.1: lines must end with CR LF and hold text")
        if not self._budget.take(len(data) - seen, _ANYBODY):
            self._refuse(_no_buffer())
            return b""
        self._partial = data
        return b""

    def _begin(self, request_head: head.Head, data: bytes) -> bytes:
        """A head is complete, and `data` follows it: judge it, then read its body or refuse it unread."""
        head_bytes = len(request_head.onward)
        if not self._budget.fits(head_bytes):
            self._refuse(_no_buffer())
            return data
        exchange = self._reading = Exchange(self, request_head)
        try:
            early = self._handler.head(exchange)
        except Exception as error:  # noqa: BLE001 - a bug in the handler must not look like the client's fault
            early = self._bug(error)
        exchange.early = early
        length = request_head.content_length
        expects = request_head.known.get(b"expect")
        # Mostly the body comes with the head: then both are taken, and served, at once.
        is_whole = length is not None and length <= len(data) and length <= self._limits.body_bytes_max
        whole_bytes = length if is_whole and early is None and not expects else None
        held_bytes = head_bytes + (whole_bytes or 0)
        if not self._budget.take(held_bytes, exchange.tenant):
            self._refuse(self._no_room(exchange.tenant))
            return data
        exchange.held_bytes = held_bytes
        if early is None:
            tenant = exchange.tenant
            moved = tenant == self.tenant or self.is_hop or self._move_to(tenant)
            exchange.counted = moved and self._listener.requests.take(1, tenant)
            if not exchange.counted:
                self._refuse(_too_many_requests())
                return data
        if whole_bytes is not None:
            exchange.body_bytes, exchange.body = whole_bytes, data[:whole_bytes]  # all of it is no copy
            self._complete(exchange)
            return data[whole_bytes:]
        if early is not None and (length is None or length > _DRAIN_BYTES_MAX or expects):
            self._refuse(early)
        elif length == 0:
            self._complete(exchange)
        elif length is not None and length > self._limits.body_bytes_max:
            self._refuse(self._too_large())
        else:
            self._body = ChunkedBody(of_request=True) if length is None else LengthBody(length)
            if expects and expects.lower() == b"100-continue" and request_head.http_11 and self._at_rest:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return data

    def _move_to(self, tenant: str) -> bool:
        """Count the connection to another tenant's share from now on. False if that share is used up."""
        slots = self._listener.slots
        if slots is not None and not slots.move(1, self.tenant, tenant):
            return False
        self.tenant = tenant
        self._listener.unproven.pop(self, None)
        return True

    def _read_body(self, data: bytes, exchange: Exchange) -> bytes:
        assert self._body is not None
        fresh: list[bytes] = []
        try:
            rest = self._body.feed(data, fresh)
        except FramingError as error:
            self._refuse(answers.refusal(outcome.MALFORMED_HTTP, str(error)))
            return b""
        if exchange.early is None and fresh:
            piece = fresh[0] if len(fresh) == 1 else b"".join(fresh)
            size = len(piece)
            exchange.body_bytes += size
            if exchange.body_bytes > self._limits.body_bytes_max:
                self._refuse(self._too_large())
                return b""
            if not self._budget.take(size, exchange.tenant):
                self._refuse(self._no_room(exchange.tenant))
                return b""
            exchange.held_bytes += size
            exchange.gather(piece, last=rest is not None)
        if rest is None:
            return b""
        exchange.body = exchange.gathered()
        self._complete(exchange)
        return rest

    def _complete(self, exchange: Exchange) -> None:
        """The request was received completely."""
        self._reading = self._body = None
        if not exchange.head.keep_alive:
            self._end_with(exchange)
        if self.answering is None and not self._waiting and not self._write_paused:
            self._serve(exchange)
        else:
            self._serve_in_turn(exchange)

    def _no_room(self, tenant: str) -> Reply:
        """The buffers are full, or this tenant's share of them."""
        if tenant == _ANYBODY or not self._budget.crowds(tenant):
            return _no_buffer()
        detail = "this tenant's requests fill its share of the balancer's buffers: retry when some are answered"
        return answers.refusal(outcome.TENANT_OVER_SHARE, detail, retry_after_s=1.0)

    def _too_large(self) -> Reply:
        most = self._limits.body_bytes_max
        return answers.refusal(outcome.BODY_TOO_LARGE, f"the body is too large: at most {most} bytes")

    def _refuse(self, reply: Reply) -> None:
        """Answer, in its turn, the request that is being read (or cannot be), and read no more."""
        exchange = self._reading
        if exchange is None:  # the handler has not seen it, and will not count it
            self._listener.refused[reply.outcome.reason] += 1
            exchange = Exchange(self, head.UNREAD)
        self._reading = self._body = None
        exchange.gathered()
        self._release_head()
        self._give_back(exchange)
        if exchange.early is None:
            exchange.abandon(reply.outcome, reply.status)
            exchange.early = reply
        self._end_with(exchange)
        self._serve_in_turn(exchange)

    def _release_head(self) -> None:
        if not self._partial:
            return
        self._budget.give(len(self._partial), _ANYBODY)
        self._partial = b""

    # -- answering, one exchange after another

    @property
    def _at_rest(self) -> bool:
        """Whether nothing is being answered or waits for it."""
        return self.answering is None and not self._waiting

    def _serve_in_turn(self, exchange: Exchange) -> None:
        """Serve the exchange now, or in its turn."""
        if self.answering is None and not self._waiting and not self._write_paused:
            self._serve(exchange)
            return
        self._waiting += (exchange,)
        held_bytes = sum(waiting.held_bytes for waiting in self._waiting)
        if len(self._waiting) >= self._limits.pipelined_max or held_bytes >= self._limits.body_bytes_max:
            # What came beyond is dropped with the connection: a client asks again for what got no answer
            # (RFC 9112 §9.3.2).
            self._end_with(exchange)

    def _end_with(self, exchange: Exchange) -> None:
        """Read nothing after this exchange, and close the connection with it."""
        self._close_after, self._reads_no_more = exchange, True

    def _serve_large(self, exchange: Exchange) -> None:
        """Now a large body may be parsed."""
        if self.answering is not exchange:
            return  # its client left meanwhile
        exchange.waits = False
        # What reading takes beside the body, at most: texts at four bytes a character, and the chain's copy of them.
        reading_bytes = _READING_FACTOR * len(exchange.body)
        if not self._budget.take(reading_bytes, exchange.tenant):
            refused = _no_buffer()
            exchange.abandon(refused.outcome, refused.status)
            exchange.reply(refused)
            return
        try:
            self._serve(exchange, now=True)
        finally:
            self._budget.give(reading_bytes, exchange.tenant)

    def _serve(self, exchange: Exchange, *, now: bool = False) -> None:
        """Have the handler read the request: a large one in its turn, unless that is `now`."""
        self.answering = exchange
        if exchange.early is not None:
            exchange.reply(exchange.early)
            return
        if not now and len(exchange.body) > _LARGE_BYTES:
            exchange.waits = True
            self._listener.large_bodies.add(partial(self._serve_large, exchange))
            return
        try:
            self._handler.arrived(exchange)
        except Exception as error:  # noqa: BLE001 - one request's bug must not take its neighbours', nor leave it unanswered
            reply = self._bug(error)
            if exchange.callbacks is not None:
                exchange.callbacks.client_left()
            if not exchange.started:
                exchange.reply(reply)
            elif self.answering is exchange:
                self.abort()

    def _advance(self) -> None:
        """Serve the exchanges that wait. A loop, not a recursion: an answer given at once comes back here from
        within."""
        if self._advancing:
            return
        self._advancing = True
        while self._waiting and self.answering is None and not self._write_paused and self._transport is not None:
            first, *others = self._waiting
            self._waiting = tuple(others)
            self._serve(first)
        self._advancing = False

    def _give_back(self, exchange: Exchange) -> None:
        """Return to the budget what the exchange held, and its place among the requests under way."""
        self._budget.give(exchange.held_bytes, exchange.tenant)
        exchange.held_bytes = 0
        if exchange.counted:
            exchange.counted = False
            self._listener.requests.give(1, exchange.tenant)

    def _bug(self, error: Exception) -> Reply:
        """The handler raised an exception: log it, and answer the client with an error."""
        self._loop.call_exception_handler({"message": "a listener's handler failed", "exception": error})
        return answers.refusal(outcome.INTERNAL, "the balancer failed on this request; it is logged")

    # -- for exchanges

    @property
    def unsent_bytes(self) -> int:
        """Bytes written to the client that are still in the send buffer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send bytes to the client, unless it has disconnected."""
        if self._transport is not None:
            self._listener.cork.write(self._transport, data)

    def chunk(self, data: bytes) -> None:
        """Send a piece of a stream to the client, if it is there."""
        if self._transport is not None:
            self._listener.cork.write(self._transport, data, CROWD)

    def give_way(self) -> None:
        """Break the connection and stop counting it at once: another client has come, and there is no room."""
        self._listener.refused[outcome.TOO_MANY_CONNECTIONS.reason] += 1
        self._listener.forget(self)
        self.abort()

    def abort(self) -> None:
        """Break the connection in a way that the client notices."""
        if self._transport is not None:
            self._transport.abort()

    def keeps(self, exchange: Exchange) -> bool:
        """Whether the connection outlives this exchange; asked when its answer begins. If not, the answer says so.

        If it did not, the client may have sent its next request already: then that one's answer says so.
        """
        draining = self._listener.stopping and not self._waiting
        if exchange.head.keep_alive and self._close_after is not exchange and not draining:
            return True
        self._close_after = exchange
        return False

    def close_after(self, exchange: Exchange) -> None:
        """Close once this exchange is answered: the end of the connection is the end of its body."""
        self._close_after = exchange

    def over(self, exchange: Exchange) -> None:
        """The exchange is completely answered: release what it held, and serve the next one, or close."""
        if self.answering is not exchange:
            return
        self.answering = None
        self._give_back(exchange)
        if self._transport is None:
            return
        self._since = self._loop.time()
        if self._close_after is exchange:
            self._linger()
        elif self._waiting:
            self._advance()

    def release_body(self, exchange: Exchange) -> None:
        """Release the memory of the exchange's body to the budget."""
        body_bytes = exchange.held_bytes - len(exchange.head.onward)
        if body_bytes > 0:
            self._budget.give(body_bytes, exchange.tenant)
            exchange.held_bytes -= body_bytes

    # -- ending

    def check(self, now: float, rest_s: float) -> None:
        """Apply the time limits; called by the listener's sweep. `rest_s` is how long a connection may be idle, `now`
        the loop's time."""
        limits = self._limits
        if self._check_sending(now):
            return
        quiet_s, reading_s = now - self._since, now - self._request_since
        if self._reading is None and not self._partial:
            if self._at_rest and quiet_s >= rest_s:
                self._close()
        elif self._reading is None:
            if reading_s > limits.head_s:
                self._too_slow(f"the head did not arrive within {limits.head_s:g} s")
        elif quiet_s > limits.body_s:
            self._too_slow(f"the body paused for more than {limits.body_s:g} s")
        elif self._reading.body_bytes < limits.upload_bytes_per_s_min * (reading_s - limits.head_s):
            self._too_slow(f"the body came at less than {limits.upload_bytes_per_s_min} bytes a second")
        elif reading_s > limits.upload_s:
            self._too_slow(f"the request did not arrive within {limits.upload_s:g} s")

    def _too_slow(self, detail: str) -> None:
        self._refuse(answers.refusal(outcome.REQUEST_TIMEOUT, detail))

    def _check_sending(self, now: float) -> bool:
        """Bound how long the client takes to read its answer, and then to close. False if neither is going on."""
        limits, transport = self._limits, self._transport
        if transport is None:
            return True
        if unsent := transport.get_write_buffer_size():
            self._since = now  # lingering and idleness begin when all is sent
            if self._reads_no_more:
                self._request_since = now
            if unsent != self._unsent:
                self._unsent, self._unsent_since = unsent, now
            elif now - self._unsent_since > limits.send_s:
                self.abort()  # it takes nothing of its answer, and holds an engine's slot
            return True
        linger_s = limits.send_s if self._blind else limits.linger_s
        too_long = now - self._since > linger_s or now - self._request_since > limits.upload_s
        if self._reads_no_more and self._at_rest and too_long:
            self.abort()
        return self._reads_no_more

    def expel(self) -> None:
        """The drain time is over: what is being read or answered ends now with a notice to the client, exchanges that
        wait for their turn are refused, and the connection ends."""
        reply = answers.stopping()
        if self._reading is not None or self._partial:
            self._refuse(reply)
        self._reads_no_more = True
        for waiting in self._waiting:
            if waiting.early is None:
                waiting.abandon(reply.outcome, reply.status)
                waiting.early = reply
        answering = self.answering
        if answering is None and not self._waiting:
            self._close()
            return
        self._close_after = self._waiting[-1] if self._waiting else answering
        if answering is not None and answering.callbacks is not None:
            answering.callbacks.stopped()
        elif answering is not None and not answering.started:
            answering.reply(reply)

    def _linger(self) -> None:
        """Half-close, and drop what still arrives, so that a reset does not destroy the answer."""
        self._reads_no_more, self._request_since = True, self._loop.time()
        self._abandon_waiting()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._listener.cork.flush()  # the last word
        if transport.can_write_eof():
            transport.write_eof()
        else:
            self._blind = True  # through TLS: what the system still has to send cannot be seen
            transport.close()

    def _close(self) -> None:
        """Close an idle connection, unless its next request has arrived already and was only not read yet."""
        transport = self._transport
        if transport is not None and not _unread_bytes(transport):
            self._reads_no_more = True
            self._since = self._request_since = self._loop.time()
            self._listener.cork.flush()
            transport.close()

    def _abandon_waiting(self) -> None:
        waiting, self._waiting = self._waiting, ()
        for exchange in waiting:
            self._give_back(exchange)
            exchange.abandon(outcome.CLIENT_LEFT, 0)


def handshake_us(sock: SupportsOptions) -> int | None:
    """The least round trip of a TCP connection so far, microseconds: on a new one that of its handshake. None where the
    system does not say. 1 µs on asyncio, 2.5 on uvloop (TCP_INFO, one call)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None  # a kernel before 4.6
    least: int = struct.unpack_from("=I", info, _MIN_RTT)[0]
    return least if 0 < least < _NO_RTT else None


def _too_many_requests() -> Reply:
    detail = "too many requests of this tenant are under way here: retry when some are answered"
    return answers.refusal(outcome.TENANT_OVER_SHARE, detail, retry_after_s=1.0)


def _no_buffer() -> Reply:
    return answers.refusal(outcome.NO_BUFFER, "this balancer's buffers are full: retry shortly", retry_after_s=1.0)


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What the kernel has for us. To close over it would be to lose a request, with a reset for an answer."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return 0
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
