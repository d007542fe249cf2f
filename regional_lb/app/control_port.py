"""The gRPC port for a region's global balancers and its peers.

Opened in two steps: `listen`, after which the port's number can be announced, and `start`, once the services are ready.
It only serves what it is given. An internal error is never described to the caller, since an exception's text may name
a tenant, a path or a key; it goes to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from typing import TYPE_CHECKING, Any

import grpc
from farhop_wire import peers_pb2_grpc, region_pb2_grpc

from farhop.relay.http.listener import PortTakenError
from farhop.store.grpc_options import FIXED_WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from farhop.service.config.certificates import Certificates
    from farhop.service.config.endpoints import Listen

CALLS_MAX = 100  # of a connection; the least that RFC 9113 (6.5.2) advises
CONNECTIONS_MAX = 512  # a balancer has one here, or two
_DESCRIPTORS_PART = 8  # one in so many is for these, where descriptors are few
CONTROL_OPTIONS = (
    # By default gRPC shares a port with other listeners there: two balancers would each get half of the pings.
    ("grpc.so_reuseport", 0),
    # Global balancers ping an idle channel, too: only so do they notice a path that swallows everything.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # And a global balancer behind such a path must not hold its stream here for hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    *FIXED_WINDOW,
    # A balancer has two streams here and a few calls. Without a bound 200,000 calls, opened and reset at once, took 4 s
    # of the loop, and those left open 100 MB.
    ("grpc.max_concurrent_streams", CALLS_MAX),
)
_GRACE_S = 0.5
# A message is read whole before anybody may judge it, and 4 MiB of small fields take 60 to 140 ms. What is asked is
# short, but for laws and what tenants want of their limits.
_REQUEST_BYTES_MAX = 256 * 1024
_LONG = ("/Law", "/Borrow")

_logger = logging.getLogger("farhop.control")


def connections_max() -> int:
    """How many connections the port takes at a time; gRPC closes any other at once."""
    return min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_PART)


class ControlPort:
    """The gRPC server at the configured host and port."""

    def __init__(self, config: Listen, certificates: Certificates | None) -> None:
        self._config, self._certificates = config, certificates
        self._server: grpc.aio.Server | None = None

    def listen(self) -> int:
        """Bind the port; returns its number. Raises PortTakenError."""
        config = self._config
        # Without a bound, who only reaches the port, and shows no certificate, could take all descriptors.
        options = [*CONTROL_OPTIONS, ("grpc.max_allowed_incoming_connections", connections_max())]
        if config.tls is not None:
            options.append(("grpc.server_handshake_timeout_ms", int(1e3 * config.tls.handshake_s)))
        server = self._server = grpc.aio.server(interceptors=(_ExceptionInterceptor(),), options=options)
        return _bound(server, config.host, config.port, self._certificates)

    async def start(self, region: region_pb2_grpc.RegionServicer, peers: peers_pb2_grpc.PeersServicer) -> None:
        """Answer global balancers by `region`, other balancers of the region by `peers`."""
        assert self._server is not None  # it listens
        region_pb2_grpc.add_RegionServicer_to_server(region, self._server)
        peers_pb2_grpc.add_PeersServicer_to_server(peers, self._server)
        await self._server.start()

    async def close(self) -> None:
        """Close all open calls. Idempotent, at any time."""
        if self._server is not None:
            await self._server.stop(_GRACE_S)


class _ExceptionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Tells the caller of a failed method only that it failed; by default gRPC sends the exception's text."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:  # there is no such method
            return handler
        read = handler.request_deserializer if method.endswith(_LONG) else _bounded(handler.request_deserializer)
        kinds = read, handler.response_serializer
        if not handler.response_streaming:

            async def answer(request: Any, context: Any) -> Any:
                async with _masked_exceptions(method, context):
                    await _check_read(request, context)
                    return await handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(answer, *kinds)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await _check_read(request, context)
            async with (
                _masked_exceptions(method, context),
                contextlib.aclosing(handler.unary_stream(request, context)) as messages,
            ):
                async for message in messages:
                    yield message

        return grpc.unary_stream_rpc_method_handler(stream, *kinds)


def _bounded(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Read no message that is too large. What is raised there gRPC logs, as often as it is sent."""
    return lambda data: read(data) if len(data) <= _REQUEST_BYTES_MAX else None


async def _check_read(request: Any, context: Any) -> None:
    if request is None:
        why = f"a request of this method has at most {_REQUEST_BYTES_MAX} bytes"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


@contextlib.asynccontextmanager
async def _masked_exceptions(method: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError, asyncio.CancelledError, GeneratorExit):
        raise  # what a method says itself, and a caller who left
    except grpc.aio.InternalError:  # so did this one, while it was answered: nothing broke, and it may do so often
        raise asyncio.CancelledError from None
    except Exception:
        _logger.exception("%s broke", method)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error: this balancer's log says more")


def _bound(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass  # gRPC would say why it cannot, too, but in lines of its own on stderr and not to us
        if certificates is not None:
            return server.add_secure_port(address, certificates.server_credentials())
        return server.add_insecure_port(address)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is taken"
        raise PortTakenError(f"control: cannot listen on {address}: {reason}; choose another port") from None
