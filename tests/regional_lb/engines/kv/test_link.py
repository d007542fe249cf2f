"""ZeroMQ's wire protocol, with libzmq at the other end, and with a peer that violates it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import zmq
from inprocess import until

from farhop_lab.world.ports import free_ports
from regional_lb.engines.kv import link
from regional_lb.engines.kv.link import MESSAGE_BYTES_MAX, PARTS_MAX, Link, LinkError, open_link

HOST = "127.0.0.1"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\3PUB"
HANDS = GREETING + READY
EMPTY_PART = b"\x01\x00"
LAST = b"\x00\x01z"
Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def publisher(says: Says) -> AsyncIterator[str]:
    """Whoever connects is told this, and then nothing."""

    async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await says(reader, writer)
            while await reader.read(65536):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(told, HOST, 0)
    try:
        yield f"tcp://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def saying(*pieces: bytes) -> Says:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return says


@asynccontextmanager
async def linked(endpoint: str, kind: Any = b"SUB") -> AsyncIterator[Link]:
    made = await open_link(endpoint, kind)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def socket_of(kind: zmq.SocketType) -> Iterator[tuple[Any, str]]:
    context: Any = zmq.Context()
    made = context.socket(kind)
    endpoint = f"tcp://{HOST}:{free_ports(1)[0]}"
    made.bind(endpoint)
    try:
        yield made, endpoint
    finally:
        context.destroy(linger=0)


async def test_messages_of_libzmq_are_received_and_an_idle_link_to_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers our heartbeats, and we its."""
    monkeypatch.setattr(link, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(link, "SILENT_S", 0.4)
    with socket_of(zmq.SocketType.PUB) as (pub, endpoint):
        pub.setsockopt(zmq.SocketOption.HEARTBEAT_IVL, 20)
        pub.setsockopt(zmq.SocketOption.HEARTBEAT_TIMEOUT, 400)
        async with linked(endpoint) as sub:
            heard = asyncio.create_task(sub.receive())
            await until(lambda: pub.send_multipart([b"topic", b"", bytes(300)]) or heard.done())
            assert heard.result() == [b"topic", b"", bytes(300)]
            await asyncio.sleep(1.2)
            pub.send(b"last")
            while await sub.receive() != [b"last"]:
                pass


async def test_a_question_is_answered_by_libzmqs_router() -> None:
    with socket_of(zmq.SocketType.ROUTER) as (router, endpoint):
        async with linked(endpoint, b"DEALER") as dealer:
            dealer.send((b"", bytes(8)))
            await until(lambda: router.poll(0))
            who, *asked = router.recv_multipart()
            assert asked == [b"", bytes(8)]
            router.send_multipart([who, b"", b"a" * 8, b"b" * 1_000_000])
            assert await dealer.receive() == [b"", b"a" * 8, b"b" * 1_000_000]


async def test_messages_are_the_same_however_their_bytes_are_cut() -> None:
    wire = b"\x01\x01a" + b"\x00\x00" + b"\x03" + (300).to_bytes(8, "big") + b"c" * 300 + b"\x00\x02de" + LAST
    for size in (1, 2, 3, 7, 64, 1000):
        made = Link()
        for at in range(0, len(wire), size):
            made.data_received(wire[at : at + size])
        assert [await made.receive() for _ in range(3)] == [[b"a", b""], [b"c" * 300, b"de"], [b"z"]]


@pytest.mark.parametrize(
    "hands",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64),
        GREETING[:10] + b"\x01" + GREETING[11:] + READY,
        GREETING.replace(b"NULL\0", b"CURVE") + READY,
        GREETING + b"\x04\x06\x05ERROR",
        GREETING + LAST,
        GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"),
        GREETING + b"\xff\x00",
    ],
    ids=["http", "zmtp 1", "curve", "an error", "no command", "a huge command", "no flags"],
)
async def test_a_peer_without_a_handshake_is_disconnected(hands: bytes) -> None:
    async with publisher(saying(hands)) as endpoint:
        with pytest.raises(LinkError):
            await open_link(endpoint, b"SUB")


async def test_a_silent_peer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.05)
    async with publisher(saying(GREETING)) as endpoint:
        with pytest.raises(TimeoutError):
            await open_link(endpoint, b"SUB")


@pytest.mark.parametrize(
    "said",
    [
        EMPTY_PART * (PARTS_MAX + 1),
        (b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)) * 5,
        b"\x02" + (MESSAGE_BYTES_MAX + 1).to_bytes(8, "big"),
        b"\x02" + b"\xff" * 8,
        b"\x06" + (1 << 20).to_bytes(8, "big"),
        b"\x10\x00",
    ],
    ids=["parts", "bytes", "a part", "a part of 2**64", "a command", "flags"],
)
async def test_an_endless_message_ends_its_connection(said: bytes) -> None:
    async with publisher(saying(HANDS + b"\x00\x01a", said)) as endpoint, linked(endpoint) as sub:
        assert await sub.receive() == [b"a"]
        with pytest.raises(LinkError):
            await asyncio.wait_for(sub.receive(), link.SILENT_S / 2)


async def test_messages_that_are_not_received_wait_at_the_sender() -> None:
    sent, part = 0, b"\x02" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)

    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HANDS)
        while True:
            writer.write(part)
            await writer.drain()
            sent += 1

    async with publisher(says) as endpoint, linked(endpoint) as sub:
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert len(sub._buffer) < 4 * link.BUFFER_BYTES
        assert sent < 64  # what the kernel holds
        for _ in range(sent + 5):
            assert len((await sub.receive())[0]) == 1 << 20


async def test_pings_are_answered_and_others_have_their_turns() -> None:
    ping = b"\x04\x09\x04PING\0\0hi"
    pongs = bytearray()

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HANDS + ping * 5000 + LAST)
        while not pongs.endswith(b"\x04\x07\x04PONGhi" * 5000):
            pongs.extend(await reader.read(65536))

    async with publisher(says) as endpoint, linked(endpoint) as sub:
        heard, turns = asyncio.create_task(sub.receive()), 0
        while not heard.done():
            turns += 1
            await asyncio.sleep(0)
        assert heard.result() == [b"z"]
        assert turns > 1000
        await until(lambda: pongs.count(b"PONGhi") == 5000)


async def test_a_peer_that_pings_and_reads_no_answer_is_disconnected() -> None:
    unsent, aborted = 0, False

    class Transport:
        def write(self, data: bytes) -> None:
            nonlocal unsent
            unsent += len(data)

        def get_write_buffer_size(self) -> int:
            return unsent

        def pause_reading(self) -> None:
            pass

        def is_reading(self) -> bool:
            return True

        def abort(self) -> None:
            nonlocal aborted
            aborted = True
            made.connection_lost(None)

    made = Link()
    made.connection_made(Transport())  # type: ignore[arg-type]
    made.data_received(b"\x04\x17\x04PING\0\0".ljust(25, b"x") * 20_000)
    with pytest.raises(LinkError):
        await made.receive()
    assert aborted
    assert link.BUFFER_BYTES < unsent < link.BUFFER_BYTES + 64


async def test_a_path_that_swallows_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(link, "SILENT_S", 0.1)
    async with publisher(saying(HANDS)) as endpoint, linked(endpoint) as sub:
        with pytest.raises(LinkError):
            await asyncio.wait_for(sub.receive(), 20.0)
