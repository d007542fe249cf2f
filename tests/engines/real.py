"""Real engines as processes of this machine, as `make engines` installed them; and both tiers before them.

Engines that run already are used instead of new ones where FARHOP_TEST_VLLM names them (two, by a space, each as
URL#PORT of its KV events): to start one takes a minute. What stops or kills an engine starts its own all the same.
No more than two vLLMs run at once, so that all of it fits into 12 GB of memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import inprocess
from inprocess import Answer, Both, common, global_config, topology, until

from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.ports import free_ports
from global_lb.app.main import GlobalBalancer
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer

HOME = Path(__file__).parents[2] / ".engines"
VLLM, LLAMA = HOME / "vllm/bin/python", HOME / "llama/build/bin/llama-server"
MODEL, LORA, GGUF = HOME / "tiny/model", HOME / "tiny/lora", HOME / "tiny/model.gguf"
MISSING = "not installed: run `make engines`"
START_S = 600.0  # on a busy machine of two cores
ANSWER_S = 120.0  # an engine may compile at its first request: 20 s on two busy cores
BLOCK = 128  # tokens, of vLLM on CPUs


class RealEngine:
    """One engine. `events`: the port of its KV events, 0 of one that has none."""

    def __init__(self, url: str, events: int = 0, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url, self.events, self.process = url, events, process

    def signal(self, number: int) -> None:
        """To all of its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """It is gone, whatever state it was in."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def ready(self) -> None:
        """Wait until it serves."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process is None or self.process.poll() is None, "the engine ended while it started"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2.0):
                    return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(f"{self.url} is not ready")

    def ask(self, path: str, body: Any = None) -> Any:
        """Its own answer, not by way of any balancer."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60.0) as answer:
            return json.load(answer)


def vllm(
    folder: Path, *, port: int = 0, events: int = 0, details: bool = True, tells: bool = True,
    more: tuple[str, ...] = (), development: bool = False,
) -> RealEngine:  # fmt: skip
    """Start one. `details`: its answers say what was cached; `tells`: it sends KV events; `development`: it has the
    paths that nobody should reach."""
    port = port or free_ports(1)[0]
    flags = [
        "--model", str(MODEL), "--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1",
        "--max-model-len", "4096", "--enforce-eager", "--enable-prefix-caching", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes", "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapted={LORA}",
        *more,
    ]  # fmt: skip
    if details:
        flags.append("--enable-prompt-tokens-details")
    if tells:
        events = events or free_ports(2)[0]
        settled = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        flags += [
            "--kv-events-config",
            json.dumps(settled | {"replay_endpoint": f"tcp://*:{events + 1}", "topic": "kv-events"}),
        ]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": str(int(development)),
    }  # fmt: skip
    with (folder / f"vllm-{port}.log").open("ab") as log:
        command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", *flags]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    return RealEngine(f"http://127.0.0.1:{port}", events if tells else 0, process)


def llama(folder: Path, *, port: int = 0) -> RealEngine:
    """Start llama.cpp's server."""
    port = port or free_ports(1)[0]
    command = [
        str(LLAMA), "-m", str(GGUF), "--alias", "tiny", "--port", str(port), "--host", "127.0.0.1", "-c", "4096",
        "-np", "2", "-t", "1", "--metrics", "--jinja",
    ]  # fmt: skip
    with (folder / f"llama-{port}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return RealEngine(f"http://127.0.0.1:{port}", 0, process)


def emulated(folder: Path) -> RealEngine:
    """Start the lab's engine, for what a real one adds nothing to."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "farhop_cli", "engine", "--port", str(port), "--model", "tiny", "--speedup", "20"]
    with (folder / f"emulated-{port}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return RealEngine(f"http://127.0.0.1:{port}", 0, process)


class Shared:
    """Two vLLMs with KV events, started when they are first asked for. Who needs others stops them before: two take
    some 9 GB of memory, and four more than many machines have."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._engines = folder, list[RealEngine]()

    def started(self) -> list[RealEngine]:
        """Both, serving."""
        if not self._engines:
            running = os.environ.get("FARHOP_TEST_VLLM", "").split()
            for url, _, events in (one.partition("#") for one in running):
                self._engines.append(RealEngine(url, int(events or 0)))
            if not running:
                self._engines += [vllm(self._folder), vllm(self._folder)]
            for engine in self._engines:
                engine.ready()
        return self._engines

    def stop(self) -> None:
        """None runs, but for those that ran already."""
        for engine in self._engines:
            engine.stop()
        self._engines.clear()


def told_at(engine: RealEngine) -> dict[str, str]:
    """Where it tells of its KV cache, and tells again what was missed."""
    return {"kv_events": f"tcp://127.0.0.1:{engine.events}", "kv_replay": f"tcp://127.0.0.1:{engine.events + 1}"}


@asynccontextmanager
async def tiers(*engines: RealEngine, tokenizer: bool = True, **more: Any) -> AsyncIterator[Both]:
    """Both tiers before these engines, which are e0, e1, ...; all of them up. `more` goes into the regional one's."""
    world, cluster = topology(), MemoryCluster()
    replicas = [
        {"url": engine.url, "models": [], "name": f"e{n}", "slots": 8}  # it reports itself what it serves
        | (told_at(engine) if engine.events else {})
        for n, engine in enumerate(engines)
    ]
    document = {
        **common("virginia", "r1"), "tier": {"port": 0}, "control": {"port": 0}, "client": {"port": 0},
        "replicas": replicas, "watch": {"probe_s": 0.5, "scrape_s": 0.5},
        "tokenizers": {"tiny": {"file": str(MODEL / "tokenizer.json")}} if tokenizer else {}, **more,
    }  # fmt: skip
    below = RegionalBalancer(RegionalConfig.model_validate(document), world, Random(1), MemoryStore(Random(2), cluster))
    above = GlobalBalancer(global_config(), world, Random(3), MemoryStore(Random(4), cluster))
    try:
        lines = (await below.open(), await above.open())
        both = Both(below, above, lines)
        await all_up(both, 30.0)
        if any(engine.events for engine in engines):
            await until(lambda: all(r["kv_events"] == "exact" for r in status(both)), 30.0)
        yield both
    finally:
        await above.close()
        await below.close()


async def send(port: int, request: bytes) -> Answer:
    """One answer, in an engine's own time."""
    return await inprocess.send(port, request, within_s=ANSWER_S)


def status(both: Both) -> list[dict[str, Any]]:
    """What the regional tier says of its replicas."""
    replicas: list[dict[str, Any]] = both.regional.tier_admin.status()["replicas"]
    return replicas


async def all_up(both: Both, within_s: float) -> None:
    """Until every replica is up, and the tier above knows it."""
    await until(lambda: all(r["state"] == "up" for r in status(both)), within_s)
    await until(lambda: _seen(both.global_), within_s)


def _seen(balancer: GlobalBalancer) -> bool:
    regions = balancer.tier_admin.status()["regions"]
    return any(m["replicas_ready"] for r in regions for i in r["instances"] for m in i["models"].values())


async def settled(both: Both) -> None:
    """Until the answers are over and the events of what they stored are here."""
    await until(lambda: both.regional.flow.under_way == 0)
    await asyncio.sleep(0.1)
