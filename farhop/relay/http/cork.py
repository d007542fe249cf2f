"""Writes of one turn of the event loop, sent together at its end where many come.

Each write wakes the process at the other end; sent one by one between other work, writes wake the same process again
and again. Held until all that came in this turn is worked through, they cost a third of the kernel's time (measured:
docs/measurements/performance.md). At low load there is nothing to hold them for, and it would add a turn of the loop to
a first token. Invariants: what is written to one transport leaves in its order; nothing is held beyond the turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


# What is held for one transport is small, or it is sent at once: a slow reader must be noticed within the turn.
_PARTS_MAX = 16
_LARGE_BYTES = 8 * 1024
FEW = 2  # writes in a millisecond from which on holding them is cheaper
CROWD = 8  # chunks, which cost less; holding them costs the loop a turn


class Cork:
    """Holds writes until the end of the turn. Before a transport is closed with a last word, `flush`."""

    __slots__ = ("_crowd", "_held", "_loop", "_now", "_writes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: dict[asyncio.Transport, list[bytes]] = {}
        self._now = 0.0
        self._writes = self._crowd = 0  # in this millisecond, and in the one before that had any

    def write(self, transport: asyncio.Transport, data: bytes, many: int = FEW) -> None:
        """Send `data`: at once where fewer than so `many` come in a millisecond, else with the others of this turn."""
        now = self._loop.time()  # of this turn, in whole milliseconds
        if now != self._now:
            self._now, self._crowd, self._writes = now, self._writes, 0
        self._writes += 1
        if self._crowd >= many:
            self._hold(transport, data)
        elif self._held:
            self._at_once(transport, data)
        elif not transport.is_closing():  # else it is gone meanwhile
            transport.write(data)

    def _hold(self, transport: asyncio.Transport, data: bytes) -> None:
        held = self._held
        parts = held.get(transport)
        if len(data) >= _LARGE_BYTES or (parts is not None and len(parts) >= _PARTS_MAX):
            self._at_once(transport, data)
        elif parts is not None:
            parts.append(data)
        else:
            if not held:
                self._loop.call_soon(self.flush)
            held[transport] = [data]

    def _at_once(self, transport: asyncio.Transport, data: bytes) -> None:
        _send(transport, [*self._held.pop(transport, ()), data])

    def holds(self, transport: asyncio.Transport) -> bool:
        """Whether something written to it waits for the end of the turn."""
        return transport in self._held

    def flush(self) -> None:
        """Send what is held, now."""
        held, self._held = self._held, {}
        for transport, parts in held.items():
            _send(transport, parts)


def _send(transport: asyncio.Transport, parts: list[bytes]) -> None:
    if transport.is_closing():
        return  # gone meanwhile
    if len(parts) == 1:
        transport.write(parts[0])
    else:
        transport.writelines(parts)
