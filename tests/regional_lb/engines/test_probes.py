"""Each kind of probe on real sockets: an engine that loads, a black hole, a gRPC server, an engine that hangs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from farhop.relay.upstream.pool import Pool, UpstreamLimits
from farhop_lab.world.certs import Authority
from farhop_lab.world.ports import free_ports
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.probes import FAILED, GONE, READY, UNREADY, Prober, generates, prober

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool(UpstreamLimits(connect_s=1.0))
    yield made
    await made.close()
    assert made.connections == 0


def replica(url: str, **probe: Any) -> ReplicaConfig:
    return ReplicaConfig.model_validate({"url": url, "models": ["m"], "probe": probe})


def looker(pool: Pool, one: ReplicaConfig, timeout_s: float = 20.0, key: str | None = None) -> Prober:
    return prober(one, "/health", pool, timeout_s, grpc.ssl_channel_credentials, key)


class Site:
    """A server whose pages answer as told; `asked` are bodies and keys of what it was to complete, `keys` those of
    all requests."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.status: dict[str, int] = {}
        self.hangs = False
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.url = ""

    async def page(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization", ""))
        if request.path == "/v1/completions":
            self.asked.append((await request.json(), request.headers.get("authorization", "")))
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.status.get(request.path, 404), headers={"location": "/health"})


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made, app = Site(), web.Application()
    app.router.add_route("*", "/{tail:.*}", made.page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


# -- HTTP


async def test_an_engine_that_loads_is_alive_and_then_ready(pool: Pool, site: Site) -> None:
    look = looker(pool, replica(site.url)).look
    seen = []
    for status in (503, 200, 500, 404, 302, 204, 206, 200):
        site.status["/health"] = status
        seen.append(await look())
    assert seen == [UNREADY, READY, FAILED, FAILED, FAILED, READY, READY, READY]
    site.hangs = True
    slow = looker(pool, replica(site.url), timeout_s=0.05)
    assert (await slow.look(), slow.why) == (FAILED, f"{site.url}/health: timeout")


async def test_the_path_is_the_replicas_own_and_another_may_say_that_it_lives(pool: Pool, site: Site) -> None:
    look = looker(pool, replica(site.url, path="/ready", live_path="/live")).look
    site.status = {"/ready": 400, "/live": 200}  # Triton's way
    assert await look() == UNREADY
    site.status = {"/ready": 400, "/live": 204}
    assert await look() == UNREADY
    site.status = {"/ready": 503, "/live": 503}
    assert await look() == FAILED
    site.status = {"/ready": 200, "/live": 503}
    assert await look() == READY


async def test_the_port_may_be_another(pool: Pool, site: Site) -> None:
    site.status["/health"] = 200
    port = int(site.url.rpartition(":")[2])
    assert await looker(pool, replica("http://127.0.0.1:9", port=port)).look() == READY


async def test_only_the_engines_own_port_gets_the_engines_key(pool: Pool, site: Site) -> None:
    site.status["/health"] = 200
    port = int(site.url.rpartition(":")[2])
    for one in (replica(site.url), replica(site.url, port=port), replica("http://127.0.0.1:9", port=port)):
        assert await looker(pool, one, key="sk-engine").look() == READY
    assert site.keys == ["Bearer sk-engine", "Bearer sk-engine", ""]


# -- TCP


async def test_a_tcp_probe_succeeds_only_if_connections_are_accepted(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        there = replica(f"http://127.0.0.1:{port}", kind="tcp")
        assert await looker(pool, there, timeout_s=20.0).look() == READY
        # Nothing accepts: once the backlog is full the kernel drops connections, like a host that is gone.
        stuffing = [socket.socket() for _ in range(4)]
        for one in stuffing:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        assert await looker(pool, there, timeout_s=0.2).look() == FAILED
        for one in stuffing:
            one.close()
    (port,) = free_ports(1)
    for kind in ("tcp", "http"):
        assert await looker(pool, replica(f"http://127.0.0.1:{port}", kind=kind)).look() == GONE


# -- gRPC


@asynccontextmanager
async def serving(
    credentials: grpc.ServerCredentials | None = None, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[health_aio.HealthServicer, int]]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    servicer = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield servicer, port
    finally:
        await server.stop(None)


async def test_grpc_health_is_probed_and_reconnects(pool: Pool) -> None:
    (port,) = free_ports(1)  # which it takes twice
    async with serving(address=f"127.0.0.1:{port}") as (servicer, _):
        whole = looker(pool, replica(f"http://127.0.0.1:{port}", kind="grpc"), timeout_s=20.0)
        model = looker(pool, replica(f"http://127.0.0.1:{port}", kind="grpc", service="llm"), timeout_s=20.0)
        assert (await whole.look(), await model.look()) == (READY, FAILED)  # it does not know the service
        await servicer.set("llm", NOT_SERVING)
        assert await model.look() == UNREADY
        await servicer.set("llm", SERVING)
        assert await model.look() == READY
    assert await whole.look() == FAILED
    async with serving(address=f"127.0.0.1:{port}"):
        assert await whole.look() == READY
    await whole.close()
    await model.close()
    await model.close()


async def test_grpc_probe_fails_without_health_service_or_answer(pool: Pool) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            for at in (port, mute.getsockname()[1]):
                one = looker(pool, replica(f"http://127.0.0.1:{at}", kind="grpc"), timeout_s=0.3)
                assert await one.look() == FAILED
                await one.close()
    finally:
        await server.stop(None)


def _bytes(name: str) -> bytes:
    return Path(name).read_bytes()


async def test_grpc_probe_over_tls_verifies_the_certificate(pool: Pool, tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("engine")
    chain, key, ca_file = map(_bytes, (pair.cert_file, pair.key_file, authority.ca_file))
    async with serving(grpc.ssl_server_credentials([(key, chain)]), "localhost:0") as (_, port):
        one = replica(f"https://localhost:{port}", kind="grpc")
        for ca, each in ((ca_file, READY), (None, FAILED)):
            made = prober(one, "/health", pool, 2.0, lambda ca=ca: grpc.ssl_channel_credentials(ca))
            assert await made.look() == each
            await made.close()


# -- a token


async def test_a_completion_probe_fails_on_server_errors_and_timeouts_only(pool: Pool, site: Site) -> None:
    one = replica(site.url)
    seen = []
    for status in (200, 400, 401, 404, 500, 503):
        site.status["/v1/completions"] = status
        seen.append(await generates(pool, one, "sk-engine", 1.0))
    assert seen == [True, None, None, None, False, False]
    body, key = site.asked[0]
    assert (body["model"], body["max_tokens"], key) == ("m", 1, "Bearer sk-engine")
    site.hangs = True
    assert await generates(pool, one, None, 0.05) is False
    assert site.asked[-1][1] == ""
