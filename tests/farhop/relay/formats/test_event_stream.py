"""Events end where the standard says, however their lines end and however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.formats.event_stream import ANY_END, each, is_crowded, last_end


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


def without_silence(events: list[bytes]) -> list[bytes]:
    return [event for event in events if any(not line.startswith(b":") for line in event.splitlines())]


streams = st.lists(st.sampled_from([b"data: a", b": b", b":", b"\n", b"\r", b"\r\n"]), max_size=12).map(b"".join)


@given(streams)
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_events_are_those_of_the_standard(stream: bytes) -> None:
    found = list(each(stream))
    assert b"".join(found) == stream
    lines = [lines_of(event) for event in found]
    assert without_silence(lines) == without_silence(by_the_standard(stream))
    assert b"".join(lines) == b"".join(by_the_standard(stream)), "a comment in an event stays there"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("line", [b"", b":", b": ping"])
def test_consecutive_comments_and_blank_lines_are_passed_as_one_piece(line: bytes, end: bytes) -> None:
    """An upstream may write millions of such lines into one answer."""
    first, silence, second = b"data: a" + 2 * end, (line + 2 * end) * 1000, b": b" + end + b"data: c" + 2 * end
    assert list(each(first + silence + second)) == [first, silence, second]
    assert list(each(silence + first)) == [silence, first]
    assert list(each(second + silence)) == [second, silence]


@given(streams, streams)
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_the_end_of_the_last_whole_event_is_found(before: bytes, stream: bytes) -> None:
    found = [match.end() for match in ANY_END.finditer(stream)]
    end = last_end(stream)
    assert (end > 0) == bool(found)
    if found:
        assert not stream[found[-1] : end].strip(b"\r\n")
    assert ANY_END.search(stream, end) is None
    start = len(before)
    assert last_end(bytearray(before + stream), start) == (end + start if end else 0) or b"\n\r" in stream[-2:]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (b"\n\n", [2]), (b"\r\n\r\n", [4]), (b"\r\r", [2]), (b"\n\r\n", [3]), (b"\r\n\n", [3]), (b"\r\r\n", [3]),
        (b"\n\r", []), (b"\n\rx", [2]), (b"\r\n\r", []), (b"\r\n\rx", [3]), (b"\r\n", []), (b"\r", []),
    ],
)  # fmt: skip
def test_an_event_ends_only_once_its_blank_line_is_certain(text: bytes, ends: list[int]) -> None:
    assert [found.end() for found in ANY_END.finditer(text)] == ends


@pytest.mark.parametrize("event", [b"a\n\n", b"data:\n\n", b"a\r\r", b'"usage":{\n\n', b'{"error"\r\n\r\n'])
def test_a_chunk_full_of_tiny_events_counts_as_crowded(event: bytes) -> None:
    assert is_crowded(event * (65_536 // len(event)))
    assert not is_crowded(event * 64), "a few of them are no burden"


@pytest.mark.parametrize("event", [b"data: " + b"x" * 54 + b"\n\n", b"event: a\r\ndata: " + b"x" * 40 + b"\r\n\r\n"])
def test_engine_events_comments_and_blank_lines_do_not_count_as_crowded(event: bytes) -> None:
    for part in (event * 2000, b":\n\n" * 20_000 + event, b"\r" * 60_000, event + b": ping\n\n" * 9000 + event):
        assert not is_crowded(part)
