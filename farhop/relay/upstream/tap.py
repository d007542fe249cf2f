"""Reads an answer as it passes: splits it into whole events, finds the usage, and notices an engine's error at its end.

Payload passes as received, except that the residency that a client named by Anthropic's `inference_geo` is repeated in
its usage. Held back are an event not yet complete (so that a broken stream ends between events), and the usage chunk
that only the balancer asked for. What engines send in that chunk beside the usage (llama.cpp its `timings`, vLLM its
fingerprint) would otherwise be in the chunk before, which has the answer's end: so that one waits for the usage chunk,
and gets it. A transcript, if there is one, gets whole events or the body. Never keeps an answer beyond what finding its
usage needs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from farhop.relay.formats.event_stream import ANY_END, END_BYTES_MAX, each, is_crowded, last_end
from farhop.relay.formats.openai import UNREADABLE, usage_of
from farhop.relay.upstream import engine_faults

if TYPE_CHECKING:
    from farhop.balance.machine import Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.formats.transcript import Transcript

EVENT_BYTES_MAX = 256 * 1024  # an event longer than this passes in pieces: it is not usage, and memory is bounded
BODY_BYTES_MAX = 256 * 1024  # of a longer body only the end is kept: where usage is the last member, it is found there
TAIL_BYTES = 4 * 1024
KEPT_BYTES_MAX = 16 * 1024  # of a segment's events, for the error that may be in it
END = b"\n\n"
NUMBER = b'"sequence_number"'  # of an event of the Responses API
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})\b')
_NUMBER_BYTES = len(NUMBER) + 24
ERROR = b'"error"'
_LAST_EVENTS = 4  # an error, `[DONE]`, and what is behind it
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
# An answer says its end once, and in a text these quotes would be escaped.
FINISHES, FINISHES_SPACED = b'"finish_reason":"', b'"finish_reason": "'
_FIRST = b'"message_start"'  # of Anthropic's events: the usage in it is that of the whole answer


class StreamTap:
    """For `text/event-stream`. `hide_usage`: the client did not ask for the usage chunk, so it does not see it. `geo`
    is what the usage has to repeat, "" for nothing.

    `fault`, at the end, is what an error event said about the engine (farhop.relay.upstream.engine_faults). Such an
    event is the last but for `[DONE]`, so of the last two segments those that name one are kept, and looked at then.
    """

    __slots__ = (
        "_before", "_finish", "_geo", "_hide", "_last", "_searched", "_tail", "_transcript", "fault", "is_within",
        "usage",
    )  # fmt: skip

    def __init__(self, hide_usage: bool, transcript: Transcript | None = None, geo: str = "") -> None:
        self._hide, self._transcript, self._geo = hide_usage, transcript, geo
        self._tail: bytearray | None = None  # of an event that is not complete
        self._searched = 0  # of it: no event ends before here
        self._before = self._last = b""
        self._finish = b""  # the event that says the end, until the next is here
        self.usage: Usage | None = None
        self.fault: Outcome | None = None
        self.is_within = False  # what was passed on may end within an event

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return len(self._tail or b"") + len(self._finish) + len(self._before) + len(self._last)

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a stream; returns the bytes to pass on, maybe none."""
        # Nearly always a segment is a whole number of events without usage: a few comparisons, no copy. `rfind` takes
        # half of what `in` does: 140 ns for an event of 250 bytes.
        if (
            self._tail
            or not data.endswith(END)
            or (data.rfind(b'"usage"') >= 0 and has_usage(data))
            or (self._hide and (self._finish or data.rfind(FINISHES) >= 0 or data.rfind(FINISHES_SPACED) >= 0))
        ):
            return self._slow(data)
        self._keep(data)
        return data

    def _keep(self, events: bytes) -> None:
        if self._transcript is not None:
            self._transcript.feed(events)
        # An error is small: of a long segment its end is enough. In a text the word would be escaped.
        self._before, self._last = self._last, events[-KEPT_BYTES_MAX:] if events.rfind(ERROR) >= 0 else b""

    def _slow(self, data: bytes) -> bytes:
        # However small the pieces, each byte is copied and searched once; events are split only if that matters.
        tail, events = self._tail or bytearray(), list[bytes]()
        tail += data
        end = last_end(tail, max(0, self._searched - END_BYTES_MAX + 1))
        if end:
            whole = bytes(tail[:end])
            del tail[:end]
            self.is_within = False
            self._keep(whole)
            matters = self._finish or self._geo or has_usage(whole) or (self._hide and _finishes(whole))
            events = list(each(whole)) if matters and not is_crowded(whole) else [whole]
        self._tail, self._searched = tail or None, len(tail)
        if self._is_endless(tail):
            events.append(self._drain_tail())
            self.is_within = True
            if self._transcript is not None:
                self._transcript.miss()
        passed = self._passed(events)
        return b"".join(passed if not self._geo else map(self._echoed, passed))

    def _is_endless(self, tail: bytearray) -> bool:
        """Whether the event is too long to wait for its end."""
        return len(tail) > EVENT_BYTES_MAX

    def _passed(self, events: list[bytes]) -> list[bytes]:
        """Those events that the client may see now."""
        if self._finish and events:
            events.insert(0, self._finish)
            self._finish = b""
        told = [event for event in events if has_usage(event)]
        # Anthropic's first one has the prompt's; otherwise the last counts.
        for event in (*told[:1], *told[1:][-1:]):
            self._read(event)
        passed: list[bytes] = []
        for event in events:
            if not (told and self._is_ours(event)):
                passed.append(event)
            elif passed and _finishes(passed[-1]):
                passed[-1] = _with_rest_of(passed[-1], event)
        if self._hide and events and events[-1] in passed[-1:] and _finishes(events[-1]):
            self._finish = passed.pop()
        return passed

    def _echoed(self, event: bytes) -> bytes:
        return _with_geo(event, self._geo, _USAGE.search(event)) if _FIRST in event else event

    def _drain_tail(self) -> bytes:
        tail, self._tail, self._searched = bytes(self._tail or b""), None, 0
        return tail

    def _read(self, event: bytes) -> None:
        start = event.find(b"{")
        usage = usage_of(event[start:].rstrip(), self.usage) if start >= 0 else None
        if usage is not None:
            self.usage = usage

    def _is_ours(self, event: bytes) -> bool:
        """Whether the event holds only the usage, and only the balancer had asked for it."""
        return self._hide and has_usage(event) and b'"choices":[]' in event.replace(b" ", b"")

    def finish(self) -> bytes:
        """The upstream ended the stream regularly: return what is left, an event without its end, unchanged."""
        tail = self._drain_tail()
        self.is_within |= bool(tail)
        for segment in (self._before, self._last, tail):
            if ERROR in segment:
                for event in ANY_END.split(segment)[-_LAST_EVENTS:]:
                    self.fault = engine_faults.in_event(event) or self.fault
        self._before = self._last = b""
        passed = self._passed([tail] if tail else [])
        finish, self._finish = self._finish, b""
        return b"".join(passed) + finish


class NumberedTap(StreamTap):
    """A StreamTap for the Responses API, whose events are numbered: it knows which number an event of ours would have.
    That of an event too long to be held back is not read.
    """

    __slots__ = ("_said",)

    def __init__(self, hide_usage: bool, transcript: Transcript | None = None, geo: str = "") -> None:
        super().__init__(hide_usage, transcript, geo)
        self._said = b""  # the last number, as its event has it

    def _keep(self, events: bytes) -> None:
        super()._keep(events)
        if (at := events.rfind(NUMBER)) >= 0:  # in a text its quotes would be escaped
            self._said = events[at : at + _NUMBER_BYTES]

    @property
    def next_number(self) -> int:
        """The number after the last."""
        said = _NUMBER.match(self._said)
        return int(said[1]) + 1 if said else 0


def _finishes(event: bytes) -> bool:
    return FINISHES in event or FINISHES_SPACED in event


def _with_rest_of(event: bytes, hidden: bytes) -> bytes:
    """Add to an event what the hidden usage event after it says besides the usage: the engine would have put that here,
    had this event been the last."""
    if len(event) + len(hidden) > KEPT_BYTES_MAX:
        return event  # it has more than any engine sends there
    try:
        known, shown = (_members(one[one.index(b"{") :].rstrip()) for one in (event, hidden))
    except (*UNREADABLE, ValueError):
        return event
    more = [(name, value) for name, value in shown.items() if name not in known and name != "usage"]
    at = event.rindex(b"}")
    added = b"".join(b",%b:%b" % (msgspec.json.encode(name), value) for name, value in more)
    return event[:at] + added + event[at:]


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def has_usage(data: bytes) -> bool:
    """Some engines write `"usage":null` into every chunk: that is none."""
    return b'"usage"' in data and _USAGE.search(data) is not None


def _with_geo(document: bytes, geo: str, usage: re.Match[bytes] | None) -> bytes:
    """The document with this residency added to its usage."""
    if usage is None:
        return document
    empty = document[usage.end() :].lstrip()[:1] == b"}"
    echo = b'"inference_geo":"%b"%b' % (geo.encode(), b"" if empty else b",")  # its letters need no escapes
    return document[: usage.end()] + echo + document[usage.end() :]


class BodyTap(msgspec.Struct, eq=False):
    """For an answer of one JSON document: keeps a bounded copy, to read its usage at the end. `fault`: failures have
    another tap.
    """

    _transcript: Transcript | None = None
    _geo: str = ""
    _size: int = 0
    usage: Usage | None = None
    _copy: bytearray = msgspec.field(default_factory=bytearray)

    fault = None

    def feed(self, data: bytes) -> bytes:
        """Keep a copy of the data, and return it unchanged."""
        self._size += len(data)
        copy = self._copy
        copy += data
        if self._size > BODY_BYTES_MAX and len(copy) > 2 * TAIL_BYTES:  # cut now and then, not at every piece
            del copy[:-TAIL_BYTES]
        return data

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return len(self._copy)

    def finish(self) -> bytes:
        """Read the usage from the copy. Nothing was held back, so nothing is returned."""
        if self._copy:
            document = bytes(self._copy)
            self._copy = bytearray()
            if self._size > BODY_BYTES_MAX:
                # Valid JSON again only if `usage` was a member of the outermost object: no text can imitate it.
                document = b"{" + document[document.rfind(b'"usage"') :]
            elif self._transcript is not None:
                self._transcript.read(document)
            self.usage = usage_of(document)
        return b""


class EchoTap(BodyTap):
    """A BodyTap that adds the residency to the usage: it holds the answer back until it is complete. An answer above
    BODY_BYTES_MAX passes unchanged.
    """

    def feed(self, data: bytes) -> bytes:
        """Hold the data back; return all of it once the answer is too long."""
        before, held = self._size, bytes(self._copy)
        super().feed(data)
        if self._size <= BODY_BYTES_MAX:
            return b""
        return data if before > BODY_BYTES_MAX else held + data

    def finish(self) -> bytes:
        """The answer with the residency, if it was held back."""
        document = bytes(self._copy) if self._size <= BODY_BYTES_MAX else b""
        super().finish()
        # The last one: the contents of a text are escaped, and arguments of tools come before.
        return _with_geo(document, self._geo, next(reversed(list(_USAGE.finditer(document))), None))
