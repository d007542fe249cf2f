"""How clients reach a balancer in another region: over the wire, and by the next address if one refuses connections.

A client gets the addresses of a few regions, nearest first, as the shipped DNS answers, and tries the next address if a
connection is refused, as clients do with several addresses. Invariant: a request that a balancer accepted is never sent
to another one from here. Never decides what a balancer decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop.balance import outcome
from farhop_lab.sim.relay import ActiveRequest
from farhop_lab.sim.wire import answer_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farhop.balance.machine import Answer, Request, Usage
    from farhop.balance.outcome import Outcome
    from farhop_lab.sim.relay import Client, Prompt, RequestRelay
    from farhop_lab.sim.timeline import Timeline
    from farhop_lab.sim.wire import Wire

ADDRESSES_MAX = 3
"""The most addresses in one answer of the shipped DNS (`entries_max`)."""


class EntryProcess(Protocol):
    """A balancer or router that clients may connect to."""

    @property
    def region(self) -> str:
        """Its region."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""

    @property
    def listens(self) -> bool:
        """Whether it accepts clients."""

    @property
    def relay(self) -> RequestRelay:
        """Its driver."""

    def take(self, active: ActiveRequest, /) -> None:
        """A request has arrived."""


class RemoteRequest:
    """A request on its way from a region to a balancer, and its answers back to `client` in that region.

    Its deadlines, by the clock `now`, are sent as the time that is left. Within one region this takes no time, as a
    client is beside its region's global balancer in the shipped world. If nothing listens, the client gets
    CONNECT_FAILED a round trip later.
    """

    __slots__ = ("_client", "_left_s", "_opened_at", "_over", "_process", "_region", "_wire", "there")

    def __init__(
        self,
        wire: Wire,
        process: EntryProcess,
        region: str,
        now: float,
        request: Request,
        prompt: Prompt,
        client: Client,
    ) -> None:
        self._wire, self._process, self._region, self._client = wire, process, region, client
        self._over, self._opened_at = False, wire.now
        by = request.first_token_by
        self._left_s = max(0.0, request.deadline - now), None if by is None else max(0.0, by - now)
        self.there = ActiveRequest(request, prompt, self)

    @property
    def broken_off(self) -> bool:
        """Whether a black hole has broken its connection: neither end will hear of the other."""
        return self._wire.breaks(self._opened_at, self._process.region, self._region)

    def go(self) -> None:
        """Send it."""
        self._send(self._region, self._process.region, self._arrive)

    def _send(self, a: str, b: str, act: Callable[..., object], *args: object) -> None:
        if a == b:
            act(*args)
        else:
            self._wire.send(a, b, act, *args)

    def _arrive(self) -> None:
        process, request = self._process, self.there.request
        if not process.listens:
            self.broke(outcome.CONNECT_FAILED)
            return
        self._wire.carry(self._region, process.region, request.body_bytes)
        now, (left_s, first_token_s) = process.relay.clock(), self._left_s
        self.there.request = msgspec.structs.replace(
            request,
            deadline=now + left_s,
            first_token_by=None if first_token_s is None else now + first_token_s,
        )
        process.take(self.there)

    def leave(self) -> None:
        """The client disconnected, and gets no more callbacks."""
        self._over = True
        self._send(self._region, self._process.region, self._left)

    def _left(self) -> None:
        if self._process.alive:
            self._process.relay.client_left(self.there.request.id)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._send(self._process.region, self._region, self._receive, act, *args)

    def _receive(self, act: Callable[..., None], *args: object) -> None:
        if not self._over:
            act(*args)

    # -- there: the balancer's client

    def began(self, status: int) -> None:
        """See relay.Client."""
        self._back(self._client.began, status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See relay.Client."""
        self._wire.carry(self._process.region, self._region, answer_bytes(usage))
        self._back(self._client.ended, status, usage)

    def refused(self, answer: Answer) -> None:
        """See relay.Client."""
        self._back(self._client.refused, answer)

    def broke(self, reason: Outcome) -> None:
        """See relay.Client."""
        self._back(self._client.broke, reason)


class ClientRequest:
    """One request of a client until it is concluded: tries one address after another while connections are refused, and
    informs the arrival where it was answered.
    """

    __slots__ = ("_active", "_addresses", "_entry", "remote")

    def __init__(self, entry: ClientEntry, active: ActiveRequest, addresses: Iterator[EntryProcess]) -> None:
        self._entry, self._active, self._addresses = entry, active, addresses
        self.remote: RemoteRequest | None = None

    def go(self) -> bool:
        """Try the next address; False if there is none."""
        entry, active = self._entry, self._active
        process = next(self._addresses, None)
        if process is None:
            return False
        request = msgspec.structs.replace(active.request, entry_region=process.region)
        self.remote = RemoteRequest(entry.wire, process, entry.region, entry.clock(), request, active.prompt, self)
        self.remote.go()
        return True

    def _over(self) -> None:
        self._entry.open.pop(self._active.request.id, None)

    def began(self, status: int) -> None:
        """See relay.Client."""
        assert self.remote is not None  # only `remote` calls this
        active, there = self._active, self.remote.there
        active.target, active.attempts, active.started = there.target.partition("/")[0], there.attempts, True
        active.client.began(status)

    def ended(self, status: int, usage: Usage | None) -> None:
        """See relay.Client."""
        self._over()
        self._active.last_word().ended(status, usage)

    def refused(self, answer: Answer) -> None:
        """See relay.Client."""
        self._over()
        self._active.last_word().refused(answer)

    def broke(self, reason: Outcome) -> None:
        """See relay.Client."""
        if reason is outcome.CONNECT_FAILED and not self._active.started and self.go():
            return
        self._over()
        self._active.last_word().broke(reason)


class ClientEntry:
    """How clients of a region without a balancer find one: at one of `addresses` for their request, nearest first. Has
    the interface of a global balancer in their region.
    """

    def __init__(
        self, region: str, wire: Wire, timeline: Timeline, addresses: Callable[[Request], Iterable[EntryProcess]]
    ) -> None:
        self.region, self.wire, self._timeline, self.addresses = region, wire, timeline, addresses
        self.name = f"entry of {region}"
        self.open: dict[str, ClientRequest] = {}

    @property
    def relay(self) -> ClientEntry:
        """Itself."""
        return self

    def clock(self) -> float:
        """The clients' clock."""
        return self._timeline.now

    def broken_off(self, request_id: str) -> bool:
        """Whether the request's connection was broken by a black hole, so that only its client's patience ends it."""
        request_here = self.open.get(request_id)
        return request_here is not None and request_here.remote is not None and request_here.remote.broken_off

    def start(self, active: ActiveRequest) -> None:
        """Send a request."""
        request_here = self.open[active.request.id] = ClientRequest(self, active, iter(self.addresses(active.request)))
        if not request_here.go():
            request_here.broke(outcome.CONNECT_FAILED)

    def client_left(self, request_id: str) -> bool:
        """See relay.SimulatedRelay."""
        request_here = self.open.pop(request_id, None)
        if request_here is not None and request_here.remote is not None:
            request_here.remote.leave()
        return request_here is not None
