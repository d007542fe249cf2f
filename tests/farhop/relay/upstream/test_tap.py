"""What passes a tap is what came in, less the usage chunk that only we asked for, however it was cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine_pages import ENGINES, LLAMA, VLLM, Page, pages
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.machine import Usage
from farhop.relay.upstream import tap
from farhop.relay.upstream.tap import BodyTap, NumberedTap, StreamTap

RUN = settings(max_examples=200, deadline=None, derandomize=True)
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
SPACED = b'data: {"id": "1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"hi"}}]}',
    b'data: {"choices":[{"delta":{"content":"say \\"usage\\": {"}}],"usage":null}',
    b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":7,"completion_tokens":1}}',
    b": ping",
    b"event: x\r\ndata: y",
    "data: \u00fc".encode(),
    b'data: {"id":"1","choices":[{"delta":{},"finish_reason":"stop"}]}',
    b"data: [DONE]",
]


def test_a_running_stream_holds_only_an_event_that_may_be_its_error() -> None:
    made = StreamTap(False)
    made.feed(b'data: {"choices":[],"prompt_token_ids":[' + b"7," * 20_000 + b"7]}\n\n")
    assert made.held_bytes == 0
    made.feed(error := b'data: {"error":{"message":"no","code":500}}\n\n')
    made.feed(b"data: [DONE]\n\n")
    assert made.held_bytes == len(error)
    made.finish()
    assert made.fault is not None


def through(stream: bytes, cuts: list[int], hide: bool) -> tuple[bytes, Usage | None]:
    made = StreamTap(hide)
    out = b"".join(made.feed(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True))
    return out + made.finish(), made.usage


@given(
    st.lists(st.sampled_from(EVENTS), max_size=6),
    st.lists(st.sampled_from(EVENTS), max_size=3),
    st.sampled_from([USAGE, SPACED]),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"]),
    st.booleans(),
    st.data(),
)
@RUN
def test_a_stream_passes_less_its_usage_chunk(
    before: list[bytes], after: list[bytes], usage: bytes, end: bytes, hide: bool, data: Any
) -> None:
    stream = b"".join(e + end for e in [*before, usage, *after])
    without = b"".join(e + end for e in [*before, *after])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    out, found = through(stream, cuts, hide)
    assert out == (without if hide else stream)
    assert found is not None
    assert found.prompt_tokens == 7


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r"])
@pytest.mark.parametrize("hide", [True, False])
def test_a_stream_cut_at_every_byte_passes_without_its_usage_chunk(end: bytes, hide: bool) -> None:
    stream = b"".join(e + end for e in [*EVENTS, USAGE, b"data: [DONE]"])
    out, found = through(stream, list(range(1, len(stream))), hide)
    assert out == (stream.replace(USAGE + end, b"") if hide else stream)
    assert found == Usage(7, 3, None)


def test_whole_events_pass_at_once_and_halves_wait() -> None:
    made = StreamTap(False)
    assert made.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert made.feed(b"data: 2\n\ndata: 3") == b"data: 2\n\n"
    assert made.feed(b"\n") == b""
    assert made.feed(b"\n") == b"data: 3\n\n"
    assert made.feed(b"data: 4") == b""
    assert made.finish() == b"data: 4"


@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("line", [b":\n\n", b"\r", b"\n\r", b": ping\r\n\r\n", b":x\n"])
def test_lines_that_say_nothing_are_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch, line: bytes, hide: bool
) -> None:
    """8 MB of them took 3 s."""
    looked: list[bytes] = []
    monkeypatch.setattr(tap, "has_usage", lambda data: looked.append(data) or b'"usage":{' in data)
    silence = line * (100_000 // len(line))
    stream = EVENTS[0] + b"\n\n" + silence + b"\n\n" + USAGE + b"\n\n" + silence
    out, usage = through(stream, list(range(1000, len(stream), 1000)), hide)
    assert out == (stream.replace(USAGE + b"\n\n", b"") if hide else stream)
    assert usage == Usage(7, 3, None)
    assert len(looked) < 2 * len(stream) / 1000 + 10


def test_a_usage_chunk_without_its_end_is_hidden_too() -> None:
    made = StreamTap(True)
    assert made.feed(USAGE) + made.finish() == b""
    assert made.usage == Usage(7, 3, None)


def test_an_endless_event_passes_in_pieces() -> None:
    made = StreamTap(True)
    long = b"data: " + b"x" * tap.EVENT_BYTES_MAX
    assert made.feed(long[:-10]) == b""
    assert made.feed(long[-10:]) == long
    assert made.feed(b"more\n\n") == b"more\n\n"


@given(st.binary(max_size=200), st.data())
@RUN
def test_a_body_passes_as_it_is(body: bytes, data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)))
    made = BodyTap()
    out = b"".join(made.feed(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True))
    assert out + made.finish() == body


def test_the_usage_of_a_body_is_read_from_its_pieces() -> None:
    made = BodyTap()
    for piece in (
        b'{"usage":{"prompt_tokens":5,',
        b'"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}',
    ):
        made.feed(piece)
    made.finish()
    assert made.usage == Usage(5, 2, 4)


USED = b'"usage":{"prompt_tokens":5,"total_tokens":5}'


@pytest.mark.parametrize(
    ("end", "usage"),
    [
        (b"]," + USED + b"}", Usage(5, 0)),
        (b"]," + USED + b', "more":[1]}', Usage(5, 0)),
        (b'],"deeper":{' + USED + b"}}", None),
        (b"{" + USED + b"}]}", None),
        (b'"\\"usage\\":{\\"prompt_tokens\\":5}"]}', None),
        (b"]," + USED + b"}" + b" " * tap.TAIL_BYTES, None),
    ],
)
def test_of_a_body_too_long_to_keep_only_the_end_is_kept(end: bytes, usage: Usage | None) -> None:
    made = BodyTap()
    made.feed(b'{"data":[')
    for _ in range(5):
        made.feed(b" " * (tap.BODY_BYTES_MAX // 4))
    assert made.held_bytes == tap.TAIL_BYTES
    for at in range(0, len(end), 7):
        made.feed(end[at : at + 7])
    made.finish()
    assert made.usage == usage
    assert made.held_bytes == 0


# -- as real engines say it (tests/pages)

STREAMS = [page for page in pages() if page.streams]
WHOLE = [page for page in pages() if page.status == 200 and page.asked and not page.streams]


def named(page: Page) -> str:
    return f"{page.engine}-{page.name}"


def used(engine: str, name: str) -> Usage | None:
    page = Page(engine, name)
    made: StreamTap | BodyTap = StreamTap(False) if page.streams else BodyTap()
    assert made.feed(page.body) + made.finish() == page.body
    return made.usage


@pytest.mark.parametrize("page", STREAMS, ids=named)
def test_an_engines_stream_passes_however_it_is_cut(page: Page) -> None:
    whole = StreamTap(True)
    passed = whole.feed(page.body) + whole.finish()
    for size in (1, 7, 1000):
        cuts = list(range(size, len(page.body), size))
        assert through(page.body, cuts, False) == (page.body, whole.usage)
        assert through(page.body, cuts, True) == (passed, whole.usage)
    assert whole.fault is None
    # Only the usage is held back, if its event has nothing else that the event before could not have held.
    events, left = page.body.split(b"\n\n"), passed.split(b"\n\n")
    missing = [n for n, event in enumerate(events) if b'"choices":[]' in event and b'"usage":{' in event]
    assert len(missing) == (page.asked.get("stream_options") is not None and b'"choices":[]' in page.body)
    for n in missing:
        more = re.sub(rb'^.*"usage":\{([^{}]|\{[^{}]*\})*\}', b"", events.pop(n))
        assert more.startswith((b',"system_fingerprint":', b',"timings":', b"}"))
        if not more.startswith(b',"system_fingerprint"') or b'"system_fingerprint"' not in events[n - 1]:
            events[n - 1] = events[n - 1].removesuffix(b"}") + more
    assert left == events


@pytest.mark.parametrize("engine", ENGINES)
def test_stream_without_usage_equals_the_engines_own(engine: str) -> None:
    """But for ids and times it is the stream that the engine writes to who does not ask for usage."""
    numbers = re.compile(rb'"id":"[^"]*"|"created":\d+|(?<=":)[\d.]+(?=[,}])')
    direct, asked, made = Page(engine, "chat-stream"), Page(engine, "chat-stream-usage"), StreamTap(True)
    seen = made.feed(asked.body) + made.finish()
    assert numbers.sub(b"", seen) == numbers.sub(b"", direct.body)
    assert (b'"timings":' in seen, b'"usage":{' in seen) == (engine == LLAMA, False)


END_OF_ANSWER = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"object":"c"}'
WITH_MORE = b'data: {"object":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3},"timings":{"a":1}}'


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_data_beside_the_usage_is_reported_with_the_end_of_the_answer(end: bytes) -> None:
    stream = b"".join(e + end for e in [EVENTS[0], END_OF_ANSWER, WITH_MORE, b"data: [DONE]"])
    told = END_OF_ANSWER.removesuffix(b"}") + b',"timings":{"a":1}}'
    wanted = b"".join(e + end for e in [EVENTS[0], told, b"data: [DONE]"])
    for cuts in ([], list(range(1, len(stream)))):
        assert through(stream, cuts, True) == (wanted, Usage(7, 3, None))
        assert through(stream, cuts, False) == (stream, Usage(7, 3, None))


def test_the_end_of_an_answer_waits_for_the_next_event_and_no_longer() -> None:
    finish, done = END_OF_ANSWER + b"\n\n", b"data: [DONE]\n\n"
    for size in (len(finish), 1):
        made = StreamTap(True)
        assert b"".join(made.feed(finish[n : n + size]) for n in range(0, len(finish), size)) == b""
        assert made.held_bytes == len(finish)
        assert made.feed(done) == finish + done
        assert made.feed(finish) == b""
        assert made.feed(b"data: x") == b""
        assert made.finish() == finish + b"data: x"
    assert StreamTap(False).feed(finish) == finish  # a client that asked for the usage gets it unchanged
    made = StreamTap(True)
    assert made.feed(finish + WITH_MORE) == b""
    assert made.finish() == finish.replace(b"}\n", b',"timings":{"a":1}}\n')


def test_long_fields_beside_the_usage_are_not_passed_on() -> None:
    """To put two events of 256 KB together took 20 ms."""
    more = b"," + b",".join(b'"%d":1' % number for number in range(20_000)) + b"}"
    for finish, usage in ((END_OF_ANSWER, WITH_MORE[:-1] + more), (END_OF_ANSWER[:-1] + more, WITH_MORE)):
        assert through(finish + b"\n\n" + usage + b"\n\n", [], True) == (finish + b"\n\n", Usage(7, 3, None))


def test_lines_that_end_with_cr_pass_as_they_come() -> None:
    made = StreamTap(False)
    assert made.feed(b"data: 1\r\r") == b"data: 1\r\r"
    assert made.feed(b"data: 2\r") == b""
    assert made.feed(b"\r") == b"data: 2\r\r"
    assert made.feed(b"data: 3\n\r") == b""  # it may be the first half of CR LF
    assert made.feed(b"data: 4\r\n\r") == b"data: 3\n\r"
    assert made.feed(b"\n") == b"data: 4\r\n\r\n"


@pytest.mark.parametrize("page", WHOLE, ids=named)
def test_an_engines_answer_passes_as_it_is(page: Page) -> None:
    made = BodyTap()
    assert made.feed(page.body) + made.finish() == page.body
    assert (made.usage is None) == (b'"usage"' not in page.body)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_costs_what_the_whole_answer_costs(engine: str) -> None:
    for name in ("chat-cached", "messages-cached"):
        assert used(engine, name) == used(engine, f"{name}-stream")
    assert used(engine, "chat-stream") is None
    assert used(engine, "chat-stream-continuous-usage") == used(engine, "chat-stream-usage")


def test_the_usage_in_answers_of_real_engines_is_read() -> None:
    for name in ("chat-cached", "messages-cached", "responses-cached"):  # Anthropic's prompt excludes cached tokens
        reasoning = 0 if name == "responses-cached" else None  # only its engines report how many those were
        assert used(VLLM, name) == Usage(255, 6, 128, reasoning)
        assert used(LLAMA, name) == Usage(267, 6, 266, None)
    assert used(VLLM, "chat-goes-on-ids-stream") == Usage(20, 6, 0)
    assert used(VLLM, "completion-ids") == used(VLLM, "completion-ids-stream") == Usage(3, 6, 0)


@pytest.mark.parametrize("usage", [b'{"prompt_tokens":-5}', b'{"completion_tokens":9e307}', b'{"prompt_tokens":7}'])
def test_last_of_repeated_usages_is_read(monkeypatch: pytest.MonkeyPatch, usage: bytes) -> None:
    """Each was read, and 64 KiB of them held the loop for up to 26 ms."""
    read, usage_of = list[bytes](), tap.usage_of
    monkeypatch.setattr(tap, "usage_of", lambda event, before: read.append(event) or usage_of(event, before))
    made, event = StreamTap(True), b'data: {"choices":[],"usage":%b}\n\n' % usage
    assert made.feed(event * 1000) == b""
    assert made.feed(b'{"usage":{\n\n' * 5000) == b'{"usage":{\n\n' * 5000
    assert len(read) == 3
    assert made.usage == (Usage(7, 0, None) if usage == b'{"prompt_tokens":7}' else None)


@pytest.mark.parametrize("number", [b'"sequence_number":%d', b'"sequence_number" : %d'])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_the_number_of_the_next_event_follows_the_last_whole_one(number: bytes, step: int) -> None:
    made = NumberedTap(False)
    assert made.next_number == 0
    stream = b"".join(b'event: a\ndata: {"type":"a",%b,"x":"y"}\n\n' % (number % at) for at in range(12))
    for at in range(0, len(stream), step):
        made.feed(stream[at : at + step])
    assert made.next_number == 12
    made.feed(b'event: a\ndata: {"delta":"\\"sequence_number\\":77",%b,"type":"a"}\n\n' % (number % 12))
    assert made.next_number == 13
    made.feed(b"event: a\ndata: {%b" % (number % 13))  # its client has nothing of it
    assert made.next_number == 13
