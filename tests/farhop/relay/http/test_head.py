"""A head is judged before anything trusts it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome
from farhop.relay.http import head
from farhop.relay.http.body import ChunkedBody, EndlessBody, LengthBody
from farhop.relay.http.head import HeadError

HOST = "host: a"


def read(*lines: str, first: str = "POST /x?y=1 HTTP/1.1") -> head.Head:
    return head.read("\r\n".join((first, *lines)).encode("latin-1"), 100)


def answer(*lines: str, first: str = "HTTP/1.1 200 OK") -> head.AnswerHead:
    return head.answer("\r\n".join((first, *lines)).encode("latin-1"), 100)


def test_request_headers_are_split_into_read_here_and_forwarded() -> None:
    made = read("Host: a:80", "Accept: */*", "authorization: Bearer k", "x-farhop-allow:EU", "X-A: \t1 ")
    assert (made.method, made.target, made.path, made.http_11) == (b"POST", b"/x?y=1", b"/x", True)
    assert made.onward == b"accept: */*\r\nx-a: 1\r\n"
    assert made.get(b"authorization") == b"Bearer k"
    assert made.get(b"x-farhop-allow") == b"EU"
    assert made.get(b"accept") is None
    assert made.content_length == 0
    assert made.keep_alive


@pytest.mark.parametrize(
    ("line", "version", "length"),
    [
        ("content-length: 12", "1.1", 12),
        ("content-length:12 ", "1.1", 12),
        ("transfer-encoding: Chunked ", "1.1", None),
        ("x-a: b", "1.0", 0),
    ],
)
def test_the_length_of_a_body(line: str, version: str, length: int | None) -> None:
    assert read(HOST, line, first=f"POST / HTTP/{version}").content_length == length


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "`Host` is missing"),
        (["host:"], "`Host` is missing"),
        (["host: a b"], "`Host` must be"),
        (["host: a/b"], "`Host` must be"),
        (["host: user@a"], "`Host` must be"),
        (["host: a:b"], "`Host` must be"),
        ([HOST, HOST], "`host` may stand once"),
        ([HOST, "Content-Length: 1", "content-length: 1"], "once"),
        ([HOST, "content-length: 1", "transfer-encoding: chunked"], "exclude one another"),
        ([HOST, "content-length: "], "plain decimal"),
        ([HOST, "content-length: +1"], "plain decimal"),
        ([HOST, "content-length: 1_0"], "plain decimal"),
        ([HOST, "content-length: 1, 1"], "plain decimal"),
        ([HOST, "content-length: \xd9\xa3"], "plain decimal"),
        ([HOST, "content-length: " + "1" * 16], "plain decimal"),
        ([HOST, "transfer-encoding: gzip, chunked"], "only transfer coding"),
        ([HOST, "transfer-encoding: chunked", "transfer-encoding: chunked"], "once"),
        ([HOST, "transfer-encoding: identity"], "only transfer coding"),
        ([HOST, "transfer-encoding: chunked;x=1"], "only transfer coding"),
        ([HOST, "traceparent: a", "traceparent: b"], "once"),
        ([HOST, "x-farhop-hop: a", "x-farhop-hop: b"], "once"),
        ([HOST, "x-a: 1", " folded"], "folded"),
        ([HOST, "\tfolded: 1"], "folded"),
        ([HOST, "x-a : 1"], "no blank"),
        ([HOST, "x-a"], "name: value"),
        ([HOST, ": a"], "name: value"),
        ([HOST, "x(a): 1"], "character that names may not have"),
        ([HOST, "x\xe4: 1"], "character that names may not have"),
        ([HOST, "x-a: 1\x00"], "control character"),
        ([HOST, "x-a: 1\n2"], "control character"),
        ([HOST, "x-a: 1\r2"], "control character"),
        ([HOST, "x-a: 1\x7f"], "control character"),
    ],
)
def test_a_head_that_cannot_be_trusted_is_refused_with_the_reason(lines: list[str], message: str) -> None:
    with pytest.raises(HeadError, match=message) as caught:
        read(*lines)
    assert caught.value.outcome is outcome.MALFORMED_HTTP


@pytest.mark.parametrize("host", ["a", "a:80", "a.example:443", "127.0.0.1:1", "[::1]:8080", "[::1]"])
def test_valid_host_headers_are_kept_as_they_are(host: str) -> None:
    assert read(f"Host: {host}").get(b"host") == host.encode()


@pytest.mark.parametrize(
    ("target", "path", "onward", "host"),
    [
        ("http://b/x", "/x", "/x", "b"),
        ("HTTPS://B.example:443/x?y=http://c/", "/x", "/x?y=http://c/", "B.example:443"),
        ("http://[::1]:80/x/../y", "/x/../y", "/x/../y", "[::1]:80"),
        ("http://b//c/x", "//c/x", "//c/x", "b"),
        ("http://b", "/", "/", "b"),
        ("http://b?y", "/", "/?y", "b"),
    ],
)
def test_a_target_may_name_its_host_which_goes_before_the_header(
    target: str, path: str, onward: str, host: str
) -> None:
    for _ in range(2):  # the line is remembered
        seen = read(HOST, first=f"POST {target} HTTP/1.1")
        assert (seen.path, seen.target, seen.get(b"host")) == (path.encode(), onward.encode(), host.encode())
        assert b"host" not in seen.onward
    assert read(HOST, first="POST /x HTTP/1.1").get(b"host") != host.encode()
    assert read(first=f"POST {target} HTTP/1.0").get(b"host") == host.encode()


@pytest.mark.parametrize("lines", [[], ["Host:"], ["Host: a b"], ["Host: a", "Host: b"]])
def test_a_host_in_the_target_does_not_excuse_a_bad_host_header(lines: list[str]) -> None:
    with pytest.raises(HeadError, match=r"Host|host"):
        read(*lines, first="POST http://b/x HTTP/1.1")


@pytest.mark.parametrize(
    "target",
    [
        "*", "a:443", "http://a@b/x", "http://a:b@c/x", "http:///x", "http://", "http:/x", "http:x", "http://a#/x",
        "http://a:123456/x", "http://a\\b/x", "http://[::1/x", "http://[v1.a]/x", "ftp://a/x",
        "ws://a/x", "http://a:x/x", "http://\xe4/x",
    ],
)  # fmt: skip
def test_only_paths_are_targets(target: str) -> None:
    with pytest.raises(HeadError, match="must be a path"):
        read(HOST, first=f"POST {target} HTTP/1.1")


@pytest.mark.parametrize("target", ["/x\xe4", "/x#y", "/x\x01"])
def test_targets_are_plain(target: str) -> None:
    with pytest.raises(HeadError, match="percent-encoded"):
        read(HOST, first=f"POST {target} HTTP/1.1")


@pytest.mark.parametrize("first", ["POST / HTTP/1.1 x", "POST  / HTTP/1.1", "POST /", "", "P(ST / HTTP/1.1"])
def test_malformed_request_lines_are_refused(first: str) -> None:
    with pytest.raises(HeadError, match="request line"):
        read(HOST, first=first)


@pytest.mark.parametrize("version", ["HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "http/1.1", "HTTP/1.10", "SIP/2.0"])
def test_other_versions_of_http_are_refused(version: str) -> None:
    with pytest.raises(HeadError, match=r"send HTTP/1\.1"):
        read(HOST, first=f"POST / {version}")


@pytest.mark.parametrize(
    ("version", "options", "keeps"),
    [
        ("1.1", [], True),
        ("1.1", ["connection: close"], False),
        ("1.1", ["connection: x-a, Close"], False),
        ("1.1", ["connection: upgrade"], True),
        ("1.0", [], False),
        ("1.0", ["connection: Keep-Alive"], True),
        ("1.0", ["connection: keep-alive, close"], False),
    ],
)
def test_when_a_connection_is_kept_alive(version: str, options: list[str], keeps: bool) -> None:
    assert read(HOST, *options, first=f"POST / HTTP/{version}").keep_alive is keeps
    assert answer("content-length: 1", *options, first=f"HTTP/{version} 200 OK").keep_alive is keeps


def test_an_upgrade_is_not_made() -> None:
    """RFC 9110 §7.8 lets us ignore it: Java's HttpClient asks for h2c with every first request."""
    made = read(HOST, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA", "x-a: 1")
    assert made.onward == b"x-a: 1\r\n"
    assert made.keep_alive


def test_list_headers_may_be_repeated() -> None:
    made = read(HOST, "connection: X-A", "connection: close, x-b", "x-a: 1", "x-b: 2", "x-c: 3")
    assert made.onward == b"x-c: 3\r\n"
    assert made.get(b"connection") == b"X-A,close, x-b"
    assert read(HOST, "x-forwarded-for: a", "x-forwarded-for: b", "tracestate: a", "tracestate: b")


def test_headers_are_counted() -> None:
    with pytest.raises(HeadError, match="at most 100") as caught:
        read(HOST, *(f"x-{n}: 1" for n in range(100)))
    assert caught.value.outcome is outcome.HEAD_TOO_LARGE


@given(st.lists(st.sampled_from(["Accept: a", "user-agent: b", "X-Secret: s", "Authorization: k", "host: c"])))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_line_read_before_reads_the_same(lines: list[str]) -> None:
    unique = list(dict.fromkeys(lines))
    once, twice = (read(*(line for line in unique if line != "host: c"), HOST) for _ in range(2))
    assert once == twice


def test_answer_headers_are_split_into_read_here_and_forwarded() -> None:
    made = answer(
        "Content-Type: text/event-stream", "content-length: 5", "connection: X-Private", "x-private: 1",
        "x-farhop-outcome: queue_full", "server-timing: a", "retry-after: 3", "set-cookie: a", "set-cookie: b",
    )  # fmt: skip
    assert made.onward == b"content-type: text/event-stream\r\nretry-after: 3\r\n"  # an engine sets no cookies
    assert b"set-cookie" not in made.known
    assert made.known[b"x-farhop-outcome"] == b"queue_full"
    assert made.known[b"content-type"] == b"text/event-stream"
    assert made.known[b"server-timing"] == b"a"
    assert made.length == 5


@pytest.mark.parametrize(
    ("first", "lines", "kind"),
    [
        ("HTTP/1.1 200 OK", ["content-length: 5"], LengthBody),
        ("HTTP/1.1 200", ["transfer-encoding: chunked"], ChunkedBody),
        ("HTTP/1.1 200 ", [], EndlessBody),
        ("HTTP/1.0 500 x", [], EndlessBody),
        ("HTTP/1.1 200 OK", ["content-length: 0"], type(None)),
        ("HTTP/1.1 204 x", ["content-length: 5"], type(None)),
        ("HTTP/1.1 304 x", ["transfer-encoding: chunked"], type(None)),
    ],
)
def test_where_an_answer_ends(first: str, lines: list[str], kind: type) -> None:
    made = answer(*lines, first=first)
    assert type(made.body) is kind
    assert made.keep_alive is (kind is not EndlessBody)


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        ("HTTP/2 200 OK", []),
        ("HTTP/1.1 20 OK", []),
        ("HTTP/1.1 2000 OK", []),
        ("HTTP/1.1 099 OK", []),
        ("HTTP/1.1  200 OK", []),
        ("HTTP/1.1 200 OK\nx: y", []),
        ("HTTP/1.1 200 OK", ["content-length: 5", "content-length: 6"]),
        ("HTTP/1.1 200 OK", ["content-length: 5", "transfer-encoding: chunked"]),
        ("HTTP/1.1 200 OK", ["transfer-encoding: gzip, chunked"]),
        ("HTTP/1.0 200 OK", ["transfer-encoding: chunked"]),
        ("HTTP/1.1 200 OK", ["content-length: -1"]),
        ("HTTP/1.1 200 OK", ["x-a : 1"]),
    ],
)
def test_an_answer_that_cannot_be_trusted(first: str, lines: list[str]) -> None:
    with pytest.raises(HeadError):
        answer(*lines, first=first)


def test_values_of_repeated_lines_are_found_whole_and_in_order() -> None:
    lines = b"a: 1\r\nx-a: 2\r\na: a: 3\r\n"
    assert head.values(lines, b"a: ") == [b"1", b"a: 3"]
    assert head.values(lines, b"b: ") == head.values(lines, b"") == []
