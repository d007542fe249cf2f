"""Authenticates a redirected client by its token, at the client listener: caller, law, remaining time.

The token says what an API key would. The law is evaluated again here (the intersection with the token's set), and
before the body is read also whether it may be read here. An API key never makes up for an invalid token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.relay import answers
from farhop.service.authentication.authenticator import Caller, as_issued, hint_scope, recorded
from topology.law import Scope

if TYPE_CHECKING:
    from farhop.identity.hop_token import BodyMac, HopClaims
    from farhop.identity.redirect_token import RedirectToken, RedirectTokenVerifier
    from farhop.relay.answers import Reply
    from farhop.service.process.clock import Clock
    from regional_lb.scheduler.flow import RegionalFlow
    from topology.law import Law

RETRY_AFTER_S = 1.0
_DETAILS = {
    outcome.REDIRECT_TOKEN_FORGED: "the token in the URL is not genuine",
    outcome.REDIRECT_TOKEN_OVER: "the token in the URL has expired or was used: ask the balancer that gave it again",
    outcome.REDIRECT_TOKEN_MISADDRESSED: "the token in the URL is for another region, balancer or path",
}

_regions = lru_cache(maxsize=1024)(frozenset[str])  # of many requests alike: each would hold them as long as it lives


class TenantTerms(NamedTuple):
    """A tenant's terms under the law in this region: `scope` as `hint_scope` has it, `is_recorded` as `recorded`;
    `why_not`: why none of its requests is processed here, whatever the model, None if some may be."""

    scope: str
    is_recorded: bool
    why_not: str | None


def terms_of(law: Law, tenant: str, narrow: tuple[tuple[str, ...], ...], region: str, key: str) -> TenantTerms:
    """A tenant's terms under this law, for a request that is narrowed to `narrow` and made with this key."""
    is_recorded = recorded(law, tenant, "", narrow, region, key)
    why_not = law.verdict(tenant, "", narrow=narrow, key=key).why_not(region)
    return TenantTerms(hint_scope(law.topology, tenant), is_recorded, why_not)


def vouched(
    claims: HopClaims | RedirectToken,
    terms: TenantTerms,
    issuer: str = "",
    attempt: str = "",
    body_mac: BodyMac | None = None,
    *,
    charged: bool = False,
) -> Caller:
    """The caller that a token vouches for, with its rights here (`terms`). `attempt`: the issuer's name for it.
    `body_mac`, `charged`: as in Caller."""
    return Caller(
        tenant=claims.tenant,
        deadline_s=claims.deadline_ms / 1e3,
        hint_scope=terms.scope,
        recorded=terms.is_recorded,
        priority=claims.priority,
        key=claims.key,
        entry_region=claims.entry_region,
        issuer=issuer,
        attempt=attempt,
        decision_id=claims.decision_id,
        lawful=_regions(claims.lawful),
        narrow=claims.narrow,
        promised_ttft_ms=claims.promised_ttft_ms,
        body_mac=body_mac,
        body_hash=claims.body,
        waited_s=claims.waited_ms / 1e3,
        charged=charged,
        ttft_s=None if claims.ttft_ms is None else claims.ttft_ms / 1e3,
    )


class RedirectedCallers:
    """Authenticates callers with such a token (KeyAuthenticator.by_token)."""

    def __init__(self, redirect_tokens: RedirectTokenVerifier, flow: RegionalFlow, clock: Clock) -> None:
        self._redirect_tokens, self._flow, self._clock = redirect_tokens, flow, clock

    def caller(self, token: bytes, path: bytes) -> Caller | Reply:
        """The caller that the token vouches for on this path, or the refusal."""
        claims = self._redirect_tokens.use(token, self._clock.now() * 1e3, path)
        if claims is outcome.NO_BUFFER:
            detail = "too many redirected requests at once: ask the balancer that sent you again"
            return answers.refusal(outcome.NO_BUFFER, detail, retry_after_s=RETRY_AFTER_S)
        if isinstance(claims, Outcome):
            return answers.refusal(claims, _DETAILS[claims])
        law, region = self._flow.law, self._flow.config.region
        why = law.verdict(claims.tenant, "", Scope.ENTRY).why_not(region)
        if why is not None:
            return answers.refusal(outcome.ENTRY_FORBIDDEN, f"this balancer may not read the request: {why}")
        # A build that says no path has charged its client, when it sent it here.
        charged = not claims.path
        caller = vouched(claims, terms_of(law, claims.tenant, claims.narrow, region, claims.key), charged=charged)
        return caller if not claims.key_id else as_issued(caller, claims)
