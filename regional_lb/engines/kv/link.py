"""The receiving end of ZeroMQ's wire protocol (ZMTP 3.0: https://rfc.zeromq.org/spec/23), as far as KV events need it.

It is our own because libzmq bounds the size of a message's parts but not their number: a message that never ended
filled our memory (60 MB of empty parts took 1.9 GB) unnoticed. Invariants: at most PARTS_MAX parts and
MESSAGE_BYTES_MAX bytes of a message are accepted; messages not yet consumed wait at the sender, except for
BUFFER_BYTES; a peer that breaks the protocol, or is silent for SILENT_S after a ping, is disconnected. Never interprets
messages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, cast

from farhop.relay.upstream.dial import dial

if TYPE_CHECKING:
    from collections.abc import Iterable

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
PARTS_MAX = 16  # a topic, an envelope, a number and a batch
BUFFER_BYTES = 256 * 1024
HANDSHAKE_S = 5.0  # from the first packet on
HEARTBEAT_S = 5.0  # a path that swallows everything is noticed
SILENT_S = 15.0
_COMMAND_BYTES_MAX = 8192

_MORE, _LONG, _COMMAND = 1, 2, 4
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM + bytes(32)
_ALL = b"\x01"  # subscribes to every topic
_PING, _PONG, _READY = b"\x04PING", b"\x04PONG", b"\x05READY"
_TTL_BYTES, _CONTEXT_BYTES_MAX = 2, 16  # of a ping


class LinkError(Exception):
    """The link is over: cut, silent, or the other side does not keep to the protocol."""


def _frame(body: bytes, flags: int = 0) -> bytes:
    return bytes((flags, len(body))) + body  # what we say is short


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


class Link(asyncio.Protocol):
    """One connection: `open_link` makes it, `close` ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer, self._at = bytearray(), 0  # how much of it was read
        self._came = asyncio.Event()
        self._over = False
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Keep the data, and pause reading if they are not consumed."""
        self._heard_at = self._loop.time()
        self._buffer += data
        if self._left >= BUFFER_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._came.set()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._over, self._transport = True, None
        self._came.set()

    # -- for the listener

    async def shake_hands(self, kind: Literal[b"SUB", b"DEALER"]) -> None:
        """Become one of ZeroMQ's sockets of this kind. Raises LinkError."""
        self._write(_GREETING)
        greeting = await self._bytes(len(_GREETING))
        if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3 or greeting[12:32] != _MECHANISM:
            raise LinkError("the peer does not speak ZMTP 3, or asks for a key")
        self._write(_frame(_READY + _property(b"Socket-Type", kind) + _property(b"Identity", b""), _COMMAND))
        flags, body = await self._next_frame(_COMMAND_BYTES_MAX)
        if not flags & _COMMAND or not body.startswith(_READY):
            raise LinkError("the peer did not send READY")
        if kind == b"SUB":
            self._write(_frame(_ALL))
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)

    async def receive(self) -> list[bytes]:
        """The next message, at once where it is here. Raises LinkError once there is none."""
        parts: list[bytes] = []
        left = MESSAGE_BYTES_MAX
        while True:
            flags, body = await self._next_frame(left)
            if flags & _COMMAND:
                if body.startswith(_PING):
                    context = body[len(_PING) + _TTL_BYTES :]
                    self._write(_frame(_PONG + context[:_CONTEXT_BYTES_MAX], _COMMAND))
                await asyncio.sleep(0)  # others have their turn, however many of these come
                continue
            parts.append(body)
            left -= len(body)
            if not flags & _MORE:
                return parts
            if len(parts) >= PARTS_MAX:
                raise LinkError("a message of too many parts")

    def send(self, parts: Iterable[bytes]) -> None:
        """Send a message of short parts."""
        *before, last = parts
        self._write(b"".join(_frame(part, _MORE) for part in before) + _frame(last))

    def close(self) -> None:
        """Close the connection at once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- within

    @property
    def _left(self) -> int:
        return len(self._buffer) - self._at

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > BUFFER_BYTES:  # it asks, and takes no answer
            self._transport.abort()

    async def _next_frame(self, most: int) -> tuple[int, bytes]:
        """A frame's flags, and its body of at most `most` bytes."""
        flags = (await self._bytes(1))[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise LinkError("a frame of unknown kind")
        size = int.from_bytes(await self._bytes(8 if flags & _LONG else 1), "big")
        if size > (_COMMAND_BYTES_MAX if flags & _COMMAND else most):
            raise LinkError("a frame that is too large")
        return flags, await self._bytes(size)

    async def _bytes(self, size: int) -> bytes:
        while self._left < size:
            if self._over:
                raise LinkError("it was cut")
            self._came.clear()
            if self._transport is not None and not self._transport.is_reading():
                self._transport.resume_reading()
            await self._came.wait()
        start, self._at = self._at, self._at + size
        taken = bytes(memoryview(self._buffer)[start : self._at])
        if self._at >= BUFFER_BYTES or self._at == len(self._buffer):
            del self._buffer[: self._at]
            self._at = 0
        return taken

    def _beat(self) -> None:
        if self._transport is None:
            return
        # A peer that is not read from cannot be heard.
        if self._transport.is_reading() and self._loop.time() - self._heard_at >= SILENT_S:
            self._transport.abort()
            return
        self._write(_frame(_PING + bytes(_TTL_BYTES), _COMMAND))
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)


async def open_link(endpoint: str, kind: Literal[b"SUB", b"DEALER"]) -> Link:
    """A link to `tcp://host:port`. Raises LinkError, OSError if nothing listens there, TimeoutError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    async with asyncio.timeout(HANDSHAKE_S):
        _, link = await dial(Link, host.strip("[]"), int(port))
        try:
            await link.shake_hands(kind)
        except BaseException:
            link.close()
            raise
    return link
