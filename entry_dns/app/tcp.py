"""DNS over TCP (RFC 7766): messages one after another on a connection, bounded in number, size and idle time.

No client can take all connections: each network (/24, /64) has a share of them, and if all are taken, a new connection
replaces the one that was idle longest. A message that arrives byte by byte counts as idle until it is complete.
Never reads a question: the responder does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from entry_dns.answers.responder import Responder

MESSAGES_MAX = 1000  # on one connection
MESSAGE_BYTES_MAX = 4096  # a question has 300 and some options; as by UDP
SHARE = 10  # a network may have this fraction of the connections: one in 10
WAITED_S = 1.0  # a connection with a message in this time is not closed for a new one


class TcpServer:
    """Answers DNS queries on bound TCP sockets. `now`: a monotonic clock in seconds; None: the event loop's."""

    def __init__(
        self, answers: Responder, connections_max: int, idle_s: float, now: Callable[[], float] | None = None
    ) -> None:
        self.answers, self._most, self._idle_s, self._now = answers, connections_max, idle_s, now
        self._each = max(1, connections_max // SHARE)
        # Of each connection when its last message came; the longest ago first.
        self.last_message_at: dict[asyncio.StreamWriter, float] = {}
        self.open_of: Counter[bytes] = Counter()
        self._servers: list[asyncio.Server] = []
        # One answer in a turn of the loop, of all connections: a denial signed takes 0.3 ms, and a thousand connections
        # with questions would keep the probes and the views of this process waiting for as long.
        self._turn = asyncio.Lock()
        self.refused = 0

    async def open(self, sockets: list[socket.socket]) -> None:
        """Listen on these."""
        if self._now is None:
            self._now = asyncio.get_running_loop().time
        for one in sockets:
            self._servers.append(await asyncio.start_server(self._serve, sock=one, limit=MESSAGE_BYTES_MAX))

    async def close(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for writer in tuple(self.last_message_at):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        if peer is None:  # it left before it was taken
            writer.transport.abort()
            return
        host = peer[0]
        network = _network(host)
        if self.open_of[network] >= self._each or not self._room():
            self.refused += 1
            writer.transport.abort()
            return
        self.open_of[network] += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
                await self._talk(reader, writer, host)
            writer.close()
            with contextlib.suppress(OSError):  # a client that reads no answers keeps it open, and is counted
                async with asyncio.timeout(self._idle_s):
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            self.last_message_at.pop(writer, None)
            self.open_of[network] -= 1
            if not self.open_of[network]:
                del self.open_of[network]

    def _room(self) -> bool:
        """Whether another connection may be accepted; the one that was idle longest is closed for it."""
        if len(self.last_message_at) < self._most:
            return True
        longest = next(iter(self.last_message_at))
        if self._time() - self.last_message_at[longest] < WAITED_S:
            return False
        del self.last_message_at[longest]
        longest.transport.abort()
        return True

    def _time(self) -> float:
        assert self._now is not None  # it is open
        return self._now()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self.last_message_at[writer] = self._time()
        for _ in range(MESSAGES_MAX):
            async with asyncio.timeout(self._idle_s):
                length = int.from_bytes(await reader.readexactly(2), "big")
                if length > MESSAGE_BYTES_MAX:
                    return
                data = await reader.readexactly(length)
            if self.last_message_at.pop(writer, None) is None:
                return  # closed in favour of a new connection
            self.last_message_at[writer] = self._time()
            async with self._turn:
                reply = self.answers.answer(data, host, udp=False)
                if reply is None:
                    return
                writer.write(len(reply).to_bytes(2, "big") + reply)
                await asyncio.sleep(0)  # nothing waits where all is here
            async with asyncio.timeout(self._idle_s):
                await writer.drain()


def _network(host: str) -> bytes:
    """The network that a peer's connections are counted for: its /24 (IPv4) or /64 (IPv6)."""
    address = ip_address(host.partition("%")[0]).packed
    return address[:3] if len(address) == 4 else address[:8]
