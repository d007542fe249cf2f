"""An answer is framed in the terms of its request."""

from __future__ import annotations

from typing import Any

import pytest
from relay_wire import SSE, chunk, plain, post

STREAM = SSE + chunk(b"data: 1\n\n") + b"0\r\n\r\n"


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: STREAM
    answer = await s.ask(post(version="1.0", headers=b"Connection: keep-alive\r\n"))
    assert answer.get("transfer-encoding") is None
    assert answer.get("connection") == "close"
    assert answer.body == b"data: 1\n\n"


async def test_http_1_0_connection_is_kept_alive_if_requested(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    for path in ("/v1/completions", "/here"):
        await c.send(post(path=path, version="1.0", headers=b"Connection: keep-alive\r\n"))
        assert (await c.read()).get("connection") == "keep-alive"
    await c.send(post(version="1.0"))
    assert (await c.read()).get("connection") == "close"
    assert await c.ended() == b""


async def test_http_1_0_needs_no_host(stage: Any) -> None:
    s = await stage()
    assert (await s.ask(b"GET /here HTTP/1.0\r\n\r\n")).status == 200


@pytest.mark.parametrize("path", ["/here", "/v1/completions"])
async def test_a_client_that_wants_to_close_is_answered_so(stage: Any, path: str) -> None:
    s = await stage()
    c = await s.client()
    await c.send(post(path=path, headers=b"Connection: close\r\n"))
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (200, "close")
    assert await c.ended() == b""


async def test_head_gets_no_body(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    await c.send(b"HEAD /refused HTTP/1.1\r\nhost: a\r\n\r\n" + post(path="/here"))
    head = await c.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    assert b"content-length: " in head
    assert (await c.read()).body == b'{"here":1}'


async def test_a_stream_breaks_off_with_an_event_over_http_1_0_too(stage: Any) -> None:
    s = await stage()

    async def dies(line: Any) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))

    s.upstream.script = dies
    answer = await s.ask(post(version="1.0"))
    first, error, _ = answer.body.split(b"\n\n")
    assert first == b"data: 1"
    assert b"upstream_died_mid_stream" in error


async def test_a_request_that_never_arrives_is_reported_to_the_handler(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    await c.send(post(b"x" * 10)[:-5])
    c.abort()
    whole = await s.client()
    await whole.send(post(path="/here"))
    await whole.read()
    assert s.handler.abandoned == [("client_left", 0)]


async def test_a_bodiless_status_ignores_what_its_headers_say(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"
    c = await s.client()
    for _ in range(2):
        await c.send(post())
        assert (await c.read()).get("content-length") is None
    s.upstream.answer = lambda _m: plain(b"{}")
    await c.send(post())
    assert (await c.read()).body == b"{}"
