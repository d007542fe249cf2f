"""OpenAI's Responses as vLLM speaks it without a store: what its clients parse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.formats import responses
from farhop_lab.engine.formats.api import RefusedError

SEQUENCE = Sequence("1", EngineRequest(b"x" * 40, max_tokens=1, ignore_eos=True), TextModel("m"), PROFILES["l4"])
SEQUENCE.write_token()


def parsed(**more: Any) -> bytes:
    return responses.parse(json.dumps({"model": "m", "input": "hi", **more}).encode()).wanted.prompt


def test_items_are_messages() -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    assert parsed() == parsed(input=[item, {"type": "reasoning"}])
    assert b"<|system|>\nbrief" in parsed(instructions="brief")


@pytest.mark.parametrize("more", [{"previous_response_id": "r"}, {"input": [{"type": "computer_call"}]}])
def test_unsupported_request_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        parsed(**more)


def test_the_events_of_a_stream_in_their_order() -> None:
    answer = responses.ResponseAnswer("resp_1", "m", 7)
    wire = answer.opening(SEQUENCE) + answer.token(" a") + answer.closing(" b", SEQUENCE, include_usage=False)
    events = [json.loads(line[6:]) for line in wire.decode().split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events][:5:4] == ["response.created", "response.output_text.delta"]
    last = events[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == " a b"
    assert last["response"]["usage"]["input_tokens"] == 10


LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}},
}
TOOLS = [LOOK, {"type": "function", "name": "wait"}]


async def events(engine: Any, **given: Any) -> list[dict[str, Any]]:
    async with engine.post("/v1/responses", stream=True, **given) as response:
        lines = (await response.read()).decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def made_by(stream: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Name and arguments of each call of a stream, whose deltas, ends and last event agree."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    names: list[str] = []
    written: list[str] = []
    for event in stream[2:-1]:
        assert event["output_index"] == len(names) - (event["type"] != "response.output_item.added")
        match event["type"]:
            case "response.output_item.added":
                names.append(event["item"]["name"])
                written.append("")
            case "response.function_call_arguments.delta":
                written[-1] += event["delta"]
            case "response.function_call_arguments.done":
                assert event["arguments"] == written[-1]
            case "response.output_item.done":
                assert (event["item"]["name"], event["item"]["arguments"]) == (names[-1], written[-1])
    last = stream[-1]
    assert last["type"] == "response.completed"
    made = list(zip(names, written, strict=True))
    assert [(item["name"], item["arguments"]) for item in last["response"]["output"]] == made
    return made


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
async def test_a_stream_calls_what_the_whole_response_calls(replica: Any, choice: Any) -> None:
    engine = await replica()
    several = 0
    for text in map(str, range(8)):
        given = {"input": text, "tools": TOOLS, "tool_choice": choice}
        output = (await engine.ask("/v1/responses", **given))["output"]
        assert {item["type"] for item in output} == {"function_call"}
        assert len({item["call_id"] for item in output}) == len(output)
        assert made_by(await events(engine, **given)) == [(item["name"], item["arguments"]) for item in output]
        assert all(isinstance(json.loads(i["arguments"])["n"], int) for i in output if i["name"] == "look")
        one = await engine.ask("/v1/responses", **given, parallel_tool_calls=False)
        assert len(one["output"]) == 1
        several += len(output) > 1
    assert bool(several) is (choice == "required")


async def test_after_a_result_the_model_answers_and_a_call_cut_short_is_no_call(replica: Any) -> None:
    engine = await replica()
    (call,) = (
        await engine.ask("/v1/responses", input="0", tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    )["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "found"}
    answer = await engine.ask("/v1/responses", input=[{"role": "user", "content": "0"}, call, result], tools=TOOLS)
    assert [item["type"] for item in answer["output"]] == ["message"]
    given = {"input": "0", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 3}
    cut = await engine.ask("/v1/responses", **given)
    assert (cut["status"], [item["type"] for item in cut["output"]]) == ("incomplete", ["message"])
    assert (await events(engine, **given))[-1]["response"]["status"] == "incomplete"


async def test_the_text_has_the_form_that_was_asked_for(replica: Any) -> None:
    engine = await replica()
    form = {"type": "json_schema", "name": "look", "schema": LOOK["parameters"]}
    (item,) = (await engine.ask("/v1/responses", input="form", text={"format": form}))["output"]
    assert isinstance(json.loads(item["content"][0]["text"])["n"], int)
