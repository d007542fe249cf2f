"""The client's side: one connection, read within limits into one Exchange after another.

Invariants: every byte held is taken from the process's one budget and given back when its exchange is over; every wait
for the client is bounded; after a head that cannot be trusted nothing more is read. Never decides anything about
routing, nor the order of answers: that is `Turns`.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from farhop.balance import outcome
from farhop.relay import answers, head
from farhop.relay.body import ChunkedBody, FramingError, LengthBody
from farhop.relay.exchange import Exchange
from farhop.relay.turns import Gate, Port, Turns

if TYPE_CHECKING:
    from collections import Counter

    from farhop.balance.limits import ByteBudget
    from farhop.balance.outcome import Outcome
    from farhop.relay.answers import Reply

__all__ = ["Exchange", "Gate", "Inbound", "InboundLimits"]


class InboundLimits(msgspec.Struct, frozen=True):
    """What a client may do. Bytes, counts and seconds.

    `connections_per_client_max` counts by address (IPv6: by /64) and not on the tier above's listener. `idle_s` is how
    long a connection may rest, `drain_idle_s` how long once we stop; `head_s` how long a head may take, `body_s` the
    pause between two segments of a body, `upload_s` what a whole request may take to arrive, `upload_bytes_per_s_min`
    how fast its body must come once `head_s` is over, `send_s` how long a client may take nothing of its answer,
    `linger_s` how long it may take to close after its last one.
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
# What no head holds, however much of it is still to come: bare line ends, control characters.
_NEVER = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_END = b"\r\n\r\n"
_PIECE_BYTES = 16 * 1024  # what comes in smaller pieces is gathered: an object costs 33 bytes beside what it holds
_ANYBODY = ""  # whose share it counts to before it is known who asks
_CROWDED = {
    outcome.TOO_MANY_CONNECTIONS: "too many connections: retry later, or at another entry",
    outcome.CLIENT_CROWDS: "too many connections from your address: close some, or keep them alive and use them again",
}


class Inbound(asyncio.Protocol):
    """One client connection: at rest, reading a head, or reading a body."""

    __slots__ = (
        "_body",
        "_budget",
        "_gate",
        "_limits",
        "_listener",
        "_loop",
        "_partial",
        "_reading",
        "_request_since",
        "_turns",
        "client",
        "tenant",
    )

    def __init__(self, listener: ConnectionSet, gate: Gate, limits: InboundLimits, budget: ByteBudget) -> None:
        self._listener, self._gate, self._limits, self._budget = listener, gate, limits, budget
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(listener, gate, budget, limits, self._loop)
        self._request_since = 0.0
        self._partial = b""  # of a head that is not complete; taken from the budget
        self._reading: Exchange | None = None  # whose body is being read
        self._body: LengthBody | ChunkedBody | None = None
        self.client = ""  # by which it counts; "" where nobody counts
        self.tenant = _ANYBODY  # whose request came last

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._turns.connected(cast("asyncio.Transport", transport))  # uvloop's is one in all but ancestry
        reason = self._listener.admit(self, transport.get_extra_info("peername"))
        if reason is not None:
            self._refuse(answers.refusal(reason, _CROWDED[reason], retry_after_s=1.0))

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
        turns.since = self._loop.time()
        while data and not turns.deaf:
            if self._reading is not None:
                data = self._read_body(data, self._reading)
            else:
                try:
                    data = self._read_head(data)
                except head.HeadError as error:
                    self._refuse(answers.refusal(error.outcome, error.detail))

    def eof_received(self) -> bool:
        self._turns.client_ended()
        return False

    def pause_writing(self) -> None:
        self._turns.pause_writing()

    def resume_writing(self) -> None:
        self._turns.resume_writing()

    # -- reading; each takes what is here and returns what it leaves

    def _read_head(self, data: bytes) -> bytes:
        seen = len(self._partial)
        if seen:
            data = self._partial + data
        else:
            self._request_since = self._turns.since
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
        self._release_head()
        self._begin(head.read(data[:end], self._limits.headers_max))
        return data[end + 4 :]

    def _hold_head(self, data: bytes, seen: int) -> bytes:
        """A head that is not complete, unless it never will be one."""
        if data.count(b"\r\n") > self._limits.headers_max + 1:
            raise head.HeadError(outcome.HEAD_TOO_LARGE, f"too many headers: at most {self._limits.headers_max}")
        if _NEVER.search(data, max(0, seen - 1)) or data[0] in b" \t:":
            raise head.HeadError(outcome.MALFORMED_HTTP, "not HTTP/1.1: lines must end with CR LF and hold text")
        if not self._budget.take(len(data) - seen, _ANYBODY):
            self._refuse(_no_buffer())
            return b""
        self._partial = data
        return b""

    def _begin(self, request_head: head.Head) -> None:
        """A head is here: judge it, then read its body or refuse it unread."""
        if not self._budget.fits(len(request_head.onward)):
            self._refuse(_no_buffer())
            return
        exchange = self._reading = Exchange(self._turns, request_head)
        early = exchange.early = self._judge(exchange)
        if not self._budget.take(len(request_head.onward), exchange.tenant):
            self._refuse(self._no_room(exchange.tenant))
            return
        exchange.held_bytes = len(request_head.onward)
        if early is None and not self._listener.counts(self, exchange):
            self._refuse(_crowded())
            return
        length = request_head.content_length
        expects = request_head.known.get(b"expect")
        if early is not None and (length is None or length > _DRAIN_BYTES_MAX or expects):
            self._refuse(early)
        elif length == 0:
            self._whole(exchange)
        elif length is not None and length > self._limits.body_bytes_max:
            self._refuse(self._too_large())
        else:
            self._body = ChunkedBody(of_request=True) if length is None else LengthBody(length)
            if expects and expects.lower() == b"100-continue" and request_head.http_11 and self._turns.at_rest:
                self._turns.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _judge(self, exchange: Exchange) -> Reply | None:
        try:
            return self._gate.head(exchange)
        except Exception as error:  # noqa: BLE001 - a bug in the gate must not look like the client's fault
            return self._turns.bug(error)

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
            if rest is None:
                _gather(exchange.parts, piece)
            else:
                exchange.parts.append(piece)  # the last
        if rest is None:
            return b""
        self._whole(exchange)
        return rest

    def _whole(self, exchange: Exchange) -> None:
        """The request is whole."""
        self._reading = self._body = None
        parts = exchange.parts
        exchange.body = b"".join(parts)  # of one that is bytes: itself
        parts.clear()
        if not exchange.head.keep_alive:
            self._turns.last(exchange)
        self._turns.whole(exchange)

    def _no_room(self, tenant: str) -> Reply:
        """The buffers are full, or this tenant's share of them."""
        if tenant == _ANYBODY or not self._budget.crowds(tenant):
            return _no_buffer()
        detail = "this tenant's requests fill its share of the balancer's buffers: retry when some are answered"
        return answers.refusal(outcome.TENANT_CROWDS, detail, retry_after_s=1.0)

    def _too_large(self) -> Reply:
        most = self._limits.body_bytes_max
        return answers.refusal(outcome.BODY_TOO_LARGE, f"the body is too large: at most {most} bytes")

    # -- upkeep, by the listener's sweep

    def check(self, now: float, rest_s: float) -> None:
        """Apply the time limits; `rest_s` is how long a connection may rest. `now` is the loop's time."""
        limits, turns = self._limits, self._turns
        if turns.check_ending(now, limits.send_s, limits.linger_s):
            return
        quiet_s, reading_s = now - turns.since, now - self._request_since
        if self._reading is None and not self._partial:
            if turns.at_rest and quiet_s >= rest_s:
                turns.close()
        elif self._reading is None:
            if reading_s > limits.head_s:
                self._too_slow(f"the head did not arrive within {limits.head_s:g} s")
        elif quiet_s > limits.body_s:
            self._too_slow(f"the body paused for more than {limits.body_s:g} s")
        elif self._reading.body_bytes < limits.upload_bytes_per_s_min * (reading_s - limits.head_s):
            self._too_slow(f"the body came at less than {limits.upload_bytes_per_s_min} bytes a second")
        elif reading_s > limits.upload_s:
            self._too_slow(f"the request did not arrive within {limits.upload_s:g} s")

    def expel(self) -> None:
        """We stop, and time is up: end what is under way so that the client knows, and the connection with it."""
        reply = answers.stopping()
        if self._reading is not None or self._partial:
            self._refuse(reply)
        self._turns.expel(reply)

    def abort(self) -> None:
        """Break the connection."""
        self._turns.abort()

    # -- refusals

    def _too_slow(self, detail: str) -> None:
        self._refuse(answers.refusal(outcome.REQUEST_TIMEOUT, detail))

    def _refuse(self, reply: Reply) -> None:
        """Answer, in its turn, what is being read (or cannot be), and read no more."""
        exchange = self._reading
        if exchange is None:  # the gate has not seen it, and will not count it
            self._listener.refused[reply.outcome.reason] += 1
            exchange = Exchange(self._turns, head.UNREAD)
        self._reading = self._body = None
        exchange.parts.clear()
        self._release_head()
        self._turns.give_back(exchange)
        if exchange.early is None:
            exchange.abandon(reply.outcome, reply.status)
            exchange.early = reply
        self._turns.last(exchange)
        self._turns.whole(exchange)

    def _release_head(self) -> None:
        if not self._partial:
            return
        self._budget.give(len(self._partial), _ANYBODY)
        self._partial = b""


def _gather(parts: list[bytes | bytearray], piece: bytes) -> None:
    """Add what came of a body; small pieces in one buffer, however many they are."""
    last = parts[-1] if parts else None
    if isinstance(last, bytearray) and len(last) < _PIECE_BYTES:
        last += piece
    else:
        parts.append(piece if len(piece) >= _PIECE_BYTES else bytearray(piece))


def _crowded() -> Reply:
    detail = "too many requests of this tenant are under way here: retry when some are answered"
    return answers.refusal(outcome.TENANT_CROWDS, detail, retry_after_s=1.0)


def _no_buffer() -> Reply:
    return answers.refusal(outcome.NO_BUFFER, "this balancer's buffers are full: retry shortly", retry_after_s=1.0)


class ConnectionSet(Port, Protocol):
    """The listener, as its connections see it. `refused` counts what its gate never sees, by reason."""

    refused: Counter[str]

    def counts(self, connection: Inbound, exchange: Exchange) -> bool:
        """Count a request, and its connection, to its tenant's share. False if that is used up."""

    def admit(self, connection: Inbound, peer: object) -> Outcome | None:
        """Count a new connection in; or why there are too many. `peer` is its socket address."""

    def forget(self, connection: Inbound) -> None:
        """The connection is gone."""
