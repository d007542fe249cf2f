"""A replica on a real socket, against what a client of vLLM relies on."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from farhop_lab.engine.server import BODY_BYTES_MAX, shape_errors

Start = Callable[..., Awaitable[Any]]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MODEL = "llama-3.1-8b"
HELLO = [{"role": "user", "content": "hello over there"}]


def _text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition, for five seconds at most."""
    deadline = time.monotonic() + 60
    while not await true():
        assert time.monotonic() < deadline, "never came true"
        await asyncio.sleep(0.01)


async def test_a_streamed_chat(replica: Start) -> None:
    client = await replica()
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "ignore_eos": True}
    events = await client.events(CHAT, **fields, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(events) == 1 + 20 + 1  # the role, a chunk per token, the usage
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 20
    whole = await client.ask(CHAT, **fields)
    assert whole["choices"][0]["message"]["content"] == _text_of(events)
    assert len({event["id"] for event in events} | {whole["id"]}) == 2
    assert whole["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_several_answers_to_one_prompt(replica: Start, path: str) -> None:
    """They differ, the prompt counts once, and a stream ends with the last of them."""
    client = await replica()
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "hello over there"}
    whole = await client.ask(path, **asked, max_tokens=12, n=3, ignore_eos=True)
    texts = [c["message"]["content"] if path == CHAT else c["text"] for c in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 36
    alone = await client.ask(path, **asked, max_tokens=12, ignore_eos=True)
    assert whole["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    events = await client.events(
        path, **asked, max_tokens=12, n=3, ignore_eos=True, stream_options={"include_usage": True}
    )
    found = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
    assert found == texts
    assert [event["usage"]["completion_tokens"] for event in events if event.get("usage")] == [36]
    assert events[-1]["choices"] == []


async def test_completions_streamed_or_not_say_the_same(replica: Start) -> None:
    client = await replica()
    whole = await client.ask(COMPLETION, prompt="the sea", max_tokens=9, ignore_eos=True)
    events = await client.events(COMPLETION, prompt="the sea", max_tokens=9, ignore_eos=True)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert whole["usage"]["total_tokens"] == 2 + 9
    assert all("usage" not in event or event["usage"] is None for event in events)


async def test_a_partial_answer_is_continued_to_the_same_end_elsewhere(replica: Start) -> None:
    first, second = await replica(mean_output_tokens=30), await replica(mean_output_tokens=30)
    whole = await first.ask(CHAT, messages=HELLO)
    text = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert text
    for cut in (0, 4, len(text) // 2, len(text) - 1, len(text)):
        messages = [*HELLO, {"role": "assistant", "content": text[:cut]}]
        events = await second.events(CHAT, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert text[:cut] + _text_of(events) == text
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_is_reported_with_each_token_if_requested(replica: Start) -> None:
    client = await replica()
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events(CHAT, messages=HELLO, max_tokens=3, ignore_eos=True, stream_options=options)
    found = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    assert found == [1, 2, 3, 3]


async def test_a_stop_string_ends_it(replica: Start) -> None:
    client = await replica()
    text = (await client.ask(CHAT, messages=HELLO, max_tokens=30, ignore_eos=True))["choices"][0]["message"]["content"]
    stop = text[34:40]
    events = await client.events(CHAT, messages=HELLO, max_tokens=30, ignore_eos=True, stop=[stop])
    assert _text_of(events) == text[: text.index(stop)]
    assert (events[-1]["choices"][0]["finish_reason"], events[-1]["choices"][0]["stop_reason"]) == ("stop", stop)


async def test_the_second_time_comes_from_the_cache(replica: Start) -> None:
    client = await replica()
    for cached in (0, 992):
        answer = await client.ask(COMPLETION, prompt="x" * 4_000, max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    salted = await client.ask(COMPLETION, prompt="x" * 4_000, max_tokens=1, cache_salt="other")
    assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    metrics = await client.metrics()
    assert (metrics["vllm:prefix_cache_queries_total"], metrics["vllm:prefix_cache_hits_total"]) == (3_000, 992)
    assert metrics["vllm:request_success_total:length"] == 3
    assert metrics["vllm:time_to_first_token_seconds_count"] == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_sequence(replica: Start, stream: bool) -> None:
    client = await replica(speedup=5)
    asking = asyncio.ensure_future(client.ask(CHAT, messages=HELLO, max_tokens=9_000, ignore_eos=True, stream=stream))

    async def running() -> bool:
        return (await client.metrics())["vllm:num_requests_running"] == 1

    async def gone() -> bool:
        metrics = await client.metrics()
        return metrics["vllm:num_requests_running"] == 0 and metrics["vllm:request_success_total:abort"] == 1

    await _until(running)
    assert (await client.metrics())["vllm:kv_cache_usage_perc"] > 0
    asking.cancel()
    await asyncio.wait([asking])
    await _until(gone)
    assert (await client.metrics())["vllm:kv_cache_usage_perc"] == 0


async def test_the_head_of_a_stream_comes_before_its_first_token(replica: Start) -> None:
    client = await replica(speedup=1)
    began = time.monotonic()
    async with client.post(COMPLETION, prompt="x" * 4_000, max_tokens=1, stream=True) as response:
        assert response.content.total_bytes == 0
        await response.read()
    # 1,000 tokens of 0.59 ms: a GPU may be late on a busy host, but never early.
    assert time.monotonic() - began >= 0.59


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        (CHAT, {"model": "gpt-9", "messages": HELLO}, 404, "The model `gpt-9` does not exist."),
        (CHAT, {"messages": HELLO, "max_tokens": 16_384}, 400, "maximum context length is 16384 tokens"),
        (CHAT, {"messages": HELLO, "n": 0}, 400, "n must be"),
        (COMPLETION, {"prompt": ""}, 400, "prompt"),
        (COMPLETION, {"prompt": "x", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens"),
        ("/v1/responses/r1", {}, 404, "/v1/responses"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
async def test_errors_have_one_shape(
    replica: Start, path: str, fields: dict[str, Any], status: int, words: str
) -> None:
    client = await replica()
    async with client.post(path, **fields) as response:
        document = await response.json()
    assert response.status == status
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["code"] == status
    assert words in document["error"]["message"]


@pytest.mark.parametrize(("body", "status"), [(b"{nonsense", 400), (b" " * (BODY_BYTES_MAX + 1), 413)])
async def test_bodies_that_are_no_json_or_too_large(replica: Start, body: bytes, status: int) -> None:
    client = await replica()
    async with client.session.post(client.url + CHAT, data=io.BytesIO(body)) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == status


async def test_client_lost_during_its_answer_causes_no_server_error() -> None:
    async def lost(_: web.Request) -> web.StreamResponse:
        raise ConnectionResetError

    assert (await shape_errors(make_mocked_request("GET", "/"), lost)).status == 499


async def test_a_stream_over_http_1_0_is_refused(replica: Start) -> None:
    client = await replica()
    host, port = client.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await asyncio.wait_for(reader.read(), 60.0)
    writer.close()
    await writer.wait_closed()
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"HTTP/1.1" in answer.split(b"\r\n\r\n")[1]


async def test_the_emulated_engine_serves_health_version_and_models(replica: Start) -> None:
    client = await replica(kv_blocks=64)
    async with client.session.get(client.url + "/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.session.get(client.url + "/version") as response:
        assert "version" in await response.json()
    async with client.session.get(client.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == (MODEL, 1_024, "vllm")


async def test_concurrent_clients_each_get_their_own_answer(replica: Start) -> None:
    client = await replica(kv_blocks=40)  # little enough to wait and to preempt
    prompts = [f"{n} " + "y" * 300 for n in range(30)]

    async def ask(prompt: str) -> str:
        events = await client.events(COMPLETION, prompt=prompt, max_tokens=40, ignore_eos=True)
        return "".join(event["choices"][0]["text"] for event in events)

    together = await asyncio.gather(*map(ask, prompts))
    metrics = await client.metrics()
    assert metrics["vllm:num_preemptions_total"] > 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert together[:3] == [await ask(prompt) for prompt in prompts[:3]]
    assert len(set(together)) == len(prompts)
