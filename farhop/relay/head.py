"""A request's head: what must be right about it before anything trusts it, and which of its headers may go on.

httptools parses; this module judges what httptools lets through (Host, transfer codings, two lengths), picks out the
headers that the balancer itself reads, and keeps the rest for the upstream. Never forwards hop-by-hop headers, headers
named by `Connection`, the client's own credentials, or anything under `x-farhop-`.
"""

from __future__ import annotations

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome

Headers = list[tuple[bytes, bytes]]  # names in lower case

# RFC 9110 §7.6.1, and what is ours to write.
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_OURS = frozenset(
    (
        b"host",
        b"content-length",
        b"content-encoding",
        b"expect",
        b"authorization",
        b"proxy-authorization",
        b"accept-encoding",  # answers are read as they pass: no compression between us and an engine
        b"traceparent",
        b"tracestate",
        b"forwarded",
        b"via",
    )
)
_NOT_FORWARDED = _HOP_BY_HOP | _OURS
_UNREMARKABLE = frozenset((b"close", b"keep-alive"))  # what `Connection` says without naming a header
# What nearly every request carries and passes: most of the judging below is not needed for these.
_PLAIN = frozenset(
    (b"accept", b"content-type", b"user-agent", b"accept-language", b"content-language", b"date", b"server")
)
_INTERNAL = (b"x-farhop-", b"x-forwarded-")


class HeadError(Exception):
    """A head that is refused, whatever it asks for; the connection cannot be trusted after it."""

    def __init__(self, reason: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = reason, detail


class Head(msgspec.Struct):
    """One request's head. `known` are the headers the balancer reads itself; `onward` is ready to be sent on."""

    method: bytes
    target: bytes
    path: bytes
    known: dict[bytes, bytes]
    onward: bytes
    keep_alive: bool
    content_length: int | None
    http_11: bool

    def get(self, name: bytes) -> bytes | None:
        """A header the balancer reads itself, by its name in lower case."""
        return self.known.get(name)


# Stands for a request whose head could not be read: it is refused, and the connection ends with it.
UNREAD = Head(
    method=b"", target=b"", path=b"", known={}, onward=b"", keep_alive=False, content_length=0, http_11=True
)  # fmt: skip


def read(method: bytes, target: bytes, version: str, headers: Headers, keep_alive: bool) -> Head:
    """Judge a parsed head. Raises HeadError."""
    known: dict[bytes, bytes] = {}
    onward: list[bytes] = []
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name in _PLAIN:
            onward += (name, b": ", value, b"\r\n")
        elif name in _NOT_FORWARDED or name.startswith(_INTERNAL):
            if name in known:
                _repeated(name, value, known)
            else:
                known[name] = value
            if name == b"connection":
                named |= _tokens(value)
        else:
            onward += (name, b": ", value, b"\r\n")
    if named and named - _UNREMARKABLE:
        onward = _without(onward, named)
    http_11 = version == "1.1"
    if not http_11 and version != "1.0":
        raise HeadError(outcome.MALFORMED_HTTP, f"HTTP/{version} is not spoken here: send HTTP/1.1")
    return Head(
        method=method,
        target=target,
        path=_path(target),
        known=known,
        onward=b"".join(onward),
        keep_alive=keep_alive,
        content_length=_framing(known, http_11),
        http_11=http_11,
    )


def _repeated(name: bytes, value: bytes, known: dict[bytes, bytes]) -> None:
    """A second header of a name we act on is an attack or a bug, save where lists may be split (RFC 9110 §5.3)."""
    if name in (b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"via", b"forwarded", b"tracestate"):
        known[name] += b"," + value
    elif name.startswith(b"x-forwarded-") or name == b"accept-encoding":
        return
    else:
        raise HeadError(outcome.MALFORMED_HTTP, f"header `{name.decode('latin-1')}` may stand once only")


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))


def _without(onward: list[bytes], named: frozenset[bytes]) -> list[bytes]:
    kept: list[bytes] = []
    for i in range(0, len(onward), 4):
        if onward[i] not in named:
            kept += onward[i : i + 4]
    return kept


def _path(target: bytes) -> bytes:
    if not target.startswith(b"/"):
        raise HeadError(outcome.MALFORMED_HTTP, "the request target must be a path beginning with `/`")
    return target.split(b"?", 1)[0] if b"?" in target else target


def _framing(known: dict[bytes, bytes], http_11: bool) -> int | None:
    """The body's length, None where it is chunked; refuses every way to say both or neither (RFC 9112 §6)."""
    host = known.get(b"host")
    if http_11 and (not host or host.isspace()):
        raise HeadError(outcome.MALFORMED_HTTP, "header `Host` is missing")
    coding, length = known.get(b"transfer-encoding"), known.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise HeadError(outcome.MALFORMED_HTTP, "`Transfer-Encoding` and `Content-Length` exclude one another")
        if coding.strip().lower() != b"chunked" or not http_11:
            raise HeadError(outcome.MALFORMED_HTTP, "the only transfer coding understood is `chunked`, over HTTP/1.1")
        return None
    if length is None:
        return 0
    length = length.strip(b" \t")
    if not length.isdigit() or len(length) > 15:
        raise HeadError(outcome.MALFORMED_HTTP, "`Content-Length` must be a plain decimal number")
    return int(length)


def answer_onward(headers: Headers) -> tuple[bytes, dict[bytes, bytes]]:
    """Of an upstream's answer: the headers that may reach the client, ready to send, and those we read ourselves."""
    known: dict[bytes, bytes] = {}
    onward: list[bytes] = []
    for name, value in headers:
        ours = name not in _PLAIN and (name in _ANSWER_OURS or name.startswith(b"x-farhop-"))
        if ours or name == b"content-type":
            known[name] = value
        if not ours:
            onward += (name, b": ", value, b"\r\n")
    if b"connection" in known:
        named = _tokens(known[b"connection"]) - _UNREMARKABLE
        if named:
            onward = _without(onward, named)
    return b"".join(onward), known


_ANSWER_OURS = _HOP_BY_HOP | {b"content-length", b"proxy-authenticate", b"via", b"server-timing"}
