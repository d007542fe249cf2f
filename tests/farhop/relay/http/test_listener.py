"""A port: bounded, swept, and drained without breaking an answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from typing import Any

import pytest
from relay_wire import SSE, Line, chunk, plain, post, until

from farhop.balance import outcome
from farhop.balance.machine import ClientLeft, Command, Event, Hold, Request
from farhop.relay import answers
from farhop.relay.answers import STOPPING_DETAIL
from farhop.relay.http.connection import ClientLimits
from farhop.relay.http.listener import ConnectionSlots, Listener, PortTakenError
from farhop_lab.world.ports import free_ports


def held(s: Any, go: asyncio.Event) -> Any:
    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await line.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        await s.upstream.request(line)

    return script


async def test_connections_beyond_the_limit_are_answered_so(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(connections_max=1, linger_s=60.0))
    first = await s.client()
    await first.send(post())
    assert (await first.read()).status == 200
    for _ in range(3):
        over = await s.client()
        answer = await over.read()
        assert (answer.status, answer.get("connection"), answer.get("retry-after")) == (503, "close", "1")
        assert b"too_many_connections" in answer.body
    first.abort()
    await until(lambda: s.listener.connections == 0)
    assert (await s.ask(post())).status == 200, "those turned away do not count"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_a_client_that_acknowledges_nothing_is_ended_by_the_kernel(stage: Any) -> None:
    def accepted_ms() -> list[int]:
        return sorted(
            one._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for one in s.listener.open_connections
        )

    s = await stage(client_limits=ClientLimits(send_s=7.5))
    first = await s.client()
    await until(lambda: s.listener.connections == 1)
    assert accepted_ms() == [7500]
    s.listener.set_limits(ClientLimits(send_s=1e9))
    await s.client()
    await until(lambda: s.listener.connections == 2)
    assert accepted_ms() == [7500, 2**31 - 1], "who was there keeps to what he came under"
    first.abort()


async def test_one_client_cannot_take_all_connections(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(connections_per_client_max=2, linger_s=60.0))
    held_open = [await s.client(), await s.client()]
    await until(lambda: s.listener.connections == 2)
    answer = await (await s.client()).read()
    assert (answer.status, answer.get("connection")) == (429, "close")
    assert b"too_many_connections_of_client" in answer.body
    assert s.listener.refused == {"too_many_connections_of_client": 1}
    held_open[0].abort()
    await until(lambda: s.listener.connections == 1)
    assert (await s.ask(post())).status == 200


async def test_the_tier_above_is_one_client_and_may(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(connections_per_client_max=1), is_hop=True)
    await s.client()
    await until(lambda: s.listener.connections == 1)
    assert (await s.ask(post())).status == 200


async def test_listeners_share_the_slots_of_their_process(stage: Any) -> None:
    slots = ConnectionSlots(1)
    s = await stage(slots=slots)
    first = await s.client()
    await until(lambda: slots.used == 1)
    assert (await (await s.client()).read()).status == 503
    first.abort()
    await until(lambda: slots.used == 0)
    assert (await s.ask(post())).status == 200


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"garbage\r\n\r\n", "malformed_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, "head_too_large"),
        (b"GET / HT", "request_timeout"),
        (post(b"x", headers=b"X: " + b"y" * 900 + b"\r\n"), "buffers_full"),
    ],
)
async def test_requests_refused_before_the_handler_are_counted_by_the_listener(
    stage: Any, sent: bytes, reason: str
) -> None:
    s = await stage(client_limits=ClientLimits(head_s=0.2), budget_bytes=(500 if reason == "buffers_full" else 1 << 20))
    assert (await s.ask(sent)).status >= 400
    assert s.listener.refused == {reason: 1}


async def test_requests_refused_by_the_handler_are_not_counted_by_the_listener(stage: Any) -> None:
    s = await stage()
    assert (await s.ask(post(path="/refused"))).status == 404
    assert not s.listener.refused


async def test_a_port_that_is_taken_is_named(stage: Any) -> None:
    s = await stage()
    second = Listener("client", s.handler, ClientLimits(), s.budget)
    for reuse_port in (False, True):  # sharing takes two
        with pytest.raises(PortTakenError, match=rf"client: cannot listen on 127\.0\.0\.1:{s.port}: .*another port"):
            await second.open("127.0.0.1", s.port, reuse_port=reuse_port)


async def test_listeners_that_share_a_port_each_get_connections(stage: Any) -> None:
    (port,) = free_ports(1)
    s = await stage()
    pair = [Listener("client", s.handler, ClientLimits(), s.budget) for _ in range(2)]
    for listener in pair:
        assert await listener.open("127.0.0.1", port, reuse_port=True) == port
    lines = [Line(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(64)]
    await until(lambda: sum(listener.connections for listener in pair) == 64)
    assert min(listener.connections for listener in pair) > 8  # of 32 by the hash: less than one in 10^10 times
    for listener in pair:
        await listener.close(0.0)
    for line in lines:
        line.abort()


async def test_a_client_that_connects_while_one_of_several_stops_reaches_another(stage: Any) -> None:
    """Also in the instant between its last accept and its close. Clients of threads: they do not wait for us."""
    (port,) = free_ports(1)
    s = await stage(client_limits=ClientLimits(drain_idle_s=0.0, linger_s=0.1))
    over, answers = threading.Event(), Counter[bytes]()

    def ask() -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=60.0) as one:
                    one.sendall(post(path="/here"))
                    answers[one.recv(4096)[:15]] += 1
            except OSError as error:
                answers[repr(error).encode()] += 1

    async def opened() -> Listener:
        made = Listener("client", s.handler, ClientLimits(drain_idle_s=0.0, linger_s=0.1), s.budget)
        await made.open("127.0.0.1", port, reuse_port=True)
        return made

    serving = await opened()
    asking = [asyncio.create_task(asyncio.to_thread(ask)) for _ in range(4)]
    for _ in range(20):
        stopping, serving = serving, await opened()
        await asyncio.sleep(0.02)
        await stopping.close(5.0)
    over.set()
    await asyncio.gather(*asking)
    await serving.close(5.0)
    assert set(answers) == {b"HTTP/1.1 200 OK"}, answers


async def test_draining_lets_streams_end_and_closes_idle_connections(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(drain_idle_s=0.3, linger_s=0.1))
    go = asyncio.Event()
    s.upstream.script = held(s, go)
    idle, busy, reading = await s.client(), await s.client(), await s.client()
    await busy.send(post())
    await busy.reader.readuntil(b"data: 1\n\n\r\n")
    await reading.send(post(b"abc", path="/here")[:-1])
    await until(lambda: len([e for e in s.listener.open_connections if e._reading is not None]) == 1)
    closing = asyncio.create_task(s.listener.close(5.0))
    assert await idle.ended() == b""
    with pytest.raises(OSError):
        await s.client()
    await reading.send(b"c")
    answer = await reading.read()
    assert (answer.status, answer.get("connection")) == (200, "close")
    assert not closing.done()
    go.set()
    assert await busy.ended() == chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    await closing
    assert s.tier.concluded_with == [("served", 200, None)]


async def test_a_client_without_connection_close_may_send_once_more(stage: Any) -> None:
    """An answer begun before we stop promises nothing about its end, and a client at rest knows nothing at all."""
    s = await stage(client_limits=ClientLimits(linger_s=0.1))
    go = asyncio.Event()
    s.upstream.script = held(s, go)
    rested, busy = await s.client(), await s.client()
    await rested.send(post(path="/here"))
    assert (await rested.read()).get("connection") is None
    await busy.send(post())
    await busy.reader.readuntil(b"data: 1\n\n\r\n")
    closing = asyncio.create_task(s.listener.close(5.0))
    await until(lambda: s.listener.stopping)
    go.set()
    assert await busy.reader.readuntil(b"0\r\n\r\n")
    for line in (busy, rested):
        await line.send(post(path="/here"))
        answer = await line.read()
        assert (answer.status, answer.get("connection")) == (200, "close")
        assert await line.ended() == b""
    await closing


@pytest.mark.parametrize("is_hop", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
async def test_a_request_that_came_as_we_stopped_is_served(stage: Any, is_hop: bool, accepted: bool) -> None:
    """What the kernel has and we have not read: on connections at rest, and on those we have not accepted."""
    s = await stage(is_hop=is_hop, client_limits=ClientLimits(drain_idle_s=0.0, linger_s=0.1))
    sockets = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(9)]
    if accepted:
        await until(lambda: s.listener.connections == 9)
    for one in sockets:
        one.sendall(post(path="/here"))
    await s.listener.close(5.0)
    for one in sockets:
        assert one.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        one.close()


async def test_the_tier_above_is_not_waited_for(stage: Any) -> None:
    """It asks anew, elsewhere, when a connection at rest is closed."""
    s = await stage(is_hop=True)
    line = await s.client()
    await until(lambda: s.listener.connections == 1)
    async with asyncio.timeout(60.0):
        await s.listener.close(3600.0)
    assert await line.ended() == b""


async def test_draining_ends_a_stream_at_its_deadline_with_an_error_event(stage: Any) -> None:
    s = await stage()
    s.upstream.script = held(s, asyncio.Event())
    c = await s.client()
    await c.send(post())
    await c.reader.readuntil(b"data: 1\n\n\r\n")
    closing = asyncio.create_task(s.listener.close(0.05))
    event = answers.event_of(outcome.STOPPING, STOPPING_DETAIL)
    assert await c.ended() == chunk(event) + b"0\r\n\r\n"
    c.abort()
    await closing
    assert s.listener.connections == 0
    assert s.tier.concluded_with == [("stopping", 200, None)]
    assert s.tier.attempts == [(1, "stopping")]
    assert s.flow.event_names()[-1] == "ClientLeft"


@pytest.mark.parametrize("is_hop", [False, True])
async def test_what_has_not_begun_at_the_deadline_is_refused_and_may_go_elsewhere(stage: Any, is_hop: bool) -> None:
    """Held by the machine, sent and not answered, waiting behind another answer, half here: each gets an answer."""
    s = await stage(is_hop=is_hop)

    async def silent(line: Line) -> None:
        while True:
            await s.upstream.request(line)

    s.upstream.script = silent
    forward = s.flow.forward_next
    s.flow.arrive = lambda request, _now: [Hold(request.id)] if request.id == "r1" else forward(request.id)
    holding, sent, piped, half, begun = [await s.client() for _ in range(5)]
    await holding.send(post())
    await until(lambda: len(s.handler.bodies) == 1)
    await sent.send(post())
    await piped.send(post() + post())
    await half.send(post(b"{}" * 50)[:-10])
    await until(lambda: len(s.handler.bodies) == 3 and len(s.handler.exchanges) == 3)
    begun.abort()
    closing = asyncio.create_task(s.listener.close(0.05))
    for line, answers_ in ((holding, 1), (sent, 1), (piped, 2), (half, 1)):
        for _ in range(answers_):
            answer = await line.read()
            assert answer.status == 503
            assert (answer.get("x-farhop-outcome") is not None) is is_hop
            assert b'"code":"stopping"' in answer.body
        assert await line.ended() == b""
        line.abort()
    await closing
    assert [how for how, *_ in s.tier.concluded_with] == ["stopping"] * 3
    assert s.handler.abandoned == [("stopping", 503)] * 2


async def test_an_answer_in_one_piece_breaks_off_visibly_at_the_deadline(stage: Any) -> None:
    s = await stage()

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(plain(b"x" * 100, headers=b"content-type: text/plain\r\n")[:-50])
        await s.upstream.request(line)

    s.upstream.script = script
    c = await s.client()
    await c.send(post())
    await until(lambda: "AttemptBegan" in s.flow.event_names())
    await s.listener.close(0.05)
    assert not (await c.read()).whole
    assert s.tier.concluded_with == [("stopping", 200, None)]


async def test_after_the_deadline_no_request_begins(stage: Any) -> None:
    """What one of them leaves free the machine gives to the next in line, which is about to end as well."""
    s = await stage()
    s.upstream.script = held(s, asyncio.Event())
    waiting: list[str] = []
    forward, handle = s.flow.forward_next, s.flow.handle

    def arrive(request: Request, _now: float) -> list[Command]:
        if s.flow.event_names().count("RequestArrived") == 1:
            return forward(request.id)
        waiting.append(request.id)
        return [Hold(request.id)]

    def fill(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        return commands + (forward(waiting[0]) if isinstance(event, ClientLeft) and waiting[0] in s.flow.live else [])

    s.flow.arrive, s.flow.handle = arrive, fill
    first = await s.client()
    await first.send(post())
    await first.reader.readuntil(b"data: 1\n\n")
    second = await s.client()
    await second.send(post())
    await until(lambda: waiting)
    closing = asyncio.create_task(s.listener.close(0.05))
    await until(lambda: len(s.tier.concluded_with) == 2)
    for line in (first, second):
        line.abort()
    await closing
    assert len(s.upstream.asked) == 1
    assert sorted(status for _, status, _ in s.tier.concluded_with) == [200, 503]


async def test_an_idle_connection_is_closed(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(idle_s=0.3))
    c = await s.client()
    await c.send(post())
    assert (await c.read()).status == 200
    assert await c.ended() == b""


async def test_a_long_answer_is_not_idleness(stage: Any) -> None:
    s = await stage(client_limits=ClientLimits(idle_s=0.3))
    go = asyncio.Event()
    s.upstream.script = held(s, go)
    c = await s.client()
    await c.send(post())
    await asyncio.sleep(0.8)
    go.set()
    assert (await c.read()).whole
    await c.send(post(path="/here"))
    assert (await c.read()).status == 200
