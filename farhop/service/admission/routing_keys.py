"""Keys besides the prompt that a request may be routed by: its session, the header matches of a split's rules, a
version.

Keys that no configuration uses are not read. A session is kept only as a hash of tenant and name, and a match only as
the operator's text of it: the client's own text of either never enters a log, a span or a record. Never refuses a
request: a key that cannot be read counts as absent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from farhop.relay.http.head import values

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from farhop.balance.machine import HeaderMatch
    from farhop.relay.formats.prompt import Preferences

NAME_BYTES_MAX = 1024  # of a session's name; a longer one counts by its beginning

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
VERSION_HEADER = b"x-farhop-version"
_VERSION = re.compile(rb"[A-Za-z0-9._-]{1,64}")


# How coding agents name their sessions, and those that they came from: Claude Code (each of its agents has a context of
# its own), Codex, OpenCode.
_CLAUDE_SESSION, _CLAUDE_AGENT, _CLAUDE_PARENT = (
    b"x-claude-code-session-id: ", b"x-claude-code-agent-id: ", b"x-claude-code-parent-agent-id: ",
)  # fmt: skip
_AGENTS = (b"session-id: ", b"session_id: ", b"x-session-id: ", b"x-session-affinity: ")
_PARENT = b"x-parent-session-id: "


def soft_session(tenant: str, headers: bytes, preferences: Preferences) -> tuple[int, int]:
    """A session name that needs no configuration, and its parent's, as hashes of tenant and name; 0 for none. `headers`
    as for SessionReader.read; `preferences` are those of the body."""
    name, parent = _agents(headers) if b"session" in headers else (b"", b"")
    if not name:
        name = (preferences.cache_key or preferences.user).encode("utf-8", "replace")
    return (_hash(tenant, name), _hash(tenant, parent)) if name else (0, 0)


def _agents(headers: bytes) -> tuple[bytes, bytes]:
    lines = b"\r\n" + headers
    if claude := _value(lines, _CLAUDE_SESSION):
        agent = _value(lines, _CLAUDE_AGENT)
        if not agent:
            return claude, b""
        above = _value(lines, _CLAUDE_PARENT)
        return claude + b"/" + agent, claude + b"/" + above if above else claude
    return next(filter(None, (_value(lines, name) for name in _AGENTS)), b""), _value(lines, _PARENT)


def _value(lines: bytes, name: bytes) -> bytes:
    _, found, rest = lines.partition(b"\r\n" + name)
    return rest.partition(b"\r\n")[0] if found else b""


def _hash(tenant: str, name: bytes) -> int:
    if not name:
        return 0
    return xxh3_64_intdigest(b"%d:%b%b" % (len(tenant), tenant.encode(), name[:NAME_BYTES_MAX])) or 1


class SessionReader:
    """Looks in the header, then the cookie, then the body's field; "" of either is not looked for.

    `wanted` says whether anybody asks for sessions now: if not, nothing is read.
    """

    def __init__(self, header: str, cookie: str, field: str, wanted: Callable[[], bool]) -> None:
        self._header = b"%b: " % header.lower().encode() if header else b""
        self._cookie = cookie.encode() + b"=" if cookie else b""
        self._field, self._quoted = field, b'"%b"' % field.encode()
        self.wanted = wanted

    def adopt(self, other: SessionReader) -> None:
        """Look for sessions where another reader does, from now on."""
        self._header, self._cookie, self._field, self._quoted = (
            other._header, other._cookie, other._field, other._quoted,
        )  # fmt: skip

    @property
    def field(self) -> str:
        """The field of a body to look in now; "" if none."""
        return self._field if self.wanted() else ""

    def read(self, tenant: str, body: bytes, headers: bytes, given: bytes | None = None) -> int:
        """The session's hash, 0 without one. `headers` are lines `name: value` with names in lower case; `given` is
        what the body's field says, where that was read before."""
        if not self.wanted():
            return 0
        name = self._in_header(headers) or self._in_cookie(headers)
        if not name:
            name = self._in_body(body) if given is None else given
        if not name:
            return 0
        return _hash(tenant, name)

    def _in_header(self, headers: bytes) -> bytes:
        return next(iter(values(headers, self._header)), b"")

    def _in_cookie(self, headers: bytes) -> bytes:
        return cookie(headers, self._cookie) if self._cookie else b""

    def _in_body(self, body: bytes) -> bytes:
        return in_body(body, self._field) if self._field and self._quoted in body else b""


def in_body(body: bytes, field: str) -> bytes:
    """The value of a body's field, at the length that is used; b"" without it."""
    try:
        value = _fields.decode(body).get(field)
        return _text.decode(value).encode()[:NAME_BYTES_MAX] if value is not None else b""
    except (ValueError, RecursionError):  # not JSON, no object, no text, or text that cannot be spelled
        return b""


def cookie(headers: bytes, name: bytes) -> bytes:
    """The value of the first cookie of this name, given with its `=`; b"" without one. `headers` as for `values`."""
    for line in values(headers, b"cookie: "):
        for pair in line.split(b";"):
            pair = pair.strip()
            if pair.startswith(name):
                return pair[len(name) :].strip(b'"')
    return b""


class Wanted(Protocol):
    """Whether header matches decide. `by_model`: the models whose requests are matched."""

    @property
    def by_model(self) -> Container[str]:
        """See above."""

    def header_matches(self, model: str) -> tuple[HeaderMatch, ...]:
        """The headers and cookies to look for in the head of a request for this model."""

    def may_pin(self, model: str) -> bool:
        """Whether a request for this model may ask for a version."""


class AnyVersion:
    """Does not decide by header matches, and passes on the version that was asked for."""

    by_model: Container[str] = ()

    def header_matches(self, _model: str) -> tuple[HeaderMatch, ...]:
        """See Wanted."""
        return ()

    def may_pin(self, _model: str) -> bool:
        """See Wanted."""
        return True


class HeaderMatchReader:
    """Reads the headers that `wanted` needs."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    def header_matches(self, model: str, headers: bytes) -> tuple[HeaderMatch, ...]:
        """The wanted matches that the request bears. `headers` are lines `name: value` with names in lower case."""
        if model not in self.wanted.by_model:
            return ()
        return tuple(one for one in self.wanted.header_matches(model) if _bears(one, headers))

    def version(self, model: str, asked: bytes | None) -> str:
        """The version asked for by `x-farhop-version`; "" without one, or where none may be asked for."""
        if asked is None or not self.wanted.may_pin(model):
            return ""
        return asked.decode("ascii") if _VERSION.fullmatch(asked) else ""


def _bears(wanted: HeaderMatch, headers: bytes) -> bool:
    name, value = wanted.name.encode(), wanted.value.encode()
    if wanted.kind == "header":
        return value in values(headers, name + b": ")
    return cookie(headers, name + b"=") == value
