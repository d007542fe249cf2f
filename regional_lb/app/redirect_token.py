"""Who comes in by the token of a redirect, at the client listener: under which law, with how much time.

The token says what a key would, and is evaluated again here: the law, with its set the intersection, and who may read
the body first. Never lets a key mend a token that is no good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity.redirect_token import HEADER
from farhop.relay import answers
from farhop.service.authenticator import Caller, as_issued, hint_scope, recorded
from topology.law import Scope

if TYPE_CHECKING:
    from farhop.balance.model_facts import ModelFacts
    from farhop.identity.hop_token import HopClaims
    from farhop.identity.redirect_token import RedirectToken, RedirectTokenVerifier
    from farhop.relay.answers import Reply
    from farhop.relay.formats.prompt import Wishes
    from farhop.relay.http.head import Head
    from farhop.service.authenticator import KeyAuthenticator
    from farhop.service.clock import Clock
    from regional_lb.scheduler.flow import RegionalFlow
    from topology.law import Law

RETRY_AFTER_S = 1.0
_SAYS = {
    outcome.PASS_FORGED: "the token in the URL is not genuine",
    outcome.PASS_OVER: "the token in the URL has expired, or was used already: ask the balancer that gave it again",
    outcome.PASS_MISADDRESSED: "the token in the URL is for another region or balancer",
}


def vouched(claims: HopClaims | RedirectToken, law: Law, region: str, issuer: str = "", attempt: str = "") -> Caller:
    """The caller whom a token vouches for, under the law of this region. `attempt`: the issuer's name for it."""
    return Caller(
        tenant=claims.tenant,
        deadline_s=claims.deadline_ms / 1e3,
        hint_scope=hint_scope(law.topology, claims.tenant),
        recorded=recorded(law, claims.tenant, "", claims.narrow, region),
        priority=claims.priority,
        key=claims.key,
        entry_region=claims.entry_region,
        issuer=issuer,
        attempt=attempt,
        decision_id=claims.decision_id,
        lawful=frozenset(claims.lawful),
        narrow=claims.narrow,
        promised_ttft_ms=claims.promised_ttft_ms,
        body_hash=claims.body,
        waited_s=claims.waited_ms / 1e3,
        charged=True,
    )


class RedirectAuthenticator:
    """Callers by such a token where they bring one, else by key, as `keys` has it."""

    def __init__(
        self, keys: KeyAuthenticator, redirect_tokens: RedirectTokenVerifier, flow: RegionalFlow, clock: Clock
    ) -> None:
        self._keys, self._redirect_tokens, self._flow, self._clock = keys, redirect_tokens, flow, clock

    def caller(self, head: Head) -> Caller | Reply:
        """Who asks, or why they may not."""
        token = head.known.get(HEADER)
        if token is None:
            return self._keys.caller(head)
        claims = self._redirect_tokens.use(token, self._clock.now() * 1e3)
        if claims is outcome.NO_BUFFER:
            detail = "too many redirected requests at once: ask the balancer that sent you again"
            return answers.refusal(outcome.NO_BUFFER, detail, retry_after_s=RETRY_AFTER_S)
        if isinstance(claims, Outcome):
            return answers.refusal(claims, _SAYS[claims])
        law, region = self._flow.law, self._flow.config.region
        why = law.verdict(claims.tenant, "", Scope.ENTRY).why_not(region)
        if why is not None:
            return answers.refusal(outcome.ENTRY_FORBIDDEN, f"this balancer may not read the request: {why}")
        caller = vouched(claims, law, region)
        return caller if not claims.key_id else as_issued(caller, claims)

    def wished(self, caller: Caller, wishes: Wishes, lines: bytes) -> Caller | Reply:
        """As a key's would be: what narrowed it before narrows it once more."""
        return self._keys.wished(caller, wishes, lines)

    def models(self, caller: Caller) -> dict[str, ModelFacts]:
        """The models this caller may use."""
        return self._keys.models(caller)

    def recorded(self, caller: Caller, model: str) -> bool:
        """Whether spans and decisions of a request for this model may be kept here."""
        return self._keys.recorded(caller, model)
