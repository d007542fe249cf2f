"""A region dies by SIGKILL under its streams: they go on from another lawful one, and say what whole ones say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from farhop_lab.world.client import Delta, Result, ask
from farhop_lab.world.world import WorldSettings
from tests.conftest import RunningWorld

if TYPE_CHECKING:
    from collections.abc import Iterator

REGIONS = frozenset(("virginia", "frankfurt", "tokyo"))
FROM = "virginia"
STREAMS, TOKENS = 8, 400


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorld]:
    made = RunningWorld(WorldSettings(replicas=1, speedup=2.0), tmp_path_factory.mktemp("resume") / "world")
    try:
        made.call(made.world.start())
        made.call(made.world.wait_until_serving(REGIONS))
        yield made
    finally:
        made.close()


async def stream(world: RunningWorld, number: int, heard: list[int], tenant: str, entry: str) -> Result:
    """One answer to its end; `heard` is told each piece of text."""
    body: dict[str, Any] = {
        "model": world.world.settings.model,
        "messages": [{"role": "user", "content": f"{number}: tell me of the sea"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async for event in ask([world.entry(entry)], f"sk-farhop-{tenant}", body):
        if isinstance(event, Delta):
            heard[number] += 1
        elif isinstance(event, Result):
            result = event
    return result


async def broken(world: RunningWorld, tenant: str, entry: str, *, engines: bool) -> tuple[list[Result], set[str]]:
    """How streams end under which the regional balancers that serve them are killed, and the regions where."""
    heard = [0] * STREAMS
    tasks = [asyncio.create_task(stream(world, n, heard, tenant, entry)) for n in range(STREAMS)]
    async with asyncio.timeout(30.0):
        while min(heard) < 5:
            await asyncio.sleep(0.01)
    assert max(heard) < TOKENS - 20, heard
    run = world.world.regions[entry]
    assert run.regional is not None
    await asyncio.gather(*(child.kill() for child in (run.regional, *(run.engines if engines else ()))))
    results = await asyncio.gather(*tasks)
    return list(results), {result.headers["x-farhop-region"] for result in results}


def usage_of(result: Result) -> tuple[int, int]:
    assert result.usage is not None
    return result.usage.prompt_tokens, result.usage.completion_tokens


@pytest.mark.parametrize("engines", [False, True], ids=["its balancer", "all of it"])
def test_streams_go_on_from_another_region(world: RunningWorld, engines: bool) -> None:
    async def whole() -> list[Result]:
        heard = [0] * STREAMS
        return list(await asyncio.gather(*(stream(world, n, heard, "anywhere", FROM) for n in range(STREAMS))))

    expected = world.call(whole())
    results, served = world.call(broken(world, "anywhere", FROM, engines=engines))
    assert FROM in served  # so some broke, and went on
    for result, alike in zip(results, expected, strict=True):
        assert result.error is None, result
        assert result.text == alike.text
        assert usage_of(result) == usage_of(alike)


def test_a_tenant_of_the_dead_region_alone_gets_the_error(world: RunningWorld) -> None:
    """No lawful region is left: its streams end as they always did, and nothing of them goes elsewhere."""
    results, served = world.call(broken(world, "eu-only", "frankfurt", engines=False))
    assert served == {"frankfurt"}
    for result in results:
        assert result.error is not None
        assert result.error.code == "upstream_died_mid_stream"
