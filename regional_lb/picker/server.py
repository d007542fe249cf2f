"""The port that gateways ask: ext_proc's one method and gRPC health, bounded, drained, each stream on its own.

A stream is a request. Who asks and what may pass is the ingress's to say, as on every listener; where it goes is the
machine's, by the relay. Never decides, and never carries a request to an engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import grpc
from farhop_wire import ext_proc_pb2 as wire
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from farhop.relay.http.listener import SWEEP_S
from regional_lb.picker.stream import GatewayRun, GatewayStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from farhop.balance.limits import ByteBudget, SlotLimit
    from farhop.balance.machine import Address, Event, Request
    from farhop.relay.active import ActiveRequest
    from farhop.relay.formats.transcript import Continuation
    from farhop.relay.http.connection import ClientLimits
    from farhop.relay.http.exchange import Exchange, RequestHandler
    from farhop.relay.relay import Relay
    from farhop.telemetry.logs import Throttled
    from regional_lb.fleet.view import View
    from regional_lb.picker.config import PickerConfig
    from regional_lb.scheduler.pick import Pick

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),  # a gateway that is gone must not hold its streams here for hours
    ("grpc.keepalive_timeout_ms", 5_000),
)
_MESSAGE_BYTES_OVER = 1 << 20  # beside a body: a gateway's buffer may be sent whole
_LINGER_S = 5.0  # for a gateway to end a stream whose last word is said
_PAST = "while no picker answers, gateways send requests past the law; have them fail closed"
_HEALTH = health_pb2.HealthCheckResponse
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009 - its stubs do not know it


class PickerServer:
    """See the module's head. `handler` is the ingress; `ready` whether work should be sent here; `view` gives the
    replicas of now. `misled_by` counts by problem what gateways did wrong, `moved` requests that went to a later
    endpoint of their list."""

    def __init__(
        self,
        config: PickerConfig,
        handler: RequestHandler,
        relay: Relay,
        limits: ClientLimits,
        budget: ByteBudget,
        requests: SlotLimit,
        *,
        view: Callable[[], View],
        ready: Callable[[], bool],
        log: Throttled,
    ) -> None:
        self.config, self.handler, self.limits = config, handler, limits
        self.budget, self.requests = budget, requests
        self.is_hop = config.callers == "hop"
        self.moved = 0
        self.misled_by: Counter[str] = Counter()
        self.refused_mode = ""
        self.stopping = False
        self._relay, self._view, self._ready, self._log = relay, view, ready, log
        self._streams: dict[GatewayStream, asyncio.Task[Any] | None] = {}
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def streams(self) -> int:
        """Requests that gateways have open here."""
        return len(self._streams)

    # -- opening and closing

    async def open(self, listen: Callable[[grpc.aio.Server], int]) -> int:
        """Serve; returns the port. `listen` binds the server to it, and may raise PortTakenError."""
        size = self.limits.head_bytes_max + _MESSAGE_BYTES_OVER
        streams = ("grpc.max_concurrent_streams", max(1, min(self.requests.capacity, 2**31 - 1)))
        self._server = grpc.aio.server(options=(*_OPTIONS, streams, ("grpc.max_receive_message_length", size)))
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=wire.ProcessingRequest.FromString,  # answers are bytes already
        )
        generic = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((generic,))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self), self._server)
        port = listen(self._server)
        await self._server.start()
        self._sweep()
        return port

    async def close(self, deadline_s: float) -> None:
        """Drain: healthy no more; what is under way has until the deadline, then it ends as on a listener."""
        self.stopping = True
        if self._server is None:
            return
        await self._emptied(deadline_s)
        for stream in tuple(self._streams):
            stream.expel()
        await self._emptied(1.0)
        await self._server.stop(0.0)
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _emptied(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while self._streams and loop.time() < end:
            await asyncio.sleep(0.02)

    def healthy(self, service: str) -> bool | None:
        """By the names that the protocol has; None for another."""
        if service in ("", LIVENESS):
            return True
        return not self.stopping and self._ready() if service in (READINESS, SERVICE) else None

    def fails_open(self, pools: Sequence[str]) -> bool:
        """Whether some gateway lets requests past when no picker answers, by our configuration or a pool's word."""
        return bool(pools) or self.config.failure_mode == "FailOpen"

    def status(self, pools: Sequence[str]) -> dict[str, Any]:
        """For /status. `pools` are those whose gateways fail open."""
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
            "misled": dict(self.misled_by),
            "trouble": trouble,
        }

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        now = loop.time()
        for stream, task in tuple(self._streams.items()):
            stream.check(now)
            if stream.is_over and now - stream.heard_at > _LINGER_S and task is not None:
                task.cancel()

    # -- a stream

    async def _process(self, _messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        sender = _Sender(context, task)
        stream = sender.stream = GatewayStream(self, sender.wake, loop.time)
        self._streams[stream] = task
        read, write, outbox, eof = context.read, context.write, stream.outbox, _EOF
        try:
            while not stream.is_over:
                message = await read()
                if message is eof:
                    break
                sender.busy = True
                stream.take(message)
                if sender.late is not None:
                    await sender.late
                while outbox:
                    await write(outbox.popleft())
                stream.sent()
                sender.busy = False
        except asyncio.CancelledError:
            if not sender.ended:
                raise
            task.uncancel()
        except grpc.aio.BaseError:
            pass  # the gateway went away while it was written to
        finally:
            del self._streams[stream]
            stream.gone()
        if stream.broken:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, stream.broken)

    # -- stream.Picker

    def endpoints(self, active: ActiveRequest) -> list[tuple[str, Address]]:
        """See stream.Picker: after the chosen one the best of those with room, as many as are configured."""
        assert active.forward is not None
        places = [(active.forward.target, active.forward.address)]
        pick: Pick | None = active.reasons
        if pick is None or not self.config.fallbacks:
            return places
        view, first = self._view().replicas, places[0][0]
        for name in pick.ready():
            if len(places) > self.config.fallbacks:
                break
            if name != first and name in view and not view[name].bound:
                places.append((name, view[name].address))
        return places

    def refuse_mode(self, problem: str) -> None:
        """See stream.Picker."""
        self.refused_mode = problem
        self._log.error("the gateway cannot be served", problem, problem=problem)
        self.misled_by["mode"] += 1

    def misled(self, problem: str) -> None:
        """See stream.Picker."""
        self.misled_by["order"] += 1
        self._log.warning("the gateway does not keep to the protocol", problem, problem=problem)

    def bug(self, error: Exception) -> None:
        """See stream.Picker."""
        asyncio.get_running_loop().call_exception_handler({"message": "the picker failed", "exception": error})

    # -- ingress.Carrying

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: Any,
        arrived_at: float = 0.0,
        continuation: Continuation | None = None,
        geo: str = "",
    ) -> None:
        """A request is read: it is decided on as others are, within what the gateway allows, and sent once."""
        stream: GatewayStream = exchange.stream  # type: ignore[attr-defined]  # ours, as every exchange here
        among = None if stream.among is None else self._named(stream.among)
        self._relay.start(
            exchange, replace(request, among=among, once=True, divisible=False), body, hide_usage=hide_usage,
            context=context, arrived_at=arrived_at, continuation=continuation, geo=geo,
            attempts=partial(_run, stream=stream),
        )  # fmt: skip

    def react(self, event: Event, now: float | None = None) -> None:
        """Let the machine decide."""
        self._relay.react(event, now)

    def holds(self, request_id: str) -> bool:
        """Whether a request is here and was sent nowhere yet."""
        return self._relay.holds(request_id)

    def _named(self, endpoints: list[str]) -> frozenset[str]:
        """The replicas at these endpoints; an address alone stands for all of its ports."""
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


class _Sender:
    """Writes a stream's outbox, in order, from one place at a time: its own task while that is `busy` with a message,
    another when the machine decides on what is held. That one ends the stream's, which waits for a message, if nothing
    more is to be said (`ended`)."""

    __slots__ = ("_context", "_task", "busy", "ended", "late", "stream")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], task: asyncio.Task[Any]) -> None:
        self._context, self._task = context, task
        self.late: asyncio.Task[None] | None = None
        self.busy = self.ended = False
        self.stream: GatewayStream | None = None

    def wake(self) -> None:
        """Something is to be sent, or the stream is over."""
        if not self.busy and self.late is None and not self._task.done():
            self.late = asyncio.get_running_loop().create_task(self._send_late())

    async def _send_late(self) -> None:
        stream = self.stream
        assert stream is not None
        try:
            while stream.outbox:
                await self._context.write(stream.outbox.popleft())
            stream.sent()
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            stream.gone()  # the gateway has gone meanwhile
        finally:
            self.late = None
        if stream.is_over and not self.busy:
            self.ended = True
            self._task.cancel()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no stubs
    """gRPC health by name, as it is when asked."""

    def __init__(self, picker: PickerServer) -> None:
        self._picker = picker

    def _status(self, service: str) -> int:
        healthy = self._picker.healthy(service)
        if healthy is None:
            return int(_HEALTH.SERVICE_UNKNOWN)
        return int(_HEALTH.SERVING if healthy else _HEALTH.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """How a service is now."""
        status = self._status(request.service)
        if status == _HEALTH.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:64]!r} here")
        return _HEALTH(status=status)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        """How it is, and again when that changes."""
        said = None
        while True:
            status = self._status(request.service)
            if status != said:
                said = status
                yield _HEALTH(status=status)
            await asyncio.sleep(SWEEP_S)
