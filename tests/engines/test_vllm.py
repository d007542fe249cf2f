"""Two real vLLMs behind both tiers: nothing is changed on the way, and what is predicted is what they do."""

from __future__ import annotations

import json
import random
import re
import struct
from datetime import datetime
from typing import Any

import pytest
from inprocess import Both, chat, head, until
from real import BLOCK, MODEL, RealEngine, send, settled, status, tiers

from farhop.relay.formats.paths import Kind
from farhop.service.tokenization.tokenizer import Files, ModelTokenizer

pytestmark = pytest.mark.engines

TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
        "type": "object", "properties": {"where": {"type": "string"}, "at": {"type": "integer"}}}}},
]  # fmt: skip
ODD_TOOLS = [
    {"cache_control": {"type": "ephemeral"}, "type": "function",
     "function": {"strict": True, "x": 1, "parameters": {"properties": {}, "type": "object"}, "name": "odd"}},
    {"function": {"name": "bare"}, "type": "function"},
]  # fmt: skip
CALL = {"index": 0, "type": "function", "function": {"name": "look", "arguments": '{"where": "x", "at": 1.0}'}}
PARTS = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("one", "", "two")]
SCHEMA = {
    "$defs": {"n": {"type": "integer", "x-odd": [1, 2.50, 1e3, None]}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
LINE = "x-anthropic-billing-header: cc_version=1; cch=9f;"


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("hello there")]},
    "system": {"messages": [message("system", "Be."), user("hello")]},
    "tools": {"messages": [user("a")], "tools": TOOLS},
    "tools in another order": {"messages": [user("a")], "tools": ODD_TOOLS},
    "tools not to be used": {"messages": [user("a")], "tools": TOOLS, "tool_choice": "none"},
    "developer": {"messages": [message("developer", "Be."), user("a")]},
    "developer and system": {"messages": [message("system", "s"), message("developer", "d"), user("a")]},
    "developer late, in parts": {"messages": [user("q"), message("developer", PARTS), user("a")]},
    "calls": {
        "messages": [
            user("q"),
            message("assistant", None, tool_calls=[{**CALL, "id": "c1"}, {**CALL, "id": "c2"}]),
            message("tool", PARTS, tool_call_id="c1"),
            user("and"),
        ],
        "tools": ODD_TOOLS,
    },
    "no calls": {"messages": [user("q"), message("assistant", "x", tool_calls=[]), user("and")]},
    "parts": {"messages": [message("system", PARTS), user(PARTS)]},
    "a name and more": {"messages": [user("a", name="bob", extra=1)]},
    "reasoning": {"messages": [user("a"), message("assistant", "b", reasoning_content="hm", refusal=None), user("c")]},
    "arguments of the template": {
        "messages": [user("a")],
        "chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt": False, "foo": 1},
    },
    "no effort": {"messages": [user("a")], "reasoning_effort": "none"},
    "some effort": {"messages": [user("a")], "reasoning_effort": "low"},
    "no opening": {"messages": [user("a")], "add_generation_prompt": False},
    "goes on": {
        "messages": [user("a"), message("assistant", "It is ")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "special tokens": {"messages": [user("a")], "add_special_tokens": True},
    "attribution": {"messages": [message("system", f"{LINE}\nYou are"), user("a")]},
    "attribution in parts": {"messages": [message("system", [{"type": "text", "text": LINE}, *PARTS]), user("a")]},
    "many letters": {"messages": [user("Zürich 東京 🎉\n\t  x")]},
    "nothing said": {"messages": [user("q"), message("assistant", None), user("a")]},
    "another role": {"messages": [message("critic", "c"), user("a")]},
    "documents": {"messages": [user("a")], "documents": [{"title": "t", "text": "x"}]},
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/chat/completions", {"messages": [user("a")], "stream": True}),
    "stream with usage": (
        "/v1/chat/completions",
        {"messages": [user("a")], "stream": True, "stream_options": {"include_usage": True}},
    ),
    "continuous usage": (
        "/v1/chat/completions",
        {
            "messages": [user("a")],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "continuous usage alone": (
        "/v1/chat/completions",
        {"messages": [user("a")], "stream": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    "logprobs": ("/v1/chat/completions", {"messages": [user("a")], "logprobs": True, "top_logprobs": 2}),
    "several": ("/v1/chat/completions", {"messages": [user("a")], "n": 2}),
    "prompt logprobs": ("/v1/chat/completions", {"messages": [user("a")], "prompt_logprobs": 1}),
    "echo in a chat": ("/v1/chat/completions", {"messages": [user("a")], "echo": True}),
    "json": ("/v1/chat/completions", {"messages": [user("a")], "response_format": {"type": "json_object"}}),
    "json of a schema": (
        "/v1/chat/completions",
        {
            "messages": [user("a")],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "max_tokens": 20,
        },
    ),
    "one of": ("/v1/chat/completions", {"messages": [user("a")], "structured_outputs": {"choice": ["yes", "no"]}}),
    "stop": ("/v1/chat/completions", {"messages": [user("a")], "stop": ["a", "e", " "]}),
    "stop, told": ("/v1/chat/completions", {"messages": [user("a")], "stop": "e", "include_stop_str_in_output": True}),
    "no limit": ("/v1/chat/completions", {"messages": [user("a")], "stop": ["a", "e", "o"], "max_tokens": None}),
    "several, stream": ("/v1/chat/completions", {"messages": [user("a")], "n": 2, "stream": True}),
    "bias": ("/v1/chat/completions", {"messages": [user("a")], "logit_bias": {"11": 5, "12": -100}}),
    "a tool by name": (
        "/v1/chat/completions",
        {
            "messages": [user("a")],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_tokens": 20,
        },
    ),
    "a tool, stream": (
        "/v1/chat/completions",
        {
            "messages": [user("a")],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": "required",
            "max_tokens": 30,
            "stream": True,
        },
    ),
    "a batch of chats": ("/v1/chat/completions/batch", {"messages": [[user("a")], [user("b")]]}),
    "an image": ("/v1/chat/completions", {"messages": [user([{"type": "image_url", "image_url": {"url": IMAGE}}])]}),
    "messages": ("/v1/messages", {"system": [{"type": "text", "text": "Be."}], "messages": [user("a")]}),
    "messages, stream": ("/v1/messages", {"messages": [user("a")], "stream": True}),
    "messages and tools": (
        "/v1/messages",
        {
            "messages": [user("a")],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "max_tokens": 30,
        },
    ),
    "messages' tokens": ("/v1/messages/count_tokens", {"messages": [user("a")], "system": "Be."}),
    "completions of ids": ("/v1/completions", {"prompt": [[11, 12], [13]]}),
    "only echo": ("/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1}),
    "tokenize, as texts": ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    "completion": ("/v1/completions", {"prompt": "hello"}),
    "completion of ids": ("/v1/completions", {"prompt": [11, 12, 13]}),
    "several completions": ("/v1/completions", {"prompt": ["a", "b"]}),
    "completion, stream": ("/v1/completions", {"prompt": "hello", "stream": True}),
    "echo": ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1}),
    "tokenize": ("/tokenize", {"prompt": "hello"}),
    "tokenize a chat": ("/tokenize", {"messages": [user("a")]}),
    "detokenize": ("/detokenize", {"tokens": [11, 12, 13]}),
    "wrong: temperature": ("/v1/chat/completions", {"messages": [user("a")], "temperature": -1.0}),
    "wrong: too long": ("/v1/completions", {"prompt": [11] * 5000}),
    "wrong: no tools": ("/v1/chat/completions", {"messages": [user("a")], "tools": []}),
}
# The fields that differ between two answers to the same request: its id and its time.
_OWN = re.compile(rb'"(?:id|request_id|created)": ?(?:"[^"]*"|\d+)|chatcmpl-[\w-]+|cmpl-[\w-]+|call_\w+')


def shape(name: str) -> tuple[str, dict[str, Any]]:
    path, more = MORE[name] if name in MORE else ("/v1/chat/completions", CHATS[name])
    body = {"model": "tiny", **more}
    if path.endswith(("tokenize", "count_tokens")):
        return path, body
    of_openai = {} if path == "/v1/messages" else {"seed": 1}
    return path, {"max_tokens": 4, "temperature": 0.0, **of_openai, **body}


def told_apart(body: bytes) -> tuple[bytes, ...]:
    """What an answer says, whatever is its own: its id, when it was made, and at which tokens its stream was cut."""
    body = _OWN.sub(b"", body)
    if not body.startswith((b"data: ", b"event: ")):
        return (body,)
    texts = b"".join(re.findall(rb'"(?:content|text|arguments)":"((?:[^"\\]|\\.)*)"', body))
    rest = sorted({_PIECE.sub(b"", event) for event in body.split(b"\n\n")})
    return (texts, *rest)


_PIECE = re.compile(
    rb'"(?:content|text|arguments)":"(?:[^"\\]|\\.)*"|"(?:total|completion|prompt|input|output)_tokens":\d+'
)


@pytest.mark.parametrize("name", [*CHATS, *MORE])
async def test_an_answer_is_the_same_by_way_of_both_tiers(vllms: list[RealEngine], name: str) -> None:
    path, body = shape(name)
    port = int(vllms[0].url.rpartition(":")[2])
    # Once before: an answer reports its cached tokens, and so the second and third are equal.
    await send(port, chat(key=None, body=body, path=path, content_type="application/json"))
    direct = await send(port, chat(key=None, body=body, path=path, content_type="application/json"))
    async with tiers(vllms[0]) as both:
        through = await send(both.entry, chat(body=body, path=path, content_type="application/json"))
    assert through.status == direct.status
    assert told_apart(through.body) == told_apart(direct.body)


_NAMED = re.compile(r'"(?:id|item_id|created_at|cached_tokens)":("[^"]*"|[\d.]+)')


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"store": None}], ids=["whole", "stream", "null"])
async def test_a_response_is_the_same_though_nothing_is_stored(vllms: list[RealEngine], more: dict[str, Any]) -> None:
    body = {"model": "tiny", "input": "hello there", "max_output_tokens": 6, "temperature": 0.0, **more}
    port = int(vllms[0].url.rpartition(":")[2])
    direct = await send(
        port, chat(key=None, body={**body, "store": False}, path="/v1/responses", content_type="application/json")
    )
    async with tiers(vllms[0]) as both:
        through = await send(both.entry, chat(body=body, path="/v1/responses", content_type="application/json"))
    assert through.status == direct.status == 200
    message = [
        _NAMED.sub("", answer.body.decode()) if not more.get("stream") else _events(answer.body)
        for answer in (direct, through)
    ]
    assert message[0] == message[1]


def _events(stream: bytes) -> list[tuple[str, str]]:
    """Of a stream of Responses: its events by name, and the whole text (it is cut where the engine likes)."""
    names = re.findall(r"^event: (.*)$", stream.decode(), re.M)
    text = "".join(re.findall(r'"delta":"((?:[^"\\]|\\.)*)"', stream.decode()))
    return [(name, "") for name in dict.fromkeys(names)] + [("text", text)]


@pytest.mark.parametrize("name", [*CHATS])
def test_a_prompt_is_rendered_to_the_token(vllms: list[RealEngine], name: str) -> None:
    body = {"model": "tiny", "max_tokens": 1, "return_token_ids": True, **CHATS[name]}
    made = ModelTokenizer("tiny", Files(str(MODEL / "tokenizer.json")), datetime.now)
    ids = made.read(Kind.CHAT, json.dumps(body).encode()).ids
    theirs = vllms[0].ask("/v1/chat/completions", body)["prompt_token_ids"]
    assert list(struct.unpack(f"<{len(ids) // 4}I", ids)) == theirs


async def _turns(both: Both, seed: int, n_turns: int, **more: Any) -> list[tuple[float, int]]:
    """A conversation; of each turn, how much was predicted to be cached, and how much was."""
    rng, messages, seen = random.Random(seed), [], []
    if more.pop("developer", False):
        messages.append(message("developer", " ".join(rng.choices(WORDS, k=120))))
    for turn in range(n_turns):
        messages.append(user(" ".join(rng.choices(WORDS, k=90))))
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0.0, "messages": messages, **more}
        if "tools" in more and turn % 2:  # a client whose maps have no order
            body["tools"] = [dict(reversed(tool.items())) for tool in more["tools"]]
        flow = both.regional.flow
        before = flow.learning.predicted_tokens, flow.learning.actual_tokens
        answer = await send(both.entry, chat(body=body, content_type="application/json"))
        assert answer.status == 200, answer.body
        await settled(both)
        seen.append((flow.learning.predicted_tokens - before[0], int(flow.learning.actual_tokens - before[1])))
        messages.append({**answer.json["choices"][0]["message"]})
        messages[-1] = message("assistant", messages[-1]["content"] or "")
    return seen


WORDS = ["river", "law", "region", "cache", "token", "prompt", "Zürich", "ocean", "ledger", "42", "{}", "why?"]


@pytest.mark.parametrize(
    "more",
    [{}, {"tools": TOOLS + ODD_TOOLS}, {"developer": True}, {"model": "adapted"}],
    ids=["plain", "tools", "developer", "lora"],
)
async def test_cached_tokens_are_predicted_exactly(vllms: list[RealEngine], more: dict[str, Any]) -> None:
    async with tiers(*vllms) as both:
        seen: list[tuple[float, int]] = []
        for seed in range(3):
            seen += await _turns(both, hash((seed, str(more))) & 0xFFFF, 4, **more)
        right = sum(predicted == cached for predicted, cached in seen)
        assert (right, len(seen)) == (12, 12), seen
        assert sum(cached for _, cached in seen) >= 9 * BLOCK
        guard = both.regional.flow.replicas.mirror.guard
        assert (guard.miscounts, guard.mispredictions) == (0, 0)


async def test_its_load_is_read(vllms: list[RealEngine]) -> None:
    async with tiers(*vllms) as both:
        await until(lambda: all(r["sample_age_s"] is not None for r in status(both)))
        for replica in status(both):
            assert replica["engine_running"] == replica["engine_waiting"] == 0
            assert replica["kv_tokens_total"] > 10_000
            assert replica["kv_events"] in ("exact", "partial")
        sample = both.regional.flow.replicas.view.replicas["e0"].sample
        assert sample is not None
        assert sample.started_at is not None


async def test_the_model_list_of_vllm_is_passed_on(vllms: list[RealEngine]) -> None:
    async with tiers(*vllms) as both:
        answer = await send(both.entry, head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"))
        assert answer.status == 200
        assert "tiny" in [model["id"] for model in answer.json["data"]]
