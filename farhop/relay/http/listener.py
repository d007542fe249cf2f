"""A port that clients (or the tier above) come to: accepts, bounds, sweeps time limits, drains.

Draining loses nothing that was sent here: connections already made are accepted, every answer says that it is the last
one on its connection, and an idle connection is left open for a while for the request that may be on its way. (The tier
above retries when a connection that it kept is closed, so its idle connections are closed sooner.) Never looks into a
request: that is its handler's.
"""

from __future__ import annotations

import asyncio
import ctypes
import select
import socket
import struct
import sys
from collections import Counter
from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.bounds import SlotLimit
from farhop.relay.http.connection import ClientConnection, ClientLimits, LargeBodyQueue
from farhop.relay.http.cork import Cork
from farhop.relay.http.keepalive import keep_alive
from farhop.relay.http.tls import GIVES_WAY_S, Handshakes, client_of

if TYPE_CHECKING:
    from farhop.balance.bounds import ByteBudget
    from farhop.balance.outcome import Outcome
    from farhop.relay.http.exchange import RequestHandler
    from farhop.relay.http.tls import ListenerTls

# Time limits are checked by one sweep rather than a timer per connection: they may be late by this much.
SWEEP_S = 0.25
# Connections beyond the limit get an answer, as long as there are no more of them than this.
_TURNED_AWAY_MAX = 256
_CLOSING_S = 1.0  # for clients to read their last answer and close
_BREAK_S = 1.0  # what breaking the connections that are left may take
_HOP_IDLE_S = 0.5  # for the first request of the tier above on a connection that it has just made
_ACCEPT_MAX_S = 1.0  # what accepting those that have connected may take, once we stop
_HANDSHAKE_S = 0.01  # a neighbour's round trip: this long after our last SYN-ACK it may connect
_ACCEPT_LOOK_S = 0.001
_SO_ATTACH_FILTER = 26  # Linux; the socket module has no name for it
# Classic BPF on TCP segments, from their header on: those with SYN and without ACK (byte 13) are dropped.
_DROP_SYN = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of flags
        (0x54, 0, 0, 0x12),  # of them SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone: the next, else the one after it
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
    )
)


class ConnectionSlots(SlotLimit):
    """What bounds the connections of all listeners of a process. `unproven`: for each listener, the connections that
    have not authenticated yet, and since when (the loop's time), the oldest first."""

    __slots__ = ("unproven",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.unproven: list[dict[ClientConnection, float]] = []


class PortTakenError(Exception):
    """The address cannot be listened on; the text names it and the remedy."""


class Listener:
    """One listening address and its connections. `is_hop`: the tier above comes here, not clients.

    `slots` bound the connections of all listeners of the process together, `requests` those under way; both have a
    share for each tenant (the tier above has connections in common for all). `refused` counts, by reason, what was
    refused before a request could be read; the handler counts the others.
    """

    def __init__(
        self,
        name: str,
        handler: RequestHandler,
        limits: ClientLimits,
        budget: ByteBudget,
        slots: ConnectionSlots | None = None,
        requests: SlotLimit | None = None,
        *,
        is_hop: bool = False,
        tls: ListenerTls | None = None,
    ) -> None:
        self.name, self.is_hop = name, is_hop
        loop = asyncio.get_running_loop()
        self.cork, self.large_bodies = Cork(loop), LargeBodyQueue(loop)
        self._handler, self._limits, self._budget = handler, limits, budget
        self._slots = slots
        self.slots: SlotLimit | None = slots
        self.requests = requests if requests is not None else SlotLimit(sys.maxsize)
        self.unproven: dict[ClientConnection, float] = {}
        if slots is not None:
            slots.unproven.append(self.unproven)
        self.refused: Counter[str] = Counter()
        self._by_client: Counter[str] = Counter()
        self._idle_limit_s = limits.idle_s
        self.open_connections: set[ClientConnection] = set()
        self._turned_away: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._shares_port = False
        self._handshakes = None if tls is None else Handshakes(self._connection, tls)
        self._sweeper: asyncio.TimerHandle | None = None
        self.stopping = False

    async def open(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; returns the port (chosen by the system if `port` is 0). Raises PortTakenError.

        With `reuse_port` (SO_REUSEPORT) others that say so, too, may listen there: the kernel spreads connections.
        """
        loop = asyncio.get_running_loop()
        try:
            made = self._handshakes or self._connection
            self._server = await loop.create_server(made, host, port, backlog=1024, reuse_port=reuse_port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PortTakenError(
                f"{self.name}: cannot listen on {host}:{port}: {reason}; choose another port"
            ) from None
        self._expect_acknowledgements()
        self._shares_port = reuse_port
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    def set_limits(self, limits: ClientLimits) -> None:
        """Apply these limits to new connections; existing connections keep the limits that they began under."""
        self._limits = limits
        self._expect_acknowledgements()
        if not self.stopping:
            self._idle_limit_s = limits.idle_s

    def _expect_acknowledgements(self) -> None:
        """Have the kernel end a connection whose peer acknowledges nothing for `send_s`; those accepted from now on
        inherit it. What fits its buffers (67 KB, some 270 chunks) looks taken to us: a client whose packets go
        elsewhere (an anycast route moved) would keep an engine at work for so long, or to the end of its answer."""
        if self._server is not None:
            for sock in self._server.sockets:
                keep_alive(sock, self._limits.send_s)

    def _connection(self) -> ClientConnection:
        return ClientConnection(self, self._handler, self._limits, self._budget)

    def admit(self, connection: ClientConnection, peer: object) -> Outcome | None:
        """Count a new connection; None, or which limit it exceeds. `peer` is its socket address."""
        client = "" if self.is_hop else client_of(peer)
        reason = None
        if client and self._by_client[client] >= self._limits.connections_per_client_max:
            reason = outcome.TOO_MANY_CONNECTIONS_OF_CLIENT
        elif not self._has_room() and not (self._make_room() and self._has_room()):
            reason = outcome.TOO_MANY_CONNECTIONS
        if reason is None:
            connection.client = client
            if not self.is_hop:
                self.unproven[connection] = asyncio.get_running_loop().time()
            self._by_client[client] += 1
            self.open_connections.add(connection)
        elif len(self._turned_away) < _TURNED_AWAY_MAX:
            self._turned_away.add(connection)
        else:
            connection.abort()
        return reason

    def _has_room(self) -> bool:
        """Whether there is room for another connection; if so, its slot is taken."""
        if len(self.open_connections) >= self._limits.connections_max:
            return False
        return self.slots is None or self.slots.take(1, "")

    def _make_room(self) -> bool:
        """Close the oldest connection that has not authenticated yet, if it had enough time to do so."""
        among = [self.unproven]  # only of this listener, if it is the one with too many
        if self._slots is not None and len(self.open_connections) < self._limits.connections_max:
            among = self._slots.unproven
        firsts = (next(iter(one.items()), None) for one in among)
        oldest, since = min((one for one in firsts if one), key=lambda one: one[1], default=(None, 0.0))
        if oldest is None or asyncio.get_running_loop().time() - since < GIVES_WAY_S:
            return False
        oldest.give_way()
        return True

    def forget(self, connection: ClientConnection) -> None:
        """Unregister a closed connection."""
        self._turned_away.discard(connection)
        self.unproven.pop(connection, None)
        if connection not in self.open_connections:
            return
        self.open_connections.discard(connection)
        if self.slots is not None:
            self.slots.give(1, connection.tenant)
        self._by_client[connection.client] -= 1
        if not self._by_client[connection.client]:
            del self._by_client[connection.client]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self.open_connections)

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        self._check()

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in (*self.open_connections, *self._turned_away):
            connection.check(now, self._idle_limit_s)

    async def stop_accepting(self) -> None:
        """Accept no new connections. Each open one ends after its next answer, or when it was idle for too long."""
        self.stopping = True
        self._idle_limit_s = _HOP_IDLE_S if self.is_hop else min(self._limits.idle_s, self._limits.drain_idle_s)
        if self._server is not None:
            await self._accept_rest(self._server)
            self._server.close()
        self._check()

    async def _accept_rest(self, server: asyncio.Server) -> None:
        """Accept until no connection waits: the kernel resets those that a closing socket leaves. If other instances
        share the port, half-done handshakes end here too, and no new one begins: such a client gets no answer, repeats
        its SYN after a second, and reaches another instance."""
        loop = asyncio.get_running_loop()
        poll = select.poll()
        for listening in server.sockets:
            poll.register(listening.fileno(), select.POLLIN)
        began = loop.time()
        least = began + _HANDSHAKE_S if self._shares_port and _drop_handshakes(server) else began
        while (poll.poll(0) and loop.time() < began + _ACCEPT_MAX_S) or loop.time() < least:
            await asyncio.sleep(0 if least == began else _ACCEPT_LOOK_S)

    async def close(self, deadline_s: float) -> None:
        """Drain: wait for answers under way up to the deadline, then end what is left: a stream by an error event, what
        has not begun by a refusal, an answer of known length by breaking off."""
        await self.stop_accepting()
        await self._emptied(deadline_s)
        if self._handshakes is not None:
            await self._handshakes.close()
        for connection in tuple(self.open_connections):
            connection.expel()
        await self._emptied(_CLOSING_S)
        for connection in (*self.open_connections, *self._turned_away):
            connection.abort()
        await self._emptied(_BREAK_S)
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _emptied(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while (self.open_connections or self._turned_away or self._shaking) and loop.time() < end:
            await asyncio.sleep(0.02)

    @property
    def _shaking(self) -> int:
        return 0 if self._handshakes is None else self._handshakes.under_way


def _drop_handshakes(server: asyncio.Server) -> bool:
    """Let no new handshake begin on its sockets; whether this system can."""
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    filtered = struct.pack("@HP", len(_DROP_SYN) // 8, ctypes.addressof(program))
    try:
        for listening in server.sockets:
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)
    except OSError:
        return False
    return sys.platform == "linux"
