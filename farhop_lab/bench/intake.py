"""What a global balancer spends on the regions' reports. Never a test.

The shipped watcher and machine take in reports of many regions as gRPC delivers them, with requests on hold and under
way. A table row that a report changed is written at the next decision: that counts, too. CPU time of the thread that
does it; gRPC's own time to deliver a message is not included.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec
from farhop_wire import region_pb2

from farhop.balance import machine
from farhop.store.documents.report import ModelReport, RegionReport, from_wire, to_wire
from farhop_lab.bench.decide import Row
from farhop_lab.memory_store import MemoryStore
from global_lb.app.config import GlobalConfig
from global_lb.fleet.view import ChannelChanged
from global_lb.links.config import Watch
from global_lb.links.watch import RegionWatcher
from global_lb.routing.flow import FlowConfig, GlobalFlow
from topology.law import Law
from topology.model import Key, Region, Residency, Rule, Tenant, Topology

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

REGIONS, MODELS = 60, 4
REPORTS_PER_S = 20  # of each region: regional_lb.mesh.report checks that often, and sends what changed
ROUNDS, REPEATS = 30, 5
HELD, UNDER_WAY = 1000, 1000
LIMIT_SHARE = 0.05  # of a core, at REGIONS and REPORTS_PER_S


class Intake(msgspec.Struct, frozen=True):
    """What a report costs, step by step: to parse it, to take it in, and to write the rows that it changed."""

    regions: int
    models: int
    rows: list[Row]

    def share_of(self, row: Row) -> float:
        """The share of one core that this step takes if every region reports REPORTS_PER_S times a second."""
        return row.median_us * 1e-6 * self.regions * REPORTS_PER_S

    @property
    def core_share(self) -> float:
        """That of the intake itself. Rows are written by the next decision, and not at all without one."""
        return sum(map(self.share_of, self.rows[:2]))


def measure(regions: int = REGIONS, models: int = MODELS) -> Intake:
    """Measure it for a world of this many regions."""
    return asyncio.run(_measure(regions, models))


async def _measure(regions: int, models: int) -> Intake:
    samples: tuple[list[float], ...] = ([], [], [])
    for repeat in range(REPEATS):
        world = World(regions, models, random.Random(repeat))
        steps = [world.round(number) for number in range(ROUNDS + 1)][1:]  # the first one opens the links
        await world.close()
        for known, spent in zip(samples, zip(*steps, strict=True), strict=True):
            known.append(statistics.fmean(spent) / regions * 1e6)
    what = ("read from the wire and checked", "taken in by watcher and machine", "rows written, to decide by")
    rows = [Row(name, statistics.median(us), min(us), max(us)) for name, us in zip(what, samples, strict=True)]
    return Intake(regions, models, rows)


class World:
    """A balancer in r0 that is linked to all regions, and their reports."""

    def __init__(self, regions: int, models: int, rng: random.Random) -> None:
        self._names, self._models, self._rng = [f"r{i}" for i in range(regions)], [f"m{i}" for i in range(models)], rng
        tenant = Tenant("t", (Key("k", "0" * 64),), Residency(Rule(("world",))))
        known = {n: Region(n, n, "xx", frozenset(), 0.0, i / 2.0) for i, n in enumerate(self._names)}
        far = {("r0", name): 10.0 + number for number, name in enumerate(self._names[1:])}
        topology = Topology("bench", 1, known, {"t": tenant}, rtt=far)
        self.now = 100.0
        self.flow = GlobalFlow(FlowConfig("r0", held_max=HELD), Law(topology), rng, lambda _tenant: 1e6)
        # The part of the configuration that the watcher uses: no hop keys, no listeners.
        config = GlobalConfig.model_construct(region="r0", instance="g", watch=Watch(), proxies={}, tier_tls=None)
        self.watcher = RegionWatcher(
            config, topology, MemoryStore(rng),
            react=self._react, refused=lambda _reason: None, clock=lambda: self.now, rng=rng,
        )  # fmt: skip
        self._began = False

    def _react(self, event: machine.Event) -> None:
        self.flow.handle(event, self.now)

    def round(self, number: int) -> tuple[float, float, float]:
        """Every region reports once, then there is a decision for each model: CPU seconds to parse, to take in, to
        write.
        """
        self.now += 1.0 / REPORTS_PER_S
        sent = [self.report(name, number).SerializeToString() for name in self._names]
        read_s, reports = _timed(lambda: [from_wire(region_pb2.Report.FromString(data)) for data in sent])
        taken_s, _ = _timed(lambda: [self.watcher.on_report(report) for report in reports])
        if not self._began:
            self._begin()
        asked = [_request(f"q{number}", model, self.now) for model in self._models]
        written_s, _ = _timed(lambda: [self.flow.consider(request, self.now) for request in asked])
        again_s, _ = _timed(lambda: [self.flow.consider(request, self.now) for request in asked])
        return read_s, taken_s, max(0.0, written_s - again_s)

    def _begin(self) -> None:
        """Channels are up, requests are under way, and others wait for a model that no region has ready."""
        self._began = True
        for name in self._names:
            self._react(ChannelChanged(name, up=True))
        for number in range(UNDER_WAY):
            request = _request(f"u{number}", self._rng.choice(self._models), self.now)
            self._react(machine.RequestArrived(request))
            self._react(machine.AttemptBegan(request.id, 1, 200))
        for number in range(HELD):
            self._react(machine.RequestArrived(_request(f"h{number}", "down", self.now)))

    def report(self, name: str, number: int) -> region_pb2.Report:
        rng = self._rng
        models = [
            ModelReport(
                model=model, replicas_ready=8, replicas_total=8, slots_total=512, slots_free=rng.randrange(512),
                kv_tokens_total=3_200_000, kv_tokens_free=rng.randrange(3_200_000), in_flight=rng.randrange(512),
                wait_ms=rng.uniform(0.0, 200.0), prefill_ms_per_token=0.04, tpot_ms=rng.uniform(10.0, 20.0),
                bytes_per_token=4.0, usable_share=1.0, used_share=rng.uniform(0.2, 0.8), batch_interference_ms=0.05,
                headroom_foreign_tokens=rng.randrange(1_000_000), gpu_types=("H100-80GB",),
            )
            for model in self._models
        ]  # fmt: skip
        down = ModelReport(
            model="down", replicas_ready=0, replicas_total=1, slots_total=0, slots_free=0, kv_tokens_total=0,
            kv_tokens_free=0, wait_ms=0.0, prefill_ms_per_token=0.04, tpot_ms=10.0, bytes_per_token=4.0,
            usable_share=0.0,
        )  # fmt: skip
        return to_wire(
            RegionReport(
                region=name, instance=f"{name}-a", incarnation=1, seq=number + 1, clock_ms=self.now * 1e3,
                tier_address="127.0.0.1:9", control_address="127.0.0.1:9",
                models=(*models,) if number else (*models, down),  # offered once: known, and served nowhere since
                accepted_bytes={f"r{i}/g": rng.uniform(0.0, 1e9) for i in range(8)},
            )
        )  # fmt: skip

    async def close(self) -> None:
        """Close the links."""
        await self.watcher.close()


def _timed(work: Callable[[], list[_T]]) -> tuple[float, list[_T]]:
    began = time.thread_time()
    done = work()
    return time.thread_time() - began, done


def _request(name: str, model: str, now: float) -> machine.Request:
    return machine.Request(
        id=name, tenant="t", model=model, prompt_bytes=4096, body_bytes=4096, chain=(), deadline=now + 1e5,
        max_tokens=256,
    )  # fmt: skip
