"""Events end where the standard says, however their lines end and however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.formats.event_stream import ANY_END, each


def by_the_standard(stream: bytes) -> list[bytes]:
    """What stands between blank lines, by reading line by line."""
    lines, at, events = [], 0, [b""]
    while at < len(stream):
        end = next((n for n in range(at, len(stream)) if stream[n] in b"\r\n"), len(stream))
        size = 2 if stream[end : end + 2] == b"\r\n" else 1
        lines.append((stream[at:end], stream[end : end + size]))
        at = end + size
    for text, ending in lines:
        if not text and ending:
            events.append(b"")
        else:
            events[-1] += text + b"\n"
    return [event for event in events if event]


def lines_of(event: bytes) -> bytes:
    return b"".join(line + b"\n" for line in event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n") if line)


@given(st.lists(st.sampled_from([b"data: a", b": b", b"\n", b"\r", b"\r\n"]), max_size=12).map(b"".join))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_events_are_those_of_the_standard(stream: bytes) -> None:
    found = list(each(stream))
    assert b"".join(found) == stream
    assert [lines for event in found if (lines := lines_of(event))] == by_the_standard(stream)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (b"\n\n", [2]), (b"\r\n\r\n", [4]), (b"\r\r", [2]), (b"\n\r\n", [3]), (b"\r\n\n", [3]), (b"\r\r\n", [3]),
        (b"\n\r", []), (b"\n\rx", [2]), (b"\r\n\r", []), (b"\r\n\rx", [3]), (b"\r\n", []), (b"\r", []),
    ],
)  # fmt: skip
def test_a_blank_line_ends_one_once_it_is_sure_to_be_blank(text: bytes, ends: list[int]) -> None:
    assert [found.end() for found in ANY_END.finditer(text)] == ends
