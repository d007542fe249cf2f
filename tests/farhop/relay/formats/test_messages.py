"""A message to Anthropic's API has the prefix chain of the equivalent chat, whatever other fields change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.prefix import chain
from farhop.relay.formats import bodies, messages, openai
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError, Prompt

LONG = "You are an assistant who reviews code. " * 40
TEXT = st.text(min_size=1, max_size=60)


def read(kind: Kind = Kind.MESSAGES, **body: Any) -> Prompt:
    document = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}
    return bodies.read(kind, json.dumps(document).encode())


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@given(TEXT, st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXT), min_size=1, max_size=5))
def test_a_messages_body_has_the_text_of_the_same_chat(system: str, turns: list[tuple[str, str]]) -> None:
    found = [{"role": role, "content": text} for role, text in turns]
    blocks = [{"role": role, "content": [block(text)]} for role, text in turns]
    chat = bodies.read(
        Kind.CHAT, json.dumps({"model": "m", "messages": [{"role": "system", "content": system}, *found]}).encode()
    )
    if not system.startswith(messages.ATTRIBUTION):
        assert read(system=system, messages=found).canonical == chat.canonical
        assert read(system=[block(system)], messages=blocks).canonical == chat.canonical


def test_marks_and_attribution_change_nothing() -> None:
    turns = [{"role": "user", "content": [block("one")]}, {"role": "assistant", "content": "two"}]
    marked = [{"role": "user", "content": [block("one", cache_control={"type": "ephemeral"})]}, turns[1]]
    plain = read(system=[block(LONG)], messages=turns)
    for at in ("1", "2"):
        found = [block(f"x-anthropic-billing-header: cc={at}"), block(LONG, cache_control={"type": "ephemeral"})]
        assert read(system=found, messages=marked).canonical == plain.canonical


def test_the_next_turn_extends_the_chain() -> None:
    turns: list[Any] = [{"role": "user", "content": "begin " * 100}]
    first = read(system=LONG, messages=turns)
    turns += [{"role": "assistant", "content": [block("done " * 100)]}, {"role": "user", "content": "go on"}]
    second = read(system=LONG, messages=turns)
    assert first.answer is not None
    assert second.canonical.startswith(first.canonical + first.answer.opening + b"done ")
    assert chain.chain(second.canonical, 1)[: len(chain.chain(first.canonical, 1))] == chain.chain(first.canonical, 1)


def test_tools_and_their_results_are_those_of_the_chat() -> None:
    schema = {"type": "object", "properties": {"url": {"type": "string"}}}
    turns = [
        {"role": "user", "content": "look at http://a.example/b.py"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"url": "http://a.example"}},
            ],
        },
        {"role": "user", "content": [block("and?"), {"type": "tool_result", "tool_use_id": "t1", "content": "it is"}]},
    ]
    document = {"model": "m", "messages": turns, "tools": [{"name": "get", "input_schema": schema}]}
    chat = messages.as_chat(document)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool", "user"]
    assert chat["tools"] == [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    assert read(**document).canonical == bodies.read(Kind.CHAT, json.dumps(chat).encode()).canonical


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": []}]}),
        ("max_tokens", {"max_tokens": 0}),
        ("mcp_servers", {"mcp_servers": [{"url": "http://a"}]}),
        ("messages", {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://a.example/x.png"}}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://a.example/x.png"}}]}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "data": "x", "url": "http://a.example/x.png"}}]}]}),
        ("model", {"model": None}),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as caught:
        read(**body)
    assert caught.value.param == param


def test_pictures_in_the_request_pass_and_are_counted() -> None:
    words = {"type": "text", "media_type": "text/plain", "data": "see http://a.example/ or ../x"}
    read(messages=[{"role": "user", "content": [block("what?"), {"type": "document", "source": words}]}])
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 40}
    prompt = read(messages=[{"role": "user", "content": [{"type": "image", "source": source}, block("what?")]}])
    assert prompt.opaque_bytes > 400


def test_a_count_tokens_request_has_no_prompt_and_no_output() -> None:
    prompt = read(Kind.COUNT_TOKENS)
    assert (prompt.canonical, prompt.max_tokens) == (b"", 0)


def test_usage_counts_what_was_cached_with_the_rest() -> None:
    whole = openai.usage_of(b'{"usage":{"input_tokens":3,"cache_read_input_tokens":40,"output_tokens":5}}')
    assert whole is not None
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (43, 5, 40)
    begun = openai.usage_of(b'{"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":1}}}')
    ended = openai.usage_of(b'{"type":"message_delta","usage":{"output_tokens":9}}', begun)
    assert ended is not None
    assert (ended.prompt_tokens, ended.completion_tokens) == (7, 9)
