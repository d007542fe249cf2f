"""Who calls: the name in a verified certificate, and nothing else (over TLS: tests/security/test_control_port.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from farhop.identity.certificate_names import BalancerIdentity
from farhop.service.authentication.peer_authenticator import ANY_PEER, PeerAuthenticator

HERE = PeerAuthenticator("farhop.internal", mutual=True)


class AbortedError(Exception):
    pass


def context(*text: str, common_name: str = "") -> Any:
    async def abort(code: grpc.StatusCode, why: str) -> None:
        raise AbortedError(code, why)

    fields = {
        "x509_subject_alternative_name": [one.encode() for one in text],
        "x509_common_name": [common_name.encode()],
    }
    return SimpleNamespace(auth_context=lambda: fields, abort=abort)


async def test_without_peer_authentication_no_peer_is_proven() -> None:
    assert await ANY_PEER.proven(context("spiffe://farhop.internal/farhop/global/paris"), "global", "paris") is None


async def test_the_name_must_be_that_of_the_requested_tier_and_region() -> None:
    paris = context("127.0.0.1", "spiffe://farhop.internal/farhop/global/paris")
    assert (
        await HERE.proven(paris, "global", "paris") == await HERE.proven(paris) == BalancerIdentity("global", "paris")
    )
    for tier, region, message in (
        ("regional", None, "not a regional"),
        ("global", "tokyo", "not a global bal"),
    ):
        with pytest.raises(AbortedError, match=message):
            await HERE.proven(paris, tier, region)  # type: ignore[arg-type]


async def test_common_name_of_a_certificate_is_ignored() -> None:
    with pytest.raises(AbortedError, match="farhop certs issue"):
        await HERE.proven(context(common_name="spiffe://farhop.internal/farhop/global/paris"))
    assert not HERE.admits("global", None)
    assert not HERE.admits("global", b"no certificate")
