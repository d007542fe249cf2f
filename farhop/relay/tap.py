"""Listening to an answer as it passes: whole events, the engine's usage, nothing else.

Payload passes as received. Two things are held: an event not yet complete (so that a broken stream ends between
events), and the usage chunk that only we asked for. Never keeps an answer beyond what finding its usage needs.
"""

from __future__ import annotations

from farhop.balance.machine import Usage
from farhop.relay.openai import usage_of

EVENT_BYTES_MAX = 1 << 20  # an event longer than this passes in pieces: it is not usage, and memory is bounded
BODY_BYTES_MAX = 1 << 20  # a longer body passes too, without its usage being read
_END, _CRLF_END = b"\n\n", b"\r\n\r\n"


class StreamTap:
    """For `text/event-stream`. `hide_usage`: the client did not ask for the usage chunk, so it does not see it."""

    __slots__ = ("_hide", "_tail", "usage")

    def __init__(self, hide_usage: bool) -> None:
        self._hide = hide_usage
        self._tail = b""
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """Bytes in, bytes to pass on (maybe none)."""
        # Nearly always a segment is a whole number of events without usage: one find, one comparison, no copy.
        if not self._tail and data.endswith(_END) and b'"usage"' not in data:
            return data
        return self._slow(data)

    def _slow(self, data: bytes) -> bytes:
        data = self._tail + data if self._tail else data
        end = _last_end(data)
        whole, self._tail = data[:end], data[end:]
        if len(self._tail) > EVENT_BYTES_MAX:
            whole, self._tail = data, b""
        if b'"usage"' not in whole:
            return whole
        return b"".join(event for event in _events(whole) if not self._is_ours(event))

    def _is_ours(self, event: bytes) -> bool:
        if b'"usage"' not in event:
            return False
        start = event.find(b"{")
        usage = usage_of(event[start:].rstrip()) if start >= 0 else None
        if usage is None:
            return False
        self.usage = usage
        return self._hide and b'"choices":[]' in event.replace(b" ", b"")

    def rest(self) -> bytes:
        """What is left when the upstream ended as it should: passed on as it is."""
        tail, self._tail = self._tail, b""
        return tail


def _last_end(data: bytes) -> int:
    """Where the last whole event ends, 0 if none does."""
    lf, crlf = data.rfind(_END), data.rfind(_CRLF_END)
    return max(lf + len(_END) if lf >= 0 else 0, crlf + len(_CRLF_END) if crlf >= 0 else 0)


def _events(data: bytes) -> list[bytes]:
    """Split whole events, each with its own ending; comments and blank lines stay where they are."""
    separator = _CRLF_END if _CRLF_END in data else _END
    parts = data.split(separator)
    events = [part + separator for part in parts[:-1]]
    return [*events, parts[-1]] if parts[-1] else events


class BodyTap:
    """For one JSON answer: keeps a bounded copy until its usage can be read."""

    __slots__ = ("_parts", "_size", "usage")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """Bytes in, the same bytes out."""
        self._size += len(data)
        if self._size <= BODY_BYTES_MAX:
            self._parts.append(data)
        else:
            self._parts.clear()
        return data

    def rest(self) -> bytes:
        """Read the usage; nothing is held back."""
        if self._parts:
            self.usage = usage_of(b"".join(self._parts))
            self._parts.clear()
        return b""
