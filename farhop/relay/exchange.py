"""One request and its one answer, as the gate and the relay see them.

Invariants: an answer is begun at most once and is framed by us, in the terms of the request (HTTP/1.0 gets no chunks,
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
    from farhop.relay.head import Head
    from farhop.relay.turns import Turns

_BODILESS = (204, 304)  # RFC 9112 §6.3: whatever their headers say


class Journey(Protocol):
    """What the relay keeps for a request under way, as this side sees it."""

    def client_left(self) -> None:
        """The client is gone."""

    def stopped(self) -> None:
        """We stop, and time is up."""

    def pause(self) -> None:
        """The client reads slower than the upstream writes."""

    def resume(self) -> None:
        """The client caught up."""


class Exchange:
    """One request and its one answer. `context` and `on_abandoned` belong to the gate.

    `tenant` is set by the gate's `head` where it knows who asks: it is whose share of what is bounded this counts to;
    `counted` says that it is among the requests under way, `waits` that it is whole and not read yet.

    `on_abandoned(outcome, status)` is called once if a request that the gate's `head` let pass never arrives: it was
    cut short here (with the status the client got) or its client left (status 0).
    """

    __slots__ = (
        "_chunked",
        "_turns",
        "body",
        "body_bytes",
        "context",
        "counted",
        "early",
        "head",
        "held_bytes",
        "journey",
        "on_abandoned",
        "parts",
        "started",
        "tenant",
        "waits",
    )

    def __init__(self, turns: Turns, request_head: Head) -> None:
        self._turns = turns
        self.head = request_head
        self.parts: list[bytes | bytearray] = []
        self.tenant = ""
        self.counted = self.waits = False
        self.body = b""
        self.body_bytes = self.held_bytes = 0  # `held_bytes` are those taken from the budget
        self.early: Reply | None = None
        self.context: Any = None
        self.journey: Journey | None = None
        self.on_abandoned: Callable[[Outcome, int], None] | None = None
        self.started = False
        self._chunked = False

    @property
    def is_hop(self) -> bool:
        """Whether the tier above asks, who understands refusals and broken streams."""
        return self._turns.is_hop

    @property
    def is_open(self) -> bool:
        """Whether it is its turn and its answer is not complete."""
        return self._turns.active is self

    def abandon(self, reason: Outcome, status: int) -> None:
        """Tell the gate, if it wants to know, that the request will not arrive."""
        told, self.on_abandoned = self.on_abandoned, None
        if told is not None:
            told(reason, status)

    def reply(self, reply: Reply) -> None:
        """Answer whole from here."""
        self.started = True
        extra = reply.extra
        if self._turns.is_hop and reply.outcome is not outcome.SERVED:
            extra += answers.hop_outcome(reply.outcome, reply.wait_ms)
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            answers.status_line(reply.status),
            reply.content_type,
            len(reply.body),
            self._persistence(),
            extra,
        )
        self._turns.write(head if self.head.method == b"HEAD" else head + reply.body)
        self._turns.over(self)

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
            framing = b"transfer-encoding: chunked\r\n"
            if first:
                first = b"%x\r\n%b\r\n" % (len(first), first)
        else:
            self._turns.close_after(self)
        line = answers.status_line(status)
        self._turns.write(b"".join((line, headers, self._persistence(), framing, b"\r\n", first)))

    def _persistence(self) -> bytes:
        """Our `Connection` header, where it is not the default of the request's version."""
        if not self._turns.keeps(self):
            return b"connection: close\r\n"
        return b"" if self.head.http_11 else b"connection: keep-alive\r\n"

    def write(self, data: bytes) -> None:
        """Send more of the body; `data` is not empty."""
        self._turns.chunk(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        """The answer is whole."""
        if self._chunked:
            self._turns.write(b"0\r\n\r\n")
        self._turns.over(self)

    def let_go(self) -> None:
        """The body is held no more: nobody will want it again."""
        self._turns.let_go(self)

    @property
    def unsent_bytes(self) -> int:
        """What of its connection's answers the client has not taken yet."""
        return self._turns.unsent_bytes

    def break_off(self, event: bytes | None) -> None:
        """The answer cannot be completed. With an event the stream ends cleanly; without, it visibly breaks."""
        if event is None:
            self._turns.abort()
        else:
            self.write(event)
            self.finish()
