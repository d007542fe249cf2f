"""Numbers and truths in other forms than the API has them: read as pydantic reads them, and never sent on otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from farhop.balance import outcome
from farhop.relay.formats import bodies, lenient
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import OUTPUT_TOKENS_MAX, BodyError, Prompt

VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.just([]), st.just({}),
    st.text(max_size=3), st.sampled_from(["6", " 6 ", "6.0", "6.5", "1_0", "+6", "TRUE", "on", "No", "f", "01", "0x6"]),
)  # fmt: skip


def by_pydantic(kind: type, value: Any) -> Any:
    try:
        return TypeAdapter(kind | None).validate_python(value)
    except ValidationError:
        return None


@given(VALUE)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_counts_and_booleans_are_read_as_pydantic_reads_them(value: Any) -> None:
    for read, kind in ((lenient.count, int), (lenient.truth, bool)):
        found, theirs = read(value), by_pydantic(kind, value)
        assert (found, type(found)) == (theirs, type(theirs))


def read(kind: Kind = Kind.CHAT, **more: Any) -> Prompt:
    asked = {Kind.CHAT: {"messages": [{"role": "user", "content": "hi"}]}, Kind.COMPLETION: {"prompt": "hi"},
             Kind.MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
             Kind.RESPONSES: {"input": "hi"}}[kind]  # fmt: skip
    return bodies.read(kind, json.dumps({"model": "m", **asked, **more}).encode())


# The fields that matter: whether it streams, how long an answer may be, how many answers there are.
@pytest.mark.parametrize(
    ("more", "stream", "most", "answers"),
    [
        ({"max_tokens": 6.0}, False, 6, 1),
        ({"max_tokens": "6"}, False, 6, 1),
        ({"max_completion_tokens": "6.0", "max_tokens": 3}, False, 6, 1),
        ({"max_tokens": True}, False, 1, 1),
        ({"max_tokens": 10**30}, False, OUTPUT_TOKENS_MAX, 1),
        ({"max_tokens": -1}, False, None, 1),
        ({"max_tokens": 0}, False, None, 1),
        ({"max_completion_tokens": 0}, False, None, 1),
        # Some engines go by one of the two, some by the other, and some by the first that is not 0.
        ({"max_completion_tokens": 1, "max_tokens": 900}, False, 900, 1),
        ({"max_completion_tokens": 0, "max_tokens": 900}, False, None, 1),
        ({"max_completion_tokens": 900, "max_tokens": 0}, False, None, 1),
        ({"max_completion_tokens": -1, "max_tokens": 1}, False, None, 1),
        ({"stream": 1}, True, None, 1),
        ({"stream": "on", "max_tokens": "6"}, True, 6, 1),
        ({"stream": 0.0}, False, None, 1),
        ({"stream": "False"}, False, None, 1),
        ({"n": "2"}, False, None, 2),
        ({"n": "2.0", "best_of": 3.0}, False, None, 3),
        ({"n": 2.5}, False, None, 2),
        ({"n": "two"}, False, None, 1),
        ({"n_cmpl": 4, "n": 2}, False, None, 4),
        ({"max_tokens": 6, "n_predict": 50}, False, 50, 1),
        ({"max_tokens": 6, "n_predict": 2}, False, 6, 1),
        ({"max_tokens": 6, "n_predict": -1}, False, None, 1),
        ({"max_tokens": 6, "n_predict": "many"}, False, None, 1),
    ],
)
def test_numbers_and_booleans_in_lenient_forms_are_read_as_engines_do(
    more: dict[str, Any], stream: bool, most: int | None, answers: int
) -> None:
    prompt = read(**more)
    assert (prompt.stream, prompt.max_tokens, prompt.answers) == (stream, most, answers)


@pytest.mark.parametrize("more", [
    {"max_tokens": 6.5}, {"max_tokens": "six"}, {"max_tokens": []}, {"max_tokens": -2}, {"stream": 2}, {"stream": "x"},
    {"stream": True, "stream_options": 1}, {"stream": True, "stream_options": {"include_usage": "x"}},
])  # fmt: skip
def test_a_value_that_no_engine_accepts_is_refused_by_its_field(more: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as caught:
        read(**more)
    assert caught.value.outcome is outcome.INVALID_FIELD
    assert str(caught.value.param).startswith(list(more)[-1])


def test_whether_usage_was_requested_is_read_too() -> None:
    for said, asked in ((1, True), ("true", True), (0, False), ("off", False), (None, False)):
        assert read(stream="true", stream_options={"include_usage": said}).hide_usage is not asked


def test_other_apis_bodies_are_read_as_leniently() -> None:
    assert read(Kind.MESSAGES, stream=1, max_tokens="7").max_tokens == 7
    assert read(Kind.RESPONSES, max_output_tokens=8.0, store=0).max_tokens == 8
    with pytest.raises(BodyError, match="not stored"):
        read(Kind.RESPONSES, store="yes")
    assert read(Kind.COMPLETION, max_tokens=0, echo="true").max_tokens == 0
    assert read(Kind.COMPLETION, max_tokens=0, echo=True, max_completion_tokens=9).max_tokens is None
    assert read(Kind.COMPLETION, echo="false", logprobs=1).recomputed is False
    assert read(Kind.COMPLETION, echo=1, logprobs=1).recomputed


def test_limits_of_another_api_count_where_an_engine_may_read_them() -> None:
    """llama.cpp turns every API's body into its own, and reads these members of it."""
    for kind, own in ((Kind.COMPLETION, "max_tokens"), (Kind.MESSAGES, "max_tokens"),
                      (Kind.RESPONSES, "max_output_tokens")):  # fmt: skip
        asked = read(kind, **{own: 1}, max_completion_tokens=900, n_cmpl=2)
        assert (asked.max_tokens, asked.answers) == (900, 2)
        assert read(kind, **{own: 1}, n_predict=800, n=3).max_tokens == 800
        assert read(kind, **{own: 1}, n_predict=-1).max_tokens is None


def test_a_body_in_strict_form_needs_no_lenient_reading() -> None:
    for body in (b"{}", b'{"max_tokens":6,"stream":true,"stream_options":{"include_usage":false}}', b"[]", b"nonsense"):
        assert lenient.as_read(body) is None


def test_a_mark_before_utf_8_is_passed_over() -> None:
    body = b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    assert bodies.read(Kind.CHAT, bodies.without_bom(Kind.CHAT, body)).model == "m"
    for kind in (Kind.TRANSCRIPTION, Kind.INFER):  # whose bodies are not text
        assert bodies.without_bom(kind, body) == body


@pytest.mark.parametrize(
    "fields",
    [
        b'"max_tokens":1e400', b'"stream":-1e999', b'"stream_options":{"include_usage":1e400}',
        b'"x":1e400,"stream_options":{"\\ud800":1}', b'"x":1e400,"stream_options":{"include_usage":"\\ud800"}',
    ],
)  # fmt: skip
def test_a_number_beyond_all_numbers_is_the_clients_error(fields: bytes) -> None:
    body = b'{%b,"model":"m","messages":[{"role":"user","content":"hi"}]}' % fields
    assert lenient.as_read(body) is None
    with pytest.raises(BodyError) as caught:
        bodies.read(Kind.CHAT, body)
    assert caught.value.outcome is outcome.INVALID_FIELD
