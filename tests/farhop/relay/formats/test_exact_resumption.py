"""What a stream's continuation by ids needs: by vLLM's own pages, and by properties of any cut."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import msgspec
import pytest
from engine_pages import VLLM, Page
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.machine import Usage
from farhop.relay.formats.exact_resumption import ExactProgress, HopProgress
from farhop.relay.formats.resumption import (
    CHAT,
    TARGET,
    TOKENS_MAX,
    asking,
    plan,
)

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}


Known = TypeVar("Known", bound=ExactProgress)


def planned(path: bytes = CHAT, **more: Any) -> ExactProgress:
    return of(ExactProgress, path, **more)


def of(kind: type[Known], path: bytes = CHAT, **more: Any) -> Known:
    body = msgspec.json.encode({**ASKED, **more})
    return kind(plan(path, body), body)


def body_of(progress: ExactProgress, context_tokens: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(progress.continuation_body(context_tokens))
    return found


def events_of(name: str) -> list[bytes]:
    text = Page(VLLM, name).body
    return [event + b"\n\n" for event in text.split(b"\n\n") if event.strip()]


def stripped(events: list[bytes]) -> list[dict[str, Any]]:
    results = (event.removeprefix(b"data: ").strip() for event in events)
    found = [msgspec.json.decode(one) for one in results if one != b"[DONE]"]
    for one in found:
        for name in ("id", "created"):
            one.pop(name)
    return found


@pytest.mark.parametrize(("with_ids", "without", "path"), [("chat-ids-stream", "chat-stream-usage", CHAT)])
def test_token_ids_added_for_resuming_are_hidden_from_the_client(with_ids: str, without: str, path: bytes) -> None:
    progress = planned(path)
    passed = [progress.take(event) for event in events_of(with_ids)]
    assert stripped(passed) == stripped(events_of(without))
    assert list(progress.prompt) == [3, 372, 269, 203, 265, 80, 318, 539, 4, 203, 3, 312, 87, 556, 287, 88, 203]
    assert len(progress.ids) == 6
    assert progress.finished
    assert not progress.can_resume


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=600), st.booleans())
def test_kept_prompt_ids_are_packed_into_half_of_their_bytes(prompt: list[int], spaced: bool) -> None:
    kept, made = planned(), msgspec.json.encode(prompt)
    listed = made.replace(b",", b", ") if spaced else made
    event = b'data: {"id":"i","created":1,"model":"m","choices":[],"prompt_token_ids":%b}\n\n' % listed
    kept.take(event)
    kept.compact()
    kept.compact()
    if len(made) > 300 and not spaced:
        assert kept.held_bytes == len(made) // 2 - 1 + len(made) % 2
    assert kept.prompt_listed == listed
    assert list(kept.prompt) == prompt
    assert kept.prompt_listed == made, "of what is read already, too"


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_token_without_text_yet_is_computed_again(cut: int) -> None:
    """vLLM's completion of tokens that end within a character: that one's text comes with the next one's."""
    events = events_of("completion-ids-stream")
    progress = planned(TARGET, prompt=[11, 12, 13])
    line = b"".join(progress.take(event) for event in events[:cut])
    assert b"[11" not in line
    texts = [msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events[:cut]]
    body = body_of(progress)
    sure = max(at + 1 for at, text in enumerate(texts) if text)
    assert body["prompt"] == [11, 12, 13, 267, 360, 77, 147, 338][: 3 + sure]
    assert body["max_tokens"] == 9 - sure
    assert progress.recomputed == 3 + cut


def test_prompt_ids_are_not_parsed_one_by_one_before_the_first_token() -> None:
    """However many there are: no Python call for each, in either tier."""

    def calls(kind: type[ExactProgress], tokens: int) -> int:
        first, count = chunk("", [], list(range(tokens))), 0
        progress = of(kind)

        def count_calls(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(count_calls)
        try:
            progress.take(first)
        finally:
            sys.setprofile(None)
        assert list(progress.prompt) == list(range(tokens))
        return count

    for kind in (ExactProgress, HopProgress):
        assert calls(kind, 10) == calls(kind, 10_000) < 100


@pytest.mark.parametrize("value", [b"[1,,2]", b"[1,]", b"[,]", b"[4294967296]", b"[1 2]"])
def test_a_stream_whose_prompt_ids_cannot_be_read_is_not_resumed(value: bytes) -> None:
    progress = planned(CHAT)
    progress.take(chunk("x", [7], [5]).replace(b"[5]", value))
    assert not progress.can_resume
    assert (progress.why_not, list(progress.prompt), list(progress.ids)) == ("unreadable", [], [])
    assert progress.held_bytes == 0


@pytest.mark.parametrize("number", [b"4294967296", b"99999999999", b"9" * 5000])
@pytest.mark.parametrize("before", [0, 1])  # the form is known from the first event on
def test_an_invalid_token_id_ends_resumability_and_nothing_else(number: bytes, before: int) -> None:
    progress = planned(CHAT)
    progress.take(chunk("x", [7], [5]))
    for _ in range(before):
        progress.take(chunk("y", [8]))
    event = chunk("z", [9])
    assert progress.take(event.replace(b"[9]", b"[%b]" % number)) == event.replace(b"[9]", b"null")
    assert (progress.why_not, list(progress.prompt), list(progress.ids)) == ("unreadable", [], [])


@pytest.mark.parametrize("path", [CHAT, TARGET])
@pytest.mark.parametrize("choices", [b"7", b"true", b'"x"', b'{"content":"a"}', b"[null]", b"[1]", b'["a"]'])
def test_an_event_without_a_valid_choice_passes_a_continuation_unchanged(path: bytes, choices: bytes) -> None:
    progress = planned(path, prompt="hi")
    progress.take(chunk("x", [7], [5]))
    progress.continuation_body(0)
    event = b'data: {"choices":%b}\n\n' % choices
    assert progress.rewritten(progress.take(event), sends_usage=True) == event


def chunk(text: str, ids: list[int], prompt: list[int] | None = None, ends: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": ends, "token_ids": ids}
    document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [choice]}
    if prompt is not None:
        document["prompt_token_ids"] = prompt
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


@given(
    st.lists(st.tuples(st.text(max_size=6), st.integers(0, 2**31)), min_size=1, max_size=12),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=20),
    st.integers(0, 40),
)
def test_no_character_is_lost_or_sent_twice(tokens: list[tuple[str, int]], prompt: list[int], limit: int) -> None:
    progress = planned(max_tokens=limit)
    sent = b"".join(
        progress.take(chunk(text, [number], prompt if at == 0 else None)) for at, (text, number) in enumerate(tokens)
    )
    sure = max((at + 1 for at, (text, _) in enumerate(tokens) if text), default=0)
    assert progress.can_resume
    assert progress.left(0) == max(0, limit - sure)
    assert progress.left(len(prompt) + sure + 1) == min(1, max(0, limit - sure))
    assert progress.target == (TARGET if sure else CHAT)
    body = body_of(progress)
    assert body.get("prompt") == ([*prompt, *(number for _, number in tokens[:sure])] if sure else None)
    line = "".join(text for text, _ in tokens[:sure])
    found = [msgspec.json.decode(event[6:]) for event in sent.split(b"\n\n") if event]
    assert "".join(one["choices"][0]["delta"]["content"] for one in found) == line
    assert all(one["choices"][0]["token_ids"] is None for one in found)


def test_text_that_looks_like_token_ids_is_passed_to_the_client() -> None:
    progress = planned()
    text = '"token_ids":[1,2],"prompt_token_ids":[3],"finish_reason":"stop","text":"'
    event = chunk(text, [7], [1])
    passed = progress.take(event)
    assert msgspec.json.decode(passed[6:])["choices"][0]["delta"]["content"] == text
    assert (list(progress.ids), progress.finished) == ([7], False)


@pytest.mark.parametrize("comment", [b": ping\n\n", b": {}\n\n"])
def test_a_comment_before_its_first_event_does_not_end_what_could_go_on(comment: bytes) -> None:
    progress = planned()
    assert progress.take(comment) == comment
    assert (progress.why_not, progress.can_resume) == ("", False)
    for event in events_of("chat-ids-stream")[:3]:
        assert comment in progress.take(comment + event)
    assert progress.can_resume
    assert progress.why_not == ""


def test_tool_calls_reasoning_or_a_refusal_make_a_stream_not_resumable() -> None:
    for delta in (
        {"content": None, "tool_calls": [{"index": 0}]},
        {"reasoning": "so"},
        {"reasoning_content": "so"},
        {"refusal": "no"},
    ):
        progress = planned()
        progress.take(chunk("a", [1], [1]))
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [2]}
        progress.take(b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n")
        assert (progress.can_resume, progress.why_not) == (False, "tools_or_reasoning")


def test_kept_token_ids_are_bounded() -> None:
    body = msgspec.json.encode(ASKED)
    progress = ExactProgress(plan(CHAT, body), body, tokens_max=10)
    progress.take(chunk("a", [1], list(range(8))))
    assert progress.can_resume
    progress.take(chunk("b", [1, 2]))
    assert (progress.can_resume, progress.why_not, progress.held_bytes) == (False, "too_long", 0)
    assert TOKENS_MAX >= 1 << 17


def test_a_continuation_reads_as_the_first_stream() -> None:
    progress = planned()
    progress.take(chunk("one", [1], [10, 11]))
    progress.continuation_body(0)
    choice = {"index": 0, "text": " two", "logprobs": None, "finish_reason": None, "stop_reason": None}
    document = {"id": "cmpl-9", "object": "text_completion", "created": 99, "model": "m", "choices": [choice]}
    rewritten = progress.rewritten(b"data: " + msgspec.json.encode(document) + b"\n\n", sends_usage=True)
    body = msgspec.json.decode(rewritten.removeprefix(b"data: "))
    assert (body["id"], body["created"], body["object"]) == ("chatcmpl-1", 5, "chat.completion.chunk")
    assert body["choices"][0]["delta"] == {"content": " two"}
    end = progress.rewritten(b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n', sends_usage=True)
    usage, done = end.split(b"\n\n")[:2]
    fields = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert msgspec.json.decode(usage[6:])["usage"] == fields
    assert done == b"data: [DONE]"
    assert progress.end(sends_usage=True) == b""  # its connection broke just then: nothing is missing
    quiet = planned()
    quiet.take(chunk("one", [1], [10, 11]))
    quiet.continuation_body(0)
    assert quiet.rewritten(b"data: [DONE]\n\n", sends_usage=False) == b"data: [DONE]\n\n"


@pytest.mark.parametrize("kind", [ExactProgress, HopProgress])
def test_a_chat_without_any_output_is_sent_again(kind: type[ExactProgress]) -> None:
    """Its first tokens may be what the model thinks, or open that: to tell apart is for who reads chats, and a
    completion would say all of it as the answer."""

    def told(delta: dict[str, Any], ids: list[int] | None, name: str) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": ids}
        document = {"id": name, "created": 5, "model": "m", "choices": [choice], "prompt_token_ids": [10, 11]}
        return b"data: " + msgspec.json.encode(document) + b"\n\n"

    begins = {"role": "assistant", "content": ""}
    progress = of(kind, stop="end", seed=3)
    for seam in (1, 2):
        progress.take(told(begins, None, "first"))
        progress.take(told({}, [1], "first"))
        assert progress.can_resume
        assert progress.target == CHAT
        asked = {**ASKED, "stop": "end", "seed": 3, "return_token_ids": True, "include_stop_str_in_output": True}
        assert body_of(progress) == asked
        assert (progress.resumed, list(progress.ids)) == (seam, [])
    assert progress.rewritten(progress.take(told(begins, None, "second")), sends_usage=True) == b""
    thought = progress.rewritten(progress.take(told({"reasoning": "hm"}, [1, 2], "second")), sends_usage=True)
    document = msgspec.json.decode(thought.removeprefix(b"data: "))
    assert (document["id"], document["choices"][0]["delta"]) == ("first", {"reasoning": "hm"})
    assert (progress.why_not, progress.usage) == ("tools_or_reasoning", Usage(2, 2))
    assert progress.held_bytes < 40, "its request is of no use any more"


def test_chat_sent_again_that_then_has_text_continues_from_that_text() -> None:
    progress = planned(max_tokens=5)
    progress.take(chunk("", [1], [10]))
    progress.continuation_body(0)
    said = [
        progress.rewritten(progress.take(event), sends_usage=True) for event in (chunk("", [], [10]), chunk("a", [1]))
    ]
    assert msgspec.json.decode(said[1][6:])["choices"][0]["delta"] == {"content": "a"}
    assert progress.held_bytes < 20, "its request is not needed any more"
    body = body_of(progress)
    assert (progress.target, body["prompt"], body["max_tokens"]) == (TARGET, [10, 1], 4)


def test_only_the_missing_parts_of_the_end_are_sent_after_a_break() -> None:
    """A connection may break behind the usage, or behind the last word and before the end of its framing."""
    usage = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}\n\n'
    done = b"data: [DONE]\n\n"
    for one, lacks_usage, lacks_done in ((b"", True, True), (usage, False, True), (usage + done, False, False)):
        progress = planned()
        progress.take(chunk('data: [DONE] "choices":[]', [1], [10]))
        progress.take(chunk("two", [2], ends="length"))
        assert progress.take(one) == one
        end = progress.end(sends_usage=True)
        assert (b'"usage"' in end, b"[DONE]" in end) == (lacks_usage, lacks_done)


def test_a_stream_that_broke_at_its_token_limit_is_ended_with_reason_length() -> None:
    progress = planned(max_tokens=1)
    progress.take(chunk("one", [1], [10]))
    assert progress.left(0) == 0
    assert msgspec.json.decode(progress.at_limit()[6:])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("named", [{}, {"include_stop_str_in_output": False}, {"include_stop_str_in_output": True}])
def test_stop_strings_are_asked_for_as_part_of_the_text(named: dict[str, bool]) -> None:
    body = msgspec.json.encode({**ASKED, "stop": ["end", "fin"], **named})
    planned = plan(CHAT, body)
    asked = asking(body, planned)
    assert asked.count(b'"include_stop_str_in_output"') == 1
    document = msgspec.json.decode(asked)
    assert (document["return_token_ids"], document["include_stop_str_in_output"]) == (True, True)
    assert planned.hides_stop is not named.get("include_stop_str_in_output", False)
    progress = ExactProgress(planned, body)
    progress.take(chunk("one", [1], [10]))
    body_on = body_of(progress)
    assert (body_on["stop"], body_on["include_stop_str_in_output"]) == (["end", "fin"], True)


def test_text_held_back_for_a_stop_comes_with_the_end_at_the_token_limit() -> None:
    progress = planned(max_tokens=1, stop="nevermore")
    events = progress.apply_stops(chunk("one", [1], [10]))
    assert msgspec.json.decode(progress.visible(progress.take(events))[6:])["choices"][0]["delta"]["content"] == ""
    end = msgspec.json.decode(progress.at_limit()[6:])["choices"][0]
    assert (end["delta"]["content"], end["finish_reason"]) == ("one", "length")


def test_min_tokens_of_a_continuation_is_reduced_by_the_tokens_already_sent() -> None:
    progress = planned(min_tokens=3)
    progress.take(chunk("one", [1], [10]))
    assert body_of(progress)["min_tokens"] == 2


@given(
    st.lists(st.tuples(st.sampled_from(("", "a", "sea", "\U0001f30a", '"token_ids":null')), st.integers(0, 2**31)),
             min_size=1, max_size=12),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=20),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 4),
)  # fmt: skip
def test_a_stream_can_be_continued_from_the_ids_of_all_its_events_so_far(
    tokens: list[tuple[str, int]], prompt: list[int], engine_dies: int, region_dies: int, joined: int
) -> None:
    """An engine dies under a region that goes on from another, and then the region: the tier above has, at each event,
    the ids of exactly the text that its client has."""
    below, above = of(HopProgress, max_tokens=99), of(ExactProgress, max_tokens=99)

    def text_at(at: int) -> bytes:
        text, number = tokens[at]
        choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": [number], "prompt_token_ids": None}
        return b"data: " + msgspec.json.encode({"id": "cmpl-2", "choices": [choice]}) + b"\n\n"

    first = [chunk(text, [n], None if at else prompt) for at, (text, n) in enumerate(tokens)][: max(1, engine_dies)]
    events = [below.take(b"".join(first[at : at + joined])) for at in range(0, len(first), joined)]
    line = b"".join(first)
    sure = sum(1 for _ in line.split(b"\n\n")[:-1])
    while sure and not tokens[sure - 1][0]:
        sure -= 1
    below.continuation_body(0)
    rest = [text_at(at) if sure else chunk(tokens[at][0], [tokens[at][1]]) for at in range(sure, len(tokens))]
    events += [below.rewritten(below.take(event), sends_usage=False) for event in rest]
    found = [event + b"\n\n" for event in b"".join(events).split(b"\n\n") if event][: max(1, region_dies)]
    passed = [msgspec.json.decode(above.take(event)[6:])["choices"][0] for event in found]
    assert above.why_not == ""
    if above.target == CHAT:
        assert not any(one["delta"]["content"] for one in passed)
        return
    known = msgspec.json.decode(above.continuation_body(0))["prompt"]
    assert known[: len(prompt)] == prompt
    whole = "".join(one["delta"]["content"] for one in passed)
    count = len(known) - len(prompt)
    assert known[len(prompt) :] == [number for _, number in tokens[:count]]
    assert "".join(text for text, _ in tokens[:count]) == whole
    assert all(one["token_ids"] is None for one in passed)


@pytest.mark.parametrize("kind", [ExactProgress, HopProgress])
def test_a_stream_without_token_ids_keeps_no_request_and_cannot_resume(kind: type[ExactProgress]) -> None:
    progress = of(kind)
    progress.take(chunk("one", []).replace(b"[]", b"null"))
    assert (progress.why_not, progress.held_bytes) == ("untold", 0)


def test_text_without_token_ids_makes_a_stream_not_resumable() -> None:
    """Else it would be said again."""
    progress = planned()
    progress.take(chunk("one", [1], [10]))
    progress.take(chunk("two", [2]).replace(b"[2]", b"null"))
    assert (progress.can_resume, progress.why_not) == (False, "untold")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("", "a", " sea", "\U0001f30a", '"', "\\", '","x":"', '"token_ids":[7]', "]}\n\n")),
            st.lists(st.integers(0, 2**31), min_size=1, max_size=2), st.booleans(),
        ),
        min_size=1, max_size=12,
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_the_fast_path_and_the_full_parser_agree_on_token_ids(
    tokens: list[tuple[str, list[int], bool]], joined: int
) -> None:
    """Events in the form of the one before, or in another; alone, or several at once."""
    short, long = planned(), planned()
    events = [
        chunk(text, ids, None if at else [1, 2]).replace(b"null", b" null" if spaced else b"null")
        for at, (text, ids, spaced) in enumerate(tokens)
    ]
    for at in range(0, len(events), joined):
        long._form = None
        together = b"".join(events[at : at + joined])
        assert short.take(together) == long.take(together)
        assert (short.ids, short._sure, short._tokens_left) == (long.ids, long._sure, long._tokens_left)
