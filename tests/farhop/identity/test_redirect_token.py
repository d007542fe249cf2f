"""Tokens of redirects: one use, one process, distinct from hop tokens; and their form in a URL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity.hop_token import HopClaims, HopSigner, HopVerifier
from farhop.identity.redirect_token import (
    LIFE_MS,
    RedirectToken,
    RedirectTokenSigner,
    RedirectTokenVerifier,
    holder,
    joined,
    split_token,
)

KEYS = {"k1": b"n" * 32}
NOW_MS = 50_000.0
HERE = holder("r1", 7)
GARBLED = (outcome.REDIRECT_TOKEN_FORGED, outcome.REDIRECT_TOKEN_MISADDRESSED)  # the address is in the clear
CLAIMS = RedirectToken(
    audience="frankfurt",
    entry_region="virginia",
    issuer="",
    tenant="eu-only",
    lawful=("frankfurt", "paris"),
    epoch=7,
    priority=3,
    deadline_ms=29_500.5,
    expires_ms=NOW_MS + LIFE_MS,
    decision_id="d-01",
    promised_ttft_ms=412.5,
    narrow=(("eu", "jp"), ("de",)),
    key="demo",
    holder=HERE,
)


def token(**changed: object) -> bytes:
    return RedirectTokenSigner(KEYS, "k1", "virginia").sign(replace(CLAIMS, **changed))


def verifier() -> RedirectTokenVerifier:
    return RedirectTokenVerifier(KEYS, "frankfurt", HERE)


def test_a_redirect_token_is_verified_once() -> None:
    known, text = verifier(), token()
    assert known.use(text, NOW_MS) == CLAIMS
    assert known.use(text, NOW_MS) is outcome.REDIRECT_TOKEN_OVER
    assert known.use(token(decision_id="d-02"), NOW_MS) != outcome.REDIRECT_TOKEN_OVER, (
        "another decision is another token"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", outcome.REDIRECT_TOKEN_FORGED),
        (b"r2.k1.virginia~frankfurt.x.y", outcome.REDIRECT_TOKEN_FORGED),
        (token() + b"A", outcome.REDIRECT_TOKEN_FORGED),
        (token()[:-1], outcome.REDIRECT_TOKEN_FORGED),
        (RedirectTokenSigner({"k1": b"o" * 32}, "k1", "virginia").sign(CLAIMS), outcome.REDIRECT_TOKEN_FORGED),
        (token(audience="paris"), outcome.REDIRECT_TOKEN_MISADDRESSED),
        (token(holder=holder("r2", 7)), outcome.REDIRECT_TOKEN_MISADDRESSED),
        (token(holder=holder("r1", 8)), outcome.REDIRECT_TOKEN_MISADDRESSED),
        (token(expires_ms=NOW_MS), outcome.REDIRECT_TOKEN_OVER),
        (token(expires_ms=NOW_MS + 60_001.0), outcome.REDIRECT_TOKEN_OVER),
    ],
)
def test_an_invalid_redirect_token_is_refused_and_uses_nothing_up(text: bytes, reason: Outcome) -> None:
    known = verifier()
    assert known.use(text, NOW_MS) is reason
    assert known.use(token(), NOW_MS) == CLAIMS


def test_neither_kind_of_token_passes_for_the_other() -> None:
    fields = {name: value for name, value in asdict(CLAIMS).items() if name in HopClaims.__struct_fields__}
    hop = HopSigner(KEYS, "k1", "virginia").sign(HopClaims(**fields))
    assert HopVerifier(KEYS, "frankfurt").verify(hop, NOW_MS) == HopClaims(**fields)
    assert verifier().use(hop, NOW_MS) is outcome.REDIRECT_TOKEN_FORGED
    assert HopVerifier(KEYS, "frankfurt").verify(token(), NOW_MS) is outcome.HOP_FORGED
    assert verifier().use(b"r2" + hop[2:], NOW_MS) is outcome.REDIRECT_TOKEN_FORGED
    assert HopVerifier(KEYS, "frankfurt").verify(b"v2" + token()[2:], NOW_MS) is outcome.HOP_FORGED


@given(st.integers(0, 400), st.integers(0, 255))
def test_no_token_with_one_byte_changed_is_good(at: int, byte: int) -> None:
    text = bytearray(token())
    at %= len(text)
    changed = bytes(text[:at]) + bytes([byte]) + bytes(text[at + 1 :])
    assert changed == bytes(text) or verifier().use(changed, NOW_MS) in GARBLED


def test_uses_are_remembered_until_the_token_expires_and_no_more_than_there_is_room_for() -> None:
    known = RedirectTokenVerifier(KEYS, "frankfurt", HERE, uses_max=3)
    late, *others = (token(decision_id=f"d-{n}", expires_ms=NOW_MS + (900.0 if n == 0 else 100.0)) for n in range(5))
    assert [isinstance(known.use(one, NOW_MS), RedirectToken) for one in (late, *others[:2])] == [True] * 3
    assert known.use(others[2], NOW_MS) is outcome.NO_BUFFER, "what cannot be remembered is refused"
    assert known.use(late, NOW_MS) is outcome.REDIRECT_TOKEN_OVER
    later = NOW_MS + 100.0  # the first used has not expired, those behind it have
    fresh = [token(decision_id=f"e-{n}", expires_ms=later + 50.0) for n in range(3)]
    assert [isinstance(known.use(one, later), RedirectToken) for one in fresh] == [True, True, False]
    assert known.use(late, later) is outcome.REDIRECT_TOKEN_OVER


@pytest.mark.parametrize(
    ("target", "rest", "found"),
    [
        (b"/v1/chat/completions", b"/v1/chat/completions", None),
        (b"/v1/chat/completions?a=1", b"/v1/chat/completions?a=1", None),
        (b"/v1/chat/completions?farhop-pass=t.o", b"/v1/chat/completions", b"t.o"),
        (b"/v1/chat/completions?a=1&farhop-pass=t&b=2", b"/v1/chat/completions?a=1&b=2", b"t"),
        (b"/v1?farhop-pass=t&farhop-pass=u", b"/v1", b""),
        (b"/v1?farhop-pass=", b"/v1", b""),
        (b"/farhop-pass=t", b"/farhop-pass=t", None),
        (b"/v1?a=farhop-pass", b"/v1?a=farhop-pass", None),
    ],
)
def test_a_token_is_taken_out_of_the_target(target: bytes, rest: bytes, found: bytes | None) -> None:
    assert split_token(target) == (rest, found)


@pytest.mark.parametrize("target", [b"/v1/completions", b"/v1/completions?api-version=1"])
def test_a_redirect_url_carries_its_token(target: bytes) -> None:
    url = joined("https://eu.example:8443", target, b"r1.k.p.m")
    assert url.startswith("https://eu.example:8443/v1/completions?")
    assert split_token(url.removeprefix("https://eu.example:8443").encode()) == (target, b"r1.k.p.m")
