from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import dns.message
import dns.rcode
import pytest

from entry_dns.answers.responder import Responder
from entry_dns.app import tcp
from entry_dns.app.tcp import MESSAGE_BYTES_MAX, WAITED_S, TcpServer
from tests.entry_dns.conftest import served

QUERY = dns.message.make_query("api.entry.example", "A").to_wire()
FRAMED = len(QUERY).to_bytes(2, "big") + QUERY


@asynccontextmanager
async def serving(
    most: int, idle_s: float = 60.0, now: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[tuple[TcpServer, int]]:
    server = TcpServer(served(Responder()), most, idle_s, now)
    sock = socket.create_server(("127.0.0.1", 0))
    await server.open([sock])
    try:
        async with asyncio.timeout(60):
            yield server, sock.getsockname()[1]
    finally:
        await server.close()


async def connect(port: int, of: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(of, 0))


async def read_answer(reader: asyncio.StreamReader) -> dns.message.Message:
    return dns.message.from_wire(await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big")))


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_connection_serves_many_questions_and_connections_are_bounded() -> None:
    async with serving(1) as (server, port):
        reader, writer = await connect(port)
        writer.write(FRAMED * 3)
        for _ in range(3):
            assert (await read_answer(reader)).answer
        other, another = await connect(port)
        assert await ended(other)
        assert server.refused == 1
        another.close()
        writer.write(FRAMED)
        assert (await read_answer(reader)).answer, "who came first goes on"
        writer.close()


async def test_messages_in_pieces_and_several_in_one_are_answered_in_their_order() -> None:
    async with serving(9) as (_, port):
        reader, writer = await connect(port)
        names = ["api.entry.example", "nobody.entry.example", "eu.entry.example", "entry.example"]
        queries = [dns.message.make_query(name, "SOA" if name == "entry.example" else "A") for name in names]
        whole = b"".join(len(wire).to_bytes(2, "big") + wire for wire in (one.to_wire() for one in queries))
        for at in (1, 2, 3, 40, 75, len(whole)):  # through a length, a header, a name, and over two messages
            writer.write(whole[:at])
            await writer.drain()
            whole = whole[at:]
            await asyncio.sleep(0)
        for one in queries:
            assert one.is_response(await read_answer(reader))
        writer.close()


async def test_a_transfer_is_refused_and_the_connection_goes_on() -> None:
    async with serving(9) as (_, port):
        reader, writer = await connect(port)
        for kind in ("AXFR", "IXFR", "A"):
            query = dns.message.make_query("entry.example" if kind != "A" else "api.entry.example", kind).to_wire()
            writer.write(len(query).to_bytes(2, "big") + query)
            answer = await read_answer(reader)
            assert (answer.rcode() == dns.rcode.REFUSED) == (kind != "A")
        writer.close()


@pytest.mark.parametrize("value", [b"\0\0", b"\0\4abcd", (MESSAGE_BYTES_MAX + 1).to_bytes(2, "big")])
async def test_a_connection_with_malformed_input_is_closed(value: bytes) -> None:
    async with serving(9) as (_, port):
        reader, writer = await connect(port)
        writer.write(value)
        assert await ended(reader)
        writer.close()


async def test_one_network_has_a_share_of_the_connections_and_no_more() -> None:
    async with serving(20) as (server, port):
        mine = [await connect(port) for _ in range(4)]
        for reader, writer in mine[:2]:
            writer.write(FRAMED)
            assert (await read_answer(reader)).answer
        assert all([await ended(reader) for reader, _ in mine[2:]])
        reader, writer = await connect(port, "127.0.1.1")
        writer.write(FRAMED)
        assert (await read_answer(reader)).answer, "another network has its own"
        for _, one in (*mine, (reader, writer)):
            one.close()
        while server.open_of:
            await asyncio.sleep(0)
        assert not server.last_message_at


async def test_at_the_limit_the_longest_silent_connection_is_closed() -> None:
    at = [0.0]
    async with serving(2, now=lambda: at[0]) as (server, port):
        slow, slowly = await connect(port, "127.0.1.1")
        slowly.write(FRAMED)
        assert (await read_answer(slow)).answer
        lively, writer = await connect(port, "127.0.2.1")
        at[0] = WAITED_S
        slowly.write(FRAMED[:-1])  # all of a message but its last byte
        writer.write(FRAMED)
        assert (await read_answer(lively)).answer
        third, another = await connect(port, "127.0.3.1")
        another.write(FRAMED)
        assert (await read_answer(third)).answer
        assert await ended(slow)
        refused, last = await connect(port, "127.0.4.1")
        assert await ended(refused), "the two others were just heard"
        assert server.refused == 1
        for one in (slowly, writer, another, last):
            one.close()


async def test_an_idle_connection_is_closed() -> None:
    async with serving(9, idle_s=0.05) as (_, port):
        reader, writer = await connect(port)
        writer.write(FRAMED[:-1])
        assert await ended(reader)
        writer.close()


async def test_a_client_that_does_not_read_answers_is_closed_and_counts_until_then() -> None:
    """Closed in order it stayed open for as long as there was something unsent, and nobody counted it."""
    async with serving(9, idle_s=0.05) as (server, port):
        server.answers = SimpleNamespace(answer=lambda *_, udp: bytes(60_000))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(FRAMED * 500)
            while not server.open_of:
                await asyncio.sleep(0.01)
            (writer,) = server.last_message_at
            while server.open_of:
                await asyncio.sleep(0.01)
            assert writer.transport.get_write_buffer_size() == 0, "what was not sent is gone, and the socket with it"


async def test_a_connection_ends_after_so_many_messages(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "MESSAGES_MAX", 2)
    async with serving(9) as (_, port):
        reader, writer = await connect(port)
        writer.write(FRAMED * 2)
        for _ in range(2):
            assert (await read_answer(reader)).answer
        assert await ended(reader)
        writer.close()


async def test_many_questions_at_once_do_not_delay_others() -> None:
    """1,000 of them, from anybody, kept the questions by UDP waiting for 30 ms."""
    turn, answered, over = 0, Counter[int](), False
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not over:
            loop.call_soon(tick)

    async with serving(9) as (server, port):
        answer = server.answers.answer

        class Counted:
            def answer(self, data: bytes, host: str, *, udp: bool) -> bytes | None:
                answered[turn] += 1
                return answer(data, host, udp=udp)

        server.answers = Counted()
        tick()
        clients = [await connect(port, f"127.0.{n}.1") for n in (1, 2, 3)]
        for _, writer in clients:
            writer.write(FRAMED * 300)
        for reader, _ in clients:
            for _ in range(300):
                assert (await read_answer(reader)).answer
        over = True
        for _, writer in clients:
            writer.close()
    assert max(answered.values()) == 1
