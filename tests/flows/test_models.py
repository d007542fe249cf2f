"""`/v1/models` over three regions with different models: what a tenant may use somewhere, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from inprocess import HOP_KEY, Answer, Engine, global_config, head, regional_config, send, tenant, topology, until

from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer

MODELS = {"virginia": ["llama", "whisper"], "frankfurt": ["llama", "mistral"], "tokyo": ["llama", "rinna"]}
LISTED = {
    "anywhere": ["llama", "mistral", "rinna", "whisper"],
    "eu-only": ["llama", "mistral"],
    "no-rinna-in-japan": ["llama", "mistral", "whisper"],
}


@pytest.fixture
async def entries(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, int]]:
    """The ports at which clients enter: a global balancer's, and each region's own."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    world = topology(tenant("no-rinna-in-japan", models={"rinna": {"deny": ["jp"]}}))
    cluster, ports = MemoryCluster(), {}
    async with AsyncExitStack() as stack:
        serving = Engine()
        serving.models = [
            {"id": "llama", "root": "/weights/llama", "parent": None, "max_model_len": 4096},
            {"id": "mistral"}, {"id": "rinna"}, {"id": "whisper", "root": "/loras/w", "parent": "llama"},
        ]  # fmt: skip
        engine = await stack.enter_async_context(serving.running())
        for seed, (region, models) in enumerate(MODELS.items()):
            replica = {"url": f"http://{engine.address}", "models": models, "name": "one"}
            made = RegionalBalancer(
                regional_config(engine, region, instance=f"r-{region}", replicas=[replica]), world, Random(seed),
                MemoryStore(Random(seed + 10), cluster),
            )  # fmt: skip
            stack.push_async_callback(made.close)
            ports[region] = _entry(await made.open())
        above = GlobalBalancer(global_config(), world, Random(7), MemoryStore(Random(17), cluster))
        stack.push_async_callback(above.close)
        ports["global"] = _entry(await above.open())
        await until(lambda: len(above.flow.regions.view.regions) == len(MODELS))
        yield ports


def _entry(line: str) -> int:
    return int(line.split("clients on 127.0.0.1:")[1].split(",")[0])


async def _models(port: int, name: str, **more: Any) -> list[str]:
    answer = await send(port, head("GET", "/v1/models", authorization=f"Bearer sk-farhop-{name}", **more))
    assert answer.status == 200
    return [model["id"] for model in answer.json["data"]]


async def test_model_list_is_the_union_of_lawful_regions(entries: dict[str, int]) -> None:
    assert {name: await _models(entries["global"], name) for name in LISTED} == LISTED
    assert await _models(entries["global"], "anywhere", x_farhop_allow="jp,us") == ["llama", "rinna", "whisper"]
    assert await _models(entries["global"], "eu-only", x_farhop_allow="jp") == []
    # A region's own entry offers the models that it serves itself.
    assert await _models(entries["virginia"], "anywhere") == MODELS["virginia"]
    assert await _models(entries["frankfurt"], "eu-only") == MODELS["frankfurt"]
    assert await _models(entries["tokyo"], "eu-only") == []
    assert await _models(entries["tokyo"], "no-rinna-in-japan") == ["llama"]


async def test_model_facts_of_engines_reach_the_client(entries: dict[str, int]) -> None:
    asked = head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere")
    for entry in ("virginia", "global"):
        text: dict[str, Any] = {}

        async def known(port: int = entries[entry], text: dict[str, Any] = text) -> bool:
            text |= {model["id"]: model for model in (await send(port, asked)).json["data"]}
            return "max_model_len" in text["llama"] and "parent" in text["whisper"]  # each as its region reports it

        async with asyncio.timeout(20):
            while not await known():
                await asyncio.sleep(0.05)
        assert (text["llama"]["max_model_len"], text["llama"]["root"]) == (4096, "/weights/llama")
        assert text["llama"]["owned_by"] == "farhop"
        assert "parent" not in text["llama"]
        assert text["whisper"]["parent"] == "llama"


async def test_a_single_model_is_shown_to_the_tenants_that_see_it_listed(entries: dict[str, int]) -> None:
    async def one(entry: str, name: str, model: str) -> Answer:
        return await send(entries[entry], head("GET", f"/v1/models/{model}", authorization=f"Bearer sk-farhop-{name}"))

    for name, listed in LISTED.items():
        for model in {model for models in LISTED.values() for model in models}:
            answer = await one("global", name, model)
            assert answer.status == (200 if model in listed else 404)
            assert (answer.json["id"] if model in listed else answer.code) in (model, "model_not_found")
    assert (await one("tokyo", "eu-only", "llama")).code == "model_not_found"
    assert (await one("global", "anywhere", "none%2Fsuch")).json["error"]["message"].startswith("the model `none/such`")
    assert (await send(entries["global"], head("GET", "/v1/models/llama"))).status == 401


async def test_head_of_the_model_list_has_the_headers_of_get_and_no_body(entries: dict[str, int]) -> None:
    """On one connection, so that a body which should not be there would be read as the next answer."""
    key = "Bearer sk-farhop-no-rinna-in-japan"
    for entry in ("virginia", "global"):
        reader, writer = await asyncio.open_connection("127.0.0.1", entries[entry])
        heads = []
        for method in ("HEAD", "GET", "HEAD"):
            writer.write(f"{method} /v1/models HTTP/1.1\r\nhost: farhop\r\nauthorization: {key}\r\n\r\n".encode())
            lines = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            heads.append(lines)
            if method == "GET":
                size = int(lines.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert (await reader.readexactly(size)).startswith(b'{"object":"list"')
        assert heads[0].startswith(b"HTTP/1.1 200 ")
        assert heads[0] == heads[1] == heads[2]
        writer.close()
        await writer.wait_closed()
