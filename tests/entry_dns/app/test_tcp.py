from __future__ import annotations

import asyncio
import socket

import dns.message

from entry_dns.answers.responder import Responder
from entry_dns.app.tcp import TcpServer
from tests.entry_dns.conftest import served


async def test_questions_one_after_another_and_a_bound_on_connections() -> None:
    server = TcpServer(served(Responder()), 1, 5.0)
    sock = socket.create_server(("127.0.0.1", 0))
    await server.open([sock])
    port = sock.getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    query = dns.message.make_query("api.entry.example", "A").to_wire()
    writer.write((len(query).to_bytes(2, "big") + query) * 3)
    async with asyncio.timeout(20):
        for _ in range(3):
            told = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            assert dns.message.from_wire(told).answer
        other, another = await asyncio.open_connection("127.0.0.1", port)
        assert await other.read() == b""
    assert server.refused == 1
    another.close()
    writer.close()
    await server.close()


async def test_who_says_nothing_sensible_is_left() -> None:
    server = TcpServer(served(Responder()), 9, 5.0)
    sock = socket.create_server(("127.0.0.1", 0))
    await server.open([sock])
    reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
    writer.write(b"\0\4abcd")
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    await server.close()
