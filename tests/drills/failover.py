"""What the failover drills share: a world with two hubs, a steady load on it, and what is read off while it breaks."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from farhop.store.documents import overrides
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.hubs import Hubs, store_of
from farhop_lab.world.client import Delta, Result, ask
from farhop_lab.world.fork_server import run_queue_s
from farhop_lab.world.world import World, WorldSettings
from tests.conftest import SPANS_EVERY_MS, unhindered
from topology import load as topologies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from pathlib import Path

SPEEDUP = 20.0  # for the engines alone
RAMP_PER_S = 0.3
STEADY = "not-us"  # the tenant whose requests go to the nearest region that serves, however long they wait there
PAUSE_S = 0.4  # the pause of a worker between two requests
LOOK_S = 0.2  # the pause between two looks at a status


def settings(folder: Path) -> WorldSettings:
    """The default world with two hubs: three members by the Atlantic, of which Tokyo is far, and one by the Pacific.

    Its wires are as long as in truth: on ones as short as a stall of this machine nobody could say what is far.
    """
    document: dict[str, Any] = topologies.document(topologies.shipped("three-regions").read_text(), "three-regions")
    document["hubs"] = {"atlantic": [], "pacific": []}
    for region in document["regions"]:
        region["hub"] = "pacific" if region["name"] == "tokyo" else "atlantic"
    document["local_rtt_ms"] *= SPEEDUP
    document["rtt_ms"] = {a: {b: ms * SPEEDUP for b, ms in row.items()} for a, row in document["rtt_ms"].items()}
    path = folder / "two-hubs.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return WorldSettings(
        topology=str(path),
        replicas=1,
        speedup=SPEEDUP,
        members={"atlantic": 3},
        # Slower than the rest of the world: a paced return must be visible as one.
        # And the waits that a busy machine adds must not move requests if none should move.
        global_config={
            "spill": {"ramp_per_s": RAMP_PER_S},
            "routes": [{"tenant": STEADY, "policy": "nearest"}],
        },
    )


@asynccontextmanager
async def hubs_of(world: World) -> AsyncIterator[Hubs]:
    """All hubs of the world, as an operator's command has them."""
    found = {name: EtcdSettings(tuple(cluster.endpoints)) for name, cluster in world.hubs.items()}
    store = store_of(found, Random(1))
    assert isinstance(store, Hubs)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def bias(world: World, region: str, ms: float) -> None:
    """Draw work to a region from afar, by an operator's word in every hub; 0: take the word back."""
    async with hubs_of(world) as store:
        if ms == 0.0:
            await store.delete(overrides.bias_key(region))
            return
        at = datetime.now(UTC)
        bias = overrides.BiasOverride(region=region, ms=ms, why="drill", author="drills", at=at, for_s=600.0)
        await store.put(bias.key, overrides.encode(bias))


async def settled(world: World) -> bool:
    """Every entry admits all of every region's traffic, and every replica has all its slots."""
    async with aiohttp.ClientSession() as session:
        for region in world.regions.values():
            async with session.get(f"{region.global_admin}/status") as page:
                entry = await page.json()
            async with session.get(f"{region.regional_admin}/status") as page:
                below = await page.json()
            if {(one["state"], one["admitted_share"]) for one in entry["regions"]} != {("up", 1.0)}:
                return False
            if {one["share"] for one in below["replicas"]} != {1.0}:
                return False
    return True


@dataclass
class TimedRequest:
    """One request. Times are epoch seconds, as spans have them; `first` is that of the first byte of its text."""

    begun: float
    first: float | None = None
    result: Result | None = None

    @property
    def region(self) -> str:
        """Who answered it; "" nobody."""
        return self.result.headers.get("x-farhop-region", "") if self.result is not None else ""


@dataclass
class Load:
    """Requests one after the other from each of its workers, from when it is entered until it is left."""

    world: World
    entries: list[list[str]]
    tenant: str = "anywhere"
    asked: list[TimedRequest] = field(default_factory=list)
    _stop: bool = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._work(index, regions)) for index, regions in enumerate(self.entries)]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 20.0)

    async def _work(self, index: int, regions: list[str]) -> None:
        entries = [self.world.regions[region].entry for region in regions]
        async with aiohttp.ClientSession() as session:
            for count in itertools.count():
                if self._stop:
                    return
                asked = TimedRequest(time.time())
                self.asked.append(asked)
                text = f"worker {index}, request {count}: " + "words and more words. " * 20
                body = {
                    "model": self.world.settings.model,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 8,
                    "stream": True,
                }
                async for event in ask(entries, f"sk-farhop-{self.tenant}", body, session=session, request_s=15.0):
                    if isinstance(event, Delta) and asked.first is None:
                        asked.first = time.time()
                    elif isinstance(event, Result):
                        asked.result = event
                await asyncio.sleep(PAUSE_S)

    def lost(self) -> list[str]:
        """Why requests of which nothing had come yet were lost."""
        return [str(a.result.error) for a in self.asked if a.result is not None and not a.result.ok and a.first is None]

    def failed(self) -> list[str]:
        """Why requests failed, begun or not."""
        return [str(a.result.error) for a in self.asked if a.result is not None and not a.result.ok]

    def first_from(self, regions: set[str], since: float) -> float | None:
        """When the first byte came from one of these regions to a request made since then."""
        times = [a.first for a in self.asked if a.begun >= since and a.first is not None and a.region in regions]
        return min(times, default=None)

    async def until_from(self, region: str, since: float, within_s: float) -> float:
        """When the first byte came from this region to a request that came in elsewhere since then. TimeoutError."""
        own = self.world.regions[region].entry

        def afar() -> list[float]:
            made = (a for a in self.asked if a.begun >= since and a.region == region)
            return [a.first for a in made if a.first is not None and a.result is not None and a.result.entry != own]

        async with asyncio.timeout(within_s):
            while not (times := afar()):
                await asyncio.sleep(0.01)
        return min(times)


class Looks:
    """What global balancers say of a region, read off again and again from when it is entered until it is left."""

    def __init__(self, world: World, by: set[str]) -> None:
        self._admins = {name: world.regions[name].global_admin for name in sorted(by)}
        self._pids = balancers(world, by)
        self.seen: list[tuple[float, str, dict[str, Any]]] = []  # when, by which balancer, its region as it sees it
        self.waited: list[tuple[float, float]] = []  # when, and how long they had been kept waiting by then

    async def __aenter__(self) -> Looks:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _look(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                self.waited.append((time.time(), sum(map(run_queue_s, self._pids))))
                for name, admin in self._admins.items():
                    async with session.get(f"{admin}/status") as answer:
                        status = await answer.json()
                    self.seen += [(time.time(), name, region) for region in status["regions"]]
                await asyncio.sleep(LOOK_S)

    def hindered(self, since: float, until: float) -> float:
        """For how long in between those who are looked at and this process could have run and others had the cores: at
        rest next to nothing, and of a time that was measured not theirs."""
        before = max(found for found in self.waited if found[0] <= since)
        after = min((found for found in self.waited if found[0] >= until), default=self.waited[-1])
        return after[1] - before[1]

    async def until(self, region: str, state: str, since: float) -> None:
        """Until each of them has seen that region in that state since then."""
        async with asyncio.timeout(60.0):
            while not all(any(at >= since and by == name and (one["region"], one["state"]) == (region, state)
                              for at, by, one in self.seen) for name in self._admins):  # fmt: skip
                await asyncio.sleep(LOOK_S)

    def states(self, since: float = 0.0) -> set[tuple[str, str]]:
        """(region, state) as anybody saw it since then."""
        return {(region["region"], region["state"]) for at, _, region in self.seen if at >= since}

    def against(self, since: float) -> list[str]:
        """What anybody had against any region since then: who, whom, in which state he saw it and why."""
        found = [(by, one) for at, by, one in self.seen if at >= since and one["state"] != "up"]
        return sorted({f"{by} of {one['region']}: {one['state']}, {one['why']}" for by, one in found})

    def shares(self, of: str, by: str, since: float) -> list[float]:
        """What share of requests goes there gladly, look by look."""
        found = [one for at, name, one in self.seen if at >= since and (name, one["region"]) == (by, of)]
        return [one["admitted_share"] for one in found if one["state"] == "up"]


def balancers(world: World, regions: Collection[str]) -> list[int]:
    """The process ids of these regions' balancers and of this process, which plays clients and the ocean."""
    runs = [world.regions[name] for name in regions]
    pids = [child.pid for run in runs for child in (run.regional, run.global_) if child is not None]
    return [os.getpid(), *(pid for pid in pids if pid is not None)]


def hindrance(world: World, regions: Collection[str]) -> Callable[[], float]:
    """For how long since now these balancers and this process could have run and others had the cores, at a call."""
    began, unheld = time.monotonic(), unhindered(*balancers(world, regions))
    return lambda: time.monotonic() - began - unheld()


async def last_attempt(world: World, region: str, since: float) -> float:
    """When the last attempt towards a region left a global balancer elsewhere, after `since`; `since` if none did."""
    await asyncio.sleep(0.3 + SPANS_EVERY_MS / 1e3)  # exporters batch
    latest = since
    for trace in world.collector.trace_ids():
        for span in world.collector.trace(trace):
            decided = span.name == "farhop.global.decide" and span.attributes.get("farhop.region") == region
            if decided and span.attributes.get("farhop.entry_region") != region:
                latest = max(latest, span.end_ns / 1e9)
    return latest


STALL_S = 0.25  # of the loop that runs the clients and the ocean: pings may then be late for the same reason


class Stalls:
    """How long this loop was kept from running, at the most, from when it is entered until it is left."""

    def __init__(self) -> None:
        self.most_s = 0.0

    async def __aenter__(self) -> Stalls:
        self._task = asyncio.create_task(self._feel())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _feel(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            self.most_s = max(self.most_s, time.monotonic() - before - 0.02)


def figure(drill: str, **seconds: float | None) -> None:
    """Print one line of figures: seconds after the fault, or after it was mended."""
    text = ", ".join(f"{n.replace('_', ' ')} {'-' if s is None else f'{s:.2f} s'}" for n, s in seconds.items())
    print(f"\nfailover: {drill}: {text}")
