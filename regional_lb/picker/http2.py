"""HTTP/2 frames (RFC 9113) and the header blocks that a gRPC server sends (RFC 7541): bytes and numbers, no connection.

Pure. The header blocks that we write use no entry of HPACK's dynamic table, so they are constants; hpack decodes those
that we receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIZES_MAX = 2
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD_BYTES = 9
FRAME_BYTES_MAX = 16_384  # the least that a peer must accept, and what is accepted here
WINDOW_BYTES = 65_535  # of a connection and of each stream, initially
WINDOW_BYTES_MAX = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20

MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 5, 6

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0x0, 0x1, 0x3, 0x6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x7, 0x9, 0xB


class Http2Error(Exception):
    """The other end violates the protocol: the connection is over. `code` is the one sent to it."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A complete frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    """The head of a frame with a payload of this size."""
    return b"%b%c%c%b" % (size.to_bytes(3), kind, flags, stream.to_bytes(4))


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(key.to_bytes(2) + value.to_bytes(4) for key, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The checked contents of a SETTINGS frame. Raises Http2Error."""
    if len(payload) % 6:
        raise Http2Error(FRAME_SIZE_ERROR, "SETTINGS is cut off")
    for at in range(0, len(payload), 6):
        key, value = int.from_bytes(payload[at : at + 2]), int.from_bytes(payload[at + 2 : at + 6])
        if key == INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
            raise Http2Error(FLOW_CONTROL_ERROR, "a flow-control window is too large")
        if key == MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value < 2**24:
            raise Http2Error(PROTOCOL_ERROR, "a frame's size is out of range")
        yield key, value


def check_head(block: bytes) -> None:
    """Refuse a head block that begins with more than two table size updates: they take long to read, and no encoder
    needs more (RFC 7541, 4.2). Raises Http2Error.
    """
    at = sizes = 0
    while block[at : at + 1] and block[at] & 0xE0 == 0x20:
        sizes += 1
        if sizes > _SIZES_MAX:
            raise Http2Error(COMPRESSION_ERROR, "a head changes its table's size too often")
        more = block[at] & 0x1F == 0x1F  # the number continues
        at += 1
        while more and at < len(block):
            more = block[at] >= 0x80
            at += 1


def window_update(stream: int, size: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4))


def reset(stream: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4))


def goaway(last: int, code: int, problem: str = "") -> bytes:
    """A GOAWAY frame: the connection ends; streams after `last` were not processed."""
    return frame(GOAWAY, 0, 0, last.to_bytes(4) + code.to_bytes(4) + problem.encode()[:256])


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of DATA or HEADERS without padding. Raises Http2Error."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def _literal(name: bytes, value: bytes) -> bytes:
    """A field that is never indexed (RFC 7541, 6.2.2), its name and value shorter than 127 bytes or the value
    longer.
    """
    return b"\x00%c%b%b%b" % (len(name), name, _length(len(value)), value)


def _length(size: int) -> bytes:
    """An integer of seven bits and more (RFC 7541, 5.1)."""
    if size < 127:
        return bytes((size,))
    encoded, size = bytearray((127,)), size - 127
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


BEGUN = b"\x88\x0f\x10\x10application/grpc"  # :status 200 and content-type, by their places in the static table
UNSUPPORTED_MEDIA_TYPE = b"\x08\x03415"  # :status
_OK = _literal(b"grpc-status", b"0")
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # what gRPC does not escape: printable ASCII except the percent sign


def status(code: int, text: str) -> bytes:
    """The trailers of a gRPC call: its status code and message."""
    if not code:
        return _OK
    message = quote(text[:512], safe=_PLAIN).encode()
    return _literal(b"grpc-status", b"%d" % code) + _literal(b"grpc-message", message)
