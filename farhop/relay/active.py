"""A request under way at one tier, from its whole arrival to its end: what the relay and its attempts share of it.

Never decides, and never writes: the relay acts on it, attempts read it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    from farhop.balance.machine import Address, Forward, Request, Usage
    from farhop.relay.formats.resumption import Progress
    from farhop.relay.formats.transcript import Continuation
    from farhop.relay.http.exchange import Exchange


class Attempt(Protocol):
    """A request's attempt at an upstream, or at two, as far as others need to know which kind it is. `began`: its first
    byte is here; `status` is the upstream's, 0 while unknown; `streams`: it answers with events, which can end with an
    error event; `timing` is the upstream's own server-timing."""

    active: ActiveRequest
    number: int
    began: bool
    timing: bytes

    @property
    def target(self) -> str:
        """Who is asked."""

    @property
    def status(self) -> int:
        """See above."""

    @property
    def streams(self) -> bool:
        """See above."""

    @property
    def usage(self) -> Usage | None:
        """What the engine said so far of its usage."""

    @property
    def held_bytes(self) -> int:
        """What is kept of the answer now."""

    @property
    def last_activity_at(self) -> float:
        """When something of the answer came last; before that, when the attempt was made."""

    def start(self, address: Address) -> None:
        """Get a connection."""

    def abort(self) -> None:
        """Stop the work upstream at once; tells nobody."""

    def pause(self) -> None:
        """The client is behind."""

    def resume(self) -> None:
        """The client caught up."""

    def check(self, now: float) -> None:
        """Apply the time limits. `now` is the relay's clock."""


class RequestOwner(Protocol):
    """Who ends a request whose client is gone, or that has to end because we stop."""

    def client_left(self, active: ActiveRequest) -> None:
        """The exchange's connection is gone."""

    def stopped(self, active: ActiveRequest) -> None:
        """The listener stops, and time is up."""


class ActiveRequest:
    """One request under way. `context` belongs to the tier. With a `continuation` its answer is listened to. `geo` is
    the residency that its usage is to say again, "" for none. `attempts` makes its attempts (the relay's to call)."""

    __slots__ = (
        "_owner",
        "arrived_at",
        "attempt",
        "attempts",
        "began_at",
        "body",
        "context",
        "continuation",
        "due",
        "exchange",
        "forward",
        "forwarded_at",
        "geo",
        "hide_usage",
        "hold_from",
        "progress",
        "reasons",
        "request",
        "status",
        "streams",
        "target",
        "timer",
        "usage",
        "version",
    )

    def __init__(
        self, owner: RequestOwner, exchange: Exchange, request: Request, body: bytes, hide_usage: bool, context: Any,
        arrived_at: float, continuation: Continuation | None, geo: str = "", attempts: Any = None,
    ) -> None:  # fmt: skip
        self._owner, self.exchange, self.request, self.body = owner, exchange, request, body
        self.hide_usage, self.context, self.continuation = hide_usage, context, continuation
        self.geo, self.attempts = geo, attempts
        self.progress: Progress | None = None  # of its stream, where that can go on elsewhere
        self.attempt: Attempt | None = None
        self.forward: Forward | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.due = inf  # when the machine wants to be called
        self.arrived_at = arrived_at
        self.forwarded_at = self.began_at = 0.0
        self.target = b""  # what is asked for in place of what the client asked for, once its stream broke
        self.hold_from: float | None = None
        self.reasons: Any = None  # the machine's last decision on it
        self.status = 0  # of the answer that began
        self.streams = False  # whether that is a stream of events, which can end with an error event
        self.usage: Usage | None = None
        self.version = b""  # of the model, as the tier below told with its answer

    # -- exchange.ExchangeCallbacks

    def client_left(self) -> None:
        """The exchange's connection is gone."""
        self._owner.client_left(self)

    def stopped(self) -> None:
        """The listener stops, and time is up."""
        self._owner.stopped(self)

    def pause(self) -> None:
        """The client is behind."""
        if self.attempt is not None:
            self.attempt.pause()

    def resume(self) -> None:
        """The client caught up."""
        if self.attempt is not None:
            self.attempt.resume()
