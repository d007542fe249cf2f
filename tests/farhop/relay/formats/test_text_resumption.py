"""What is kept of a stream's text, and how it is written on: by properties of any cut, and of what engines write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.machine import Usage
from farhop.relay.formats.resumption import CHAT, TARGET, Unresumable, plan
from farhop.relay.formats.text_resumption import TEXT_BYTES_MAX, TextProgress

SAID: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
ASKED: dict[str, Any] = {"model": "m", "prompt": "once", "stream": True}


def known(path: bytes = CHAT, *, tells_usage: bool = False, **more: Any) -> TextProgress:
    body = msgspec.json.encode({**(SAID if path == CHAT else ASKED), **more})
    return TextProgress(plan(path, body, text=True), body, tells_usage=tells_usage)


def body_of(progress: TextProgress) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(progress.go_on(0))
    return found


def chunk(text: str | None, ends: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text, **more}, "logprobs": None, "finish_reason": ends}
    document = {"id": "chat-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [choice]}
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


OPENING = chunk("", role="assistant")


@given(st.lists(st.text(max_size=6), max_size=30), st.integers(1, 7), st.integers(1, 40))
def test_the_text_so_far_is_what_the_client_has(texts: list[str], together: int, limit: int) -> None:
    """However events come, one by one or several at once."""
    progress = known(max_tokens=limit)
    events = [OPENING, *map(chunk, texts)]
    for at in range(0, len(events), together):
        data = b"".join(events[at : at + together])
        assert progress.adds(data) or progress.take(data) == data
    said = "".join(texts)
    assert progress.can_resume is not said.endswith("\ufffd")
    tokens = max((at + 1 for at, text in enumerate(texts) if text), default=0)
    assert progress.tokens == tokens
    assert progress.left(0) == max(0, limit - tokens)
    assert progress.carried_by == ("solid" if said == said.strip() else "text")
    body = body_of(progress)
    assert body["max_tokens"] == max(0, limit - tokens)
    if said:
        assert body["messages"] == [*SAID["messages"], {"role": "assistant", "content": said}]
        assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    else:
        assert body["messages"] == SAID["messages"]  # nothing was said: it is asked as it was


@given(st.text(min_size=1, max_size=20))
def test_a_completion_goes_on_behind_its_prompt(said: str) -> None:
    progress = known(TARGET, min_tokens=4, max_tokens=20, seed=3)
    document = {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "text": said, "finish_reason": None}]}
    progress.take(b"data: " + msgspec.json.encode(document) + b"\n\n")
    body = body_of(progress)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["seed"]) == ("once" + said, 19, 3, 3)
    assert progress.carried_by == "solid"  # no template looks at it
    assert progress.target == TARGET


def test_limits_by_either_name_and_by_none() -> None:
    progress = known(max_tokens=None, max_completion_tokens=7)
    progress.take(OPENING + chunk("x"))
    body = body_of(progress)
    assert (body["max_completion_tokens"], body.get("max_tokens")) == (6, None)
    free = known(max_tokens=None)
    free.take(OPENING + chunk("x"))
    assert body_of(free)["max_tokens"] is None
    assert free.left(0) > 0
    short = known(TARGET)
    short.take(b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n')
    assert body_of(short)["max_tokens"] == 15  # a completion's default is 16
    unbounded = known(TARGET, max_tokens=None)  # which engines take for no limit
    unbounded.take(
        b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n' * 20
    )
    assert unbounded.left(0) > 16
    assert body_of(unbounded)["max_tokens"] is None


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        (TARGET, {"prompt": [1, 2]}, "prompt_ids"),
        (CHAT, {"input_ids": [1, 2]}, "prompt_ids"),
        (CHAT, {"messages": [{"role": "assistant", "content": "I"}]}, "turns"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False}, "turns"),
        (CHAT, {"add_generation_prompt": False}, "turns"),
        (CHAT, {"messages": []}, "unreadable"),
        (CHAT, {"regex": "a+"}, "structured"),
        (CHAT, {"stop_regex": "a+"}, "stop_strings"),
        (CHAT, {"n": 2}, "answers"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_what_would_not_be_honest_is_refused_by_its_reason(path: bytes, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unresumable, match=f"^{reason}$"):
        known(path, **more)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (chunk(None, tool_calls=[{"index": 0}]), "tools_or_reasoning"),
        (chunk(None, reasoning_content="so"), "tools_or_reasoning"),
        (chunk("a\ufffd"), "character"),
        (chunk("x" * (TEXT_BYTES_MAX + 1)), "too_long"),
        (chunk("x").replace(b'"x"', b'"\\ud83d"'), "unreadable"),
    ],
)
def test_what_ends_it(event: bytes, reason: str) -> None:
    progress = known()
    progress.take(OPENING + event)
    assert not progress.can_resume
    assert progress.why_not == reason


def test_what_cannot_go_on_any_more_is_not_kept() -> None:
    progress = known()
    progress.take(OPENING + chunk("x" * (TEXT_BYTES_MAX + 1)))
    assert progress.held_bytes == 0


def test_a_continuation_reads_as_the_first_stream_and_is_counted_as_one() -> None:
    progress = known(tells_usage=True)
    progress.take(OPENING + chunk("The") + chunk("") + chunk(" sea"))
    assert progress.tokens == 3  # one of them ended within a character
    progress.go_on(0)
    assert progress.usage is None
    more = [OPENING, chunk(" is"), chunk(" wide", "length")]
    later = [one.replace(b'"chat-1"', b'"chat-2"').replace(b'"created":5', b'"created":9') for one in more]
    later = [one[:-3] + b',"usage":{"prompt_tokens":20,"completion_tokens":1}}\n\n' for one in later]
    for one in later:
        progress.take(one)
    progress.heed(Usage(20, 2))
    spelled = progress.spelled(b"".join(later) + b"data: [DONE]\n\n", tells_usage=True)
    documents = [msgspec.json.decode(one[6:]) for one in spelled.split(b"\n\n") if one and b"[DONE]" not in one]
    assert {(one["id"], one["created"]) for one in documents} == {("chat-1", 5)}
    assert [one["choices"][0]["delta"]["content"] for one in documents[:-1]] == [" is", " wide"]
    assert not any("role" in one["choices"][0]["delta"] for one in documents[:-1])
    assert not any(one["usage"] for one in documents[:-1])
    assert documents[-1]["usage"] == {"prompt_tokens": 17, "completion_tokens": 5, "total_tokens": 22}
    assert spelled.endswith(b"data: [DONE]\n\n")
    assert progress.usage == Usage(17, 5)
    assert progress.recomputed == 20


def test_an_end_whose_usage_nobody_can_tell_is_none() -> None:
    for tells, at_end in ((False, True), (True, False)):
        progress = known(tells_usage=tells)
        progress.take(OPENING + chunk("The sea", "stop"))
        assert not progress.can_resume
        assert progress.can_end is at_end
        assert progress.why_not == ("" if at_end else "usage")


def test_stop_strings_are_asked_for_in_both_words() -> None:
    progress = known(stop=["end"])
    progress.take(OPENING + chunk("the e"))
    body = body_of(progress)
    assert (body["include_stop_str_in_output"], body["no_stop_trim"], body["stop"]) == (True, True, ["end"])
