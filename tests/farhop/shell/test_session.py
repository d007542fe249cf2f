"""A session is found where it is looked for, is the tenant's own, and is never a reason to fail."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.shell.session import SessionReader

READER = SessionReader("X-Session-Id", "sid", "user", lambda: True)
BODY = b'{"model":"m","user":"body"}'


def read(body: bytes = b"{}", headers: bytes = b"", tenant: str = "acme") -> int:
    return READER.read(tenant, body, headers)


def test_header_before_cookie_before_body() -> None:
    header, cookie = b"x-session-id: head\r\n", b"accept: */*\r\ncookie: a=1; sid=cook; b=2\r\n"
    assert read(BODY, header + cookie) == read(headers=header) != 0
    assert read(BODY, cookie) == read(headers=b"cookie: sid=cook\r\n") != 0
    assert len({read(headers=header), read(headers=cookie), read(BODY)}) == 3


def test_one_name_is_one_session_wherever_it_stands_and_every_tenant_has_its_own() -> None:
    assert read(headers=b"x-session-id: s1\r\n") == read(b'{"user": "s1"}') == read(headers=b'cookie: sid="s1"\r\n')
    assert read(BODY, tenant="other") != read(BODY)


def test_where_there_is_none() -> None:
    assert read() == 0
    assert read(headers=b"x-session-id: \r\ncookie: osid=1; xsid=2\r\nx-other: x-session-id: no\r\n") == 0
    assert SessionReader("", "", "", lambda: True).read("acme", BODY, b"x-session-id: s\r\ncookie: sid=1\r\n") == 0


@pytest.mark.parametrize("body", [b'"user"', b'["user"]', b'{"user":7}', b'{"user":null}', b'{"user"', b'--x "user"'])
def test_what_cannot_be_read_is_no_session(body: bytes) -> None:
    assert read(body) == 0


def test_unless_somebody_asks_nothing_is_read() -> None:
    assert SessionReader("x-session-id", "sid", "user", lambda: False).read("acme", BODY, b"") == 0


@given(st.binary(max_size=200), st.binary(max_size=200), st.text(max_size=5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_it_never_fails(body: bytes, headers: bytes, name: str) -> None:
    assert read(body + b'"user"', headers) >= 0
    assert read(msgspec.json.encode({"user": name})) >= 0
