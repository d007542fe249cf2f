"""Two engines and the channel between them, on real sockets: fetched once, in its time, and never a reason to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from farhop_lab.engine import transfer
from farhop_lab.engine.transfer import arrive

Start = Callable[..., Awaitable[Any]]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
HELD_S = 3_600.0  # at a hundred times the speed as long as a busy machine may take to fetch it
PROMPT = "the tide comes in and the tide goes out. " * 40  # 1640 B: 410 tokens, 25 full blocks


async def _prefilled(client: Any, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": PREFILL} | fields
    whole = await client.ask(COMPLETION, **asked)
    params = whole["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


async def _cached(client: Any, **fields: Any) -> int:
    whole = await client.ask(COMPLETION, prompt=PROMPT, max_tokens=4, ignore_eos=True, **fields)
    return int(whole["usage"]["prompt_tokens_details"]["cached_tokens"])


async def _held(client: Any) -> float:
    usage: float = (await client.metrics())["vllm:kv_cache_usage_perc"]
    return usage


async def _until_none_is_held(client: Any) -> None:
    deadline = time.monotonic() + 60
    while await _held(client):
        assert time.monotonic() < deadline, "it is held for ever"
        await asyncio.sleep(0.01)


async def test_a_prompt_prefilled_elsewhere_is_cached_here_and_fetched_once(replica: Start) -> None:
    prefill, decode = await replica(kv_hold_s=HELD_S), await replica()
    params = await _prefilled(prefill)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert len(params["remote_block_ids"]) == 25
    assert f"{params['remote_host']}:{params['remote_port']}" == prefill.address
    assert await _held(prefill) > 0
    assert await _cached(decode, kv_transfer_params=params) == 400
    assert await _held(prefill) == 0
    third = await replica()
    assert await _cached(third, kv_transfer_params=params) == 0  # it is gone there; the request is served anyway


async def test_transfer_gives_the_answer_of_one_engine(replica: Start) -> None:
    prefill, decode, alone = await replica(), await replica(), await replica()
    asked = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
    params = await _prefilled(prefill)
    apart = await decode.ask(COMPLETION, **asked, kv_transfer_params=params)
    assert apart["choices"] == (await alone.ask(COMPLETION, **asked))["choices"]
    assert apart["kv_transfer_params"] is None


async def test_blocks_that_are_not_fetched_are_released(replica: Start) -> None:
    prefill, decode = await replica(kv_hold_s=3.0), await replica()  # 30 ms at this speed
    params = await _prefilled(prefill)
    await _until_none_is_held(prefill)
    assert await _cached(decode, kv_transfer_params=params) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": "another life of it"},
        {"remote_request_id": "999"},
        {"remote_port": 1},
        {"remote_host": None},
        {"remote_host": "no such host"},
    ],
)
async def test_prompt_is_prefilled_locally_if_its_cache_cannot_be_fetched(
    replica: Start, wrong: dict[str, Any]
) -> None:
    prefill, decode = await replica(), await replica()
    params = await _prefilled(prefill) | wrong
    assert await _cached(decode, kv_transfer_params=params) == 0


async def test_the_transfer_takes_its_time(replica: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = (
        await replica(kv_hold_s=HELD_S),
        await replica(kv_link_gbps=0.01),
    )  # 400 tokens: 52 MB, 42 s; 0.42 s at this speed
    params = await _prefilled(prefill)
    began = time.monotonic()
    await _cached(decode, kv_transfer_params=params)
    assert time.monotonic() - began > 0.4
    travelled: list[int] = []

    async def noted(*given: Any) -> int:
        travelled.append(await arrive(*given))
        return travelled[-1]

    monkeypatch.setattr(transfer, "arrive", noted)
    await _cached(decode, kv_transfer_params=await _prefilled(prefill))
    assert travelled == [0], "it is here: nothing travels"


async def test_a_client_that_leaves_leaves_nothing_held(replica: Start) -> None:
    client = await replica(speedup=1)  # 8,200 tokens: 5 s
    asking = asyncio.create_task(_prefilled(client, prompt=PROMPT * 20))
    deadline = time.monotonic() + 60
    while not await _held(client):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    asking.cancel()
    await _until_none_is_held(client)


async def test_the_kv_of_a_stream_is_not_offered(replica: Start) -> None:
    client = await replica()
    await client.events(COMPLETION, prompt=PROMPT, max_tokens=1, kv_transfer_params=PREFILL)
    await _until_none_is_held(client)


async def test_several_answers_with_kv_transfer_are_refused(replica: Start) -> None:
    client = await replica()
    async with client.post(
        CHAT, messages=[{"role": "user", "content": "hi"}], n=2, kv_transfer_params=PREFILL
    ) as found:
        assert found.status == 400
        assert (await found.json())["error"]["param"] == "n"


async def test_channel_refuses_unknown_messages(replica: Start) -> None:
    client = await replica()
    async with client.post("/lab/kv/fetch", request_id=1) as found:
        assert found.status == 400


async def test_a_cache_that_is_full_of_what_is_held_takes_work_again_in_the_end(replica: Start) -> None:
    client = await replica(kv_blocks=30, kv_hold_s=20.0)  # 25 of them are held for 0.2 s at this speed
    began = time.monotonic()
    await _prefilled(client)
    whole = await client.ask(COMPLETION, prompt=PROMPT[::-1], max_tokens=4, ignore_eos=True)
    assert time.monotonic() - began > 0.2
    assert whole["usage"]["completion_tokens"] == 4
