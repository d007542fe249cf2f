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
