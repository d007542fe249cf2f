from __future__ import annotations

import itertools
import json

import pytest

from farhop_lab.bench import bodies


@pytest.mark.parametrize("size", [1024, 32 * 1024, 200 * 1024])
def test_bodies_have_their_size_differ_and_begin_alike(size: int) -> None:
    made = bodies.plain(size, 16)
    assert {len(body) for body in made} == {size}
    assert len(set(made)) == 16
    shared = min(_alike(a, b) for a, b in itertools.pairwise(made))
    assert shared >= 0.1 * size
    assert _alike(made[0], made[8]) > 0.6 * size  # of one topic
    assert bodies.plain(size, 16) == made


def _alike(a: bytes, b: bytes) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


def test_a_stream_s_instructions_are_in_its_text() -> None:
    (body,) = bodies.streamed(1024, 200, 12.5, 1)
    read = json.loads(body)
    assert read["messages"][-1]["content"].endswith("chunks=200 interval_ms=12.5")
    assert read["stream"] is True
    assert read["stream_options"] == {"include_usage": True}


def test_each_plain_body_has_one_place_for_a_number() -> None:
    assert all(body.count(bodies.NUMBER.encode()) == 1 for body in bodies.plain(1024))


def test_a_request_on_the_wire() -> None:
    head, _, body = bodies.request(b'{"a":1}', "10.0.0.1").partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    assert {b"host: 10.0.0.1", b"content-length: 7", b"authorization: Bearer sk-farhop-bench"} <= set(lines)
