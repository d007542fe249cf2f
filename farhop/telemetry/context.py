"""W3C Trace Context (Level 1, and Level 2's random flag) on the wire: read strictly, written canonically.

Pure text work. Invariant: what is not a valid traceparent is no parent at all, and takes its tracestate with it.
"""

from __future__ import annotations

import re

import msgspec

SAMPLED = 0x01
KNOWN_FLAGS = 0x03  # sampled, random (Level 2 §3.2.2.5.2); all others go out as zero
TRACEPARENT_BYTES_MAX = 256
TRACESTATE_BYTES_MAX = 512  # the length one must be able to carry (§3.3.1.5); a longer one is dropped whole, never cut

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")
# The common case of an unsampled caller, recognised in one match: such a header is sent on as it came.
_PLAIN_UNSAMPLED = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[02]")
# A member of a tracestate (§3.3.1.3): a system's name, `tenant@system` or `system`, and what that one says.
_MEMBER = re.compile(
    rb"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MEMBERS_MAX = 32
_VERSION_00_BYTES = 55
_NO_TRACE = b"0" * 32
_NO_SPAN = b"0" * 16


class Parent(msgspec.Struct, frozen=True):
    """A caller's span. Ids are lower-case hex, 32 and 16 characters; `text` is what to send on if nothing changes."""

    trace_id: bytes
    span_id: bytes
    flags: int
    text: bytes


def plainly_unsampled(traceparent: bytes) -> bool:
    """Whether this is a valid version 00 parent without the sampled flag; False says nothing, `read` does."""
    return _PLAIN_UNSAMPLED.fullmatch(traceparent) is not None


def asks(traceparent: bytes) -> bool:
    """Whether a valid parent says that it is sampled."""
    parent = read(traceparent)
    return parent is not None and bool(parent.flags & SAMPLED)


def unasked(traceparent: bytes) -> bytes:
    """The same parent with the sampled flag cleared. `traceparent` must be valid."""
    parent = read(traceparent)
    assert parent is not None
    return write(parent.trace_id, parent.span_id, parent.flags & ~SAMPLED)


def read(traceparent: bytes | None) -> Parent | None:
    """The parent named by a `traceparent` header, or None: missing, malformed, all zeros or of version ff (§3.2.2)."""
    if not traceparent or len(traceparent) > TRACEPARENT_BYTES_MAX:
        return None
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags_hex, _ = match.groups()
    if trace_id == _NO_TRACE or span_id == _NO_SPAN or version == b"ff":
        return None
    flags = int(flags_hex, 16)
    if version == b"00":
        if len(traceparent) != _VERSION_00_BYTES:  # only later versions may append fields
            return None
        if flags <= KNOWN_FLAGS:
            return Parent(trace_id, span_id, flags, traceparent)
    return Parent(trace_id, span_id, flags, write(trace_id, span_id, flags))


def write(trace_id: bytes, span_id: bytes, flags: int) -> bytes:
    """A version 00 `traceparent` of two hex ids; flags we do not know are cleared."""
    return b"00-%b-%b-%02x" % (trace_id, span_id, flags & KNOWN_FLAGS)


def trace_id(traceparent: bytes) -> str:
    """The 32 hex digits of the trace in a valid `traceparent`."""
    return traceparent[3:35].decode("ascii")


def state(tracestate: bytes | None) -> bytes | None:
    """A `tracestate` fit to be sent on as received, or None: missing, too long, or no list of members (§3.3.1).

    Any client may write it, and a reader that cannot parse it (the SDK that records spans here, an engine's) logs its
    text.
    """
    if not tracestate or len(tracestate) > TRACESTATE_BYTES_MAX:
        return None
    members = [member for each in tracestate.split(b",") if (member := each.strip(b" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members[: _MEMBERS_MAX + 1]]
    systems = {member[1] for member in found if member is not None}
    return tracestate if 0 < len(systems) == len(members) <= _MEMBERS_MAX else None
