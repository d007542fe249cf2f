"""What a process keeps of its streams, and its counters. How streams are continued: tests/flows/test_resume.py."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_wire import AS_TARGET_0, SSE, Line, chunk, post

from farhop.balance import machine, outcome
from farhop.balance.machine import Command, Event, Usage
from farhop.balance.prefix import chain
from farhop.relay.formats.exact_resumption import ExactProgress, HopProgress
from farhop.relay.formats.resumption import CHAT, EVENT_BYTES_MAX, plan
from farhop.relay.formats.text_resumption import TEXT_BYTES_MAX, TextProgress
from farhop.relay.formats.transcript import AnswerChain, Transcript
from farhop.relay.upstream import engine_faults
from farhop.relay.upstream.pool import EVENTS_A_TURN
from farhop.relay.upstream.resumable import ExactTap, Resumption, TextTap

BODY = msgspec.json.encode({"model": "m", "messages": [], "max_tokens": 9, "stream": True})


def owner(kept_bytes_max: int = 1000) -> Resumption:
    return Resumption(lambda _target, _model: 100, kept_bytes_max)


def event(ids: list[int], prompt: list[int] | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None, "token_ids": ids}
    document = {"id": "a", "created": 1, "model": "m", "choices": [choice], "prompt_token_ids": prompt}
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def test_bytes_that_streams_keep_are_counted_and_given_back() -> None:
    ours = owner()
    one, other = ours.of(CHAT, BODY, "acme", "m"), ours.of(CHAT, BODY, "acme", "m")
    assert one is not None
    assert other is not None
    tap = ExactTap(False, None, "", one, ours)
    tap.feed(event([1], list(range(100_000, 100_100))))
    told_bytes = len(msgspec.json.encode(list(range(100_000, 100_100))))
    assert ours.kept_bytes == one.held_bytes == told_bytes // 2 + 4  # a byte for every two letters, and the answer's id
    assert one.can_resume
    second = ExactTap(False, None, "", other, ours)
    second.feed(event([1], list(range(100_000, 100_200))))
    assert (other.can_resume, other.why_not) == (False, "memory")
    for progress in (one, other):
        ours.over(progress, outcome.SERVED)
    assert ours.kept_bytes == 0
    assert not ours.outcomes


@pytest.mark.parametrize("say", [b"a\n\n", b'{"error"\n\n', b"data:{}\r\n\r\n"])
def test_events_that_no_engine_sends_pass_unchanged_and_end_resumability(
    say: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB of it held the loops of both tiers for 40 to 190 ms each."""
    ours, flood = owner(), say * (65_536 // len(say))
    for asks, text in ((False, False), (True, False), (False, True)):
        body = msgspec.json.encode({**msgspec.json.decode(BODY), "messages": [{"role": "user", "content": "x"}]})
        known = plan(CHAT, body, text=text)
        progress = TextProgress(known, body, sends_usage=False) if text else ours.by_ids(known, body, for_hop=asks)
        tap = (TextTap if text else ExactTap)(False, None, "", progress, ours)
        with monkeypatch.context() as patched:
            patched.setattr(type(progress), "take", lambda *_: pytest.fail("it is not taken apart"))
            assert tap.feed(flood) == flood
        assert (progress.why_not, progress.can_resume, tap.broke) == ("unreadable", False, None)
        progress.resumed = 1
        assert tap.feed(flood) == b"", "it is to continue a stream, and does not"


def in_turns(tap: ExactTap, data: bytes) -> bytes:
    """As a connection reads it."""
    return b"".join(tap.feed(data[at : at + EVENTS_A_TURN]) for at in range(0, len(data), EVENTS_A_TURN))


def test_an_event_with_the_ids_of_a_long_prompt_is_read_and_stripped() -> None:
    ours = owner(1 << 30)
    progress = ours.of(CHAT, BODY, "acme", "m")
    assert progress is not None
    tap, ids = ExactTap(False, None, "", progress, ours, 200_000), list(range(100_000, 200_000))
    told = event([1], ids)
    assert in_turns(tap, told) == told.replace(msgspec.json.encode(ids), b"null").replace(b"[1]", b"null")
    assert progress.can_resume
    assert list(progress.prompt) == ids


@pytest.mark.parametrize("cut", [*range(1, 60), 1000])
def test_an_event_with_prompt_ids_cut_anywhere_is_held_until_it_is_whole(cut: int) -> None:
    ours = owner(1 << 30)
    progress = ours.of(CHAT, BODY, "acme", "m")
    assert progress is not None
    tap = ExactTap(False, None, "", progress, ours, 20_000)
    told = event([1], list(range(100_000, 103_000)))[:-3] + b',"system_fingerprint":"abc","usage":null}\n\n'
    assert tap.feed(told[:-cut]) == b""
    assert b"100000" not in tap.feed(told[-cut:])
    assert progress.can_resume


@pytest.mark.parametrize(
    ("body_bytes", "first", "letters"),
    [(200_000, b"", b'"token_ids":[1],'), (200_000, b"", b"[]"), (10, b"", b"1,"), (200_000, event([1], [5]), b"1,")],
)
def test_an_event_too_long_without_token_ids_is_passed_on_in_bounded_turns(
    monkeypatch: pytest.MonkeyPatch, body_bytes: int, first: bytes, letters: bytes
) -> None:
    """One event of 4 MiB held the loop for up to 600 ms."""
    ours = owner(1 << 30)
    progress = ours.of(CHAT, BODY, "acme", "m")
    assert progress is not None
    tap, taken, take = ExactTap(False, None, "", progress, ours, body_bytes), list[int](), ExactProgress.take
    tap.feed(first)
    monkeypatch.setattr(ExactProgress, "take", lambda self, data: taken.append(len(data)) or take(self, data))
    long = b'data: {"a":[' + letters * (1_000_000 // len(letters)) + b"1]}\n\n"
    assert in_turns(tap, long).replace(b":null", b":[1]") == long
    assert tap.held_bytes < 100_000
    assert max(taken) <= EVENT_BYTES_MAX + (64 * 1024 if letters == b"1," else EVENTS_A_TURN)
    assert (progress.why_not, progress.can_resume) == ("unreadable", False)
    progress.resumed = 1
    assert in_turns(tap, long[:-2]) == b"", "it is to continue a stream, and does not"


def test_only_an_event_that_names_an_error_is_looked_at_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, looked, in_event = owner(), list[bytes](), engine_faults.in_event
    progress = ours.of(CHAT, BODY, "acme", "m")
    assert progress is not None
    monkeypatch.setattr(engine_faults, "in_event", lambda event: looked.append(event) or in_event(event))
    error = b'data: {"error":{"message":"CUDA error","code":500}}\n\n'
    tap = ExactTap(False, None, "", progress, ours)
    tap.feed(event([1], [5]) + event([2]) * 50 + error + event([3]) * 50)
    assert looked == [error]
    assert tap.broke is outcome.ENGINE_BROKEN


def test_pieces_of_events_pass_whole_and_without_ids() -> None:
    ours = owner()
    progress = ours.of(CHAT, BODY, "acme", "m")
    assert progress is not None
    tap = ExactTap(False, None, "", progress, ours)
    data = event([1], [5, 6]) + event([2])
    passed = b"".join(tap.feed(data[at : at + 7]) for at in range(0, len(data), 7)) + tap.finish()
    assert passed == data.replace(b"[5,6]", b"null").replace(b"[1]", b"null").replace(b"[2]", b"null")
    assert list(progress.ids) == [1, 2]


def test_why_a_stream_broke_at_last_is_counted() -> None:
    ours = owner()
    assert ours.of(b"/v1/messages", BODY, "acme", "m") is None
    progress = ours.of(CHAT, BODY, "acme", "m")
    assert progress is not None
    progress.why_not = "tools_or_reasoning"
    ours.over(progress, outcome.DIED_MID_STREAM)
    fine = ours.of(CHAT, BODY, "acme", "m")
    assert fine is not None
    ours.over(fine, outcome.DIED_MID_STREAM)
    assert ours.outcomes == {
        ("not_resumable", "path"): 1, ("broken", "tools_or_reasoning"): 1, ("broken", "nowhere"): 1,
    }  # fmt: skip


def test_text_is_counted_bounded_and_given_back() -> None:
    ours = Resumption(lambda _target, _model: None, 2000, mode=lambda _tenant, _model: "text")
    body = BODY.replace(b"[]", b'[{"role":"user","content":"hi"}]').replace(b":9", b":9000")
    first, second = (TextProgress(plan(CHAT, body, text=True), body, sends_usage=False) for _ in range(2))
    data = event([]).replace(b',"token_ids":[]', b"")
    taps = [TextTap(False, None, "", one, ours) for one in (first, second)]
    assert taps[0].feed(data) == data
    assert ours.kept_bytes == first.held_bytes == len(body) + 1
    for _ in range(600):
        assert taps[0].feed(data) == data
    assert first.tokens == 601
    assert taps[0].feed(data + data) == data + data
    assert first.can_resume
    for _ in range(2000):
        taps[1].feed(data)
    assert second.why_not == "memory"
    for one in (first, second):
        ours.over(one, outcome.SERVED)
    assert ours.kept_bytes == 0


def test_text_in_the_usual_form_is_bounded_too() -> None:
    ours = Resumption(lambda _target, _model: None, mode=lambda _tenant, _model: "text")
    body = BODY.replace(b"[]", b'[{"role":"user","content":"hi"}]').replace(b":9", b":9000")
    progress = TextProgress(plan(CHAT, body, text=True), body, sends_usage=False)
    tap, data = TextTap(False, None, "", progress, ours), event([]).replace(b'"x"', b'"%b"' % (b"x" * 9000))
    for _ in range(300):  # every event holds text only
        assert tap.feed(data) == data
        assert progress.held_bytes < TEXT_BYTES_MAX + 20_000
    assert (progress.why_not, progress.held_bytes) == ("too_long", 0)
    scarce = Resumption(lambda _target, _model: None, 1, mode=lambda _tenant, _model: "text")
    progress = TextProgress(plan(CHAT, body, text=True), body, sends_usage=False)
    tap = TextTap(False, None, "", progress, scarce)
    for _ in range(3):
        assert tap.feed(data) == data
    assert (progress.why_not, progress.held_bytes) == ("memory", 0)


def test_usage_that_its_client_does_not_see_is_known_all_the_same() -> None:
    """Also where the connection breaks right behind it."""
    ours = Resumption(lambda _target, _model: None, mode=lambda _tenant, _model: "text")
    body = BODY.replace(b"[]", b'[{"role":"user","content":"hi"}]')
    found = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
    for end in (b"\n\n", b""):
        progress = TextProgress(plan(CHAT, body, text=True), body, sends_usage=False)
        tap = TextTap(True, None, "", progress, ours)
        ends = event([]).replace(b'"finish_reason":null', b'"finish_reason":"stop"')
        assert tap.feed(event([])) == event([])
        assert tap.feed(ends) + tap.feed(found + end) + tap.finish() == ends
        assert progress.can_end
        assert progress.usage == Usage(3, 1)


PIECES = st.sampled_from(("a", " sea", "\U0001f30a", '"', "\\", "", '"error"', '"usage":{'))


async def test_nobody_else_at_a_region_s_address_continues_its_stream(stage: Any) -> None:
    """Even if it looks like a continuation."""
    s = await stage(over_tier=True)
    s.relay.resumption = Resumption(lambda _target, _model: 100)
    s.handler.streams = True
    answers = [
        SSE.replace(b"\r\n\r\n", b"\r\n" + AS_TARGET_0 + b"x-farhop-resume: ids\r\n\r\n") + chunk(event([1], [5, 6])),
        SSE + chunk(event([2])) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    ]

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(answers.pop(0))
        await asyncio.sleep(0.1)
        line.abort()

    def handle(event: Event, now: float, handle: Any = s.flow.handle) -> list[Command]:
        if isinstance(event, machine.AttemptFailed) and event.resumable and event.attempt == 1:
            return [machine.Resume(event.id, 2, "target-1", s.upstream.address, None)]
        commands: list[Command] = handle(event, now)
        return commands

    s.upstream.script, s.flow.handle = script, handle
    body = (await s.ask(post(BODY, path=CHAT.decode()))).body
    assert s.tier.attempts == [(1, "upstream_died_mid_stream"), (2, "no_engine_there")]
    assert body.count(b'"content":"x"') == 1
    assert b"no_engine_there" in body


ENDS = st.sampled_from(
    (
        b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}\n\n',
        b'data: {"error":{"message":"out of memory","code":500}}\n\n',
        b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"!"},"finish_reason":"stop","token_ids":[9]}]}\n\n',
        b": ping\n\n",
    )
)


@given(st.lists(PIECES, min_size=1, max_size=12), st.lists(ENDS, max_size=3), st.booleans(), st.booleans())
def test_event_in_the_form_of_the_previous_one_is_parsed_alike(
    texts: list[str], ends: list[bytes], hide: bool, for_hop: bool
) -> None:
    def tap() -> tuple[ExactTap, Transcript]:
        request = plan(CHAT, BODY)
        heard = Transcript(AnswerChain(chain.tail(b"prompt", (), 1, b""), "content"))
        progress = HopProgress(request, BODY) if for_hop else ExactProgress(request, BODY)
        return ExactTap(hide, heard, "", progress, owner(1_000_000)), heard

    (short, short_heard), (long, long_heard) = tap(), tap()
    events = [
        event([at], None if at else [5, 6]).replace(b'"x"', msgspec.json.encode(text)) for at, text in enumerate(texts)
    ]
    for one in events + ends + events[1:]:
        long.progress._form = None
        assert short.feed(one) == long.feed(one)
        kept, same = ((tap._before, tap._last, tap._finish, tap.usage, tap.withheld) for tap in (short, long))
        assert kept == same
        assert (short_heard.pieces, short.progress.ids) == (long_heard.pieces, long.progress.ids)
    assert short.finish() == long.finish()
    assert (short.fault, short.progress.why_not) == (long.fault, long.progress.why_not)
