"""A regional balancer over live emulated engines that publish KV events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from inprocess import HOP, MODEL, Answer, chat, send, topology, until
from prometheus_client.parser import text_string_to_metric_families

from farhop_lab.engine import main as engine
from farhop_lab.engine.core.text import VOCABULARY
from farhop_lab.engine.kv_publisher import KvPublisher
from farhop_lab.engine.settings import EngineSettings
from farhop_lab.engine.tokenizer_file import TEMPLATE, TOKENIZER, write
from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.ports import free_ports
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer

WORLD = topology()
BLOCK = 16


def words(seed: int, tokens: int) -> str:
    """A text of so many tokens, for the emulated tokenizer."""
    return b"".join(Random(seed).choices(VOCABULARY, k=tokens)).decode()


class World:
    """A regional balancer over two emulated engines that tell what they cache."""

    def __init__(
        self, balancer: RegionalBalancer, client: int, engines: list[str], publishers: list[KvPublisher]
    ) -> None:
        self.balancer, self.client, self.engines, self._publishers = balancer, client, engines, publishers

    @property
    def flow(self) -> Any:
        return self.balancer.flow

    async def ask(self, text: str, **more: Any) -> Answer:
        """One request, and all that is heard of it."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
        answer = await send(self.client, chat(body=body))
        assert answer.status == 200, answer.body
        await self.settled()
        return answer

    async def settled(self) -> None:
        """Until the balancer is done with the request, and has heard all that the engines said of it."""
        await until(lambda: self.flow.under_way == 0)
        if (listener := self.balancer.kv_listener) is not None:
            followed = list(zip(listener.streams, self._publishers, strict=True))
            await until(lambda: all(stream.follower.applied == text.seq - 1 for stream, text in followed))

    def hits(self) -> dict[str, list[float]]:
        """By source, as the metrics page says: tokens predicted to be cached, found cached, and the error."""
        found: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(self.balancer.metrics.render().decode()):
            for name in ("predicted", "actual", "error"):
                if family.name == f"farhop_prefix_{name}_tokens":
                    for sample in family.samples:
                        found.setdefault(sample.labels["source"], []).append(sample.value)
        return found

    async def reset(self, index: int) -> None:
        url = f"http://{self.engines[index]}/reset_prefix_cache"
        async with aiohttp.ClientSession() as session, session.post(url) as response:
            assert response.status == 200

    def status(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = self.balancer.tier_admin.status()["replicas"]
        return replicas


@asynccontextmanager
async def world(folder: Path, *, tokenizer: bool = True, events: bool = True, schema: str = "map", replicas: int = 2,
                first: bool = True, listing: dict[str, Any] | None = None, **more: Any,
) -> AsyncIterator[World]:  # fmt: skip
    """`first`: prompts are read before they are placed, even if one replica leaves no choice. `listing` is said of each
    replica; `more` are the engines' settings."""
    write(folder)
    async with AsyncExitStack() as stack:
        addresses, listed, publishers = [], [], list[KvPublisher]()
        make = engine.make_publisher

        def made(settings: EngineSettings, index: int) -> KvPublisher | None:
            publisher = make(settings, index)
            assert publisher is not None
            publishers.append(publisher)
            return publisher

        stack.callback(setattr, engine, "make_publisher", make)
        engine.make_publisher = made
        for index in range(replicas):
            port, replay = free_ports(2)
            settings = EngineSettings(
                ports=[0], model=MODEL, kv_events_port=port, kv_replay_port=replay,
                kv_events_schema=schema, tokenizer=folder / TOKENIZER,
                **{"speedup": 1000} | more,
            )  # fmt: skip
            (address,) = await stack.enter_async_context(engine.host(settings))
            addresses.append(address)
            sockets = {"kv_events": f"tcp://127.0.0.1:{port}", "kv_replay": f"tcp://127.0.0.1:{replay}"}
            one = {"url": f"http://{address}", "models": [MODEL], "name": f"e{index}", **(listing or {})}
            listed.append(one | (sockets if events else {}))
        files = {"file": str(folder / TOKENIZER), "template": str(folder / TEMPLATE)}
        config = RegionalConfig.model_validate({
            "region": "virginia", "instance": "r1", "admin": {"port": 0}, "hop": HOP, "tier": {"port": 0},
            "control": {"port": 0}, "client": {"port": 0}, "replicas": listed, "limits": {"drain_s": 0.5},
            "watch": {"probe_s": 0.05, "scrape_s": 0.05, "rise": 1}, "tokenizers": {MODEL: files} if tokenizer else {},
        })  # fmt: skip
        balancer = RegionalBalancer(config, WORLD, Random(1), MemoryStore(Random(2)))
        if first and balancer.listeners.prompt_tokens is not None:
            balancer.listeners.prompt_tokens.wanted = lambda _request: True
        line = await balancer.open()
        stack.push_async_callback(balancer.close)
        client = int(line.split("clients on ")[1].split(":")[1].split(",")[0])
        states = balancer.tier_admin.status
        await until(lambda: all(r["state"] == "up" for r in states()["replicas"]))
        if events:
            await until(lambda: all(r["kv_events"] == "exact" for r in states()["replicas"]))
        yield World(balancer, client, addresses, publishers)
