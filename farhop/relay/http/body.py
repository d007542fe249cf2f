"""Where a body ends: by its length, by its chunks, or with its connection (RFC 9112 §6, §7). For both directions.

Invariants: however the bytes are cut, the payload and the rest are the same; what is kept between two segments is a
part of one line. Trailers are read and dropped. Never repairs: what is not exactly a chunk is an error.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec
import numpy as np

from farhop.relay.http.fields import TOKEN, VALUE

_LINE_BYTES_MAX = 256  # a chunk's size and its extensions, which nobody uses
_TRAILER_BYTES_MAX = 8192
# One byte per chunk costs 5 bytes of framing; more than this per byte, beyond a slack, is not a body but an attack. An
# engine may send a token in each chunk. Of a client's chunks each costs 0.5 us: those of a megabyte may be 9,800.
_FRAMING_BYTES_PER_BODY_BYTE_MAX = 8.0
_SLACK_BYTES = 32 * 1024
_REQUEST_FRAMING_BYTES_PER_BODY_BYTE_MAX = 1 / 32
_REQUEST_SLACK_BYTES = 16 * 1024
# Tiny chunks of one size, one behind the other, are read together, at a tenth of the cost: they count for as much less.
_RUNS = {size: re.compile(b"(?:%x\r\n[\\s\\S]{%d}\r\n)++" % (size, size)) for size in range(1, 16)}
_RUN_MIN = 8
_RUN_COUNTS = 16
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TOO_MUCH = "too many chunk extensions or trailers for the body, or too many chunks"
_NEVER_TRAILERS = (b"transfer-encoding", b"content-length", b"host")  # RFC 9110 §6.5.1
_sizes: dict[bytes, int] = {}  # lines read before: a stream's chunks have few different sizes
_SIZES_MAX = 4096
_SIZE_LINE_BYTES = 14  # the longest line that is remembered, and its end


class FramingError(Exception):
    """The bytes do not delimit a body; the text says why."""


class LengthBody(msgspec.Struct, gc=False):
    """`Content-Length`. `left` are the bytes still to come."""

    left: int

    def feed(self, data: bytes, parts: list[bytes]) -> bytes | None:
        """Add the payload in `data` to `parts`. The bytes behind the body once it is whole, None while it is not."""
        left = self.left
        size = len(data)
        if size < left:
            self.left = left - size
            parts.append(data)
            return None
        self.left = 0
        if size == left:
            parts.append(data)
            return b""
        parts.append(data[:left])
        return data[left:]


class ChunkedBody:
    """`Transfer-Encoding: chunked`. Of a request fewer chunks are taken than of an answer."""

    __slots__ = ("_body_bytes", "_ending", "_framing_bytes", "_held", "_last", "_left", "_most", "_slack_bytes")

    def __init__(self, *, of_request: bool = False) -> None:
        self._most = _REQUEST_FRAMING_BYTES_PER_BODY_BYTE_MAX if of_request else _FRAMING_BYTES_PER_BODY_BYTE_MAX
        self._slack_bytes = _REQUEST_SLACK_BYTES if of_request else _SLACK_BYTES
        self._left = 0  # bytes of the chunk under way still to come
        self._ending = False  # its payload is whole, its line end is not
        self._last = False  # the last chunk is here: trailers follow
        self._held = b""
        self._framing_bytes = self._body_bytes = 0

    def feed(self, data: bytes, parts: list[bytes]) -> bytes | None:
        """As LengthBody.feed. Raises FramingError."""
        if self._held:
            data, self._held = self._held + data, b""
        at, end = 0, len(data)
        while True:
            if self._left:
                stop = at + self._left
                if stop > end:
                    if at < end:
                        parts.append(data[at:])
                        self._left = stop - end
                    return None
                parts.append(data[at:stop])
                at, self._left, self._ending = stop, 0, True
            if self._ending:
                if data[at : at + 2] != b"\r\n":
                    self._hold(data, at, b"\r\n", "a chunk does not end where it says")
                    return None
                at, self._ending = at + 2, False
            if at == end:
                return None
            stop = data.find(b"\r\n", at)
            if stop < 0:
                self._hold(data, at, None, _TOO_MUCH)
                return None
            line = data[at:stop]
            at = stop + 2
            if self._last:
                if not line:
                    return data[at:]
                self._trailer(line)
            else:
                size = _sizes.get(line)
                self._left = size = _size(line) if size is None else size
                if (
                    0 < size < 16
                    and len(line) == 1
                    and stop + 64 < end
                    and (run := self._run(data, stop - len(line), size, parts))
                ):
                    at, self._left = run, 0
                    continue
                self._framing_bytes += len(line) + 4  # as in _count: each chunk comes by here
                self._body_bytes += size
                if self._framing_bytes > self._slack_bytes + self._most * self._body_bytes:
                    raise FramingError(_TOO_MUCH)
                self._last = not size

    def single(self, data: bytes) -> bytes | None:
        """The payload of `data` where that is exactly one chunk, as a stream's segments mostly are; None, and nothing
        is read, where it is anything else. Raises FramingError."""
        at = data.find(b"\r\n", 0, _SIZE_LINE_BYTES)
        size = _sizes.get(data[:at])
        if not size or len(data) != at + 4 + size or not data.endswith(b"\r\n"):
            return None
        if self._left or self._ending or self._last or self._held:
            return None
        self._framing_bytes += at + 4  # as in _count: each chunk comes by here
        self._body_bytes += size
        if self._framing_bytes > self._slack_bytes + self._most * self._body_bytes:
            raise FramingError(_TOO_MUCH)
        return data[at + 2 : -2]

    @property
    def broken_off(self) -> bool:
        """Whether the last chunk came and the end behind it has not: the sender lives, and cannot complete the body
        (`Exchange.break_off`)."""
        return self._last

    def _run(self, data: bytes, start: int, size: int, parts: list[bytes]) -> int:
        """Read the chunks of one tiny size that begin at `start`. Where they end; 0 if they are few."""
        run = _RUNS[size].match(data, start)
        count = 0 if run is None else (run.end() - start) // (size + 5)
        if run is None or count < _RUN_MIN:
            return 0
        chunks = np.frombuffer(data, np.uint8, count * (size + 5), start).reshape(count, size + 5)
        parts.append(chunks[:, 3 : 3 + size].tobytes())
        self._count(5 * count // _RUN_COUNTS, count * size)
        return run.end()

    def _hold(self, data: bytes, at: int, wanted: bytes | None, why: str) -> None:
        """Keep the part of a line that is here; an error if it cannot become the line that must come."""
        held = data[at:]
        if wanted is not None:
            if not wanted.startswith(held):
                raise FramingError(why)
        elif len(held) > (_TRAILER_BYTES_MAX if self._last else _LINE_BYTES_MAX):
            raise FramingError(why)
        elif b"\n" in held:
            raise FramingError("a line of a chunked body ends without CR")
        self._held = held

    def _trailer(self, line: bytes) -> None:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.translate(None, TOKEN) or value.translate(None, VALUE):
            raise FramingError("a trailer must be `name: value`")
        if name.lower() == b"x-farhop-allow":
            raise FramingError("`x-farhop-allow` must be a header: a trailer comes when it is decided where to send it")
        if name.lower() in _NEVER_TRAILERS:
            raise FramingError("how a message is framed cannot be said in its trailers")
        self._count(len(line) + 2, 0)

    def _count(self, framing_bytes: int, body_bytes: int) -> None:
        self._framing_bytes += framing_bytes
        self._body_bytes += body_bytes
        if self._framing_bytes > self._slack_bytes + self._most * self._body_bytes:
            raise FramingError(_TOO_MUCH)


class EndlessBody:
    """A body that ends with its connection. Only an answer may have one."""

    __slots__ = ()

    def feed(self, data: bytes, parts: list[bytes]) -> bytes | None:
        """As LengthBody.feed; never whole."""
        parts.append(data)
        return None


Body: TypeAlias = LengthBody | ChunkedBody | EndlessBody


def _size(line: bytes) -> int:
    if len(line) > _LINE_BYTES_MAX:
        raise FramingError(_TOO_MUCH)
    match = _SIZE.fullmatch(line)
    if match is None:
        raise FramingError("a chunk's size is not a hexadecimal number")
    size = int(match[1], 16)
    if len(line) <= 12:
        if len(_sizes) >= _SIZES_MAX:
            _sizes.clear()
        _sizes[line] = size
    return size
