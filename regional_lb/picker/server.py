"""The listener for gateways: ext_proc's one method and gRPC health, bounded, drained, with independent streams.

A stream is a request. The ingress authenticates and checks it, as on every listener; the machine chooses its target, by
way of the relay. Never decides, and never carries a request to an engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, cast

from farhop_wire import ext_proc_pb2 as wire
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from msgspec.structs import replace

from farhop.relay.http.listener import SWEEP_S, PortTakenError
from farhop.relay.http.tls import GIVES_WAY_S, Handshakes
from farhop.service.process.tasks import until
from regional_lb.picker.connection import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
    Call,
    GatewayConnection,
)
from regional_lb.picker.stream import GatewayRun, GatewayStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.bounds import ByteBudget, SlotLimit
    from farhop.balance.machine import Address, Event, Request
    from farhop.relay.active import ActiveRequest
    from farhop.relay.formats.transcript import AnswerChain
    from farhop.relay.http.connection import ClientLimits
    from farhop.relay.http.exchange import Exchange, RequestHandler
    from farhop.relay.http.tls import ListenerTls
    from farhop.relay.relay import Relay
    from farhop.telemetry.logs import Throttled
    from regional_lb.fleet.view import View
    from regional_lb.picker.config import PickerConfig
    from regional_lb.scheduler.pick import Pick

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
_PROCESS = f"/{SERVICE}/Process".encode()
_CHECK, _WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
_CONNECTIONS_MAX = 4096  # of gateways, each with many requests on it
_MESSAGE_BYTES_OVER = 1 << 20  # besides a body: a gateway's buffer may be sent whole
_PAST = "while no picker answers, gateways send requests past the law; have them fail closed"
_HEALTH = health_pb2.HealthCheckResponse


class PickerServer:
    """See the module's docstring. `handler` is the ingress; `ready` whether requests should be sent here; `view`
    returns the present replicas. `violations` counts gateways' errors by problem, `moved` requests that went to a later
    endpoint of their list.
    """

    def __init__(
        self,
        config: PickerConfig,
        handler: RequestHandler,
        relay: Relay,
        limits: ClientLimits,
        budget: ByteBudget,
        requests: SlotLimit,
        *,
        tls: ListenerTls | None,
        view: Callable[[], View],
        ready: Callable[[], bool],
        log: Throttled,
    ) -> None:
        self.config, self.handler, self.limits = config, handler, limits
        self.budget, self.requests = budget, requests
        self.is_hop = config.callers == "hop"
        self.moved = 0
        self.violations: Counter[str] = Counter()
        self.refused_mode = ""
        self.stopping = False
        self._relay, self._view, self._ready, self._log = relay, view, ready, log
        self.open_streams: set[GatewayStream] = set()
        self._connections: set[GatewayConnection] = set()
        self._handshakes = None if tls is None else Handshakes(self._connection, tls)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def streams(self) -> int:
        """The number of open requests of gateways."""
        return len(self.open_streams)

    # -- opening and closing

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port (chosen by the system if `port` is 0). Raises PortTakenError."""
        try:
            made = self._handshakes or self._connection
            self._server = await asyncio.get_running_loop().create_server(made, host, port, backlog=1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PortTakenError(f"picker: cannot listen on {host}:{port}: {reason}; choose another port") from None
        self._sweep()
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self, deadline_s: float) -> None:
        """Drain: not healthy any more; open requests have until the deadline, then they end as on a listener."""
        self.stopping = True
        if self._server is None:
            return
        await self.emptied(deadline_s)
        for stream in tuple(self.open_streams):
            stream.expel()
        await self.emptied(1.0)
        await self.break_off()

    async def break_off(self) -> None:
        """Stop listening, and close every connection now."""
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._handshakes is not None:
            await self._handshakes.close()
        for connection in tuple(self._connections):
            connection.close()

    async def emptied(self, within_s: float) -> None:
        await until(lambda: not self.open_streams, within_s)

    def healthy(self, service: str) -> bool | None:
        """The health of a service by its name in the gRPC health protocol; None for unknown names."""
        if service in ("", LIVENESS):
            return True
        return not self.stopping and self._ready() if service in (READINESS, SERVICE) else None

    def fails_open(self, pools: Sequence[str]) -> bool:
        """Whether some gateway lets requests pass if no picker answers, by our configuration or a pool's."""
        return bool(pools) or self.config.failure_mode == "FailOpen"

    def status(self, pools: Sequence[str]) -> dict[str, Any]:
        """The state for /status. `pools`: those whose gateways fail open."""
        trouble = [f"{pool} says FailOpen: {_PAST}" for pool in pools]
        if self.config.failure_mode == "FailOpen":
            trouble.append(f"picker.failure_mode is FailOpen: {_PAST}")
        if self.refused_mode:
            trouble.append(self.refused_mode)
        return {
            "callers": self.config.callers,
            "failure_mode": self.config.failure_mode,
            "streams": self.streams,
            "moved": self.moved,
            "protocol_violated": dict(self.violations),
            "trouble": trouble,
        }

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        for connection in tuple(self._connections):
            connection.sweep(loop.time())

    # -- connections and calls

    def _connection(self) -> asyncio.Protocol:
        if len(self._connections) >= _CONNECTIONS_MAX and not self._make_room():
            return _RefusedConnection()
        connection = GatewayConnection(
            self._call, self._connections.discard,
            calls_max=max(1, min(self.requests.capacity, 2**31 - 1)),
            message_bytes_max=self.limits.head_bytes_max + _MESSAGE_BYTES_OVER, budget=self.budget,
        )  # fmt: skip
        self._connections.add(connection)
        return connection

    def _make_room(self) -> bool:
        """Close the connection that has been without a request for longest."""
        now = asyncio.get_running_loop().time()
        among = [one for one in self._connections if now - one.called_at > GIVES_WAY_S and not _carries(one)]
        if not among:
            return False
        min(among, key=lambda one: one.called_at).close()
        return True

    def _call(self, path: bytes, wake: Callable[[], None]) -> Call | None:
        if path == _PROCESS:
            return _Process(self, wake) if len(self.open_streams) < self.requests.capacity else _Full()
        if path in (_CHECK, _WATCH):
            return _Health(self, wake, watches=path == _WATCH)
        return None

    def begin(self, wake: Callable[[], None]) -> GatewayStream:
        """A gateway begins a request."""
        stream = GatewayStream(self, wake, asyncio.get_running_loop().time)
        self.open_streams.add(stream)
        return stream

    def over(self, stream: GatewayStream) -> None:
        """The request is over, and nothing more of it is to be sent."""
        self.open_streams.discard(stream)

    # -- stream.Picker

    def endpoints(self, active: ActiveRequest) -> list[tuple[str, Address]]:
        """See stream.Picker: after the chosen one the best of those with room, up to the configured number."""
        assert active.forward is not None
        places = [(active.forward.target, active.forward.address)]
        pick: Pick | None = active.reasons
        if pick is None or not self.config.fallbacks:
            return places
        view, first = self._view().replicas, places[0][0]
        for name in pick.ready():
            if len(places) > self.config.fallbacks:
                break
            if name != first and name in view and not view[name].decode_only:
                places.append((name, view[name].address))
        return places

    def refuse_mode(self, problem: str) -> None:
        """See stream.Picker."""
        self.refused_mode = problem
        self._log.error("the gateway cannot be served", problem, problem=problem)
        self.violations["mode"] += 1

    def protocol_violated(self, problem: str) -> None:
        """See stream.Picker."""
        self.violations["order"] += 1
        self._log.warning("the gateway does not keep to the protocol", problem, problem=problem)

    def bug(self, error: Exception) -> None:
        """See stream.Picker."""
        asyncio.get_running_loop().call_exception_handler({"message": "the picker failed", "exception": error})

    # -- ingress.RequestCarrier

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: Any,
        arrived_at: float = 0.0,
        answer_chain: AnswerChain | None = None,
        geo: str = "",
    ) -> None:
        """A request was read: it is decided on like others, within the gateway's restriction, and sent once."""
        stream: GatewayStream = exchange.stream  # type: ignore[attr-defined]  # ours, as every exchange here
        among = None if stream.among is None else self._named(stream.among)
        self._relay.start(
            exchange, replace(request, among=among, once=True, divisible=False), body, hide_usage=hide_usage,
            context=context, arrived_at=arrived_at, answer_chain=answer_chain, geo=geo,
            attempts=partial(_run, stream=stream),
        )  # fmt: skip

    def react(self, event: Event, now: float | None = None) -> None:
        """Pass an event to the state machine, and execute its commands."""
        self._relay.react(event, now)

    def holds(self, request_id: str) -> bool:
        """Whether a request is here and was not sent yet."""
        return self._relay.holds(request_id)

    def _named(self, endpoints: list[str]) -> frozenset[str]:
        """The replicas at these endpoints; an address alone means all of its ports."""
        wanted = {endpoint.strip("[]") if _is_bare(endpoint) else endpoint for endpoint in endpoints}
        view = self._view().replicas
        return frozenset(name for name, one in view.items() if str(one.address) in wanted or one.address.host in wanted)


def _run(owner: Relay, active: ActiveRequest, number: int, now: float, *, stream: GatewayStream) -> GatewayRun:
    return GatewayRun(owner, active, number, now, stream)


def _is_bare(endpoint: str) -> bool:
    try:
        ip_address(endpoint.strip("[]"))
    except ValueError:
        return False
    return True


class _Process:
    """ext_proc's one method: a request that a gateway carries."""

    __slots__ = ("_server", "outbox", "stream")

    def __init__(self, server: PickerServer, wake: Callable[[], None]) -> None:
        self._server = server
        self.stream = server.begin(wake)
        self.outbox = self.stream.outbox

    @property
    def status(self) -> tuple[int, str] | None:
        """See Call."""
        stream = self.stream
        if not stream.is_over:
            return None
        return (FAILED_PRECONDITION, stream.broken) if stream.broken else _SERVED

    @property
    def withdrawn(self) -> bool:
        """See Call."""
        return self.stream.withdrawn

    def take(self, message: bytes | memoryview) -> None:
        """See Call."""
        try:
            parsed = wire.ProcessingRequest.FromString(message)  # type: ignore[arg-type]  # any buffer will do
        except DecodeError:
            self._server.protocol_violated("a message is not a ProcessingRequest")
            self.stream.abort("a message is not a ProcessingRequest")
        else:
            self.stream.take(parsed)

    def sent(self) -> None:
        """See Call."""
        self.stream.sent()

    def ended(self) -> None:
        """See Call."""
        self.stream.gone()
        self._server.over(self.stream)

    def check(self, now: float) -> None:
        """See Call."""
        self.stream.check(now)


_SERVED = (OK, "")


class _Full:
    """A request beyond the limit over all connections."""

    __slots__ = ("outbox",)
    withdrawn = False
    status = (RESOURCE_EXHAUSTED, "the limit of open requests is reached here: retry later")

    def __init__(self) -> None:
        self.outbox: deque[bytes] = deque()

    def take(self, message: bytes | memoryview) -> None:
        """See Call."""

    def sent(self) -> None:
        """See Call."""

    def ended(self) -> None:
        """See Call."""

    def check(self, now: float) -> None:
        """See Call."""


def _carries(connection: GatewayConnection) -> bool:
    """Whether the connection has an open request."""
    return any(isinstance(stream.call, _Process) for stream in connection.streams.values())


class _RefusedConnection(asyncio.Protocol):
    """A connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


class _Health:
    """gRPC health by name, at the time of the call; with `watches` also at each change."""

    __slots__ = ("_asked", "_picker", "_sent", "_wake", "_watches", "outbox", "status")
    withdrawn = False

    def __init__(self, picker: PickerServer, wake: Callable[[], None], *, watches: bool) -> None:
        self._picker, self._wake, self._watches = picker, wake, watches
        self.outbox: deque[bytes] = deque()
        self.status: tuple[int, str] | None = None
        self._asked: str | None = None
        self._sent: int | None = None

    def take(self, message: bytes | memoryview) -> None:
        """See Call."""
        if self._asked is not None:
            self.status = (INVALID_ARGUMENT, "one service is asked for at a time")
            return
        try:
            self._asked = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            self.status = (INVALID_ARGUMENT, "the message is not a HealthCheckRequest")
            return
        if not self._watches and self._picker.healthy(self._asked) is None:
            self.status = (NOT_FOUND, f"there is no service {self._asked[:64]!r} here")
            return
        self._send_status()
        if not self._watches:
            self.status = _SERVED

    def _send_status(self) -> None:
        assert self._asked is not None
        healthy = self._picker.healthy(self._asked)
        status = _HEALTH.SERVICE_UNKNOWN if healthy is None else _HEALTH.SERVING if healthy else _HEALTH.NOT_SERVING
        if status != self._sent:
            self._sent = status
            self.outbox.append(_HEALTH(status=status).SerializeToString())
            self._wake()

    def sent(self) -> None:
        """See Call."""

    def ended(self) -> None:
        """See Call: a watcher gets nothing more."""
        if self.status is None and (self._asked is None or not self._watches):
            self.status = (INVALID_ARGUMENT, "no service was asked for")

    def check(self, now: float) -> None:  # noqa: ARG002
        """See Call."""
        if self._watches and self._asked is not None and self.status is None:
            self._send_status()
