"""What makes two requests equal, and an answer replayed as a stream or whole: the same content either way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.relay.formats import cacheable
from farhop.relay.formats.cacheable import CacheLookup
from farhop.relay.formats.event_stream import each
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "why?"}], "temperature": 0}


def ask(document: Any, lines: bytes = b"", kind: Kind = Kind.CHAT, **more: Any) -> CacheLookup | str:
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    given = {"target": b"/v1/chat/completions", "version": "", "named": None, "stream": False} | more
    return cacheable.asked(kind, lines=lines, body=body, **given)


def key(document: Any, lines: bytes = b"", kind: Kind = Kind.CHAT, **more: Any) -> bytes:
    found = ask(document, lines, kind, **more)
    assert isinstance(found, CacheLookup)
    return found.key


def test_fields_that_do_not_change_the_answer_do_not_change_the_key() -> None:
    alike: list[Any] = [
        dict(reversed(CHAT.items())),
        CHAT | {"user": "u1"},
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
        CHAT | {"stream": False, "stream_options": None, "metadata": {"a": "b"}, "safety_identifier": "s"},
        b' { "temperature":0, "model":"\\u006d","messages":[{"content":"why?","role":"user"}]}',
    ]
    assert {key(one) for one in alike} == {key(CHAT)}
    assert key(CHAT, b"user-agent: me\r\naccept: */*\r\n") == key(CHAT)


def test_every_other_field_changes_the_key() -> None:
    others: list[bytes] = [
        key(CHAT | {"messages": [{"role": "user", "content": "why? "}]}),
        key(CHAT | {"seed": 1}),
        key(CHAT | {"max_tokens": 5}),
        key(CHAT | {"cache_salt": "s"}),
        key(CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        key(CHAT, named=b"k1"),
        key(CHAT, named=b"k2"),
        key(CHAT, version="v2"),
        key(CHAT, target=b"/v1/chat/completions?x=1"),
        key(CHAT, b"anthropic-beta: tools\r\n"),
        key(CHAT, kind=Kind.MESSAGES),
        key(CHAT, kind=Kind.MESSAGES, stream=True),
    ]
    assert len({key(CHAT), *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({**CHAT, "temperature": 0.1}, "sampled"),
        ({**CHAT, "temperature": None}, "sampled"),
        ({**CHAT, "temperature": False}, "sampled"),
        ({name: value for name, value in CHAT.items() if name != "temperature"}, "sampled"),
        ({**CHAT, "n": 2}, "sampled"),
        ({**CHAT, "best_of": 3}, "sampled"),
        (b"[]", "body"),
        (b"{", "body"),
        ({**CHAT, "messages": "x" * cacheable.BODY_BYTES_MAX}, "size"),
    ],
)
def test_requests_that_may_not_be_answered_from_the_cache(document: Any, why: str) -> None:
    assert ask(document) == why


def test_sampled_answer_may_be_reused_if_the_client_gives_a_cache_key() -> None:
    sampled = CHAT | {"temperature": 1.0, "n": 2}
    assert ask(sampled) == "sampled"
    assert key(sampled, named=b"mine") == key(sampled, named=b"mine") != key(CHAT, named=b"mine")
    for wrong in (b"", b"a b", b"x" * 257, "ä".encode()):
        with pytest.raises(BodyError, match="visible ASCII") as caught:
            ask(CHAT, named=wrong)
        assert caught.value.param == "x-farhop-cache-key"


def test_embeddings_are_cacheable_without_a_temperature_and_other_paths_never() -> None:
    assert isinstance(ask({"model": "m", "input": "x"}, kind=Kind.EMBEDDINGS), CacheLookup)
    assert ask(CHAT, kind=Kind.RESPONSES) == "path"
    assert ask(CHAT, kind=Kind.TRANSCRIPTION, named=b"mine") == "path"


def test_the_clients_cache_control_is_obeyed() -> None:
    assert ask(CHAT, b"accept: */*\r\ncache-control: private, No-Store\r\n") == "no_store"
    renewed = ask(CHAT, b"cache-control: no-cache\r\n")
    aged = ask(CHAT, b"cache-control: max-age=60\r\ncache-control: max-age=5\r\n")
    assert isinstance(renewed, CacheLookup)
    assert isinstance(aged, CacheLookup)
    assert (renewed.renew, renewed.age_s_max, aged.renew, aged.age_s_max) == (True, None, False, 5.0)
    assert renewed.key == aged.key == key(CHAT)
    assert ask(CHAT, b"x-cache-control: no-store\r\n") == CacheLookup(key(CHAT))


# -- told in the other way

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
_TEXT = st.text(max_size=20)
_CALL = st.fixed_dictionaries(
    {
        "id": st.text("abc", min_size=1, max_size=4),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text("fg", min_size=1, max_size=3), "arguments": _TEXT}),
    }
)


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | st.text(min_size=1, max_size=20))}
    if calls := draw(st.lists(_CALL, max_size=2)):
        message |= {"tool_calls": calls, "content": None}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(st.text(min_size=1, max_size=20))
    logprobs = draw(st.none() | st.builds(lambda text: {"content": [{"token": text, "logprob": -1.5}]}, _TEXT))
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": draw(st.sampled_from(["stop", "length"])),
    }
    named = {"id": "chatcmpl-1", "object": "chat.completion", "created": 7, "model": "m"}
    return named | {"choices": [choice], "usage": USAGE}


@given(chats())
def test_a_chat_as_a_stream_and_whole_again_is_the_same(document: dict[str, Any]) -> None:
    found = cacheable.stream(Kind.CHAT, msgspec.json.encode(document))
    assert found is not None
    before, usage, end = found
    assert not any(map(cacheable.has_usage, each(before)))
    assert cacheable.has_usage(usage)
    again = cacheable.whole(Kind.CHAT, before + usage + end)
    assert again is not None
    assert msgspec.json.decode(again) == document


@given(_TEXT, st.none() | st.builds(lambda t: {"tokens": [t], "token_logprobs": [-1.0], "top_logprobs": None}, _TEXT))
def test_a_completion_as_a_stream_and_whole_again_is_the_same(text: str, logprobs: Any) -> None:
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None}
    document = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }
    found = cacheable.stream(Kind.COMPLETION, msgspec.json.encode(document))
    assert found is not None
    again = cacheable.whole(Kind.COMPLETION, b"".join(found))
    assert again is not None
    assert msgspec.json.decode(again) == document


def events(*chunks: Any) -> bytes:
    named = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    return b"".join(b"data: " + msgspec.json.encode(named | one) + b"\n\n" for one in chunks)


def delta(finish: str | None = None, **value: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": value, "logprobs": None, "finish_reason": finish}]}


DONE = b"data: [DONE]\n\n"


def test_a_streamed_answer_is_made_into_a_whole_one() -> None:
    calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]
    stream = events(
        delta(role="assistant", content=""),
        delta(reasoning="be"), delta(reasoning="cause"),
        delta(tool_calls=calls),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}]),
        delta("tool_calls"),
        {"choices": [], "usage": USAGE},
    )  # fmt: skip
    found = cacheable.whole(Kind.CHAT, b": a comment\n\n" + stream + DONE)
    assert found is not None
    document = msgspec.json.decode(found)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "reasoning": "because", "tool_calls": [call]}
    assert document["choices"] == [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}]
    assert (document["object"], document["usage"], document["id"]) == ("chat.completion", USAGE, "chatcmpl-1")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        DONE,
        events(delta("stop", content="x")),  # it lacks its end
        events(delta(content="x"), {"error": {"message": "broke"}}) + DONE,
        events(delta(content="x"), delta(content=["parts"])) + DONE,
        events(delta(audio={"id": "a"})) + DONE,
        b"data: {broken\n\n" + DONE,
        b'data: {"choices":[{"index":0,"message":1}]}\n\n' + DONE,
        b'data: {"choices":[{"index":0,"delta":{}},{"index":"x","delta":{}}]}\n\n' + DONE,
        events(delta(content="x" * cacheable.CONVERTED_BYTES_MAX)) + DONE,
    ],
)
def test_an_answer_that_is_not_understood_is_not_converted(stream: bytes) -> None:
    assert cacheable.whole(Kind.CHAT, stream) is None


@pytest.mark.parametrize(
    ("body", "streams", "good"),
    [
        (b'{"choices":[]}', False, True),
        (b' {"choices":[],"error":null}\n', False, True),
        (b'{"error":{"message":"no"}}', False, False),
        (b'{"choices":[{"message":{"tool":{"error":1}}}]}', False, True),
        (b'{"choices":[', False, False),
        (b'{"choices":[{"message":{"content":"cut off"}', False, False),  # from an engine that ends answers by closing
        (b"", False, False),
        (events(delta("stop", content='an "error"')) + DONE, True, True),
        (events(delta(error="a delta of an engine"), delta("stop")) + DONE, True, True),
        (events(delta("stop", content="x")), True, False),
        (events(delta(content="x"), {"error": {"message": "broke"}}) + DONE, True, False),
        (b'data: {"error": {"code": 500}}\n\n' + DONE, True, False),
        (events(delta("abort", content="x")) + DONE, True, False),
        (b"", True, False),
    ],
)
def test_only_good_answers_are_complete(body: bytes, streams: bool, good: bool) -> None:
    assert cacheable.complete(Kind.CHAT, body, stream=streams) == good


def test_a_messages_stream_is_complete_only_with_message_stop_and_no_error() -> None:
    begun = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    broke = b'event: error\ndata: {"type":"error","error":{}}\n\n'
    assert cacheable.complete(Kind.MESSAGES, begun + stop, stream=True)
    assert not cacheable.complete(Kind.MESSAGES, begun, stream=True)
    assert not cacheable.complete(Kind.MESSAGES, begun + broke + stop, stream=True)


def test_an_answer_that_is_not_understood_is_not_made_a_stream() -> None:
    for document in (b"{}", b"[]", b"{", b'{"choices":[{"text":"x"}]}', b'{"choices":7}'):
        assert cacheable.stream(Kind.CHAT, document) is None
    assert cacheable.stream(Kind.EMBEDDINGS, b'{"data":[]}') is None
    assert cacheable.whole(Kind.MESSAGES, DONE) is None


def test_a_stream_with_very_many_null_errors_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at each took 90 ms of 1 MiB."""
    looked, chunk = list[bytes](), cacheable._chunk
    monkeypatch.setattr(cacheable, "_chunk", lambda event: looked.append(event) or chunk(event))
    for count, good in ((60, True), (50_000, False)):
        stream = b'data: {"error":null}\n\n' * count + b"data: [DONE]\n\n"
        assert cacheable.complete(Kind.CHAT, stream, stream=True) is good
    assert len(looked) <= 64
