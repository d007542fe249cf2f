"""Who comes in by the token of a redirect, at a region alone. Through both tiers:
tests/global_lb/app/test_redirect_token.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from inprocess import HOP_KEY, MODEL, topology

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity.redirect_token import (
    HEADER,
    LIFE_MS,
    RedirectToken,
    RedirectTokenSigner,
    RedirectTokenVerifier,
    holder,
)
from farhop.relay.answers import Reply
from farhop.service.authentication.authenticator import Caller, KeyAuthenticator
from regional_lb.app.redirect_token import RedirectedCallers
from topology.law import Law

KEYS = {"k1": HOP_KEY.encode()}
WORLD = topology()
NOW_S = 100.0


def authenticator(region: str = "frankfurt", uses_max: int = 8) -> KeyAuthenticator:
    law, clock = Law(WORLD), SimpleNamespace(now=lambda: NOW_S)
    flow: Any = SimpleNamespace(law=law, config=SimpleNamespace(region=region))
    verifier = RedirectTokenVerifier(KEYS, region, holder("r1", 3), uses_max)
    made = KeyAuthenticator(region, flow, lambda _regions: {}, 600.0)
    made.by_token = RedirectedCallers(verifier, flow, clock).caller  # type: ignore[arg-type]
    return made


def head(token: bytes | None) -> Any:
    return SimpleNamespace(known={} if token is None else {HEADER: token}, path=b"/v1/chat/completions")


def token(n: int = 0, **changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "audience": "frankfurt", "entry_region": "virginia", "issuer": "", "tenant": "eu-only",
        "lawful": ("frankfurt",), "epoch": 1, "priority": 3, "deadline_ms": 9_000.0,
        "expires_ms": NOW_S * 1e3 + LIFE_MS, "decision_id": f"{n:016x}", "promised_ttft_ms": 50.0,
        "narrow": (("eu",),), "key": "demo", "holder": holder("r1", 3), **changed,
    }  # fmt: skip
    return RedirectTokenSigner(KEYS, "k1", "virginia").sign(RedirectToken(**fields))


def test_what_was_issued_beside_the_law_is_no_more_at_the_address_that_a_client_is_sent_to() -> None:
    issued = {"key_id": "jwt:corp", "models": (MODEL,), "user": "00ff", "priority_max": 2, "explain": True}
    caller = authenticator().caller(head(token(**issued)))
    assert isinstance(caller, Caller)
    assert {name: getattr(caller, name) for name in issued} == issued
    assert caller.priority == 2


def test_redirect_token_has_all_of_the_callers_identity() -> None:
    caller = authenticator().caller(head(token()))
    assert isinstance(caller, Caller)
    assert (caller.tenant, caller.key, caller.priority, caller.deadline_s) == ("eu-only", "demo", 3, 9.0)
    assert (caller.lawful, caller.narrow) == (frozenset(("frankfurt",)), (("eu",),))
    assert (caller.entry_region, caller.promised_ttft_ms) == ("virginia", 50.0), "a guest, as by the tier listener"
    assert (caller.issuer, caller.decision_id) == ("", "0" * 16)
    assert caller.recorded
    assert caller.charged, "of a build that says no path: it charges whom it sends"
    named = authenticator().caller(head(token(path="/v1/chat/completions")))
    assert isinstance(named, Caller)
    assert not named.charged, "it may ask for more than it showed the balancer that sent it"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (b"", 401, outcome.REDIRECT_TOKEN_FORGED),
        (token(audience="tokyo"), 403, outcome.REDIRECT_TOKEN_MISADDRESSED),
        (token(path="/v1/completions"), 403, outcome.REDIRECT_TOKEN_MISADDRESSED),
        (token(expires_ms=NOW_S * 1e3), 403, outcome.REDIRECT_TOKEN_OVER),
    ],
)
def test_an_invalid_redirect_token_is_refused_with_the_remedy(text: bytes, status: int, reason: Outcome) -> None:
    reply = authenticator().caller(head(text))
    assert isinstance(reply, Reply)
    assert (reply.status, reply.outcome) == (status, reason)
    assert b"token in the URL" in reply.body


def test_a_token_is_used_up_and_what_cannot_be_remembered_is_refused() -> None:
    known, text = authenticator(uses_max=1), token()
    assert isinstance(known.caller(head(text)), Caller)
    used, full = known.caller(head(text)), known.caller(head(token(1)))
    assert isinstance(used, Reply)
    assert isinstance(full, Reply)
    assert (used.status, used.outcome) == (403, outcome.REDIRECT_TOKEN_OVER)
    assert (full.status, full.outcome) == (503, outcome.NO_BUFFER)
    assert b"retry-after" in full.extra


def test_a_region_whose_law_does_not_know_the_tenant_does_not_read_its_body() -> None:
    reply = authenticator().caller(head(token(tenant="nobody")))
    assert isinstance(reply, Reply)
    assert reply.outcome is outcome.ENTRY_FORBIDDEN


def test_without_a_token_a_key_decides() -> None:
    reply = authenticator().caller(head(None))
    assert isinstance(reply, Reply)
    assert reply.outcome is outcome.MISSING_KEY
