"""TLS on a connection that exists already: a client's, before the listener gets it; ours, inside a tunnel.

Invariants: a handshake is bounded in time, and so is the number of those under way; one that fails costs a count and
nothing else. Never chooses which certificates are trusted: contexts come ready made
(farhop.service.config.certificates). What Python's ssl and uvloop cannot do: answer a client that offers only h2 with
an alert (it is left without ALPN, and its preface is refused as HTTP that is not 1.1), and send the alert of a failed
handshake before the connection closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from functools import partial
from ipaddress import IPv6Address
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

HANDSHAKES_MAX = 1024  # under way at once, per listener: each holds 64 KiB
# At this number, the oldest of the client with the most of them is closed: at once if another client comes, which has
# less of them, else if it had this long. Otherwise connections that say nothing would keep all others out.
GIVES_WAY_S = 1.0
SHUTDOWN_S = 2.0  # how long an upstream may take to say that it closes, too
_CLOSE_S = 120.0  # and a client, its last answer included: ClientConnection bounds it more narrowly
_UNSENT_BYTES_MAX = 64 * 1024  # before writing pauses: as on a plain connection

_P = TypeVar("_P", bound=asyncio.BaseProtocol)

# OpenSSL's reasons to bounded words; alerts are what the other side thinks of us.
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "CERTIFICATE_VERIFY_FAILED": "bad_certificate",
    "HTTP_REQUEST": "not_tls",
    "WRONG_VERSION_NUMBER": "not_tls",
    "UNSUPPORTED_PROTOCOL": "version",
    "VERSION_TOO_LOW": "version",
    "NO_SHARED_CIPHER": "cipher",
}
REASONS = frozenset((*_REASONS.values(), "alert", "timeout", "left", "too_many", "wrong_name", "other"))


class ListenerTls(msgspec.Struct, frozen=True):
    """How a listener speaks TLS. `context` is asked before each handshake; `refused` counts, by a word of REASONS.

    `admits` is asked of the certificate (DER) that was verified, before anything is read; None: everybody is let in.
    """

    context: Callable[[], ssl.SSLContext]
    handshake_s: float
    refused: Callable[[str], None]
    admits: Callable[[bytes | None], bool] | None = None


def client_of(peer: object) -> str:
    """The key by which a client's connections are counted: its IPv4 address, or the /64 of its IPv6 address; "" if it
    has neither."""
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0])
    if ":" not in host:
        return host
    address = IPv6Address(host)
    return str(address.ipv4_mapped or address.packed[:8].hex(":", 2))


def _peer(accepted: socket.socket) -> object:
    try:
        return accepted.getpeername()
    except OSError:
        return None  # it has left already


def reason_of(error: Exception) -> str:
    """The reason of a failed handshake, as a label."""
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or ""  # those not from OpenSSL have none
        return "alert" if "_ALERT_" in reason else _REASONS.get(reason, "other")
    return "timeout" if isinstance(error, ConnectionAbortedError | TimeoutError) else "left"


def text_of(error: OSError) -> str:
    """The text of a TLS failure for the log: OpenSSL's message, and what is wrong with a certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    return (getattr(error, "reason", None) or "failed").lower().replace("_", " ")


async def upgrade(
    transport: asyncio.Transport,
    make: Callable[[asyncio.Transport], _P],
    context: ssl.SSLContext,
    server_name: str | None,
) -> _P:
    """Speak TLS on `transport`, as a client towards `server_name`; returns the protocol that then owns the connection.
    It is made of `transport`, which alone knows how much TLS data waits here to be sent.

    Raises OSError (an ssl.SSLError where TLS itself failed), and then the transport is closed. Bound it in time.
    """
    upgraded = await asyncio.get_running_loop().start_tls(
        transport, asyncio.Protocol(), context, server_hostname=server_name, ssl_shutdown_timeout=SHUTDOWN_S
    )
    # No await from here: what the other side has sent already is delivered right after this step.
    if upgraded is None or upgraded.is_closing():
        raise ConnectionResetError("the connection closed with its handshake")
    protocol = make(transport)
    upgraded.set_protocol(protocol)
    protocol.connection_made(upgraded)
    return protocol


class Handshakes:
    """The handshakes under way on one listening socket: a protocol factory, for the factory behind it."""

    def __init__(self, make: Callable[[], asyncio.BaseProtocol], tls: ListenerTls) -> None:
        self._make, self._tls = make, tls
        self._tasks: dict[asyncio.Task[None], tuple[str, float]] = {}  # whose, and since when, the oldest first
        self._by_client: Counter[str] = Counter()

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection just accepted."""
        return _Accepted(self)

    def begin(self, accepted: socket.socket) -> None:
        """A connection is there; it is ours to close."""
        accepted.setblocking(False)
        loop = asyncio.get_running_loop()
        client = client_of(_peer(accepted))
        if len(self._tasks) >= HANDSHAKES_MAX:
            self._tls.refused("too_many")
            if not self._make_room(client, loop.time()):
                accepted.close()
                return
        task = loop.create_task(self._shake(accepted))
        self._tasks[task] = client, loop.time()
        self._by_client[client] += 1
        task.add_done_callback(self._forget)

    def _make_room(self, client: str, now: float) -> bool:
        """Close the oldest handshake of the client that has the most under way, if it may be closed for this one."""
        most, number = max(self._by_client.items(), key=itemgetter(1))
        oldest, since = next((task, since) for task, (whose, since) in self._tasks.items() if whose == most)
        if now - since < GIVES_WAY_S and number <= self._by_client[client] + 1:
            return False
        self._forget(oldest)
        oldest.cancel()
        return True

    def _forget(self, task: asyncio.Task[None]) -> None:
        known = self._tasks.pop(task, None)
        if known is not None:
            client, _ = known
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    def refuse(self) -> None:
        """Count a connection that nothing is left for."""
        self._tls.refused("too_many")

    async def _shake(self, accepted: socket.socket) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                self._make if self._tls.admits is None else partial(_Named, self._make, self._tls, self._tls.admits),
                accepted,
                ssl=self._tls.context(),
                ssl_handshake_timeout=self._tls.handshake_s,
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except OSError as error:
            accepted.close()
            self._tls.refused(reason_of(error))
        except BaseException:
            accepted.close()
            raise
        else:
            transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)

    @property
    def under_way(self) -> int:
        """How many handshakes have begun and not ended; each does within its bound."""
        return len(self._tasks)

    async def close(self) -> None:
        """Abort all handshakes in progress."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Named(asyncio.Protocol):
    """A connection after its handshake. If the certificate names another party, nothing is read from it."""

    def __init__(
        self, make: Callable[[], asyncio.BaseProtocol], tls: ListenerTls, admits: Callable[[bytes | None], bool]
    ) -> None:
        self._make, self._tls, self._admits = make, tls, admits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        session: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if not self._admits(None if session is None else session.getpeercert(binary_form=True)):
            self._tls.refused("wrong_name")
            cast("asyncio.Transport", transport).abort()
            return
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class _Accepted(asyncio.Protocol):
    """A connection before its handshake: its socket is taken over before anything is read from it.

    Not `start_tls`: uvloop would read, and lose, what came before it. Not TLS by the server itself: that neither
    reports a failed handshake nor bounds how many are under way.
    """

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            self._handshakes.begin(socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())))
        except OSError:
            self._handshakes.refuse()  # no file descriptor is left
        finally:
            cast("asyncio.Transport", transport).abort()  # closes its own descriptor, not the connection
