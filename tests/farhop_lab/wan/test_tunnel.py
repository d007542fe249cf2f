"""What a connection over a link sees: a round trip to connect, the far side's own failures, FIN, RST, backpressure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from farhop_lab.wan.tunnel import LinkLimits
from farhop_lab.world.ports import free_ports

# Nothing may arrive earlier than the wire allows, except for the alarm's slack each way; later, if the machine is busy.
EARLY_S = 0.0005
PATIENCE_S = 60.0


@contextlib.contextmanager
def _deaf() -> Iterator[str]:
    """The address of a listener with a full backlog: the kernel answers no further SYN."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def _some(things: Any, until: Any) -> tuple[Any, ...]:
    await until(lambda: things)
    return tuple(things)


async def test_connecting_takes_a_round_trip_and_not_two(lab: Any, crossings: list[tuple[str, float]]) -> None:
    link = await lab.link(delay_ms=30)
    address, accepted = await lab.far()
    began = time.monotonic()
    near = await lab.connect(link, address)
    await asyncio.wait_for(accepted.get(), PATIENCE_S)
    assert time.monotonic() - began > 0.030 - EARLY_S  # the far side sees it one way later
    assert await near.head() == (200, "")
    assert time.monotonic() - began > 0.060 - EARLY_S
    assert crossings == [("open", 0.03), ("answer", 0.03)]


async def test_early_data_arrives_after_the_answer_to_connect(lab: Any) -> None:
    link = await lab.link(delay_ms=5)
    address, accepted = await lab.far()
    near = await lab.connect(link, address, more=b"early")
    far = await asyncio.wait_for(accepted.get(), PATIENCE_S)
    far.writer.write(b"banner")
    assert await far.exactly(5) == b"early"
    assert await near.head() == (200, "")
    assert await near.exactly(6) == b"banner"


async def test_refused_is_502_after_the_round_trip(lab: Any, crossings: list[tuple[str, float]]) -> None:
    link = await lab.link(delay_ms=25)
    began = time.monotonic()
    near = await lab.connect(link, f"127.0.0.1:{free_ports(1)[0]}")
    status, text = await near.head()
    assert time.monotonic() - began > 0.050 - EARLY_S
    assert status == 502
    assert "refused" in text.lower()
    assert crossings == [("open", 0.025), ("answer", 0.025), ("end", 0.025)]


async def test_no_answer_is_504_after_the_time_limit(lab: Any, crossings: list[tuple[str, float]]) -> None:
    link = await lab.link(delay_ms=10, limits=LinkLimits(connect_s=0.2))
    with _deaf() as target:
        began = time.monotonic()
        near = await lab.connect(link, target)
        status, text = await near.head()
    assert time.monotonic() - began > 0.220 - EARLY_S - 0.001  # uvloop's own timers may be a millisecond early
    assert status == 504
    assert "0.2 s" in text
    assert crossings == [("open", 0.01), ("answer", 0.01), ("end", 0.01)]


@pytest.mark.parametrize(
    ("value", "status", "word"),
    [
        (b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: x\r\n\r\n", 405, "CONNECT"),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405, "CONNECT"),
        (b"CONNECT nowhere HTTP/1.1\r\n\r\n", 400, "host:port"),
        (b"CONNECT 93.184.216.34:80 HTTP/1.1\r\n\r\n", 403, "loopback"),
        (b"CONNECT example.com:443 HTTP/1.1\r\n\r\n", 403, "loopback"),
        (b"CONNECT a:1 HTTP/1.1\r\n" + b"x: y\r\n" * 2000, 431, "8192"),
    ],
)
async def test_invalid_connect_request_is_refused(lab: Any, value: bytes, status: int, word: str) -> None:
    link = await lab.link(delay_ms=1000)  # refusals do not come from the network and do not wait for it
    near = await lab.client(link, value)
    got, text = await near.head()
    assert got == status
    assert word in text
    assert link.stats().refused == 1


async def test_a_connect_request_sent_byte_by_byte_is_accepted(lab: Any) -> None:
    link = await lab.link(delay_ms=1)
    address, _ = await lab.far()
    near = await lab.client(link)
    for byte in f"CONNECT {address} HTTP/1.1\r\n\r\n".encode():
        near.writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert await near.head() == (200, "")


async def test_a_client_that_sends_nothing_is_dropped(lab: Any, until: Any) -> None:
    link = await lab.link(limits=LinkLimits(head_s=0.05))
    near = await lab.client(link, b"CONNECT ")
    with pytest.raises(ConnectionResetError):
        await near.read_to_end()
    await until(lambda: link.stats().connections == 0)


async def test_a_client_that_leaves_silently_is_forgotten(lab: Any, until: Any) -> None:
    link = await lab.link()
    near = await lab.client(link)
    near.writer.write_eof()
    assert await near.read_to_end() == b""
    await until(lambda: link.stats().connections == 0)


async def test_too_many_connections_are_refused(lab: Any) -> None:
    link = await lab.link(delay_ms=1, limits=LinkLimits(connections_max=1))
    await lab.pair(link)
    second = await lab.connect(link, "127.0.0.1:9")
    status, text = await second.head()
    assert status == 503
    assert "connections_max" in text


async def test_half_close_crosses_the_wire(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=20)
    near, far = await lab.pair(link)
    began = time.monotonic()
    near.writer.write(b"question")
    near.writer.write_eof()
    assert await far.read_to_end() == b"question"
    assert time.monotonic() - began > 0.020 - EARLY_S
    far.writer.write(b"answer")
    await asyncio.sleep(0.005)
    far.writer.write(b", all of it")
    far.writer.close()
    assert await near.read_to_end() == b"answer, all of it"
    assert time.monotonic() - began > 0.040 - EARLY_S
    await until(lambda: link.stats().connections == 0)
    assert link.stats().out_bytes == len(b"question")
    assert link.stats().back_bytes == len(b"answer, all of it")


async def test_the_far_side_may_end_first(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=2)
    near, far = await lab.pair(link)
    far.writer.write_eof()
    assert await near.read_to_end() == b""
    near.writer.write(b"still here")
    assert await far.exactly(10) == b"still here"
    near.writer.close()
    assert await far.read_to_end() == b""
    await until(lambda: link.stats().connections == 0)


@pytest.mark.parametrize("who", ["near", "far"])
async def test_a_reset_crosses_the_wire_as_a_reset(
    lab: Any, until: Any, who: str, crossings: list[tuple[str, float]]
) -> None:
    link = await lab.link(delay_ms=20)
    near, far = await lab.pair(link)
    breaker, other = (near, far) if who == "near" else (far, near)
    crossings.clear()
    began = time.monotonic()
    breaker.reset()
    with pytest.raises(ConnectionResetError):
        await other.read_to_end()
    assert time.monotonic() - began > 0.020 - EARLY_S
    assert crossings == [("reset", 0.02)]
    await until(lambda: link.stats().connections == 0)


async def test_a_client_that_gives_up_connecting_leaves_nothing_behind(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=20)
    address, accepted = await lab.far()
    near = await lab.connect(link, address)
    await until(lambda: link.stats().accepted == 1)
    near.reset()
    await until(lambda: link.stats().connections == 0)
    await asyncio.sleep(0.05)
    assert accepted.empty()


async def test_a_client_that_leaves_while_the_far_side_is_tried_ends_the_try(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=1, limits=LinkLimits(connect_s=30))
    with _deaf() as target:
        near = await lab.connect(link, target)
        await until(lambda: any(tunnel.connecting for tunnel in link.path.tunnels))
        (tunnel,) = link.path.tunnels
        near.reset()
        await until(lambda: link.stats().connections == 0 and tunnel.connecting is None)


async def test_a_client_that_sent_too_much_too_early_is_noticed_when_it_leaves(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=20, limits=LinkLimits(flight_bytes_max=64 * 1024))
    near = await lab.connect(link, f"127.0.0.1:{free_ports(1)[0]}", more=bytes(2**20))
    (tunnel,) = await _some(link.path.tunnels, until)
    await until(lambda: not tunnel.near.reading)
    assert (await near.head())[0] == 502
    near.reset()
    await until(lambda: link.stats().connections == 0)


async def test_the_limit_on_the_head_ends_with_the_head(lab: Any) -> None:
    link = await lab.link(delay_ms=1, limits=LinkLimits(head_s=0.03))
    near, far = await lab.pair(link)
    assert await near.silent(0.08)
    near.writer.write(b"still here")
    assert await far.exactly(10) == b"still here"


async def test_memory_is_bounded_under_a_reader_that_does_not_read(lab: Any, until: Any) -> None:
    limit = 256 * 1024
    link = await lab.link(delay_ms=1, limits=LinkLimits(flight_bytes_max=limit))
    near, far = await lab.pair(link, limit=1024)  # the far side's reader stops at twice this
    offered = 64 * 2**20
    near.writer.write(bytes(offered))
    (tunnel,) = link.path.tunnels
    await until(lambda: not tunnel.near.reading)
    taken = -1
    while taken != (taken := near.writer.transport.get_write_buffer_size()):  # until the kernel's buffers are full too
        await asyncio.sleep(0.05)
    assert taken > offered / 2
    assert tunnel.out.queued_bytes < limit + 300 * 1024  # one read of the loop's beyond
    assert tunnel.far.transport.get_write_buffer_size() < 600 * 1024
    got = 0
    while got < offered:
        got += len(await asyncio.wait_for(far.reader.read(2**20), PATIENCE_S))
    assert got == offered


async def test_a_side_whose_window_is_closed_gets_a_reset(lab: Any, until: Any) -> None:
    link = await lab.link(delay_ms=1, limits=LinkLimits(flight_bytes_max=64 * 1024))
    near, far = await lab.pair(link, limit=1024)
    near.writer.write(bytes(32 * 2**20))
    (tunnel,) = link.path.tunnels
    await until(lambda: not tunnel.out.flowing and not tunnel.near.reading)
    far.reset()
    with pytest.raises(ConnectionError):
        await near.read_to_end()
    await until(lambda: link.stats().connections == 0)


async def test_a_reset_reaches_a_side_that_does_not_read(lab: Any, until: Any) -> None:
    """RST heeds no window: what waits for the reader does not hold it back."""
    link = await lab.link(delay_ms=1, limits=LinkLimits(flight_bytes_max=64 * 2**20))
    near, far = await lab.pair(link, limit=1024)
    near.writer.write(bytes(24 * 2**20))
    (tunnel,) = link.path.tunnels
    await until(lambda: not tunnel.out.flowing and not near.writer.transport.get_write_buffer_size())
    near.reset()
    await until(lambda: link.stats().connections == 0)
    with pytest.raises(ConnectionResetError):
        while await far.reader.read(2**20):
            pass
