"""The client's side: one connection, one request after another, each an Exchange.

An Exchange is read whole within limits, handed to a Gate, and answered once. Invariants: answers leave in the order of
requests; every byte buffered is taken from the process's one budget and given back when the exchange is over; after a
head that cannot be trusted the connection is closed. Never decides anything about routing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, cast

import httptools
import msgspec

from farhop.balance import outcome
from farhop.relay import answers, head

if TYPE_CHECKING:
    from farhop.balance.limits import ByteBudget
    from farhop.balance.outcome import Outcome
    from farhop.relay.answers import Reply
    from farhop.relay.head import Head


class InboundLimits(msgspec.Struct, frozen=True):
    """What a client may do. Bytes and seconds; `body_s` is the pause between two segments of a body."""

    head_bytes_max: int = 32 * 1024
    headers_max: int = 100
    body_bytes_max: int = 16 * 1024 * 1024
    connections_max: int = 20_000
    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 30.0
    linger_s: float = 2.0


class Journey(Protocol):
    """What the relay keeps for a request under way, as this side sees it."""

    def client_left(self) -> None:
        """The client is gone."""

    def pause(self) -> None:
        """The client reads slower than the upstream writes."""

    def resume(self) -> None:
        """The client caught up."""


class Gate(Protocol):
    """What a listener asks of its tier."""

    def head(self, exchange: Exchange) -> Reply | None:
        """Identity, path and entry law, before the body is read. A Reply refuses."""

    def arrived(self, exchange: Exchange) -> None:
        """The whole request is here: reply to it or start its journey."""


# A refused body up to this size is read and dropped, so that the connection stays of use.
_DRAIN_BYTES_MAX = 64 * 1024


class Exchange:
    """One request and its one answer. `context` belongs to the gate."""

    __slots__ = (
        "_chunked",
        "_inbound",
        "body",
        "body_bytes",
        "context",
        "early",
        "head",
        "journey",
        "parts",
        "started",
    )

    def __init__(self, inbound: Inbound, request_head: Head) -> None:
        self._inbound = inbound
        self.head = request_head
        self.parts: list[bytes] = []
        self.body = b""
        self.body_bytes = 0
        self.early: Reply | None = None
        self.context: Any = None
        self.journey: Journey | None = None
        self.started = False
        self._chunked = False

    @property
    def is_hop(self) -> bool:
        """Whether the tier above asks, who understands refusals and broken streams."""
        return self._inbound.is_hop

    def reply(self, reply: Reply) -> None:
        """Answer whole from here."""
        close = b"" if self._inbound.keeps(self) else b"connection: close\r\n"
        self.started = True
        self._inbound.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (answers.status_line(reply.status), reply.content_type, len(reply.body), close, reply.extra, reply.body)
        )
        self._inbound.over(self)

    def begin(self, status: int, headers: bytes, length: int | None, first: bytes) -> None:
        """Send an answer's head and the first of its body in one write. `length` None: framing is chunked."""
        self.started = True
        pieces = [answers.status_line(status), headers]
        if not self._inbound.keeps(self):
            pieces.append(b"connection: close\r\n")
        if length is not None:
            pieces.append(b"content-length: %d\r\n" % length)
        elif self.head.http_11:
            self._chunked = True
            pieces.append(b"transfer-encoding: chunked\r\n")
        else:
            self._inbound.close_after(self)
        pieces.append(b"\r\n")
        if first:
            pieces.append(b"%x\r\n%b\r\n" % (len(first), first) if self._chunked else first)
        self._inbound.write(b"".join(pieces))

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        self._inbound.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        """The answer is whole."""
        if self._chunked:
            self._inbound.write(b"0\r\n\r\n")
        self._inbound.over(self)

    def break_off(self, event: bytes | None) -> None:
        """The answer cannot be completed. With an event the stream ends cleanly; without, it visibly breaks."""
        if event is not None and self._chunked:
            self.write(event)
            self._inbound.close_after(self)
            self.finish()
        else:
            self._inbound.abort()


class Inbound(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_active",
        "_budget",
        "_close_after",
        "_gate",
        "_head_bytes",
        "_headers",
        "_limits",
        "_listener",
        "_loop",
        "_parser",
        "_reading",
        "_since",
        "_state",
        "_target",
        "_transport",
        "_waiting",
    )

    def __init__(self, listener: ConnectionSet, gate: Gate, limits: InboundLimits, budget: ByteBudget) -> None:
        self._listener, self._gate, self._limits, self._budget = listener, gate, limits, budget
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._state = _IDLE
        self._since = self._loop.time()
        self._headers: head.Headers = []
        self._head_bytes = 0
        self._target = b""
        self._reading: Exchange | None = None
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._close_after: Exchange | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but ancestry
        if not self._listener.admit(self):
            self._refuse(outcome.TOO_MANY_CONNECTIONS, "too many connections: retry later, or at another entry")

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._listener.forget(self)
        for exchange in (self._reading, self._active, *self._waiting):
            if exchange is not None:
                self._give_back(exchange)
        active, self._active, self._reading = self._active, None, None
        self._waiting.clear()
        if active is not None and active.journey is not None:
            active.journey.client_left()

    def data_received(self, data: bytes) -> None:
        if self._state is _CLOSING:
            return
        self._since = self._loop.time()
        if self._state is _IDLE:
            self._state = _HEAD
        if self._state is _HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(outcome.MALFORMED_HTTP, "upgrading the protocol is not supported: send plain HTTP/1.1")
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, head.HeadError):
                self._refuse(error.__context__.outcome, error.__context__.detail)
            else:
                self._refuse(outcome.MALFORMED_HTTP, f"not HTTP/1.1: {error}")
        else:
            if self._state is _HEAD and self._head_bytes > self._limits.head_bytes_max:
                self._refuse_head_size()

    def eof_received(self) -> bool:
        return False  # a client that stops sending has left: the transport closes

    def pause_writing(self) -> None:
        if self._active is not None and self._active.journey is not None:
            self._active.journey.pause()

    def resume_writing(self) -> None:
        if self._active is not None and self._active.journey is not None:
            self._active.journey.resume()

    # -- httptools

    def on_message_begin(self) -> None:
        self._headers, self._target = [], b""
        self._state = _HEAD

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        size = len(self._target) + sum(len(n) + len(v) + 4 for n, v in self._headers)
        if size > self._limits.head_bytes_max or len(self._headers) > self._limits.headers_max:
            most = f"{self._limits.head_bytes_max} bytes, {self._limits.headers_max} headers"
            raise head.HeadError(outcome.HEAD_TOO_LARGE, f"the request's head is too large: at most {most}")
        parser = self._parser
        request_head = head.read(
            parser.get_method(), self._target, parser.get_http_version(), self._headers, parser.should_keep_alive()
        )
        self._state, self._head_bytes = _BODY, 0
        exchange = self._reading = Exchange(self, request_head)
        length = request_head.content_length
        if length is not None and length > self._limits.body_bytes_max:
            exchange.early = self._too_large()
        else:
            exchange.early = self._gate.head(exchange)
        if exchange.early is not None:
            if length is None or length > _DRAIN_BYTES_MAX or request_head.get(b"expect"):
                self._close_after = exchange
                self._whole(exchange)
                self._state = _CLOSING
        elif request_head.get(b"expect") == b"100-continue" and self._active is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        exchange = self._reading
        if exchange is None or exchange.early is not None:
            return
        size = len(body)
        if exchange.body_bytes + size > self._limits.body_bytes_max:
            self._cut_short(exchange, self._too_large())
        elif not self._budget.take(size):
            detail = "this balancer's buffers are full: retry shortly"
            self._cut_short(exchange, answers.refusal(outcome.NO_BUFFER, detail, retry_after_s=1.0))
        else:
            exchange.parts.append(body)
            exchange.body_bytes += size

    def on_message_complete(self) -> None:
        exchange = self._reading
        if exchange is None or self._state is _CLOSING:
            return
        self._state = _IDLE
        exchange.body = exchange.parts[0] if len(exchange.parts) == 1 else b"".join(exchange.parts)
        exchange.parts.clear()
        self._whole(exchange)

    # -- one exchange after another

    def _whole(self, exchange: Exchange) -> None:
        self._reading = None
        if self._active is None:
            self._serve(exchange)
        else:
            # Pipelined: its turn comes. Reading stops, so at most one segment's worth of requests waits here.
            self._waiting.append(exchange)
            if self._transport is not None:
                self._transport.pause_reading()

    def _serve(self, exchange: Exchange) -> None:
        self._active = exchange
        if exchange.early is not None:
            exchange.reply(exchange.early)
        else:
            self._gate.arrived(exchange)

    def over(self, exchange: Exchange) -> None:
        """The exchange has its whole answer: give back what it held and serve the next, or close."""
        if self._active is not exchange:
            return
        self._active = None
        self._give_back(exchange)
        if self._transport is None:
            return
        if not self.keeps(exchange):
            self._linger()
        elif self._waiting:
            self._serve(self._waiting.popleft())
            if not self._waiting and self._transport is not None:
                self._transport.resume_reading()

    @property
    def is_hop(self) -> bool:
        """Whether the listener is for the tier above."""
        return self._listener.is_hop

    def keeps(self, exchange: Exchange) -> bool:
        """Whether the connection outlives this exchange."""
        return exchange.head.keep_alive and self._close_after is not exchange and not self._listener.stopping

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

    def check(self, now: float) -> None:
        """Apply the time limits; called by the listener's sweep. `now` is the loop's time."""
        limits, waited_s = self._limits, now - self._since
        if self._state is _CLOSING:
            if waited_s > limits.linger_s:
                self.abort()
        elif self._state is _HEAD and waited_s > limits.head_s:
            self._refuse(outcome.REQUEST_TIMEOUT, f"the head did not arrive within {limits.head_s:g} s")
        elif self._state is _BODY and waited_s > limits.body_s:
            self._refuse(outcome.REQUEST_TIMEOUT, f"the body paused for more than {limits.body_s:g} s")
        elif self._state is _IDLE and self._active is None and waited_s > limits.idle_s:
            self.close_if_idle()

    def close_if_idle(self) -> None:
        """Close unless a request is being read or served."""
        if self._transport is not None and self._active is None and self._state is _IDLE:
            self._transport.close()

    def _give_back(self, exchange: Exchange) -> None:
        self._budget.give(exchange.body_bytes)
        exchange.body_bytes = 0

    def _too_large(self) -> Reply:
        most = self._limits.body_bytes_max
        return answers.refusal(outcome.BODY_TOO_LARGE, f"the body is too large: at most {most} bytes")

    def _cut_short(self, exchange: Exchange, reply: Reply) -> None:
        exchange.early = reply
        exchange.parts.clear()
        self._close_after = exchange
        self._whole(exchange)
        self._state = _CLOSING

    def _refuse_head_size(self) -> None:
        most = self._limits.head_bytes_max
        self._refuse(outcome.HEAD_TOO_LARGE, f"the request's head is too large: at most {most} bytes")

    def _refuse(self, reason: Outcome, detail: str) -> None:
        """Answer without an exchange and close: what follows on this connection cannot be understood."""
        self._state = _CLOSING
        if self._active is not None:
            # An answer is under way; a second one in its midst would be taken for its body.
            self._close_after = self._active
            return
        reply = answers.refusal(reason, detail)
        self.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b"
            % (answers.status_line(reply.status), len(reply.body), reply.extra, reply.body)
        )
        self._linger()

    def _linger(self) -> None:
        """Half-close and drop what still comes, so that the answer is not destroyed by a reset."""
        self._state, self._since = _CLOSING, self._loop.time()
        if self._transport is not None:
            if self._transport.can_write_eof() and not self._transport.is_closing():
                self._transport.write_eof()
            else:
                self._transport.close()


class ConnectionSet(Protocol):
    """The listener, as its connections see it."""

    stopping: bool
    is_hop: bool

    def admit(self, connection: Inbound) -> bool:
        """Count a new connection in; False if there are too many."""

    def forget(self, connection: Inbound) -> None:
        """The connection is gone."""


_IDLE, _HEAD, _BODY, _CLOSING = "idle", "head", "body", "closing"
