"""Makes the URL of a redirect or of advice: the chosen region's address, with a token for one use.

The token is for one process of the region and expires by that process's clock. Never logs, never decides.
"""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity import redirect_token
from farhop.identity.hop_token import BUDGET_MAX_MS
from farhop.relay import answers

if TYPE_CHECKING:
    from farhop.balance.machine import Forward, Request
    from farhop.identity.redirect_token import RedirectTokenSigner
    from farhop.relay.answers import Reply
    from farhop.service.authentication.authenticator import Caller, KeyAuthenticator
    from farhop.service.process.clock import Clock
    from global_lb.routing.flow import GlobalFlow


_OWN = "own"
_DETAILS = {
    outcome.REDIRECT_TOKEN_FORGED: "the token in the URL is not genuine, or of a process before this one",
    outcome.REDIRECT_TOKEN_OVER: "the token in the URL has expired or was used: ask the entry that gave it again",
    outcome.REDIRECT_TOKEN_MISADDRESSED: "the token in the URL is for another balancer or path",
}


class OwnTokens:
    """Tokens with which clients that came by anycast return to this very process, by its own name.

    Signed with a key that this process makes and that never leaves it: they are of use nowhere else. A client that
    brings one sends no API key, as clients drop it across hosts; the law is evaluated again.
    """

    def __init__(self, region: str, authenticator: KeyAuthenticator, clock: Clock) -> None:
        keys = {_OWN: token_hex(32).encode()}
        self._region, self._authenticator, self._clock = region, authenticator, clock
        self._signer = redirect_token.RedirectTokenSigner(keys, _OWN, region)
        self._verifier = redirect_token.RedirectTokenVerifier(keys, region, _OWN)

    def url(
        self, request: Request, decision_id: str, epoch: int, base: str, target: bytes, caller: Caller | None = None
    ) -> str:
        """`base` and `target`, a request's, with a token in the query."""
        now_ms = self._clock.now() * 1e3
        token = self._signer.sign(
            redirect_token.RedirectToken(
                audience=self._region, entry_region=self._region, issuer="", tenant=request.tenant, lawful=(),
                epoch=epoch, priority=request.priority, deadline_ms=max(0.0, request.deadline * 1e3 - now_ms),
                expires_ms=now_ms + redirect_token.LIFE_MS, decision_id=decision_id, narrow=request.narrow,
                key=request.key, holder=_OWN, path=_path(target), **_issued(caller),
            )
        )  # fmt: skip
        return redirect_token.joined(base, target, token)

    def caller(self, token: bytes, path: bytes) -> Caller | Reply:
        """The caller that a token vouches for, as its API key would; or the refusal."""
        claims = self._verifier.use(token, self._clock.now() * 1e3, path)
        if claims is outcome.NO_BUFFER:
            detail = "too many redirected requests at once: ask the entry again"
            return answers.refusal(outcome.NO_BUFFER, detail, retry_after_s=1.0)
        if isinstance(claims, Outcome):
            return answers.refusal(claims, _DETAILS[claims])
        return self._authenticator.vouched(claims)


class RedirectTokens:
    """Issues redirect tokens."""

    def __init__(self, signer: RedirectTokenSigner, flow: GlobalFlow, clock: Clock) -> None:
        self._signer, self._flow, self._clock = signer, flow, clock

    def resign(self, signer: RedirectTokenSigner) -> None:
        """Use the keys of this signer from now on."""
        self._signer = signer

    def url(
        self, request: Request, decision_id: str, forward: Forward, base: str, target: bytes,
        caller: Caller | None = None,
    ) -> str:  # fmt: skip
        """`base` and `target`, a request's, with a token in the query. The instance is the one at the address."""
        instances = self._flow.regions.view.regions[forward.target].instances
        instance = next(i for i in instances if i.tier == forward.address)  # decided by this very view
        now_ms, promised_ms = self._clock.now() * 1e3, forward.promised_ttft_ms
        wanted_by = request.first_token_by
        token = self._signer.sign(
            redirect_token.RedirectToken(
                audience=forward.target,
                entry_region=self._flow.config.region,
                issuer="",  # what the client brings is not acknowledged to us: see global_lb.routing.redirect
                tenant=request.tenant,
                lawful=tuple(sorted(forward.lawful or ())),
                epoch=self._flow.law.epoch,
                priority=request.priority,
                deadline_ms=max(0.0, request.deadline * 1e3 - now_ms),
                expires_ms=now_ms + instance.clock_offset_ms + redirect_token.LIFE_MS,
                decision_id=decision_id,
                promised_ttft_ms=None if promised_ms is None else min(promised_ms, BUDGET_MAX_MS),
                narrow=request.narrow,
                key=request.key,
                holder=redirect_token.holder(instance.name, instance.incarnation),
                ttft_ms=None if wanted_by is None else max(0.0, wanted_by * 1e3 - now_ms),
                path=_path(target),
                **_issued(caller),
            )
        )
        return redirect_token.joined(base, target, token)


def _path(target: bytes) -> str:
    return target.partition(b"?")[0].decode("latin-1")


def _issued(caller: Caller | None) -> dict[str, Any]:
    """What a token says of a key that was issued: it is for no more at the address that the client is sent to."""
    if caller is None:
        return {}
    return {
        "key_id": caller.key_id, "models": caller.models, "user": caller.user, "priority_max": caller.priority_max,
        "explain": caller.explain,
    }  # fmt: skip
