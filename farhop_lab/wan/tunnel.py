"""One connection over a link: the client's CONNECT, the far side's answer a round trip later, then bytes both ways.

Invariants: the client gets 200 only after a round trip and the far side's own accept, 502 or 504 as the far side fails;
FIN and RST cross the link in order with the bytes before them; while frozen nothing arrives; each tunnel ends exactly
once. A client's error (405, 400, 403) is answered at once, without the network's delay.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.wan.channel import Channel, End
from farhop_lab.wan.connect import ESTABLISHED, RefusedError, head_size, reply, target_of
from farhop_lab.wan.shaper import Direction, LinkSettings, Shaper, Signal

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop_lab.wan.alarm import Alarm
    from farhop_lab.wan.connect import Target


# Connections beyond the limit get an answer, as long as there are no more of them than this.
_TURNED_AWAY_MAX = 256


def _ignore(_: bytes) -> None:
    """Bytes after a refusal are ignored."""


class LinkLimits(msgspec.Struct, frozen=True):
    """A link's limits. Seconds, counts and bytes; the bytes are per direction of each connection."""

    connect_s: float = 5.0  # for the far side to accept; then 504
    head_s: float = 10.0  # for a client to send its CONNECT, and to leave after a refusal
    connections_max: int = 4096
    flight_bytes_max: int = 8 * 2**20
    frozen_bytes_max: int = 4 * 2**20


class Path:
    """What the tunnels of one link share."""

    def __init__(
        self, settings: LinkSettings, rng: Random, alarm: Alarm, limits: LinkLimits, hosts: frozenset[str]
    ) -> None:
        self.settings, self.rng, self.alarm, self.limits, self.allowed_hosts = settings, rng, alarm, limits, hosts
        self.out, self.back = Direction(), Direction()
        self.loop = asyncio.get_running_loop()
        self.is_cut = False
        self.tunnels: set[Tunnel] = set()
        self.accepted = self.refused = self.failed = self.established = 0

    def queued_max(self) -> int:
        """Bytes that may be under way now, per direction of a connection."""
        return self.limits.frozen_bytes_max if self.settings.frozen else self.limits.flight_bytes_max


class Tunnel:
    """A client's connection (`near`), the one made for it (`far`), and the channels `out` and `back` between them."""

    __slots__ = ("_head", "_is_up", "_reply", "_target", "_timer", "back", "connecting", "far", "near", "out", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.out = self._channel(path.out, self._at_far)
        self.back = self._channel(path.back, self._at_near)
        self.near = End(self, self._read_head, self.back)
        self.back.sink = self.out.source = self.near
        self.far: End | None = None
        self._head = b""
        self._target: Target | None = None  # once requested and allowed
        self._reply = ESTABLISHED
        self._is_up = False
        self.connecting: asyncio.Task[None] | None = None
        self._timer = path.loop.call_later(path.limits.head_s, self.near.reset)
        path.accepted += 1
        path.tunnels.add(self)

    def _channel(self, direction: Direction, deliver: Callable[[Signal], None]) -> Channel:
        path = self.path
        return Channel(Shaper(path.settings, direction, path.rng), direction, path.alarm, path.queued_max, deliver)

    # -- the client's head

    def _read_head(self, data: bytes) -> None:
        path = self.path
        self._head += data
        if len(path.tunnels) > path.limits.connections_max:
            self._refuse(RefusedError(503, "link: too many connections; raise connections_max"))
            return
        try:
            size = head_size(self._head)
            if size is None:
                return
            self._target = target_of(self._head[:size], path.allowed_hosts)
        except RefusedError as error:
            self._refuse(error)
        else:
            rest, self._head = self._head[size:], b""
            self._depart(rest)

    def _refuse(self, error: RefusedError) -> None:
        """Refuse at once; the client then has `head_s` to leave."""
        self.path.refused += 1
        self.near.on_data = _ignore
        self.near.write(reply(error.status, str(error)))
        self.near.write_end()

    def _depart(self, rest: bytes) -> None:
        self._timer.cancel()
        if self.path.is_cut:
            self._fail(502, f"{self._target}: no route: the link is cut")
            return
        self.near.on_data = self.out.put
        self.out.put(Signal.OPEN)
        if rest:
            self.out.put(rest)

    # -- at the far side

    def _at_far(self, signal: Signal) -> None:
        if signal is Signal.OPEN:
            self.out.pause()  # until there is a receiver for what follows
            self.connecting = self.path.loop.create_task(self._connect())
        elif self.far is not None:
            self._give(signal, self.far)

    async def _connect(self) -> None:
        target, limits = self._target, self.path.limits
        assert target is not None
        try:
            async with asyncio.timeout(limits.connect_s):
                await self.path.loop.create_connection(self._far_end, target.host, target.port)
        except TimeoutError:  # also the kernel's own ETIMEDOUT
            self._fail(504, f"{target}: no answer within {limits.connect_s:g} s")
        except OSError as error:
            # asyncio's texts differ; resolvers' numbers are negative.
            number = error.errno or 0
            text = os.strerror(number) if number > 0 else str(error)
            self._fail(502, f"{target}: {text}")
        finally:
            self.connecting = None

    def _far_end(self) -> End:
        return End(self, self.back.put, self.out)

    def made(self, end: End) -> None:
        """A connection is open: the client's, or the one to the far side, which accepted."""
        if end is self.near:
            if len(self.path.tunnels) > self.path.limits.connections_max + _TURNED_AWAY_MAX:
                end.reset()
        elif self.near.transport is None or self.near.on_data is _ignore:
            end.reset()  # too late: the client left, or got a 502 since the link was cut
        else:
            self.far = self.out.sink = self.back.source = end
            self.back.put(Signal.ANSWER)
            self.out.flow()

    def _fail(self, status: int, text: str) -> None:
        self.path.failed += 1
        self._reply = reply(status, text)
        self.near.on_data = _ignore
        self.out.clear()
        self.near.set_reading(True)  # to notice that it leaves
        self.back.put(Signal.ANSWER)
        self.back.put(Signal.END)

    # -- at the near side

    def _at_near(self, signal: Signal) -> None:
        if signal is not Signal.ANSWER:
            self._give(signal, self.near)
            return
        self.near.write(self._reply)
        if self.far is not None:
            self._is_up = True
            self.path.established += 1
        else:
            self._timer = self.path.loop.call_later(self.path.limits.head_s, self.near.reset)

    # -- endings

    def _give(self, signal: Signal, end: End) -> None:
        if signal is Signal.END:
            end.write_end()
        else:
            end.reset()

    def ended(self, end: End) -> None:
        """An end sent FIN."""
        if self._target is None:
            end.end_sent = True  # no request came: closed silently, as eof_received then does
        elif end.on_data is not _ignore:
            (self.out if end is self.near else self.back).put(Signal.END)

    def lost(self, end: End) -> None:
        """A connection is gone: the other end is told, unless both directions had ended."""
        if end is not self.near and end is not self.far:
            return  # ignored: too late, or cut before the client was answered
        other = self.far if end is self.near else self.near
        end.inward.pause()
        if end is self.near:
            self._timer.cancel()
            if self.connecting is not None:
                self.connecting.cancel()
        if other is None or other.transport is None:
            self._over()
        elif not end.clean:
            other.inward.break_off()

    def cut(self) -> None:
        """The link broke: an open connection breaks at both ends, one not yet answered gets 502 after the delay."""
        if self._is_up:
            self.break_off()
        elif self._target is not None and self.near.on_data is not _ignore:
            far, self.far = self.far, None
            self.back.clear()
            if self.connecting is not None:
                self.connecting.cancel()
            if far is not None:
                far.on_data = _ignore
                far.reset()
            self._fail(502, f"{self._target}: no route: the link was cut")

    def forget(self) -> None:
        """The path has forgotten this connection."""
        self.out.forget()
        self.back.forget()

    def thaw(self) -> None:
        """The freeze has ended."""
        self.out.thaw()
        self.back.thaw()

    def break_off(self) -> None:
        """Break both ends at once, whatever is under way."""
        self.out.clear()
        self.back.clear()
        if self.connecting is not None:
            self.connecting.cancel()
        self.near.reset()
        if self.far is not None:
            self.far.reset()

    def _over(self) -> None:
        self.out.clear()
        self.back.clear()
        self.path.tunnels.discard(self)
