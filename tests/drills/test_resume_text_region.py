"""Engines that report no token ids die by SIGKILL under streams, alone and with their region: streams continue by
text.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from farhop_lab.world.client import Result
from farhop_lab.world.world import WorldSettings
from tests.conftest import RunningWorld
from tests.drills.test_resume_region import FROM, REGIONS, STREAMS, TOKENS, stream, usage_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

BY_TEXT: dict[str, Any] = {"resume": {"mode": "text"}}
_RESUMED = re.compile(r'^farhop_resumes_total\{.*outcome="resumed".*\} ([0-9.]+)$', re.M)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorld]:
    settings = WorldSettings(
        replicas=2,
        speedup=2.0,
        engine="sglang",
        global_config={**BY_TEXT, "spill": {"ramp_per_s": 1e3}},
        regional_config={**BY_TEXT, "health": {"slow_start_s": 0}},
    )
    made = RunningWorld(settings, tmp_path_factory.mktemp("resume") / "world")
    try:
        made.call(made.world.start())
        yield made
    finally:
        made.close()


async def resumed(world: RunningWorld, admin: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{admin}/metrics") as page:
        return sum(map(float, _RESUMED.findall(await page.text())))


async def streams(world: RunningWorld, killed: str) -> list[Result]:
    """How they end, under which an engine of their region is killed, or all else of it."""
    seen = [0] * STREAMS
    tasks = [asyncio.create_task(stream(world, n, seen, "anywhere", FROM)) for n in range(STREAMS)]
    run = world.world.regions[FROM]
    assert run.regional is not None
    async with asyncio.timeout(30.0):
        while min(seen) < 5:
            await asyncio.sleep(0.01)
    assert max(seen) < TOKENS - 20, seen
    victims = {"an engine": run.engines[:1], "the rest of it": (run.regional, *run.engines[1:])}[killed]
    await asyncio.gather(*(one.kill() for one in victims))
    return list(await asyncio.gather(*tasks))


@pytest.mark.long
def test_streams_go_on_from_another_replica_and_from_another_region(world: RunningWorld) -> None:
    world.call(world.world.wait_until_serving(REGIONS))
    run = world.world.regions[FROM]
    expected = world.call(whole(world))
    for killed, admin in (("an engine", run.regional_admin), ("the rest of it", run.global_admin)):
        results = world.call(streams(world, killed))
        for result, alike in zip(results, expected, strict=True):
            assert (alike.error, result.error) == (None, None), (alike, result)
            assert result.text == alike.text
            assert usage_of(result) == usage_of(alike)
        assert world.call(resumed(world, admin)) >= 1, killed
