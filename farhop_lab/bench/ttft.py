"""What each tier adds to the time to the first token: direct to the engine, by a bare relay, by one tier, by both.

All paths lead to the same engine at the same time and are used in turn, forth and back (ABBA), so that other load on
the machine affects all alike; an addition is the median of paired differences. Short and long prompts; without a
tokenizer, with one that no decision waits for, and with one that each waits for (engines publish KV events, and there
are two). Never loads the machine: one request at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import aiohttp
import msgspec

from farhop_lab.bench import bare, bodies, tiers, usage
from farhop_lab.bench.harness import HOST, BenchError, ProxyEnvironment, engines, module, open_files, output, started
from farhop_lab.bench.ttft_client import Job, Sample, Way
from farhop_lab.engine import tokenizer_file
from farhop_lab.sim.measures import quantile
from farhop_lab.world.child import Child
from farhop_lab.world.ports import free_ports

DIRECT, BARE, REGIONAL, BOTH = "direct", "bare relay", "regional", "both tiers"
SIZES = {"short": 512, "long": 32 * 1024}  # bytes of a body
ROUNDS, QUICK_ROUNDS = 60, 15
_REPLICAS = 2
_TOKENS = 2
_DELAY_MS = 5.0  # of our own engine, to its first event
_CLIENT_S = 300.0
_Z95 = 1.96


class Median(msgspec.Struct, frozen=True):
    """A median and the interval that contains the true one in 95 of 100 runs, whatever the distribution is."""

    ms: float
    low_ms: float
    high_ms: float


class Row(msgspec.Struct, frozen=True):
    """One path with one tokenizer and one length of prompt. `added` is beyond the path that it extends (direct; for
    both tiers the regional one), None for the direct one; `cpu_ms` is its processes' CPU time per request.
    """

    tokenizer: str
    prompt: str
    way: str
    p50_ms: float
    p90_ms: float
    added: Median | None
    cpu_ms: float


@dataclass(frozen=True)
class Mode:
    """How the region tokenizes prompts."""

    name: str
    reads: bool = False
    kv_events: bool = False  # engines publish KV events, so a decision waits for tokens


MODES = (Mode("off"), Mode("on", reads=True), Mode("on, KV events", reads=True, kv_events=True))


@dataclass(frozen=True)
class Engine:
    """A real engine instead of the benchmark's own: its origin and model, and the model's tokenizer.json if given."""

    url: str
    model: str = ""
    tokenizer: Path | None = None


def median_of(values: Sequence[float]) -> Median:
    """The median, and by order statistics its interval (Conover, Practical Nonparametric Statistics, §3.2)."""
    ordered, n = sorted(values), len(values)
    reach = _Z95 * sqrt(n) / 2
    low, high = max(0, ceil(n / 2 - reach) - 1), min(n - 1, ceil(n / 2 + reach) - 1)
    return Median(median(ordered), ordered[low], ordered[high])


def rows_of(tokenizer: str, prompt: str, rounds: Sequence[Sequence[Sample]]) -> list[Row]:
    """The rows of one prompt, one for each path."""
    by_way: dict[str, list[Sample]] = {}
    means: list[dict[str, float]] = []
    for one in rounds:
        both: dict[str, list[float]] = {}
        for sample in one:
            by_way.setdefault(sample.way, []).append(sample)
            both.setdefault(sample.way, []).append(sample.ttft_ms)
        means.append({way: sum(ms) / len(ms) for way, ms in both.items()})
    rows: list[Row] = []
    for way, samples in by_way.items():
        ordered = sorted(sample.ttft_ms for sample in samples)
        base = REGIONAL if way == BOTH else DIRECT
        added = median_of([pair[way] - pair[base] for pair in means]) if way != DIRECT else None
        cpu_ms = median(sample.cpu_ms for sample in samples)
        rows.append(Row(tokenizer, prompt, way, quantile(ordered, 0.5), quantile(ordered, 0.9), added, cpu_ms))
    return rows


async def measure(
    rounds: int = ROUNDS,
    engine: Engine | None = None,
    modes: Sequence[Mode] = MODES,
    progress: Callable[[str], None] = lambda _text: None,
) -> list[Row]:
    """Measure all paths. `progress` is called with each step. Raises BenchError."""
    if not usage.available():
        raise BenchError("bench reads other processes' CPU time from /proc: it needs Linux")
    found: list[Row] = []
    for mode in modes:
        if engine is not None and mode.reads and (mode.kv_events or engine.tokenizer is None):
            continue  # there is no tokenizer, or nothing publishes what a real engine caches
        progress(f"starting both tiers, tokenizer {mode.name}")
        async with _ways(mode, engine) as (ways, model):
            for prompt, size in SIZES.items():
                progress(f"tokenizer {mode.name}, {prompt} prompts")
                (body,) = bodies.streamed(size, _TOKENS, 1.0, 1, model, _DELAY_MS)
                job = Job(ways, body.decode(), rounds)
                program, arguments = module("ttft_client", job)
                printed = await output([*program, *arguments], _CLIENT_S)
                found += rows_of(mode.name, prompt, msgspec.json.decode(printed, type=list[list[Sample]]))
    return found


@asynccontextmanager
async def _ways(mode: Mode, engine: Engine | None) -> AsyncIterator[tuple[list[Way], str]]:
    """All paths to the engine until the end of the block, and the model it serves."""
    folder = Path(tempfile.mkdtemp(prefix="farhop-ttft-"))
    try:
        files = open_files()
        if engine is not None:
            url = urlsplit(engine.url)
            if url.hostname is None or url.scheme != "http":
                raise BenchError("--engine: give an origin such as http://127.0.0.1:8000")
            model = engine.model or await _served(engine.url)
            environment = ProxyEnvironment(folder, ((url.hostname, url.port or 80),), files)
            async with _over(environment, model, mode, engine.tokenizer) as ways:
                yield ways, model
        else:
            tokenizer_file.write(folder)
            async with engines(folder, files, None) as all_of_them:
                environment = replace(all_of_them, targets=all_of_them.targets[:_REPLICAS])
                async with _over(environment, bodies.MODEL, mode, folder / tokenizer_file.TOKENIZER) as ways:
                    yield ways, bodies.MODEL
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _over(
    environment: ProxyEnvironment, model: str, mode: Mode, tokenizer: Path | None
) -> AsyncIterator[list[Way]]:
    (port,) = free_ports(1)
    program, arguments = module("bare", bare.Job(port, list(environment.targets)))
    relay = Child("the bare relay", arguments, environment.folder / "bare.log", {}, program)
    reader = tiers.Reader(model, tokenizer if mode.reads else None, kv_events=mode.kv_events)
    async with (
        started(relay, HOST, port, model=model) as bare_one,
        tiers.side_by_side(environment, reader) as (regional, both),
    ):
        host, direct = environment.targets[0]
        yield [
            Way(DIRECT, host, direct),
            Way(BARE, HOST, port, list(bare_one.pids)),
            Way(REGIONAL, regional.host, regional.port, list(regional.pids)),
            Way(BOTH, both.host, both.port, list(both.pids)),
        ]


async def _served(url: str) -> str:
    """The first model that an engine names. Raises BenchError."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.get(f"{url.rstrip('/')}/v1/models") as answer,
        ):
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"--engine: {url}/v1/models: {error or type(error).__name__}; is it an engine?") from None
