"""ext_proc's messages: heads in the form of HTTP/1.1, and the changes of a head that a gateway is to make.

HTTP/1.1's form, so that they are checked by the same code as all others; changes, so that the gateway's head becomes
the one that the relay would send. Pure: no IO, no clock. Never trusts a name or a value that a head of HTTP/1.1 could
not contain.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from farhop_wire import ext_proc_pb2 as wire

from farhop.balance import outcome
from farhop.relay.http.head import HeadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.struct_pb2 import Struct

DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_SUBSET_NAMESPACE, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_DETAILS = "response.code_details"
VIA_UPSTREAM = "via_upstream"  # Envoy's name for an answer from an upstream
_GATEWAYS_HEADERS = 32
PIECE_BYTES_MAX = 62_000  # of a body, in one message: Envoy's limit of a streamed piece is 64 KiB
SUBSET_MAX = 4096  # endpoints in a hint

# For the gateway itself, in either direction: framing, and where it connects.
_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection", b"te", b"trailer", b"date"))
_GATEWAYS_OWN = (b":", b"x-envoy-")


def fields(headers: wire.HeaderMap, most: int) -> list[tuple[bytes, bytes]]:
    """Names in lower case, as in HTTP/2, and values; at most `most` besides HTTP/2's pseudo-headers and what a gateway
    adds. HeadError before any is processed: 300 KB may have 170,000.
    """
    if len(headers.headers) > most + _GATEWAYS_HEADERS:
        raise HeadError(outcome.HEAD_TOO_LARGE, f"the head has too many headers: at most {most}")
    return [(one.key.encode(), one.raw_value or one.value.encode()) for one in headers.headers]


def request_head(given: Iterable[tuple[bytes, bytes]], bytes_max: int) -> bytes:
    """A request's head in HTTP/1.1's form, without the empty line and chunked framing. Raises HeadError."""
    pseudo: dict[bytes, bytes] = {}
    lines: list[bytes] = [b"", b""]
    for name, value in given:
        if name.startswith(b":"):
            pseudo[name] = value
        elif name not in (b"transfer-encoding", b"host"):
            lines.append(name + b": " + value)
        elif name == b"host":
            pseudo.setdefault(b":authority", value)
    lines[0] = b"%b %b HTTP/1.1" % (pseudo.get(b":method", b""), pseudo.get(b":path", b""))
    lines[1] = b"host: " + pseudo.get(b":authority", b"")
    raw = _joined(lines)
    if len(raw) > bytes_max:
        raise HeadError(outcome.HEAD_TOO_LARGE, f"the request's head is too large: at most {bytes_max} bytes")
    if not pseudo.get(b":path", b"").startswith(b"/"):  # it goes to the engine unchanged
        raise HeadError(outcome.MALFORMED_HTTP, "the request target must be a path beginning with `/`")
    return raw


def answer_head(given: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The same for an answer."""
    lines = [b""]
    for name, value in given:
        if name == b":status":
            lines[0] = b"HTTP/1.1 " + value + b" "
        elif not name.startswith(b":") and name != b"transfer-encoding":
            lines.append(name + b": " + value)
    return _joined(lines)


def _joined(lines: list[bytes]) -> bytes:
    raw = b"\r\n".join(lines)
    if raw.count(b"\n") != len(lines) - 1:
        raise HeadError(outcome.MALFORMED_HTTP, "a header holds a control character")
    return raw


def mutation(
    given: list[tuple[bytes, bytes]], wanted: bytes, more: dict[bytes, bytes], *, drop_length: bool = False
) -> bytes:
    """The changes of a head that is `given`, so that, besides framing, it has these `wanted` lines (each with its end)
    and `more`: a HeaderMutation. `drop_length`: its body's length will be another, and is not known. A name's several
    values are compared as one text: none contains a line's end.
    """
    want = more.copy()
    for line in wanted.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name and name not in _FRAMING:
            want[name] = want[name] + b"\n" + value if name in want else value
    have: dict[bytes, bytes] = {}
    for name, value in given:
        have[name] = have[name] + b"\n" + value if name in have else value
    changed: list[bytes] = []
    for name, value in want.items():
        if have.get(name) != value:
            _set(changed, name, value)
    for name in have:
        if name in want or name.startswith(_GATEWAYS_OWN):
            continue
        if name not in _FRAMING or (drop_length and name == b"content-length"):
            changed.append(_nested(b"\x12", name))
    return b"".join(changed)


def _set(changed: list[bytes], name: bytes, values: bytes) -> None:
    action = _OVERWRITE
    for value in values.split(b"\n") if b"\n" in values else (values,):
        if len(name) + len(value) < 100:  # each length is a byte
            header = b"\x0a%c%b\x1a%c%b" % (len(name), name, len(value), value)
            changed.append(b"\x0a%c\x0a%c%b%b" % (len(header) + len(action) + 2, len(header), header, action))
        else:
            header = _nested(b"\x0a", name) + _nested(b"\x1a", value)
            changed.append(_nested(b"\x0a", _nested(b"\x0a", header) + action))
        action = b""  # APPEND_IF_EXISTS_OR_ADD, the enumeration's 0


# What every request needs is written directly as protobuf's bytes: building objects took as many calls as the choice.
# Each constant is a field's tag, `number << 3 | wire type`; 2 is the type of fields with a length.


def _nested(tag: bytes, data: bytes) -> bytes:
    """A field that has a length: a message, a text, bytes."""
    size = len(data)
    return tag + (_BYTE[size] if size < 128 else _varint(size)) + data


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


_BYTE = tuple(bytes((number,)) for number in range(128))
_OVERWRITE = b"\x18\x02"  # HeaderValueOption.append_action: OVERWRITE_IF_EXISTS_OR_ADD


def chosen(endpoints: str, changed: bytes) -> bytes:
    """The endpoints, in metadata, and the changes of the head (a HeaderMutation): of a ProcessingResponse
    request_headers.response.header_mutation, and dynamic_metadata.fields[..].struct_value.
    """
    named = _nested(b"\x12", _nested(b"\x1a", endpoints.encode()))  # fields' value: a Value with string_value
    struct = _nested(b"\x0a", _DESTINATION_KEY + named)
    metadata = _nested(b"\x0a", _NAMESPACE_KEY + _nested(b"\x12", _nested(b"\x2a", struct)))
    return _nested(b"\x0a", _nested(b"\x0a", _nested(b"\x12", changed))) + _nested(b"\x42", metadata)


_DESTINATION_KEY = _nested(b"\x0a", DESTINATION.encode())
_NAMESPACE_KEY = _nested(b"\x0a", NAMESPACE.encode())


def answered(changed: bytes) -> bytes:
    """The changes of the answer's head (a HeaderMutation): response_headers.response.header_mutation."""
    return _nested(b"\x12", _nested(b"\x0a", _nested(b"\x12", changed)))


def piece(body: bytes | memoryview, *, of_request: bool, last: bool) -> bytes:
    """A piece of a body, at most PIECE_BYTES_MAX: request_body or response_body, in it
    response.body_mutation.streamed_response."""
    return b"".join((_before(len(body), of_request, last), body, b"\x10\x01" if last else b""))


@lru_cache(1024)
def _before(size: int, of_request: bool, last: bool) -> bytes:
    """The bytes before a piece of this size."""
    written = b"\x0a" + _varint(size) if size else b""
    inner = len(written) + size + (2 if last else 0)
    for tag in (b"\x1a", b"\x1a", b"\x0a", b"\x1a" if of_request else b"\x22"):
        written = tag + _varint(inner) + written
        inner = len(written) + size + (2 if last else 0)
    return written


TRAILERS_OF_REQUEST, TRAILERS_OF_ANSWER = b"\x2a\x00", b"\x32\x00"  # unchanged


def pieces(body: bytes) -> Iterator[bytes | memoryview]:
    """The body in pieces; none for an empty body."""
    if len(body) <= PIECE_BYTES_MAX:
        if body:
            yield body
        return
    whole = memoryview(body)
    for at in range(0, len(body), PIECE_BYTES_MAX):
        yield whole[at : at + PIECE_BYTES_MAX]


def immediate(status: int, lines: bytes, body: bytes, details: str) -> bytes:
    """An answer from here. `lines` are its header lines, each with its end."""
    headers: list[bytes] = []
    for line in lines.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name:
            _set(headers, name, value)
    response = wire.ImmediateResponse(status=wire.HttpStatus(code=status), body=body, details=details)
    response.headers.MergeFromString(b"".join(headers))
    return wire.ProcessingResponse(immediate_response=response).SerializeToString()


def served(message: wire.ProcessingRequest) -> str:
    """The endpoint that answered, as the gateway reports it; "" if it does not."""
    endpoints = _metadata_list(message, NAMESPACE, _SERVED)
    return endpoints[0] if endpoints else ""


def subset(message: wire.ProcessingRequest) -> list[str] | None:
    """The endpoints (`ip:port`, or an address for all of its ports) to which the gateway restricts a request; None if
    it does not. A list, or a string with commas.
    """
    return _metadata_list(message, _SUBSET_NAMESPACE, _SUBSET)


def code_details(message: wire.ProcessingRequest) -> str:
    """Envoy's details on the source of the answer, if its configuration sends that attribute; otherwise ""."""
    for struct in message.attributes.values():
        if _DETAILS in struct.fields:
            return struct.fields[_DETAILS].string_value
    return ""


def _metadata_list(message: wire.ProcessingRequest, namespace: str, key: str) -> list[str] | None:
    known = message.metadata_context.filter_metadata
    if namespace not in known:
        return None
    struct: Struct = known[namespace]
    if key not in struct.fields:
        return None
    value = struct.fields[key]
    if value.WhichOneof("kind") == "list_value":
        words = [one.string_value for one in value.list_value.values[:SUBSET_MAX]]
    else:
        words = value.string_value.split(",")[:SUBSET_MAX]
    return [word.strip() for word in words if word.strip()]
