"""Header lines, read strictly (RFC 9110 §5, RFC 9112 §5) and sorted: what goes on, what we read, what neither.

Nothing is repaired: folded lines, blanks before the colon, bare CR or LF, control characters are errors, since two
parsers that repair differently are how requests are smuggled. Lines that clients repeat are remembered as read; never
one that may hold a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

# Name in lower case, value, the line as it goes on (b"" if it does not), whether we read it ourselves.
Field: TypeAlias = tuple[bytes, bytes, bytes, bool]

TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # RFC 9110 §5.6.2
VALUE = bytes((0x09, *range(0x20, 0x7F), *range(0x80, 0x100)))
_REMEMBERED_MAX = 1024  # lines; what does not fit is read again
_REMEMBERED_BYTES_MAX = 200
# Names whose lines repeat from request to request and are not secret.
_REPEATED = frozenset(
    (
        b"accept", b"accept-encoding", b"accept-language", b"cache-control", b"connection", b"content-length",
        b"content-type", b"date", b"host", b"keep-alive", b"server", b"transfer-encoding", b"user-agent", b"via",
        b"x-farhop-region", b"x-farhop-replica",
    )
)  # fmt: skip
_REPEATED_PREFIX = b"x-stainless-"  # what OpenAI's SDKs say of themselves


class FieldError(Exception):
    """A header line that is not one; the text says why."""


class Fields:
    """Reads lines. `goes_on(name)` and `ours(name)` sort them; both get the name in lower case."""

    def __init__(self, goes_on: Callable[[bytes], bool], ours: Callable[[bytes], bool]) -> None:
        self._goes_on, self._ours = goes_on, ours
        self._by_name: dict[bytes, tuple[bool, bool]] = {}
        self.remembered: dict[bytes, Field] = {}
        self.get = self.remembered.get  # what is remembered of a line: asked for first, since it costs no call of ours

    def read(self, line: bytes) -> Field:
        """One line, without its end. Raises FieldError."""
        name, colon, value = line.partition(b":")
        if not colon or not name or name.translate(None, TOKEN):
            raise FieldError(_why_not(line, name, colon))
        if value.translate(None, VALUE):
            raise FieldError(f"header `{name.decode('ascii')}` holds a control character")
        name, value = name.lower(), value.strip(b" \t")
        goes_on, ours = self._by_name.get(name) or self._sort(name)
        onward = b"%b: %b\r\n" % (name, value) if goes_on else b""
        field = (name, value, onward, ours)
        if len(line) <= _REMEMBERED_BYTES_MAX and (name in _REPEATED or name.startswith(_REPEATED_PREFIX)):
            if len(self.remembered) >= _REMEMBERED_MAX:
                self.remembered.clear()
            self.remembered[line] = field
        return field

    def _sort(self, name: bytes) -> tuple[bool, bool]:
        """Whether a header of this name goes on, and whether it is ours."""
        found = self._goes_on(name), self._ours(name)
        if len(name) <= _REMEMBERED_BYTES_MAX:
            if len(self._by_name) >= _REMEMBERED_MAX:
                self._by_name.clear()
            self._by_name[name] = found
        return found


def _why_not(line: bytes, name: bytes, colon: bytes) -> str:
    if line[:1] in (b" ", b"\t"):
        return "a header is folded over two lines; send it in one"
    if not colon or not name:
        return "a header line must be `name: value`"
    if name[-1:] in (b" ", b"\t"):
        return "no blank may stand between a header's name and its colon"
    return "a header's name holds a character that names may not have"
