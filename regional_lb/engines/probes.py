"""One health probe of a replica: by HTTP, a TCP connect, gRPC's health service, or by generating a token.

Readiness is not liveness: an engine that loads its weights is alive, and this is no failure. Invariants: every probe is
bounded in time and bytes; a failed probe leaves nothing open; redirects are not followed. Never decides about the
consequences.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.relay.upstream import fetch
from farhop.relay.upstream.dial import dial
from farhop.relay.upstream.fetch import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Address
    from farhop.relay.upstream.pool import Pool
    from regional_lb.engines.config import ReplicaConfig

_HEALTH_BYTES_MAX = 64 * 1024
_COMPLETION_BYTES_MAX = 256 * 1024
_COMPLETIONS = "/v1/completions"
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),  # an engine is never behind the proxy of the environment
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Channels to one target share a connection and its back-off: a new one would fail by what the last one saw.
    ("grpc.use_local_subchannel_pool", 1),
)


class ProbeResult(msgspec.Struct, frozen=True):
    """The result of a probe. `ready` is meaningful only if the replica is alive (`ok`). `gone`: nothing listens there,
    so the process that did is no more."""

    ok: bool
    ready: bool = True
    gone: bool = False


READY, UNREADY, FAILED = ProbeResult(True), ProbeResult(True, ready=False), ProbeResult(False)
GONE = ProbeResult(False, gone=True)


def url_of(address: Address, path: str) -> str:
    """The probed URL, for messages."""
    return f"http{'s' if address.tls is not None else ''}://{address}{path}"


class Prober(Protocol):
    """Probes one replica repeatedly. `why`: why the last probe was not READY, "" if it was."""

    why: str

    async def look(self) -> ProbeResult:
        """Probe once. Never raises."""

    async def close(self) -> None:
        """Close all connections."""


def prober(
    replica: ReplicaConfig,
    path: str,
    pool: Pool,
    timeout_s: float,
    credentials: Callable[[], grpc.ChannelCredentials],
    key: str | None = None,
) -> Prober:
    """As a replica's configuration has it; `path` is where engines of its kind say whether they are ready. `key` goes
    to the engine's own port alone: what answers at another one may be something else."""
    probe, address = replica.probe, replica.address
    if probe.port is not None:
        address = replace(address, port=probe.port)
        key = key if address == replica.address else None
    if probe.kind == "tcp":
        return _Tcp(address, timeout_s)
    if probe.kind == "grpc":
        return _Grpc(address, probe.service, timeout_s, credentials)
    return _Http(pool, address, probe.path or path, probe.live_path, timeout_s, key)


class _Http:
    def __init__(
        self, pool: Pool, address: Address, path: str, live_path: str, timeout_s: float, key: str | None
    ) -> None:
        self._pool, self._address, self._path, self._live_path = pool, address, path, live_path
        self._timeout_s, self._key = timeout_s, key
        self._gone = False
        self.why = ""

    async def look(self) -> ProbeResult:
        """2xx: ready (engines say 200, servers put before them 204, too). Else the page for liveness decides, where
        there is one, and without one 503 alone is alive."""
        status = await self._status(self._path)
        if status // 100 == 2:
            return READY
        if self._gone:
            return GONE
        if not self._live_path:
            return UNREADY if status == 503 else FAILED
        return UNREADY if await self._status(self._live_path) // 100 == 2 else FAILED

    async def _status(self, path: str) -> int:
        url = url_of(self._address, path)
        try:
            answer = await fetch.get(self._pool, self._address, path, self._timeout_s, _HEALTH_BYTES_MAX, self._key)
            status = answer.status
        except FetchError as error:
            self.why, self._gone = f"{url}: {error}", error.outcome is outcome.CONNECT_FAILED
            return 0
        self._gone = False
        self.why = "" if status // 100 == 2 and path == self._path else f"{url}: status {status}"
        return status

    async def close(self) -> None:
        """Does nothing: the connection pool belongs to others."""


class _Tcp:
    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self.why = ""

    async def look(self) -> ProbeResult:
        """READY if the port accepts a connection."""
        try:
            async with asyncio.timeout(self._timeout_s):
                transport, _ = await dial(asyncio.Protocol, self._address.host, self._address.port)
        except OSError as error:  # TimeoutError is one
            self.why = f"{self._address}: {error.strerror or 'timeout'}"
            return GONE if isinstance(error, ConnectionRefusedError) else FAILED
        transport.close()
        self.why = ""
        return READY

    async def close(self) -> None:
        """Does nothing: no connection is kept."""


class _Grpc:
    """grpc.health.v1. A channel is kept while looks succeed; after a failure the next opens another, with the
    certificates of then."""

    def __init__(
        self, address: Address, service: str, timeout_s: float, credentials: Callable[[], grpc.ChannelCredentials]
    ) -> None:
        self._address, self._timeout_s, self._credentials = address, timeout_s, credentials
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._channel: grpc.aio.Channel | None = None
        self.why = ""

    async def look(self) -> ProbeResult:
        """SERVING: ready. NOT_SERVING: alive, not ready. A server that does not know the service fails."""
        if self._channel is None:
            self._channel = self._open()
        try:
            async with asyncio.timeout(2.0 * self._timeout_s):  # gRPC keeps to its own; it has been known not to
                reply = await health_pb2_grpc.HealthStub(self._channel).Check(self._request, timeout=self._timeout_s)
        except (grpc.RpcError, TimeoutError) as error:
            await self.close()
            code = error.code().name.lower() if isinstance(error, grpc.aio.AioRpcError) else "timeout"
            self.why = f"{self._address}: gRPC health: {code.replace('_', ' ')}"
            return FAILED
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            self.why = ""
            return READY
        self.why = f"{self._address}: gRPC health: not serving"
        return UNREADY if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING else FAILED

    def _open(self) -> grpc.aio.Channel:
        address = str(self._address)
        if self._address.tls is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL)
        return grpc.aio.secure_channel(address, self._credentials(), options=_CHANNEL)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)


async def generates(pool: Pool, replica: ReplicaConfig, key: str | None, timeout_s: float) -> bool | None:
    """Whether it completes a prompt by one token in time; None where it refuses to be asked so (a 4xx), which says
    nothing of its GPU."""
    document = {"model": replica.models[0], "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    body = msgspec.json.encode(document)
    try:
        answer = await fetch.post(
            pool, replica.address, _COMPLETIONS, body, timeout_s, _COMPLETION_BYTES_MAX, bearer=key
        )
    except FetchError:
        return False
    if 400 <= answer.status < 500:
        return None
    return answer.status // 100 == 2
