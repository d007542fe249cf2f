"""Two neighbouring versions in one fleet: balancers of the version before deploy/ came, and of this one.

What goes between processes is understood by both: hop tokens, reports, prefixes, what peers share, the law in etcd.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import tarfile
from contextlib import AsyncExitStack
from itertools import count as count_up
from pathlib import Path
from typing import Any

import aiohttp
import machine
import pytest
import uvloop
import yaml

from farhop_lab.world.child import Child
from farhop_lab.world.client import answer
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from topology import load as topologies

pytestmark = [pytest.mark.history]

BEFORE = "e0c6e3d"
MODEL = "llama-3.1-8b"
KEY = "sk-farhop-anywhere"
SECRET = {"FARHOP_HOP_KEY": "x" * 32}
AGES = ("old", "new")
BALANCERS = tuple(f"{tier}-{age}" for tier in ("global", "regional") for age in AGES)
REQUESTS = 24
TRIE_NODES = {"old": "farhop_trie_nodes", "new": "farhop_prefix_trie_nodes"}  # names of metrics are not promised
WITHIN_S = 60.0
TEXT = "a text, said again and again " * 40


def source_of(commit: str, into: Path) -> tuple[str, ...]:
    """How to run the `farhop` command of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=machine.ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.0 to 3.11.3 have none
        archive.extractall(into)
    program = (
        f"import sys; sys.path[:0] = [{str(into)!r}, {str(into / 'proto')!r}]\n"
        "from farhop_cli.main import main\n"
        "import farhop, farhop_wire\n"
        f"assert farhop.__file__.startswith({str(into)!r}), farhop.__file__\n"
        f"assert farhop_wire.__file__.startswith({str(into)!r}), farhop_wire.__file__\n"
        "main()"
    )
    return (sys.executable, "-P", "-c", program)


async def page(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return await response.text()


def count(text: str, name: str, *marks: str) -> float:
    """The sum of a metric's series that hold these marks."""
    lines = (line for line in text.splitlines() if line.startswith(name) and all(mark in line for mark in marks))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def until(what: str, asked: Any) -> None:
    """Until a coroutine says yes."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not await asked():
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"not within {WITHIN_S:g} s: {what}")


class Fleet:
    """An engine, etcd, and of either tier one balancer of each version, in one region."""

    def __init__(self, folder: Path, etcd: str) -> None:
        self.folder, self.etcd = folder, etcd
        self.topology = folder / "world.yaml"
        self.topology.write_text(topologies.shipped("three-regions").read_text())
        names = ["engine", *(name + what for name in BALANCERS for what in ("", "-admin"))]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._old = source_of(BEFORE, folder / "old")

    def children(self) -> list[Child]:
        """All but etcd, the engine first."""
        arguments = [
            "engine", "--port", str(self.ports["engine"]), "--model", MODEL, "--profile", "a100", "--speedup", "20",
        ]  # fmt: skip
        engine = Child("engine", arguments, self.folder / "engine.log", {})
        return [engine, *map(self._balancer, BALANCERS)]

    def _balancer(self, name: str) -> Child:
        tier, _, age = name.partition("-")
        config = {
            "region": "virginia", "instance": name, "topology": str(self.topology),
            "admin": {"port": self.ports[f"{name}-admin"]}, "etcd": {"endpoints": [self.etcd]},
            "hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"},
        }  # fmt: skip
        if tier == "regional":
            replica = {
                "url": f"http://127.0.0.1:{self.ports['engine']}", "models": [MODEL], "kv_tokens": 1_000_000,
            }  # fmt: skip
            config |= {"tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica]}
        else:
            config |= {"listen": {"port": self.ports[name]}}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        program = self._old if age == "old" else ()
        return Child(name, [tier, "--config", str(path)], self.folder / f"{name}.log", SECRET, program)

    async def admin(self, name: str, path: str = "/metrics") -> str:
        return await page(f"http://127.0.0.1:{self.ports[f'{name}-admin']}{path}")

    async def ready(self) -> None:
        async def all_ready() -> bool:
            return all([(await self.admin(name, "/readyz")).startswith("ready") for name in BALANCERS])

        async def connected() -> bool:
            return count(await self.admin("regional-new"), "farhop_peers_connected") == 1

        await until("all four are ready", all_ready)
        await until("the regional balancers share what they have in flight", connected)

    async def serves(self) -> None:
        """Through either global balancer, and either sends to both regional ones.

        All at once and with nothing in common: what one was sent and did not begin yet adds to what a request would
        wait for there, so that the next goes to the other. (Of equals, the version before asks always the same.) Not
        within one round, where the engine is done with each before this machine gets to send the next.
        """
        serial = count_up()
        for above in AGES:
            before = {age: await self.served(age) for age in AGES}

            async def has_asked_both(above: str = above, before: dict[str, float] = before) -> bool:
                await asyncio.gather(*(self.serve(above, f"{next(serial)} {TEXT}") for _ in range(REQUESTS)))
                return all([await self.served(age) > before[age] for age in AGES])

            await until(f"the {above} global balancer has asked both regional ones", has_asked_both)

    async def serve(self, above: str, text: str) -> None:
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "stream": True, "max_tokens": 12, "messages": messages}
        result = await answer([f"http://127.0.0.1:{self.ports[f'global-{above}']}"], KEY, body)
        assert (result.status, result.error) == (200, None), f"{above}: {result.headers}"

    async def served(self, age: str) -> float:
        return count(await self.admin(f"regional-{age}"), "farhop_requests_total", 'reason="served"')

    async def tells_prefixes(self) -> None:
        for age in AGES:

            async def knows_prefixes(age: str = age) -> bool:
                return count(await self.admin(f"global-{age}"), TRIE_NODES[age]) > 0

            await until(f"the {age} global balancer knows prefixes", knows_prefixes)

    async def goes_by_one_law(self) -> None:
        """Set by the new command line, heeded by all four."""
        law = self.folder / "law.yaml"
        document = yaml.safe_load(self.topology.read_text())
        law.write_text(yaml.safe_dump({"models": document.get("models", {}), "tenants": document["tenants"]}))
        operator = self.folder / "global-new.yaml"
        ended = await asyncio.to_thread(
            machine.run, sys.executable, "-m", "farhop_cli", "law", "set", str(law), "--config", str(operator),
            "--why", "skew", environment=SECRET, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr

        async def heeded() -> bool:
            laws = [json.loads(await self.admin(name, "/law")) for name in BALANCERS]
            epochs = {one["epoch"] for one in laws}
            return len(epochs) == 1 and min(epochs) > document["epoch"]

        await until("all four go by the law that was set", heeded)


def test_old_and_new_balancers_make_one_fleet(tmp_path: Path) -> None:
    async def drill() -> None:
        async with AsyncExitStack() as stack:
            etcd = await stack.enter_async_context(EmbeddedEtcd(folder=tmp_path / "etcd"))
            fleet = Fleet(tmp_path, etcd.endpoint.removeprefix("http://"))
            children = fleet.children()
            for child in children:
                stack.push_async_callback(child.stop)
            await asyncio.gather(*(child.start(60.0) for child in children))
            await fleet.ready()
            await fleet.serves()
            await fleet.tells_prefixes()
            await fleet.goes_by_one_law()

    uvloop.run(drill())
