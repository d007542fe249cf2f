"""Two neighbouring versions in one fleet: balancers of the version before deploy/ came, and of this one.

What goes between processes is understood by both: hop tokens, reports, prefixes, what peers share, the law in etcd.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
from contextlib import AsyncExitStack
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
from topology import load as worlds

pytestmark = [pytest.mark.history]

BEFORE = "e0c6e3d"
MODEL = "llama-3.1-8b"
KEY = "sk-farhop-anywhere"
REQUESTS = 24
TRIE_NODES = {"old": "farhop_trie_nodes", "new": "farhop_prefix_trie_nodes"}  # names of metrics are not promised
WITHIN_S = 30.0
PREFIX = "a long prefix that all of them share, said again and again " * 40


def source_of(commit: str, into: Path) -> tuple[str, ...]:
    """How to run the `farhop` command of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=machine.ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")
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


async def json_of(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return dict(await response.json())


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


def test_old_and_new_balancers_make_one_fleet(tmp_path: Path) -> None:
    old = source_of(BEFORE, tmp_path / "old")
    ports = dict(zip(("engine", *(f"{tier}-{age}{what}" for tier in ("global", "regional") for age in ("old", "new")
                                  for what in ("", "-admin"))), free_ports(9), strict=True))  # fmt: skip
    topology = tmp_path / "world.yaml"
    topology.write_text(worlds.shipped("three-regions").read_text())

    def configured(tier: str, age: str, etcd: str, own: dict[str, Any]) -> Child:
        name = f"{tier}-{age}"
        config = {
            "region": "virginia", "instance": name, "topology": str(topology),
            "admin": {"port": ports[f"{name}-admin"]}, "etcd": {"endpoints": [etcd]},
            "hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"}, **own,
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        arguments = [tier, "--config", str(path)]
        environment = {"FARHOP_HOP_KEY": "x" * 32}
        return Child(name, arguments, tmp_path / f"{name}.log", environment, old if age == "old" else ())

    async def admin(name: str, path: str = "/metrics") -> str:
        return await page(f"http://127.0.0.1:{ports[f'{name}-admin']}{path}")

    async def drill() -> None:
        async with AsyncExitStack() as stack:
            etcd = await stack.enter_async_context(EmbeddedEtcd(folder=tmp_path / "etcd"))
            at = etcd.endpoint.removeprefix("http://")
            engine = Child(
                "engine",
                ["engine", "--port", str(ports["engine"]), "--model", MODEL, "--profile", "a100", "--speedup", "20"],
                tmp_path / "engine.log",
                {},
            )
            replica = {"url": f"http://127.0.0.1:{ports['engine']}", "models": [MODEL], "kv_tokens": 1_000_000}
            below = {"tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica]}
            children = [
                engine,
                *(configured("regional", age, at, below) for age in ("old", "new")),
                *(
                    configured("global", age, at, {"listen": {"port": ports[f"global-{age}"]}})
                    for age in ("old", "new")
                ),
            ]
            for child in children:
                stack.push_async_callback(child.stop)
            await asyncio.gather(*(child.start(60.0) for child in children))

            async def both_ready() -> bool:
                said = [
                    await admin(f"{tier}-{age}", "/readyz") for tier in ("global", "regional") for age in ("old", "new")
                ]
                return all(one.startswith("ready") for one in said)

            await until("all four are ready", both_ready)
            await until("the regional balancers share what they have in flight", _connected)
            for age in ("old", "new"):
                body = {"model": MODEL, "stream": True, "max_tokens": 12, "messages": [{"role": "user", "content": ""}]}
                for number in range(REQUESTS):
                    body["messages"] = [{"role": "user", "content": f"{PREFIX} {number}"}]
                    result = await answer([f"http://127.0.0.1:{ports[f'global-{age}']}"], KEY, body)
                    assert (result.status, result.error) == (200, None), (age, result)
            for tier, age in (("regional", "old"), ("regional", "new")):
                served = count(await admin(f"{tier}-{age}"), "farhop_requests_total", 'reason="served"')
                assert served > 0, f"{tier}-{age} was sent nothing"
            for age in ("old", "new"):

                async def knows_prefixes(age: str = age) -> bool:
                    return count(await admin(f"global-{age}"), TRIE_NODES[age]) > 0

                await until(f"the {age} global balancer knows prefixes", knows_prefixes)
            await _law_reaches_all(at)

    async def _connected() -> bool:
        return count(await admin("regional-new"), "farhop_peers_connected") == 1

    async def _law_reaches_all(etcd: str) -> None:
        """Set by the new command line, heeded by all four."""
        law = tmp_path / "law.yaml"
        document = yaml.safe_load(topology.read_text())
        law.write_text(yaml.safe_dump({"models": document.get("models", {}), "tenants": document["tenants"]}))
        operator = tmp_path / "global-new.yaml"
        ended = await asyncio.to_thread(
            machine.run, sys.executable, "-m", "farhop_cli", "law", "set", str(law), "--config", str(operator),
            "--why", "skew", environment={"FARHOP_HOP_KEY": "x" * 32}, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr

        async def heeded() -> bool:
            laws = [
                await json_of(f"http://127.0.0.1:{ports[f'{tier}-{age}-admin']}/law")
                for tier in ("global", "regional")
                for age in ("old", "new")
            ]
            epochs = {one["epoch"] for one in laws}
            return len(epochs) == 1 and min(epochs) > document["epoch"]

        await until("all four go by the law that was set", heeded)

    uvloop.run(drill())
