"""`make demo`: boots the default world and checks, a line each, what Farhop is for; real processes, real kills.

Every line shows what was expected beside what was seen. Never claims what it did not see: the last line counts the
checks that held, and the exit code says the same.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from farhop_lab.client import Delta, Result, ask
from farhop_lab.collector import tree
from farhop_lab.world import World, WorldError, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from farhop_lab.collector import SpanRecord

ETCD_STOPPED_S = 5.0
BURST = 48


class Check(msgspec.Struct, frozen=True):
    """One line of the demo."""

    scene: str
    what: str
    expected: str
    seen: str
    held: bool


class Demo:
    """The scenes, over a running world."""

    def __init__(self, world: World, say: Callable[[str], None]) -> None:
        self._world, self._say = world, say
        self.checks: list[Check] = []
        self._names = list(world.regions)

    def _check(self, scene: str, what: str, expected: str, seen: str, held: bool) -> None:
        self.checks.append(Check(scene, what, expected, seen, held))
        mark = "ok  " if held else "FAIL"
        self._say(f"{mark} ({scene}) {what:<52} expected: {expected:<38} seen: {seen}")

    async def scenes(self) -> None:
        """All of them, in order."""
        scenes: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.at_home, self.eu_stays, self.unlawful, self.replica_killed, self.store_stopped, self.one_trace,
        ]  # fmt: skip
        for scene in scenes:
            await scene()

    # -- scenes

    async def at_home(self) -> None:
        """(a) A request is served by its own region and streams."""
        for name in self._names:
            pieces, result = await self._stream(name, "anywhere", "Where are you?")
            seen = f"{_region(result)}, {pieces} pieces"
            held = result.ok and _region(result) == name and pieces > 3
            self._check("a", f"asked in {name}, served there, streaming", f"{name}, more than 3 pieces", seen, held)

    async def eu_stays(self) -> None:
        """(b) The EU tenant is served in Frankfurt wherever it asks; without Frankfurt it is refused, and stays put."""
        for name in self._names:
            result = await self._ask(name, "eu-only", "Bleib in Europa.")
            self._check("b", f"eu-only asks in {name}", "frankfurt", _region(result), _region(result) == "frankfurt")
        for engine in self._world.regions["frankfurt"].engines:
            await engine.kill()
        others = [name for name in self._names if name != "frankfurt"]
        before = await self._prompt_tokens(others)
        result = await self._ask("tokyo", "eu-only", "Und jetzt?")
        after = await self._prompt_tokens(others)
        code = result.error.code if result.error is not None else "none"
        seen = f"{result.status} {code}"
        self._check("b", "eu-only, frankfurt's engines killed", "503 no_region_serving", seen,
                    seen == "503 no_region_serving")  # fmt: skip
        moved = f"{after - before:.0f} tokens"
        self._check("b", "its prompt reached an engine elsewhere", "0 tokens", moved, after == before)
        await asyncio.gather(*(self._world.start_engine("frankfurt", i) for i in range(self._world.settings.replicas)))
        await self._world.wait_until_serving(frozenset(self._names))
        result = await self._ask("tokyo", "eu-only", "Wieder da?")
        self._check("b", "eu-only, frankfurt back", "frankfurt", _region(result), _region(result) == "frankfurt")

    async def unlawful(self) -> None:
        """(c) A request that no region may serve is 451, with the clause."""
        result = await self._ask("virginia", "eu-only", "To Japan!", headers={"x-farhop-allow": "jp"})
        code = result.error.code if result.error is not None else "none"
        seen = f"{result.status} {code}"
        self._check("c", "eu-only asks to be served within jp", "451 no_lawful_region", seen,
                    seen == "451 no_lawful_region")  # fmt: skip

    async def replica_killed(self) -> None:
        """(d) A replica killed with SIGKILL under load: nothing not yet started fails."""
        filler = "All work and no play makes a GPU a dull board. " * 160
        begun: list[None] = []
        asks = [
            asyncio.create_task(self._stream("virginia", "anywhere", f"{i}: {filler}", max_tokens=160, begun=begun))
            for i in range(BURST)
        ]
        while len(begun) < BURST // 4:
            await asyncio.sleep(0.005)
        await self._world.regions["virginia"].engines[0].kill()
        results = await asyncio.gather(*asks)
        whole = sum(result.ok for _, result in results)
        lost = [result for pieces, result in results if not result.ok and pieces == 0]
        broken = [result for pieces, result in results if not result.ok and pieces > 0]
        unclean = [r for r in broken if r.error is None or r.error.code != "upstream_died_mid_stream"]
        seen = f"{len(lost)} lost of {BURST} ({whole} whole, {len(broken)} had started)"
        self._check("d", "a replica killed under a burst: requests not started", "0 lost", seen, not lost)
        self._check("d", "streams it had started end with a clean error event", "0 unclean", f"{len(unclean)} unclean",
                    not unclean)  # fmt: skip
        await self._world.start_engine("virginia", 0)

    async def store_stopped(self) -> None:
        """(e) etcd stopped for 5 s: service goes on."""
        etcd = self._world.etcd
        if etcd is None:
            self._say("     (e) left out: this etcd is not ours to stop")
            return
        await etcd.kill()
        end = time.monotonic() + ETCD_STOPPED_S
        served = failed = 0
        while time.monotonic() < end:
            results = await asyncio.gather(*(self._ask(name, "anywhere", "Still there?") for name in self._names))
            served += sum(result.ok for result in results)
            failed += sum(not result.ok for result in results)
            await asyncio.sleep(0.1)
        await etcd.start()
        seen = f"{failed} failed, {served} served"
        self._check("e", f"etcd stopped for {ETCD_STOPPED_S:g} s", "0 failed", seen, failed == 0 and served > 0)

    async def one_trace(self) -> None:
        """(f) One trace over both tiers and the engine."""
        trace_id = f"{random.SystemRandom().getrandbits(128):032x}"
        headers = {"traceparent": f"00-{trace_id}-{1:016x}-01"}
        await self._ask("tokyo", "anywhere", "Follow me.", headers=headers)
        spans = await self._world.collector.wait_for(trace_id, spans=7, timeout_s=5.0)
        services = sorted({span.service for span in spans})
        for line in tree(spans):
            self._say(f"       {line}")
        want = ["engine", "farhop-global", "farhop-regional"]
        self._check("f", "one trace, from both tiers and the engine", " ".join(want), " ".join(services),
                    services == want)  # fmt: skip
        path = _ancestry(spans, "llm_request")
        expected = ["farhop.global", "farhop.relay", "farhop.regional", "farhop.relay", "llm_request"]
        self._check("f", "its parents, from the edge to the engine", f"{len(expected)} in order", " > ".join(path),
                    path == expected)  # fmt: skip

    # -- how

    async def _ask(self, region: str, tenant: str, text: str, **options: Any) -> Result:
        return (await self._stream(region, tenant, text, **options))[1]

    async def _stream(
        self,
        region: str,
        tenant: str,
        text: str,
        *,
        max_tokens: int = 24,
        headers: dict[str, str] | None = None,
        begun: list[None] | None = None,
    ) -> tuple[int, Result]:
        """Pieces received, and the end. `begun` is told of the first piece."""
        body = {
            "model": self._world.settings.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "stream": True,
        }
        entries = [run.entry for run in self._world.regions.values()]
        entry = self._world.regions[region].entry
        pieces = 0
        result: Result | None = None
        async for event in ask([entry], f"sk-farhop-{tenant}", body, headers=headers, trusted=entries):
            if isinstance(event, Delta):
                pieces += 1
                if pieces == 1 and begun is not None:
                    begun.append(None)
            elif isinstance(event, Result):
                result = event
        assert result is not None  # the client's promise
        return pieces, result

    async def _prompt_tokens(self, regions: list[str]) -> float:
        """Prompt tokens that the engines of these regions have ever taken."""
        total = 0.0
        async with aiohttp.ClientSession() as session:
            for name in regions:
                for url in self._world.regions[name].engine_urls:
                    async with session.get(f"{url}/metrics") as page:
                        for line in (await page.text()).splitlines():
                            if line.startswith("vllm:prompt_tokens_total"):
                                total += float(line.split()[-1])
        return total


def _region(result: Result) -> str:
    return result.headers.get("x-farhop-region", f"none ({result.status})")


def _ancestry(spans: list[SpanRecord], name: str) -> list[str]:
    """Names from the root down to the span so named."""
    by_id = {span.span_id: span for span in spans}
    at = next((span for span in spans if span.name == name), None)
    path: list[str] = []
    while at is not None and len(path) < len(spans):
        path.append(at.name)
        at = by_id.get(at.parent_id)
    return path[::-1]


async def run(say: Callable[[str], None] = print) -> bool:
    """Boot, play every scene, stop; True if every check held."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="farhop-demo-") as folder:
        try:
            async with World(WorldSettings(), Path(folder)) as world:
                regions = ", ".join(world.regions)
                engines = f"{world.settings.replicas} {world.settings.profile} engines each"
                say(
                    f"world: {regions}; {engines}, {world.settings.speedup:g} x; up in {time.monotonic() - began:.1f} s"
                )
                demo = Demo(world, say)
                await demo.scenes()
        except WorldError as error:
            say(f"demo: the world did not come up: {error}")
            return False
    passed = sum(check.held for check in demo.checks)
    say(f"demo: took {time.monotonic() - began:.0f} s")
    say(f"demo: passed {passed} of {len(demo.checks)}")
    return passed == len(demo.checks)
