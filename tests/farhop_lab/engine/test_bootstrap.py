"""Two engines that are asked at once and meet in a room, on real sockets: handed over once, or both fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from farhop_lab.world.ports import free_ports

Start = Callable[..., Awaitable[Any]]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "the tide comes in and the tide goes out. " * 40  # 1640 B: 410 tokens, 25 full blocks


class Pair:
    """A prefill engine, a decode engine, and what both are asked."""

    def __init__(self, prefill: Any, decode: Any, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port

    def asked(self, room: int = 7, **fields: Any) -> dict[str, Any]:
        bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        return {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, **bootstrap, **fields}

    async def prefills(self, figure: str) -> None:
        """Until this figure of the first of them is not 0."""
        async with asyncio.timeout(60.0):
            while not (await self.prefill.metrics())[f"vllm:{figure}"]:
                await asyncio.sleep(0.005)

    async def at_rest(self) -> None:
        deadline = time.monotonic() + 60
        while (await self.prefill.metrics())["vllm:kv_cache_usage_perc"]:
            assert time.monotonic() < deadline, "it is held for ever"
            await asyncio.sleep(0.01)


@pytest.fixture
def pair(replica: Start) -> Callable[..., Awaitable[Pair]]:
    async def start(**settings: Any) -> Pair:
        port = free_ports(1)[0]
        prefill = await replica(disaggregation_mode="prefill", bootstrap_port=port, **settings)
        return Pair(prefill, await replica(disaggregation_mode="decode", **settings), port)

    return start


@pytest.mark.parametrize("first", ["prefill", "decode", "both"])
async def test_decode_engine_gives_the_answer_of_one_engine(
    pair: Callable[..., Awaitable[Pair]], replica: Start, first: str
) -> None:
    two, alone = await pair(), await replica()
    order = [two.prefill, two.decode] if first != "decode" else [two.decode, two.prefill]
    asking = []
    for client in order:
        asking.append(asyncio.create_task(client.ask(COMPLETION, **two.asked())))
        if first != "both" and len(asking) == 1:
            await asyncio.sleep(0.05)
            assert not asking[0].done()  # each waits for the other
    answers = dict(zip(("first", "second"), await asyncio.gather(*asking), strict=True))
    decoded, computed = answers["second"], answers["first"]
    if first == "decode":
        decoded, computed = computed, decoded
    whole = await alone.ask(COMPLETION, prompt=PROMPT, max_tokens=20, ignore_eos=True)
    assert decoded["choices"] == whole["choices"]
    assert decoded["usage"]["prompt_tokens_details"]["cached_tokens"] == 400
    assert computed["usage"]["completion_tokens"] == 1
    await two.at_rest()


async def test_prefill_and_decode_streams_meet_in_a_room(pair: Callable[..., Awaitable[Pair]]) -> None:
    two = await pair()
    first, second = await asyncio.gather(
        two.prefill.events(COMPLETION, **two.asked()), two.decode.events(COMPLETION, **two.asked())
    )
    found = [sum(bool(choice["text"]) for event in events for choice in event["choices"]) for events in (first, second)]
    assert found == [1, 20]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_without_a_bootstrap_room_is_refused(pair: Callable[..., Awaitable[Pair]], role: str) -> None:
    client = getattr(await pair(), role)
    async with client.post(COMPLETION, prompt="hi") as found:
        assert found.status == 400
        assert "without bootstrap room id" in (await found.json())["error"]["message"]
    async with client.post("/v1/embeddings", input="hi") as found:
        assert found.status == 400


async def test_several_answers_with_a_bootstrap_room_are_refused(pair: Callable[..., Awaitable[Pair]]) -> None:
    two = await pair()
    async with two.prefill.post(COMPLETION, **two.asked(n=2)) as found:
        assert (found.status, (await found.json())["error"]["param"]) == (400, "n")


async def test_a_room_has_one_prefill_at_a_time(pair: Callable[..., Awaitable[Pair]]) -> None:
    two = await pair()
    asking = asyncio.create_task(two.prefill.ask(COMPLETION, **two.asked()))
    await two.prefills("kv_cache_usage_perc")  # it holds its prompt until it is fetched
    async with two.prefill.post(COMPLETION, **two.asked()) as found:
        assert (found.status, (await found.json())["error"]["param"]) == (400, "bootstrap_room")
    await two.decode.ask(COMPLETION, **two.asked())
    await asking
    await asyncio.gather(  # and another one after it
        two.prefill.ask(COMPLETION, **two.asked()), two.decode.ask(COMPLETION, **two.asked())
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_wait_without_a_peer_fails(pair: Callable[..., Awaitable[Pair]], role: str) -> None:
    two = await pair(kv_wait_s=10.0)  # 0.1 s at this speed
    async with getattr(two, role).post(COMPLETION, **two.asked()) as found:
        assert found.status == 500
        assert "KVTransferError" in (await found.json())["error"]["message"]
    await two.at_rest()


async def test_a_prefill_that_is_given_up_fails_the_waiting_decode(pair: Callable[..., Awaitable[Pair]]) -> None:
    two = await pair(speedup=0.25)  # 410 tokens: a second; and minutes of patience
    computing = asyncio.create_task(two.prefill.ask(COMPLETION, **two.asked()))
    waiting = asyncio.create_task(two.decode.ask(COMPLETION, **two.asked()))
    await two.prefills("num_requests_running")
    computing.cancel()
    with pytest.raises(AssertionError, match="KVTransferError"):
        await asyncio.wait_for(waiting, 60.0)
    await two.at_rest()


async def test_a_decode_that_is_given_up_leaves_the_room_to_another(pair: Callable[..., Awaitable[Pair]]) -> None:
    two = await pair()
    waiting = asyncio.create_task(two.decode.ask(COMPLETION, **two.asked()))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.sleep(0.05)
    await asyncio.gather(two.prefill.ask(COMPLETION, **two.asked()), two.decode.ask(COMPLETION, **two.asked()))
    await two.at_rest()


async def test_a_closed_bootstrap_port(pair: Callable[..., Awaitable[Pair]]) -> None:
    two = await pair()
    async with two.decode.post(COMPLETION, **two.asked(bootstrap_port=1)) as found:
        assert found.status == 500
