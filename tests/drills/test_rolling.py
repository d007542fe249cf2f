"""Several instances on one port: one after another is stopped and started again under load, and no request is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml

from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from tests.conftest import NO_CERTIFICATES

MODEL = "llama-3.1-8b"
TOKENS = 24


class Fleet:
    """Two instances of a tier on one port."""

    def __init__(self, folder: Path, tier: str, port: int, etcd: str, own: dict[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.instances: list[Child] = []
        for admin in free_ports(2):
            name = f"{tier}-{admin}"
            config = {
                "region": "virginia",
                "instance": name,
                "admin": {"port": admin},
                "etcd": {"endpoints": [etcd]},
                "hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"},
                "limits": {"drain_idle_s": 1.0},
                **own,
            }
            path = folder / f"{name}.yaml"
            path.write_text(yaml.safe_dump(config))
            environment = {"FARHOP_HOP_KEY": "x" * 32, **NO_CERTIFICATES}
            self.instances.append(Child(name, [tier, "--config", str(path)], folder / f"{name}.log", environment))


@asynccontextmanager
async def fleets(folder: Path) -> AsyncIterator[dict[str, Fleet]]:
    """An etcd, an emulated engine, two regional balancers over it and two global ones over those: all processes."""
    async with AsyncExitStack() as stack:
        etcd = EmbeddedEtcd(folder=folder / "etcd")
        stack.push_async_callback(etcd.stop)
        await etcd.start()
        at = etcd.endpoint.removeprefix("http://")
        engine_port, regional_port, global_port = free_ports(3)
        arguments = ["engine", "--port", str(engine_port), "--model", MODEL, "--profile", "a100", "--speedup", "5"]
        engine = Child("engine", arguments, folder / "engine.log", NO_CERTIFICATES)
        replica = {"url": f"http://127.0.0.1:{engine_port}", "models": [MODEL], "kv_tokens": 1_000_000}
        below = {"tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica]}
        made = {
            "regional": Fleet(folder, "regional", regional_port, at, {
                **below, "client": {"port": regional_port, "reuse_port": True},
            }),
            "global": Fleet(folder, "global", global_port, at, {"listen": {"port": global_port, "reuse_port": True}}),
        }  # fmt: skip
        children = (engine, *made["regional"].instances, *made["global"].instances)
        for child in children:
            stack.push_async_callback(child.stop)
        await asyncio.gather(*(child.start() for child in children))
        yield made


class Load:
    """Clients of several manners, none of which asks twice: what is not answered whole is lost."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.served = 0
        self.lost: list[str] = []
        self._over = False

    async def run(self, seconds_or: asyncio.Event) -> None:
        """Until the event."""
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(self._client(0.0, stream=True))  # the next request, at once, on the kept connection
                group.create_task(self._client(0.0, stream=False))
                group.create_task(self._client(0.1 + 0.1 * number, stream=False))  # it is idle in between
                group.create_task(self._client(0.02, stream=False, keep=False))  # a connection for each
            await seconds_or.wait()
            self._over = True

    async def _client(self, pause_s: float, *, stream: bool, keep: bool = True) -> None:
        connector = aiohttp.TCPConnector(force_close=not keep)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not self._over:
                began = time.monotonic()
                try:
                    await self._ask(session, stream)
                    self.served += 1
                except (aiohttp.ClientError, OSError, AssertionError) as error:
                    self.lost.append(f"{stream=} {pause_s=} {keep=} {time.monotonic() - began:.3f}: {error!r}")
                await asyncio.sleep(pause_s)

    async def _ask(self, session: aiohttp.ClientSession, stream: bool) -> None:
        body = {
            "model": MODEL, "messages": [{"role": "user", "content": "go on"}], "stream": stream,
            "max_tokens": TOKENS, "min_tokens": TOKENS,
        }  # fmt: skip
        async with session.post(self._url, json=body, headers={"authorization": "Bearer sk-farhop-anywhere"}) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            assert "[DONE]" in text or not stream, text


def test_a_rolling_restart_loses_nothing(tmp_path: Path) -> None:
    """Of the regional tier, then of the global one, each under its own load."""

    async def restarted(fleet: Fleet) -> Load:
        load, over = Load(fleet.url), asyncio.Event()
        running = asyncio.create_task(load.run(over))

        async def more(count: int) -> None:
            served = load.served + count
            while load.served < served:
                await asyncio.sleep(0.02)

        async with asyncio.timeout(200.0):
            for instance in fleet.instances:
                await more(40)
                assert await instance.stop(grace_s=20.0) == 0
                await instance.start()
            await more(40)
        over.set()
        await running
        return load

    async def drill() -> dict[str, Load]:
        async with fleets(tmp_path) as made:
            return {tier: await restarted(made[tier]) for tier in ("regional", "global")}

    for tier, load in uvloop.run(drill()).items():
        assert (tier, load.lost) == (tier, [])
        assert load.served > 100
