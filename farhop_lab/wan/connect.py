"""A link's protocol for clients: HTTP/1.1 CONNECT (RFC 9110 §9.3.6), and nothing else. Pure.

A lab's link must never become an open proxy: only loopback and allowed hosts can be reached through it.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Container

HEAD_BYTES_MAX = 8 * 1024
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}


class Target(msgspec.Struct, frozen=True):
    """Where to connect: a host as the socket layer takes it (no brackets), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RefusedError(Exception):
    """A request that a link refuses. Has the status; the text tells the client what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def reply(status: int, text: str) -> bytes:
    """A whole refusal, after which the connection ends."""
    body = text.encode() + b"\n"
    allow = "Allow: CONNECT\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n{allow}Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def head_size(received: bytes) -> int | None:
    """The length in bytes of the request's head, with its empty line; None: incomplete. Raises RefusedError."""
    end = received.find(b"\r\n\r\n")
    if end > HEAD_BYTES_MAX or (end < 0 and len(received) > HEAD_BYTES_MAX):
        raise RefusedError(431, f"head: longer than {HEAD_BYTES_MAX} bytes")
    return end + 4 if end >= 0 else None


def target_of(head: bytes, allowed_hosts: Container[str]) -> Target:
    """The target in a request's head, which ends with its empty line. Raises RefusedError."""
    try:
        line = head.split(b"\r\n", 1)[0].decode("ascii")
    except UnicodeDecodeError:
        raise RefusedError(400, "request line: not ASCII; send CONNECT host:port HTTP/1.1") from None
    words = line.split(" ")
    if len(words) != 3:
        raise RefusedError(400, "request line: malformed; send CONNECT host:port HTTP/1.1")
    method, authority, version = words
    if method != "CONNECT":
        raise RefusedError(405, "method: this is a link of an emulated WAN; it takes only CONNECT host:port")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusedError(505, "version: use HTTP/1.1")
    target = _parsed(authority)
    if not (_is_loopback(target.host) or target.host in allowed_hosts):
        text = "target: only loopback addresses are reached through this link; allow the host where the link is made"
        raise RefusedError(403, text)
    # The name is not resolved: a resolver might point it outside.
    return Target("127.0.0.1", target.port) if target.host == "localhost" else target


def _parsed(authority: str) -> Target:
    host, colon, port = authority.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host) != bracketed or any(c in host for c in "@/[]"):
        raise RefusedError(400, "target: give host:port, an IPv6 address in brackets")
    if not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise RefusedError(400, "target: the port must be 1 to 65535")
    return Target(host, int(port))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
