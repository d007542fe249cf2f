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
