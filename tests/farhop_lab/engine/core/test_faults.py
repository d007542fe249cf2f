"""Engines broken on command, as they look from outside, and mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

import pytest

from farhop_lab.engine.core.faults import OOM_TEXT, Fault, Faults, read
from farhop_lab.engine.core.profiles import PROFILES

Start = Callable[..., Awaitable[Any]]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello over there"}], "max_tokens": 4, "ignore_eos": True}


async def breaks(client: Any, **fault: Any) -> None:
    async with client.post("/lab/fault", **fault) as response:
        assert response.status == 200


async def mends(client: Any) -> None:
    async with client.session.delete(client.url + "/lab/fault") as response:
        assert response.status == 200


async def health(client: Any) -> int:
    async with client.session.get(client.url + "/health") as response:
        return int(response.status)


async def test_fast_errors_behind_a_green_health(replica: Start) -> None:
    client = await replica()
    await breaks(client, kind="fast-500")
    async with client.post(CHAT, **HELLO) as response:
        assert response.status == 500
        assert (await response.json())["error"]["type"] == "InternalServerError"
    assert await health(client) == 200
    await mends(client)
    assert (await client.ask(CHAT, **HELLO))["usage"]["completion_tokens"] == 4


async def test_out_of_memory_breaks_off_what_is_under_way_and_refuses_the_rest(replica: Start) -> None:
    client = await replica(speedup=1)
    async with client.post(CHAT, **HELLO | {"max_tokens": 500}, stream=True) as stream:
        await stream.content.readuntil(b"\n\n")
        whole = asyncio.create_task(client.post(CHAT, **HELLO | {"max_tokens": 500}).__aenter__())
        while (await client.metrics())["vllm:num_requests_running"] + (await client.metrics())[
            "vllm:num_requests_waiting"
        ] < 2:
            await asyncio.sleep(0.01)
        await breaks(client, kind="oom")
        rest = (await stream.read()).decode()
    assert OOM_TEXT in rest
    assert rest.endswith("data: [DONE]\n\n")
    async with await whole as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == OOM_TEXT
    async with client.post(CHAT, **HELLO) as response:
        assert response.status == 500
    assert await health(client) == 200
    assert (await client.metrics())["vllm:num_requests_running"] == 0


@pytest.mark.parametrize(("kind", "status"), [("stuck", 503), ("dead-green", 200)])
async def test_stuck_engine_produces_nothing_until_repaired(replica: Start, kind: str, status: int) -> None:
    client = await replica()
    await breaks(client, kind=kind)
    asked = asyncio.create_task(client.ask(CHAT, **HELLO))
    while not (await client.metrics())["vllm:num_requests_waiting"]:
        await asyncio.sleep(0.01)
    assert await health(client) == status
    assert not asked.done()
    await mends(client)
    assert (await asked)["usage"]["completion_tokens"] == 4


async def test_a_slow_one_takes_so_many_times_as_long(replica: Start) -> None:
    """By the time that it cannot take less than: what a busy machine adds does not matter then."""
    client, factor, tokens = await replica(), 80, 40
    await breaks(client, kind="slow", factor=factor)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await client.ask(CHAT, **HELLO | {"max_tokens": tokens})
    assert (
        loop.time() - began > 0.9 * factor * (tokens - 1) * PROFILES["l4"].decode_floor_ms / 1e5
    )  # a hundred times as fast


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"kind": "tired"}', "kind"),
        (b'{"kind": "slow", "factor": 0}', "factor"),
        (b'{"kind": "slow", "for_s": -1}', "for_s"),
        (b'{"kind": "xid", "xid": -1}', "xid"),
        (b'{"kind": "oom", "more": 1}', "more"),
        (b"{", "kinds are"),
    ],
)
def test_a_command_that_is_none_names_the_field(body: bytes, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        read(body)


async def test_a_bad_command_is_reported(replica: Start) -> None:
    client = await replica()
    async with client.post("/lab/fault", kind="tired") as response:
        assert response.status == 400
        assert "dead-green" in (await response.json())["error"]["message"]


def test_a_fault_ends_by_itself_and_the_next_replaces_it() -> None:
    now = [0.0]
    faults = Faults(lambda: now[0])
    assert (faults.kind, faults.stretch(), faults.refusal, faults.healthy, faults.xid) == ("", 1.0, "", True, 0)
    faults.command(Fault("slow", factor=3.0, for_s=5.0))
    now[0] = 4.9
    assert faults.stretch() == 3.0
    now[0] = 5.0
    assert faults.stretch() == 1.0
    faults.command(Fault("stuck"))
    assert faults.stretch() == inf
    faults.command(Fault("xid", xid=48))
    assert (faults.stretch(), faults.xid) == (1.0, 48)
    faults.command(None)
    assert faults.now is None
