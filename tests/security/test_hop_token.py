"""Attacks with hop tokens: replayed, with another body, to another path; forged by a region that was taken over."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, head, send, topology
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.identity.hop_keys import key_from, key_to
from farhop.identity.hop_token import HopClaims, HopError, HopSigner, HopVerifier, request_line
from farhop.service.admission.large_bodies import LARGE_BYTES

ROOT = HOP_KEY.encode()
OTHER = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "howdy"}], "max_tokens": 8})
BODY = chat().partition(b"\r\n\r\n")[2]
PATH = b"/v1/chat/completions"


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, topology()) as running:
        yield running
        await running.at_rest()


def claims(up: Both | None = None, **changed: Any) -> HopClaims:
    now_ms = up.regional.clock.now() * 1e3 if up is not None else 0.0
    fields = {
        "audience": "virginia", "entry_region": "tokyo", "issuer": "tokyo/g1", "tenant": "anywhere",
        "lawful": ("virginia", "tokyo"), "epoch": 1, "priority": 0, "deadline_ms": 10_000.0,
        "expires_ms": now_ms + 5_000.0, "decision_id": "d" * 16, "body": hashlib.sha256(BODY).digest(), **changed,
    }  # fmt: skip
    return HopClaims(**fields)


def token(up: Both, version: str = "v3") -> str:
    """One as the global balancer in Tokyo signs it for BODY; an older build's has its hash."""
    said, line = claims(up), request_line(b"POST", PATH, len(BODY))
    signer = HopSigner({"k1": ROOT}, "k1", "tokyo")
    made = signer.sign(said, line) if version == "v2" else signer.sign(replace(said, body=b""), line, BODY)
    assert made.startswith(version.encode())
    return made.decode()


VERSIONS = pytest.mark.parametrize("version", ["v2", "v3"])


@VERSIONS
async def test_a_token_is_good_for_one_request(up: Both, engine: Engine, version: str) -> None:
    assert len(OTHER) == len(BODY)
    captured = token(up, version)
    ask = [
        chat(key=None, x_farhop_hop=captured),
        *(chat(key=None, body=body, x_farhop_hop=captured) for body in (BODY, OTHER)),
    ]
    answers = [await send(up.tier, one) for one in ask]
    assert [(answer.status, answer.code if answer.status != 200 else "") for answer in answers] == [
        (200, ""), (401, "hop_token_used"), (401, "hop_token_used"),
    ]  # fmt: skip
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    "request_of",
    [
        lambda hop: chat(key=None, body=OTHER, x_farhop_hop=hop),
        lambda hop: chat(key=None, body=OTHER + b" ", x_farhop_hop=hop),
        lambda hop: chat(key=None, path="/v1/completions", x_farhop_hop=hop),
        lambda hop: chat(key=None, path="/v1/chat/completions?a=1", x_farhop_hop=hop),
        lambda hop: head("GET", "/v1/models", x_farhop_hop=hop),
        lambda hop: (
            head("POST", PATH.decode(), transfer_encoding="chunked", x_farhop_hop=hop)
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        ),
    ],
)
@VERSIONS
async def test_a_token_kept_from_its_request_serves_no_other(
    up: Both, engine: Engine, request_of: Any, version: str
) -> None:
    answer = await send(up.tier, request_of(token(up, version)))
    assert (answer.status, answer.code) == (401, "hop_token_forged")
    assert engine.seen == []


@VERSIONS
async def test_a_token_does_not_pass_with_another_large_body(up: Both, engine: Engine, version: str) -> None:
    """It is read in a process of its own."""
    own, other = (BODY.replace(b"hello", b"hello" + c * 300_000) for c in (b"a", b"b"))
    assert len(own) == len(other) > LARGE_BYTES
    line = request_line(b"POST", PATH, len(own))
    signer = HopSigner({"k1": ROOT}, "k1", "tokyo")
    for body, status in ((other, 401), (own, 200)):
        if version == "v2":
            made = signer.sign(claims(up, body=hashlib.sha256(own).digest()), line)
        else:
            made = signer.sign(claims(up, body=b""), line, own)
        assert (await send(up.tier, chat(key=None, body=body, x_farhop_hop=made.decode()))).status == status
    assert len(engine.seen) == 1


async def test_repeated_requests_of_the_global_tier_are_all_accepted(up: Both, engine: Engine) -> None:
    """Equal requests in one moment, each with a token of its own."""
    for _ in range(3):
        assert (await send(up.entry, chat())).status == 200
    assert len(engine.seen) == 3


def test_a_region_that_was_taken_over_forges_nothing_for_another() -> None:
    """Paris holds what checks tokens to it, and what its own global balancers sign with."""
    held = {"to": key_to(ROOT, "paris").encode(), "from": key_from(ROOT, "paris", ("paris", "virginia")).encode()}
    virginia = HopVerifier({"k1": key_to(ROOT, "virginia").encode()}, "virginia")
    genuine = HopSigner({"k1": held["from"]}, "k1", "paris")
    own = claims(entry_region="paris", issuer="paris/g1")
    assert virginia.admit(genuine.sign(own), 1.0) == (own, None)
    for issuer in ("tokyo", "virginia"):
        with pytest.raises(HopError, match="does not sign"):
            HopSigner({"k1": held["from"]}, "k1", issuer)
    with pytest.raises(HopError, match="does not check"):
        HopVerifier({"k1": held["to"]}, "virginia")
    with pytest.raises(HopError, match="does not sign"):
        HopSigner({"k1": held["to"]}, "k1", "tokyo")
    # Its keys' bytes in another balancer's name, and its own genuine tokens that claim to be another's.
    stolen = held["from"].replace(b"from:paris:", b"from:tokyo:")
    assert virginia.admit(HopSigner({"k1": stolen}, "k1", "tokyo").sign(claims()), 1.0) is outcome.HOP_FORGED
    stolen = held["to"].replace(b"to:paris:", b"to:virginia:")
    as_tokyo = HopVerifier({"k1": stolen}, "virginia")._keys[b"k1"].pair("tokyo", "virginia")
    assert as_tokyo != HopVerifier({"k1": ROOT}, "virginia")._keys[b"k1"].pair("tokyo", "virginia")
    assert virginia.admit(genuine.sign(claims()), 1.0) is outcome.HOP_FORGED, "Paris says that it is Tokyo"


def test_derived_keys_and_the_root_make_the_same_tokens_and_rotate() -> None:
    old, new = ROOT, b"another root of the fleet"
    signer = HopSigner({"b": new}, "b", "tokyo")
    derived = HopVerifier({"a": key_to(old, "virginia").encode(), "b": key_to(new, "virginia").encode()}, "virginia")
    for one in (signer, HopSigner({"a": key_from(old, "tokyo", ["virginia"]).encode()}, "a", "tokyo")):
        assert derived.admit(one.sign(claims()), 1.0) == (claims(), None)
    assert HopVerifier({"a": old}, "virginia").admit(signer.sign(claims()), 1.0) is outcome.HOP_FORGED


def test_used_hop_tokens_are_remembered_within_bounds() -> None:
    verifier, signer = HopVerifier({"k1": ROOT}, "virginia", uses_max=2), HopSigner({"k1": ROOT}, "k1", "tokyo")
    texts = [signer.sign(claims(expires_ms=100.0)) for _ in range(3)]
    assert len(set(texts)) == 3, "the same claims, a nonce each"
    assert [verifier.admit(text, 1.0) for text in texts][2] is outcome.NO_BUFFER
    assert [verifier.admit(text, 99.0) for text in texts[:2]] == [outcome.HOP_USED] * 2
    later = signer.sign(claims(expires_ms=200.0))
    assert isinstance(verifier.admit(later, 100.0), tuple), "what has expired makes room"
    assert verifier.admit(texts[0], 100.0) is outcome.HOP_EXPIRED
