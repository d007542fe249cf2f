"""Log probabilities in vLLM's forms, compared with what a real one sent (tests/pages)."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parents[3] / "pages" / "vllm-0.32.0"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


async def test_each_token_of_a_chat_has_its_own_logprobs(replica: Any) -> None:
    engine = await replica()
    given = {**CHAT, "logprobs": True, "top_logprobs": 3, "max_tokens": 40}
    document = await engine.ask("/v1/chat/completions", **given)
    (choice,) = document["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == document["usage"]["completion_tokens"]
    assert "".join(one["token"] for one in content).startswith(choice["message"]["content"])
    real = json.loads(json.loads((PAGES / "chat-logprobs.json").read_text())["body"])["choices"][0]["logprobs"]
    assert choice["logprobs"].keys() == real.keys()
    for one in content:
        assert one.keys() == real["content"][0].keys()
        assert bytes(one["bytes"]).decode() == one["token"]
        top = one["top_logprobs"]
        assert {name: value for name, value in one.items() if name != "top_logprobs"} == top[0]  # greedy
        assert [other["logprob"] for other in top] == sorted((other["logprob"] for other in top), reverse=True)
        assert len({other["token"] for other in top}) == 3
        assert sum(exp(other["logprob"]) for other in top) < 1.0
    streamed = [event["choices"][0]["logprobs"] for event in await engine.events("/v1/chat/completions", **given)]
    assert streamed[0] is None  # the role's
    assert [one for each in streamed[1:] for one in each["content"]] == content


async def test_logprobs_include_the_end_token_and_are_absent_unless_requested(replica: Any) -> None:
    engine = await replica(mean_output_tokens=3.0)
    (choice,) = (await engine.ask("/v1/chat/completions", **CHAT, logprobs=True))["choices"]
    assert choice["finish_reason"] == "stop"
    *_, last = choice["logprobs"]["content"]
    assert (last["token"], last["top_logprobs"]) == ("<|end|>", [])
    (plain,) = (await engine.ask("/v1/chat/completions", **CHAT))["choices"]
    assert plain["logprobs"] is None


async def test_a_completions_form(replica: Any) -> None:
    engine = await replica()
    given = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "n": 2}
    choices = (await engine.ask("/v1/completions", **given, logprobs=2))["choices"]
    assert choices[0]["text"] != choices[1]["text"]
    for choice in choices:
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"] == [0, 4, 8, 12]
        ranked = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        assert all(len(top) == 2 and top[token] == value for token, value, top in ranked)
    given["n"] = 1
    events = await engine.events("/v1/completions", **given, logprobs=2)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [at for each in streamed for at in each["text_offset"]] == [0, 4, 8, 12]
    assert [each["top_logprobs"] for each in streamed] == [[one] for one in choices[0]["logprobs"]["top_logprobs"]]
    (only,) = (await engine.ask("/v1/completions", **given, logprobs=0))["choices"]
    assert [len(top) for top in only["logprobs"]["top_logprobs"]] == [1] * 4


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "`logprobs` must be set to true"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "of 21, which is not within 0 and"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "the maximum: 20"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}, "none of a prompt that it echoes"),
    ],
)
async def test_unsupported_logprobs_options_are_refused(
    replica: Any, path: str, more: dict[str, Any], says: str
) -> None:
    engine = await replica()
    async with engine.post(path, **more) as response:
        error = (await response.json())["error"]
    assert (response.status, says in error["message"]) == (400, True), error
