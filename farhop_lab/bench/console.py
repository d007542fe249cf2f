"""What the console costs: CPU and bytes of its server and of each viewer, and a browser's time per frame.

The server is a process of its own with the shipped port over a made-up fleet in which every figure changes each second.
The browser is headless Chromium, if Selenium, chromium and chromedriver are installed; its own trace gives the time of
the page's thread per frame. For benchmarks and tests only.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import yaml

import topology
from farhop.identity.operators import OPEN, Operator
from farhop.service.admin.console.acts import ActError
from farhop.service.admin.console.snapshot import LastSnapshot
from farhop.service.admin.server import AdminServer
from farhop.service.observability.decisions import Decisions
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.bench.harness import BenchError
from topology.law import Law
from topology.load import parse

FEW, MANY = (12, 20), (60, 0)  # (regions, replicas of each): for the bounds of bytes and CPU, and for those of frames
VIEWERS = 50
VIEWS = ("world", "region/region-0", "request", "law", "drills")
TENANTS = 20
OTHERS = 3  # regions that each one sends to: 180 arcs of 60
BYTES_MAX, CPU_MAX, FRAME_MS_MAX = 20_000.0, 0.005, 8.0
SETTLE_S = 4.0
SILENT_S = 20.0  # without a snapshot
START_S = 120.0  # only detects a hang: at a load of 18 a start took more than 30 s
TICKS = os.sysconf("SC_CLK_TCK")


class Row(msgspec.Struct, frozen=True):
    """A figure, its bound (None: none), and whether it is within."""

    what: str
    unit: str
    value: float
    bound: float | None = None

    @property
    def held(self) -> bool:
        """Whether it is within its bound."""
        return self.bound is None or self.value <= self.bound


class ChangingFleet:
    """A fleet in which every figure changes each second. See farhop.service.admin.console.server.Source."""

    name = "the changing fleet"

    def __init__(self, regions: int, replicas: int) -> None:
        self._law = Law(world(regions))
        self._regions, self._replicas, self._look = tuple(self._law.topology.regions), replicas, 0

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        """See Source."""
        self._look += 1
        now_ms, found = int(time.time() * 1e3), {}
        for i, region in enumerate(self._regions):
            found[f"regional {region}"] = LastSnapshot(self._lower(region), now_ms, "", "regional", region)
            found[f"global {region}"] = LastSnapshot(self._upper(i, now_ms), now_ms, "", "global", region)
        return found

    def _lower(self, region: str) -> dict[str, Any]:
        look = self._look
        rows = {
            f"{region}-{k}": {
                "state": "up", "why": "proven", "in_flight": (look * 7 + k) % 60, "slots": 64,
                "running": (look + k) % 50, "waiting": 0, "kv": ((look * 3 + k) % 97) / 100, "hit": 0.4,
                "tpot_ms": 11.5, "prefill_ms": 0.2, "models": ["m"], "age_s": 0, "version": "v1",
            }
            for k in range(self._replicas)
        }  # fmt: skip
        return {
            "tier": "regional", "region": region, "instance": "a", "epoch": 1, "replicas": rows, "queued": look % 3,
            "queue": {"0 t": look % 3 + 1}, "under_way": look % 40, "law": {},
        }  # fmt: skip

    def _upper(self, i: int, now_ms: int) -> dict[str, Any]:
        look, regions = self._look, self._regions
        region = regions[i]
        decision = {
            "at": now_ms, "tenant": "t", "model": "m", "to": region, "status": 200, "outcome": "served", "ttft_ms": 99,
        }  # fmt: skip
        row = {"state": "up", "why": "ok", "wait_ms": look % 20, "used": (look + i) % 10 / 10, "slots_free": 64}
        others = {regions[(i + k + 1) % len(regions)]: {"ok": (look + i + k) % 9 + 0.5} for k in range(OTHERS)}
        return {
            "tier": "global", "region": region, "instance": "a", "epoch": 1, "under_way": look % 30, "trouble": None,
            "arcs": others, "decisions": {f"{look:08x}{i:08x}": decision}, "regions": {region: row},
        }  # fmt: skip

    def law(self) -> Law:
        """See Source."""
        return self._law

    async def decision(self, decision_id: str) -> dict[str, dict[str, Any]]:  # noqa: ARG002 - none is kept
        """See Source."""
        return {}

    async def explain(self, question: bytes) -> dict[str, Any]:  # noqa: ARG002 - nobody decides
        """See Source."""
        raise ActError("a fleet that is made up decides nothing")

    def acts(self) -> None:
        """See Source."""

    def author(self, operator: Operator) -> str:
        """See Source."""
        return operator.name


def world(regions: int) -> topology.model.Topology:
    """A map of this many regions, spread over the cities that Farhop knows."""
    with (Path(topology.__file__).parent / "places.csv").open(encoding="utf-8") as file:
        cities = [row for row in csv.DictReader(file) if not row["name"].startswith("#")]
    step = max(1.0, len(cities) / regions)
    chosen = [cities[int(i * step) % len(cities)] for i in range(regions)]
    raw = {
        "name": "changing",
        "epoch": 1,
        "countries": [{"name": "us"}],
        "hubs": {"main": []},
        "regions": [
            {
                "name": f"region-{i}", "city": one["name"], "country": "us", "latitude": float(one["latitude"]),
                "longitude": float(one["longitude"]), "entry": [f"http://127.0.0.1:{10_000 + i}"], "hub": "main",
                "egress_usd_per_gb": 0.09, "usd_per_gpu_hour": 2.5,
            }
            for i, one in enumerate(chosen)
        ],
        "tenants": [
            {"name": name, "residency": {"processing": {"allow": ["world"]}}}
            for name in ("t", *(f"tenant-{i}" for i in range(1, TENANTS)))
        ],
        "local_rtt_ms": 1.0,
        "rtt_ms": {f"region-{i}": {f"region-{k}": 50.0 for k in range(i + 1, regions)} for i in range(regions - 1)},
    }  # fmt: skip
    return parse(yaml.safe_dump(raw), "changing")


async def serve(regions: int, replicas: int) -> None:
    """Open the port over such a fleet, print its number, and serve until the process is stopped."""
    server = AdminServer(SimpleNamespace(), TierMetrics("console", "", ""), Decisions(), None, OPEN)
    server.have(ChangingFleet(regions, replicas))
    print(await server.open("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()


async def costs(seconds: float) -> list[Row]:
    """The server's costs, at 12 regions of 20 replicas, without and with viewers."""
    async with _served(*FEW) as (port, pid):
        await asyncio.sleep(SETTLE_S)
        alone, _ = await _watched(pid, port, 0, seconds)
        shared, sent = await _watched(pid, port, VIEWERS, seconds)
    return [
        Row("the server without a viewer", "% of a core", alone * 100.0, CPU_MAX * 100.0),
        Row(f"the server with {VIEWERS} viewers", "% of a core", shared * 100.0, CPU_MAX * 100.0),
        Row("each viewer", "% of a core", max(0.0, shared - alone) / VIEWERS * 100.0, CPU_MAX * 100.0),
        Row("to each viewer", "bytes/s", max(sent), BYTES_MAX),
    ]


@contextlib.asynccontextmanager
async def _served(regions: int, replicas: int) -> Any:
    """Such a fleet in its own process: its port and process id."""
    command = (sys.executable, "-m", "farhop_lab.bench.console", str(regions), str(replicas))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line.strip().isdigit():
            raise BenchError("the console's port did not open")
        yield int(line), process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def _watched(pid: int, port: int, viewers: int, seconds: float) -> tuple[float, list[float]]:
    """The share of a core that the server uses, and bytes of a snapshot (one a second) to each viewer, without the
    first: by whole snapshots, since a second of this machine may see two of them or none.
    """
    sizes, pictures = [0] * viewers, [0] * viewers

    async def view(i: int, http: aiohttp.ClientSession) -> None:
        async with http.get(f"http://127.0.0.1:{port}/console/of/events") as answer:
            begun = 0  # bytes of an incomplete snapshot
            async for chunk in answer.content.iter_any():
                ended = chunk.rfind(b"\n\n") + 2
                if ended > 1:
                    sizes[i] += begun + ended
                    pictures[i] += chunk.count(b"\n\n")
                    begun = 0
                begun += len(chunk) - (ended if ended > 1 else 0)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:
        watching = [asyncio.create_task(view(i, http)) for i in range(viewers)]
        try:
            await asyncio.sleep(2.0)
            if any(one.done() for one in watching):
                raise BenchError("a viewer was not let in")
            before, sent, seen, began = _cpu_s(pid), list(sizes), list(pictures), time.monotonic()
            await asyncio.sleep(seconds)
            while any(now == was for now, was in zip(pictures, seen, strict=True)):
                if time.monotonic() - began > seconds + SILENT_S:
                    raise BenchError("a viewer is sent nothing any more")
                await asyncio.sleep(0.05)
            cpu = (_cpu_s(pid) - before) / (time.monotonic() - began)
            return cpu, [(sizes[i] - sent[i]) / (pictures[i] - seen[i]) for i in range(viewers)]
        finally:
            for one in watching:
                one.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


# -- a browser

# What counts is CPU time of the main thread by Chromium's own trace, so that other load does not. A frame ends where
# its layers are made.
_COUNTED = frozenset(
    {"FunctionCall", "EvaluateScript", "EventDispatch", "FireAnimationFrame", "TimerFire", "UpdateLayoutTree", "Layout"}
)
_TRACED = "devtools.timeline"
_DRAWN = """const view = document.querySelector('.view:not([hidden])');
  return [view.id, view.innerText.length, document.querySelectorAll('.flow').length]"""


def has_browser() -> bool:
    """Whether frames can be measured here."""
    return find_spec("selenium") is not None and shutil.which("chromedriver") is not None


async def frames(seconds: float) -> list[Row]:
    """Of each of the page's views, at 60 regions with 180 arcs: script, style and layout, in ms per frame."""
    rows: list[Row] = []
    async with _served(*MANY) as (port, _):
        for view in VIEWS:
            url = f"http://127.0.0.1:{port}/console#{view}"
            found = sorted(await asyncio.to_thread(_frames, url, seconds))
            if len(found) < seconds:
                few = f"the browser drew {len(found)} frames in {seconds:g} s"
                raise BenchError(f"{few}: too little is left of this machine")
            name = view.split("/")[0]
            rows += [
                Row(f"a frame of {name}, median of {len(found)}", "ms", statistics.median(found), FRAME_MS_MAX),
                Row(f"a frame of {name}, 99th percentile", "ms", found[int(len(found) * 0.99)], FRAME_MS_MAX),
                Row(f"a frame of {name}, the longest", "ms", found[-1], FRAME_MS_MAX),
            ]
    return rows


def _frames(url: str, seconds: float) -> list[float]:
    """Milliseconds of each frame, in their order."""
    with _browser() as driver:
        driver.get(url)
        time.sleep(SETTLE_S + seconds)
        view, drawn, arcs = driver.execute_script(_DRAWN)
        if view != url.split("#")[1].split("/")[0] or not drawn or (view == "world" and arcs < MANY[0] * OTHERS):
            raise BenchError(f"{url}: the page shows {view} with {drawn} characters and {arcs} arcs")
        messages = [msgspec.json.decode(one["message"])["message"] for one in driver.get_log("performance")]
    return of_trace([one["params"] for one in messages if one["method"] == "Tracing.dataCollected"], SETTLE_S)


def of_trace(events: Sequence[Mapping[str, Any]], settle_s: float) -> list[float]:
    """CPU ms of script, style and layout per frame in a Chromium trace, without its first seconds."""
    whole = sorted((one for one in events if one.get("ph") == "X"), key=lambda one: (one["ts"], -one["dur"]))
    animated = [one for one in whole if one["name"] == "FireAnimationFrame"]
    if not animated:
        raise BenchError("the browser's trace has no frame")
    thread = (animated[-1]["pid"], animated[-1]["tid"])
    from_us, inside_us = animated[0]["ts"] + settle_s * 1e6, 0.0
    found, frame_us = [], 0.0
    for one in whole:
        if (one["pid"], one["tid"]) != thread or one["ts"] < from_us:
            continue
        if one["name"] == "Layerize":
            found.append(frame_us / 1e3)
            frame_us = 0.0
        elif one["name"] in _COUNTED and one["ts"] >= inside_us:  # nested events count with the outer one
            inside_us = one["ts"] + one["dur"]
            frame_us += one.get("tdur", one["dur"])
    return found


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for one in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,860"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    traced = {"enableNetwork": False, "enablePage": False, "traceCategories": _TRACED}
    options.add_experimental_option("perfLoggingPrefs", traced)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
