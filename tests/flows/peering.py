"""Several balancers of one region in this process, over one set of engines and one etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from aiohttp import web
from inprocess import MODEL, chat, common, send, topology, until

from farhop.store.contract import Store, report_key
from farhop.store.documents.report import decode
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer

SLOTS = 4


class SlotEngine:
    """A replica with SLOTS slots and a queue, which counts what had to wait there."""

    def __init__(self, name: str, service_s: float = 0.05) -> None:
        self.name, self.service_s = name, service_s
        self.waited = self.served = self.waiting_most = self.waiting = 0
        self.handler = asyncio.Semaphore(SLOTS)
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SlotEngine]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
        # The scrape would hide what this test looks for: it reports an empty queue.
        return web.Response(text="vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        if self.handler.locked():
            self.waited += 1
        self.waiting += 1
        self.waiting_most = max(self.waiting_most, self.waiting)
        try:
            async with self.handler:
                self.waiting -= 1
                await asyncio.sleep(self.service_s)
        except asyncio.CancelledError:
            self.waiting = max(0, self.waiting - 1)
            raise
        self.served += 1
        usage = {"prompt_tokens": 11, "completion_tokens": 3}
        return web.json_response({"choices": [{"message": {"content": self.name}}], "usage": usage})


def config(engines: list[SlotEngine], instance: str, **more: Any) -> RegionalConfig:
    replicas = [
        {"url": f"http://{e.address}", "models": [MODEL], "name": e.name, "slots": SLOTS, "kv_tokens": 1_000_000,
         "prefill_tokens_max": 100_000}
        for e in engines
    ]  # fmt: skip
    ports = {name: {"port": 0} for name in ("tier", "control", "client")}
    # Their pages are read once: a second read would show that none of the expected prefixes was cached, and the known
    # contents of their caches would be forgotten.
    watch = {"probe_s": 0.05, "scrape_s": 3600.0, "rise": 1}
    return RegionalConfig.model_validate(
        {**common("virginia", instance), **ports, "replicas": replicas, "watch": watch, **more}
    )


class Region:
    """The balancers of one region. `etcd` is where they publish."""

    def __init__(self, engines: list[SlotEngine], etcd: str, stack: AsyncExitStack, world: Any) -> None:
        self.engines, self.etcd, self._stack, self._world = engines, etcd, stack, world
        self.balancers: dict[str, RegionalBalancer] = {}
        self.clients: dict[str, int] = {}

    async def start(self, instance: str, store: Store | None = None, **more: Any) -> RegionalBalancer:
        made = config(self.engines, instance, etcd={"endpoints": [self.etcd]}, **more)
        balancer = RegionalBalancer(made, self._world, Random(len(self.balancers)), store)
        line = await balancer.open()
        self.clients[instance] = int(line.split("clients on 127.0.0.1:")[1].split(",")[0])
        self.balancers[instance] = balancer
        self._stack.push_async_callback(self.stop, instance)
        await until(
            lambda: all(h.read(balancer.clock.now()).state == "up" for h in balancer.flow.replicas.health.values())
        )
        return balancer

    async def stop(self, instance: str) -> None:
        balancer = self.balancers.pop(instance, None)
        if balancer is not None:
            await balancer.close()

    async def acquainted(self) -> None:
        """Until everybody takes part in the eyes of everybody."""
        n = len(self.balancers)
        await until(
            lambda: all(sum(p["takes_part"] for p in b.mesh.peers.status()) == n - 1 for b in self.balancers.values()),
            8.0,
        )

    async def ask(self, instance: str, text: str = "hello", **more: Any) -> str:
        """Which replica answered."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
        answer = await send(self.clients[instance], chat(body=body))
        assert answer.status == 200, answer.body
        return answer.headers["x-farhop-replica"]

    def reported(self) -> dict[str, int]:
        """How many replicas each balancer says are its own, of what it would report now."""
        counts: dict[str, int] = {}
        for name, balancer in self.balancers.items():
            assert balancer.mesh.reporter is not None
            counts[name] = sum(model.replicas_total for model in balancer.mesh.reporter.latest.models)
        return counts

    async def stored(self) -> dict[str, int]:
        """The same, as it stands in etcd."""
        store = next(iter(self.balancers.values())).store
        entries = await store.list(report_key("virginia", "x").removesuffix("x"))
        reports = [decode(entry.value) for entry in entries]
        return {r.instance: sum(m.replicas_total for m in r.models) for r in reports}


@asynccontextmanager
async def region(etcd: str, n_engines: int = 4, service_s: float = 0.05) -> AsyncIterator[Region]:
    world = topology()
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(SlotEngine(f"gpu-{n}", service_s).running()) for n in range(n_engines)
        ]
        yield Region(engines, etcd, stack, world)
