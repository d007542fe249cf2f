"""Anthropic's API as vLLM speaks it: what its clients parse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.formats import messages
from farhop_lab.engine.formats.api import RefusedError

SEQUENCE = Sequence("1", EngineRequest(b"x" * 40, max_tokens=1, ignore_eos=True), TextModel("m"), PROFILES["l4"])
SEQUENCE.write_token()


def body(**more: Any) -> bytes:
    asked = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **more}
    return json.dumps(asked).encode()


def test_attribution_block_is_left_out_of_the_prompt() -> None:
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "brief"}]
    assert messages.parse(body(system=blocks)).wanted.prompt == messages.parse(body(system="brief")).wanted.prompt
    assert messages.parse(body(cache_salt="s")).wanted.cache_salt == "s"


def test_tool_results_come_before_the_text_of_their_message() -> None:
    turn = {"role": "user", "content": [
        {"type": "text", "text": "and?"}, {"type": "tool_result", "tool_use_id": "t", "content": "42"}]}  # fmt: skip
    prompt = messages.parse(body(messages=[turn])).wanted.prompt
    assert prompt.index(b"<|tool|>\n42") < prompt.index(b"<|user|>\nand?")


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"messages": []}, {"max_tokens": "x"}])
def test_invalid_request_is_refused_in_the_form_of_the_api(more: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        messages.parse(body(**more))
    shaped = messages.AnthropicRefusedError(caught.value.message)
    assert json.loads(shaped.body())["type"] == "error"


def test_the_events_of_a_stream_in_their_order() -> None:
    answer = messages.MessageAnswer("msg_1", "m")
    wire = answer.opening(SEQUENCE) + answer.token(" a") + answer.closing("", SEQUENCE, include_usage=False)
    names = [line[7:] for line in wire.decode().split("\n") if line.startswith("event: ")]
    assert names == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    whole = json.loads(answer.whole([("text", SEQUENCE)]))
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 10
    assert whole["content"] == [{"type": "text", "text": "text"}]
    assert json.loads(messages.count(messages.counted(body())[1]))["input_tokens"] > 0


TOOLS = [
    {"name": "look", "input_schema": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}},
    {"name": "wait", "input_schema": {"type": "object"}},
]


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "llama-3.1-8b", "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}


async def events(engine: Any, **given: Any) -> list[dict[str, Any]]:
    async with engine.post("/v1/messages", stream=True, **given) as response:
        lines = (await response.read()).decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def blocks_of(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream makes up; each is over before the next begins."""
    blocks: list[dict[str, Any]] = []
    written = ""
    for event in stream:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                written = ""
            case "content_block_delta":
                assert (event["index"], event["delta"]["type"]) == (len(blocks) - 1, "input_json_delta")
                written += event["delta"]["partial_json"]
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                blocks[-1] = {**blocks[-1], "input": json.loads(written)}
    return blocks


@pytest.mark.parametrize(
    ("choice", "reason"), [({"type": "any"}, "tool_use"), ({"type": "tool", "name": "look"}, "end_turn")]
)
async def test_a_stream_calls_what_the_whole_message_calls(replica: Any, choice: dict[str, Any], reason: str) -> None:
    """A call that the request named is no reason of the model's, as in a real engine's chats."""
    engine = await replica()
    several = 0
    for text in map(str, range(8)):
        given = asked(text, tools=TOOLS, tool_choice=choice)
        whole = await engine.ask("/v1/messages", **given)
        assert whole["stop_reason"] == reason
        stream = await events(engine, **given)
        assert (stream[-2]["delta"]["stop_reason"], stream[-1]["type"]) == ("tool_use", "message_stop")
        for made in (whole["content"], streamed := blocks_of(stream)):
            assert {block["type"] for block in made} == {"tool_use"}
            assert len({block["id"] for block in made}) == len(made)
        assert [(b["name"], b["input"]) for b in whole["content"]] == [(b["name"], b["input"]) for b in streamed]
        assert all(isinstance(b["input"]["n"], int) for b in streamed if b["name"] == "look")
        several += len(streamed) > 1
    assert bool(several) is (choice["type"] == "any")


async def test_left_to_choose_the_model_calls_or_answers_and_after_a_result_it_answers(replica: Any) -> None:
    engine = await replica()
    reasons = set()
    for text in map(str, range(10)):
        given = asked(text, tools=TOOLS)
        whole = await engine.ask("/v1/messages", **given)
        reasons.add(whole["stop_reason"])
        if whole["stop_reason"] == "tool_use":
            result = {"type": "tool_result", "tool_use_id": whole["content"][0]["id"], "content": "found"}
            given["messages"] += [
                {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}
            ]  # fmt: skip
            whole = await engine.ask("/v1/messages", **given)
            assert [block["type"] for block in whole["content"]] == ["text"]
        none = await engine.ask("/v1/messages", **asked(text, tools=TOOLS, tool_choice={"type": "none"}))
        assert [block["type"] for block in none["content"]] == ["text"]
    assert "tool_use" in reasons
    assert len(reasons) > 1


@pytest.mark.parametrize("cut", [{"max_tokens": 3}, {"stop_sequences": ["input", "arguments"]}])
async def test_a_call_cut_short_is_no_call(replica: Any, cut: dict[str, Any]) -> None:
    engine = await replica()
    given = asked("cut", tools=TOOLS, tool_choice={"type": "any"}) | cut
    whole = await engine.ask("/v1/messages", **given)
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert (await events(engine, **given))[-1]["type"] == "message_stop"


async def test_the_text_has_the_form_that_was_asked_for(replica: Any) -> None:
    engine = await replica()
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    (block,) = (await engine.ask("/v1/messages", **asked("form", output_config=wanted)))["content"]
    assert isinstance(json.loads(block["text"])["n"], int)


@pytest.mark.parametrize("choice", [{"type": "always"}, {"type": "tool", "name": "none"}, {"type": "tool"}])
def test_a_choice_that_cannot_be_made_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        messages.parse(body(tools=TOOLS, tool_choice=choice))
    assert caught.value.param == "tool_choice"
