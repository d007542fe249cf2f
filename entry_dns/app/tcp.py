"""Questions by TCP (RFC 7766): messages one after another on a connection, bounded in number and in idleness."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from entry_dns.answers.responder import Responder

_MESSAGES_MAX = 1000  # on one connection


class TcpServer:
    """Answers on bound sockets."""

    def __init__(self, answers: Responder, connections_max: int, idle_s: float) -> None:
        self.answers, self._most, self._idle_s = answers, connections_max, idle_s
        self._open: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        self.refused = 0

    async def open(self, sockets: list[socket.socket]) -> None:
        """Listen on these."""
        for one in sockets:
            self._servers.append(await asyncio.start_server(self._serve, sock=one, limit=1 << 17))

    async def close(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._most:
            self.refused += 1
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                await self._talk(reader, writer)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("peername")[0]
        for _ in range(_MESSAGES_MAX):
            async with asyncio.timeout(self._idle_s):
                length = int.from_bytes(await reader.readexactly(2), "big")
                data = await reader.readexactly(length)
            told = self.answers.answer(data, host, udp=False)
            if told is None:
                return
            writer.write(len(told).to_bytes(2, "big") + told)
            async with asyncio.timeout(self._idle_s):
                await writer.drain()
