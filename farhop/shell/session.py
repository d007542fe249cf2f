"""A request's session, for policies that keep one together: from a header, a cookie or a field of its body.

What the client calls it is a hash from here on, of the tenant and the name: it never enters a log, a span or a record.
Never refuses a request: what cannot be read is no session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Callable

NAME_BYTES_MAX = 1024  # of a session's name; a longer one counts by its beginning

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


class SessionReader:
    """Looks in the header, then the cookie, then the body's field; "" of either is not looked for.

    `wanted` says whether anybody asks for sessions now: if not, nothing is read.
    """

    def __init__(self, header: str, cookie: str, field: str, wanted: Callable[[], bool]) -> None:
        self._header = b"%b: " % header.lower().encode() if header else b""
        self._cookie = cookie.encode() + b"=" if cookie else b""
        self._field, self._quoted = field, b'"%b"' % field.encode()
        self._wanted = wanted

    @property
    def field(self) -> str:
        """The field of a body to look in now; "" if none."""
        return self._field if self._wanted() else ""

    def read(self, tenant: str, body: bytes, headers: bytes, said: bytes | None = None) -> int:
        """The session's hash, 0 without one. `headers` are lines `name: value` with names in lower case; `said` is what
        the body's field says, where that was read before."""
        if not self._wanted():
            return 0
        name = self._in_header(headers) or self._in_cookie(headers)
        if not name:
            name = self._in_body(body) if said is None else said
        if not name:
            return 0
        return xxh3_64_intdigest(b"%d:%b%b" % (len(tenant), tenant.encode(), name[:NAME_BYTES_MAX])) or 1

    def _in_header(self, headers: bytes) -> bytes:
        return next(iter(values(headers, self._header)), b"")

    def _in_cookie(self, headers: bytes) -> bytes:
        return cookie(headers, self._cookie) if self._cookie else b""

    def _in_body(self, body: bytes) -> bytes:
        return in_body(body, self._field) if self._field and self._quoted in body else b""


def in_body(body: bytes, field: str) -> bytes:
    """What a body's field says, as far as it counts; b"" without it."""
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


def values(headers: bytes, name: bytes) -> list[bytes]:
    """The values of the lines that begin with `name` and its colon. `headers` are lines with names in lower case."""
    if not name or name not in headers:
        return []
    return [line[len(name) :] for line in headers.split(b"\r\n") if line.startswith(name)]
