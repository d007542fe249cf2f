"""What is gathered after a request: waits are bounded, a late record and a late span are waited for."""

import asyncio

import msgspec
import pytest

from farhop_cli import admin, evidence, fleet, running
from farhop_lab.world.client import Result

TRACE = "ab" * 16


@pytest.fixture
def here(world):
    return running.open_world(world.path)


def result_of(world, decision: str, entry: str = "virginia", served: str | None = "virginia", **more) -> Result:
    headers = {"x-farhop-decision": decision} | ({"x-farhop-region": served} if served else {})
    fields = {"status": 200, "text": "t", "usage": None, "error": None, "ttft_ms": 1.0, "total_ms": 2.0, **more}
    return Result(headers=headers, entry=world.file.regions[entry].entry, redirected=False, **fields)


async def gathered(here, result, tenant="anywhere"):
    who = running.caller(here, tenant, None, ())
    async with admin.AdminClient() as http:
        return await evidence.gather(http, here, who, result, TRACE, {})


async def test_a_record_written_a_moment_later_is_waited_for(world, here, made):
    async def later() -> None:
        while not world.asked:
            await asyncio.sleep(0.01)
        world.records["virginia", "global_admin"] = made.record(None)

    world.records["virginia", "regional_admin"] = made.record(None)
    found, _ = await asyncio.gather(gathered(here, result_of(world, made.decision)), later())
    assert found.global_.record is not None
    assert found.regional.record is not None


async def test_a_record_that_never_comes_ends_the_wait(world, here, monkeypatch):
    monkeypatch.setattr(evidence, "RECORD_S", 0.05)
    found = await gathered(here, result_of(world, "f" * 16))
    assert found.global_.record is None
    assert found.global_.note == "it kept no record"


async def test_an_admin_that_is_gone_is_a_note(world, here, made):
    world.silent.add(("virginia", "regional_admin"))
    world.records["virginia", "global_admin"] = made.record(None)
    found = await gathered(here, result_of(world, made.decision))
    assert "cannot be reached" in found.regional.note
    assert found.global_.record is not None


async def test_spans_are_not_awaited_where_the_law_forbids_them(world, here, made):
    world.span_names = ("llm_request",)
    found = await gathered(here, result_of(world, made.decision, served="virginia"), tenant="eu-only")
    assert found.global_.barred
    assert found.regional.barred
    assert found.trace.note == ""


async def test_a_world_without_collector(world, here, made):
    world.records["virginia", "global_admin"] = world.records["virginia", "regional_admin"] = made.record(None)
    without = running.Running(msgspec.structs.replace(here.file, collector=""), here.topology, here.law)
    found = await gathered(without, result_of(world, made.decision))
    assert found.trace.note == "this world has no collector"


async def test_a_decision_is_looked_up_at_every_balancer_and_silent_ones_are_named(world, made):
    world.records["tokyo", "global_admin"] = made.record(None)
    world.records["virginia", "regional_admin"] = made.record(None)
    world.silent.add(("frankfurt", "global_admin"))
    async with admin.AdminClient() as http:
        upper, lower, silent = await evidence.everywhere(http, fleet.find(world.path), made.decision)
    assert [name for name, _ in upper] == ["tokyo"]
    assert [name for name, _ in lower] == ["virginia"]
    assert len(silent) == 1
