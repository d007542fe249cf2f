"""What watching replicas costs: parsing a page, and the shipped watcher over a thousand replicas. Never a test.

CPU time of this process; the engines' side is another process. Medians of the repeats, as in decide.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import uvloop

from farhop.balance.machine import Event
from farhop_lab.bench import harness, pages, upstream
from farhop_lab.bench.bodies import MODEL
from farhop_lab.bench.decide import Row, timed
from farhop_lab.world.child import Child
from farhop_lab.world.ports import free_ports
from regional_lb.app.config import RegionalConfig
from regional_lb.engines.config import ReplicaConfig, Watch
from regional_lb.engines.signals.engines import ANY, ENGINES, Engine, read_page
from regional_lb.engines.signals.exposition import Places
from regional_lb.engines.signals.gpus import read_gpus
from regional_lb.engines.watch import ReplicaWatcher
from regional_lb.fleet.view import ReplicaSampled
from regional_lb.scheduler.flow import FlowConfig, RegionalFlow
from topology.law import Law
from topology.model import Topology

PAGES = 200
REPLICAS = 1000
SECONDS = 3.0
_WARM_S = 2.5  # a scrape of each, and the first connections


class Watched(msgspec.Struct, frozen=True):
    """The watcher over `replicas`: pages of `page_bytes` read in a second, CPU of each; `refused` by reason."""

    replicas: int
    page_bytes: int
    pages_per_s: float
    cpu_us: float
    refused: dict[str, int]

    @property
    def core_share(self) -> float:
        """Of one core, at a thousand pages a second."""
        return self.cpu_us * 1e3 / 1e6


def read() -> list[Row]:
    """CPU µs to parse one page of each engine: of a given kind, of a detected kind, and of a GPU exporter. The next
    page of the same engine is parsed by the lines' known places, as in the watcher.
    """
    rows = []
    for name, engine in ENGINES.items():
        page = pages.page(name)
        rows.append(timed(f"{name}, {len(page) // 1024} KB", partial(_sample, page, engine), PAGES))
        rows.append(timed(f"{name}, the next of the same", partial(_sample, page, engine, Places()), PAGES))
    page = pages.page("triton")
    rows.append(timed(f"triton, {len(page) // 1024} KB, found out", partial(_sample, page, ANY), PAGES))
    gpus = pages.page("dcgm")
    rows.append(timed(f"dcgm, {len(gpus) // 1024} KB", partial(read_gpus, gpus), PAGES))
    return rows


def _sample(page: bytes, engine: Engine, places: Places | None = None) -> None:
    read_page(page, 0.0, _no_drops, engine, places)


def _no_drops(reason: str) -> None:
    raise AssertionError(reason)


def watch() -> Watched:
    """The shipped watcher and machine over many replicas, on the shipped event loop. Raises BenchError."""
    return uvloop.run(_watch())


async def _watch() -> Watched:
    harness.open_files()
    (port,) = free_ports(1)
    program, arguments = harness.module("upstream", upstream.Job(port, list(harness.HOSTS), pages.PAGE_BYTES))
    with tempfile.TemporaryDirectory(prefix="farhop-bench-") as folder:
        child = Child("the benchmark's engines", arguments, Path(folder) / "engines.log", {}, program)
        async with harness.started(child, harness.HOSTS[0], port):
            return await _over(_replicas(port))


def _replicas(port: int) -> list[ReplicaConfig]:
    hosts = harness.HOSTS
    return [
        ReplicaConfig(url=f"http://{hosts[i % len(hosts)]}:{port}", models=[MODEL], name=f"gpu-{i}", engine="vllm")
        for i in range(REPLICAS)
    ]


async def _over(replicas: list[ReplicaConfig]) -> Watched:
    # Probes cost as little as a scrape of an empty page: they are excluded from the figure.
    config = RegionalConfig.model_construct(replicas=replicas, watch=Watch(probe_s=3600.0, scrape_s=1.0))
    flow = RegionalFlow(FlowConfig("bench"), Law(Topology("bench", 1, {})), Random(1), lambda _tenant: 1.0)
    taken, refused = Counter[type[Event]](), Counter[str]()

    def react(event: Event) -> None:
        taken[type(event)] += 1
        flow.handle(event, time.monotonic())

    watcher = ReplicaWatcher(
        config, react=react, refused=lambda reason: refused.update((reason,)), clock=time.monotonic, rng=Random(1)
    )
    await watcher.open()
    try:
        await asyncio.sleep(_WARM_S)
        before, began, cpu = taken[ReplicaSampled], time.monotonic(), time.process_time()
        await asyncio.sleep(SECONDS)
        done, lasted, used = taken[ReplicaSampled] - before, time.monotonic() - began, time.process_time() - cpu
    finally:
        await watcher.close()
    if not done:
        raise harness.BenchError(f"no page was taken in ({dict(refused)}); is the machine too busy?")
    size = len(pages.page("vllm"))
    return Watched(len(replicas), size, done / lasted, used / done * 1e6, dict(refused))
