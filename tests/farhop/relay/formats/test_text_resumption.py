"""What is kept of a stream's text, and how it is written on: by properties of any cut, and of what engines write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farhop.balance.machine import Usage
from farhop.relay.formats.resumption import CHAT, TARGET, Unresumable, plan
from farhop.relay.formats.text_resumption import TEXT_BYTES_MAX, TextProgress, counting

SAID: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
ASKED: dict[str, Any] = {"model": "m", "prompt": "once", "stream": True}


def known(path: bytes = CHAT, *, sends_usage: bool = False, **more: Any) -> TextProgress:
    body = msgspec.json.encode({**(SAID if path == CHAT else ASKED), **more})
    return TextProgress(plan(path, body, text=True), body, sends_usage=sends_usage)


def body_of(progress: TextProgress) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(progress.continuation_body(0))
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
    line = "".join(texts)
    assert progress.can_resume is not line.endswith("\ufffd")
    tokens = max((at + 1 for at, text in enumerate(texts) if text), default=0)
    assert progress.tokens == tokens
    assert progress.left(0) == max(0, limit - tokens)
    assert progress.carried_by == ("solid" if line == line.strip() else "text")
    body = body_of(progress)
    assert body["max_tokens"] == max(0, limit - tokens)
    if line:
        assert body["messages"] == [*SAID["messages"], {"role": "assistant", "content": line}]
        assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    else:
        assert body["messages"] == SAID["messages"]  # no text came: the request is sent unchanged


@given(st.text(min_size=1, max_size=20))
def test_a_completion_goes_on_behind_its_prompt(answer: str) -> None:
    progress = known(TARGET, min_tokens=4, max_tokens=20, seed=3)
    document = {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "text": answer, "finish_reason": None}]}
    progress.take(b"data: " + msgspec.json.encode(document) + b"\n\n")
    body = body_of(progress)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["seed"]) == ("once" + answer, 19, 3, 3)
    assert progress.carried_by == "solid"  # no template reads it
    assert progress.target == TARGET


def test_a_continuations_token_limit_is_reduced_under_either_name() -> None:
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
    unbounded = known(TARGET, max_tokens=None)  # which engines read as no limit
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
def test_a_request_that_cannot_be_continued_from_text_is_refused_by_its_reason(
    path: bytes, more: dict[str, Any], reason: str
) -> None:
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
def test_events_that_make_a_stream_not_resumable(event: bytes, reason: str) -> None:
    progress = known()
    progress.take(OPENING + event)
    assert not progress.can_resume
    assert progress.hindrance == reason


@pytest.mark.parametrize(
    "comment", [b": ping\n\n", b":\r\n\r\n", b': {"index":0,"content":"no","finish_reason":"stop"}\n\n']
)
def test_comments_in_a_stream_do_not_affect_its_resumption(comment: bytes) -> None:
    """Engines that take long to begin send some first: the stream's name comes with what says something."""
    progress = known()
    for events in (comment, comment + OPENING, chunk("The"), comment, chunk(" sea"), comment[:-1] + chunk(" is")):
        assert progress.adds(events) or progress.take(events) == events
        assert progress.why_not == ""
    assert progress.can_resume
    assert not progress.finished
    assert progress.tokens == 3
    assert body_of(progress)["messages"][-1]["content"] == "The sea is"
    assert b'"id":"chat-1"' in progress.at_limit()


def test_a_stream_ending_in_half_a_character_is_resumable_after_the_next_token() -> None:
    """So that a stream that is to leave waits for it, and is not given up for good."""
    progress = known()
    progress.take(OPENING + chunk("a\ufffd"))
    assert (progress.can_resume, progress.hindrance, progress.why_not) == (False, "character", "")
    progress.take(chunk("b"))
    assert (progress.can_resume, progress.hindrance) == (True, "")


def test_a_stream_that_can_no_longer_be_continued_keeps_no_text() -> None:
    progress = known()
    progress.take(OPENING + chunk("x" * (TEXT_BYTES_MAX + 1)))
    assert progress.held_bytes == 0


@pytest.mark.parametrize(
    ("begins", "end"),
    [
        ("data: ", "\n"),
        ("data:", "\n"),
        ("data: ", "\r\n"),
        (": ping\ndata: ", "\n"),
        ("id: 1\nevent: message\ndata:", "\r\n"),
    ],
)
def test_a_continuation_reads_as_the_first_stream_and_is_counted_as_one(begins: str, end: str) -> None:
    """Whatever of what server-sent events may be its engine makes them: sse-starlette ends lines with CR LF."""
    progress = known(sends_usage=True)
    progress.take(OPENING + chunk("The") + chunk("") + chunk(" sea"))
    assert progress.tokens == 3  # one of them ended within a character
    progress.continuation_body(0)
    assert progress.usage is None
    more = [OPENING, chunk(" is"), chunk(" wide", "length")]
    later = [one.replace(b'"chat-1"', b'"chat-2"').replace(b'"created":5', b'"created":9') for one in more]
    later = [one[:-3] + b',"usage":{"prompt_tokens":20,"completion_tokens":1}}\n\n' for one in later]
    later.append(b"data: [DONE]\n\n")
    later = [begins.replace("\n", end).encode() + one[6:-2] + 2 * end.encode() for one in later]
    for one in later[:-1]:
        progress.take(one)
    progress.set_usage(Usage(20, 2))
    rewritten = progress.rewritten(b"".join(later), sends_usage=True)
    documents = [msgspec.json.decode(one[6:]) for one in rewritten.split(b"\n\n") if one and b"[DONE]" not in one]
    assert {(one["id"], one["created"]) for one in documents} == {("chat-1", 5)}
    assert [one["choices"][0]["delta"]["content"] for one in documents[:-1]] == [" is", " wide"]
    assert not any("role" in one["choices"][0]["delta"] for one in documents[:-1])
    assert not any(one["usage"] for one in documents[:-1])
    assert documents[-1]["usage"] == {"prompt_tokens": 17, "completion_tokens": 5, "total_tokens": 22}
    assert rewritten.endswith(b"data: [DONE]\n\n")
    assert progress.usage == Usage(17, 5)
    assert progress.recomputed == 20


class Engine:
    """One that writes a given text in tokens of so many bytes, the last of which ends it; a token that ends within a
    character has its text with the next one's. What it reads back it takes for `reads_more` tokens more."""

    def __init__(self, text: str, size: int, reads_more: int) -> None:
        line = text.encode()
        self.pieces = [line[at : at + size] for at in range(0, len(line), size)]
        self._reads_more = reads_more

    def events(self, body: bytes) -> list[tuple[bytes, Usage]]:
        """A stream's, with the usage so far, told with each where the body asks for that."""
        document = msgspec.json.decode(body)
        last = document["messages"][-1]
        before = last["content"].encode() if last["role"] == "assistant" else b""
        done = next(n for n in range(len(self.pieces) + 1) if b"".join(self.pieces[:n]) == before)
        assert document["max_tokens"] == len(self.pieces) - done
        each = document.get("stream_options", {}).get("continuous_usage_stats", False)
        prompt_tokens = PROMPT_TOKENS + done + (self._reads_more if done else 0)
        made, begun = [(OPENING, Usage(prompt_tokens, 0))], b""
        for n, piece in enumerate(self.pieces[done:], 1):
            begun += piece
            try:
                shown, begun = begun.decode(), b""
            except UnicodeDecodeError:
                shown = ""
            ends = "length" if done + n == len(self.pieces) else None
            made.append((chunk(shown, ends), Usage(prompt_tokens, n)))
        return [(with_usage(e, u.completion_tokens, prompt_tokens) if each else e, u) for e, u in made]


PROMPT_TOKENS = 7


@given(
    st.text("ab é海🌊", min_size=1, max_size=30),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=4),
    st.booleans(),
    st.integers(0, 3),
)
@example("abé🌊éé🌊a éb海aé海aé aéé aé  ", 1, [(33, True), (3, False)], False, 0)  # a character cut in two at the first
def test_usage_is_that_of_an_unbroken_stream_wherever_it_breaks(
    text: str, size: int, breaks: list[tuple[int, bool]], each: bool, reads_more: int
) -> None:
    """Over two tiers: engines die under a region, which goes on itself, and regions under a global balancer. `each`:
    the engine is asked for usage with each event, and only then is known that it reads its text otherwise."""
    engine = Engine(text, size, reads_more if each else 0)
    limit = len(engine.pieces)
    body = msgspec.json.encode({**SAID, "max_tokens": limit})
    made = plan(CHAT, body, text=True)
    above, region = (TextProgress(made, body, sends_usage=True) for _ in range(2))
    region.strips = False
    below: TextProgress | None = region
    coming, broken = engine.events(counting(body) if each else body), iter(breaks)
    until, of_region = next(broken, (None, False))
    while True:
        usage = None
        for event, usage in coming[:until]:
            passed = event
            if below is not None:
                below.set_usage(usage)
                passed = below.take(event)
                passed = below.rewritten(passed, sends_usage=True) if below.resumed and passed else passed
            if passed and not above.adds(passed):
                above.take(passed)
        if above.finished:
            break
        goes_on = below if of_region and below is not None else above
        if not goes_on.can_resume:
            return  # only its end is missing, or it had not begun
        if goes_on is above:
            below = None  # a continuation passes a region unchanged
        coming = engine.events(goes_on.continuation_body(0))
        until, of_region = next(broken, (None, False))
    assert usage is not None
    ended = usage if below is None or not below.resumed else below.usage
    above.set_usage(ended)
    assert above.usage == Usage(PROMPT_TOKENS, limit)


def test_a_stream_without_its_usage_can_end_only_if_the_client_wants_none() -> None:
    for tells, at_end in ((False, True), (True, False)):
        progress = known(sends_usage=tells)
        progress.take(OPENING + chunk("The sea", "stop"))
        assert not progress.can_resume
        assert progress.can_end is at_end
        assert progress.hindrance == ("" if at_end else "usage")


def test_stop_strings_are_asked_for_in_both_words() -> None:
    progress = known(stop=["end"])
    progress.take(OPENING + chunk("the e"))
    body = body_of(progress)
    assert (body["include_stop_str_in_output"], body["no_stop_trim"], body["stop"]) == (True, True, ["end"])


def with_usage(event: bytes, completion_tokens: int, prompt_tokens: int = 9) -> bytes:
    """An event as an engine writes it that is asked for usage with each."""
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens}
    found = msgspec.json.encode({**usage, "completion_tokens": completion_tokens, "prompt_tokens_details": {"n": 1}})
    return event[:-3] + b',"usage":' + found + b"}\n\n"


def test_tokens_are_counted_by_the_events_usage_if_they_have_it() -> None:
    """Of an engine that puts several into one (speculative decoding). Its client sees none of that."""
    progress = known(max_tokens=20)
    events = [OPENING, chunk('a "usage":{"completion_tokens":99}'), chunk(" b"), chunk("")]
    passed = b"".join(map(progress.take, map(with_usage, events, (0, 3, 7, 8))))
    assert passed == b"".join(events)
    assert (progress.tokens, progress.left(0)) == (7, 13)  # the eighth has no text yet, and is computed again
    assert body_of(progress)["max_tokens"] == 13
    assert progress.recomputed == 1
    progress.take(with_usage(chunk(" c"), 4, 16))
    assert progress.tokens == 11


def test_a_client_that_wants_usage_with_each_event_gets_that_of_the_whole_behind_a_seam() -> None:
    each = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    progress = known(sends_usage=True, **each)
    first = with_usage(OPENING, 0) + with_usage(chunk("a"), 3)
    assert progress.take(first) == first
    progress.continuation_body(0)
    second = with_usage(chunk(" b"), 2, 12).replace(b'"chat-1"', b'"chat-2"')
    rewritten = progress.rewritten(progress.take(second), sends_usage=True)
    document = msgspec.json.decode(rewritten[6:])
    assert document["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


@pytest.mark.parametrize(("completion_tokens", "packs"), [(40, True), (12, False)])
def test_an_engine_that_packs_tokens_is_known_by_its_usage(completion_tokens: int, packs: bool) -> None:
    progress = known(max_tokens=50)
    progress.take(OPENING + b"".join(chunk(f"{n} ") for n in range(10)) + chunk("", "stop"))
    progress.set_usage(Usage(9, completion_tokens))
    assert progress.packs is packs
    body = msgspec.json.decode(counting(msgspec.json.encode(SAID)))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["messages"] == SAID["messages"]
