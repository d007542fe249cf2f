"""The chaos trial on real processes: a whole world (`farhop_lab.world.world`), constant load, random faults, a verdict.

Faults have the simulator's names; `refuse`, `lose-reports` and `xid` exist there alone (no process of a world closes
its listener, loses reports except with its link, or is watched by an exporter); drains and laws have live drills of
their own. Estimates are compared with one another, since all replicas are alike and this machine's own speed is in
every figure. Invariant: however it ends, the world's processes have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from farhop_lab.chaos import workload
from farhop_lab.chaos.properties import ESTIMATE_OFF, Finding, share_findings
from farhop_lab.chaos.schedule import LONGEST_S, fits, in_order
from farhop_lab.engine.core.faults import KINDS as ENGINE_KINDS
from farhop_lab.sim.faults import LINK_KINDS, Fault
from farhop_lab.world.child import ChildError
from farhop_lab.world.client import COMPLETION, answer
from farhop_lab.world.world import World, WorldError, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

    from farhop_lab.world.client import Result

REPLICA_KINDS = ("oom", "fast-500", "slow", "stuck", "dead-green", "pause", "restart")
REGION_KINDS = ("kill", "restart-regional", "restart-global")
WORLD_KINDS = (*LINK_KINDS, "etcd")
REPLICAS = 2
EVERY_S = 6.0  # between the beginnings of two faults, in the mean
WARM_S = 15.0
QUIET_S, WINDOW_S = 30.0, 45.0
SETTLE_S = 15.0
REQUEST_S = 90.0
RTT_SLACK_MS = 5.0
START_TRIES = 3
KEY = "sk-farhop-anywhere"


class LiveError(Exception):
    """A live run that cannot continue; the text is one line."""


class LiveResult(msgspec.Struct, frozen=True):
    """The result of a live run: answers of the whole run and of them those that failed before the quiet; by replica,
    how many came in the window, and how many would be fair.
    """

    seed: int
    faults: int
    answers: int
    failed: int
    schedule: tuple[Fault, ...]
    shares: dict[str, tuple[int, float]]
    findings: tuple[Finding, ...]


# -- faults


def drawn(seed: int, for_s: float, regions: list[str]) -> tuple[Fault, ...]:
    """The faults of a live run: they begin within `for_s`, at most three at once."""
    rng = Random(f"chaos live {seed}")
    faults: list[Fault] = []
    at_s = WARM_S
    while at_s < for_s:
        fault = _fault(rng, regions, round(at_s, 1))
        if fits(fault, faults):
            faults.append(fault)
        at_s += rng.expovariate(1.0 / EVERY_S)
    return in_order(faults)


def _fault(rng: Random, regions: list[str], at_s: float) -> Fault:
    kinds = rng.choices((REPLICA_KINDS, REGION_KINDS, WORLD_KINDS), (6, 2, 2))[0]
    what, region = rng.choice(kinds), rng.choice(regions)
    for_s = round(0.5 + LONGEST_S * rng.random() ** 2, 1)
    replica = f"{region}-{rng.randrange(REPLICAS)}" if what in REPLICA_KINDS else ""
    to = rng.choice([name for name in regions if name != region]) if what in LINK_KINDS else ""
    factor = round(rng.uniform(1.5, 12.0), 1) if what == "slow" else 1.0
    return Fault(at_s, for_s, what, region if what != "etcd" else "", replica, to, factor)


class _LiveInjector:
    """Injects and mends faults in the processes of a world. A process that does not come back is a finding."""

    def __init__(self, world: World, session: aiohttp.ClientSession) -> None:
        self._world, self._session = world, session
        self.findings: list[Finding] = []

    async def play(self, fault: Fault, progress: Callable[[str], None]) -> None:
        """One fault, from its beginning to its end."""
        await asyncio.sleep(fault.at_s)
        target = fault.replica or " ".join(filter(None, (fault.region, fault.to)))
        progress(f"{fault.what} {target} for {fault.for_s:g} s")
        await self._break(fault)
        await asyncio.sleep(fault.for_s)
        await self._mend(fault)

    async def _break(self, fault: Fault) -> None:
        world, run = self._world, self._world.regions.get(fault.region)
        if fault.what in ENGINE_KINDS:
            await self._command(fault, broken=True)
        elif fault.what == "pause":
            self._engine(fault).signal(signal.SIGSTOP)
        elif fault.what == "restart":
            await self._engine(fault).kill()
        elif fault.what in LINK_KINDS:
            assert world.network is not None
            getattr(world.network, fault.what)(fault.region, fault.to)
        elif fault.what == "etcd":
            assert world.etcd is not None
            world.etcd.pause()
        else:
            assert run is not None
            if fault.what != "restart-global" and run.regional is not None:
                await run.regional.kill()
            if fault.what == "restart-global" and run.global_ is not None:
                await run.global_.kill()
            if fault.what == "kill":
                await asyncio.gather(*(engine.kill() for engine in run.engines))

    async def _mend(self, fault: Fault) -> None:
        world, region = self._world, fault.region
        if fault.what in ENGINE_KINDS:
            await self._command(fault, broken=False)
        elif fault.what == "pause":
            self._engine(fault).signal(signal.SIGCONT)
        elif fault.what == "restart":
            await self._start(fault, lambda: self._start_engines(fault, [_place(fault)]))
        elif fault.what in LINK_KINDS:
            assert world.network is not None
            world.network.heal(region, fault.to)
        elif fault.what == "etcd":
            assert world.etcd is not None
            world.etcd.resume()
        elif fault.what == "restart-global":
            await self._start(fault, lambda: world.start_global(region))
        else:
            if fault.what == "kill":
                await self._start(fault, lambda: self._start_engines(fault, range(REPLICAS)))
            await self._start(fault, lambda: world.start_regional(region))

    async def _start_engines(self, fault: Fault, places: Iterable[int]) -> None:
        for place in places:
            if self._world.regions[fault.region].engines[place].pid is None:
                await self._world.start_engine(fault.region, place)

    async def _start(self, fault: Fault, start: Callable[[], Awaitable[None]]) -> None:
        """A process that does not start at once is reported, and started again, as a supervisor would."""
        for _ in range(START_TRIES):
            try:
                await start()
            except ChildError as error:
                self.findings.append(Finding("sound", fault.region, f"after {fault.what}: {error}"[:300]))
            else:
                return
        raise LiveError(f"{fault.region}: does not come back after {fault.what}; see its log in the world's folder")

    async def _command(self, fault: Fault, *, broken: bool) -> None:
        """By the engine's `/lab/fault`; a dead engine is not broken further, and its return mends it."""
        url = f"{self._world.regions[fault.region].engine_urls[_place(fault)]}/lab/fault"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            if broken:
                body = {"kind": fault.what, "factor": fault.factor}
                async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(5.0)):
                    pass
            else:
                async with self._session.delete(url, timeout=aiohttp.ClientTimeout(5.0)):
                    pass

    def _engine(self, fault: Fault) -> Any:
        return self._world.regions[fault.region].engines[_place(fault)]


def _place(fault: Fault) -> int:
    return int(fault.replica.rpartition("-")[2])


# -- load


class Answered(msgspec.Struct, frozen=True):
    """One answer: when and at which region's entry it was requested, and how it ended."""

    at: float
    entry: str
    ended: str


class _LiveClients:
    """Sends requests as in `workload`, until stopped."""

    def __init__(self, world: World, session: aiohttp.ClientSession, seed: int) -> None:
        self._world, self._session, self._rng = world, session, Random(f"chaos live clients {seed}")
        self._clock = asyncio.get_running_loop().time
        self._asked = 0
        self.under_way: dict[asyncio.Task[None], float] = {}
        self.answers: list[Answered] = []
        self.clients = [asyncio.create_task(self._region(name)) for name in world.regions]

    async def _region(self, name: str) -> None:
        """The clients of one region."""
        while True:
            await asyncio.sleep(self._rng.expovariate(workload.PER_REPLICA_S * REPLICAS))
            self._asked += 1
            task = asyncio.create_task(self._ask(name, f"{self._asked} "))
            self.under_way[task] = self._clock()
            task.add_done_callback(lambda done: self.under_way.pop(done, None))

    async def _ask(self, name: str, unlike: str) -> None:
        at, text = self._clock(), unlike * (workload.PROMPT_BYTES // len(unlike))
        body = {
            "model": self._world.settings.model,
            "prompt": text,
            "max_tokens": workload.ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        entry = self._world.regions[name].entry
        result = await answer([entry], KEY, body, path=COMPLETION, session=self._session, request_s=REQUEST_S)
        self.answers.append(answered(at, name, result))


def answered(at: float, entry: str, result: Result) -> Answered:
    """What a client knows of its answer."""
    ended = "served" if result.ok else result.error.code if result.error is not None else str(result.status)
    return Answered(at, entry, ended)


# -- the verdict


def judged(
    answers: Iterable[Answered],
    counts: Mapping[str, Mapping[str, int]],
    regional: Mapping[str, dict[str, Any]],
    global_: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, tuple[int, float]], list[Finding]]:
    """Shares of the answers in the window, given in `counts` by region and replica, and findings about them and every
    balancer's `/status`.
    """
    findings: list[Finding] = []
    asked: Counter[str] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for one in answers:
        asked[one.entry] += 1
        if one.ended != "served":
            failed[one.entry, one.ended] += 1
    for (entry, ended), count in failed.items():
        findings.append(Finding("answers", entry, f"{count} requests ended as {ended} though nothing is broken"))
    shares: dict[str, tuple[int, float]] = {}
    for region, status in regional.items():
        here = counts[region]
        findings += share_findings(region, asked[region], here)
        shares |= {f"{region}/{name}": (count, sum(here.values()) / len(here)) for name, count in here.items()}
        findings += _of_replicas(region, status)
    findings += _estimates(regional)
    for entry, status in global_.items():
        findings += _of_regions(entry, status)
    return shares, findings


def _of_replicas(region: str, status: dict[str, Any]) -> list[Finding]:
    found = [
        Finding("standing", f"{region}/{replica['replica']}", f"{replica['state']}: {replica['why']}")
        for replica in status["replicas"]
        if replica["state"] != "up"
    ]
    modes = {mode for mode in status["modes"].values() if mode != "normal"}
    return found + [Finding("standing", region, f"mode {mode}") for mode in sorted(modes)]


def _estimates(regional: Mapping[str, dict[str, Any]]) -> list[Finding]:
    """All replicas are alike: each estimate against the median of all."""
    found: list[Finding] = []
    replicas = [(region, replica) for region, status in regional.items() for replica in status["replicas"]]
    for what in ("prefill_ms_per_token", "tpot_ms"):
        usual = median(replica[what] for _, replica in replicas)
        for region, replica in replicas:
            if abs(replica[what] - usual) > ESTIMATE_OFF * usual:
                subject = f"{region}/{replica['replica']}"
                found.append(Finding("estimates", subject, f"{what}: {replica[what]:.4g}, of its likes {usual:.4g}"))
    return found


def _of_regions(entry: str, status: dict[str, Any]) -> list[Finding]:
    found: list[Finding] = []
    for region in status["regions"]:
        subject = f"{entry} of {region['region']}"
        if region["state"] != "up":
            found.append(Finding("standing", subject, f"{region['state']}: {region['why']}"))
        elif region["admitted_share"] < 1.0:
            found.append(Finding("standing", subject, f"asked gladly by {region['admitted_share']:.0%} of requests"))
    return found


def at_rest(
    regional: Mapping[str, dict[str, Any]], global_: Mapping[str, dict[str, Any]], rtt_ms: Callable[[str, str], float]
) -> list[Finding]:
    """What is left when no request is under way, and measured round-trip times that differ from the real ones."""
    found: list[Finding] = []
    for region, status in regional.items():
        left = {name: status[name] for name in ("under_way", "queued_requests", "queued_tokens") if status[name]}
        for replica in status["replicas"]:
            held = {name: replica[name] for name in ("in_flight", "prefill_tokens", "kv_tokens") if replica[name]}
            left |= {f"{replica['replica']} {name}": count for name, count in held.items()}
        found += [Finding("ledgers", region, f"{name}: {count:g} at rest") for name, count in left.items()]
    for entry, status in global_.items():
        for region in status["regions"]:
            subject = f"{entry} of {region['region']}"
            if region["in_flight"]:
                found.append(Finding("ledgers", subject, f"in_flight: {region['in_flight']:g} at rest"))
            wire_ms, seen_ms = rtt_ms(entry, region["region"]), region["rtt_ms"]
            if seen_ms is None or abs(seen_ms - wire_ms) > ESTIMATE_OFF * wire_ms + RTT_SLACK_MS:
                found.append(Finding("estimates", subject, f"rtt ms: {seen_ms}, in truth {wire_ms:.4g}"))
    return found


# -- the run


async def run(folder: Path, seed: int, for_s: float, progress: Callable[[str], None]) -> LiveResult:
    """Start a world, inject faults for `for_s`, wait, and judge. Raises LiveError, WorldError."""
    progress("starting etcd, engines and balancers")
    settings = WorldSettings(replicas=REPLICAS, speedup=1.0)
    async with World(settings, folder) as world, aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0)
    ) as session:  # fmt: skip
        clients, injector = _LiveClients(world, session, seed), _LiveInjector(world, session)
        try:
            return await _broken_and_judged(world, session, clients, injector, seed, for_s, progress)
        finally:
            left = (*clients.clients, *clients.under_way)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            _wake_all(world)


async def _broken_and_judged(
    world: World,
    session: aiohttp.ClientSession,
    clients: _LiveClients,
    injector: _LiveInjector,
    seed: int,
    for_s: float,
    progress: Callable[[str], None],
) -> LiveResult:
    clock = asyncio.get_running_loop().time
    faults = drawn(seed, for_s, list(world.regions))
    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(injector.play(fault, progress))
    progress(f"quiet for {QUIET_S:g} s")
    await asyncio.sleep(QUIET_S)
    since = clock()
    before = sum(one.ended != "served" for one in clients.answers)
    served = await _served(world, session)
    progress(f"judging for {WINDOW_S:g} s")
    await asyncio.sleep(WINDOW_S)
    regional, global_ = await _statuses(world, session)
    window = [one for one in clients.answers if one.at >= since]
    after = await _served(world, session)
    counts = {name: {one: count - served[name][one] for one, count in there.items()} for name, there in after.items()}
    shares, findings = judged(window, counts, regional, global_)
    late = [at for at in clients.under_way.values() if at < clock() - workload.SERVED_WITHIN_S]
    if late:
        text = f"{len(late)} requests are open, the oldest for {clock() - min(late):.0f} s"
        findings.append(Finding("open", "world", text))
    answers = len(clients.answers)
    await _stop(clients)
    await asyncio.sleep(SETTLE_S)
    assert world.network is not None
    findings += at_rest(*await _statuses(world, session), world.network.rtt_ms)
    found = tuple(sorted({*findings, *injector.findings}))
    return LiveResult(seed, len(faults), answers, before, faults, shares, found)


async def _stop(clients: _LiveClients) -> None:
    """No more requests; those under way get their time."""
    for client in clients.clients:
        client.cancel()
    if clients.under_way:
        await asyncio.wait(tuple(clients.under_way), timeout=workload.SERVED_WITHIN_S)


async def _statuses(
    world: World, session: aiohttp.ClientSession
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Every balancer's `/status`, regional and global, by region. LiveError for one that does not answer."""

    async def ask(url: str) -> dict[str, Any]:
        try:
            async with session.get(f"{url}/status", timeout=aiohttp.ClientTimeout(10.0)) as response:
                status: dict[str, Any] = await response.json()
                return status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LiveError(f"{url}/status does not answer: {error}") from None

    names = list(world.regions)
    regional = await asyncio.gather(*(ask(world.regions[name].regional_admin) for name in names))
    global_ = await asyncio.gather(*(ask(world.regions[name].global_admin) for name in names))
    return dict(zip(names, regional, strict=True)), dict(zip(names, global_, strict=True))


async def _served(world: World, session: aiohttp.ClientSession) -> dict[str, dict[str, int]]:
    """Each engine's own count of answers since it started, by region and replica. Raises LiveError."""
    found: dict[str, dict[str, int]] = {}
    for name, run in world.regions.items():
        for place, url in enumerate(run.engine_urls):
            try:
                async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(10.0)) as page:
                    found.setdefault(name, {})[f"{name}-{place}"] = answers_given(await page.text())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise LiveError(f"{url}/metrics does not answer: {error}") from None
    return found


def answers_given(page: str) -> int:
    """Complete answers in an engine's metrics; those broken off do not count."""
    given = 0.0
    for line in page.splitlines():
        if line.startswith("vllm:request_success_total") and 'finished_reason="abort"' not in line:
            given += float(line.rpartition(" ")[2])
    return int(given)


def _wake_all(world: World) -> None:
    """A paused process could not be stopped."""
    for region in world.regions.values():
        for engine in region.engines:
            engine.signal(signal.SIGCONT)
    if world.etcd is not None:
        world.etcd.resume()


__all__ = ["Answered", "LiveError", "LiveResult", "WorldError", "answered", "at_rest", "drawn", "judged", "run"]
