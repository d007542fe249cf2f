"""Both tiers in this process, on real sockets, over a store in memory and an engine that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest
from aiohttp import web

from farhop.balance.estimate.rtt import RttEstimate
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.config import GlobalConfig
from global_lb.app.main import GlobalBalancer
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer
from topology import load as topologies
from topology.model import Topology

MODEL = "llama-3.1-8b"
HOP = {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"}
HOP_KEY = "x" * 32
PAGE = 'vllm:num_requests_waiting{engine="0"} 0\nvllm:num_requests_running{engine="0"} 0\n'


async def until(true: Callable[[], Any], within_s: float = 60.0) -> None:
    """Poll a condition, with a bound."""
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)


def as_on_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are as far as the map says: by pings all are here, and the nearest is another each time."""
    monkeypatch.setattr(RttEstimate, "sample", lambda _estimate, _rtt_ms, _now: True)


def tenant(name: str, **more: Any) -> dict[str, Any]:
    """A tenant of the topology's document, whose key is sk-farhop-<name>."""
    sha256 = hashlib.sha256(f"sk-farhop-{name}".encode()).hexdigest()
    return {
        "name": name,
        "keys": [{"name": "demo", "sha256": sha256}],
        "residency": {"processing": {"allow": ["world"]}},
        **more,
    }


def topology(*tenants: dict[str, Any], entries: dict[str, list[str]] | None = None) -> Topology:
    """The default world with more tenants. `entries` replaces those of single regions."""
    document = json.loads(_shipped())
    document["tenants"] += tenants
    for region in document["regions"]:
        region["entry"] = (entries or {}).get(region["name"], region["entry"])
    return _parsed(json.dumps(document))  # is also YAML, and written a hundred times as fast


@cache
def _shipped() -> str:
    path = topologies.shipped("three-regions")
    return json.dumps(topologies.document(path.read_text(), str(path)))


@cache  # it is completely frozen, and dozens of tests use the same
def _parsed(text: str) -> Topology:
    return topologies.parse(text, "test")


class Engine:
    """One replica: `behaviour` says what it does with a request, `seen` holds the heads and bodies it got."""

    def __init__(self) -> None:
        self.behaviour, self.complaint, self.status = "serve", "no", 500
        self.page = PAGE
        self.models: list[dict[str, Any]] = []  # as it lists them, if it does
        self.healthy = True
        self.refuses: Callable[[dict[str, Any]], str] = lambda _body: ""  # the reason, if it refuses a request
        self.counts: Callable[[dict[str, Any]], int] = lambda _body: 11  # tokens of a prompt
        self.release = asyncio.Event()
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.address, self.scheme = "", "http"

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
        """Listen on a free port."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.scheme = "http" if tls is None else "https"
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.page)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": self.models}, status=200 if self.models else 404)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.seen.append(({name.lower(): value for name, value in request.headers.items()}, body))
        if refusal := self.refuses(body):
            return web.json_response(
                {"error": {"message": refusal, "type": "BadRequestError", "code": 400}}, status=400
            )
        if self.behaviour == "error":
            return web.json_response({"error": {"message": self.complaint, "code": "bad"}}, status=self.status)
        if self.behaviour == "page":
            return web.Response(text="<html>who are you?</html>", content_type="text/html")
        if self.behaviour == "no engine":  # a proxy's words, of whatever kind
            return web.Response(text=self.complaint, status=self.status, content_type="text/html")
        if self.behaviour == "wait":
            await self.release.wait()
        if self.behaviour == "vanish":
            assert request.transport is not None
            request.transport.abort()
        prompt_tokens = self.counts(body)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
        if not body.get("stream"):
            return web.json_response({"choices": [{"message": {"content": "hello"}}], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for word in ("one", "two", "three"):
            await answer.write(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % word.encode())
            if self.behaviour == "die":
                assert request.transport is not None
                request.transport.abort()
            elif self.behaviour == "pause":
                await self.release.wait()
        await answer.write(b'data: {"choices":[],"usage":' + msgspec.json.encode(usage) + b"}\n\ndata: [DONE]\n\n")
        return answer


class Both:
    """The two balancers of one region, and the ports they chose."""

    def __init__(self, regional: RegionalBalancer, global_: GlobalBalancer, lines: tuple[str, str]) -> None:
        self.regional, self.global_ = regional, global_
        self.tier, self.client, self.regional_admin = _ports(lines[0])
        self.entry, self.global_admin = _ports(lines[1])

    def _held(self) -> int:
        return sum(b.metrics.in_flight + b.plane.budget.used_bytes for b in (self.global_, self.regional))

    async def at_rest(self) -> None:
        """Until nothing is in flight and nothing held, which must come to be."""
        await until(lambda: self._held() == 0)


def _ports(line: str) -> Iterable[int]:
    return [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]


def common(region: str, instance: str, **more: Any) -> dict[str, Any]:
    """What both tiers' configurations hold. FARHOP_TEST_HOP must be set."""
    return {
        "region": region,
        "instance": instance,
        "admin": {"port": 0},
        "hop": HOP,
        "limits": {"drain_s": 0.5},
        **more,
    }


def regional_config(engine: Engine, region: str = "virginia", **more: Any) -> RegionalConfig:
    """A regional balancer over one engine, on free ports."""
    replica = {"url": f"{engine.scheme}://{engine.address}", "models": [MODEL], "name": "one"}
    document = {
        **common(region, "r1"),
        "tier": {"port": 0},
        "control": {"port": 0},
        "client": {"port": 0},
        "replicas": [replica],
        "watch": {"probe_s": 0.05, "scrape_s": 0.05},
        **more,
    }
    return RegionalConfig.model_validate(document)


def global_config(region: str = "virginia", **more: Any) -> GlobalConfig:
    """A global balancer on free ports."""
    return GlobalConfig.model_validate({**common(region, "g1"), "listen": {"port": 0}, **more})


@asynccontextmanager
async def both(
    engine: Engine,
    world: Topology,
    *,
    regional: dict[str, Any] | None = None,
    global_: dict[str, Any] | None = None,
    states: tuple[str, ...] = ("up",),
) -> AsyncIterator[Both]:
    """Both tiers in Virginia, up: the global one sees the regional one, in one of `states`, with its replica ready."""
    cluster = MemoryCluster()
    below = RegionalBalancer(
        regional_config(engine, **(regional or {})), world, Random(1), MemoryStore(Random(2), cluster)
    )
    above = GlobalBalancer(global_config(**(global_ or {})), world, Random(3), MemoryStore(Random(4), cluster))
    try:
        lines = (await below.open(), await above.open())
        await until(lambda: serving(above, states))
        yield Both(below, above, lines)
    finally:
        await above.close()
        await below.close()


def serving(balancer: GlobalBalancer, states: tuple[str, ...] = ("up",)) -> bool:
    status = balancer.tier_admin.status()
    return any(
        r["state"] in states and any(m["replicas_ready"] for i in r["instances"] for m in i["models"].values())
        for r in status["regions"]
    )


class Answer(msgspec.Struct):
    """What came back on the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """The error's code."""
        return str(self.json["error"]["code"])


async def send(port: int, *parts: bytes, close: bool = False, within_s: float = 60.0) -> Answer:
    """Send bytes and read one answer, to the end of the connection. `close`: we end our side at once after sending."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
        if close:
            writer.write_eof()
        async with asyncio.timeout(within_s):
            return read(await reader.read())
    finally:
        writer.close()
        await _gone(writer.wait_closed())


async def _gone(closing: Awaitable[None]) -> None:
    with contextlib.suppress(OSError):
        await closing


def read(wire: bytes) -> Answer:
    """One answer from its bytes; chunks are put together."""
    head, _, body = wire.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(_header(line) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            whole += rest[: int(size, 16)]
            body = rest[int(size, 16) + 2 :]
        body = whole
    return Answer(int(lines[0].split()[1]) if lines[0] else 0, headers, body)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(": ")
    return name.lower(), value


def head(method: str, path: str, **headers: str) -> bytes:
    """A request's head; names are given with _ for -. The connection ends with the answer."""
    lines = [f"{method} {path} HTTP/1.1", "host: farhop", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chat(
    key: str | None = "sk-farhop-anywhere", body: Any = None, path: str = "/v1/chat/completions", **headers: str
) -> bytes:
    """A whole chat request."""
    if body is None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return head("POST", path, content_length=str(len(data)), **headers) + data


def streaming(text: str = "hello") -> dict[str, Any]:
    """A body that asks for a stream."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True}
