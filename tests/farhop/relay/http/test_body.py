"""Where a body ends, however its bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.http.body import Body, ChunkedBody, EndlessBody, FramingError, LengthBody


def fed(body: Body, *segments: bytes) -> tuple[bytes, bytes | None]:
    """Payload, and what is behind the body (None if it goes on)."""
    parts: list[bytes] = []
    rest: bytes | None = None
    for n, segment in enumerate(segments):
        rest = body.feed(segment, parts)
        if rest is not None:
            return b"".join(parts), rest + b"".join(segments[n + 1 :])
    return b"".join(parts), rest


def chunked(payload: list[bytes], trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in payload if p) + b"0\r\n" + trailers + b"\r\n"


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({min(n, len(data)) for n in at} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


PAYLOADS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
CUTS = st.lists(st.integers(0, 500), max_size=12)


@given(PAYLOADS, CUTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_body_is_broken_off_behind_its_last_chunk_alone(payload, cuts) -> None:
    whole = chunked(payload, b"")
    for end in range(len(whole)):
        body = ChunkedBody()
        assert fed(body, *cut(whole[:end], cuts))[1] is None
        assert body.broken_off == (end >= len(whole) - 2)
    body = ChunkedBody()
    assert fed(body, *cut(whole[:-5] + b"0;broken-off\r\n", cuts)) == (b"".join(payload), None)
    assert body.broken_off


@given(PAYLOADS, st.sampled_from([b"", b"X-Sum: 1\r\n", b"a: b\r\nc:\r\n"]), st.binary(max_size=20), CUTS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_chunks_read_the_same_however_they_are_cut(payload, trailers, behind, cuts) -> None:
    data = chunked(payload, trailers) + behind
    assert fed(ChunkedBody(), *cut(data, cuts)) == (b"".join(payload), behind)


@given(st.binary(min_size=1, max_size=60), st.binary(max_size=20), CUTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_length_reads_the_same_however_it_is_cut(payload, behind, cuts) -> None:
    assert fed(LengthBody(len(payload)), *cut(payload + behind, cuts)) == (payload, behind)


def test_a_body_without_a_length_reads_until_the_connection_ends() -> None:
    assert fed(EndlessBody(), b"a", b"b") == (b"ab", None)


@pytest.mark.parametrize("line", [b"5;a=b", b"5;a", b'5;a="b c"', b"005"])
def test_extensions_are_dropped(line: bytes) -> None:
    assert fed(ChunkedBody(), line + b"\r\nhello\r\n0\r\n\r\n") == (b"hello", b"")


BROKEN = [
    b"5\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n",
    b"5\r\nhello!\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"0x5\r\nhello\r\n",
    b"+5\r\nhello\r\n",
    b"-1\r\n",
    b"5_0\r\n",
    b" 5\r\nhello\r\n",
    b"5 \r\nhello\r\n",
    b"5 ;a\r\nhello\r\n",
    b"\r\nhello",
    b"g\r\n",
    b"1" * 13 + b"\r\n",
    b"5;a\x00b\r\nhello\r\n",
    b"5;a\rb\r\nhello\r\n",
    b"5;" + b"x" * 300,
    b"0\r\n folded\r\n\r\n",
    b"0\r\nno colon\r\n\r\n",
    b"0\r\nContent-Length: 1\r\n\r\n",
    b"0\r\na: b\n\r\n",
    b"0\r\na: \x0bb\r\n\r\n",
    b"0\r\n" + b"a: b\r\n" * 20_000,
    b"1;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\na\r\n" * 5000,
]


@pytest.mark.parametrize("data", BROKEN, ids=lambda data: repr(data[:20]))
def test_a_malformed_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(FramingError):
        fed(ChunkedBody(), data)
    with pytest.raises(FramingError):
        fed(ChunkedBody(), *(data[n : n + 1] for n in range(len(data))))


def test_a_body_of_one_byte_chunks_is_read() -> None:
    assert fed(ChunkedBody(), chunked([b"x"] * 50_000)) == (b"x" * 50_000, b"")


@given(st.binary(max_size=80), CUTS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_garbage_is_an_error_or_the_same_body(data: bytes, cuts: list[int]) -> None:
    def outcome(*segments: bytes) -> object:
        try:
            return fed(ChunkedBody(), *segments)
        except FramingError:
            return "error"

    whole, pieces = outcome(data), outcome(*cut(data, cuts))
    # A line that cannot become valid may be refused before it is complete; nothing else may differ.
    assert whole == pieces or "error" in (whole, pieces)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), CUTS, st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_chunk_that_comes_alone_reads_the_same_the_short_way(payload, cuts, whole) -> None:
    segments = [b"%x\r\n%b\r\n" % (len(p), p) for p in payload] if whole else cut(chunked(payload)[:-5], cuts)
    short, parts = ChunkedBody(), list[bytes]()
    for segment in segments:
        piece = short.single(segment)
        if piece is not None:
            parts.append(piece)
        else:
            assert short.feed(segment, parts) is None
    assert b"".join(parts) == b"".join(payload)
    assert short.feed(b"0\r\n\r\nrest", parts) == b"rest"


def test_the_short_way_takes_no_more_framing_than_the_long_one() -> None:
    body = ChunkedBody()
    line = b"1" + b";" * 10
    fed(ChunkedBody(), line + b"\r\nx\r\n")  # its size is remembered
    with pytest.raises(FramingError, match="too many chunk extensions"):
        for _ in range(10_000):
            assert body.single(line + b"\r\nx\r\n") == b"x"
