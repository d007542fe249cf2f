"""Requests too long for some engines, through both tiers in one process: they go to who can hold them, by what engines
say of themselves, and by their refusals where that was not enough."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from inprocess import (
    HOP_KEY,
    MODEL,
    Answer,
    Engine,
    chat,
    global_config,
    regional_config,
    send,
    tenant,
    topology,
    until,
)

from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer

HELD = {"virginia": (1000, 2000), "frankfurt": (8000,)}


def refusing(held_tokens: int) -> Engine:
    """An engine that counts a prompt's tokens otherwise than by its bytes: as many as it says."""
    made = Engine()
    made.models = [{"id": MODEL, "max_model_len": held_tokens}]

    def counted(body: dict[str, Any]) -> int:
        return int(body["messages"][0]["content"].split()[0])

    def refusal(body: dict[str, Any]) -> str:
        tokens = counted(body)
        said = f"This model's maximum context length is {held_tokens} tokens. However, you requested {tokens} tokens."
        return said if tokens > held_tokens else ""

    made.refuses, made.counts = refusal, counted
    return made


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, dict[int, Engine]]]:
    """The entry's port, and the engines by what they hold."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    world = topology(tenant("at-home", residency={"processing": {"allow": ["us"]}}))
    cluster, engines = MemoryCluster(), dict[int, Engine]()
    async with AsyncExitStack() as stack:
        for seed, (region, helds) in enumerate(HELD.items()):
            for held in helds:
                engines[held] = await stack.enter_async_context(refusing(held).running())
            replicas = [
                {"url": f"http://{engines[held].address}", "models": [MODEL], "name": f"h{held}"} for held in helds
            ]
            below = RegionalBalancer(
                regional_config(engines[helds[0]], region, instance=f"r-{region}", replicas=replicas), world,
                Random(seed), MemoryStore(Random(seed + 10), cluster),
            )  # fmt: skip
            stack.push_async_callback(below.close)
            await below.open()
        above = GlobalBalancer(global_config(), world, Random(7), MemoryStore(Random(17), cluster))
        stack.push_async_callback(above.close)
        entry = int((await above.open()).split("clients on 127.0.0.1:")[1].split(",")[0])

        def known() -> bool:
            regions = above.flow.regions
            return {name: regions.context_tokens(name, MODEL) for name in HELD} == {"virginia": 2000, "frankfurt": 8000}

        await until(known)
        yield entry, engines


async def ask(entry: int, tokens: int, text_bytes: int, key: str = "anywhere", **more: Any) -> Answer:
    """A prompt of so many bytes that its engine counts as so many tokens."""
    content = f"{tokens} ".ljust(text_bytes, "x")
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
    return await send(entry, chat(f"sk-farhop-{key}", body))


def asked(engines: dict[int, Engine]) -> list[int]:
    """How many requests each has seen since."""
    counts = [len(engines[held].seen) for held in sorted(engines)]
    for engine in engines.values():
        engine.seen.clear()
    return counts


async def test_long_request_is_sent_by_its_size_to_an_engine_that_can_hold_it(fleet) -> None:
    entry, engines = fleet
    assert (await ask(entry, 100, 400)).status == 200
    assert sum(asked(engines)) == 1
    assert (await ask(entry, 1500, 6000)).status == 200
    assert asked(engines)[0] == 0
    for _ in range(3):
        assert (await ask(entry, 5000, 20_000)).status == 200
    assert asked(engines) == [0, 0, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_long_request_is_sent_to_an_engine_that_can_hold_it(fleet, stream: bool) -> None:
    """It has more tokens than its bytes tell: an image, or a language that the estimate is not of."""
    entry, engines = fleet
    for _ in range(4):
        answer = await ask(entry, 5000, 400, stream=stream)
        assert answer.status == 200
        assert b"maximum context length" not in answer.body
    served = asked(engines)
    assert served[2] == 4


async def test_a_tenant_without_a_lawful_larger_engine_gets_the_engine_s_own_error(fleet) -> None:
    entry, engines = fleet
    answer = await ask(entry, 5000, 400, key="at-home")
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("This model's maximum context length is 2000 tokens.")
    assert asked(engines)[2] == 0
    nobody = await ask(entry, 9000, 40_000)
    assert nobody.status == 400
    assert nobody.json["error"]["message"].startswith("This model's maximum context length is 8000 tokens.")
