"""A head is judged before anything trusts it."""

from __future__ import annotations

import pytest

from farhop.balance import outcome
from farhop.relay import head
from farhop.relay.head import HeadError, Headers

HOST = (b"host", b"a")


def read(headers: Headers, target: bytes = b"/x?y=1", version: str = "1.1") -> head.Head:
    return head.read(b"POST", target, version, headers, True)


def test_a_head_is_split_into_ours_and_theirs() -> None:
    made = read(
        [HOST, (b"accept", b"*/*"), (b"authorization", b"Bearer k"), (b"x-farhop-allow", b"EU"), (b"x-a", b"1")]
    )
    assert (made.method, made.target, made.path) == (b"POST", b"/x?y=1", b"/x")
    assert made.onward == b"accept: */*\r\nx-a: 1\r\n"
    assert made.get(b"authorization") == b"Bearer k"
    assert made.get(b"x-farhop-allow") == b"EU"
    assert made.get(b"accept") is None
    assert made.content_length == 0


@pytest.mark.parametrize(
    ("headers", "version", "length"),
    [
        ([(b"content-length", b"12")], "1.1", 12),
        ([(b"content-length", b"12 ")], "1.1", 12),
        ([(b"transfer-encoding", b"Chunked ")], "1.1", None),
        ([], "1.0", 0),
    ],
)
def test_the_length_of_a_body(headers: Headers, version: str, length: int | None) -> None:
    assert read([HOST, *headers], version=version).content_length == length


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([], "`Host` is missing"),
        ([(b"host", b"")], "`Host` is missing"),
        ([HOST, HOST], "`host` may stand once"),
        ([HOST, (b"content-length", b"1"), (b"content-length", b"1")], "once"),
        ([HOST, (b"content-length", b"1"), (b"transfer-encoding", b"chunked")], "exclude one another"),
        ([HOST, (b"content-length", b"")], "plain decimal"),
        ([HOST, (b"content-length", b"1_0")], "plain decimal"),
        ([HOST, (b"content-length", "\u0663".encode())], "plain decimal"),
        ([HOST, (b"content-length", b"1" * 16)], "plain decimal"),
        ([HOST, (b"transfer-encoding", b"gzip, chunked")], "only transfer coding"),
        ([HOST, (b"transfer-encoding", b"identity")], "only transfer coding"),
        ([HOST, (b"traceparent", b"a"), (b"traceparent", b"b")], "once"),
        ([HOST, (b"x-farhop-hop", b"a"), (b"x-farhop-hop", b"b")], "once"),
    ],
)
def test_what_cannot_be_trusted(headers: Headers, said: str) -> None:
    with pytest.raises(HeadError, match=said) as caught:
        read(headers)
    assert caught.value.outcome is outcome.MALFORMED_HTTP


@pytest.mark.parametrize("target", [b"http://a/x", b"*", b"a:443", b""])
def test_only_paths_are_targets(target: bytes) -> None:
    with pytest.raises(HeadError, match="must be a path"):
        read([HOST], target=target)


@pytest.mark.parametrize("version", ["0.9", "2.0", "1.2"])
def test_only_two_versions_are_spoken(version: str) -> None:
    with pytest.raises(HeadError, match=r"send HTTP/1\.1"):
        read([HOST], version=version)


def test_lists_may_be_split() -> None:
    made = read(
        [HOST, (b"connection", b"X-A"), (b"connection", b"close, x-b"), (b"x-a", b"1"), (b"x-b", b"2"), (b"x-c", b"3")]
    )
    assert made.onward == b"x-c: 3\r\n"
    assert made.get(b"connection") == b"X-A,close, x-b"
    assert read(
        [HOST, (b"x-forwarded-for", b"a"), (b"x-forwarded-for", b"b"), (b"tracestate", b"a"), (b"tracestate", b"b")]
    )


def test_an_answer_is_split_into_ours_and_theirs() -> None:
    onward, known = head.answer_onward(
        [
            (b"content-type", b"text/event-stream"),
            (b"content-length", b"5"),
            (b"connection", b"X-Private"),
            (b"x-private", b"1"),
            (b"x-farhop-outcome", b"queue_full"),
            (b"server-timing", b"a"),
            (b"retry-after", b"3"),
            (b"set-cookie", b"a"),
            (b"set-cookie", b"b"),
        ]
    )
    assert onward == b"content-type: text/event-stream\r\nretry-after: 3\r\nset-cookie: a\r\nset-cookie: b\r\n"
    assert known[b"x-farhop-outcome"] == b"queue_full"
    assert known[b"content-type"] == b"text/event-stream"
    assert known[b"server-timing"] == b"a"
