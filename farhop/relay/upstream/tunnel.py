"""Reaching an upstream through an HTTP proxy: CONNECT (RFC 9110 §9.3.6), then the connection is the upstream's own.

Invariants: nothing of a request is sent before the proxy said 2xx; whatever else it says, or bytes behind its head,
is a failed connect. Never sends credentials to a proxy, and never retries. TLS to the upstream runs inside the tunnel:
the proxy sees no more of it than the name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, cast

from farhop.relay.http import tls
from farhop.relay.upstream.dial import dial

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from farhop.balance.machine import Address

HEAD_BYTES_MAX = 8192

_P = TypeVar("_P", bound=asyncio.Protocol)


class _Handshake(asyncio.Protocol):
    """The connection until the proxy has answered."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._head = b""
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        host = str(self._target).encode()
        cast("asyncio.Transport", transport).write(b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (host, host))

    def data_received(self, data: bytes) -> None:
        if self.answered.done():
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0 and len(self._head) <= HEAD_BYTES_MAX:
            return
        parts = self._head.split(b"\r\n", 1)[0].split(b" ")
        valid = len(parts) >= 2 and parts[0].startswith(b"HTTP/1.") and end >= 0
        if valid and parts[1].startswith(b"2") and end + 4 == len(self._head):
            self.answered.set_result(None)
        else:
            status = parts[1].decode("latin-1") if valid else "something that is not HTTP"
            self.answered.set_exception(ConnectionRefusedError(f"the proxy said {status[:16]}"))

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(ConnectionResetError("the proxy closed the connection"))


async def connect(
    via: Address, target: Address, make: Callable[[asyncio.Transport], _P], context: ssl.SSLContext | None = None
) -> _P:
    """Connect to `target` through the proxy `via`; returns the protocol that then owns the connection, made of the
    transport to the proxy. With a `context` it speaks TLS, to the name in `target.tls`.

    Raises OSError where either of them refuses. Bound it in time: a proxy may never answer.
    """
    transport, handshake = await dial(lambda: _Handshake(target), via.host, via.port)
    try:
        await handshake.answered
    except BaseException:
        handshake.answered.cancel()
        transport.abort()
        raise
    if context is not None:
        return await tls.upgrade(transport, make, context, target.tls)
    protocol = make(transport)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    return protocol
