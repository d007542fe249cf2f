"""Server-sent events as bytes: where one ends, by the standard's rules of lines (WHATWG HTML 9.2.6).

A line ends with LF, CR LF or CR; a blank line ends an event. Never waits for a byte that could not change that: CR CR
is an end though LF may follow, which then belongs to that end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

END_BYTES_MAX = 4
# Behind LF a CR at the end of what is there yet is undecided: it may be the half of CR LF.
ANY_END = re.compile(rb"\r?\n\r?\n|\r\r\n?|\n\r(?=[^\n])")


def each(events: bytes) -> Iterator[bytes]:
    """The events of a part of a stream, each with its end; what has none comes last."""
    if events.find(b"\n\n") == len(events) - 2 and b"\r" not in events:  # nearly always it is one
        yield events
        return
    start = 0
    for end in ANY_END.finditer(events):
        yield events[start : end.end()]
        start = end.end()
    if start < len(events):
        yield events[start:]
