"""Heads: a request's, judged before anything trusts it, and an answer's (RFC 9112 §2-4, §6.3).

Sorts the headers that the balancer itself reads from those that may go on. Never forwards hop-by-hop headers, headers
named by `Connection`, the client's own credentials, or anything under `x-farhop-`; never guesses where a body ends.
"""

from __future__ import annotations

import re

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.relay.http.body import Body, ChunkedBody, EndlessBody, LengthBody
from farhop.relay.http.fields import TOKEN, FieldError, Fields

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
        b"x-api-key",
        b"proxy-authorization",
        b"accept-encoding",  # answers are read as they pass: no compression between us and an engine
        b"traceparent",
        b"tracestate",
        b"forwarded",
        b"via",
        b"http2-settings",  # of an upgrade that we do not make
    )
)
_NOT_FORWARDED = _HOP_BY_HOP | _OURS
RESUME = b"x-farhop-resume"  # between tiers: send token ids; or: this is a continuation
EXPLAIN = b"x-farhop-explain"  # a client asks for the reasons of its route, when its answer begins and when it ends
_FORGOTTEN: dict[bytes, bytes] = {}  # never written to
_INTERNAL = (b"x-farhop-", b"x_farhop_", b"x-forwarded-")
_UNREMARKABLE = frozenset((b"close", b"keep-alive"))  # what `Connection` says without naming a header
_LISTS = (b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"via", b"forwarded", b"tracestate")
_AUTHORITY = rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_HOST = re.compile(_AUTHORITY)
_ABSOLUTE = re.compile(rb"(?i:https?)://(%b)((?:[/?].*)?)" % _AUTHORITY, re.DOTALL)
_TARGET = bytes(range(0x21, 0x7F))
_LENGTH_DIGITS_MAX = 15

_ANSWER_OURS = _HOP_BY_HOP | {b"content-length", b"proxy-authenticate", b"via", b"server-timing"}
_ANSWER_READ = (b"content-type", b"endpoint-load-metrics")
# In an engine's answer: what acts on the client's browser in the name of our host (cookies, redirects, what to forget
# or to trust), or on a proxy before us (which file or page of its own to answer with instead, how long to keep it), and
# what reveals an address inside the fleet, what runs there or how busy it is.
_ANSWER_DROPPED = frozenset(
    (
        b"set-cookie", b"set-cookie2", b"location", b"content-location", b"refresh", b"link", b"alt-svc",
        b"clear-site-data", b"strict-transport-security", b"public-key-pins", b"nel", b"report-to",
        b"reporting-endpoints", b"service-worker-allowed", b"www-authenticate", b"server", b"x-powered-by",
        b"x-served-by", b"x-backend-server", b"x-envoy-upstream-host", b"x-upstream-addr", b"x-real-ip",
        b"x-gateway-destination-endpoint", b"x-gateway-destination-endpoint-served", b"x-prefiller-host-port",
        b"target-pod", b"endpoint-load-metrics", b"ratelimit", b"ratelimit-policy",
        b"x-accel-redirect", b"x-accel-expires", b"x-accel-limit-rate", b"x-accel-charset", b"x-sendfile",
        b"x-lighttpd-send-file", b"x-reproxy-url", b"x-reproxy-file",
    )
)  # fmt: skip
# A client's limits are Farhop's to report: an engine's are the limits of the region's key there. LiteLLM's proxy
# reports what that key has spent, where its engines are, and under a prefix each header of theirs.
_ANSWER_DROPPED_PREFIXES = (b"x-farhop-", b"x-forwarded-", b"x-ratelimit-", b"x-litellm-", b"llm_provider-")


def passes(name: bytes) -> bool:
    """Whether a client's header of this name, in lower case, goes on to the tier below and to engines."""
    return not (name in _NOT_FORWARDED or name.startswith(_INTERNAL))


def without(lines: bytes, name: bytes) -> bytes:
    """Header lines ready to be sent on, less those of this name, which is in lower case."""
    return b"".join(line for line in lines.splitlines(keepends=True) if not line.startswith(name + b":"))


def values(headers: bytes, name: bytes) -> list[bytes]:
    """The values of the lines that begin with `name` and its colon. `headers` are lines with names in lower case."""
    if not name or name not in headers:
        return []
    return [line[len(name) :] for line in headers.split(b"\r\n") if line.startswith(name)]


def _answer_read(name: bytes) -> bool:
    return name in _ANSWER_OURS or name in _ANSWER_READ or name.startswith(b"x-farhop-")


def _answer_passes(name: bytes) -> bool:
    if name in _ANSWER_OURS or name in _ANSWER_DROPPED:
        return False
    return not name.startswith(_ANSWER_DROPPED_PREFIXES)


_fields = Fields(passes, lambda name: not passes(name))
_answer_fields = Fields(_answer_passes, _answer_read)


class HeadError(Exception):
    """A head that is refused, whatever it asks for; the connection cannot be trusted after it."""

    def __init__(self, reason: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = reason, detail


class Head(msgspec.Struct, gc=False):
    """One request's head. `known` are the headers the balancer reads itself; `onward` is ready to be sent on.

    `content_length` is None where the body is chunked.
    """

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

    def forget(self) -> None:
        """A stream has begun, and may last: of `known` no more is needed than what its end asks for."""
        if EXPLAIN not in self.known:
            self.known = _FORGOTTEN


# Stands for a request whose head could not be read: it is refused, and the connection ends with it.
UNREAD = Head(
    method=b"", target=b"", path=b"", known={}, onward=b"", keep_alive=False, content_length=0, http_11=True
)  # fmt: skip


class AnswerHead(msgspec.Struct, gc=False):
    """An upstream's head. `known` are the headers we read ourselves, `onward` those that may reach the client.

    `length` is the body's if it is given, else None. `body` reads it, None if there is none.
    """

    status: int
    known: dict[bytes, bytes]
    onward: bytes
    length: int | None
    body: Body | None
    keep_alive: bool


def read(raw: bytes, headers_max: int) -> Head:
    """Judge a request's head, given without the empty line that ends it. Raises HeadError."""
    line, *lines = raw.split(b"\r\n")
    method, target, path, http_11, authority = _request_lines.get(line) or _request_line(line)
    if len(lines) > headers_max:
        raise HeadError(outcome.HEAD_TOO_LARGE, f"the request has too many headers: at most {headers_max}")
    known, onward = _sorted(_fields, lines)
    content_length = _length(known, http_11)
    if authority:
        known[b"host"] = authority  # the target's overrides it, if it has one (RFC 9112 §3.2.2)
    return Head(
        method=method,
        target=target,
        path=path,
        known=known,
        onward=onward,
        keep_alive=_persists(known, http_11) if b"connection" in known else http_11,
        content_length=content_length,
        http_11=http_11,
    )


def answer(raw: bytes, headers_max: int) -> AnswerHead:
    """Read an upstream's head, given without the empty line that ends it. Raises HeadError."""
    line, *lines = raw.split(b"\r\n")
    if len(lines) > headers_max:
        raise HeadError(outcome.BAD_FRAMING, "too many headers")
    status, http_11 = _status_lines.get(line) or _status_line(line)
    known, onward = _sorted(_answer_fields, lines)
    length, body = _answer_body(status, known, http_11)
    keep_alive = _persists(known, http_11) if b"connection" in known else http_11
    return AnswerHead(status, known, onward, length, body, keep_alive and not isinstance(body, EndlessBody))


def _sorted(fields: Fields, lines: list[bytes]) -> tuple[dict[bytes, bytes], bytes]:
    """The headers we read ourselves by name, and the lines that go on."""
    known: dict[bytes, bytes] = {}
    onward: list[bytes] = []
    remembered, read_line = fields.get, fields.read
    try:
        for line in lines:
            name, value, passed, ours = remembered(line) or read_line(line)
            if passed:
                onward.append(passed)
            if ours:
                known[name] = value if name not in known else _repeated(name, known[name], value)
    except FieldError as error:
        raise HeadError(outcome.MALFORMED_HTTP, str(error)) from None
    named = known.get(b"connection")
    if named is not None and named.lower() not in _UNREMARKABLE:
        hidden = frozenset(token.strip().lower() for token in named.split(b","))
        onward = [passed for passed in onward if passed.partition(b":")[0] not in hidden]
    return known, b"".join(onward)


def _repeated(name: bytes, before: bytes, value: bytes) -> bytes:
    """A second header of a name we act on is an attack or a bug, save where lists may be split (RFC 9110 §5.3)."""
    if name in _LISTS:
        return before + b"," + value
    if name.startswith(b"x-forwarded-") or name in (b"accept-encoding", b"server-timing", b"proxy-authenticate"):
        return before
    raise HeadError(outcome.MALFORMED_HTTP, f"header `{name.decode('latin-1')}` may stand once only")


# -- first lines: few different ones come again and again

_request_lines: dict[bytes, tuple[bytes, bytes, bytes, bool, bytes]] = {}
_status_lines: dict[bytes, tuple[int, bool]] = {}
_FIRST_LINES_MAX = 256
_FIRST_LINE_BYTES_MAX = 128


def _request_line(line: bytes) -> tuple[bytes, bytes, bytes, bool, bytes]:
    """Method, target as a path with its query, path, whether it is HTTP/1.1 (not 1.0), and the authority that the
    target names: b"" where it is a path, as nearly always."""
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[0] or parts[0].translate(None, TOKEN):
        raise HeadError(outcome.MALFORMED_HTTP, "not HTTP/1.1: the request line must be `METHOD target HTTP/1.1`")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        given = version.decode("latin-1") if version.startswith(b"HTTP/") and len(version) == 8 else "this version"
        raise HeadError(outcome.MALFORMED_HTTP, f"{given} is not supported: send HTTP/1.1")
    authority = b""
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise HeadError(outcome.MALFORMED_HTTP, "the request target must be a path beginning with `/`")
        authority, target = absolute[1], absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    if target.translate(None, _TARGET) or b"#" in target:
        raise HeadError(outcome.MALFORMED_HTTP, "the request target holds a character that must be percent-encoded")
    read_line = (method, target, target.partition(b"?")[0], version == b"HTTP/1.1", authority)
    if len(line) <= _FIRST_LINE_BYTES_MAX and b"?" not in target:  # a query may hold a secret
        if len(_request_lines) >= _FIRST_LINES_MAX:
            _request_lines.clear()
        _request_lines[line] = read_line
    return read_line


def _status_line(line: bytes) -> tuple[int, bool]:
    """Status, and whether it is HTTP/1.1. Any HTTP/1.x is understood; the reason phrase is not read."""
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    valid = len(version) == 8 and version.startswith(b"HTTP/1.") and version[7:].isdigit() and rest[3:4] in (b" ", b"")
    if not valid or len(code) != 3 or not code.isdigit() or not 100 <= int(code) <= 599 or b"\n" in rest:
        raise HeadError(outcome.BAD_FRAMING, "the answer's status line is malformed")
    read_line = (int(code), version != b"HTTP/1.0")
    if len(line) <= _FIRST_LINE_BYTES_MAX:
        if len(_status_lines) >= _FIRST_LINES_MAX:
            _status_lines.clear()
        _status_lines[line] = read_line
    return read_line


# -- framing


def _persists(known: dict[bytes, bytes], http_11: bool) -> bool:
    """Whether the connection outlives this message, which has options for it (RFC 9112 §9.3)."""
    tokens = [token.strip() for token in known[b"connection"].lower().split(b",")]
    return b"close" not in tokens and (http_11 or b"keep-alive" in tokens)


def _length(known: dict[bytes, bytes], http_11: bool) -> int | None:
    """The body's length, None where it is chunked; refuses every way to say both or neither (RFC 9112 §6)."""
    host = known.get(b"host")
    if host is None or not host:
        if http_11:
            raise HeadError(outcome.MALFORMED_HTTP, "header `Host` is missing")
    elif not _HOST.fullmatch(host):
        raise HeadError(outcome.MALFORMED_HTTP, "header `Host` must be a host name or address, with or without a port")
    coding, length = known.get(b"transfer-encoding"), known.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise HeadError(outcome.MALFORMED_HTTP, "`Transfer-Encoding` and `Content-Length` exclude one another")
        if coding.lower() != b"chunked" or not http_11:
            raise HeadError(outcome.MALFORMED_HTTP, "the only transfer coding understood is `chunked`, over HTTP/1.1")
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX:
        raise HeadError(outcome.MALFORMED_HTTP, "`Content-Length` must be a plain decimal number")
    return int(length)


def _answer_body(status: int, known: dict[bytes, bytes], http_11: bool) -> tuple[int | None, Body | None]:
    coding, length = known.get(b"transfer-encoding"), known.get(b"content-length")
    if coding is not None and (coding.lower() != b"chunked" or length is not None or not http_11):
        raise HeadError(outcome.BAD_FRAMING, "an unexpected transfer coding, or one beside `Content-Length`")
    if length is not None and (not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX):
        raise HeadError(outcome.BAD_FRAMING, "`Content-Length` is not a number")
    if status < 200 or status in (204, 304):
        return None, None  # whatever its headers say (RFC 9112 §6.3)
    if coding is not None:
        return None, ChunkedBody()
    if length is None:
        return None, EndlessBody()
    size = int(length)
    return size, LengthBody(size) if size else None
