"""Listening to an answer as it passes: whole events, the engine's usage, and whether it ends in an engine's error.

Payload passes as received. Two things are held: an event not yet complete (so that a broken stream ends between
events), and the usage chunk that only we asked for. A transcript, where there is one, gets whole events or the body.
Never keeps an answer beyond what finding its usage needs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from farhop.relay import faults
from farhop.relay.openai import usage_of

if TYPE_CHECKING:
    from farhop.balance.machine import Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.transcript import Transcript

EVENT_BYTES_MAX = 256 * 1024  # an event longer than this passes in pieces: it is not usage, and memory is bounded
BODY_BYTES_MAX = 256 * 1024  # of a longer body only the end is kept: where usage is the last member, it is found there
TAIL_BYTES = 4 * 1024
_END = b"\n\n"
_ANY_END = re.compile(rb"\r?\n\r?\n")  # LF, CRLF, or a mixture: a blank line ends an event
_ERROR = b'"error"'
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class StreamTap:
    """For `text/event-stream`. `hide_usage`: the client did not ask for the usage chunk, so it does not see it.

    `fault`, at the end, is what an error event said of the engine (farhop.relay.faults). Such an event is the last but
    for `[DONE]`, so the last two segments' events are kept and looked at then: searching each would cost every chunk.
    """

    __slots__ = ("_before", "_hide", "_last", "_tail", "_transcript", "fault", "usage")

    def __init__(self, hide_usage: bool, transcript: Transcript | None = None) -> None:
        self._hide, self._transcript = hide_usage, transcript
        self._tail = self._before = self._last = b""
        self.usage: Usage | None = None
        self.fault: Outcome | None = None

    def feed(self, data: bytes) -> bytes:
        """Bytes in, bytes to pass on (maybe none)."""
        # Nearly always a segment is a whole number of events without usage: two comparisons, no copy.
        if not self._tail and data.endswith(_END) and not _has_usage(data):
            self._before, self._last = self._last, data
            if self._transcript is not None:
                self._transcript.hear(data)
            return data
        return self._slow(data)

    def _slow(self, data: bytes) -> bytes:
        data = self._tail + data if self._tail else data
        events, self._tail = _split(data)
        if events:
            self._before, self._last = self._last, b"".join(events)
            if self._transcript is not None:
                self._transcript.hear(self._last)
        if len(self._tail) > EVENT_BYTES_MAX:
            events, self._tail = [*events, self._tail], b""
            if self._transcript is not None:
                self._transcript.miss()
        return b"".join(event for event in events if not self._is_ours(event))

    def _is_ours(self, event: bytes) -> bool:
        if not _has_usage(event):
            return False
        start = event.find(b"{")
        usage = usage_of(event[start:].rstrip()) if start >= 0 else None
        if usage is None:
            return False
        self.usage = usage
        return self._hide and b'"choices":[]' in event.replace(b" ", b"")

    def rest(self) -> bytes:
        """What is left when the upstream ended as it should: an event without its end, passed on as it is."""
        tail, self._tail = self._tail, b""
        for segment in (self._before, self._last, tail):
            if _ERROR in segment:  # in a text it would be escaped
                for event in _ANY_END.split(segment):
                    self.fault = faults.in_event(event) or self.fault
        self._before = self._last = b""
        return b"" if self._is_ours(tail) else tail


def _has_usage(data: bytes) -> bool:
    """Some engines write `"usage":null` into every chunk: that is none."""
    return b'"usage"' in data and _USAGE.search(data) is not None


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Whole events, each with its own ending, and what is left of the last."""
    events: list[bytes] = []
    start = 0
    for end in _ANY_END.finditer(data):
        events.append(data[start : end.end()])
        start = end.end()
    return events, data[start:]


class BodyTap:
    """For one JSON answer: keeps a bounded copy until its usage can be read. `fault`: a failure has another tap."""

    __slots__ = ("_parts", "_size", "_transcript", "usage")

    fault = None

    def __init__(self, transcript: Transcript | None = None) -> None:
        self._parts: list[bytes] = []
        self._transcript = transcript
        self._size = 0
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """Bytes in, the same bytes out."""
        self._size += len(data)
        if self._size <= BODY_BYTES_MAX:
            self._parts.append(data)
        else:
            self._parts = [b"".join((*self._parts, data))[-TAIL_BYTES:]]
        return data

    def rest(self) -> bytes:
        """Read the usage; nothing is held back."""
        if self._parts:
            document = b"".join(self._parts)
            if self._size > BODY_BYTES_MAX:
                # Valid JSON again only if `usage` was a member of the outermost object: nobody's text can imitate it.
                document = b"{" + document[document.rfind(b'"usage"') :]
            elif self._transcript is not None:
                self._transcript.read(document)
            self.usage = usage_of(document)
            self._parts.clear()
        return b""
