"""What a head says of versions: only what is asked for is found, and nothing is ever a reason to fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.machine import Mark
from farhop.shell.marks import AnyVersion, MarkReader

CANARY, COOKIE = Mark("header", "x-canary", "yes"), Mark("cookie", "ab", "b")


class Wanted:
    """One model's rules."""

    def marks(self, model: str) -> tuple[Mark, ...]:
        return (CANARY, COOKIE) if model == "llama" else ()

    def may_pin(self, model: str) -> bool:
        return model == "llama"


READER = MarkReader(Wanted())
BOTH = b"accept: */*\r\nx-canary: yes\r\ncookie: a=1; ab=b; c=2\r\n"


def test_what_is_borne_is_found_and_nothing_else() -> None:
    assert READER.marks("llama", BOTH) == (CANARY, COOKIE)
    assert READER.marks("qwen", BOTH) == ()
    assert READER.marks("llama", b"x-canary: no\r\nx-canary: yes\r\ncookie: ab=a\r\n") == (CANARY,)
    assert READER.marks("llama", b'x-canary: yes!\r\nxx-canary: yes\r\ncookie: cab=b; ab="b"\r\n') == (COOKIE,)
    assert READER.marks("llama", b"x-other: x-canary: yes\r\ncookie: ab=a; ab=b\r\n") == ()


@pytest.mark.parametrize(("asked", "version"), [
    (b"v1", "v1"), (b"2026-11.a_b", "2026-11.a_b"), (None, ""), (b"", ""), (b"v 1", ""), (b"v" * 65, ""), (b"\xff", ""),
    (b"v1\n", ""),
])  # fmt: skip
def test_a_version_is_a_name_or_none(asked: bytes | None, version: str) -> None:
    assert READER.version("llama", asked) == MarkReader(AnyVersion()).version("qwen", asked) == version
    assert READER.version("qwen", asked) == ""
    assert MarkReader(AnyVersion()).marks("llama", BOTH) == ()


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_it_never_fails(headers: bytes) -> None:
    assert set(READER.marks("llama", headers)) <= {CANARY, COOKIE}
    assert len(READER.version("llama", headers)) <= 64
