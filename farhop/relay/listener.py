"""A port that clients (or the tier above) come to: accepts, bounds, sweeps time limits, drains.

Never looks into a request: that is the gate's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from farhop.relay.inbound import Gate, Inbound, InboundLimits

if TYPE_CHECKING:
    from farhop.balance.limits import ByteBudget

# Time limits are checked by one sweep rather than a timer per connection: they may be late by this much.
SWEEP_S = 0.25
# Connections beyond the limit get an answer, as long as there are no more of them than this.
_TURNED_AWAY_MAX = 256
_BREAK_S = 1.0  # what breaking the connections that are left may take


class PortTakenError(Exception):
    """The address cannot be listened on; the text names it and the remedy."""


class Listener:
    """One listening address and its connections. `is_hop`: the tier above comes here, not clients."""

    def __init__(
        self, name: str, gate: Gate, limits: InboundLimits, budget: ByteBudget, *, is_hop: bool = False
    ) -> None:
        self.is_hop = is_hop
        self._name, self._gate, self._limits, self._budget = name, gate, limits, budget
        self._connections: set[Inbound] = set()
        self._turned_away: set[Inbound] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self.stopping = False

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port (chosen by the system if `port` is 0). Raises PortTakenError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connection, host, port, backlog=1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PortTakenError(
                f"{self._name}: cannot listen on {host}:{port}: {reason}; choose another port"
            ) from None
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    def _connection(self) -> Inbound:
        return Inbound(self, self._gate, self._limits, self._budget)

    def admit(self, connection: Inbound) -> bool:
        """Count a connection in, within the limit."""
        if len(self._connections) < self._limits.connections_max:
            self._connections.add(connection)
            return True
        if len(self._turned_away) < _TURNED_AWAY_MAX:
            self._turned_away.add(connection)
        else:
            connection.abort()
        return False

    def forget(self, connection: Inbound) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._turned_away.discard(connection)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        now = loop.time()
        for connection in (*self._connections, *self._turned_away):
            connection.check(now)

    def stop_accepting(self) -> None:
        """No new connections; those at rest are closed, the others after their answer."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close_if_idle()

    async def close(self, deadline_s: float) -> None:
        """Drain: wait for answers under way up to the deadline, then break what is left."""
        self.stop_accepting()
        await self._emptied(deadline_s)
        for connection in (*self._connections, *self._turned_away):
            connection.abort()
        await self._emptied(_BREAK_S)
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _emptied(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while (self._connections or self._turned_away) and loop.time() < end:
            await asyncio.sleep(0.02)
