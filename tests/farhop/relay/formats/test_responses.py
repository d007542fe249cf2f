"""Stateless requests of OpenAI's Responses pass, with the prefix chain of the equivalent chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from farhop.relay.formats import bodies, openai, transcript
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError, Prompt


def read(**body: Any) -> Prompt:
    return bodies.read(Kind.RESPONSES, json.dumps({"model": "m", "input": "hi", "store": False, **body}).encode())


def chat(*messages: dict[str, Any], **more: Any) -> bytes:
    return bodies.read(Kind.CHAT, json.dumps({"model": "m", "messages": messages, **more}).encode()).canonical


def test_a_responses_body_has_the_text_of_the_same_chat() -> None:
    system, user = {"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}
    assert read(instructions="brief").canonical == chat(system, user)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    assert read(instructions="brief", input=[item]).canonical == chat(system, user)
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "42"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert read(input=[item, {"type": "reasoning", "id": "r"}, called, output]).canonical == chat(
        user, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "42", "tool_call_id": "c"}
    )


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("background", {"background": True}),
        ("tools", {"tools": [{"type": "mcp", "server_label": "x"}]}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("input", {"input": [{"type": "item_reference", "id": "i"}]}),
        ("input", {"input": [{"id": "msg_1"}]}),
        ("input", {"input": [{"type": None, "id": "msg_1"}, {"role": "user", "content": "hi"}]}),
        ("input", {"input": ""}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a.example/b"}]}]}),
        ("input", {"input": [{"role": "user", "content": {"type": "input_image", "image_url": "http://a.example/b"}}]}),
        ("input", {"input": [{"type": "function_call_output", "output": {"image_url": "http://a.example/b"}}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_routed_is_refused_by_its_field(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as caught:
        read(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        ('{"input":"hi","model":"m"}', '{"store":false,"input":"hi","model":"m"}'),
        (' { "input": "hi" ,"model":"m"}', ' {"store":false, "input": "hi" ,"model":"m"}'),
        ('{"store":null,"input":"hi","model":"m"}', '{"store":false,"input":"hi","model":"m"}'),
        ('{"input":"hi","st\\u006fre":null,"model":"m","top_p":0.10}', None),
        ('{"store":false,"input":"hi","model":"m"}', '{"store":false,"input":"hi","model":"m"}'),
    ],
)
def test_a_response_request_without_store_is_served_and_not_stored(message: str, sent: str | None) -> None:
    body = message.encode()
    prompt = bodies.read(Kind.RESPONSES, body)
    assert prompt == replace(read(), lacks_store=prompt.lacks_store)
    onward = openai.change(body, prompt, "").of(body)
    assert sent is None or onward == sent.encode()
    document = json.loads(onward, object_pairs_hook=_once)
    assert document == {**json.loads(message), "store": False}
    again = bodies.read(Kind.RESPONSES, onward)  # in the region
    assert openai.change(onward, again, "").of(onward) is onward


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(members)) == len(members), members
    return dict(members)


def test_the_usage_is_in_the_last_event() -> None:
    event = {"type": "response.completed", "response": {"usage": {
        "input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 8}}}}  # fmt: skip
    usage = openai.usage_of(json.dumps(event).encode())
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (9, 4, 8)


def test_a_streams_text_is_taken_once() -> None:
    prompt = read(stream=True)
    more = transcript.answer_chain(prompt, (), 1)
    assert more is not None
    found = transcript.Transcript(more)
    for name, text in [
        ("response.output_text.delta", {"delta": "one ", "logprobs": []}),
        ("response.reasoning_text.delta", {"delta": "hidden"}),
        ("response.output_text.delta", {"content_index": 0, "delta": "two"}),
        ("response.output_text.done", {"text": "one two"}),
    ]:
        found.feed(f"event: {name}\ndata: {json.dumps(text)}\n\n".encode())
    assert found.result()[1] == len("one two")
