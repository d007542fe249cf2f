"""Bodies become prompts as a chat template would make them; what cannot be done is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import Sequence, TextModel
from farhop_lab.engine.core.text import token_count
from farhop_lab.engine.formats.api import IMAGE_TOKENS, Call, RefusedError, parse_chat, parse_completion

HELLO = {"role": "user", "content": "hello"}


def _chat(**fields: Any) -> Call:
    return parse_chat(json.dumps({"messages": [HELLO]} | fields).encode())


def _completion(**fields: Any) -> Call:
    return parse_completion(json.dumps(fields).encode())


def test_the_template_tools_first_and_the_answer_left_open() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = _chat(messages=[{"role": "system", "content": "be"}, HELLO], tools=tools).wanted.prompt.decode()
    assert prompt == (
        '<|tools|>\n{"function":{"name":"f"},"type":"function"}\n<|end|>\n'
        "<|system|>\nbe<|end|>\n<|user|>\nhello<|end|>\n<|assistant|>\n"
    )


def test_a_final_message_is_continued_just_where_it_stopped() -> None:
    open_prompt = _chat().wanted.prompt
    fields = {"role": "assistant", "content": " the s"}
    call = _chat(messages=[HELLO, fields], continue_final_message=True, add_generation_prompt=False)
    assert call.wanted.prompt == open_prompt + b" the s"
    assert call.role == "assistant"


def test_parts_count_as_their_text_and_an_image_by_a_fixed_cost() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert _chat(messages=[{"role": "user", "content": parts}]).wanted.prompt == _chat().wanted.prompt
    images = [
        _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]).wanted.prompt
        for url in ("data:a", "data:b", "data:a")
    ]
    empty = _chat(messages=[{"role": "user", "content": ""}]).wanted.prompt
    assert token_count(images[0]) - token_count(empty) == IMAGE_TOKENS
    assert images[0] == images[2] != images[1]


def test_tool_calls_of_earlier_turns_are_in_the_prompt() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "weather"}}]}
    assert b"weather" in _chat(messages=[HELLO, message]).wanted.prompt


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert _chat(max_tokens=5, max_completion_tokens=7).wanted.max_tokens == 7
    assert _chat(max_tokens=5).wanted.max_tokens == 5
    assert _chat().wanted.max_tokens is None
    assert _completion(prompt="x").wanted.max_tokens == 16


@pytest.mark.parametrize("prompt", ["abcd", ["abcd"], [0x61626364], [[0x61626364]]])
def test_every_form_of_a_prompt(prompt: Any) -> None:
    assert _completion(prompt=prompt).wanted.prompt == b"abcd"


def test_stop_usage_and_salt() -> None:
    call = _chat(stop="x", stream=True, stream_options={"include_usage": True}, cache_salt="s", temperature=0.3, seed=9)
    assert (call.wanted.stop, call.stream, call.include_usage, call.wanted.cache_salt) == (("x",), True, True, "s")
    assert _chat(stop=["x", "y"]).wanted.stop == ("x", "y")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 65}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("tool_choice", {"tool_choice": "required"}),
        ("response_format", {"response_format": {"type": "regex"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("messages", {"messages": []}),
        ("continue_final_message", {"continue_final_message": True}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["x"] * 17}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "many"}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    ],
)
def test_a_chat_refused_names_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        _chat(**fields)
    error = json.loads(caught.value.body())["error"]
    assert error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert param.split("[")[0] in error["message"]
    assert error["param"] is not None
    assert error["param"].startswith(param.split("[")[0])


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [True]}),
        ("echo", {"prompt": "x", "echo": True, "stream": True}),
        ("logprobs", {"prompt": "x", "logprobs": 21}),
        ("suffix", {"prompt": "x", "suffix": "y"}),
    ],
)
def test_a_completion_refused_names_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=param) as caught:
        _completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b"null"])
def test_invalid_request_is_refused(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RefusedError) as caught:
            parse(body)
        assert caught.value.status == 400


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["tell me of the sea", "erzähl vom Meer 海 🌊", " x ", ""]),
    st.integers(0, 40),
)
def test_an_answer_written_on_from_any_cut_is_the_uninterrupted_one(
    cut: float, chats: bool, wide: bool, asked: str, min_tokens: int
) -> None:
    """To the same natural end: a chat with `continue_final_message`, a completion with the text behind its prompt."""
    voice = TextModel("m", seed=4, answer_tokens_mean=30, wide=wide)
    prompt = asked or "x"

    def generated(text: str, least: int) -> tuple[list[str], Sequence]:
        if chats:
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
            more = {"continue_final_message": True, "add_generation_prompt": False} if text else {}
            call = _chat(messages=turns if text else turns[:1], min_tokens=least, **more)
        else:
            call = _completion(prompt=prompt + text, min_tokens=least, max_tokens=3000)
        sequence = Sequence("s", call.wanted, voice, PROFILES["l4"])
        shown: list[str] = []
        while sequence.finished is None:
            shown.append(sequence.write_token())
        return shown, sequence

    whole, ended = generated("", min_tokens)
    at = int(cut * len(whole))
    at = max((number + 1 for number, text in enumerate(whole[:at]) if text), default=0)  # the last with text
    rest, resumed = generated("".join(whole[:at]), max(0, min_tokens - at))
    assert "".join(whole[:at] + rest) == "".join(whole)
    assert resumed.finished == ended.finished == "stop"
    if not wide and prompt != " x ":
        assert resumed.prompt_tokens == ended.prompt_tokens + at
        assert resumed.output_tokens == ended.output_tokens - at
