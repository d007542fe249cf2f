"""The connection to etcd: one endpoint at a time, the next one when it fails, TLS and password where configured.

It extends aetcd's client, which opens an insecure channel to one endpoint. Invariants: every call ends within the
timeout; a failed connection is never used again; what gRPC raises becomes StoreError or StoreUnreachable here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aetcd
import aetcd.rpc
import grpc
import grpc.aio

from farhop.store.contract import ROOT, StoreError, StoreUnreachable
from farhop.store.etcd_settings import ENDPOINT
from farhop.store.grpc_options import FIXED_WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from farhop.store.etcd_settings import EtcdSettings

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024  # gRPC's own 4 MiB would fail the snapshot of a large fleet
CHANNEL_OPTIONS = {
    # Else channels of one process share connections, and a new one is handed another's that is dead already.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_http_proxy": 0,  # etcd is never behind the proxy of the environment
    "grpc.max_receive_message_length": MESSAGE_LIMIT_BYTES,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # etcd hangs up (too_many_pings) on clients that ping more often than every 5 s, its --grpc-keepalive-min-time, so
    # this is only the second net. The first one, and the faster, is the question of `EtcdLink._prove`.
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0,
    **dict(FIXED_WINDOW),
}
# A member cut off from its leader must say so instead of serving silence.
REQUIRE_LEADER = (("hasleader", "true"),)

_GONE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAUTHENTICATED,
}
_STALE_LOGIN = ("invalid auth token", "revision of auth store is old")

ASKED_AFTER_SHARE = 0.25  # of `timeout_s`: a watch's connection that is silent for so long is asked a question


class EtcdClient(aetcd.Client):  # type: ignore[misc]  # aetcd ships no types
    """aetcd's client with a TLS channel, and without its watcher, which hides its errors (see EtcdStore.watch)."""

    def __init__(self, endpoint: str, settings: EtcdSettings, credentials: grpc.ChannelCredentials | None) -> None:
        match = ENDPOINT.fullmatch(endpoint)
        assert match is not None  # EtcdSettings saw to it
        super().__init__(
            host=match[2],
            port=int(match[3]),
            username=settings.username,
            password=settings.password,
            timeout=settings.timeout_s,
            options=CHANNEL_OPTIONS,
        )
        self.endpoint = endpoint
        self.watchstub: Any = None
        self.metadata: tuple[tuple[str, str], ...] | None = None  # the login token, where there is a login
        self.answered_at = asyncio.get_running_loop().time()  # anything at all
        self.prover: asyncio.Task[None] | None = None
        self._credentials = credentials

    async def connect(self) -> None:
        """Open the channel and log in. Raises grpc.aio.AioRpcError. For one task at a time."""
        target, options = f"{self._host}:{self._port}", list(self._options.items())
        if self._credentials is None:
            self.channel = aetcd.rpc.insecure_channel(target, options=options)
        else:
            self.channel = aetcd.rpc.secure_channel(target, self._credentials, options=options)
        if self._username is not None:
            request = aetcd.rpc.AuthenticateRequest(name=self._username, password=self._password)
            reply = await aetcd.rpc.AuthStub(self.channel).Authenticate(request, timeout=self._timeout)
            self.metadata = (("token", reply.token),)
        self.kvstub = aetcd.rpc.KVStub(self.channel)
        self.leasestub = aetcd.rpc.LeaseStub(self.channel)
        self.watchstub = aetcd.rpc.WatchStub(self.channel)
        self._connected.set()


class EtcdLink:
    """The client in use, replaced by one to the next endpoint when it fails."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.client: EtcdClient | None = None
        self._turn = 0
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._credentials: grpc.ChannelCredentials | None = None  # the last that could be read

    async def open(self) -> None:
        """Try every endpoint once. Raises StoreError."""
        self._closed = False
        if any(self.settings.tls(endpoint) for endpoint in self.settings.endpoints):
            self._credentials = await asyncio.to_thread(_read_credentials, self.settings)
        # Linearizable: a quorum must answer. Of a key that every role may read which may read anything of ours.
        request = aetcd.rpc.RangeRequest(key=ROOT.encode(), limit=1, keys_only=True)
        share_s = self.settings.timeout_s / len(self.settings.endpoints)
        failures = []
        for _ in self.settings.endpoints:
            endpoint = self._endpoint()
            try:
                async with asyncio.timeout(share_s), self.session() as client:
                    await client.kvstub.Range(request, metadata=client.metadata)
            except StoreUnreachable as error:
                failures.append(str(error))
            except TimeoutError:
                if self.client is not None:
                    self.retire(self.client)
                failures.append(f"etcd at {endpoint}: no answer within {share_s:g} s; is it running?")
            else:
                return
        raise StoreUnreachable("; ".join(failures))

    async def close(self) -> None:
        """Close the connection and wait until those replaced are closed. Idempotent."""
        self._closed = True
        if self.client is not None:
            self.retire(self.client)
        if self._closing:
            await asyncio.wait(self._closing)

    async def call(self, stub: str, method: str, request: Any) -> Any:
        """One unary call. Raises StoreError. Repeated once, after a new login, if etcd no longer knows the token."""
        try:
            return await self._call(stub, method, request)
        except _StaleLogin:
            return await self._call(stub, method, request)

    async def _call(self, stub: str, method: str, request: Any) -> Any:
        async with self.session() as client:
            rpc = getattr(getattr(client, stub), method)
            return await rpc(request, timeout=self.settings.timeout_s, metadata=client.metadata)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncGenerator[EtcdClient, None]:
        """The client to use now; failures inside become StoreError, and retire it where the connection is to blame."""
        client: EtcdClient | None = None
        try:
            client = await self._current()
            yield client
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, client) from None
        except (TimeoutError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            # The last: a write to a call that had ended, before its end was read.
            raise self._gone(client, str(error) or f"no answer within {self.settings.timeout_s} s") from None
        except asyncio.CancelledError:
            # Closing a channel cancels its calls, which looks like our own cancellation to the task that awaits one.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._gone(client, "the connection was given up") from None

    def watched(self, client: EtcdClient) -> None:
        """A watch of this client is read, which may be silent for hours: have the connection proven meanwhile."""
        if client.prover is None:
            client.prover = asyncio.create_task(self._prove(client), name=f"prove {client.endpoint}")

    async def _prove(self, client: EtcdClient) -> None:
        # Once for all watches of a connection, of which a balancer has ten. A live etcd answers at once, from what it
        # holds itself: whether it has a leader its watches say (REQUIRE_LEADER).
        # It is asked early, so that most of `timeout_s` is left for the answer: a slow etcd is better than none.
        loop, silence_s = asyncio.get_running_loop(), ASKED_AFTER_SHARE * self.settings.timeout_s
        answer_s = self.settings.timeout_s - silence_s
        request = aetcd.rpc.RangeRequest(key=ROOT.encode(), limit=1, keys_only=True, serializable=True)
        while self.client is client:
            if (rest_s := client.answered_at + silence_s - loop.time()) > 0:
                await asyncio.sleep(rest_s)
                continue
            try:
                await client.kvstub.Range(request, timeout=answer_s, metadata=client.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() in _GONE:
                    self.retire(client)
                    return
            client.answered_at = loop.time()  # what it refuses, too

    def retire(self, client: EtcdClient) -> None:
        """Never use this client again; the next call uses the next endpoint."""
        if client is not self.client:
            return
        self.client = None
        self._turn += 1
        self._dispose(client)

    def _dispose(self, client: EtcdClient) -> None:
        if client.prover is not None and client.prover is not asyncio.current_task():
            client.prover.cancel()
        task = asyncio.create_task(client.close(), name=f"close etcd channel to {client.endpoint}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _current(self) -> EtcdClient:
        async with self._opening:
            if self.client is None and self._credentials is not None:
                with contextlib.suppress(StoreError):  # certificates are renewed under us; what was may still serve
                    self._credentials = await asyncio.to_thread(_read_credentials, self.settings)
            if self._closed:
                raise StoreError(f"etcd at {self._endpoints()}: the store is closed; open it")
            if self.client is None:
                endpoint = self._endpoint()
                credentials = self._credentials if self.settings.tls(endpoint) else None
                client = EtcdClient(endpoint, self.settings, credentials)
                try:
                    await client.connect()
                except BaseException:
                    self._turn += 1
                    self._dispose(client)
                    raise
                self.client = client
            return self.client

    def _endpoint(self) -> str:
        return self.settings.endpoints[self._turn % len(self.settings.endpoints)]

    def _endpoints(self) -> str:
        return ",".join(self.settings.endpoints)

    def _gone(self, client: EtcdClient | None, detail: str) -> StoreUnreachable:
        if client is not None:
            self.retire(client)
        endpoint = client.endpoint if client is not None else self._endpoints()
        remedy = "is it running, and is the address right?"
        if "SSL" in detail or "TSI_" in detail:  # there is something there, and TLS with it fails
            remedy = "check ca_file, and cert_file and key_file if etcd asks for clients' certificates"
        elif self._credentials is None:
            remedy += " If it speaks TLS, give ca_file"
        return StoreUnreachable(f"etcd at {endpoint}: {detail}; {remedy}")

    def _translate(self, error: grpc.aio.AioRpcError, client: EtcdClient | None) -> StoreError:
        detail = " ".join((error.details() or error.code().name).split())
        if any(text in detail for text in _STALE_LOGIN):
            if client is not None:
                self.retire(client)
            return _StaleLogin(f"etcd at {self._endpoints()}: {detail}; log in again")
        if error.code() in _GONE:
            return self._gone(client, detail)
        return StoreError(f"etcd at {self._endpoints()}: {detail}; {_remedy(error.code(), detail)}")


class _StaleLogin(StoreUnreachable):
    """etcd restarted, or its users changed: the token must be fetched again. Nothing was done."""


def _remedy(code: grpc.StatusCode, detail: str) -> str:
    match code:
        case grpc.StatusCode.PERMISSION_DENIED:
            return "grant the user's role what deploy/etcd/roles.sh grants"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "its space or its patience is used up: compact, defragment, disarm the alarm"
    if "authentication" in detail or "user name" in detail:
        return "check username and password, and whether auth is enabled in etcd"
    return "see etcd's own log"


def _read_credentials(settings: EtcdSettings) -> grpc.ChannelCredentials:
    contents = []
    for name in ("ca_file", "key_file", "cert_file"):
        path = getattr(settings, name)
        try:
            contents.append(path.read_bytes() if path is not None else None)
        except OSError as error:
            raise StoreError(f"etcd {name} {path}: {error.strerror}; check the path and its permissions") from None
    return grpc.ssl_channel_credentials(*contents)
