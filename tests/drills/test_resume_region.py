"""A region dies by SIGKILL under its streams: they continue from another lawful one, and equal unbroken ones."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from failover import settled

from farhop.store.documents.overrides import DrainOverride, encode
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.client import Delta, Result, answer, ask
from farhop_lab.world.world import World, WorldSettings
from tests.conftest import RunningWorld

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REGIONS = frozenset(("virginia", "frankfurt", "tokyo"))
FROM, SPARED = "virginia", "tokyo"
STREAMS, TOKENS = 5, 400


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorld]:
    """One world for all of them, in which what comes back has all of its traffic back at once, and who may go anywhere
    goes to the nearest region, however slow a busy machine has made it."""
    at_once: dict[str, Any] = {
        "global_config": {
            "spill": {"ramp_per_s": 1e3},
            "routes": [{"tenant": "anywhere", "policy": "nearest"}],
        },
        "regional_config": {"health": {"slow_start_s": 0}},
    }
    settings = WorldSettings(replicas=1, speedup=2.0, **at_once)
    made = RunningWorld(settings, tmp_path_factory.mktemp("resume") / "world")
    try:
        made.call(made.world.start())
        yield made
    finally:
        made.close()


@pytest.fixture
def world(shared: RunningWorld) -> Iterator[RunningWorld]:
    """It, whole and at rest; what a test has killed starts again."""
    shared.call(whole_again(shared.world))
    return shared


async def whole_again(world: World) -> None:
    for name, run in world.regions.items():
        assert run.regional is not None
        if run.regional.ended is not None:
            await world.start_regional(name)
        for index, engine in enumerate(run.engines):
            if engine.ended is not None:
                await world.start_engine(name, index)
    await world.wait_until_serving(REGIONS)
    async with asyncio.timeout(60.0):
        while not await settled(world):
            await asyncio.sleep(0.2)


def body_of(world: RunningWorld, number: int, tokens: int) -> dict[str, Any]:
    """The question of this number, of which any engine makes the same answer."""
    return {
        "model": world.world.settings.model,
        "messages": [{"role": "user", "content": f"{number}: tell me of the sea"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
    }


async def stream(
    world: RunningWorld, number: int, value: list[int], tenant: str, entry: str, tokens: int = TOKENS
) -> Result:
    """One answer to its end; `value` counts its pieces of text."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async for event in ask([world.entry(entry)], f"sk-farhop-{tenant}", body_of(world, number, tokens) | streamed):
        if isinstance(event, Delta):
            value[number] += 1
        elif isinstance(event, Result):
            result = event
    return result


async def whole(world: RunningWorld, tokens: int = TOKENS) -> list[Result]:
    """What the streams are to say: an engine that nobody breaks is asked directly, and not for streams."""
    engine = world.world.regions[SPARED].engine_urls[0]
    return list(await asyncio.gather(*(answer([engine], None, body_of(world, n, tokens)) for n in range(STREAMS))))


async def broken(
    world: RunningWorld, tenant: str, entry: str, *, engines: bool = False, again: bool = False
) -> tuple[list[Result], set[str]]:
    """How streams end under which the regional balancers that serve them are killed, and the regions where. `again`:
    they are started again."""
    seen = [0] * STREAMS
    tasks = [asyncio.create_task(stream(world, n, seen, tenant, entry)) for n in range(STREAMS)]
    async with asyncio.timeout(30.0):
        while min(seen) < 5:
            await asyncio.sleep(0.01)
    assert max(seen) < TOKENS - 20, seen
    run = world.world.regions[entry]
    assert run.regional is not None
    await asyncio.gather(*(child.kill() for child in (run.regional, *(run.engines if engines else ()))))
    if again:
        await world.world.start_regional(entry)
    results = await asyncio.gather(*tasks)
    return list(results), {result.headers["x-farhop-region"] for result in results}


def usage_of(result: Result) -> tuple[int, int]:
    assert result.usage is not None
    return result.usage.prompt_tokens, result.usage.completion_tokens


@pytest.mark.parametrize("engines", [False, True], ids=["its balancer", "all of it"])
def test_streams_go_on_from_another_region(world: RunningWorld, engines: bool) -> None:
    async def drill() -> tuple[list[Result], tuple[list[Result], set[str]]]:
        return await asyncio.gather(whole(world), broken(world, "anywhere", FROM, engines=engines))

    expected, (results, served) = world.call(drill())
    assert FROM in served  # so some broke, and continued
    for result, alike in zip(results, expected, strict=True):
        assert (alike.error, result.error) == (None, None), (alike, result)
        assert result.text == alike.text
        assert usage_of(result) == usage_of(alike)


@pytest.mark.long
def test_a_tenant_of_that_region_alone_goes_on_there_once_its_balancer_is_back(world: RunningWorld) -> None:
    """No other lawful region is there: its streams wait, and nothing of them goes elsewhere."""

    async def drill() -> tuple[list[Result], tuple[list[Result], set[str]]]:
        return await asyncio.gather(whole(world), broken(world, "eu-only", "frankfurt", again=True))

    expected, (results, served) = world.call(drill())
    assert served == {"frankfurt"}
    for result, alike in zip(results, expected, strict=True):
        assert (alike.error, result.error) == (None, None), (alike, result)
        assert result.text == alike.text
        assert usage_of(result) == usage_of(alike)


WORDS = (
    8_000  # of a prompt: 11,700 tokens, which its engine prefills in five seconds, as long as a region is waited for
)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[RunningWorld]:
    """A world whose engines take eight times as long."""
    made = RunningWorld(WorldSettings(replicas=1, speedup=0.25), tmp_path / "world")
    try:
        made.call(made.world.start())
        made.call(made.world.wait_until_serving(REGIONS))
        yield made
    finally:
        made.close()


async def prompt_tokens(world: World) -> dict[str, float]:
    """What the engines of each region were asked to prefill so far."""
    found = {}
    async with aiohttp.ClientSession() as session:
        for region, run in world.regions.items():
            async with session.get(f"{run.engine_urls[0]}/metrics") as response:
                text = await response.text()
            found[region] = sum(map(float, re.findall(r"^vllm:prompt_tokens_total\S* (\S+)$", text, re.MULTILINE)))
    return found


@pytest.mark.long
def test_a_stream_with_a_long_prompt_goes_on_where_it_is_cached_once_the_balancer_is_back(slow: RunningWorld) -> None:
    """SIGKILL to the balancer alone, and a new one at once: it refuses until it has found its engines."""
    world = slow.world

    async def drill() -> tuple[Result, dict[str, float]]:
        text = " ".join(f"w{n}" for n in range(WORDS))
        body = body_of(slow, 0, 100) | {"messages": [{"role": "user", "content": text}], "stream": True}
        pieces, again = 0, None
        async for event in ask([slow.entry(FROM)], "sk-farhop-anywhere", body):
            if isinstance(event, Delta):
                pieces += 1
                if pieces == 10:
                    regional = world.regions[FROM].regional
                    assert regional is not None
                    await regional.kill()
                    again = asyncio.create_task(world.start_regional(FROM))
            elif isinstance(event, Result):
                result = event
        assert again is not None
        await again
        return result, await prompt_tokens(world)

    result, prefilled = slow.call(drill())
    assert result.error is None
    assert result.headers["x-farhop-region"] == FROM
    assert prefilled[FROM] > 20_000  # twice its prompt: where it broke it went on
    assert {prefilled[region] for region in REGIONS - {FROM}} == {0.0}


LONG, PACE_S = 900, 2.0  # tokens, 6 ms each: such a stream takes far longer than the drain's pace


async def drained(world: RunningWorld) -> tuple[list[Result], float, int]:
    """Streams under which their region is drained of streams: how they end, when the last has left (s), how many had
    not ended by then."""
    seen = [0] * STREAMS
    tasks = [asyncio.create_task(stream(world, n, seen, "anywhere", FROM, LONG)) for n in range(STREAMS)]
    async with asyncio.timeout(30.0):
        while min(seen) < 5:
            await asyncio.sleep(0.01)
    made, etcd = world.world, world.world.etcd
    assert etcd is not None
    store = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
    await store.open()
    drain = DrainOverride(
        region=FROM, over_s=PACE_S, move_streams=True, why="a rollout", author="test", at=datetime.now(UTC), for_s=60.0
    )
    try:
        began = time.monotonic()
        await store.put(drain.key, encode(drain))
        async with asyncio.timeout(PACE_S + 15.0), aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{made.regions[FROM].regional_admin}/metrics") as page:
                    found = re.search(r"^farhop_in_flight\S* ([0-9.]+)$", await page.text(), re.M)
                if found is not None and not float(found[1]):
                    break
                await asyncio.sleep(0.05)
        took_s, left = time.monotonic() - began, sum(not task.done() for task in tasks)
        return list(await asyncio.gather(*tasks)), took_s, left
    finally:
        await store.delete(drain.key)
        await store.close()


@pytest.mark.long
def test_streams_leave_a_drained_region_within_seconds_and_say_what_whole_ones_say(world: RunningWorld) -> None:
    async def drill() -> tuple[list[Result], tuple[list[Result], float, int]]:
        return await asyncio.gather(whole(world, LONG), drained(world))

    expected, (results, took_s, left) = world.call(drill())
    print(f"\nthe last of {STREAMS} streams left after {took_s:.1f} s, {left} had not ended by then")
    assert left == STREAMS
    for result, alike in zip(results, expected, strict=True):
        assert (alike.error, result.error) == (None, None), (alike, result)
        assert result.text == alike.text
        assert usage_of(result) == usage_of(alike)
