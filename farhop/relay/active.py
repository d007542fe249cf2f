"""A request under way at one tier, from its complete arrival to its end: the state that the relay and its attempts
share.

Never decides, and never writes: the relay acts on it, attempts read it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    import asyncio

    from farhop.balance.machine import Address, Forward, Request, Usage
    from farhop.relay.formats.resumption import Progress
    from farhop.relay.formats.transcript import AnswerChain
    from farhop.relay.http.exchange import Exchange


class Attempt(Protocol):
    """A request's attempt at an upstream, or at a pair of them: the interface that all kinds of attempts share.
    `began`: its first byte is here; `status` is the upstream's, 0 while unknown; `streams`: it answers with events,
    which can end with an error event; `timing` is the upstream's own server-timing."""

    active: ActiveRequest
    number: int
    began: bool
    timing: bytes

    @property
    def target(self) -> str:
        """The upstream of the attempt."""

    @property
    def status(self) -> int:
        """See above."""

    @property
    def streams(self) -> bool:
        """See above."""

    @property
    def usage(self) -> Usage | None:
        """The usage that the engine has reported so far; None: none yet."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""

    @property
    def last_activity_at(self) -> float:
        """When something of the answer came last; before that, when the attempt was made."""

    def start(self, address: Address) -> None:
        """Request a connection to the upstream."""

    def abort(self) -> None:
        """Cancel the work upstream at once, without a callback."""

    def recall(self) -> None:
        """The law forbids its upstream from now on: give it up unless it has been sent completely."""

    def pause(self) -> None:
        """The client reads too slowly: stop sending."""

    def resume(self) -> None:
        """The client has read what was sent: send more."""

    def check(self, now: float) -> None:
        """Apply the time limits. `now` is the relay's clock."""


class RequestOwner(Protocol):
    """The owner of a request, which ends it if its client is gone, or if this process stops."""

    def client_left(self, active: ActiveRequest) -> None:
        """The connection of the client is closed."""

    def stopped(self, active: ActiveRequest) -> None:
        """The listener shuts down, and its drain time is over."""


class DeclinedAnswer(NamedTuple):
    """An engine's whole answer that it takes no request now: `head` are its header lines."""

    status: int
    head: bytes
    body: bytes


class ActiveRequest(msgspec.Struct, eq=False):
    """One request under way. `context` belongs to the tier. With an `answer_chain` its answer's text is read. `geo` is
    the residency that its usage is to say again, "" for none. `attempts` makes its attempts (the relay's to call)."""

    _owner: RequestOwner
    exchange: Exchange
    request: Request
    body: bytes
    hide_usage: bool
    context: Any
    arrived_at: float
    answer_chain: AnswerChain | None
    geo: str = ""
    attempts: Any = None
    progress: Progress | None = None  # of its stream, if that can be continued elsewhere
    attempt: Attempt | None = None
    forward: Forward | None = None
    timer: asyncio.TimerHandle | None = None
    due: float = inf  # when the machine wants to be called
    forwarded_at: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0  # when its answer was whole
    target: bytes = b""  # what is asked for in place of what the client asked for, once its stream broke
    hold_from: float | None = None
    paused: bool = False  # its client is behind: neither the present attempt nor one that continues it reads on
    reasons: Any = None  # the machine's last decision on it
    status: int = 0  # of the answer that began
    streams: bool = False  # whether that is a stream of events, which can end with an error event
    usage: Usage | None = None
    is_within_event: bool = False  # what its client has of the stream may end within an event
    next_number: int = 0  # that of the event which would follow, where events have numbers
    needs_fresh: bool = False  # a kept connection was closed under it: the next attempt is not to meet another such
    declined: DeclinedAnswer | None = None  # the last engine's that took no request: the answer, if no other takes it
    version: bytes = b""  # of the model, as the tier below reported with its answer

    # -- exchange.ExchangeCallbacks

    def client_left(self) -> None:
        """The connection of the client is closed."""
        self._owner.client_left(self)

    def stopped(self) -> None:
        """The listener shuts down, and its drain time is over."""
        self._owner.stopped(self)

    def pause(self) -> None:
        """The client reads too slowly: stop sending."""
        self.paused = True
        if self.attempt is not None:
            self.attempt.pause()

    def resume(self) -> None:
        """The client has read what was sent: send more."""
        self.paused = False
        if self.attempt is not None:
            self.attempt.resume()
