"""A pilot-light region, live: asleep it gets nothing, a lost neighbour wakes it, and the law holds all the while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from farhop_lab.world.world import WorldSettings
from tests.conftest import RunningWorld
from tests.drills.test_drills import COMMAND_EVERY_S, Drilled, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = "llama-3.1-8b"


@pytest.fixture(scope="module")
def piloted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorld]:
    """Virginia and Frankfurt serve; Tokyo is their pilot light, with one of its two replicas."""
    settings = WorldSettings(
        global_config={"pilot_light": {"tokyo": {"sleep_after_s": 2.0}}},
        regional_config={"scaling": {"replicas_min": 2, "replicas_max": 2}},
    )
    made = RunningWorld(settings, tmp_path_factory.mktemp("pilot") / "world")
    try:
        made.call(made.world.start())
        yield made
    finally:
        made.close()


async def page_of(piloted: RunningWorld, at: str, path: str, **question: Any) -> Any:
    """What a global balancer's admin port says."""
    url = f"{piloted.world.regions[at].global_admin}{path}"
    async with aiohttp.ClientSession() as session:
        asked = session.post(url, json=question) if question else session.get(url)
        async with asked as page:
            return await page.json()


async def seen(piloted: RunningWorld, at: str) -> dict[str, Any]:
    regions = (await page_of(piloted, at, "/status"))["regions"]
    return next(region for region in regions if region["region"] == "tokyo")


async def becomes(piloted: RunningWorld, at: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(30.0):
        while not true(found := await seen(piloted, at)):
            await asyncio.sleep(0.05)
    return found


def state(of: str) -> Callable[[dict[str, Any]], bool]:
    return lambda region: region["pilot_light"]["state"] == of


@pytest.mark.long
def test_a_pilot_light_wakes_for_a_lost_neighbour(piloted: RunningWorld) -> None:
    world = piloted.world
    tokyo, virginia = world.regions["tokyo"], world.regions["virginia"]

    def went(tenant: str, n: int, entry: str = "frankfurt") -> set[str]:
        answers = [piloted.ask(entry, tenant, f"{tenant} {n} {i}", max_tokens=2) for i in range(n)]
        assert all(one.ok for one in answers), answers
        return {one.headers["x-farhop-region"] for one in answers}

    async def lose() -> None:
        assert virginia.regional is not None
        await asyncio.gather(*(child.kill() for child in (virginia.regional, *virginia.engines)))

    # Asleep: even requests that come in there go elsewhere, and one replica of two is left on.
    piloted.call(tokyo.engines[1].kill())
    asleep = piloted.call(becomes(piloted, "tokyo", state("asleep")))
    assert (asleep["state"], asleep["admitted_share"]) == ("up", 0.0)
    assert "tokyo" not in went("anywhere", 4, "tokyo")
    assert went("japan-only", 2, "tokyo") == {"tokyo"}  # requests that no other region may serve
    body = {"model": MODEL, "messages": [{"role": "user", "content": "where?"}]}
    explained = piloted.call(page_of(piloted, "tokyo", "/explain", tenant="anywhere", body=body))
    assert explained["reasons"]["not_serving"]["tokyo"] == "pilot-light: asleep"
    assert explained["pilot_lights"]["tokyo"]["state"] == "asleep"

    # A neighbour is lost: it wakes, and admits requests in proportion to the replicas that are there.
    piloted.call(lose())
    waking = piloted.call(becomes(piloted, "frankfurt", state("waking")))
    assert waking["pilot_light"]["why"] == f"virginia cannot be used for {MODEL}"
    wanted = piloted.call(page_of(piloted, "frankfurt", f"/scaling/tokyo?model={MODEL}"))
    assert wanted == {"value": 2}
    external = "/apis/external.metrics.k8s.io/v1beta1/namespaces/any/farhop_desired_replicas?labelSelector=region=tokyo"
    assert [item["value"] for item in piloted.call(page_of(piloted, "frankfurt", external))["items"]] == ["2"]
    piloted.call(becomes(piloted, "tokyo", lambda region: 0.0 < region["admitted_share"] <= 0.5))
    assert piloted.call(seen(piloted, "frankfurt"))["pilot_light"]["state"] == "waking"  # half of them are there

    # Its replica comes, as an autoscaler would bring it: it is awake, and serves the requests that come in there.
    piloted.call(world.start_engine("tokyo", 1))
    piloted.call(becomes(piloted, "tokyo", lambda region: state("awake")(region) and region["admitted_share"] == 1.0))
    assert went("anywhere", 4, "tokyo") == {"tokyo"}
    assert went("eu-only", 4) == {"frankfurt"}  # any region that is awake

    # The neighbour is back: it stays awake for the configured time, then it sleeps and gets nothing more.
    piloted.call(world.start_engines("virginia"))
    piloted.call(world.start_regional("virginia"))
    piloted.call(becomes(piloted, "tokyo", state("asleep")))
    assert "tokyo" not in went("anywhere", 4, "tokyo")


@pytest.mark.long
def test_shipped_drill_wakes_a_pilot_light_and_reports_the_duration(piloted: RunningWorld, tmp_path: Path) -> None:
    drilled = Drilled(piloted, tmp_path)
    try:
        piloted.call(becomes(piloted, "frankfurt", state("asleep")))
        until(lambda: drilled.farhop("check", "wake-a-pilot-light").exit_code == 0, COMMAND_EVERY_S)
        # It is over when the measurement is complete: whether everything came back is not checked.
        code, outcome = drilled.run(drilled.thin("wake-a-pilot-light", after_s=2), "--set", "soak_s=6")
        measures = outcome["measures"]
        assert isinstance(measures, dict)
        assert "pilot light" in drilled.farhop("check", "wake-a-pilot-light").stdout
        assert 0.0 < measures["pilot_light_s"] < 6.0
        assert (code, measures["residency_violations"]) in ((0, 0.0), (1, 0.0))  # how soon depends on this machine
    finally:
        piloted.call(drilled.control.close())
