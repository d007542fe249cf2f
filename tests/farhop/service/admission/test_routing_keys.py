"""Only what is asked for is found, and nothing is ever a reason to fail; a session is the tenant's own."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.machine import HeaderMatch
from farhop.relay.formats.prompt import NO_PREFERENCES, Preferences
from farhop.service.admission.routing_keys import AnyVersion, HeaderMatchReader, SessionReader, soft_session

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


def test_without_a_session_header_cookie_or_field_there_is_no_session() -> None:
    assert read() == 0
    assert read(headers=b"x-session-id: \r\ncookie: osid=1; xsid=2\r\nx-other: x-session-id: no\r\n") == 0
    assert SessionReader("", "", "", lambda: True).read("acme", BODY, b"x-session-id: s\r\ncookie: sid=1\r\n") == 0


@pytest.mark.parametrize("body", [b'"user"', b'["user"]', b'{"user":7}', b'{"user":null}', b'{"user"', b'--x "user"'])
def test_an_unreadable_session_name_is_no_session(body: bytes) -> None:
    assert read(body) == 0


def test_sessions_are_not_read_unless_wanted() -> None:
    assert SessionReader("x-session-id", "sid", "user", lambda: False).read("acme", BODY, b"") == 0


@given(st.binary(max_size=200), st.binary(max_size=200), st.text(max_size=5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_body_and_no_header_makes_reading_a_session_raise(body: bytes, headers: bytes, name: str) -> None:
    assert read(body + b'"user"', headers) >= 0
    assert read(msgspec.json.encode({"user": name})) >= 0


# -- sessions that nobody configured


@pytest.mark.parametrize(
    "line",
    [b"x-claude-code-session-id: s\r\n", b"session-id: s\r\n", b"session_id: s\r\n", b"x-session-id: s\r\n",
     b"x-session-affinity: s\r\n"],
)  # fmt: skip
def test_an_agent_names_its_session(line: bytes) -> None:
    session, parent = soft_session("acme", b"accept: */*\r\n" + line, Preferences(cache_key="k", user="u"))
    assert (session, parent) == (soft_session("acme", b"", Preferences(user="s"))[0], 0)
    assert soft_session("other", line, NO_PREFERENCES)[0] not in (0, session)


def test_an_agents_agent_comes_from_it() -> None:
    main, agent = b"x-claude-code-session-id: s\r\n", b"x-claude-code-agent-id: a\r\n"
    first = soft_session("acme", main, NO_PREFERENCES)
    child = soft_session("acme", main + agent, NO_PREFERENCES)
    assert child[1] == first[0] != child[0]
    below = b"x-claude-code-agent-id: b\r\nx-claude-code-parent-agent-id: a\r\n"
    assert soft_session("acme", main + below, NO_PREFERENCES)[1] == child[0]
    opencode = soft_session("acme", b"x-session-id: t\r\nx-parent-session-id: s\r\n", NO_PREFERENCES)
    assert opencode[1] == first[0]
    assert soft_session("other", b"x-session-id: t\r\nx-parent-session-id: s\r\n", NO_PREFERENCES)[1] != first[0]


def test_routing_key_is_read_from_the_body_without_a_header() -> None:
    by_key = soft_session("acme", b"x-sessions: no\r\n", Preferences(cache_key="k", user="u"))
    assert by_key == soft_session("acme", b"", Preferences(cache_key="k"))
    assert by_key != soft_session("acme", b"", Preferences(user="u"))
    assert soft_session("acme", b"x-parent-session-id: s\r\n", NO_PREFERENCES) == (0, 0)


# -- header matches and versions

CANARY, COOKIE = HeaderMatch("header", "x-canary", "yes"), HeaderMatch("cookie", "ab", "b")


class Wanted:
    """One model's rules."""

    by_model = ("llama",)

    def header_matches(self, model: str) -> tuple[HeaderMatch, ...]:
        return (CANARY, COOKIE) if model == "llama" else ()

    def may_pin(self, model: str) -> bool:
        return model == "llama"


MATCHES = HeaderMatchReader(Wanted())
BOTH = b"accept: */*\r\nx-canary: yes\r\ncookie: a=1; ab=b; c=2\r\n"


def test_only_headers_and_cookies_that_match_a_rule_exactly_are_found() -> None:
    assert MATCHES.header_matches("llama", BOTH) == (CANARY, COOKIE)
    assert MATCHES.header_matches("qwen", BOTH) == ()
    assert MATCHES.header_matches("llama", b"x-canary: no\r\nx-canary: yes\r\ncookie: ab=a\r\n") == (CANARY,)
    assert MATCHES.header_matches("llama", b'x-canary: yes!\r\nxx-canary: yes\r\ncookie: cab=b; ab="b"\r\n') == (
        COOKIE,
    )
    assert MATCHES.header_matches("llama", b"x-other: x-canary: yes\r\ncookie: ab=a; ab=b\r\n") == ()


@pytest.mark.parametrize(("asked", "version"), [
    (b"v1", "v1"), (b"2026-11.a_b", "2026-11.a_b"), (None, ""), (b"", ""), (b"v 1", ""), (b"v" * 65, ""), (b"\xff", ""),
    (b"v1\n", ""),
])  # fmt: skip
def test_a_version_is_a_name_or_none(asked: bytes | None, version: str) -> None:
    assert MATCHES.version("llama", asked) == HeaderMatchReader(AnyVersion()).version("qwen", asked) == version
    assert MATCHES.version("qwen", asked) == ""
    assert HeaderMatchReader(AnyVersion()).header_matches("llama", BOTH) == ()


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_head_is_a_reason_to_fail(headers: bytes) -> None:
    assert set(MATCHES.header_matches("llama", headers)) <= {CANARY, COOKIE}
    assert len(MATCHES.version("llama", headers)) <= 64
