"""Hostile engines: whatever an answer holds, every request ends, and what is not the client's does not reach it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from relay_wire import SSE, Line, Message, chunk, plain, post, until

from farhop.balance.machine import ANSWER_TOKENS_BEYOND, ANSWER_TOKENS_MAX, PROMPT_TOKENS_BEYOND, AttemptEnded
from farhop.relay.upstream.tap import EVENT_BYTES_MAX, BodyTap, StreamTap

NESTED = b"[" * 4096 + b"]" * 4096
DEEP = b'{"usage":{"a":' + NESTED + b'},"error":{"b":' + NESTED + b"}}"


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "500 Internal Server Error"])
@pytest.mark.parametrize("body", [NESTED, DEEP, b'{"choices":' + NESTED + b"}", b"\xff" * 5000])
async def test_a_deeply_nested_answer_does_not_break_its_connection(stage: Any, status: str, body: bytes) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: plain(body, status)
    c = await s.client()
    for _ in range(2):  # the next request on the connection is answered, too
        await c.send(post())
        answer = await c.read()
        assert answer.status == int(status[:3])
        if status.startswith("500"):
            assert b"engine_error" in answer.body  # an unreadable answer is not passed on
        else:
            assert answer.body == body
    assert s.tier.faults == []


PYTHON = (
    b'Traceback (most recent call last):\n  File "/opt/vllm/engine.py", line 7, in step\n    f("my prompt")\n'
    b"vllm.engine.StepError: my prompt\n"
)
FAILED_AT = "vllm.engine.StepError at /opt/vllm/engine.py:7 step"
IN_JSON = msgspec.json.encode({"error": {"message": PYTHON.decode(), "code": 500}})


@pytest.mark.parametrize(
    ("body", "kind", "trace"),
    [
        (PYTHON, b"text/plain", FAILED_AT),
        (IN_JSON, b"application/json", FAILED_AT),
        (b"<html><body>Internal Server Error</body></html>", b"text/html", ""),
        (b"", b"text/plain", ""),
        (b'{"error":{"message":"' + b"x" * 20_000, b"application/json", ""),
    ],
)
async def test_no_stack_trace_reaches_a_client(stage: Any, body: bytes, kind: bytes, trace: str) -> None:
    s = await stage()
    headers = b"content-type: " + kind + b"\r\nretry-after: 3\r\n"
    s.upstream.answer = lambda _m: plain(body, "500 Internal Server Error", headers)
    for path, kind_of in (("/v1/chat/completions", "server_error"), ("/v1/messages", "api_error")):
        answer = await s.ask(post(path=path))
        assert (answer.status, answer.get("content-type"), answer.get("retry-after")) == (500, "application/json", "3")
        assert [word for word in (b"Traceback", b"my prompt", b"html") if word in answer.body] == []
        error = msgspec.json.decode(answer.body)["error"]
        assert (error["code"], error["type"]) == ("engine_error", kind_of)
    assert s.tier.traces == [trace] * 2
    assert s.tier.attempts == [(1, "engine_error")] * 2


@pytest.mark.parametrize("cut", [0, 40])
async def test_no_stack_trace_reaches_a_client_in_the_midst_of_a_stream(stage: Any, cut: int) -> None:
    """And a model that writes one, or of an `"error"`, is left alone."""
    s = await stage()
    said = msgspec.json.encode({"choices": [{"delta": {"content": PYTHON.decode() + '"error"'}}]})
    broke = msgspec.json.encode({"error": {"message": PYTHON.decode(), "code": 500}})
    events = b"data: " + said + b"\n\ndata: " + broke + b"\n\ndata: [DONE]\n\n"

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(events[:cut] or b": ping\n\n") + chunk(events[cut:]) + b"0\r\n\r\n")

    s.upstream.script = script
    answer = await s.ask(post())
    ours = b'data: {"error":{"message":"the engine failed","code":500}}\n\ndata: [DONE]\n\n'
    assert answer.body.removeprefix(b": ping\n\n") == b"data: " + said + b"\n\n" + ours
    assert s.tier.attempts == [(1, "engine_error")]


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"the engine is overloaded","type":"InternalServerError","param":null,"code":500}}',
        b'{"object":"error","message":"no room","type":"InternalServerError","code":500}',  # SGLang
        b'{"error":"in ensemble: no","error_type":"generation"}',  # Triton, TGI
        b'{"detail":"not ready"}',
    ],
)
async def test_an_error_that_clients_can_read_passes_as_it_is(stage: Any, body: bytes) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: plain(body, "503 Service Unavailable")
    answer = await s.ask(post())
    assert (answer.status, answer.body) == (503, body)
    assert s.tier.traces == []


async def test_a_failure_that_never_ends_is_not_waited_for(stage: Any) -> None:
    s = await stage()

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                await line.send(chunk(b"x" * 4096))
                await asyncio.sleep(0.001)

    s.upstream.script = script
    async with asyncio.timeout(20.0):
        answer = await s.ask(post())
    assert (answer.status, b"engine_error" in answer.body) == (500, True)


async def test_a_deeply_nested_event_passes_unparsed(stage: Any) -> None:
    s = await stage()
    event = b"data: " + DEEP + b"\n\n"

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(event) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    s.upstream.script = script
    answer: Message = await s.ask(post())
    assert answer.body == event + b"data: [DONE]\n\n"
    assert s.tier.attempts == [(1, "served")]


async def test_a_request_ends_whatever_exception_its_answer_raises(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage()

    def broken(*_: object) -> bytes:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(BodyTap, "feed", broken)
        assert (await s.ask(post())).status == 500

    served = s.upstream.answer
    stream = SSE + chunk(b"data: {}\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    with monkeypatch.context() as patched:
        patched.setattr(BodyTap, "finish", broken)
        assert (await s.ask(post())).whole  # the client had received as much as its length says
        patched.setattr(StreamTap, "finish", broken)
        s.upstream.answer = lambda _message: stream
        with contextlib.suppress(asyncio.IncompleteReadError):  # it had begun: it breaks visibly
            assert not (await s.ask(post())).whole
        s.upstream.answer = served
    assert [str(fault) for fault in s.tier.faults] == ["a bug"] * 3
    assert (await s.ask(post())).status == 200
    await until(lambda: s.relay.under_way == 0)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "304 Not Modified", "307 Temporary", "308 Permanent"])
async def test_redirects_of_engines_are_never_followed(stage: Any, status: str) -> None:
    """Neither we nor the client: the law was asked about no such place. The next engine is asked."""
    s = await stage()
    s.flow.addresses.append(s.upstream.address)
    away = plain(b"{}", status, b"Location: http://10.0.0.7:8000/x\r\n")
    answers = [away, plain(b'{"served":1}'), away, away]
    s.upstream.answer = lambda _m: answers.pop(0)
    answer = await s.ask(post())
    assert (answer.status, answer.body) == (200, b'{"served":1}')
    assert s.tier.attempts == [(1, "engine_redirects"), (2, "served")]
    answer = await s.ask(post())
    assert (answer.status, answer.get("location"), b"engine_redirects" in answer.body) == (502, None, True)


async def test_an_engine_s_cookies_and_addresses_do_not_reach_clients(stage: Any) -> None:
    s = await stage()
    headers = (
        b"Content-Type: application/json\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nLocation: http://10.0.0.7:8000/x\r\n"
        b'Content-Location: http://10.0.0.7/\r\nAlt-Svc: h3="10.0.0.7:1"\r\nRefresh: 0; url=http://10.0.0.7\r\n'
        b"Server: engine at 10.0.0.7\r\nX-Request-Id: 7\r\n"
        b'X-RateLimit-Remaining-Requests: 0\r\nRateLimit: "requests";r=0;t=60\r\nRetry-After: 7\r\n'
    )
    s.upstream.answer = lambda _m: plain(b"{}", headers=headers)
    answer = await s.ask(post())
    assert "10.0.0.7" not in repr(answer.headers)
    assert {"set-cookie", "location"}.isdisjoint(name for name, _ in answer.headers)
    assert answer.get("x-request-id") == "7"
    assert [name for name, _ in answer.headers if "ratelimit" in name] == []
    assert answer.get("retry-after") == "7"


async def test_an_engine_does_not_command_the_proxy_before_us(stage: Any) -> None:
    """nginx answers with a page of its own, `internal` ones included, where an answer has X-Accel-Redirect."""
    s = await stage()
    commands = (
        b"X-Accel-Redirect: /internal/secret", b"X-Accel-Expires: 86400", b"X-Accel-Limit-Rate: 1",
        b"X-Accel-Charset: x", b"X-Sendfile: /etc/passwd", b"X-LIGHTTPD-send-file: /etc/passwd",
        b"X-Reproxy-URL: http://10.0.0.7/", b"X-Reproxy-File: /etc/passwd", b"X-Accel-Buffering: no",
    )  # fmt: skip
    s.upstream.answer = lambda _m: plain(b"{}", headers=b"".join(line + b"\r\n" for line in commands))
    answer = await s.ask(post())
    names = [name for name, _ in answer.headers if name.startswith(("x-accel", "x-send", "x-light", "x-repro"))]
    assert names == ["x-accel-buffering"]  # that is how an engine asks for its stream to pass at once


async def test_errors_of_a_proxy_about_its_keys_and_engines_reach_no_client(stage: Any) -> None:
    s = await stage()
    lines = (
        b"X-LiteLLM-Model-Api-Base: http://10.0.0.7:8000/v1", b"x-litellm-key-spend: 12.5",
        b"llm_provider-server: 10.0.0.7",
        b"X-Gateway-Destination-Endpoint-Served: 10.0.0.7:8000", b"x-prefiller-host-port: 10.0.0.7:8000",
        b"target-pod: 10.0.0.7:8000", b"X-Upstream-Addr: 10.0.0.7:8000", b"X-Real-IP: 10.0.0.7", b"x-request-id: 7",
    )  # fmt: skip
    s.upstream.answer = lambda _m: plain(b"{}", headers=b"".join(line + b"\r\n" for line in lines))
    answer = await s.ask(post())
    assert "10.0.0.7" not in repr(answer.headers)
    assert "12.5" not in repr(answer.headers)
    assert answer.get("x-request-id") == "7"


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
    assert made.finish() == b"x" * 20_000


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
