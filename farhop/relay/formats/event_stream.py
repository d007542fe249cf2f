"""Server-sent events as bytes: where one ends, by the standard's rules of lines (WHATWG HTML 9.2.6).

A line ends with LF, CR LF or CR; a blank line ends an event. Never waits for a byte that could not change that: CR CR
is an end though LF may follow, which then belongs to that end. Comments and blank lines are not separated, however many
there are: such a line takes three bytes, and in Python as long as an event.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

END_BYTES_MAX = 4
# Behind LF a CR at the end of what is there yet is undecided: it may be the half of CR LF. Each way begins with a
# letter of its own, so that it is searched for at 6 ns a byte, and not at 19.
_END = rb"(?:\n(?:\n|\r\n|\r(?=[^\n]))|\r(?:\n\n|\n\r\n|\r\n?))"
ANY_END = re.compile(_END)
_LAST_END = re.compile(rb"(?s:.*)" + _END)
# Blank lines, and comments as far as a blank line ends them: a CR at the end is decided here, since nothing is held.
_LINE_END = rb"(?:\r\n?|\n)"
_SILENCE = re.compile(rb"(?:(?::[^\r\n]*+%b)*+%b)++" % (_LINE_END, _LINE_END))


SAYS = re.compile(rb"(?:\A|[\r\n])data:")  # where an event begins to: before it are comments, and fields that name it


def each(events: bytes) -> Iterator[bytes]:
    """The events of a part of a stream, each with its end; what has none comes last. Comments and blank lines between
    two events are in one piece."""
    if events.find(b"\n\n") == len(events) - 2 and b"\r" not in events:  # nearly always it is one
        yield events
        return
    start, size = 0, len(events)
    while start < size:
        silent = _SILENCE.match(events, start) if events[start] in b":\r\n" else None
        found = silent or ANY_END.search(events, start)
        end = size if found is None else found.end()
        yield events[start:end]
        start = end


# An event of any API has some 60 bytes and more.
_EVENT_BYTES, _EVENTS_SPARED = 48, 128


def is_crowded(events: bytes) -> bool:
    """Whether events are so many and so short that no engine sends such. Looking at each of 64 KiB of `a` and a blank
    line takes 100 ms: such a part of a stream is not parsed."""
    most = _EVENTS_SPARED + len(events) // _EVENT_BYTES
    if events.count(b"\n") + events.count(b"\r") <= 2 * most:  # an event has two ends of lines
        return False
    return next(islice(each(events), most, None), None) is not None


def last_end(data: bytes | bytearray, start: int = 0) -> int:
    """Where the last event in it ends, 0 where none does; none ends before `start`."""
    if b"\r" not in data:
        at = data.rfind(b"\n\n", start)
        return at + 2 if at >= 0 else 0
    found = _LAST_END.match(data, start)
    return 0 if found is None else found.end()
