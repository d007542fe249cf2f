"""What the six classic failures are shown on: emulated engines, a regional balancer and a load, live on one loop.

`NAIVE` is how many balancers are set up: turns by rote, no bound of its own, nothing read from the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from inprocess import MODEL, common, topology, until

from farhop_lab.engine.core.profiles import PROFILES, Profile
from farhop_lab.engine.core.sequence import TextModel
from farhop_lab.engine.server import Replica
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer

SPEEDUP = 20.0
NAIVE: dict[str, Any] = {"policy": "round-robin"}
NAIVE_REPLICA: dict[str, Any] = {"slots": 100_000, "kv_tokens": 10**9, "prefill_tokens_max": 10**9}


def l4(speedup: float = SPEEDUP, **more: Any) -> Profile:
    """An L4, so many times as fast. What is measured in milliseconds wants a small number: machines here are noisy."""
    return replace(PROFILES["l4"].scaled(speedup), **more)


class Gpu:
    """One emulated engine on this loop, behind a pipe that can be frozen. `asked`: the answers wanted of it so far."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self.replica = Replica(profile, TextModel(MODEL, seed, 50.0), time.perf_counter)
        self.port = self.asked = 0
        self.frozen = asyncio.Event()
        self._pairs: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gpu]:
        """Listen on a free port."""
        runner = web.AppRunner(
            self.replica.application(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        inner = runner.addresses[0][1]

        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._pairs.add(task)
            try:
                there, back = await asyncio.open_connection("127.0.0.1", inner)
                try:
                    await asyncio.gather(self._pour(reader, back), self._pour(there, writer))
                finally:
                    back.close()
            finally:
                writer.close()
                self._pairs.discard(task)

        server = await asyncio.start_server(come, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for pair in list(self._pairs):
                pair.cancel()
            await asyncio.gather(*self._pairs, return_exceptions=True)
            self.replica.close()
            await runner.cleanup()

    async def _pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes from one side to the other; while frozen they vanish into a full pipe, and nothing closes."""
        try:
            while data := await reader.read(65536):
                self.asked += data.startswith(b"POST /v1/chat/completions ")
                while self.frozen.is_set():
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the other side reports it, too; or the test is over
        finally:
            writer.close()


@asynccontextmanager
async def gpus(*profiles: Profile) -> AsyncIterator[list[Gpu]]:
    """Engines, one of each profile."""
    async with AsyncExitStack() as stack:
        made = [Gpu(profile, seed) for seed, profile in enumerate(profiles)]
        yield [await stack.enter_async_context(gpu.running()) for gpu in made]


@asynccontextmanager
async def region(
    engines: Sequence[Gpu], replica: dict[str, Any] | None = None, up: int | None = None, **config: Any
) -> AsyncIterator[tuple[RegionalBalancer, str]]:
    """A balancer over engines, and its clients' URL. `replica` is said of each; so many are `up`, else all."""
    physics = l4()
    fields = {"prefill_ms_per_token": physics.prefill_ms_per_token, "tpot_ms": physics.decode_floor_ms}
    document = {
        **common("virginia", "r1"),
        "tier": {"port": 0},
        "control": {"port": 0},
        "client": {"port": 0},
        "watch": {"probe_s": 0.1, "scrape_s": 0.05, "timeout_s": 0.3},
        "replicas": [
            {"url": f"http://127.0.0.1:{gpu.port}", "models": [MODEL], "name": f"gpu-{at}", **fields, **(replica or {})}
            for at, gpu in enumerate(engines)
        ],
        **config,
    }
    balancer = RegionalBalancer(
        RegionalConfig.model_validate(document), topology(), Random(1), MemoryStore(Random(2), MemoryCluster())
    )
    try:
        line = await balancer.open()
        healths, wanted = balancer.flow.replicas.health, len(document["replicas"]) if up is None else up
        await until(lambda: sum(h.read(balancer.clock.now()).state == "up" for h in healths.values()) >= wanted)
        port = next(word for word in line.split(", ") if "clients" in word).rsplit(":", 1)[1]
        yield balancer, f"http://127.0.0.1:{port}"
    finally:
        await balancer.close()


def blind(engines: Sequence[Gpu]) -> dict[str, Any]:
    """What is said of a replica that nobody asks: its metrics are looked for where there are none."""
    return {**NAIVE_REPLICA, "metrics": f"http://127.0.0.1:{engines[0].port}/no-metrics"}


class RequestResult(msgspec.Struct):
    """How one request went. `ttft_ms` None: nothing came. `replica`: who served it."""

    kind: str
    status: int
    ttft_ms: float | None
    total_ms: float
    replica: str = ""


class Load:
    """Clients that each send one streaming request at its time and do not ask twice."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.asked: list[RequestResult] = []
        self._session: aiohttp.ClientSession | None = None
        self._serial = 0

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, kind: str, words: int, tokens: int, within_s: float = 60.0, prefix: str = "") -> RequestResult:
        """One request of about so many words, which nobody else asks unless they begin with this `prefix`, answered in
        exactly so many tokens."""
        self._serial += 1
        prefix = prefix or f"{self._serial}"
        text = f"{kind} {prefix} " + " ".join(f"{prefix}x{n}" for n in range(words))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        assert self._session is not None
        began = time.perf_counter()
        one = RequestResult(kind, 0, None, 0.0)
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.post(
                    f"{self._url}/v1/chat/completions",
                    json=body,
                    headers={"authorization": "Bearer sk-farhop-anywhere"},
                ) as answer,
            ):
                one.status, one.replica = answer.status, answer.headers.get("x-farhop-replica", "")
                async for line in answer.content:
                    if b'"content":"' in line and one.ttft_ms is None:
                        one.ttft_ms = (time.perf_counter() - began) * 1e3
        except (TimeoutError, aiohttp.ClientError):
            one.status = 0
        one.total_ms = (time.perf_counter() - began) * 1e3
        self.asked.append(one)
        return one

    def ttft_ms(self, kind: str, share: float) -> float:
        """A quantile (0..1) of the times to the first token of that kind; who got none counts as the whole wait."""
        times = sorted(one.ttft_ms or one.total_ms for one in self.asked if one.kind == kind)
        return times[min(len(times) - 1, int(share * len(times)))]
