"""Replicas come and go under load, over real sockets: no request is lost, and other balancers learn of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import MODEL, Answer, Both, Engine, both, chat, send, streaming, topology, until

WORLD = topology()


class Listing:
    """The file that says who there is."""

    def __init__(self, path: Path, engines: dict[str, Engine]) -> None:
        self.path, self._engines = path, engines

    def say(self, *names: str, **more: Any) -> None:
        replicas = [
            {"url": f"http://{self._engines[name].address}", "name": name, "models": [MODEL], **more} for name in names
        ]
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(replicas))
        fresh.rename(self.path)


@contextlib.asynccontextmanager
async def discovering(tmp_path: Path) -> AsyncIterator[tuple[Both, Listing, dict[str, Engine]]]:
    """A region whose replicas, at first only `one`, stand in a file; `two` is up as well."""
    engines = {"one": Engine(), "two": Engine()}
    async with engines["one"].running(), engines["two"].running():
        listing = Listing(tmp_path / "replicas.json", engines)
        listing.say("one")
        regional = {
            "replicas": [], "discovery": [{"kind": "file", "path": str(listing.path), "poll_s": 0.01}],
            "limits": {"drain_s": 0.5, "request_s": 20.0}, "policy": "round-robin",  # it accepts any client
        }  # fmt: skip
        async with both(engines["one"], WORLD, regional=regional) as region:
            yield region, listing, engines


def states(region: Both) -> dict[str, str]:
    return {replica["replica"]: replica["state"] for replica in region.regional.tier_admin.status()["replicas"]}


async def stand(region: Both, **wanted: str) -> None:
    await until(lambda: states(region) == wanted)


def whole(answer: Answer) -> bool:
    return answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")


async def test_replicas_are_added_and_removed_under_load_without_a_failed_request(tmp_path: Path) -> None:
    async with discovering(tmp_path) as (region, listing, engines):
        answers: list[Answer] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                answers.append(await send(region.entry, chat(body=streaming())))

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(load())
            for _ in range(3):
                listing.say("one", "two")
                await stand(region, one="up", two="up")
                listing.say("two")
                await stand(region, two="up")
                count = len(answers)
                await until(lambda count=count: len(answers) > count + 12)
                listing.say("two", "one")
                await stand(region, one="up", two="up")
                listing.say("one")
                await stand(region, one="up")
                await until(lambda count=count: len(answers) > count + 24)
            stop.set()
        assert len(answers) > 60
        assert [answer for answer in answers if not whole(answer)] == []
        assert all(engine.seen for engine in engines.values())


@pytest.mark.parametrize("how", ["removed", "draining"])
async def test_requests_in_flight_at_a_removed_replica_finish_there(tmp_path: Path, how: str) -> None:
    async with discovering(tmp_path) as (region, listing, engines):
        engines["one"].behaviour = "pause"
        under_way = asyncio.create_task(send(region.entry, chat(body=streaming())))
        await until(lambda: engines["one"].seen)
        listing.say("one", "two")
        await stand(region, one="up", two="up")
        if how == "removed":
            listing.say("two")
        else:
            listing.path.write_text(json.dumps([
                {"url": f"http://{engines['one'].address}", "name": "one", "models": [MODEL], "draining": True},
                {"url": f"http://{engines['two'].address}", "name": "two", "models": [MODEL]},
            ]))  # fmt: skip
        await stand(region, one="draining", two="up")
        for _ in range(8):
            assert whole(await send(region.entry, chat(body=streaming())))
        assert (len(engines["one"].seen), len(engines["two"].seen)) == (1, 8)
        assert states(region)["one"] == "draining"  # it still works on a request
        engines["one"].release.set()
        assert whole(await under_way)
        if how == "removed":
            await stand(region, two="up")


async def test_region_keeps_reporting_while_models_are_added_and_removed(tmp_path: Path) -> None:
    async with discovering(tmp_path) as (region, listing, _):

        def models() -> dict[str, int]:
            (instance,) = (
                instance for r in region.global_.tier_admin.status()["regions"] for instance in r["instances"]
            )
            return {name: model["replicas_ready"] for name, model in instance["models"].items()}

        listing.say("one", "two", models=[MODEL, "new"])
        await until(lambda: models() == {MODEL: 2, "new": 2})
        listing.say("two", models=["new"])
        await until(lambda: models() == {"new": 1})
        answer = await send(region.entry, chat())
        assert answer.status in (404, 503)
        listing.say()
        await until(lambda: models() == {})
        assert region.regional.tier_admin.status()["discovery"][0]["replicas"] == 0
        listing.say("one")
        await until(lambda: models() == {MODEL: 1})
        assert (await send(region.entry, chat())).status == 200


async def test_replica_list_that_becomes_invalid_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    async with discovering(tmp_path) as (region, listing, _):
        whole = listing.path.with_suffix(".new")
        whole.write_text("- {url: nowhere}")
        whole.replace(listing.path)  # at once: reading half of it would find another error
        await until(lambda: region.regional.tier_admin.status()["discovery"][0]["trouble"])
        (found,) = region.regional.tier_admin.status()["discovery"]
        assert "[0].url: must look like" in found["trouble"]
        assert "[0].models" not in found["trouble"]  # the engine is asked if the configuration does not say
        assert (await send(region.entry, chat())).status == 200
