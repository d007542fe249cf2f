"""Reading `multipart/form-data` (RFC 7578) strictly: what two servers might read differently is refused.

python-multipart finds the parts, as it does in the servers behind (vLLM's is built on it); what it lets through
(text before the first boundary or after the last, odd part headers, repeated fields) is refused here. Content is not
copied but for the small fields asked for. Never decodes a file.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from farhop.balance import outcome
from farhop.relay.formats.prompt import BodyError, header, invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

PARTS_MAX = 64
HEADERS_MAX = 8
HEADER_BYTES_MAX = 1024
FIELD_BYTES_MAX = 1024  # of a field whose text is asked for

# It would log a line for every malformed body: a client must not be able to fill a log.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL + 1)

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_BOUNDARY = rb"[0-9A-Za-z'()+_,./:=?-]{1,70}"  # RFC 2046 §5.1.1, without the blank
_CONTENT_TYPE = re.compile(rb'multipart/form-data *; *boundary=(?:"(%b)"|(%b))' % (_BOUNDARY, _BOUNDARY), re.I)
# An escaped backslash may not end it: vLLM's parser, Python's `email`, takes its second half to escape the end.
_QUOTED = rb'"(?:[^"\\\x00-\x1f\x7f]|\\["\\])*(?<!\\\\)"'
_PARAMETER = rb"; *(?:name|filename|filename\*)=(?:%b|%b)" % (_QUOTED, _TOKEN)
_DISPOSITION = re.compile(rb"form-data *((?:%b)+)" % _PARAMETER, re.I)
_UTF_8 = re.compile(rb'[^;"]*(?:; *charset=(?:"utf-?8"|utf-?8|us-ascii) *)(?:;[^"]*)?')
_PARAMETERS = re.compile(rb"; *(name|filename|filename\*)=(%b|%b)" % (_QUOTED, _TOKEN), re.I)


def names_other_charset(content_type: bytes) -> bool:
    """Whether somebody may read something else than UTF-8 by this value of `Content-Type`."""
    value = content_type.lower()
    return b"charset" in value and (value.count(b"charset") > 1 or _UTF_8.fullmatch(value) is None)


class Field(msgspec.Struct, frozen=True):
    """One part of a form: the position of its content in the body, and whether it has a file name."""

    start: int
    end: int
    is_file: bool


class Form:
    """The fields of one body. A name that is read may occur only once."""

    def __init__(self, body: bytes, fields: dict[str, list[Field]]) -> None:
        self._body, self._fields = body, fields

    @property
    def names(self) -> list[str]:
        """The names of the fields."""
        return list(self._fields)

    def text(self, name: str) -> str | None:
        """A small field's text, None if it is not there. Raises BodyError."""
        field = self._only(name)
        if field is None:
            return None
        if field.is_file or field.end - field.start > FIELD_BYTES_MAX:
            raise invalid(name, f"`{name}` must be a plain field of at most {FIELD_BYTES_MAX} bytes")
        try:
            return self._body[field.start : field.end].decode()
        except UnicodeDecodeError:
            raise invalid(name, f"`{name}` must be UTF-8") from None

    def file_bytes(self, name: str) -> int | None:
        """How many bytes a file has, None if it is not there. Raises BodyError."""
        field = self._only(name)
        if field is None:
            return None
        if not field.is_file:
            raise invalid(name, f"`{name}` must be a file: give its part a `filename`")
        return field.end - field.start

    def _only(self, name: str) -> Field | None:
        found = self._fields.get(name, [])
        if len(found) > 1:
            raise invalid(name, f"`{name}` may stand once only")
        return found[0] if found else None


def read(body: bytes, headers: bytes) -> Form:
    """The form in a body. `headers` are the request's header lines. Raises BodyError."""
    boundary = _boundary(headers)
    if not body.startswith(b"--" + boundary + b"\r\n"):
        raise _malformed("it does not begin with the boundary that `Content-Type` names")
    # Some servers see a boundary after a bare LF or before blanks, and some do not: there is none but the plain ones.
    count = body.count(b"--" + boundary + b"\r\n")
    if body.count(b"--" + boundary) != count + 1:
        raise _malformed("the boundary must stand before each part and, with `--`, at the end, and nowhere else")
    if count > PARTS_MAX:
        raise _malformed(f"it has more than {PARTS_MAX} parts")
    parts = _Parts()
    parser = MultipartParser(
        boundary, parts.callbacks(), max_header_count=HEADERS_MAX, max_header_size=HEADER_BYTES_MAX
    )
    try:
        parser.write(body)
    except FormParserError as error:
        raise _malformed(str(error)) from None
    end = b"\r\n--" + boundary + b"--"
    if not parts.ended or parts.count != count or not body.endswith((end, end + b"\r\n")):
        raise _malformed("it does not end with its boundary and `--`")
    return Form(body, parts.fields)


def _boundary(headers: bytes) -> bytes:
    value = header(headers, b"content-type")
    match = _CONTENT_TYPE.fullmatch(value or b"")
    if match is None:
        raise invalid("content-type", "`Content-Type` must be `multipart/form-data; boundary=...`")
    return match[1] or match[2]


def _malformed(why: str) -> BodyError:
    return BodyError(outcome.INVALID_FIELD, f"the body is not valid multipart/form-data: {why}")


class _Parts:
    """Hears of the parts as the parser finds them. Every byte of a body lies in one buffer, so places are enough."""

    def __init__(self) -> None:
        self.fields: dict[str, list[Field]] = {}
        self.ended = False
        self.count = 0
        self._name = ""
        self._is_file = self._other_charset = False
        self._start = self._end = 0
        self._header = self._disposition = b""

    def callbacks(self) -> MultipartCallbacks:
        """The callbacks of the parser."""
        return {
            "on_part_begin": self._part_began,
            "on_header_field": self._header_named,
            "on_header_value": self._header_valued,
            "on_headers_finished": self._headers_over,
            "on_part_data": self._data,
            "on_part_end": self._part_over,
            "on_end": self._over,
        }

    def _part_began(self) -> None:
        self.count += 1
        self._disposition, self._other_charset = b"", False
        self._start = self._end = -1

    def _header_named(self, data: bytes, start: int, end: int) -> None:
        self._header = bytes(data[start:end]).lower()

    def _header_valued(self, data: bytes, start: int, end: int) -> None:
        if self._header == b"content-disposition":
            if self._disposition:
                raise _malformed("a part has two `Content-Disposition` headers")
            self._disposition = bytes(data[start:end])
        elif self._header == b"content-type":
            self._other_charset |= names_other_charset(bytes(data[start:end]))
        elif self._header == b"content-transfer-encoding":
            raise _malformed("a part has a `Content-Transfer-Encoding`, which RFC 7578 deprecates; leave it out")

    def _headers_over(self) -> None:
        match = _DISPOSITION.fullmatch(self._disposition)
        found = _PARAMETERS.findall(match[1]) if match is not None else []
        fields = {name.lower(): value for name, value in found}
        name = fields.get(b"name", b"").strip(b'"')
        if not name or b"\\" in name or len(fields) < len(found):
            raise _malformed('a part needs one `Content-Disposition: form-data; name="..."`')
        self._name, self._is_file = name.decode("utf-8", "replace"), len(fields) > 1
        # aiohttp's servers decode a field by its part's charset, or by that which this field names for all (RFC 7578).
        if self._name == "_charset_" or (self._other_charset and not self._is_file):
            raise _malformed("its fields must be in UTF-8, without another charset named")

    def _data(self, _data: bytes, start: int, end: int) -> None:
        if self._start < 0:
            self._start = start
        self._end = end

    def _part_over(self) -> None:
        self.fields.setdefault(self._name, []).append(Field(self._start, self._end, self._is_file))

    def _over(self) -> None:
        self.ended = True
