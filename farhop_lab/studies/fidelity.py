"""Runs the same small scenario live and simulated, and compares the figures.

Live means `farhop_lab.world.world`: etcd, both tiers and emulated engines, each its own process, network and engines
sped up alike, and clients that run the scenario's own programs over HTTP. Times are the scenario's, with the speed-up
divided out. Other load on the machine is in the live figures and not in the simulated ones: run it on an idle one. Each
live answer is also compared with what both tiers predicted, by their records of decisions. Closed loops only, and one
kind of fleet in every region of the topology.
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
    from farhop_lab.world.client import Result as Answered

WITHIN = 0.15
"""The largest allowed difference, as a share of the live figure."""
PROMISE_WITHIN = 0.20
"""The largest allowed median error of a predicted time to first token, as a share of what the client saw."""
PAUSE_S = 1.0
_RECORD_S, _POLL_S = 2.0, 0.05


class FidelityError(Exception):
    """Something that cannot be run live; the text is one line with the remedy."""


class MeasuredAnswer(msgspec.Struct, frozen=True):
    """One answer of the window: milliseconds of the scenario's time, tokens. `promises`: by tier, the predicted and the
    actual value; the global tier's against what the client saw, the regional one's against what its balancer saw.
    """

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    promises: dict[str, tuple[float, float]] = {}


class Compared(msgspec.Struct, frozen=True):
    """A figure of both runs."""

    figure: str
    live: float
    simulated: float

    @property
    def apart(self) -> float:
        """The difference as a share of the live figure; of a ratio, the plain difference."""
        if self.figure.endswith("_ms"):
            return (self.simulated - self.live) / self.live if self.live else 0.0
        return self.simulated - self.live

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return abs(self.apart) <= WITHIN


class PromiseErrors(msgspec.Struct, frozen=True):
    """The errors of a tier's predictions, as shares of the actual value: at the median and at p90, and their number."""

    tier: str
    answers: int
    promised_p50_ms: float
    seen_p50_ms: float
    off_p50: float
    off_p90: float

    @property
    def holds(self) -> bool:
        """Whether the median is small enough."""
        return self.off_p50 <= PROMISE_WITHIN


def settings(scenario: Scenario, speedup: float) -> WorldSettings:
    """The live world of a scenario. FidelityError if there is none."""
    doc = scenario.doc
    fleets = {(site.gpu, site.replicas) for site in doc.sites.values()}
    if set(doc.sites) != set(scenario.topology.regions) or len(fleets) != 1:
        raise FidelityError(f"{doc.name}: a live world has the same replicas in every region; give all sites the same")
    if any(work.per_s or work.path for work in doc.work) or doc.faults:
        raise FidelityError(f"{doc.name}: only closed loops without faults are run live; give `clients`")
    ((gpu, replicas),) = fleets
    return WorldSettings(topology=doc.topology, profile=gpu, replicas=replicas, speedup=speedup)


async def live(scenario: Scenario, speedup: float, seed: int, folder: Path) -> tuple[list[MeasuredAnswer], int]:
    """Answers to requests sent within the window, and the number of failures. Raises FidelityError, WorldError."""
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
        self.seen: list[MeasuredAnswer] = []
        self.failed = 0

    def begin(self) -> None:
        self._began = time.monotonic()

    def _now(self) -> float:
        """Seconds of the scenario."""
        return (time.monotonic() - self._began) * self._speedup

    async def client(self, region: str, these: Programs) -> None:
        """One client after another, as in `sim.clients`."""
        for program in these:
            try:
                batch = next(program)
                while True:
                    texts = await asyncio.gather(*(self._ask(region, ask) for ask in batch))
                    if self._now() >= self._doc.duration_s:
                        return
                    if any(text is None for text in texts):
                        program.close()
                        await asyncio.sleep(PAUSE_S / self._speedup)
                        break
                    batch = program.send(tuple(text or b"" for text in texts))
            except StopIteration:
                continue  # done: the next one

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
            usage, ttft_ms = result.usage, result.ttft_ms * self._speedup
            promises = await self._promises(region, result, ttft_ms)
            self.seen.append(MeasuredAnswer(ttft_ms, usage.prompt_tokens, usage.cached_tokens or 0, promises))
        return result.text.encode()

    async def _promises(self, region: str, result: Answered, ttft_ms: float) -> dict[str, tuple[float, float]]:
        """By tier, as in `MeasuredAnswer`; a tier that kept no record is left out."""
        decision, served = result.headers.get("x-farhop-decision"), result.headers.get("x-farhop-region", "")
        if not decision or served not in self._world.regions:
            return {}
        upper = await self._record(self._world.regions[region].global_admin, decision)
        lower = await self._record(self._world.regions[served].regional_admin, decision)
        found: dict[str, tuple[float, float]] = {}
        for one in upper.get("reasons", {}).get("candidates", ()):
            if one["region"] == served:
                found["global"] = one["ttft_ms"] * self._speedup, ttft_ms
        promised_ms, seen_ms = lower.get("reasons", {}).get("ttft_ms"), lower.get("ttft_ms")
        if promised_ms is not None and seen_ms:
            found["regional"] = promised_ms * self._speedup, seen_ms * self._speedup
        return found

    async def _record(self, admin: str, decision: str) -> dict[str, Any]:
        """A balancer's record of a decision, {} if none: it is complete when the answer has ended."""
        until = time.monotonic() + _RECORD_S
        while True:
            async with self._session.get(f"{admin}/decisions/{decision}") as response:
                if response.status == 200:
                    found: dict[str, Any] = await response.json()
                    return found
            if time.monotonic() >= until:
                return {}
            await asyncio.sleep(_POLL_S)


def compared(seen: list[MeasuredAnswer], failed: int, simulated: Result) -> list[Compared]:
    """Both, figure by figure. FidelityError if nothing was answered live."""
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


def promise_errors(seen: list[MeasuredAnswer]) -> list[PromiseErrors]:
    """The errors of each tier's predictions."""
    rows = []
    for tier in ("global", "regional"):
        pairs = [one.promises[tier] for one in seen if tier in one.promises]
        if pairs:
            off = sorted(abs(expected_ms - seen_ms) / seen_ms for expected_ms, seen_ms in pairs)
            expected, came = sorted(expected_ms for expected_ms, _ in pairs), sorted(seen_ms for _, seen_ms in pairs)
            rows.append(
                PromiseErrors(
                    tier,
                    len(pairs),
                    quantile(expected, 0.5),
                    quantile(came, 0.5),
                    quantile(off, 0.5),
                    quantile(off, 0.9),
                )
            )
    return rows


__all__ = [
    "Compared",
    "FidelityError",
    "MeasuredAnswer",
    "PromiseErrors",
    "WorldError",
    "compared",
    "live",
    "promise_errors",
    "settings",
]  # fmt: skip
