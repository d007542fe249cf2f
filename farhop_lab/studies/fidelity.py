"""The same small scenario run for real and simulated: how far apart are they?

For real means `farhop_lab.world.world`: etcd, both tiers and emulated engines, each its own process, wires and engines
sped
up alike, and clients that run the scenario's own programs over HTTP. Times are told as the scenario's, the speed-up
taken out. What the machine does besides is in the live figures and not in the simulated ones: run it on an idle one.
Closed loops only, and one kind of fleet in every region of the topology.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from farhop_lab.scenarios.work import figures_of, programs
from farhop_lab.sim.measures import quantile
from farhop_lab.world.client import COMPLETION, answer
from farhop_lab.world.world import World, WorldError, WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.studies.cell import Result
    from farhop_lab.workloads.program import Ask, Programs

WITHIN = 0.15
"""How far apart the two may be, as a share of the live figure."""
PAUSE_S = 1.0


class FidelityError(Exception):
    """What cannot be run for real; the text is one line with the remedy."""


class Seen(msgspec.Struct, frozen=True):
    """One answer of the window: milliseconds of the scenario's time, tokens."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


class Compared(msgspec.Struct, frozen=True):
    """A figure of both runs."""

    figure: str
    live: float
    simulated: float

    @property
    def apart(self) -> float:
        """The simulated one's distance from the live one, as a share of that; of a ratio, the plain difference."""
        if self.figure.endswith("_ms"):
            return (self.simulated - self.live) / self.live if self.live else 0.0
        return self.simulated - self.live

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return abs(self.apart) <= WITHIN


def settings(scenario: Scenario, speedup: float) -> WorldSettings:
    """The live world of a scenario. FidelityError where there is none."""
    doc = scenario.doc
    fleets = {(site.gpu, site.replicas) for site in doc.sites.values()}
    if set(doc.sites) != set(scenario.topology.regions) or len(fleets) != 1:
        raise FidelityError(f"{doc.name}: a live world has the same replicas in every region; give all sites the same")
    if any(work.per_s or work.path for work in doc.work) or doc.faults:
        raise FidelityError(f"{doc.name}: only closed loops without faults are run live; give `clients`")
    ((gpu, replicas),) = fleets
    return WorldSettings(topology=doc.topology, profile=gpu, replicas=replicas, speedup=speedup)


async def live(scenario: Scenario, speedup: float, seed: int, folder: Path) -> tuple[list[Seen], int]:
    """Answers whose requests were made within the window, and how many failed. FidelityError, WorldError."""
    world = World(settings(scenario, speedup), folder)
    doc = scenario.doc
    async with world, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients, named = _LiveClients(world, session, scenario, speedup), scenario.work_name
        runs = [
            clients.client(region, programs(figures_of(work), work.tenant, f"{named} {i} {region} {n}", seed))
            for i, work in enumerate(doc.work)
            for region, count in work.clients.items()
            for n in range(count)
        ]
        clients.begin()
        await asyncio.gather(*runs)
    return clients.seen, clients.failed


class _LiveClients:
    def __init__(self, world: World, session: aiohttp.ClientSession, scenario: Scenario, speedup: float) -> None:
        self._world, self._session, self._doc, self._speedup = world, session, scenario.doc, speedup
        self._began = 0.0
        self.seen: list[Seen] = []
        self.failed = 0

    def begin(self) -> None:
        self._began = time.monotonic()

    def _now(self) -> float:
        """Seconds of the scenario."""
        return (time.monotonic() - self._began) * self._speedup

    async def client(self, region: str, these: Programs) -> None:
        """One client after another, as `sim.clients` has it."""
        for program in these:
            try:
                batch = next(program)
                while True:
                    said = await asyncio.gather(*(self._ask(region, ask) for ask in batch))
                    if self._now() >= self._doc.duration_s:
                        return
                    if any(text is None for text in said):
                        program.close()
                        await asyncio.sleep(PAUSE_S / self._speedup)
                        break
                    batch = program.send(tuple(text or b"" for text in said))
            except StopIteration:
                continue  # well done: the next one

    async def _ask(self, region: str, ask: Ask) -> bytes | None:
        await asyncio.sleep(ask.think_s / self._speedup)
        at = self._now()
        if at >= self._doc.duration_s:
            return None
        body: dict[str, Any] = {
            "model": self._world.settings.model,
            "prompt": ask.prompt.decode("ascii"),
            "max_tokens": ask.answer_tokens or ask.max_tokens,
            "ignore_eos": ask.answer_tokens is not None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        entry, key = self._world.regions[region].entry, f"sk-farhop-{ask.tenant}"
        result = await answer([entry], key, body, path=COMPLETION, session=self._session)
        counts = at >= self._doc.warm_up_s
        if not result.ok or result.ttft_ms is None or result.usage is None:
            self.failed += counts
            return None
        if counts:
            usage = result.usage
            self.seen.append(Seen(result.ttft_ms * self._speedup, usage.prompt_tokens, usage.cached_tokens or 0))
        return result.text.encode()


def compared(seen: list[Seen], failed: int, simulated: Result) -> list[Compared]:
    """Both, figure by figure. FidelityError where nothing was answered live."""
    if not seen:
        raise FidelityError(f"nothing was answered live ({failed} failed); let it run longer, or on an idler machine")
    figures = simulated.figures()
    ttft = sorted(one.ttft_ms for one in seen)
    hit = sum(one.cached_tokens for one in seen) / sum(one.prompt_tokens for one in seen)
    return [
        Compared("ttft_p50_ms", quantile(ttft, 0.5), figures["ttft_p50_ms"]),
        Compared("ttft_p90_ms", quantile(ttft, 0.9), figures["ttft_p90_ms"]),
        Compared("hit", hit, figures["hit"]),
    ]


__all__ = ["Compared", "FidelityError", "Seen", "WorldError", "compared", "live", "settings"]
