"""Reading answers: however bytes are cut, the same text; whatever is malformed is a Failure, never an exception."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.world import stream
from farhop_lab.world.stream import EventReader, Failure, Piece, Usage, read_answer, read_failure


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
WHOLE = (
    event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    + delta("grüß ")
    + b": a comment\n\n"
    + delta("dich")
    + event({"choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_stream_reads_the_same_however_it_is_cut(cuts):
    reader, texts = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(WHOLE)], strict=True):
        texts += reader.feed(WHOLE[start:end])
    assert texts == ["grüß ", "dich"]
    assert reader.end() is None
    assert reader.usage == Usage(9, 2, 4)


def test_lines_may_end_as_on_windows_and_completions_are_read():
    reader = EventReader()
    assert reader.feed(b'data:{"choices":[{"text":"a"}]}\r\n\r\ndata: [DONE]\r\n\r\n') == ["a"]
    assert reader.end() is None


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_arbitrary_bytes_do_not_crash_the_parser(data):
    reader = EventReader()
    reader.feed(data)
    reader.feed(b"data: " + data + b"\n\n")
    assert reader.end() is not None or b"[DONE]" in data


def test_stream_without_its_last_event_counts_as_cut():
    reader = EventReader()
    reader.feed(delta("a"))
    assert reader.end().code == "stream_cut"


def test_a_broken_stream_ends_with_its_error():
    reader = EventReader()
    fields = {
        "message": "region tokyo failed",
        "type": "server_error",
        "param": None,
        "code": "upstream_died_mid_stream",
    }
    assert reader.feed(delta("a") + event({"error": fields})) == ["a"]
    assert reader.end() == Failure("region tokyo failed", "upstream_died_mid_stream", "server_error")


def test_nothing_after_the_end_counts():
    reader = EventReader()
    assert reader.feed(b"data: [DONE]\n\n" + delta("late")) == []
    assert reader.end() is None


def test_an_event_without_end_is_not_kept(monkeypatch):
    monkeypatch.setattr(stream, "EVENT_BYTES_MAX", 100)
    reader = EventReader()
    assert reader.feed(b"data: " + b"x" * 200) == []
    assert reader.end().code == "bad_stream"
    assert len(reader.tail) <= 100


def test_whole_answers():
    answer = {"choices": [{"message": {"content": "hi", "reasoning_content": "hm "}}], "usage": {"prompt_tokens": 1}}
    assert read_answer(json.dumps(answer).encode()) == Piece("hm hi", Usage(1, 0, None))
    assert read_answer(b'{"choices":[{"text":"a"}]}') == Piece("a", None)
    assert read_answer(b"<html>").code == "bad_answer"


@pytest.mark.parametrize(("body", "failure"), [
    (b'{"error":{"message":"m","type":"t","param":"p","code":"c"}}', Failure("m", "c", "t", "p")),
    (b'{"error":{"message":"m","code":404}}', Failure("m", "404", "")),
    (b"Bad Gateway\n", Failure("status 502: Bad Gateway", "http_502")),
    (b"", Failure("status 502: no text", "http_502")),
    (b"{}", Failure("status 502: {}", "http_502")),
])  # fmt: skip
def test_failures(body, failure):
    assert read_failure(502, body) == failure
