"""The client's side: one connection, one request after another, each an Exchange.

An Exchange is read whole within limits, handed to a Gate, and answered once. Invariants: answers leave in the order of
requests, and none is begun while the client does not read the last; every byte held is taken from the process's one
budget and given back when its exchange is over; after a head that cannot be trusted nothing more is read. Never decides
anything about routing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

import httptools
import msgspec

from farhop.balance import outcome
from farhop.relay import answers, head
from farhop.relay.exchange import Exchange as Exchange

if TYPE_CHECKING:
    from farhop.balance.limits import ByteBudget
    from farhop.relay.answers import Reply


class InboundLimits(msgspec.Struct, frozen=True):
    """What a client may do. Bytes, counts and seconds.

    `body_s` is the pause between two segments of a body, `request_s` the whole request's, `send_s` how long a client may
    take nothing of its answer, `linger_s` how long it may take to close after its last one.
    """

    head_bytes_max: int = 32 * 1024
    headers_max: int = 100
    body_bytes_max: int = 16 * 1024 * 1024
    connections_max: int = 20_000
    pipelined_max: int = 32
    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 30.0
    request_s: float = 300.0
    send_s: float = 60.0
    linger_s: float = 2.0


class Gate(Protocol):
    """What a listener asks of its tier."""

    def head(self, exchange: Exchange) -> Reply | None:
        """Identity, path and entry law, before the body is read. A Reply refuses."""

    def arrived(self, exchange: Exchange) -> None:
        """The whole request is here: reply to it or start its journey."""


# A refused body up to this size is read and dropped, so that the connection stays of use.
_DRAIN_BYTES_MAX = 64 * 1024
# One byte per chunk costs 5 bytes of framing ("1\r\n" and "\r\n"); more than this per byte is not a body but an attack.
_FRAMING_BYTES_PER_BODY_BYTE_MAX = 8


class _StopReadingError(Exception):
    """Raised into the parser when the rest of a segment is of no interest."""


class Inbound(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_active",
        "_advancing",
        "_budget",
        "_close_after",
        "_framing_bytes",
        "_gate",
        "_head_bytes",
        "_head_held_bytes",
        "_headers",
        "_limits",
        "_listener",
        "_loop",
        "_parser",
        "_pipelined",
        "_quiet_bytes",
        "_reading",
        "_reading_paused",
        "_request_since",
        "_seen_body_bytes",
        "_since",
        "_state",
        "_target",
        "_transport",
        "_unsent",
        "_unsent_since",
        "_waiting",
        "_write_paused",
    )

    def __init__(self, listener: ConnectionSet, gate: Gate, limits: InboundLimits, budget: ByteBudget) -> None:
        self._listener, self._gate, self._limits, self._budget = listener, gate, limits, budget
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._state = _IDLE
        self._since = self._request_since = self._loop.time()
        self._headers: head.Headers = []
        self._head_bytes = self._head_held_bytes = 0
        self._framing_bytes = self._quiet_bytes = self._seen_body_bytes = 0
        self._target = b""
        self._pipelined = self._advancing = self._write_paused = self._reading_paused = False
        self._unsent, self._unsent_since = 0, 0.0
        self._reading: Exchange | None = None
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._close_after: Exchange | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._listener.admit(self):
            detail = "too many connections: retry later, or at another entry"
            self._refuse(answers.refusal(outcome.TOO_MANY_CONNECTIONS, detail, retry_after_s=1.0))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._listener.forget(self)
        self._budget.give(self._head_held_bytes)
        self._head_held_bytes = 0
        active, self._active = self._active, None
        unserved = (*self._waiting, *([self._reading] if self._reading is not None else ()))
        self._waiting.clear()
        self._reading = None
        self._abandon(*unserved)
        if active is not None:
            self._give_back(active)
            if active.journey is not None:
                active.journey.client_left()

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is _CLOSING:
            return
        self._since = self._loop.time()
        if state is _IDLE:
            self._state, self._request_since, self._head_bytes = _HEAD, self._since, len(data)
        elif state is _HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._state is not _CLOSING:
                self._untrusted(error)
            return
        if self._state is _HEAD:
            self._hold_head(len(data))
        elif self._state is _CHUNKS:
            self._bound_framing(len(data))

    def eof_received(self) -> bool:
        if self._active is not None and self._active.journey is not None:
            self.abort()  # a client that stops sending has left: what it does not wait for is not worth an engine's time
        return False

    def pause_writing(self) -> None:
        self._write_paused, self._unsent = True, -1
        if self._active is not None and self._active.journey is not None:
            self._active.journey.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._active is not None and self._active.journey is not None:
            self._active.journey.resume()
        self._advance()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._state is _CLOSING:
            raise _StopReadingError
        self._headers, self._target = [], b""
        if self._state is _IDLE:  # in the midst of a segment: its bytes are not all this head's
            self._state, self._request_since, self._head_bytes, self._pipelined = _HEAD, self._since, 0, True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        if len(self._headers) > self._limits.headers_max:  # a body's trailers come here too, and count
            raise self._head_too_large()

    def on_headers_complete(self) -> None:
        parser = self._parser
        self._budget.give(self._head_held_bytes)
        self._head_held_bytes = 0
        # What came since the head began bounds it, mostly; only if that is too much it is measured.
        if self._pipelined or self._head_bytes > self._limits.head_bytes_max:
            self._measure_head()
        if parser.should_upgrade():
            raise head.HeadError(outcome.MALFORMED_HTTP, "the protocol cannot be upgraded: send plain HTTP/1.1")
        request_head = head.read(
            parser.get_method(), self._target, parser.get_http_version(), self._headers, parser.should_keep_alive()
        )
        exchange = self._reading = Exchange(self, request_head)
        length = request_head.content_length
        self._state = _CHUNKS if length is None else _BODY
        self._framing_bytes = self._quiet_bytes = self._seen_body_bytes = 0
        exchange.early = self._judge(exchange)
        expects = request_head.get(b"expect")
        if exchange.early is not None:
            if length is None or length > _DRAIN_BYTES_MAX or expects:
                self._refuse(exchange.early)
        elif length is not None and length > self._limits.body_bytes_max:
            self._refuse(self._too_large())
        elif expects and expects.lower() == b"100-continue" and request_head.http_11 and self._active is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        exchange = self._reading
        if exchange is None or exchange.early is not None:
            return
        size = len(body)
        if exchange.body_bytes + size > self._limits.body_bytes_max:
            self._refuse(self._too_large())
        elif not self._budget.take(size):
            self._refuse(_no_buffer())
        else:
            exchange.parts.append(body)
            exchange.body_bytes += size
            exchange.held_bytes += size

    def on_message_complete(self) -> None:
        exchange = self._reading
        if exchange is None:
            return
        self._reading, self._pipelined = None, False
        self._state = _IDLE if exchange.head.keep_alive else _CLOSING
        exchange.body = exchange.parts[0] if len(exchange.parts) == 1 else b"".join(exchange.parts)
        exchange.parts.clear()
        self._whole(exchange)

    # -- bounds on what is read

    def _judge(self, exchange: Exchange) -> Reply | None:
        size = len(exchange.head.onward)
        if not self._budget.take(size):
            return _no_buffer()
        exchange.held_bytes = size
        try:
            return self._gate.head(exchange)
        except Exception as error:  # noqa: BLE001 - a bug in the gate must not look like the client's fault
            return self._bug(error)

    def _hold_head(self, size: int) -> None:
        """A head that is not complete yet is held by the parser."""
        if self._head_bytes > self._limits.head_bytes_max:
            self._refuse(_reply_to(self._head_too_large()))
        elif not self._budget.take(size):
            self._refuse(_no_buffer())
        else:
            self._head_held_bytes += size

    def _measure_head(self) -> None:
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._limits.head_bytes_max:
            raise self._head_too_large()

    def _bound_framing(self, size: int) -> None:
        """The parser bounds neither chunk extensions nor trailers: too much framing for so little body is refused."""
        exchange = self._reading
        if exchange is None:
            return
        self._framing_bytes += size
        if exchange.body_bytes == self._seen_body_bytes:
            self._quiet_bytes += size
        else:
            self._seen_body_bytes, self._quiet_bytes = exchange.body_bytes, 0
        slack = self._limits.head_bytes_max
        most = slack + _FRAMING_BYTES_PER_BODY_BYTE_MAX * exchange.body_bytes
        if self._quiet_bytes > slack or self._framing_bytes > most:
            self._refuse(answers.refusal(outcome.MALFORMED_HTTP, "too many chunk extensions or trailers for the body"))

    def _head_too_large(self) -> head.HeadError:
        most = f"{self._limits.head_bytes_max} bytes, {self._limits.headers_max} headers"
        return head.HeadError(outcome.HEAD_TOO_LARGE, f"the request's head is too large: at most {most}")

    def _too_large(self) -> Reply:
        most = self._limits.body_bytes_max
        return answers.refusal(outcome.BODY_TOO_LARGE, f"the body is too large: at most {most} bytes")

    # -- one exchange after another

    def _whole(self, exchange: Exchange) -> None:
        """Serve the exchange now, or in its turn. While others wait nothing more is read."""
        if self._active is None and not self._waiting and not self._write_paused:
            self._serve(exchange)
            return
        self._waiting.append(exchange)
        if len(self._waiting) >= self._limits.pipelined_max:
            # What it sent beyond is dropped with the connection: it asks again for what got no answer (RFC 9112 §9.3.2).
            self._close_after, self._state = exchange, _CLOSING
        if self._transport is not None and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _serve(self, exchange: Exchange) -> None:
        self._active = exchange
        if exchange.early is not None:
            exchange.reply(exchange.early)
            return
        try:
            self._gate.arrived(exchange)
        except Exception as error:  # noqa: BLE001 - one request's bug must not take its neighbours', nor leave it unanswered
            reply = self._bug(error)
            if exchange.journey is not None:
                exchange.journey.client_left()
            if not exchange.started:
                exchange.reply(reply)
            elif exchange.is_open:
                self.abort()

    def over(self, exchange: Exchange) -> None:
        """The exchange has its whole answer: give back what it held and serve the next, or close."""
        if self._active is not exchange:
            return
        self._active = None
        self._give_back(exchange)
        if self._transport is None:
            return
        if self.keeps(exchange):
            self._since = self._loop.time()
            if self._waiting:
                self._advance()
        else:
            self._linger()

    def _advance(self) -> None:
        """Serve those who wait. A loop, not a recursion: answers that come from here end before `_serve` returns."""
        if self._advancing:
            return
        self._advancing = True
        while self._waiting and self._active is None and not self._write_paused and self._transport is not None:
            self._serve(self._waiting.popleft())
        self._advancing = False
        if not self._waiting:
            self._read_on()

    def _read_on(self) -> None:
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._since = self._request_since = self._loop.time()  # the pause was ours, not the client's
            self._transport.resume_reading()

    @property
    def is_hop(self) -> bool:
        """Whether the listener is for the tier above."""
        return self._listener.is_hop

    def serves(self, exchange: Exchange) -> bool:
        """Whether the exchange is the one being answered."""
        return self._active is exchange

    def keeps(self, exchange: Exchange) -> bool:
        """Whether the connection outlives this exchange. Once it does not, it stays so: the client is told."""
        draining = self._listener.stopping and not self._waiting
        if exchange.head.keep_alive and self._close_after is not exchange and not draining:
            return True
        self._close_after = exchange
        return False

    def close_after(self, exchange: Exchange) -> None:
        """Close once this exchange is answered."""
        self._close_after = exchange

    def write(self, data: bytes) -> None:
        """Send bytes to the client, if it is there."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Break the connection so that the client notices."""
        if self._transport is not None:
            self._transport.abort()

    # -- upkeep, by the listener's sweep

    def check(self, now: float) -> None:
        """Apply the time limits. `now` is the loop's time."""
        if self._transport is None:
            return
        limits, state = self._limits, self._state
        if unsent := self._transport.get_write_buffer_size():
            self._check_sending(unsent, now)
        elif state is _CLOSING:
            if self._active is None and now - self._since > limits.linger_s:
                self.abort()
        elif self._reading_paused:
            return
        elif state is _HEAD and now - self._request_since > limits.head_s:
            self._too_slow(f"the head did not arrive within {limits.head_s:g} s")
        elif state is _IDLE:
            if self._active is None and now - self._since > limits.idle_s:
                self._transport.close()
        elif state is not _HEAD and now - self._since > limits.body_s:
            self._too_slow(f"the body paused for more than {limits.body_s:g} s")
        elif state is not _HEAD and now - self._request_since > limits.request_s:
            self._too_slow(f"the request did not arrive within {limits.request_s:g} s")

    def _check_sending(self, unsent: int, now: float) -> None:
        """A client that takes nothing of its answer holds an engine's slot: bounded."""
        self._since = now  # lingering and idleness begin when all is sent
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since > self._limits.send_s:
            self.abort()

    def close_if_idle(self) -> None:
        """Close unless a request is being read or served."""
        if self._transport is not None and self._active is None and self._state is _IDLE and not self._waiting:
            self._transport.close()

    # -- endings

    def _too_slow(self, detail: str) -> None:
        self._refuse(answers.refusal(outcome.REQUEST_TIMEOUT, detail))

    def _untrusted(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, head.HeadError):
            self._refuse(_reply_to(cause))
        elif isinstance(cause, Exception):
            self._refuse(self._bug(cause))
        else:
            self._refuse(answers.refusal(outcome.MALFORMED_HTTP, f"not HTTP/1.1: {error}"))

    def _refuse(self, reply: Reply) -> None:
        """Answer, in its turn, what is being read (or cannot be), and read no more."""
        exchange = self._reading
        if exchange is None:
            exchange = Exchange(self, head.UNREAD)
        self._reading = None
        exchange.parts.clear()
        self._give_back(exchange)
        if exchange.early is None:
            exchange.abandon(reply.outcome, reply.status)
            exchange.early = reply
        self._budget.give(self._head_held_bytes)
        self._head_held_bytes = 0
        self._close_after, self._state = exchange, _CLOSING
        self._whole(exchange)

    def _linger(self) -> None:
        """Half-close and drop what still comes, so that the answer is not destroyed by a reset."""
        self._state, self._since = _CLOSING, self._loop.time()
        waiting = tuple(self._waiting)
        self._waiting.clear()
        self._abandon(*waiting)
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
            self._read_on()
        else:
            transport.close()

    def _abandon(self, *exchanges: Exchange) -> None:
        for exchange in exchanges:
            self._give_back(exchange)
            if exchange.early is None:
                exchange.abandon(outcome.CLIENT_LEFT, 0)

    def _give_back(self, exchange: Exchange) -> None:
        self._budget.give(exchange.held_bytes)
        exchange.held_bytes = 0

    def _bug(self, error: Exception) -> Reply:
        self._loop.call_exception_handler({"message": "a listener's gate failed", "exception": error, "protocol": self})
        return answers.refusal(outcome.INTERNAL, "the balancer failed on this request; it is logged")


def _reply_to(error: head.HeadError) -> Reply:
    return answers.refusal(error.outcome, error.detail)


def _no_buffer() -> Reply:
    return answers.refusal(outcome.NO_BUFFER, "this balancer's buffers are full: retry shortly", retry_after_s=1.0)


class ConnectionSet(Protocol):
    """The listener, as its connections see it."""

    stopping: bool
    is_hop: bool

    def admit(self, connection: Inbound) -> bool:
        """Count a new connection in; False if there are too many."""

    def forget(self, connection: Inbound) -> None:
        """The connection is gone."""


_IDLE, _HEAD, _BODY, _CHUNKS, _CLOSING = "idle", "head", "body", "chunks", "closing"
