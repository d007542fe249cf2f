"""The client's side: one connection, read within limits into one Exchange after another.

Invariants: every byte held is taken from the process's one budget and given back when its exchange is over; every wait
for the client is bounded; after a head that cannot be trusted nothing more is read. Never decides anything about
routing, nor the order of answers: that is `Turns`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import httptools
import msgspec

from farhop.balance import outcome
from farhop.relay import answers, head
from farhop.relay.exchange import Exchange
from farhop.relay.turns import Gate, Port, Turns

if TYPE_CHECKING:
    from farhop.balance.limits import ByteBudget
    from farhop.relay.answers import Reply

__all__ = ["Exchange", "Gate", "Inbound", "InboundLimits"]


class InboundLimits(msgspec.Struct, frozen=True):
    """What a client may do. Bytes, counts and seconds.

    `body_s` is the pause between two segments of a body, `request_s` the time a whole request may take, `send_s` how
    long a client may take nothing of its answer, `linger_s` how long it may take to close after its last one.
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


# A refused body up to this size is read and dropped, so that the connection stays of use.
_DRAIN_BYTES_MAX = 64 * 1024
# One byte per chunk costs 5 bytes of framing ("1\r\n" and "\r\n"); more than this per byte is not a body but an attack.
_FRAMING_BYTES_PER_BODY_BYTE_MAX = 8


class _StopReadingError(Exception):
    """Raised into the parser when the rest of a segment is of no interest."""


class Inbound(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_budget",
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
        "_request_since",
        "_seen_body_bytes",
        "_state",
        "_target",
        "_turns",
    )

    def __init__(self, listener: ConnectionSet, gate: Gate, limits: InboundLimits, budget: ByteBudget) -> None:
        self._listener, self._gate, self._limits, self._budget = listener, gate, limits, budget
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(listener, gate, budget, limits.pipelined_max, self._loop)
        self._parser = httptools.HttpRequestParser(self)
        self._state = _IDLE
        self._request_since = 0.0
        self._headers: head.Headers = []
        self._target = b""
        self._pipelined = False
        self._head_bytes = self._head_held_bytes = 0
        self._framing_bytes = self._quiet_bytes = self._seen_body_bytes = 0
        self._reading: Exchange | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._turns.connected(cast("asyncio.Transport", transport))  # uvloop's is one in all but ancestry
        if not self._listener.admit(self):
            detail = "too many connections: retry later, or at another entry"
            self._refuse(answers.refusal(outcome.TOO_MANY_CONNECTIONS, detail, retry_after_s=1.0))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._listener.forget(self)
        self._release_head()
        reading, self._reading = self._reading, None
        if reading is not None:
            self._turns.give_back(reading)
            reading.abandon(outcome.CLIENT_LEFT, 0)
        self._turns.lost()

    def data_received(self, data: bytes) -> None:
        turns = self._turns
        if turns.deaf:
            return
        now = turns.since = self._loop.time()
        if self._state is _IDLE:
            self._state, self._request_since, self._head_bytes = _HEAD, now, len(data)
        elif self._state is _HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not turns.deaf:
                self._untrusted(error)
            return
        if self._state is _HEAD:
            self._hold_head(len(data))
        elif self._state is _CHUNKS:
            self._bound_framing(len(data))

    def eof_received(self) -> bool:
        self._turns.client_ended()
        return False

    def pause_writing(self) -> None:
        self._turns.pause_writing()

    def resume_writing(self) -> None:
        self._turns.resume_writing()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._turns.deaf:
            raise _StopReadingError
        self._headers, self._target = [], b""
        if self._state is _IDLE:  # in the midst of a segment: its bytes are not all this head's
            self._state, self._request_since, self._head_bytes = _HEAD, self._turns.since, 0
            self._pipelined = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))  # a body's trailers come here too, and go no further

    def on_headers_complete(self) -> None:
        parser = self._parser
        self._release_head()
        # What came since the head began bounds it, mostly; only if that is too much it is measured.
        if self._pipelined or self._head_bytes > self._limits.head_bytes_max:
            self._measure_head()
        if len(self._headers) > self._limits.headers_max:
            raise self._head_too_large()
        if parser.should_upgrade():
            raise head.HeadError(outcome.MALFORMED_HTTP, "the protocol cannot be upgraded: send plain HTTP/1.1")
        request_head = head.read(
            parser.get_method(), self._target, parser.get_http_version(), self._headers, parser.should_keep_alive()
        )
        exchange = self._reading = Exchange(self._turns, request_head)
        self._state = _CHUNKS if request_head.content_length is None else _BODY
        self._framing_bytes = self._quiet_bytes = self._seen_body_bytes = 0
        exchange.early = self._judge(exchange)
        self._before_body(exchange, request_head.content_length)

    def _before_body(self, exchange: Exchange, length: int | None) -> None:
        """Refuse with the body unread, or ask for it."""
        expects = exchange.head.get(b"expect")
        if exchange.early is not None:
            if length is None or length > _DRAIN_BYTES_MAX or expects:
                self._refuse(exchange.early)
        elif length is not None and length > self._limits.body_bytes_max:
            self._refuse(self._too_large())
        elif expects and expects.lower() == b"100-continue" and exchange.head.http_11 and self._turns.at_rest:
            self._turns.write(b"HTTP/1.1 100 Continue\r\n\r\n")

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
        self._reading, self._state, self._pipelined = None, _IDLE, False
        exchange.body = exchange.parts[0] if len(exchange.parts) == 1 else b"".join(exchange.parts)
        exchange.parts.clear()
        if not exchange.head.keep_alive:
            self._turns.last(exchange)
        self._turns.whole(exchange)

    # -- bounds on what is read

    def _judge(self, exchange: Exchange) -> Reply | None:
        size = len(exchange.head.onward)
        if not self._budget.take(size):
            return _no_buffer()
        exchange.held_bytes = size
        try:
            return self._gate.head(exchange)
        except Exception as error:  # noqa: BLE001 - a bug in the gate must not look like the client's fault
            return self._turns.bug(error)

    def _hold_head(self, size: int) -> None:
        """A head that is not complete yet is held by the parser."""
        if self._head_bytes > self._limits.head_bytes_max or len(self._headers) > self._limits.headers_max:
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

    # -- upkeep, by the listener's sweep

    def check(self, now: float) -> None:
        """Apply the time limits. `now` is the loop's time."""
        limits, turns = self._limits, self._turns
        if turns.check_ending(now, limits.send_s, limits.linger_s):
            return
        quiet_s, reading_s = now - turns.since, now - self._request_since
        if self._state is _IDLE:
            if turns.at_rest and quiet_s > limits.idle_s:
                turns.close()
        elif self._state is _HEAD:
            if reading_s > limits.head_s:
                self._too_slow(f"the head did not arrive within {limits.head_s:g} s")
        elif quiet_s > limits.body_s:
            self._too_slow(f"the body paused for more than {limits.body_s:g} s")
        elif reading_s > limits.request_s:
            self._too_slow(f"the request did not arrive within {limits.request_s:g} s")

    def close_if_idle(self) -> None:
        """Close unless a request is being read or served."""
        if self._state is _IDLE and self._turns.at_rest:
            self._turns.close()

    def abort(self) -> None:
        """Break the connection."""
        self._turns.abort()

    # -- refusals

    def _too_slow(self, detail: str) -> None:
        self._refuse(answers.refusal(outcome.REQUEST_TIMEOUT, detail))

    def _untrusted(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, head.HeadError):
            self._refuse(_reply_to(cause))
        elif isinstance(cause, Exception):
            self._refuse(self._turns.bug(cause))
        else:
            self._refuse(answers.refusal(outcome.MALFORMED_HTTP, f"not HTTP/1.1: {error}"))

    def _refuse(self, reply: Reply) -> None:
        """Answer, in its turn, what is being read (or cannot be), and read no more."""
        exchange, self._reading = self._reading, None
        if exchange is None:
            exchange = Exchange(self._turns, head.UNREAD)
        exchange.parts.clear()
        self._release_head()
        self._turns.give_back(exchange)
        if exchange.early is None:
            exchange.abandon(reply.outcome, reply.status)
            exchange.early = reply
        self._turns.last(exchange)
        self._turns.whole(exchange)

    def _release_head(self) -> None:
        if self._head_held_bytes:
            self._budget.give(self._head_held_bytes)
            self._head_held_bytes = 0


def _reply_to(error: head.HeadError) -> Reply:
    return answers.refusal(error.outcome, error.detail)


def _no_buffer() -> Reply:
    return answers.refusal(outcome.NO_BUFFER, "this balancer's buffers are full: retry shortly", retry_after_s=1.0)


class ConnectionSet(Port, Protocol):
    """The listener, as its connections see it."""

    def admit(self, connection: Inbound) -> bool:
        """Count a new connection in; False if there are too many."""

    def forget(self, connection: Inbound) -> None:
        """The connection is gone."""


_IDLE, _HEAD, _BODY, _CHUNKS = "idle", "head", "body", "chunks"
