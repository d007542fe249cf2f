"""A replica's other paths on a real socket: what they answer, how long they take, what they leave behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

Start = Callable[..., Awaitable[Any]]
MODEL = "llama-3.1-8b"
MP3 = bytes(8_000 * 40)


def _form(**fields: str | bytes) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, value, filename="a.mp3" if isinstance(value, bytes) else None)
    return form


async def test_embeddings_take_the_time_of_their_prefill_and_generate_nothing(replica: Start) -> None:
    client = await replica(speedup=1)
    began = time.monotonic()
    answer = await client.ask("/v1/embeddings", model=MODEL, input=["x" * 2_000, "y" * 2_000])
    # 1,000 tokens of 0.59 ms: a GPU may be late on a busy host, but never early.
    assert time.monotonic() - began >= 0.59
    assert answer["usage"] == {
        "prompt_tokens": 1000, "total_tokens": 1000, "completion_tokens": 0, "prompt_tokens_details": None
    }  # fmt: skip
    metrics = await client.metrics()
    assert metrics["vllm:generation_tokens_total"] == 0
    assert metrics["vllm:prompt_tokens_total"] == 1000
    assert metrics["vllm:request_success_total:stop"] == 2
    assert metrics["vllm:kv_cache_usage_perc"] == 0


async def test_the_emulated_engine_serves_rerank_and_score(replica: Start) -> None:
    client = await replica()
    documents = ["the cat", "a dog"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = await client.ask(path, model=MODEL, query="a cat", documents=documents)
        assert {one["index"] for one in answer["results"]} == {0, 1}
        assert answer["usage"]["prompt_tokens"] == 3 + 3
    for path in ("/score", "/v1/score"):
        answer = await client.ask(path, model=MODEL, text_1="a cat", text_2=documents)
        assert [one["index"] for one in answer["data"]] == [0, 1]


async def test_the_emulated_engine_serves_tokenize_and_detokenize(replica: Start) -> None:
    client = await replica()
    tokens = await client.ask("/tokenize", model=MODEL, prompt="the sea and")
    assert (tokens["count"], tokens["max_model_len"]) == (3, 16_384)
    assert await client.ask("/detokenize", model=MODEL, tokens=tokens["tokens"]) == {"prompt": "the sea and"}
    # A prompt of token ids is the text they stand for.
    as_text = await client.ask("/v1/completions", prompt="the sea ", max_tokens=4)
    as_ids = await client.ask("/v1/completions", prompt=tokens["tokens"][:2], max_tokens=4)
    assert as_text["choices"][0]["text"] == as_ids["choices"][0]["text"]


async def test_the_emulated_engine_transcribes_audio(replica: Start) -> None:
    client = await replica()
    found: set[str] = set()
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        async with client.session.post(client.url + path, data=_form(model=MODEL, file=MP3)) as response:
            answer = await response.json()
        assert answer["usage"] == {"type": "duration", "seconds": 40}
        assert len(answer["text"].split()) == 100
        found.add(answer["text"])
        async with client.session.post(
            client.url + path, data=_form(model=MODEL, file=MP3, response_format="text")
        ) as response:
            assert response.content_type == "text/plain"
            found.add(await response.text())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": MODEL}, 400, "file"),
        ({"model": MODEL, "file": "text"}, 400, "file"),
        ({"model": MODEL, "file": b""}, 400, "file"),
        ({"model": "gpt-9", "file": b"x"}, 404, "model"),
        ({"model": MODEL, "file": b"x", "stream": "true"}, 400, "stream"),
        ({"model": MODEL, "file": b"x", "response_format": "srt"}, 400, "response_format"),
    ],
)
async def test_invalid_audio_requests_are_refused(
    replica: Start, fields: dict[str, Any], status: int, param: str
) -> None:
    client = await replica()
    async with client.session.post(client.url + "/v1/audio/transcriptions", data=_form(**fields)) as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == param


async def test_a_malformed_multipart_form_is_refused(replica: Start) -> None:
    client = await replica()
    headers = {"content-type": "multipart/form-data; boundary=a"}
    async with client.session.post(client.url + "/v1/audio/transcriptions", data=b"x", headers=headers) as response:
        assert response.status == 400


async def test_the_emulated_engine_serves_tritons_generate_and_infer(replica: Start) -> None:
    client = await replica()
    path = f"/v2/models/{MODEL}"
    whole = await client.ask(path + "/generate", text_input="the sea", max_tokens=9, ignored=True)
    versioned = await client.ask(path + "/versions/1/generate", text_input="the sea", max_tokens=9)
    tensors = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["the sea"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [9]},
    ]
    inferred = await client.ask(path + "/infer", inputs=tensors)
    assert whole == versioned
    assert inferred["outputs"][0]["data"] == [whole["text_output"]]
    async with client.post(path + "/generate_stream", text_input="the sea", max_tokens=9) as response:
        assert response.content_type == "text/event-stream"
        body = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert len(events) == 9
    assert whole["text_output"].startswith(" ")
    async with client.post("/v2/models/other/infer", inputs=tensors) as response:
        assert response.status == 404
        assert await response.json() == {"error": "The model `other` does not exist."}
    async with client.post(path + "/versions/2/infer", inputs=tensors) as response:
        assert response.status == 404
    async with client.session.post(
        client.url + path + "/infer", data=b"{}", headers={"Inference-Header-Content-Length": "2"}
    ) as response:
        assert response.status == 400
        assert isinstance((await response.json())["error"], str)


async def test_a_client_that_leaves_aborts_all_its_requests(replica: Start) -> None:
    client = await replica(speedup=0.2)
    asking = asyncio.ensure_future(client.ask("/v1/embeddings", input=[f"{n}" + "x" * 12_000 for n in range(4)]))

    async def until(name: str, value: float) -> None:
        deadline = time.monotonic() + 60
        while (await client.metrics())[name] != value:
            assert time.monotonic() < deadline, name
            await asyncio.sleep(0.01)

    await until("vllm:num_requests_waiting", 3)
    asking.cancel()
    await asyncio.wait([asking])
    await until("vllm:request_success_total:abort", 4)
    assert (await client.metrics())["vllm:kv_cache_usage_perc"] == 0
