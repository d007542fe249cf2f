"""One request of a client and its one answer, as handlers of requests and the relay see them.

Invariants: an answer is begun at most once and is framed here, in the terms of the request (HTTP/1.0 gets no chunks,
HEAD no body); towards the tier above a refusal says that it is one. Never reads, and never knows of another exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from farhop.balance import outcome
from farhop.relay import answers

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.outcome import Outcome
    from farhop.relay.answers import Reply
    from farhop.relay.http.head import Head

_BODILESS = (204, 304)  # RFC 9112 §6.3: whatever their headers say
# Our `Connection` header, where it is not the default: whether the connection stays, and whether HTTP/1.1 is spoken.
_PERSISTENCE = {
    (True, True): b"",
    (True, False): b"connection: keep-alive\r\n",
    (False, True): b"connection: close\r\n",
    (False, False): b"connection: close\r\n",
}

_PIECE_BYTES = 16 * 1024  # what comes in smaller pieces is gathered: an object costs 33 bytes beside what it holds


class ExchangeCallbacks(Protocol):
    """The party that produces an exchange's answer; it is notified of what happens to the client. In the relay:
    ActiveRequest.
    """

    def client_left(self) -> None:
        """The client has disconnected."""

    def stopped(self) -> None:
        """This process shuts down, and its drain time is over."""

    def pause(self) -> None:
        """The client reads slower than the upstream writes."""

    def resume(self) -> None:
        """The client has read what was sent: send more."""


class RequestHandler(Protocol):
    """Handles the requests of a listener."""

    def head(self, exchange: Exchange) -> Reply | None:
        """Identity, path and entry law, before the body is read. A Reply refuses."""

    def arrived(self, exchange: Exchange) -> None:
        """The whole request is here: reply to it or hand it to the relay."""


class AnsweringConnection(Protocol):
    """The client's connection, as an exchange writes its answer to it (connection.ClientConnection)."""

    answering: Exchange | None  # the exchange whose turn it is

    @property
    def is_hop(self) -> bool:
        """Whether the client is the tier above."""

    @property
    def local_host(self) -> str:
        """The local address that the client connected to; "" if unknown."""

    @property
    def certificate(self) -> bytes | None:
        """The certificate (DER) that the client proved in its TLS handshake; None without one."""

    def client_rtt(self) -> tuple[str, int] | None:
        """The client's address and the kernel's least round trip to it, in microseconds; None if unknown, and after the
        first call."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes written to the client that are still in the send buffer."""

    def write(self, data: bytes) -> None:
        """Send bytes to the client, unless it has disconnected."""

    def chunk(self, data: bytes) -> None:
        """Send a piece of a stream to the client, if it is there."""

    def abort(self) -> None:
        """Break the connection so that the client notices."""

    def keeps(self, exchange: Exchange) -> bool:
        """Whether the connection outlives this exchange; asked when its answer begins."""

    def close_after(self, exchange: Exchange) -> None:
        """Close the connection once this exchange is answered."""

    def over(self, exchange: Exchange) -> None:
        """The exchange is completely answered."""

    def release_body(self, exchange: Exchange) -> None:
        """Return what the exchange's body held of the budget."""


class Exchange:
    """One request and its one answer. `context` and `on_abandoned` belong to the handler.

    `tenant` is set by the handler's `head` once it is known: this counts towards its share of what is bounded;
    `counted`: it is among the requests under way; `waits`: it is complete and not read yet.

    `sees_answer`: its answer passes through here, so that what only the balancer asked for can be removed from it.

    `on_abandoned(outcome, status)` is called once if a request that the handler's `head` let pass never arrives: it was
    cut short here (with the status the client got) or its client left (status 0).
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_parts",
        "body",
        "body_bytes",
        "callbacks",
        "context",
        "counted",
        "early",
        "head",
        "held_bytes",
        "is_hop",
        "on_abandoned",
        "sees_answer",
        "started",
        "tenant",
        "waits",
    )

    def __init__(self, connection: AnsweringConnection, request_head: Head) -> None:
        self._connection = connection
        self.is_hop = connection.is_hop  # it is from the tier above, which understands refusals and broken streams
        self.head = request_head
        self.tenant = ""
        self.counted = self.waits = False
        self.body = b""
        self.body_bytes = self.held_bytes = 0  # `held_bytes` are those taken from the budget
        self.early: Reply | None = None
        self.context: Any = None
        self.callbacks: ExchangeCallbacks | None = None
        self.on_abandoned: Callable[[Outcome, int], None] | None = None
        self.started = False
        self.sees_answer = True
        self._chunked = False
        self._parts: list[bytes | bytearray] | None = None  # of a body that comes in pieces

    @property
    def local_host(self) -> str:
        """The local address that the client connected to; "" if unknown."""
        return self._connection.local_host

    @property
    def certificate(self) -> bytes | None:
        """See AnsweringConnection."""
        return self._connection.certificate

    def client_rtt(self) -> tuple[str, int] | None:
        """See AnsweringConnection: told once for all requests of a connection."""
        return self._connection.client_rtt()

    @property
    def is_open(self) -> bool:
        """Whether it is its turn and its answer is not complete."""
        return self._connection.answering is self

    def gather(self, piece: bytes, *, last: bool = False) -> None:
        """A piece of the body; small ones go into one buffer, however many they are."""
        parts = self._parts = self._parts or []
        before = parts[-1] if parts else None
        if last or len(piece) >= _PIECE_BYTES:
            parts.append(piece)
        elif isinstance(before, bytearray) and len(before) < _PIECE_BYTES:
            before += piece
        else:
            parts.append(bytearray(piece))

    def gathered(self) -> bytes:
        """The body in one piece; the pieces are released."""
        parts, self._parts = self._parts, None
        return b"".join(parts or ())  # of one that is bytes: itself

    def abandon(self, reason: Outcome, status: int) -> None:
        """Inform the handler, if it asked for that, that the request will not arrive."""
        on_abandoned, self.on_abandoned = self.on_abandoned, None
        if on_abandoned is not None:
            on_abandoned(reason, status)

    def reply(self, reply: Reply) -> None:
        """Send a complete answer of the balancer itself."""
        self.started = True
        reply = answers.in_dialect(reply, answers.dialect(self.head.path))
        extra = reply.extra
        if self.is_hop and reply.outcome is not outcome.SERVED:
            extra += answers.hop_outcome(reply.outcome, reply.wait_ms)
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            answers.STATUS_LINES[reply.status],
            reply.content_type,
            len(reply.body),
            _PERSISTENCE[self._connection.keeps(self), self.head.http_11],
            extra,
        )
        self._connection.write(head if self.head.method == b"HEAD" else head + reply.body)
        self._connection.over(self)

    def begin(self, status: int, headers: bytes, length: int | None, first: bytes) -> None:
        """Send an answer's head and the first of its body in one write. `length` None: framing is ours to choose."""
        self.started = True
        framing = b""
        if status in _BODILESS:
            first = b""
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.head.http_11:
            self._chunked = True
            self.head.forget()
            framing = b"transfer-encoding: chunked\r\n"
            if first:
                first = b"%x\r\n%b\r\n" % (len(first), first)
        else:
            self._connection.close_after(self)
        line, persists = answers.STATUS_LINES[status], _PERSISTENCE[self._connection.keeps(self), self.head.http_11]
        self._connection.write(b"".join((line, headers, persists, framing, b"\r\n", first)))

    def write(self, data: bytes) -> None:
        """Send more of the body; `data` is not empty."""
        self._connection.chunk(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        """The answer is complete."""
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self._connection.over(self)

    def release_body(self) -> None:
        """Release the request body: it is not needed any more."""
        self._connection.release_body(self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers on this exchange's connection that are still in the send buffer."""
        return self._connection.unsent_bytes

    def break_off(self, event: bytes | None) -> None:
        """The answer cannot be completed. With an event the stream ends cleanly; without one it visibly breaks. Towards
        the tier above it breaks after its last chunk, which shows that tier that this one is alive and the failure is
        upstream of it.
        """
        if event is not None:
            self.write(event)
            self.finish()
        elif self.is_hop and self._chunked:
            self._connection.close_after(self)
            self._connection.write(b"0;broken-off\r\n")
            self._connection.over(self)
        else:
            self._connection.abort()
