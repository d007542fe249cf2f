"""Header lines: what is remembered of them, and what never is."""

from __future__ import annotations

from farhop.relay.http.fields import Fields


def fields() -> Fields:
    return Fields(lambda name: name.startswith(b"a"), lambda name: name == b"host")


def test_a_header_line_is_split_and_marked_as_read_here_or_forwarded() -> None:
    lines = fields()
    assert lines.read(b"Accept:  x ") == (b"accept", b"x", b"accept: x\r\n", False)
    assert lines.read(b"Host: h") == (b"host", b"h", b"", True)


def test_repeated_header_fields_are_remembered_but_secrets_are_not() -> None:
    lines = fields()
    for line in (b"Accept: x", b"x-stainless-lang: python", b"Authorization: Bearer k", b"cookie: c", b"api-key: k"):
        assert lines.read(line) == lines.read(line)
    assert lines.get(b"Accept: x") == lines.read(b"Accept: x")
    assert lines.get(b"x-stainless-lang: python")
    for secret in (b"Authorization: Bearer k", b"cookie: c", b"api-key: k"):
        assert lines.get(secret) is None


def test_remembered_header_fields_are_bounded() -> None:
    lines = fields()
    for n in range(3000):
        lines.read(b"user-agent: %d" % n)
    assert len(lines.remembered) <= 1024
    lines.read(b"user-agent: " + b"x" * 1000)
    assert lines.get(b"user-agent: " + b"x" * 1000) is None
