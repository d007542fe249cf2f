"""The order of answers on one client connection: whose turn it is, who waits, and how the connection ends.

Invariants: answers leave in the order of requests; none is begun while the client does not read the last; no more wait
for their turn than `pipelined_max`, nor more bytes than one body may have; only after an answer that said so, or a long
rest, does a connection end; what an exchange holds of the budget is given back when it is over, however. Never parses,
and never decides what an answer is. Never stops reading: a client that leaves must be noticed.
"""

from __future__ import annotations

import fcntl
import sys
import termios
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from farhop.balance import outcome
from farhop.relay import answers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from farhop.balance.limits import ByteBudget
    from farhop.relay.answers import Reply
    from farhop.relay.cork import Cork
    from farhop.relay.exchange import Exchange
    from farhop.relay.inbound import InboundLimits


_READING = 5
_SMALL_BYTES = 64 * 1024


class Heavy:
    """Large bodies are read one in a turn of the loop: whoever else has come is served between them."""

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


class Gate(Protocol):
    """What a listener asks of its tier."""

    def head(self, exchange: Exchange) -> Reply | None:
        """Identity, path and entry law, before the body is read. A Reply refuses."""

    def arrived(self, exchange: Exchange) -> None:
        """The whole request is here: reply to it or start its journey."""


class Port(Protocol):
    """The listener, as this sees it."""

    stopping: bool
    is_hop: bool
    cork: Cork
    heavy: Heavy

    def uncounted(self, exchange: Exchange) -> None:
        """A request that was counted to its tenant's share is over."""


class Turns:
    """One connection's exchanges. `deaf`: nothing more is read. `since`: the last sign of life, in the loop's time."""

    __slots__ = (
        "_advancing",
        "_blind",
        "_budget",
        "_close_after",
        "_gate",
        "_loop",
        "_pipelined_bytes_max",
        "_pipelined_max",
        "_port",
        "_transport",
        "_unsent",
        "_unsent_since",
        "_waiting",
        "_write_paused",
        "active",
        "deaf",
        "since",
    )

    def __init__(
        self, port: Port, gate: Gate, budget: ByteBudget, limits: InboundLimits, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._port, self._gate, self._budget, self._loop = port, gate, budget, loop
        self._pipelined_max, self._pipelined_bytes_max = limits.pipelined_max, limits.body_bytes_max
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Exchange] = deque()
        self._close_after: Exchange | None = None
        self._advancing = self._write_paused = self._blind = False
        self._unsent, self._unsent_since = 0, 0.0
        self.active: Exchange | None = None
        self.deaf = False
        self.since = loop.time()

    @property
    def at_rest(self) -> bool:
        """Whether nothing is being answered or waits for it."""
        return self.active is None and not self._waiting

    @property
    def is_hop(self) -> bool:
        """Whether the listener is for the tier above."""
        return self._port.is_hop

    # -- the connection

    def connected(self, transport: asyncio.Transport) -> None:
        """The connection is there."""
        self._transport = transport

    def lost(self) -> None:
        """The connection is gone, and with it everybody's answer."""
        self._transport = None
        active, self.active = self.active, None
        self._abandon_waiting()
        if active is not None:
            self.give_back(active)
            if active.waits:
                active.abandon(outcome.CLIENT_LEFT, 0)
            if active.journey is not None:
                active.journey.client_left()

    def client_ended(self) -> None:
        """The client sends no more. If it waits for an engine it has left: that is not worth an engine's time."""
        if self.active is not None and self.active.journey is not None:
            self.abort()

    def pause_writing(self) -> None:
        """The client does not read."""
        self._write_paused, self._unsent = True, -1
        if self.active is not None and self.active.journey is not None:
            self.active.journey.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._write_paused = False
        if self.active is not None and self.active.journey is not None:
            self.active.journey.resume()
        self._advance()

    def write(self, data: bytes) -> None:
        """Send bytes to the client, if it is there."""
        if self._transport is not None:
            self._port.cork.write(self._transport, data)

    def chunk(self, data: bytes) -> None:
        """Send a piece of a stream to the client, if it is there."""
        if self._transport is not None:
            self._port.cork.chunk(self._transport, data)

    def abort(self) -> None:
        """Break the connection so that the client notices."""
        if self._transport is not None:
            self._transport.abort()

    # -- one exchange after another

    def whole(self, exchange: Exchange) -> None:
        """Serve the exchange now, or in its turn."""
        if self.active is None and not self._waiting and not self._write_paused:
            self._serve(exchange)
            return
        self._waiting.append(exchange)
        held_bytes = sum(waiting.held_bytes for waiting in self._waiting)
        if len(self._waiting) >= self._pipelined_max or held_bytes >= self._pipelined_bytes_max:
            # What came beyond is dropped with the connection: a client asks again for what got no answer
            # (RFC 9112 §9.3.2).
            self.last(exchange)

    def last(self, exchange: Exchange) -> None:
        """Nothing is read after this exchange, and the connection ends with it."""
        self._close_after, self.deaf = exchange, True

    def _serve(self, exchange: Exchange) -> None:
        self.active = exchange
        if exchange.early is not None:
            exchange.reply(exchange.early)
            return
        if len(exchange.body) > _SMALL_BYTES:
            exchange.waits = True
            self._port.heavy.add(partial(self._arrive, exchange))
        else:
            self._arrive(exchange)

    def _arrive(self, exchange: Exchange) -> None:
        """Have the gate read the request."""
        if self.active is not exchange:
            return  # its client left meanwhile
        exchange.waits = False
        # What reading takes beside the body, at most: texts at four bytes a character, and the chain's copy of them.
        reading_bytes = _READING * len(exchange.body) if len(exchange.body) > _SMALL_BYTES else 0
        if reading_bytes and not self._budget.take(reading_bytes, exchange.tenant):
            refused = "this balancer's buffers are full: retry shortly"
            exchange.abandon(outcome.NO_BUFFER, answers.status_of(outcome.NO_BUFFER))
            exchange.reply(answers.refusal(outcome.NO_BUFFER, refused, retry_after_s=1.0))
            return
        try:
            self._gate.arrived(exchange)
        except Exception as error:  # noqa: BLE001 - one request's bug must not take its neighbours', nor leave it unanswered
            reply = self.bug(error)
            if exchange.journey is not None:
                exchange.journey.client_left()
            if not exchange.started:
                exchange.reply(reply)
            elif self.active is exchange:
                self.abort()
        finally:
            if reading_bytes:
                self._budget.give(reading_bytes, exchange.tenant)

    def over(self, exchange: Exchange) -> None:
        """The exchange has its whole answer: give back what it held and serve the next, or close."""
        if self.active is not exchange:
            return
        self.active = None
        self.give_back(exchange)
        if self._transport is None:
            return
        self.since = self._loop.time()
        if self._close_after is exchange:
            self._linger()
        elif self._waiting:
            self._advance()

    def _advance(self) -> None:
        """Serve those who wait. A loop, not a recursion: an answer given at once comes back here from within."""
        if self._advancing:
            return
        self._advancing = True
        while self._waiting and self.active is None and not self._write_paused and self._transport is not None:
            self._serve(self._waiting.popleft())
        self._advancing = False

    def keeps(self, exchange: Exchange) -> bool:
        """Whether the connection outlives this exchange; asked when its answer begins. If not, the client is told.

        One that was not told may have sent its next request already: then that one's answer tells.
        """
        draining = self._port.stopping and not self._waiting
        if exchange.head.keep_alive and self._close_after is not exchange and not draining:
            return True
        self._close_after = exchange
        return False

    def close_after(self, exchange: Exchange) -> None:
        """Close once this exchange is answered: the end of the connection is the end of its body."""
        self._close_after = exchange

    # -- endings

    def _linger(self) -> None:
        """Half-close and drop what still comes, so that the answer is not destroyed by a reset."""
        self.deaf = True
        self._abandon_waiting()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._port.cork.flush()  # the last word
        if transport.can_write_eof():
            transport.write_eof()
        else:
            self._blind = True  # through TLS: what the system still has to send cannot be seen
            transport.close()

    def expel(self, reply: Reply) -> None:
        """We stop, and time is up: what is being answered ends now, who waits for a turn gets this, nobody is read."""
        self.deaf = True
        for waiting in self._waiting:
            if waiting.early is None:
                waiting.abandon(reply.outcome, reply.status)
                waiting.early = reply
        active = self.active
        if active is None and not self._waiting:
            self.close()
            return
        self._close_after = self._waiting[-1] if self._waiting else active
        if active is not None and active.journey is not None:
            active.journey.stopped()
        elif active is not None and not active.started:
            active.reply(reply)

    def check_ending(self, now: float, send_s: float, linger_s: float) -> bool:
        """Bound how long the client takes to read, and to close once all is said. False if that is not what goes on."""
        transport = self._transport
        if transport is None:
            return True
        if unsent := transport.get_write_buffer_size():
            self.since = now  # lingering and idleness begin when all is sent
            if unsent != self._unsent:
                self._unsent, self._unsent_since = unsent, now
            elif now - self._unsent_since > send_s:
                self.abort()  # it takes nothing of its answer, and holds an engine's slot
            return True
        if self.deaf and self.at_rest and now - self.since > (send_s if self._blind else linger_s):
            self.abort()
        return self.deaf

    def close(self) -> None:
        """Close a connection at rest, unless the next request is here already and only not read yet."""
        transport = self._transport
        if transport is not None and not _unread_bytes(transport):
            self.deaf, self.since = True, self._loop.time()
            self._port.cork.flush()
            transport.close()

    def _abandon_waiting(self) -> None:
        waiting = tuple(self._waiting)
        self._waiting.clear()
        for exchange in waiting:
            self.give_back(exchange)
            exchange.abandon(outcome.CLIENT_LEFT, 0)

    def give_back(self, exchange: Exchange) -> None:
        """Return what the exchange held of the budget, and its place among the requests under way."""
        self._budget.give(exchange.held_bytes, exchange.tenant)
        exchange.held_bytes = 0
        if exchange.counted:
            exchange.counted = False
            self._port.uncounted(exchange)

    def let_go(self, exchange: Exchange) -> None:
        """Return what the exchange's body held of the budget."""
        body_bytes = exchange.held_bytes - len(exchange.head.onward)
        if body_bytes > 0:
            self._budget.give(body_bytes, exchange.tenant)
            exchange.held_bytes -= body_bytes

    @property
    def unsent_bytes(self) -> int:
        """What the client has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def bug(self, error: Exception) -> Reply:
        """The gate failed: say so where the process logs, and what the client is told."""
        self._loop.call_exception_handler({"message": "a listener's gate failed", "exception": error})
        return answers.refusal(outcome.INTERNAL, "the balancer failed on this request; it is logged")


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What the kernel has for us. To close over it would be to lose a request, with a reset for an answer."""
    socket = transport.get_extra_info("socket")
    if socket is None:
        return 0
    return int.from_bytes(fcntl.ioctl(socket.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
