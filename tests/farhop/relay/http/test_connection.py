"""What a client may send: every segmentation reads the same, every limit holds, nothing malformed gets through.
Answers leave in the order of requests, however each of them ends, and none waits without a bound."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_wire import SSE, Line, chunk, plain, post, until

from farhop.balance import outcome
from farhop.balance.bounds import ByteBudget, SlotLimit
from farhop.relay.answers import Reply
from farhop.relay.http.connection import ClientConnection, ClientLimits
from farhop.relay.http.cork import Cork
from farhop.relay.http.exchange import Exchange
from farhop.relay.http.listener import SWEEP_S
from tests.conftest import unhindered

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Echo(asyncio.Transport):
    """A handler that answers with what it understood, a listener without limits, and a transport that keeps bytes."""

    stopping = is_hop = False

    def __init__(self) -> None:
        super().__init__()
        self.out = b""
        self.closed = False
        self.cork = Cork(asyncio.get_running_loop())
        self.refused: Counter[str] = Counter()
        self.slots, self.requests, self.unproven = None, SlotLimit(sys.maxsize), dict[Any, float]()

    def admit(self, connection: ClientConnection, peer: object) -> None:
        pass

    def forget(self, connection: ClientConnection) -> None:
        pass

    def head(self, exchange: Exchange) -> Reply | None:
        return None

    def arrived(self, exchange: Exchange) -> None:
        head = exchange.head
        exchange.reply(Reply(200, b"%b %b %b" % (head.target, head.onward, exchange.body), outcome.SERVED))

    def write(self, data: Any) -> None:
        self.out += bytes(data)

    def writelines(self, parts: Any) -> None:
        self.out += b"".join(parts)

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def said_to(segments: list[bytes]) -> tuple[bytes, bool]:
    """What a connection answers to these segments, and whether it then closes."""

    async def play() -> tuple[bytes, bool]:
        echo, budget = Echo(), ByteBudget(1 << 20)
        connection = ClientConnection(echo, echo, ClientLimits(), budget)
        connection.connection_made(echo)
        for segment in segments:
            if not echo.closed:
                connection.data_received(segment)
        echo.cork.flush()
        connection.connection_lost(None)
        assert budget.used_bytes == 0
        return echo.out, echo.closed

    return uvloop.run(play())


SCRIPT = (
    post(b'{"a":1}', headers=b"X-A: 1\r\n")
    + CHUNKED
    + chunk(b"abc")
    + b"2;ext=1\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    + b"\r\nGET /v1/models?x=1 HTTP/1.1\r\nhost: a\r\n\r\n"
    + post(b"", headers=b"Connection: close\r\n")
)
BROKEN = post(b"1") + b"GET / HTTP/1.1\r\nHost : a\r\n\r\n" + post(b"3")


@pytest.mark.parametrize("script", [SCRIPT, BROKEN], ids=["whole", "broken"])
@given(data=st.data())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_every_segmentation_reads_the_same(script: bytes, data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(script) - 1), max_size=12)))
    segments = [script[a:b] for a, b in zip([0, *cuts], [*cuts, len(script)], strict=True)]
    assert said_to(segments) == said_to([script])


def test_byte_by_byte_reads_the_same() -> None:
    whole, closed = said_to([SCRIPT])
    assert (whole.count(b"HTTP/1.1 200"), closed) == (4, True)
    assert b"abcde" in whole
    assert b"trailer" not in whole
    assert said_to([SCRIPT[i : i + 1] for i in range(len(SCRIPT))]) == (whole, True)
    assert said_to([BROKEN])[0].count(b"HTTP/1.1 400") == 1


async def test_a_chunked_body_arrives_whole(stage: Any) -> None:
    s = await stage()
    answer = await s.ask(CHUNKED + chunk(b'{"a":') + chunk(b"1}") + b"0\r\n\r\n")
    assert answer.status == 200
    (asked,) = s.upstream.asked
    assert (asked.get("content-length"), asked.get("transfer-encoding"), asked.body) == ("7", None, b'{"a":1}')


@pytest.mark.parametrize("framing", [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_is_requested_if_the_client_waits_for_100_continue(stage: Any, framing: bytes) -> None:
    s = await stage()
    c = await s.client()
    await c.send(HEAD + framing + b"Expect: 100-Continue\r\n\r\n")
    assert await c.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    await c.send(b"abc" if b"Length" in framing else chunk(b"abc") + b"0\r\n\r\n")
    assert (await c.read()).status == 200
    assert s.upstream.asked[0].get("expect") is None


async def test_a_body_that_is_not_wanted_is_not_asked_for(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    await c.send(post(path="/refused", headers=b"Expect: 100-continue\r\n")[:-2])
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (404, "close")


async def test_a_small_refused_body_is_dropped_and_the_connection_kept(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    await c.send(post(b"x" * 1000, path="/refused") + post(path="/here"))
    assert [(await c.read()).status for _ in range(2)] == [404, 200]


@pytest.mark.parametrize(
    "request_",
    [post(b"x" * 100_000, path="/refused"), CHUNKED.replace(b"/v1/chat/completions", b"/refused") + chunk(b"x")],
    ids=["large", "chunked"],
)
async def test_a_refused_body_without_a_small_bound_ends_the_connection(stage: Any, request_: bytes) -> None:
    s = await stage()
    c = await s.client()
    await c.send(request_ + GET_HERE)
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (404, "close")
    assert await c.ended() == b""
    assert s.handler.exchanges == []


GET_HERE = b"GET /here HTTP/1.1\r\nHost: a\r\n\r\n"
MALFORMED = {
    "no host": b"GET /here HTTP/1.1\r\n\r\n",
    "blank host": b"GET /here HTTP/1.1\r\nHost:  \r\n\r\n",
    "two hosts": b"GET /here HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "length and coding": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "two equal lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "list of lengths": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "signed length": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "hex length": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "huge length": HEAD + b"Content-Length: 9999999999999999999999\r\n\r\n",
    "gzip, chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "gzip": HEAD + b"Transfer-Encoding: gzip\r\n\r\nabc",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked over 1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "obs-fold": b"GET /here HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n",
    "space before colon": b"GET /here HTTP/1.1\r\nHost : a\r\n\r\n",
    "no header name": b"GET /here HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    "nul in value": b"GET /here HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n",
    "bare lf": b"GET /here HTTP/1.1\nHost: a\n\n",
    "bare cr": b"GET /here HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
    "userinfo": b"GET http://a@a/here HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "connect": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/2.0": b"GET /here HTTP/2.0\r\nHost: a\r\n\r\n",
    "http/0.9": b"GET /here HTTP/0.9\r\nHost: a\r\n\r\n",
    "http/1.2": b"GET /here HTTP/1.2\r\nHost: a\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00",
    "garbage": b"\0\1\2\3 garbage\r\n\r\n",
    "bad chunk size": CHUNKED + b"zz\r\n",
    "chunk size overflow": CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n",
    "chunk too long": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "two authorizations": b"GET /here HTTP/1.1\r\nHost: a\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
    "two hop tokens": b"GET /here HTTP/1.1\r\nHost: a\r\nx-farhop-hop: a\r\nx-farhop-hop: b\r\n\r\n",
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_requests_are_refused_and_nothing_after_them_is_read(stage: Any, request_: bytes) -> None:
    s = await stage()
    c = await s.client()
    await c.send(GET_HERE + request_ + GET_HERE)
    assert (await c.read()).status == 200
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (400, "close")
    assert b'"code":"malformed_http"' in answer.body
    assert b'"type":"invalid_request_error"' in answer.body
    assert await c.ended() == b""
    assert len(s.handler.exchanges) == 1
    assert s.upstream.asked == []


@pytest.mark.parametrize("extra", ["a length of 3 and a space", "an upgrade that is not made"])
async def test_unusual_but_unambiguous_requests_pass(stage: Any, extra: str) -> None:
    s = await stage()
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n"
    line = b"Content-Length: 3 \r\n" if "length" in extra else upgrade
    assert (await s.ask(HEAD + line + b"\r\nabc")).status == 200
    assert s.upstream.asked[0].body == b"abc"


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"X: " + b"x" * 40_000 + b"\r\n\r\n",
        HEAD + b"X: " + b"x" * 40_000,
        b"GET /" + b"x" * 40_000,
        HEAD + b"X: y\r\n" * 120 + b"\r\n",
        HEAD + b"X: y\r\n" * 120,
        GET_HERE + HEAD + b"X: " + b"x" * 40_000 + b"\r\n\r\n",
    ],
    ids=["long", "long, unfinished", "long target", "many", "many, unfinished", "long, behind another"],
)
async def test_heads_are_bounded(stage: Any, request_: bytes) -> None:
    s = await stage()
    c = await s.client()
    await c.send(request_)
    if request_.startswith(GET_HERE):
        assert (await c.read()).status == 200
    answer = await c.read()
    assert answer.status == 431
    assert b"head_too_large" in answer.body
    assert await c.ended() == b""


async def test_a_large_body_in_the_same_segment_is_not_a_large_head(stage: Any) -> None:
    s = await stage()
    assert (await s.ask(post(b"x" * 60_000))).status == 200


@pytest.mark.parametrize(
    "request_",
    [post(b"x" * 2001), CHUNKED + chunk(b"x" * 1500) * 2 + b"0\r\n\r\n", HEAD + b"Content-Length: 999999999\r\n\r\n"],
    ids=["length", "chunks", "announced"],
)
async def test_bodies_are_bounded(stage: Any, request_: bytes) -> None:
    s = await stage(client_limits=ClientLimits(body_bytes_max=2000))
    c = await s.client()
    await c.send(request_ + GET_HERE)
    answer = await c.read()
    assert (answer.status, answer.get("connection")) == (413, "close")
    assert b"at most 2000 bytes" in answer.body
    assert await c.ended() == b""
    assert s.handler.exchanges == []
    assert s.handler.abandoned == [("body_too_large", 413)]
    assert (await s.ask(post(b"x" * 2000))).status == 200


@pytest.mark.parametrize(
    "tail",
    [b"1;" + b"x" * 50_000, chunk(b"a") + b"0\r\nX-T: " + b"x" * 50_000, b"1;" + b"x" * 2000 + b"\r\na\r\n"],
    ids=["extension", "trailer", "extensions"],
)
async def test_framing_is_bounded(stage: Any, tail: bytes) -> None:
    s = await stage()
    c = await s.client()
    await c.send(CHUNKED)
    sending = asyncio.create_task(c.send(tail * (1 if len(tail) > 9000 else 200)))
    answer = await c.read()
    assert answer.status == 400
    assert b"too many chunk extensions or trailers" in answer.body
    c.abort()
    await asyncio.gather(sending, return_exceptions=True)


async def test_trailers_are_dropped_and_do_not_reach_the_next_head(stage: Any) -> None:
    s = await stage()
    trailers = b"Authorization: forged\r\nX-T: 1\r\n" * 60
    c = await s.client()
    await c.send(CHUNKED + chunk(b"a") + b"0\r\n" + trailers + b"\r\n" + post(b"b"))
    assert [(await c.read()).status for _ in range(2)] == [200, 200]
    for asked in s.upstream.asked:
        assert asked.get("authorization") == "Bearer engine-key"
        assert asked.get("x-t") is None


async def test_a_body_of_one_byte_chunks_is_relayed(stage: Any) -> None:
    s = await stage()
    assert (await s.ask(CHUNKED + chunk(b"a") * 20_000 + b"0\r\n\r\n")).status == 200
    assert s.upstream.asked[0].body == b"a" * 20_000


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        (b"", b""),
        (b"POST /here HT", b""),
        (b"POST /here HTTP/1.1\r\nX: ", b"x"),
        (post(b"x" * 100)[:-10], b""),
        (post(b"x" * 4000)[:-2000], b"x"),
    ],
    ids=["silence", "half a head", "a dripping head", "half a body", "a dripping body"],
)
async def test_slowness_is_bounded(stage: Any, sent: bytes, drip: bytes) -> None:
    s = await stage(client_limits=ClientLimits(head_s=0.2, body_s=0.2, upload_s=0.6, idle_s=0.2))
    c = await s.client()
    began, took_s = time.monotonic(), unhindered()
    await c.send(sent)

    async def dripping() -> None:
        while drip:
            await c.send(drip)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(dripping())
    if sent:
        answer = await c.read()
        assert (answer.status, answer.get("connection")) == (408, "close")
        assert b"request_timeout" in answer.body
    else:
        assert await c.ended() == b""
    assert time.monotonic() - began > 0.15
    assert took_s() < 2.0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_goes_on_after_its_refusal_is_dropped(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(linger_s=0.1))
    c = await s.client()
    await c.send(b"garbage\r\n\r\n")
    assert (await c.read()).status == 400
    await until(lambda: s.listener.connections == 0)


async def test_a_client_that_sends_on_after_its_last_answer_is_dropped(stage: Any) -> None:
    """It may still be sending what was refused: but not for longer than a request may take to arrive."""
    s = await stage(client_limits=ClientLimits(linger_s=0.2, upload_s=0.6))
    c = await s.client()
    began, took_s = time.monotonic(), unhindered()
    await c.send(b"garbage\r\n\r\n")
    assert (await c.read()).status == 400
    while s.listener.connections and took_s() < 5.0:
        await c.send(b"x")
        await asyncio.sleep(0.02)
    assert time.monotonic() - began > 0.5
    assert took_s() < 3.0


async def test_a_client_has_time_to_take_its_last_answer_however_long_that_took(stage: Any) -> None:
    """`upload_s` bounds how long it may send on behind the answer, from when that was sent."""
    s = await stage(client_limits=ClientLimits(linger_s=5.0, upload_s=1.0))

    async def slow(line: Line) -> None:
        await s.upstream.request(line)
        await asyncio.sleep(1.2)
        await line.send(plain(b"{}"))

    s.upstream.script = slow
    c = await s.client()
    await c.send(post(headers=b"connection: close\r\n"))
    assert (await c.read()).status == 200
    await asyncio.sleep(2 * SWEEP_S)
    assert s.listener.connections == 1


async def test_the_budget_bounds_what_is_buffered(stage: Any) -> None:
    s = await stage(budget_bytes=3000)
    first, second = await s.client(), await s.client()
    await first.send(post(b"x" * 2000)[:-1])
    await until(lambda: s.budget.used_bytes >= 1999)
    await second.send(post(b"x" * 2000))
    answer = await second.read()
    assert (answer.status, answer.get("connection"), answer.get("retry-after")) == (503, "close", "1")
    assert b"buffers_full" in answer.body
    assert s.handler.abandoned == [("buffers_full", 503)]
    await first.send(b"x")
    assert (await first.read()).status == 200
    assert s.budget.used_bytes == 0
    assert (await s.ask(post(b"x" * 2000))).status == 200


@pytest.mark.parametrize(
    "request_", [b"POST / HTTP/1.1\r\nX: " + b"x" * 5000, HEAD + b"X: " + b"x" * 5000 + b"\r\n\r\n"]
)
async def test_the_budget_bounds_heads_too(stage: Any, request_: bytes) -> None:
    s = await stage(budget_bytes=3000)
    assert (await s.ask(request_)).status == 503


async def test_the_budget_taken_by_a_partial_head_is_returned(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    await c.send(GET_HERE[:-4])
    await until(lambda: s.budget.used_bytes == len(GET_HERE) - 4)
    await c.send(GET_HERE[-4:])
    assert (await c.read()).status == 200
    assert s.budget.used_bytes == 0
    await c.send(GET_HERE[:-4])
    await until(lambda: s.budget.used_bytes > 0)  # and when the connection goes, as the stage checks


async def test_bytes_after_a_closing_request_are_ignored(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda m: plain(m.body)
    c = await s.client()
    await c.send(post(b"1", headers=b"Connection: close\r\n") + GET_HERE)
    assert (await c.read()).body == b"1"
    assert await c.ended() == b""
    assert len(s.handler.exchanges) == 1


# -- in their order


async def test_pipelined_requests_are_answered_in_order(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda m: plain(m.body)
    c = await s.client()
    await c.send(post(b"1") + GET_HERE + post(b"3", path="/refused") + post(b"4") + GET_HERE)
    found = [await c.read() for _ in range(5)]
    assert [a.status for a in found] == [200, 200, 404, 200, 200]
    assert [a.body for a in found if a.status == 200] == [b"1", b'{"here":2}', b"4", b'{"here":4}']


async def test_a_stream_is_not_torn_by_what_follows_it(stage: Any) -> None:
    s = await stage()
    go = asyncio.Event()

    async def streams(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await line.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        await s.upstream.request(line)

    s.upstream.script = streams
    c = await s.client()
    await c.send(post() + post(path="/refused") + b"GARBAGE\r\n\r\n")
    await until(lambda: len(s.handler.exchanges) == 1)
    go.set()
    stream, refused, garbage = [await c.read() for _ in range(3)]
    assert stream.body == b"data: 1\n\ndata: 2\n\n"
    assert (refused.status, garbage.status) == (404, 400)
    assert garbage.get("connection") == "close"
    assert await c.ended() == b""


async def test_a_slow_request_is_refused_in_its_turn(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(head_s=0.05, linger_s=0.05))
    go = asyncio.Event()

    async def slow(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            await go.wait()
            await line.send(plain(asked.body))

    s.upstream.script = slow
    c = await s.client()
    await c.send(post(b"1") + post(b"2") + post(b"3")[:20])
    await asyncio.sleep(0.7)  # two sweeps beyond every limit
    go.set()
    found = [await c.read() for _ in range(3)]
    assert [a.status for a in found] == [200, 200, 408]
    assert [a.body for a in found[:2]] == [b"1", b"2"]
    assert await c.ended() == b""


async def test_very_many_pipelined_requests_are_cut_off_at_the_bound(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(pipelined_max=4))
    c = await s.client()
    await c.send(post() + GET_HERE * 2000)
    found = [await c.read() for _ in range(5)]
    assert [a.status for a in found] == [200] * 5
    assert [a.get("connection") for a in found] == [None] * 4 + ["close"]
    assert await c.ended() == b""
    assert len(s.handler.exchanges) == 5


async def test_many_that_wait_do_not_exhaust_the_stack(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(pipelined_max=100_000))
    c = await s.client()
    await c.send(post() + GET_HERE * 3000)
    found = [await c.read() for _ in range(3001)]
    assert found[-1].body == b'{"here":3001}'


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (b"GET /here HTTP/1.1\r\nhost: x\r\n\r\n", 16),
        (b"GET /no HTTP/1.1\r\nhost: x\r\n\r\n", 16),
        (post(), 16),
        (post(b"x" * 8000), 3),
    ],
)
async def test_many_in_one_segment_are_served_a_few_in_a_turn_of_the_loop(
    stage: Any, asked: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB of requests that are refused held the loop for 0.2 s and more, before anybody was asked for a key; of
    bodies that take long for their size 16 would be 30 ms."""
    s = await stage(client_limits=ClientLimits(pipelined_max=100_000))
    began: list[int] = []
    read = ClientConnection._begin

    def begin(connection: ClientConnection, *given: Any) -> bytes:
        began[-1] += 1
        return read(connection, *given)

    taken = ClientConnection.data_received

    def received(connection: ClientConnection, data: bytes) -> None:
        began.append(0)
        taken(connection, data)

    monkeypatch.setattr(ClientConnection, "_begin", begin)
    monkeypatch.setattr(ClientConnection, "data_received", received)
    c, other = await s.client(), await s.client()
    await c.send(asked * 500)
    await other.send(GET_HERE)
    assert (await other.read()).status == 200
    assert len([await c.read() for _ in range(500)]) == 500
    assert (max(began), sum(began)) == (most, 501)
    assert s.budget.used_bytes == 0


async def test_of_a_body_that_is_here_at_once_not_all_is_read_in_a_turn(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop reads a connection 32 times in one turn: 8 MB in small chunks held the loop for 40 ms."""
    s = await stage()
    loop, turn, read, over = asyncio.get_running_loop(), 0, Counter[int](), False
    taken = ClientConnection.data_received

    def received(connection: ClientConnection, data: bytes) -> None:
        read[turn] += len(data)
        taken(connection, data)

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not over:
            loop.call_soon(tick)

    monkeypatch.setattr(ClientConnection, "data_received", received)
    tick()
    body = b"x" * 200 * 60_000
    c = await s.client()
    for _ in range(2):  # and reading continues
        await c.send(CHUNKED + chunk(b"x" * 200) * 60_000 + b"0\r\n\r\n")
        assert (await c.read()).status == 200
    over = True
    assert [asked.body for asked in s.upstream.asked] == [body] * 2
    assert max(read.values()) <= 256 * 1024
    assert s.budget.used_bytes == 0


async def test_a_client_that_leaves_with_requests_put_off_leaves_nothing(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    await c.send(GET_HERE * 1500)
    c.writer.transport.abort()
    await until(lambda: not s.listener.open_connections)
    assert s.budget.used_bytes == 0


async def test_a_client_that_asks_and_does_not_read_gets_no_more_answers(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    c.writer.transport.pause_reading()  # type: ignore[attr-defined]
    sending = asyncio.create_task(c.send(GET_HERE * 200_000))
    await until(lambda: [i for i in s.listener.open_connections if i._reads_no_more])
    (connection,) = s.listener.open_connections
    assert len(connection._waiting) == 32
    served = len(s.handler.exchanges)
    assert connection._transport.get_write_buffer_size() < 1 << 20
    c.writer.transport.resume_reading()  # type: ignore[attr-defined]
    found = [await c.read() for _ in range(served + 32)]
    assert found[-1].body == b'{"here":%d}' % (served + 32)
    assert found[-1].get("connection") == "close"
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(send_s=0.1))
    s.upstream.answer = lambda _m: plain(b"x" * (32 << 20))
    c = await s.client()
    c.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await c.send(post())
    await until(lambda: s.tier.concluded_with)
    assert s.tier.concluded_with[0][0] == "client_left"
    await until(lambda: s.listener.connections == 0)


async def test_a_large_last_answer_is_sent_whole_to_a_slow_client(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(linger_s=0.05))
    body = b"x" * (8 << 20)
    s.upstream.answer = lambda _m: plain(body)
    c = await s.client()
    await c.send(post(headers=b"Connection: close\r\n"))
    received = 0
    while data := await c.reader.read(1 << 20):
        received += len(data)
        await asyncio.sleep(0.05)
    assert received > len(body)


async def test_a_client_that_half_closes_has_left(stage: Any) -> None:
    s = await stage()

    async def silent(line: Line) -> None:
        await s.upstream.request(line)
        await s.upstream.request(line)

    s.upstream.script = silent
    c = await s.client()
    await c.send(post())
    await until(lambda: s.upstream.asked)
    c.writer.write_eof()
    await until(lambda: s.upstream.gone == 1)
    assert s.tier.concluded_with == [("client_left", 0, None)]


async def test_waiting_requests_end_with_their_connection(stage: Any) -> None:
    s = await stage()

    async def silent(line: Line) -> None:
        await s.upstream.request(line)
        await s.upstream.request(line)

    s.upstream.script = silent
    c = await s.client()
    await c.send(post(b"1" * 100) + post(b"2" * 100))
    await until(lambda: s.upstream.asked)
    assert s.budget.used_bytes >= 200
    c.abort()
    await until(lambda: s.listener.connections == 0)
    assert s.handler.abandoned == [("client_left", 0)]
    assert s.budget.used_bytes == 0


@pytest.mark.parametrize("stage_name", ["head", "arrived"])
async def test_handler_error_is_answered_with_500_internal_error(stage: Any, stage_name: str) -> None:
    s = await stage()
    s.expected_errors = 1
    s.handler.break_at = stage_name
    c = await s.client()
    await c.send(post())
    answer = await c.read()
    assert (answer.status, b"internal_error" in answer.body) == (500, True)
    s.handler.break_at = ""
    await c.send(post())
    assert (await c.read()).status == 200
    assert str(s.errors[0]["exception"]) == "the handler broke"
