"""Hostile engines: whatever an answer holds, every request ends, and what is not the client's does not reach it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from relay_wire import SSE, Line, Message, chunk, plain, post, until

from farhop.balance.machine import ANSWER_TOKENS_BEYOND, ANSWER_TOKENS_MAX, PROMPT_TOKENS_BEYOND, AttemptEnded
from farhop.relay.upstream.tap import EVENT_BYTES_MAX, BodyTap, StreamTap

NESTED = b"[" * 4096 + b"]" * 4096
DEEP = b'{"usage":{"a":' + NESTED + b'},"error":{"b":' + NESTED + b"}}"


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "500 Internal Server Error"])
@pytest.mark.parametrize("body", [NESTED, DEEP, b'{"choices":' + NESTED + b"}", b"\xff" * 5000])
async def test_an_answer_that_nests_ends_like_others(stage: Any, status: str, body: bytes) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: plain(body, status)
    c = await s.client()
    for _ in range(2):  # the next request on the connection is answered, too
        await c.send(post())
        answer = await c.read()
        assert (answer.status, answer.body) == (int(status[:3]), body)
    assert s.tier.faults == []


async def test_an_event_that_nests_passes_and_walks_nowhere(stage: Any) -> None:
    s = await stage()
    event = b"data: " + DEEP + b"\n\n"

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(event) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    s.upstream.script = script
    answer: Message = await s.ask(post())
    assert answer.body == event + b"data: [DONE]\n\n"
    assert s.tier.attempts == [(1, "served")]


async def test_whatever_reading_an_answer_raises_the_request_ends(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage()

    def broken(*_: object) -> bytes:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(BodyTap, "feed", broken)
        assert (await s.ask(post())).status == 500

    served = s.upstream.answer
    stream = SSE + chunk(b"data: {}\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    with monkeypatch.context() as patched:
        patched.setattr(BodyTap, "rest", broken)
        assert (await s.ask(post())).whole  # all that its length says had gone to the client
        patched.setattr(StreamTap, "rest", broken)
        s.upstream.answer = lambda _message: stream
        with contextlib.suppress(asyncio.IncompleteReadError):  # it had begun: it breaks visibly
            assert not (await s.ask(post())).whole
        s.upstream.answer = served
    assert [str(fault) for fault in s.tier.faults] == ["a bug"] * 3
    assert (await s.ask(post())).status == 200
    await until(lambda: s.relay.under_way == 0)


async def test_an_engine_s_cookies_and_redirects_do_not_reach_clients(stage: Any) -> None:
    s = await stage()
    headers = (
        b"Content-Type: application/json\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nLocation: http://10.0.0.7:8000/x\r\n"
        b'Content-Location: http://10.0.0.7/\r\nAlt-Svc: h3="10.0.0.7:1"\r\nRefresh: 0; url=http://10.0.0.7\r\n'
        b"Server: engine at 10.0.0.7\r\nX-Request-Id: 7\r\n"
        b'X-RateLimit-Remaining-Requests: 0\r\nRateLimit: "requests";r=0;t=60\r\nRetry-After: 7\r\n'
    )
    s.upstream.answer = lambda _m: plain(b"{}", "307 Temporary Redirect", headers)
    answer = await s.ask(post())
    assert "10.0.0.7" not in repr(answer.headers)
    assert {"set-cookie", "location"}.isdisjoint(name for name, _ in answer.headers)
    assert answer.get("x-request-id") == "7"
    assert [name for name, _ in answer.headers if "ratelimit" in name] == []
    assert answer.get("retry-after") == "7"


@pytest.mark.parametrize("stream", [False, True])
async def test_impossible_usage_is_not_charged(stage: Any, stream: bool) -> None:
    s = await stage()
    told = b'{"choices":[],"usage":{"prompt_tokens":900000000,"completion_tokens":900000000}}'
    events = SSE + chunk(b"data: " + told + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    s.upstream.answer = lambda _m: events if stream else plain(told)
    assert told in (await s.ask(post(b'{"a":1}'))).body
    (ended,) = (event for event in s.flow.events if isinstance(event, AttemptEnded))
    ((_, _, charged),) = s.tier.concluded_with
    assert ended.usage == charged
    assert charged.prompt_tokens == PROMPT_TOKENS_BEYOND + len(b'{"a":1}')
    assert charged.completion_tokens == ANSWER_TOKENS_MAX + ANSWER_TOKENS_BEYOND


def test_an_event_in_a_quarter_of_a_million_pieces_is_copied_once() -> None:
    """Counted: the bytes that are searched, which were quadratic."""
    made = StreamTap(hide_usage=False)
    searched = 0
    for _ in range(20_000):
        before = made._searched
        assert made.feed(b"x") == b""
        searched += len(made._tail) - max(0, before - 3)
    assert searched < 5 * 20_000
    assert made.held_bytes == 20_000 < EVENT_BYTES_MAX
    assert made.rest() == b"x" * 20_000


async def test_a_body_is_let_go_at_the_first_byte(stage: Any) -> None:
    s = await stage()
    held: list[int] = []

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await until(lambda: s.flow.started)
        held.append(s.budget.used_bytes)
        await line.send(b"0\r\n\r\n")

    s.upstream.script = script
    assert (await s.ask(post(b"x" * 50_000))).status == 200
    assert held[0] < 1000
