"""Calls of tools in vLLM's forms, compared with what a real one sent (tests/pages)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farhop_lab.engine.formats.tools import parsed

PAGES = Path(__file__).parents[3] / "pages" / "vllm-0.32.0"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object", "additionalProperties": False, "required": ["n", "q"],
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "q": {"enum": ["ü", "} </", '"']}},
        },
    },
}  # fmt: skip
WAIT = {"type": "function", "function": {"name": "wait"}}
NAMED = {"type": "function", "function": {"name": "look"}}


def asked(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": [LOOK, WAIT], **more}


def fits(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "wait":
        assert arguments == {}
    else:
        assert (arguments.keys(), 1 <= arguments["n"] <= 9) == ({"n", "q"}, True)
        assert arguments["q"] in ("ü", "} </", '"')


def joined(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The calls that a stream's deltas make up, and the finish reason."""
    calls: list[dict[str, Any]] = []
    for event in events[1:]:
        (choice,) = event["choices"]
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls)
                made = {"id": delta["id"], "type": delta["type"]}
                calls.append({**made, "function": {**delta["function"], "arguments": ""}})
            calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments", "")
        if choice["finish_reason"]:
            return calls, choice["finish_reason"]
    raise AssertionError("no finish reason")


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_stream_calls_what_the_whole_answer_calls(replica: Any, choice: Any, reason: str) -> None:
    engine = await replica()
    several = 0
    for text in map(str, range(8)):
        given = asked(text, tool_choice=choice)
        document = await engine.ask("/v1/chat/completions", **given)
        (whole,) = document["choices"]
        assert whole["finish_reason"] == reason
        assert whole["message"]["content"] == (None if choice == "required" else "")
        events = await engine.events("/v1/chat/completions", **given)
        calls, streamed_reason = joined(events)
        assert streamed_reason == "tool_calls"
        assert [one["function"] for one in calls] == [one["function"] for one in whole["message"]["tool_calls"]]
        assert len({one["id"] for one in calls}) == len(calls)
        for one in calls:
            fits(one)
            assert choice == "required" or one["function"]["name"] == "look"
        several += len(calls) > 1
        assert document["usage"]["completion_tokens"] > len(events) - 2 - len(calls)  # frames are tokens, too
        one = await engine.ask("/v1/chat/completions", **given, parallel_tool_calls=False)
        assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert bool(several) is (choice == "required")


async def test_left_to_choose_the_model_calls_or_answers_and_after_a_result_it_answers(replica: Any) -> None:
    engine = await replica()
    reasons = set()
    for text in map(str, range(10)):
        (choice,) = (await engine.ask("/v1/chat/completions", **asked(text)))["choices"]
        reasons.add(choice["finish_reason"])
        assert bool(choice["message"]["content"]) is (choice["finish_reason"] == "stop")
        assert bool(choice["message"]["tool_calls"]) is (choice["finish_reason"] == "tool_calls")
        given = asked(text)
        given["messages"] += [choice["message"], {"role": "tool", "content": "found"}]
        (after,) = (await engine.ask("/v1/chat/completions", **given))["choices"]
        assert (after["finish_reason"], after["message"]["tool_calls"]) == ("stop", [])
        (none,) = (await engine.ask("/v1/chat/completions", **asked(text, tool_choice="none")))["choices"]
        assert none["finish_reason"] == "stop"
    assert reasons == {"stop", "tool_calls"}


async def test_a_call_cut_short_is_as_a_real_engine_shows_it(replica: Any) -> None:
    """Whole it is text, in a stream what there is of it; it ended by its length."""
    engine = await replica()
    recorded = json.loads((PAGES / "chat-tools-stream.json").read_text())
    real = [json.loads(line[6:]) for line in recorded["body"].split("\n\n") if line and "[DONE]" not in line]
    given = {"messages": recorded["asked"]["messages"], "tools": recorded["asked"]["tools"], "tool_choice": "required"}
    given["tools"][0]["function"]["parameters"]["properties"]["n"] = {"const": "a" * 99}
    ours = await engine.events("/v1/chat/completions", **given, max_tokens=20)
    (calls, reason), (real_calls, real_reason) = joined(ours), joined(real)
    assert (reason, real_reason) == ("length", "length")
    assert [(one["type"], one["function"]["name"]) for one in calls] == [("function", "look")]
    assert [(one["type"], one["function"]["name"]) for one in real_calls] == [("function", "look")]
    assert calls[0]["id"].startswith("chatcmpl-tool-")
    assert len(calls[0]["id"]) == len(real_calls[0]["id"])
    for own, others in zip(ours[1:3], real[1:3], strict=True):
        (own_choice,), (real_choice,) = own["choices"], others["choices"]
        assert own_choice["delta"].keys() == real_choice["delta"].keys()
        assert own_choice["delta"]["tool_calls"][0].keys() == real_choice["delta"]["tool_calls"][0].keys()
    (whole,) = (await engine.ask("/v1/chat/completions", **given, max_tokens=20))["choices"]
    (real_whole,) = json.loads(json.loads((PAGES / "chat-tools.json").read_text())["body"])["choices"]
    for one in (whole, real_whole):
        assert one["finish_reason"] == "length"
        assert one["message"]["content"].startswith('<tool_call>{"name": "look", "arguments": ')


async def test_further_answers_call_with_ids_and_arguments_of_their_own(replica: Any) -> None:
    engine = await replica()
    given = asked("several", tool_choice="required", n=3)
    choices = (await engine.ask("/v1/chat/completions", **given))["choices"]
    calls = [one for choice in choices for one in choice["message"]["tool_calls"]]
    assert len({one["id"] for one in calls}) == len(calls) >= 3
    events = await engine.events("/v1/chat/completions", **given)
    ended = {c["index"]: c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]}
    assert ended == dict.fromkeys(range(3), "tool_calls")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": None, "tool_choice": "required"}, "When using `tool_choice`, `tools` must be set."),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "does not match any"),
        ({"tool_choice": "always"}, 'Only named tools, "none", "auto" or "required" are supported.'),
        ({"tools": [{"type": "function"}]}, "tools[0]: Object missing required field `function`"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "object", "required": ["a"],
          "properties": {"a": {"not": {}}}}}}], "tool_choice": {"function": {"name": "f"}}}, "not: this engine's"),
    ],
)  # fmt: skip
async def test_what_cannot_be_called_is_refused(replica: Any, more: dict[str, Any], says: str) -> None:
    engine = await replica()
    async with engine.post("/v1/chat/completions", **{**asked(), **more}) as response:
        error = (await response.json())["error"]
    assert (response.status, says in error["message"]) == (400, True), error


def test_a_partial_tool_call_shows_only_what_stays_true() -> None:
    """Nothing that was shown is taken back, and nothing of the frame is shown."""
    text = '<tool_call>{"name": "a\\"b", "arguments": {"n": {"m": 1}}}</tool_call>'
    text += '<tool_call>{"name": "c", "arguments": {}}</tool_call>'
    shown = ["", ""]
    for end in range(len(text) + 1):
        for at, (name, arguments) in enumerate(parsed(text[:end])):
            assert name == ('a"b', "c")[at]
            assert arguments.startswith(shown[at])
            shown[at] = arguments
    assert shown == ['{"n": {"m": 1}}', "{}"]
