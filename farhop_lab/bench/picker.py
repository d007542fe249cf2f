"""What a request costs a picker behind a real Envoy: ours, beside one that decides nothing, in the same run.

Both serve the same Envoy over the same upstream, freshly started, in turn for several rounds; only the CPU time of the
picker's process counts. A request that was not answered with 200 is always reported as an error.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from farhop_lab.bench import bare, configs, relay, usage
from farhop_lab.bench.client import Window
from farhop_lab.bench.harness import HOST, BenchError, ProxyEnvironment, Running, engines, module, started
from farhop_lab.bench.proxies import ENVOY
from farhop_lab.bench.tiers import TierEnvironment, regional_config
from farhop_lab.world.child import Child
from farhop_lab.world.ports import free_ports

SIZES = (1024, 220 * 1024)
OURS, BARE = "farhop picker", "picker without a decision"
RATIO_MAX = 1.8  # of ours to the bare one
_READY_S = 20.0
_SETTLE_S, _REST_S = 0.7, 1.5


class Row(msgspec.Struct, frozen=True):
    """A picker: the share of a core that it uses when idle; beyond that, CPU ms per request by body size, median,
    minimum and maximum of the rounds; requests not answered well.
    """

    name: str
    rest_share: float
    cpu_ms: dict[int, tuple[float, float, float]]
    errors: int


class Found(msgspec.Struct, frozen=True):
    """Both, and the ratio of the medians by body size."""

    rows: list[Row]
    ratios: dict[int, float]
    rounds: int


def missing() -> str | None:
    """Why it cannot be measured here; None if it can."""
    return ENVOY.missing()


async def measure(rounds: int, window_s: float, progress: Callable[[str], None]) -> Found:
    """Raises BenchError."""
    why = missing()
    if why is not None:
        raise BenchError(f"picker: Envoy is {why}")
    tools = relay.Tools.found()
    windows: dict[str, dict[int, list[Window]]] = {name: {size: [] for size in SIZES} for name in (OURS, BARE)}
    rest: dict[str, list[float]] = {OURS: [], BARE: []}
    for turn in range(rounds):
        for name, run in ((OURS, _ours), (BARE, _bare)):
            progress(f"round {turn + 1} of {rounds}, {name}")
            with tempfile.TemporaryDirectory(prefix="farhop-bench-") as folder:
                async with engines(Path(folder), tools.files, None) as environment, run(environment) as running:
                    await asyncio.sleep(_SETTLE_S)
                    rest[name].append(await _rest(running))
                    for size in SIZES:
                        await relay.busy(tools, environment, running, size, window_s / 4)
                        windows[name][size].append(await relay.busy(tools, environment, running, size, window_s))
    rows = [row_of(name, taken, rest[name]) for name, taken in windows.items()]
    ratios = {size: rows[0].cpu_ms[size][0] / rows[1].cpu_ms[size][0] for size in SIZES}
    return Found(rows, ratios, rounds)


async def _rest(running: Running) -> float:
    """The share of a core that it uses without requests: probes, scrapes, reports."""
    pids = usage.tree(running.pids)
    before, began = usage.cpu_s(pids), time.monotonic()
    await asyncio.sleep(_REST_S)
    return (usage.cpu_s(pids) - before) / (time.monotonic() - began)


def row_of(name: str, taken: dict[int, list[Window]], rest: list[float]) -> Row:
    cpu_ms: dict[int, tuple[float, float, float]] = {}
    for size, windows in taken.items():
        each = [
            1e3 * (window.cpu_s - share * window.seconds) / max(1, window.requests)
            for window, share in zip(windows, rest, strict=True)
        ]
        cpu_ms[size] = statistics.median(each), min(each), max(each)
    return Row(
        name, statistics.median(rest), cpu_ms, sum(window.errors for windows in taken.values() for window in windows)
    )


@asynccontextmanager
async def _ours(environment: ProxyEnvironment) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        around = await stack.enter_async_context(TierEnvironment(environment))
        admin, picker = free_ports(2)
        config = {**regional_config(environment), "admin": {"port": admin}, "picker": {"port": picker}}
        pid = await around.tier("regional", config)
        yield await stack.enter_async_context(_behind_envoy(environment, picker, pid))


@asynccontextmanager
async def _bare(environment: ProxyEnvironment) -> AsyncIterator[Running]:
    (port,) = free_ports(1)
    program, arguments = module("bare_picker", bare.Job(port, list(environment.targets)))
    child = Child(BARE, arguments, environment.folder / "picker.log", {}, program)
    try:
        await child.start_until(lambda: _listens(port), _READY_S)
        assert child.pid is not None
        async with _behind_envoy(environment, port, child.pid) as running:
            yield running
    finally:
        await child.stop(2.0)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.transport.abort()
    return True


@asynccontextmanager
async def _behind_envoy(environment: ProxyEnvironment, picker: int, pid: int) -> AsyncIterator[Running]:
    """Envoy with this picker; only the picker's process is measured."""
    binary = ENVOY.find()
    assert binary is not None  # `missing` was checked
    (port,) = free_ports(1)
    file = environment.folder / "envoy-picker.json"
    file.write_text(configs.envoy_picked(port, picker, environment.targets))
    arguments = ["-c", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    child = Child("envoy", arguments, environment.folder / "envoy.log", {}, [binary])
    async with started(child, HOST, port):
        yield Running(port, (pid,))
