"""What a chat template is handed: as vLLM's own models write it, whatever the client wrote."""

from __future__ import annotations

from typing import Any

import pytest

from farhop.service.tokenization.chat_form import ChatForm, MediaError, tool

FORM, IN_PARTS = ChatForm("{{ messages }}", in_parts=False), ChatForm("{{ messages }}", in_parts=True)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def spelt(value: Any) -> str:
    """With the order of keys, which templates write out."""
    return repr(value)


def test_tools_are_written_in_one_order_whatever_the_order_of_their_fields() -> None:
    parameters = {"type": "object", "properties": {"b": {}, "a": {}}}  # the client's own, in its order
    one = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    other = {"function": {"parameters": parameters, "x": 1, "description": "d", "name": "f"}, "cache_control": {}}
    assert spelt(tool(one)) == spelt(tool(other)) == spelt(one)
    bare = tool({"type": "function", "function": {"name": "f", "strict": True}})
    fields = {"name": "f", "description": None, "parameters": None, "strict": True}
    assert spelt(bare) == spelt({"type": "function", "function": fields})
    later = tool({"function": {"name": "f"}, "defer_loading": True})
    assert (later["function"]["defer_loading"], later["defer_loading"]) == (True, True)


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    found = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, user("c")]
    assert FORM.messages(found) == [{"role": "system", "content": "a\n\nb"}, user("c")]
    assert FORM.messages(found[1:]) == [{"role": "system", "content": "b"}, user("c")]
    assert IN_PARTS.messages(found)[0] == {"role": "system", "content": "a\n\nb"}
    late = [user("a"), {"role": "developer", "content": "b"}]
    assert FORM.messages(late) == [{"role": "system", "content": "b"}, user("a")]
    knows = ChatForm("{% if message.role == 'developer' %}", in_parts=False)
    assert [message["role"] for message in knows.messages(found)] == ["system", "developer", "user"]
    twice = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    assert FORM.messages(twice) == twice  # only if there is a developer message


def test_messages_have_a_few_named_fields() -> None:
    found = user("a", name="n", task="t", cache_control={}, tool_call_id="x")
    assert FORM.messages([found]) == [user("a", name="n", task="t")]
    answer = {"role": "assistant", "content": None, "reasoning_content": "r", "refusal": None, "tool_calls": []}
    made = {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"}
    assert FORM.messages([answer]) == [made]
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, "b"]}
    assert FORM.messages([result]) == IN_PARTS.messages([result])
    assert FORM.messages([result]) == [{"role": "tool", "tool_call_id": "1", "content": "a\nb"}]


def test_a_calls_arguments_are_an_object() -> None:
    def arguments(written: Any) -> Any:
        call = {"type": "function", "function": {"name": "f", "arguments": written}, "id": "1", "index": 0}
        (made,) = FORM.messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
        (one,) = made["tool_calls"]
        assert list(one) == ["id", "function", "type"]
        return one["function"]["arguments"]

    assert [arguments(a) for a in ('{"a": 1}', {"a": 1}, "", None, "{", "[1]", 7)] == [{"a": 1}] * 2 + [{}] * 5


def test_the_texts_of_parts() -> None:
    parts = [{"type": "text", "text": ""}, {"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    parts += [{"type": "text", "text": None}, {"type": "text", "text": "c", "cache_control": {}, "mine": 1}]
    assert FORM.messages([user(parts)]) == [user("a\nb\nc")]
    texts = [{"type": "text", "text": text} for text in ("", "a", "b")]
    assert IN_PARTS.messages([user(parts)]) == [user([*texts, {"type": "text", "text": "c", "mine": 1}])]
    with pytest.raises(MediaError):
        FORM.messages([user([{"type": "image_url", "image_url": {"url": "data:"}}])])


def test_lines_that_differ_with_every_request_are_left_out_of_system_prompts() -> None:
    line = "x-anthropic-billing-header: cc=1; cch=77"
    parts = [{"type": "text", "text": line}, {"type": "text", "text": f"{line}\nYou are"}]
    assert FORM.messages([{"role": "system", "content": parts}]) == [{"role": "system", "content": "You are"}]
    assert FORM.messages([{"role": "system", "content": f"{line}\nYou"}]) == [{"role": "system", "content": "You"}]
    assert FORM.messages([user(line)]) == [user(line)]


def test_a_clients_arguments_go_below_the_requests_own() -> None:
    asked = {
        "messages": [user("a")],
        "chat_template_kwargs": {"add_generation_prompt": False, "x": 1, "y": None, "bos_token": "b"},
    }
    made = FORM.arguments(asked)
    assert (made["add_generation_prompt"], made["x"], "y" in made, made["bos_token"]) == (True, 1, False, "b")
    assert FORM.arguments({**asked, "reasoning_effort": "low"})["enable_thinking"] is True
    thought = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert FORM.arguments({**asked, **thought})["enable_thinking"] is True
