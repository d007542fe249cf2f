"""One direction of one tunnel: from the sending end, over the shaped link, to the receiving end.

Invariants: bytes reach the receiver in order and none is lost while both ends live; what is under way is bounded,
beyond that the sender is not read (its TCP window closes); a receiver that does not read stops the flow. Owns no
connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

from farhop_lab.wan.alarm import SLACK_S
from farhop_lab.wan.shaper import Signal

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.wan.alarm import Alarm
    from farhop_lab.wan.shaper import Direction, Shaper

_LINGER_NOT = struct.pack("ii", 1, 0)  # on, 0 s: unsent bytes are dropped, and close sends RST instead of FIN


class Ends(Protocol):
    """Is told of a connection's transitions."""

    def made(self, end: End) -> None:
        """The connection is open."""

    def ended(self, end: End) -> None:
        """The peer sends no more."""

    def lost(self, end: End) -> None:
        """The connection is gone."""


class End(asyncio.Protocol):
    """One of a tunnel's two connections; `inward` is the channel that ends here.

    `on_data` takes what the peer sends. `ended`: the peer sent FIN. `end_sent`: we did.
    """

    __slots__ = ("_ends", "end_sent", "ended", "inward", "on_data", "reading", "transport")

    def __init__(self, ends: Ends, on_data: Callable[[bytes], None], inward: Channel) -> None:
        self._ends, self.on_data, self.inward = ends, on_data, inward
        self.transport: asyncio.Transport | None = None
        self.ended = self.end_sent = False
        self.reading = True

    @property
    def clean(self) -> bool:
        """Both directions have ended: closing now loses nothing."""
        return self.ended and self.end_sent

    def write(self, data: bytes) -> None:
        """Send bytes to the peer, if it is connected."""
        if self.transport is not None:
            self.transport.write(data)

    def write_end(self) -> None:
        """Send FIN; close if the peer has sent it, too."""
        if self.transport is None or self.end_sent:
            return
        self.end_sent = True
        if self.ended:
            self.transport.close()
        elif self.transport.can_write_eof():
            with suppress(OSError):  # the peer has reset it, and the loop does not know yet
                self.transport.write_eof()

    def reset(self) -> None:
        """Send RST: the peer sees its connection break, not end."""
        if self.transport is None:
            return
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def set_reading(self, on: bool) -> None:
        """Read from the peer, or let its window close."""
        self.reading = on
        transport = self.transport
        if transport is None or transport.is_closing() or transport.is_reading() == on:
            return
        if on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has the interface, without the base class
        self._ends.made(self)

    def data_received(self, data: bytes) -> None:
        self.on_data(data)

    def eof_received(self) -> bool:
        self.ended = True
        self._ends.ended(self)
        # Kept open for what still comes the other way, unless that has ended too.
        return not self.end_sent

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - an end that is not clean is a broken one
        self.transport = None
        self._ends.lost(self)

    def pause_writing(self) -> None:
        self.inward.pause()

    def resume_writing(self) -> None:
        self.inward.flow()


class Channel:
    """`deliver` acts on a signal that came out. `flowing`: the receiver can take more. Set `source` before putting."""

    __slots__ = ("_alarm", "_armed", "_deliver", "_direction", "_queued_max", "_shaper", "flowing", "sink", "source")

    def __init__(
        self,
        shaper: Shaper,
        direction: Direction,
        alarm: Alarm,
        queued_max: Callable[[], int],
        deliver: Callable[[Signal], None],
    ) -> None:
        self._shaper, self._direction, self._alarm = shaper, direction, alarm
        self._queued_max, self._deliver = queued_max, deliver
        self._armed = False
        self.source: End | None = None
        self.sink: End | None = None
        self.flowing = True

    @property
    def queued_bytes(self) -> int:
        """What is under way, with its overhead."""
        return self._shaper.queued_bytes

    def put(self, item: bytes | Signal) -> None:
        """The sender sends an item."""
        shaper = self._shaper
        shaper.put(item, self._alarm.now())
        if not self._armed:
            self._arm()
        source = self.source
        if source is not None and source.reading and shaper.queued_bytes > self._queued_max():
            source.set_reading(False)

    def _arm(self) -> None:
        due = self._shaper.due
        if due is not None and self.flowing:
            self._armed = True
            self._alarm.at(due, self._ring)

    def _ring(self) -> None:
        self._armed = False
        self._flush()

    def _flush(self) -> None:
        shaper, until = self._shaper, self._alarm.now() + SLACK_S
        while self.flowing:
            item = shaper.take(until)
            if item is None:
                break
            if not isinstance(item, bytes):
                self._deliver(item)
            elif self.sink is not None and self.sink.transport is not None:
                self._direction.delivered_bytes += len(item)
                self.sink.transport.write(item)
        if not self._armed:
            self._arm()
        source = self.source
        if source is not None and not source.reading and shaper.queued_bytes <= self._queued_max() // 2:
            source.set_reading(True)

    def pause(self) -> None:
        """The receiver does not read."""
        self.flowing = False

    def flow(self) -> None:
        """The receiver reads (again)."""
        self.flowing = True
        self._flush()

    def break_off(self) -> None:
        """The sender is gone. What a receiver that does not read has not taken yet is lost; RST ignores windows."""
        if not self.flowing:
            self._shaper.clear()
            self.flowing = True
        self.put(Signal.RESET)

    def thaw(self) -> None:
        """The freeze has ended."""
        self._shaper.thaw(self._alarm.now())
        self._flush()

    def forget(self) -> None:
        """The path has forgotten this connection: nothing comes out any more, and no end is told."""
        self._shaper.lost = True

    def clear(self) -> None:
        """Drop what is under way."""
        self._shaper.clear()
