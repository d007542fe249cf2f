"""One attempt: what it writes, what it passes on, and that a slow client slows the upstream."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import pytest
from relay_stage import Poked
from relay_wire import AS_TARGET_0, SSE, Line, chunk, plain, post, until

from farhop.balance import machine
from farhop.balance.health.inquiry import QUIET_S, STALL_PAUSES
from farhop.balance.machine import AttemptEnded
from farhop.balance.prefix.chain import chain, tail
from farhop.relay import relay as relays
from farhop.relay.formats.transcript import AnswerChain
from farhop.relay.upstream.pool import UpstreamLimits
from farhop_lab.world.certs import Authority


async def test_the_upstream_gets_the_request_without_its_hop_by_hop_headers(stage: Any) -> None:
    s = await stage()
    headers = (
        b"Authorization: Bearer sk-client\r\nX-Request-Id: 7\r\nx-farhop-hop: forged\r\nX-Forwarded-For: me\r\n"
        b"TE: trailers\r\nKeep-Alive: 5\r\nAccept-Encoding: gzip\r\nConnection: keep-alive, X-Private\r\n"
        b"X-Private: 1\r\nProxy-Authorization: x\r\nContent-Type: application/json\r\ntraceparent: theirs\r\n"
    )
    assert (await s.ask(post(b"{}", path="/v1/chat/completions?a=b", headers=headers))).status == 200
    (asked,) = s.upstream.asked
    assert asked.line == "POST /v1/chat/completions?a=b HTTP/1.1"
    assert asked.headers == [
        ("host", str(s.upstream.address)),
        ("content-length", "2"),
        ("accept-encoding", "identity"),
        ("via", "1.1 farhop"),
        ("content-type", "application/json"),
        ("authorization", "Bearer engine-key"),
    ]


async def test_the_client_gets_the_answer_without_its_hop_by_hop_headers(stage: Any) -> None:
    s = await stage()
    headers = (
        b"Content-Type: application/json\r\nServer: engine\r\nKeep-Alive: timeout=5\r\nConnection: X-Private\r\n"
        b"X-Private: 1\r\nX-Farhop-Region: forged\r\nServer-Timing: engine;dur=5\r\nVia: x\r\n"
    )
    s.upstream.answer = lambda _m: plain(b"{}", headers=headers)
    answer = await s.ask(post())
    names = [name for name, _ in answer.headers]
    assert names == ["content-type", "x-farhop-decision", "server-timing", "content-length"]
    assert (answer.get("server-timing") or "").endswith(", engine;dur=5")


@pytest.mark.parametrize("over_tier", [True, False])
async def test_the_version_that_served_is_the_tiers_below_to_say_and_no_engines(stage: Any, over_tier: bool) -> None:
    s = await stage(over_tier=over_tier)
    s.upstream.answer = lambda _m: plain(
        b"{}", headers=AS_TARGET_0 + b"Content-Type: application/json\r\nX-Farhop-Version: v2\r\n"
    )
    assert (await s.ask(post())).get("x-farhop-version") == ("v2" if over_tier else None)


PROMPT = b"p" * 1000


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("listens", [True, False])
async def test_where_it_is_listened_to_the_machine_gets_prompt_and_answer(
    stage: Any, stream: bool, listens: bool
) -> None:
    s = await stage()
    known = chain(PROMPT, 7)
    s.handler.answer_chain = AnswerChain(tail(PROMPT, known, 7), "text") if listens else None
    body = b'{"choices":[{"index":0,"text":"%b"}]}' % (b"a" * 400)
    events = chunk(b"data: " + body[:50]) + chunk(body[50:] + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    json = b"content-type: application/json\r\n"
    s.upstream.answer = lambda _m: SSE + events if stream else plain(body, headers=json)
    assert body in (await s.ask(post())).body
    ended = s.flow.events[-1]
    assert isinstance(ended, AttemptEnded)
    assert (ended.chain, ended.answer_bytes) == ((chain(PROMPT + b"a" * 400, 7), 400) if listens else ((), 0))


async def test_a_large_body_arrives_whole_both_ways(stage: Any) -> None:
    s = await stage()
    body = bytes(range(256)) * 8192
    s.upstream.answer = lambda m: plain(m.body, headers=b"content-type: image/png\r\n")
    assert (await s.ask(post(body))).body == body


@pytest.mark.parametrize("content_type", [b"text/event-stream", b"application/octet-stream"])
async def test_a_client_that_does_not_read_bounds_what_is_buffered(stage: Any, content_type: bytes) -> None:
    s = await stage()
    event = b"data: " + b"x" * 8190 + b"\n\n"
    sent = 0
    total = 32 << 20

    async def flood(line: Line) -> None:
        nonlocal sent
        await s.upstream.request(line)
        await line.send(SSE.replace(b"text/event-stream", content_type))
        while sent < total:
            await line.send(chunk(event))
            sent += len(event)
        await line.send(b"0\r\n\r\n")
        await s.upstream.request(line)

    s.upstream.script = flood
    c = await s.client()
    c.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await c.send(post())
    await until(lambda: s.handler.exchanges)
    connection = s.handler.exchanges[0]._connection
    await until(lambda: connection._write_paused)
    seen = 0
    while seen != sent:  # until backpressure reaches the upstream
        seen = sent
        await asyncio.sleep(0.1)
    assert connection._transport.get_write_buffer_size() < 1 << 20
    assert sent < total // 2, "the upstream was not held back"
    c.writer.transport.resume_reading()  # type: ignore[attr-defined]
    received = 0
    while received < sent or sent < total:
        data = await c.reader.read(1 << 20)
        assert data, f"it broke off after {received} bytes"
        received += len(data)
    await until(lambda: s.tier.concluded_with == [("served", 200, None)])


async def test_a_slow_client_is_not_a_stalled_upstream(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(between_bytes_s=0.05))

    async def quiet(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await s.upstream.request(line)

    s.upstream.script = quiet
    c = await s.client()
    await c.send(post())
    await c.reader.readuntil(b"data: 1\n\n")
    attempt = s.relay.live["r1"].attempt
    attempt.pause()
    attempt.check(attempt.last_activity_at + 60.0)
    assert s.relay.under_way == 1
    attempt.resume()
    attempt.check(attempt.last_activity_at + 60.0)
    assert s.relay.under_way == 0
    assert s.tier.attempts == [(1, "upstream_stalled")]


# -- what the upstream, a tier, knows of it


async def swallowing(s: Any, first: bytes = b"") -> Any:
    """A request whose upstream read it and says no more than this; the attempt."""

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        if first:
            await line.send(first)
        await s.upstream.request(line)

    s.upstream.script = script
    c = await s.client()
    await c.send(post())
    await until(lambda: s.upstream.asked and s.relay.live)
    attempt = s.relay.live["r1"].attempt
    if first:
        await until(lambda: attempt.began)
    return attempt


async def test_an_attempt_that_its_upstream_does_not_know_goes_elsewhere(stage: Any) -> None:
    s = await stage(over_tier=True)
    attempt = await swallowing(s)
    at = s.upstream.address
    assert attempt.id == "r1/1"
    s.relay.sweep()
    assert s.relay.quiet(at) == []  # it was made just now
    attempt.last_activity_at -= QUIET_S
    s.relay.sweep()
    assert s.relay.quiet(at) == [attempt]
    s.relay.channel(at, up=False)
    s.relay.channel(at, up=True)
    attempt.on_inquiry_answer(s.relay.clock(), 0.5, 0.1)
    assert s.tier.attempts == []
    attempt.on_inquiry_answer(s.relay.clock(), None, 0.1)
    assert s.tier.attempts == [(1, "lost_on_the_way")]
    attempt.on_inquiry_answer(s.relay.clock(), None, 0.1)  # late events have no effect
    assert s.relay.quiet(at) == []
    assert len(s.tier.attempts) == 1


async def test_a_byte_that_came_while_it_was_asked_about_proves_it_alive(stage: Any) -> None:
    s = await stage(over_tier=True)
    attempt = await swallowing(s)
    s.relay.channel(s.upstream.address, up=False)
    attempt.on_inquiry_answer(attempt.last_activity_at - 0.1, None, 0.1)
    assert s.tier.attempts == []


async def test_only_the_longest_silent_are_asked_about(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage(over_tier=True)
    monkeypatch.setattr(relays, "ASKED_MAX", 1)
    attempt = await swallowing(s)
    await (await s.client()).send(post())
    await until(lambda: len(s.relay.live) == 2 and s.relay.live["r2"].attempt._connection is not None)
    attempt.last_activity_at -= 9.0
    s.relay.live["r2"].attempt.last_activity_at -= 5.0
    s.relay.sweep()
    assert s.relay.quiet(s.upstream.address) == [attempt]


async def test_engines_are_not_asked_about_silent_attempts(stage: Any) -> None:
    s = await stage()
    attempt = await swallowing(s)
    attempt.last_activity_at -= 9.0
    s.relay.sweep()
    assert s.relay.quiet(s.upstream.address) == []


@pytest.mark.parametrize("dark", [True, False])
async def test_a_stream_behind_a_broken_way_ends_by_its_own_pauses(stage: Any, dark: bool) -> None:
    s = await stage(over_tier=True)
    attempt = await swallowing(s, SSE.replace(b"\r\n\r\n", b"\r\n" + AS_TARGET_0 + b"\r\n") + chunk(b"data: 1\n\n"))
    last_activity_at = attempt.last_activity_at
    attempt.check(last_activity_at + 4.0)  # a pause of 4 s, which ends
    attempt.last_activity_at = last_activity_at = last_activity_at + 4.1
    attempt.check(last_activity_at + 0.1)
    if dark:
        s.relay.channel(s.upstream.address, up=False)
    attempt.check(last_activity_at + 4.0 * STALL_PAUSES - 0.1)
    assert s.relay.under_way == 1
    attempt.check(last_activity_at + 4.0 * STALL_PAUSES + 0.1)
    assert s.relay.under_way == (0 if dark else 1)
    assert s.tier.attempts == ([(1, "upstream_stalled")] if dark else [])


@pytest.mark.parametrize("over_tls", [False, True])
@pytest.mark.parametrize("size", [3_000_000, 14_000_000])
async def test_a_request_still_in_our_buffer_or_the_kernels_is_recalled(
    stage: Any, tmp_path_factory: pytest.TempPathFactory, over_tls: bool, size: int
) -> None:
    """Three megabytes are in the kernels' buffers whole; of more the rest is here, where TLS does not tell of it."""
    authority = Authority(tmp_path_factory.mktemp("recall"))
    server, believing = authority.issue("server"), ssl.create_default_context(cafile=authority.ca_file)
    listening = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    listening.load_cert_chain(server.cert_file, server.key_file)
    s = await stage(upstream_tls=listening if over_tls else None, believing=lambda: believing)
    got, reads, over = bytearray(), asyncio.Event(), asyncio.Event()

    async def script(line: Line) -> None:
        # A buffer that the kernel widens as it likes may take all of it.
        line.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        got.extend(await line.reader.read(1000))
        line.writer.transport.pause_reading()
        await reads.wait()
        line.writer.transport.resume_reading()
        with contextlib.suppress(ConnectionError):
            while data := await line.reader.read(65536):
                got.extend(data)
        over.set()

    s.upstream.script = script
    client = await s.client()
    await client.send(post(b"x" * size + b"THE END"))
    await until(lambda: got)
    await asyncio.sleep(0.1)  # for whatever can leave to have left
    s.relay.react(Poked([machine.Recall("r1", 1)]))
    reads.set()
    answer = await client.read()
    await over.wait()
    assert (answer.status, s.tier.attempts) == (451, [(1, "unlawful_here")])
    assert b"THE END" not in got


async def test_a_request_that_has_left_is_not_recalled(stage: Any) -> None:
    s = await stage()
    go = asyncio.Event()

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await go.wait()
        await line.send(plain(b"{}"))

    s.upstream.script = script
    client = await s.client()
    await client.send(post(b"x" * 1_000_000))
    await until(lambda: s.upstream.asked)
    s.relay.react(Poked([machine.Recall("r1", 1)]))
    go.set()
    assert (await client.read()).status == 200
    assert s.tier.attempts == [(1, "served")]


SALTED = b'{"cache_salt":"0123456789abcdef","model":"m","messages":[]}'
UNSALTED = b'{"model":"m","messages":[]}'
NO_SALT_HERE = b"""{"detail":"Unexpected fields in the request: {'cache_salt'}"}"""


def _strict(asked: Any) -> bytes:
    """As servers that take no member which they do not know."""
    if b"cache_salt" in asked.body:
        return plain(NO_SALT_HERE, "422 Unprocessable Content")
    return plain(b'{"ok":true}')


async def test_an_engine_that_refuses_a_salt_is_asked_without_and_not_salted_again_at_once(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = await stage()
    s.upstream.answer = _strict
    for _ in range(2):
        answer = await s.ask(post(SALTED))
        assert (answer.status, answer.body) == (200, b'{"ok":true}')
    assert [asked.body for asked in s.upstream.asked] == [SALTED, UNSALTED, UNSALTED]
    assert s.tier.unsalted == ["target-0"]
    assert [(reason, status) for reason, status, _ in s.tier.concluded_with] == [("served", 200)] * 2
    assert s.tier.attempts == [(1, "served"), (1, "served")]  # the machine and the spans know of one each
    later = s.relay.clock() + 61.0
    monkeypatch.setattr(s.relay, "clock", lambda: later)  # another engine may have its address by then
    await s.ask(post(SALTED))
    assert s.upstream.asked[3].body == SALTED


async def test_a_law_that_forbids_it_meanwhile_has_no_engine_asked_again_without_the_salt(stage: Any) -> None:
    s = await stage()
    go = asyncio.Event()

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await go.wait()
        await line.send(plain(NO_SALT_HERE, "422 Unprocessable Content"))

    s.upstream.script = script
    client = await s.client()
    await client.send(post(SALTED))
    await until(lambda: s.upstream.asked)
    s.relay.react(Poked([machine.Recall("r1", 1)]))
    go.set()
    await until(lambda: s.tier.attempts)
    assert [asked.body for asked in s.upstream.asked] == [SALTED]
    assert s.tier.attempts[0] == (1, "unlawful_here")


async def test_a_refusal_that_quotes_the_client_does_not_remove_the_salt(stage: Any) -> None:
    s = await stage()
    refusal = b"""{"error":{"message":"bad temperature: Unexpected fields in the request: {'cache_salt'}"}}"""
    s.upstream.answer = lambda _m: plain(refusal, "400 Bad Request")
    answer = await s.ask(post(SALTED))
    assert (answer.line, answer.body) == ("HTTP/1.1 400 Bad Request", refusal)
    assert [asked.body for asked in s.upstream.asked] == [SALTED]


async def test_a_refusal_of_an_unsalted_request_passes_as_it_is(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: plain(NO_SALT_HERE, "422 Unprocessable Entity")
    answer = await s.ask(post(UNSALTED))
    assert (answer.line, answer.body) == ("HTTP/1.1 422 Unprocessable Content", NO_SALT_HERE)
    assert len(s.upstream.asked) == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"0","tools":[{"properties":{"cache_salt":{}}}]}',
        b'{"tools":[{"properties":{"cache_salt":{}}}]}',
        b'--x\r\n\r\n"cache_salt"\r\n--x--',
    ],
    ids=["salted", "named deeper", "a form"],
)
async def test_an_engine_that_refuses_a_salt_that_is_not_there_is_asked_no_more(stage: Any, body: bytes) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: plain(NO_SALT_HERE, "422 Unprocessable Content")
    for _ in range(2):
        assert (await s.ask(post(body))).status == 422
    assert len(s.upstream.asked) == (3 if body.startswith(b'{"cache_salt"') else 2)
    assert s.tier.faults == []
