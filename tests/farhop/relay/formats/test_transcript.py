"""The text of an answer is read to the byte, however it was written and cut; or nothing is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_pages import ENGINES, Page
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.prefix.chain import chain
from farhop.relay.formats import bodies
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import Prompt
from farhop.relay.formats.transcript import TEXT_BYTES_MAX, AnswerChain, Transcript, answer_chain
from farhop.relay.upstream import tap
from farhop.relay.upstream.tap import BodyTap, StreamTap

RUN = settings(max_examples=200, deadline=None, derandomize=True)
SEED = 7
# No lone surrogates: JSON has no encoding of them that a client would accept.
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ['"content":"', '\\"text": "', "\\", '"', "\U0001f600", "\n\n", "data: [DONE]", '{"content":"x"}', "\u2028"]
)
SAID = st.lists(TEXT, max_size=8)
EVENTS_BESIDE: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"content": None},
    {},
    {"reasoning_content": 'the "content":"of this" is thought'},
    {"content": None, "reasoning_content": "hm"},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"content":"x","text": "y"}', "name": "content"}}]},
]
LOGPROBS = [None, {"content": [{"token": '"content":"', "logprob": -0.1, "bytes": [34], "top_logprobs": []}]}]


def chat(text: str = "hi", **more: Any) -> Prompt:
    return read(Kind.CHAT, messages=[{"role": "user", "content": text}], **more)


def read(kind: Kind, **body: Any) -> Prompt:
    return bodies.read(kind, json.dumps({"model": "m", **body}).encode())


def going_on(prompt: Prompt) -> AnswerChain:
    made = answer_chain(prompt, chain(prompt.canonical, SEED), SEED)
    assert made is not None
    return made


def event(choice: dict[str, Any], *, plain: bool, spaced: bool) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    document = {"id": "1", "choices": [{"index": 0, **choice}], "usage": None}
    return b"data: " + json.dumps(document, ensure_ascii=not plain, separators=separators).encode()


def stream_of(kind: Kind, text: list[str], data: Any) -> bytes:
    """A stream that says this, in one of many ways."""
    events: list[bytes] = [b": ping"]
    for piece in text:
        how = {"plain": data.draw(st.booleans()), "spaced": data.draw(st.booleans())}
        logprobs = data.draw(st.sampled_from(LOGPROBS))
        if kind is Kind.COMPLETION:
            events.append(event({"text": piece, "logprobs": None}, **how))
            continue
        events.append(event({"delta": data.draw(st.sampled_from(EVENTS_BESIDE))}, **how))
        events.append(event({"delta": {"content": piece}, "logprobs": logprobs}, **how))
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    return b"".join(one + end for one in [*events, usage, b"data: [DONE]"])


def read_back(stream: bytes, cuts: list[int], of: AnswerChain) -> tuple[tuple[int, ...], int]:
    made = Transcript(of)
    through = StreamTap(True, made)
    for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        through.feed(stream[a:b])
    through.finish()
    return made.result()


@given(st.sampled_from([Kind.CHAT, Kind.COMPLETION]), SAID, st.integers(0, 6000), st.data())
@RUN
def test_transcript_of_a_stream_is_exact_however_it_is_written_and_cut(
    kind: Kind, answer: list[str], prompt_bytes: int, data: Any
) -> None:
    asked = "x" * max(1, prompt_bytes)
    prompt = chat(asked) if kind is Kind.CHAT else read(kind, prompt=asked)
    stream = stream_of(kind, answer, data)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    text = "".join(answer)
    assert prompt.answer is not None
    expected = chain(prompt.canonical + prompt.answer.opening + text.encode(), SEED) if text else ()
    assert read_back(stream, cuts, going_on(prompt)) == (expected, len(text.encode()))


def test_a_pair_of_surrogates_may_come_in_two_events() -> None:
    halves = (b"\\ud83d", b"\\ude00")
    stream = b"".join(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % half for half in halves)
    prompt = chat("y" * 300)
    assert prompt.answer is not None
    assert read_back(stream, [], going_on(prompt)) == (
        chain(prompt.canonical + prompt.answer.opening + "\U0001f600".encode(), SEED),
        4,
    )


@pytest.mark.parametrize("text", ["\\ud83d", "\\ude00 \\ud83d", "\\x", "\\u12"])
def test_what_is_no_text_is_not_read(text: str) -> None:
    stream = b'data: {"choices":[{"delta":{"content":"good"}}]}\n\n'
    stream += b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()
    assert read_back(stream, [], going_on(chat())) == ((), 0)


def test_beyond_its_bound_nothing_is_read_and_nothing_kept() -> None:
    made = Transcript(going_on(chat()))
    through = StreamTap(False, made)
    chunk = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"word" * 256)
    for _ in range(TEXT_BYTES_MAX // 1024):
        through.feed(chunk)
    assert made.result()[1] == TEXT_BYTES_MAX
    through.feed(chunk)
    assert made.result() == ((), 0)
    through.feed(chunk)
    assert (made.pieces, made.result()) == (b"", ((), 0))


def test_an_event_too_long_to_buffer_gives_no_transcript() -> None:
    made = Transcript(going_on(chat()))
    through = StreamTap(False, made)
    through.feed(b'data: {"choices":[{"delta":{"content":"before"}}]}\n\n')
    through.feed(b'data: {"long":"' + b"x" * tap.EVENT_BYTES_MAX)
    through.feed(b'","choices":[{"delta":{"content":"after"}}]}\n\n')
    assert made.result() == ((), 0)


def _body_told(document: bytes, prompt: Prompt) -> tuple[tuple[int, ...], int]:
    made = Transcript(going_on(prompt))
    through = BodyTap(made)
    for at in range(0, len(document), 1000):
        through.feed(document[at : at + 1000])
    through.finish()
    return made.result()


@given(st.sampled_from([Kind.CHAT, Kind.COMPLETION]), TEXT, st.booleans())
@RUN
def test_a_body_is_read(kind: Kind, answer: str, plain: bool) -> None:
    prompt = chat("x" * 300) if kind is Kind.CHAT else read(kind, prompt="x" * 300)
    message = {"role": "assistant", "content": answer, "reasoning_content": None, "tool_calls": []}
    choice = {"index": 0, "message": message} if kind is Kind.CHAT else {"index": 0, "text": answer}
    document = json.dumps({"choices": [choice | {"logprobs": LOGPROBS[1]}]}, ensure_ascii=not plain).encode()
    assert prompt.answer is not None
    text = answer.encode()
    expected = chain(prompt.canonical + prompt.answer.opening + text, SEED) if text else ()
    assert _body_told(document, prompt) == (expected, len(text))


@pytest.mark.parametrize(
    "document",
    [
        b'{"error":{"message":"no"}}',
        b'{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}}]}',
        b'{"choices":[{"message":{"content":[{"type":"text","text":"x"}]}}]}',
        b'{"choices":[{"message":{"content":"a"}},{"message":{"content":"b"}}]}',
        b'{"choices":[{"message":{"content":"\\ud800"}}]}',
        b'{"choices":[{"message":{"content":"' + b"x" * (TEXT_BYTES_MAX + 1) + b'"}}]}',
        b'{"choices":[{"message":{"content":"x"}}],"more":"' + b"x" * tap.BODY_BYTES_MAX + b'"}',
        b'{"choices":[{"mess',
        b"[]",
    ],
)
def test_a_body_of_another_format_gives_no_transcript(document: bytes) -> None:
    assert _body_told(document, chat()) == ((), 0)


def test_a_pending_transcript_keeps_less_than_one_block_of_its_prompt() -> None:
    kept = going_on(chat("x" * 100_000))
    assert len(kept.tail.remainder) < 4096 + 20
    assert answer_chain(chat(n=2), (), SEED) is None


def test_a_transcript_does_not_show_its_text_in_repr() -> None:
    made = Transcript(going_on(chat("secret" * 10)))
    made.feed(b'{"content":"a secret"}')
    assert "secret" not in repr(made)


KINDS = {"chat-cached": Kind.CHAT, "messages-cached": Kind.MESSAGES, "chat-stream-usage": Kind.CHAT,
         "completion-stream-usage": Kind.COMPLETION, "responses": Kind.RESPONSES, "responses-stream": Kind.RESPONSES,
         "chat-cached-stream": Kind.CHAT, "messages-cached-stream": Kind.MESSAGES}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", KINDS)
def test_transcripts_of_real_engines_answers_are_complete(engine: str, name: str) -> None:
    page = Page(engine, name)
    prompt = bodies.read(KINDS[name], json.dumps(page.asked).encode())
    transcript = Transcript(going_on(prompt))
    made = StreamTap(True, transcript) if page.streams else BodyTap(transcript)
    made.feed(page.body)
    made.finish()
    nodes, n_bytes = transcript.result()
    assert n_bytes > 6  # six tokens, and none of this tokenizer's words in them is a single letter
    assert nodes[: len(chain(prompt.canonical, SEED)) - 1] == chain(prompt.canonical, SEED)[:-1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", ["chat", "messages"])
def test_stream_has_the_text_of_the_whole_answer(engine: str, path: str) -> None:
    seen = []
    for name in (f"{path}-cached", f"{path}-cached-stream"):
        page = Page(engine, name)
        transcript = Transcript(going_on(bodies.read(KINDS[name], json.dumps(page.asked).encode())))
        made = StreamTap(True, transcript) if page.streams else BodyTap(transcript)
        made.feed(page.body)
        made.finish()
        seen.append(transcript.result())
    assert seen[0] == seen[1] != ((), 0)
