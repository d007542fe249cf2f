"""Only CONNECT, only to where it may."""

from __future__ import annotations

import pytest

from farhop_lab.wan.connect import HEAD_BYTES_MAX, RefusedError, head_size, reply, target_of


def head(authority: str, method: str = "CONNECT", version: str = "HTTP/1.1") -> bytes:
    return f"{method} {authority} {version}\r\nHost: {authority}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("authority", "reached"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("127.8.9.10:65535", "127.8.9.10:65535"),
        ("[::1]:443", "[::1]:443"),
        ("localhost:1", "127.0.0.1:1"),
        ("lab.example:9", "lab.example:9"),
    ],
)
def test_loopback_and_configured_targets_are_reachable(authority: str, reached: str) -> None:
    assert str(target_of(head(authority), {"lab.example"})) == reached


@pytest.mark.parametrize(
    "authority",
    [
        "10.0.0.1:80",
        "0.0.0.0:80",
        "[::]:80",
        "[::ffff:10.0.0.1]:80",
        "example.com:443",
        "localhost.example.com:1",
        "127.1:80",
    ],
)
def test_proxy_refuses_other_targets(authority: str) -> None:
    with pytest.raises(RefusedError, match="only loopback") as refused:
        target_of(head(authority), {"lab.example"})
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "authority",
    ["", ":80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:8a", "127.0.0.1:+80", "::1:80",
     "[127.0.0.1:80", "[127.0.0.1]:80", "user@127.0.0.1:80", "127.0.0.1/:80", "[]:80", "127.0.0.1:٣"],
)  # fmt: skip
def test_a_bad_authority_is_400(authority: str) -> None:
    with pytest.raises(RefusedError) as refused:
        target_of(head(authority), ())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (head("/", "GET"), 405),
        (head("127.0.0.1:80", "connect"), 405),
        (head("127.0.0.1:80", version="HTTP/2"), 505),
        (b"CONNECT  127.0.0.1:80 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\xff\r\n\r\n", 400),
    ],
)
def test_anything_else_is_refused(value: bytes, status: int) -> None:
    with pytest.raises(RefusedError) as refused:
        target_of(value, ())
    assert refused.value.status == status


def test_a_head_is_bounded() -> None:
    assert head_size(b"CONNECT") is None
    assert head_size(b"CONNECT\r\n\r\nmore") == 11
    for long in (b"x" * (HEAD_BYTES_MAX + 1), b"x" * (HEAD_BYTES_MAX + 1) + b"\r\n\r\n"):
        with pytest.raises(RefusedError) as refused:
            head_size(long)
        assert refused.value.status == 431


def test_a_refusal_is_whole_and_names_what_is_allowed() -> None:
    found = reply(405, "use CONNECT")
    head_, _, body = found.partition(b"\r\n\r\n")
    assert b"Allow: CONNECT" in head_
    assert f"Content-Length: {len(body)}".encode() in head_
    assert b"Allow" not in reply(502, "no route")
