"""Upstreams that refuse, stall, break and lie: each ends in one word, and no connection outlives its use."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_stage import Poked
from relay_wire import AS_TARGET_0, SSE, Line, Upstream, chunk, plain, post, until

from farhop.balance import machine, outcome
from farhop.balance.machine import Address
from farhop.relay.upstream import pool
from farhop.relay.upstream.attempt import AttemptRun
from farhop.relay.upstream.pool import UpstreamLimits

JSON = b"content-type: application/json\r\n"


def once(s: Any, *segments: bytes, then: str = "wait") -> Callable[[Line], Awaitable[None]]:
    """Answer the first request with these segments, then close, abort, or wait for the relay to close."""

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        for segment in segments:
            await line.send(segment)
            await asyncio.sleep(0.01)  # segments of their own
        if then == "wait":
            await s.upstream.request(line)
        elif then == "close":
            await line.close()

    return script


def lost(s: Any) -> str:
    """How the only attempt ended."""
    ((_, how),) = s.tier.attempts
    return str(how)


@contextlib.asynccontextmanager
async def other(answer: bytes) -> AsyncIterator[Address]:
    """Another upstream, which gives this answer."""
    upstream = Upstream()
    upstream.answer = lambda _m: answer
    await upstream.open()
    try:
        yield upstream.address
    finally:
        await upstream.close()


async def test_connections_are_kept_and_used_again(stage: Any) -> None:
    s = await stage()
    c = await s.client()
    for _ in range(3):
        await c.send(post())
        assert (await c.read()).status == 200
    assert len(s.upstream.lines) == 1
    assert s.pool.connections == 1


async def test_a_large_body_goes_on_the_connection_that_carried_as_large_a_one_last(stage: Any) -> None:
    s = await stage()
    lent = list[pool.UpstreamConnection]()

    class Holder:
        """Holds what it is lent until it gives it back."""

        def connected(self, connection: pool.UpstreamConnection) -> None:
            lent.append(connection)

    async def hold(*sizes: int) -> list[pool.UpstreamConnection]:
        lent.clear()
        for place, size in enumerate(sizes):
            s.pool.lend(s.upstream.address, Holder(), size)
            await until(lambda place=place: len(lent) > place)
        held = list(lent)
        for connection in held:
            connection.attempt = None
            s.pool.give_back(connection)
        return held

    middling, large, small = await hold(40_000, 200_000, 10)
    assert len({id(middling), id(large), id(small)}) == 3
    assert await hold(14_600) == [small]  # fits into the first window of any connection: the one used last
    assert await hold(30_000) == [large]  # has carried as much, and was used after the other one that has
    assert await hold(200_001) == [large]
    assert await hold(50_000, 40_001) == [large, middling]  # none has carried as much: the one that carried the most
    assert await hold(20_000, 30_000, 40_000) == [middling, large, small]


async def test_an_upstream_is_in_use_while_it_answers_and_a_while_after(stage: Any) -> None:
    s = await stage()
    seen = []

    def answer(_: object) -> bytes:
        seen.append(s.pool.in_use(s.upstream.address, 0.0))
        return plain(b"{}")

    s.upstream.answer = answer
    assert not s.pool.in_use(s.upstream.address, 60.0)
    for _ in range(2):
        assert (await s.ask(post())).status == 200
        assert s.pool.in_use(s.upstream.address, 60.0)
    assert not s.pool.in_use(s.upstream.address, 0.0)
    assert seen == [True, True]


async def test_first_request_after_idle_is_reported(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage()
    told = list[Address]()
    s.pool.on_use = told.append
    answers = await asyncio.gather(*(s.ask(post()) for _ in range(3)))
    assert {answer.status for answer in answers} == {200}
    assert told == [s.upstream.address]  # the first of several at once
    assert (await s.ask(post())).status == 200
    assert len(told) == 1
    monkeypatch.setattr(pool, "RESTED_S", -1.0)
    assert (await s.ask(post())).status == 200
    assert told == [s.upstream.address] * 2


async def test_a_chunked_answer_keeps_its_connection_too(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: SSE + chunk(b"data: 1\n\n") + b"0\r\nx-trailer: 1\r\n\r\n"
    for _ in range(2):
        answer = await s.ask(post())
        assert answer.body == b"data: 1\n\n"
        assert answer.get("x-trailer") is None
    assert len(s.upstream.lines) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokgarbage",
    ],
    ids=["close", "http-1.0", "a second answer", "garbage"],
)
async def test_a_connection_that_cannot_be_trusted_is_not_kept(stage: Any, answer: bytes) -> None:
    s = await stage()
    s.upstream.script = once(s, answer)
    for _ in range(2):
        assert (await s.ask(post())).body == b"ok"
    assert len(s.upstream.lines) == 2
    await until(lambda: s.pool.connections == 0)
    assert s.tier.attempts == [(1, "served")] * 2


async def test_an_answer_before_the_request_was_sent_whole_does_not_keep_the_connection(stage: Any) -> None:
    s = await stage()

    async def hasty(line: Line) -> None:
        await line.reader.readuntil(b"\r\n\r\n")
        await line.send(plain(b"{}", "413 Content Too Large"))
        await until(lambda: s.pool.connections == 0)

    s.upstream.script = hasty
    assert (await s.ask(post(b"x" * (8 << 20)))).status == 413


async def test_unsolicited_bytes_close_a_kept_connection(stage: Any) -> None:
    s = await stage()
    assert (await s.ask(post())).status == 200
    await s.upstream.lines[0].send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    await until(lambda: s.pool.connections == 0)
    assert (await s.ask(post())).status == 200
    assert len(s.upstream.lines) == 2


def dying_when_used_again(s: Any, after_s: float = 0.0) -> Callable[[Line], Awaitable[None]]:
    """The first connection closes over its second request, without a word."""

    async def script(line: Line) -> None:
        await line.send(s.upstream.answer(await s.upstream.request(line)))
        if len(s.upstream.lines) == 1:
            await s.upstream.request(line)
            await asyncio.sleep(after_s)
        else:
            while True:
                await line.send(s.upstream.answer(await s.upstream.request(line)))

    return script


async def test_a_kept_connection_that_is_dead_is_reported_and_asking_again_is_the_machines(stage: Any) -> None:
    """A POST is not sent again behind the machine's back: it counts, as any other retry does."""
    s = await stage()
    s.upstream.script = dying_when_used_again(s)
    assert (await s.ask(post())).status == 200
    assert (await s.ask(post())).status == 502  # the scripted machine has one address, and tries it once
    s.flow.addresses.append(s.upstream.address)
    assert (await s.ask(post())).status == 200
    assert s.tier.attempts == [(1, "served"), (1, "kept_connection_closed"), (1, "served")]
    assert len(s.upstream.lines) == 2


async def test_a_retry_after_a_dead_kept_connection_uses_a_new_connection(stage: Any) -> None:
    """llama.cpp's server closes kept connections while others wait for it: else one request would meet several."""
    s = await stage()
    s.flow.addresses.append(s.upstream.address)
    first, second, dies = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(line: Line) -> None:
        number = len(s.upstream.lines)
        await s.upstream.request(line)
        if number <= 2:
            await (first if number == 1 else second).wait()
        await line.send(s.upstream.answer(None))
        if number == 1:
            await s.upstream.request(line)
            await dies.wait()
        else:
            await s.upstream.request(line)
            await line.send(s.upstream.answer(None))

    s.upstream.script = script
    one, other = (asyncio.create_task(s.ask(post())) for _ in range(2))
    await until(lambda: len(s.upstream.asked) == 2)
    first.set()
    await asyncio.wait((one, other), return_when=asyncio.FIRST_COMPLETED)
    again = asyncio.create_task(s.ask(post()))
    await until(lambda: len(s.upstream.asked) == 3)
    second.set()
    assert [(await asked).status for asked in (one, other)] == [200, 200]  # now it is kept, and has not been idle long
    dies.set()
    assert (await again).status == 200
    assert s.tier.attempts[2:] == [(1, "kept_connection_closed"), (2, "served")]
    assert len(s.upstream.lines) == 3


@pytest.mark.parametrize("late_s", [0.0, 0.02])
async def test_an_upstream_that_answers_twice_gets_one_request_per_connection(
    stage: Any, monkeypatch: Any, late_s: float
) -> None:
    """Else each request is given the second answer of the one before it, which is another tenant's."""
    s = await stage()

    async def twice(line: Line) -> None:
        while True:
            name = (await s.upstream.request(line)).body
            await line.send(plain(name))
            await asyncio.sleep(late_s)
            await line.send(plain(b"again: " + name))

    s.upstream.script = twice
    assert (await s.ask(post(b'{"n": 0}'))).body == b'{"n": 0}'
    await until(lambda: s.pool.connections == 0)  # it sent more while idle
    for n in range(1, 5):
        assert (await s.ask(post(b'{"n": %d}' % n))).body == b'{"n": %d}' % n
        assert s.pool._idle == {}
    s.upstream.script = s.upstream.serve
    monkeypatch.setattr(pool, "UNASKED_S", -1.0)
    s.pool.distrust(s.upstream.address)
    s.pool.sweep(asyncio.get_running_loop().time())
    assert (await s.ask(post())).status == 200
    assert len(s.pool._idle) == 1


async def test_a_server_may_say_that_it_waited_long_enough(stage: Any) -> None:
    s = await stage()

    async def impatient(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(s.upstream.answer(None))
        await asyncio.sleep(0.01)
        await line.send(plain(b"", "408 Request Timeout", b"connection: close\r\n"))
        await s.upstream.request(line)

    s.upstream.script = impatient
    assert (await s.ask(post())).status == 200
    await until(lambda: s.pool.connections == 0)
    s.upstream.script = s.upstream.serve
    assert (await s.ask(post())).status == 200
    assert s.pool.connections == 1


async def test_a_408_that_took_its_time_is_said_of_the_request(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CROSSING_S", 0.05)
    s = await stage()
    s.flow.addresses = [s.upstream.address] * 2

    async def late(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(s.upstream.answer(None))
        await s.upstream.request(line)
        await asyncio.sleep(0.2)
        await line.send(plain(b"", "408 Request Timeout", b"connection: close\r\n"))

    s.upstream.script = late
    assert (await s.ask(post())).status == 200
    assert (await s.ask(post())).status == 408


async def test_a_bug_while_connecting_ends_its_request(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    s = await stage()
    monkeypatch.setattr(pool, "dial", broken)
    assert (await s.ask(post())).status == 500
    assert [str(e) for e in s.tier.faults] == ["a bug"]


async def test_a_bug_while_connecting_is_no_end_of_a_request_that_is_elsewhere_by_then(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, go_on, dial = await stage(), asyncio.Event(), pool.dial
    s.flow.addresses = [s.upstream.address] * 2

    async def broken(*_: object) -> None:
        monkeypatch.setattr(pool, "dial", dial)
        await go_on.wait()
        raise RuntimeError("a bug")

    async def slow(line: Line) -> None:
        await s.upstream.request(line)
        go_on.set()
        await until(lambda: s.tier.faults)
        await line.send(s.upstream.answer(None))

    monkeypatch.setattr(pool, "dial", broken)
    s.upstream.script = slow
    asked = asyncio.create_task(s.ask(post()))
    await until(lambda: s.relay.live)
    (name,) = s.relay.live
    s.relay.react(Poked([machine.Recall(name, 1)]))
    assert (await asked).status == 200
    assert [str(e) for e in s.tier.faults] == ["a bug"]


@pytest.mark.parametrize("closes", [True, False])
async def test_a_server_that_was_asked_just_as_it_had_waited_long_enough_is_asked_again(
    stage: Any, closes: bool
) -> None:
    """Its 408 was meant for the connection at rest (RFC 9110 §15.5.9), if it closes that."""
    s = await stage()
    s.flow.addresses = [s.upstream.address] * 2

    async def impatient(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(s.upstream.answer(None))
        await s.upstream.request(line)
        await line.send(plain(b"", "408 Request Timeout", b"connection: close\r\n" if closes else b""))

    s.upstream.script = impatient
    assert (await s.ask(post())).status == 200
    s.upstream.script = s.upstream.serve
    assert (await s.ask(post())).status == (200 if closes else 408)
    assert [how for _, how in s.tier.attempts][1:] == (
        ["kept_connection_closed", "served"] if closes else ["engine_error"]
    )


async def test_a_server_that_waits_for_no_request_is_not_asked_without_end(stage: Any) -> None:
    s = await stage()
    s.flow.addresses = [s.upstream.address] * 2
    assert (await s.ask(post())).status == 200
    s.upstream.answer = lambda _m: plain(b"", "408 Request Timeout", b"connection: close\r\n")
    assert (await s.ask(post())).status == 408


async def test_a_retry_does_not_use_a_connection_idle_as_long_as_the_dead_one(stage: Any) -> None:
    s = await stage()
    s.flow.addresses.append(s.upstream.address)
    go = asyncio.Event()

    async def script(line: Line) -> None:
        first = len(s.upstream.lines) <= 3
        await s.upstream.request(line)
        await go.wait()
        await line.send(s.upstream.answer(None))
        await s.upstream.request(line)  # whichever of the first three is used again breaks, with a request on it
        if not first:
            await line.send(s.upstream.answer(None))

    s.upstream.script = script
    asked = [asyncio.create_task(s.ask(post())) for _ in range(3)]
    await until(lambda: len(s.upstream.asked) == 3)
    go.set()
    assert [(await one).status for one in asked] == [200] * 3
    await until(lambda: s.pool.connections == 3)
    assert (await s.ask(post())).status == 200
    assert s.tier.attempts[3:] == [(1, "kept_connection_closed"), (2, "served")]
    await until(lambda: s.pool.connections == 1)


async def test_a_connection_that_dies_long_after_its_reuse_is_a_failed_attempt(stage: Any, monkeypatch: Any) -> None:
    """An engine that crashes over a prompt is no connection that was closed at rest."""
    monkeypatch.setattr(pool, "CROSSING_S", 0.02)
    s = await stage()
    s.upstream.script = dying_when_used_again(s, after_s=0.1)
    assert (await s.ask(post())).status == 200
    assert (await s.ask(post())).status == 502
    assert s.tier.attempts == [(1, "served"), (1, "upstream_died_before_first_byte")]


async def test_a_fresh_connection_that_dies_is_not_replaced_silently(stage: Any) -> None:
    s = await stage()
    s.upstream.script = once(s, then="abort")
    answer = await s.ask(post())
    assert answer.status == 502
    assert lost(s) == "upstream_died_before_first_byte"
    assert len(s.upstream.lines) == 1


async def test_an_idle_connection_is_closed_after_its_time(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(idle_s=0.05))
    assert (await s.ask(post())).status == 200
    await until(lambda: s.pool.connections == 0)


@pytest.mark.parametrize("requests", [1, 2])
async def test_a_connection_that_the_other_side_closes_at_rest_is_reported_if_it_was_used_again(
    stage: Any, requests: int
) -> None:
    """A server that closes after each answer says nothing by it."""
    s = await stage()
    closed: list[tuple[Any, float]] = []
    s.pool.on_closed = lambda address, rested_s: closed.append((address, rested_s))

    async def script(line: Line) -> None:
        for _ in range(requests):
            await s.upstream.request(line)
            await line.send(plain(b"{}"))
        await line.close()

    s.upstream.script = script
    for _ in range(requests):
        assert (await s.ask(post())).status == 200
    await until(lambda: s.pool.connections == 0)
    assert [address for address, _ in closed] == [s.upstream.address] * (requests - 1)
    assert all(0.0 <= rested_s < 20.0 for _, rested_s in closed)


async def test_giving_up_an_address_closes_its_idle_connections_alone(stage: Any) -> None:
    s = await stage()
    assert (await s.ask(post())).status == 200
    s.pool.give_up(Address("127.0.0.1", 1))
    await asyncio.sleep(0.02)
    assert s.pool.connections == 1
    s.pool.give_up(s.upstream.address)
    await until(lambda: s.pool.connections == 0)
    assert (await s.ask(post())).status == 200  # by a new one
    assert len(s.upstream.lines) == 2


async def test_the_number_of_idle_connections_is_bounded(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(idle_max=1))
    gate = asyncio.Event()

    async def together(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            await gate.wait()
            await line.send(s.upstream.answer(asked))

    s.upstream.script = together
    asking = [asyncio.create_task(s.ask(post())) for _ in range(3)]
    await until(lambda: len(s.upstream.asked) == 3)
    gate.set()
    assert [a.status for a in await asyncio.gather(*asking)] == [200] * 3
    await until(lambda: s.pool.connections == 1)


async def test_a_refused_connect_goes_to_the_next(stage: Any) -> None:
    s = await stage()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = Address("127.0.0.1", free.getsockname()[1])
        s.flow.addresses = [nobody, s.upstream.address]
        assert (await s.ask(post())).status == 200
        assert s.tier.attempts == [(1, "connect_failed"), (2, "served")]
        s.flow.addresses = [nobody]
        assert (await s.ask(post())).status == 502


async def test_streams_to_one_address_are_bounded_and_the_next_takes_over(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(streams_max=2))
    go = asyncio.Event()

    async def waits(line: Line) -> None:
        while True:
            await s.upstream.request(line)
            await go.wait()
            await line.send(plain(b"1"))

    async with other(plain(b"2")) as elsewhere:
        s.upstream.script = waits
        s.flow.addresses.append(elsewhere)
        held = [await s.client() for _ in range(2)]
        for line in held:
            await line.send(post())
        await until(lambda: len(s.upstream.asked) == 2)
        assert (await s.ask(post())).body == b"2"
        s.flow.addresses.pop()
        answer = await s.ask(post())
        assert (answer.status, b"too_many_upstream_connections" in answer.body) == (503, True)
        go.set()
        assert [(await line.read()).body for line in held] == [b"1", b"1"]
        assert (await s.ask(post())).body == b"1"
    how = sorted(how for _, how in s.tier.attempts)
    assert how == ["served"] * 4 + ["too_many_upstream_connections"] * 2


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_a_lack_of_descriptors_here_is_not_the_upstreams_fault(
    stage: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    s = await stage()

    async def lacking(_address: Address) -> Any:
        raise OSError(number, "none left")

    monkeypatch.setattr(s.pool, "_open", lacking)
    assert (await s.ask(post())).status == 503
    assert lost(s) == "too_many_upstream_connections"


async def test_a_connect_that_takes_too_long_is_given_up(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(connect_s=0.1))
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = deaf.getsockname()
        for _ in range(4):  # a full backlog drops new connections
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        s.flow.addresses = [Address("127.0.0.1", address[1])]
        assert (await s.ask(post())).status == 504
    assert lost(s) == "connect_timeout"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", f"{'x' * 64}.example"])
async def test_a_name_that_means_nothing_is_a_failed_connect(stage: Any, name: str) -> None:
    s = await stage()
    s.flow.addresses = [Address(name, 80)]
    assert (await s.ask(post())).status == 502
    assert lost(s) == "connect_failed"


@pytest.mark.parametrize(
    ("segments", "then", "how", "status"),
    [
        ([], "close", "upstream_died_before_first_byte", 502),
        ([b"HTTP/1.1 200 OK\r\ncontent-"], "abort", "upstream_died_before_first_byte", 502),
        ([plain(b"{}")[:-2]], "abort", "upstream_died_before_first_byte", 502),
        ([b"SSH-2.0-OpenSSH\r\n"], "wait", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 200 OK\ncontent-length: 2\n", b"\n{}"], "wait", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab"], "wait", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"], "wait", "upstream_bad_framing", 502),
        (
            [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"],
            "wait",
            "upstream_bad_framing",
            502,
        ),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nab"], "close", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n"], "wait", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"\r\n"], "wait", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000], "wait", "upstream_bad_framing", 502),
        ([b"HTTP/1.1 102 Processing\r\n\r\n" * 4000], "wait", "upstream_bad_framing", 502),
        (
            [b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"],
            "wait",
            "upstream_bad_framing",
            502,
        ),
        ([SSE + b"zz\r\n"], "wait", "upstream_bad_framing", 502),
    ],
)
async def test_an_answer_that_never_begins(stage: Any, segments: list[bytes], then: str, how: str, status: int) -> None:
    s = await stage()
    s.upstream.script = once(s, *segments, then=then)
    answer = await s.ask(post())
    assert answer.status == status
    assert how in answer.body.decode()
    assert lost(s) == how
    assert s.flow.event_names() == ["RequestArrived", "AttemptFailed"]
    await until(lambda: s.pool.connections == 0)


@pytest.mark.parametrize(
    ("segments", "then", "how"),
    [
        ([chunk(b"data: 1\n\n"), chunk(b"data: 2")], "abort", "upstream_died_mid_stream"),
        ([chunk(b"data: 1\n\n"), b"zz\r\n"], "wait", "upstream_bad_framing"),
        ([chunk(b"data: 1\n\n")], "wait", "upstream_stalled"),
        ([chunk(b"data: 1\n\n"), b"1;" + b"x" * 70_000], "wait", "upstream_bad_framing"),
    ],
)
async def test_a_stream_that_breaks_ends_cleanly_for_a_client(
    stage: Any, segments: list[bytes], then: str, how: str
) -> None:
    s = await stage(upstream_limits=UpstreamLimits(between_bytes_s=0.1))
    s.upstream.script = once(s, SSE, *segments, then=then)
    c = await s.client()
    await c.send(post())
    answer = await c.read()
    assert answer.whole
    first, error, *rest = answer.body.decode().split("\n\n")
    assert (first, rest) == ("data: 1", [""])
    assert error.startswith('data: {"error":')
    assert how in error
    assert s.tier.concluded_with == [(how, 200, None)]
    s.upstream.script = s.upstream.serve
    await c.send(post())
    assert (await c.read()).status == 200, "the client's connection is as good as before"


async def test_the_error_of_a_stream_of_responses_has_the_number_that_is_next(stage: Any) -> None:
    """Clients that check events take one without a number for none that they know."""
    s = await stage()
    begun = b"".join(b'event: a\ndata: {"type":"a","sequence_number":%d}\n\n' % at for at in range(5))
    s.upstream.script = once(s, SSE + chunk(begun), then="abort")
    answer = await s.ask(post(path="/v1/responses"))
    *_, error, rest = answer.body.split(b"\n\n")
    told = json.loads(error.removeprefix(b"event: error\ndata: "))
    assert (told["type"], told["sequence_number"], rest) == ("error", 5, b"")
    assert told["code"] == told["error"]["code"] == "upstream_died_mid_stream"


async def test_the_error_of_a_stream_that_breaks_within_a_long_event_is_an_event_of_its_own(stage: Any) -> None:
    """Such an event has passed in part: it is too long to be held back."""
    s = await stage()
    s.upstream.script = once(s, SSE + chunk(b'data: {"x":"' + b"y" * 300_000), then="abort")
    answer = await s.ask(post())
    first, error, rest = answer.body.split(b"\n\n")
    assert (first[:12], set(first[12:]), rest) == (b'data: {"x":"', {ord("y")}, b"")
    assert error.startswith(b'data: {"error":')


async def test_a_stream_that_breaks_breaks_visibly_towards_the_tier_above(stage: Any) -> None:
    s = await stage(is_hop=True)
    s.upstream.script = once(s, SSE, chunk(b"data: 1\n\n"), then="abort")
    answer = await s.ask(post())
    assert not answer.whole
    assert answer.body == b"data: 1\n\n"


async def test_a_tier_that_breaks_a_stream_off_counts_as_alive_and_one_that_died_does_not(stage: Any) -> None:
    below, above = await stage(is_hop=True), await stage(over_tier=True)
    below.tier.region = AS_TARGET_0
    below.upstream.script = once(below, SSE, chunk(b"data: 1\n\n"), then="abort")
    above.flow.addresses.insert(0, Address("127.0.0.1", below.port))
    assert (await above.ask(post())).body.startswith(b"data: 1\n\n")
    above.flow.addresses.pop(0)
    as_region = SSE.replace(b"\r\n\r\n", b"\r\n" + AS_TARGET_0 + b"\r\n")
    above.upstream.script = once(above, as_region, chunk(b"data: 1\n\n"), then="abort")
    await above.ask(post())
    failed = [event for event in above.flow.events if isinstance(event, machine.AttemptFailed)]
    assert [event.outcome for event in failed] == [outcome.DIED_MID_STREAM] * 2
    assert [event.target_lives for event in failed] == [True, False]


@pytest.mark.parametrize("then", ["abort", "wait"])
async def test_a_whole_answer_that_breaks_breaks_visibly(stage: Any, then: str) -> None:
    s = await stage(upstream_limits=UpstreamLimits(between_bytes_s=0.1))
    s.upstream.script = once(s, plain(b'{"a":"' + b"x" * 100 + b'"}')[:-50], then=then)
    answer = await s.ask(post())
    assert (answer.status, answer.whole) == (200, False)
    assert lost(s) == ("upstream_died_mid_stream" if then == "abort" else "upstream_stalled")


async def test_a_first_byte_that_takes_too_long_is_given_up(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(first_byte_s=0.1))
    s.handler.streams = True
    s.upstream.script = once(s)
    assert (await s.ask(post())).status == 504
    assert lost(s) == "first_byte_timeout"
    await until(lambda: s.upstream.gone == 1)


async def test_a_whole_answer_may_take_longer_than_a_streams_first_byte(stage: Any) -> None:
    """Generating it takes as long as it takes: at a limit for first bytes healthy engines lost such requests, which
    others then began anew, and were ejected for it."""
    s = await stage(upstream_limits=UpstreamLimits(first_byte_s=0.05))
    seen = 0

    async def script(line: Line) -> None:
        nonlocal seen
        await s.upstream.request(line)
        check, swept = type(s.handler.exchanges[0].callbacks.attempt).check, s.relay.clock()
        for late in (0.1, 100.0, 599.0):
            check(s.handler.exchanges[0].callbacks.attempt, swept + late)
            seen += 1
        await line.send(plain(b"{}"))

    s.upstream.script = script
    answer = await s.ask(post())
    assert (answer.status, answer.body, seen) == (200, b"{}", 3)
    assert lost(s) == "served"


async def test_a_whole_answer_beyond_its_own_limit_is_nobodys_failure(stage: Any) -> None:
    s = await stage(upstream_limits=UpstreamLimits(first_byte_s=0.01, whole_answer_s=0.1))
    s.flow.addresses.append(s.upstream.address)
    s.upstream.script = once(s)
    answer = await s.ask(post())
    assert answer.status == 504
    assert b'"code":"whole_answer_timeout"' in answer.body
    assert lost(s) == "whole_answer_timeout"  # the only attempt: no other replica is tried
    await until(lambda: s.upstream.gone == 1)


async def test_interim_1xx_answers_are_not_passed_to_the_client(stage: Any) -> None:
    s = await stage()
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    s.upstream.answer = lambda _m: interim + plain(b"{}")
    for _ in range(2):
        answer = await s.ask(post())
        assert (answer.status, answer.body, answer.get("link")) == (200, b"{}", None)
    assert len(s.upstream.lines) == 1


@pytest.mark.parametrize(("status", "over_tier"), [("204 No Content", False), ("304 Not Modified", True)])
async def test_answers_without_a_body(stage: Any, status: str, over_tier: bool) -> None:
    s = await stage(over_tier=over_tier)
    s.upstream.answer = lambda _m: f"HTTP/1.1 {status}\r\netag: x\r\n".encode() + AS_TARGET_0 + b"\r\n"
    c = await s.client()
    for _ in range(2):
        await c.send(post())
        answer = await c.read()
        assert (answer.status, answer.get("etag")) == (int(status[:3]), "x")
        assert answer.get("content-length") is None
        assert answer.get("transfer-encoding") is None
    assert len(s.upstream.lines) == 1


async def test_a_body_that_ends_with_its_connection(stage: Any) -> None:
    s = await stage()
    s.upstream.script = once(s, b"HTTP/1.1 200 OK\r\n" + JSON + b"\r\n", b'{"a":', b"1}", then="close")
    c = await s.client()
    for _ in range(2):
        await c.send(post())
        answer = await c.read()
        assert (answer.whole, answer.body) == (True, b'{"a":1}')
    assert s.tier.attempts == [(1, "served")] * 2


async def test_an_empty_answer_has_a_length(stage: Any) -> None:
    s = await stage()
    s.upstream.answer = lambda _m: SSE + b"0\r\n\r\n"
    answer = await s.ask(post())
    assert (answer.status, answer.get("content-length"), answer.body) == (200, "0", b"")


async def test_a_pool_closes_while_it_connects(stage: Any) -> None:
    s = await stage()
    seen: list[str] = []

    class Waiting:
        def lost(self, reason: outcome.Outcome) -> None:
            seen.append(reason.reason)

    s.pool.lend(Address("127.0.0.1", s.port), Waiting())
    await s.pool.close()
    assert s.pool.connections == 0
    assert seen == []


# -- of one connection so much is read in a turn of the loop


class Turns:
    """Counts what an attempt is told of an answer in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn, self.bytes, self.over = 0, Counter[int](), False
        received = AttemptRun.received

        def counting(run: AttemptRun, data: bytes) -> None:
            self.bytes[self.turn] += len(data)
            received(run, data)

        monkeypatch.setattr(AttemptRun, "received", counting)
        self._tick()

    def _tick(self) -> None:
        self.turn += 1
        if not self.over:
            asyncio.get_running_loop().call_soon(self._tick)


@pytest.mark.parametrize("stream", [True, False])
async def test_large_input_is_read_in_bounded_pieces_per_loop_turn(
    stage: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """uvloop reads a connection 32 times in one turn, 8 MB, and each event of a stream costs: that much of usage held
    the loop for 1.1 s."""
    s = await stage()
    event = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
    body = event * (4 * 1024 * 1024 // len(event))
    s.upstream.answer = lambda _m: SSE + chunk(body) + b"0\r\n\r\n" if stream else plain(body)
    turns = Turns(monkeypatch)
    c = await s.client()
    for _ in range(2):  # the connection is kept
        await c.send(post())
        answer = await c.read()
        assert answer.body == body
    turns.over = True
    assert len(s.upstream.lines) == 1
    # Twice if the last bytes here and the first of the next read come together.
    assert max(turns.bytes.values()) <= 2 * (pool.EVENTS_A_TURN if stream else pool.BYTES_A_TURN)


async def test_unread_bytes_wait_while_the_client_does_not_read(stage: Any) -> None:
    s = await stage()
    event = b"data: " + b"x" * 64_000 + b"\n\n"
    s.upstream.answer = lambda _m: SSE + chunk(event * 500) + b"0\r\n\r\n"  # more than the kernel's buffers
    c = await s.client()
    c.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await c.send(post())
    (connection,) = await _connections(s)
    most = still = before = 0
    while still < 50:
        await asyncio.sleep(0.005)
        most, unread = max(most, connection.unread_bytes), connection.unread_bytes
        still, before = (still + 1 if unread == before and not connection.transport.is_reading() else 0), unread
    assert most <= 256 * 1024
    c.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert (await c.read()).body == event * 500
    assert connection.unread_bytes == 0
    await c.send(post())
    c.abort()
    await until(lambda: s.pool.connections == 0)


async def test_a_reader_paused_before_its_turn_gets_no_more_bytes(stage: Any) -> None:
    s = await stage()
    told, body = list[bytes](), b"data: x\n\n" * 5000
    connection = pool.UpstreamConnection(s.pool, s.upstream.address)
    connection.attempt = Mock(received=told.append)
    connection.data_received(SSE + chunk(body))
    connection.pause()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(told) == 1
    connection.resume()
    await until(lambda: b"".join(told) == body)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=4), st.booleans(), st.integers(0, 200), st.booleans())
def test_all_of_an_answer_comes_in_order_however_it_is_cut(
    sizes: list[int], stream: bool, head_cut: int, together: bool
) -> None:
    """Bytes are counted up, so that a piece that is lost, doubled or out of its place is seen."""
    body = b"".join(b"%07d " % number for number in range(sum(sizes) // 8 + 1))
    answer = SSE + chunk(body) + b"0\r\n\r\n" if stream else plain(body)
    cuts = itertools.accumulate(sizes, initial=head_cut)
    pieces = [answer[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(answer)])]

    async def scenario() -> tuple[bytes, int]:
        told, lent = list[bytes](), Mock(limits=pool.UpstreamLimits())
        connection = pool.UpstreamConnection(lent, Address("e", 1))
        connection.attempt = Mock(received=told.append, streams=stream)
        for piece in pieces:
            if piece:
                connection.data_received(piece)
            if not together:
                await asyncio.sleep(0)
        while connection.unread_bytes:
            await asyncio.sleep(0)
        return b"".join(told), lent.give_back.call_count + lent.distrust.call_count

    assert asyncio.run(scenario()) == (body, 0)  # without a transport it is not returned


async def test_after_an_abort_at_the_head_the_rest_is_dropped_and_no_upstream_distrusted(stage: Any) -> None:
    s = await stage()
    connection = pool.UpstreamConnection(s.pool, s.upstream.address)
    connection.attempt = Mock(answered=lambda _: connection.abort())
    connection.data_received(SSE + chunk(b"data: x\n\n" * 50_000))
    for _ in range(5):
        await asyncio.sleep(0)
    assert connection.unread_bytes == 0
    assert not s.pool._distrusted


async def _connections(s: Any) -> list[pool.UpstreamConnection]:
    await until(lambda: s.pool.connections)
    return list(s.pool._all)


async def test_bytes_before_the_end_of_a_connection_are_read_first(stage: Any) -> None:
    s = await stage()
    body = b"data: x\n\n" * 20_000
    s.upstream.script = once(s, b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + body, then="close")
    answer = await s.ask(post())
    assert answer.body == body
    assert answer.whole
    assert lost(s) == "served"


@pytest.mark.parametrize("behind", [b"x", b"x" * 300_000])
async def test_unsolicited_bytes_behind_a_large_answer_are_noticed(stage: Any, behind: bytes) -> None:
    s = await stage()
    event = b"data: x\n\n"
    s.upstream.answer = lambda _m: SSE + chunk(event * 1000) + b"0\r\n\r\n" + behind
    c = await s.client()
    for _ in range(2):
        await c.send(post())
        assert (await c.read()).body == event * 1000
    assert len(s.upstream.lines) == 2
