"""The URL at which a client that is redirected, or that asked for advice, finds its region: with a token for one use.

The token is for one process of the region and expires in that one's clock. Never logs, never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.identity import redirect_token
from farhop.identity.hop_token import BUDGET_MAX_MS

if TYPE_CHECKING:
    from farhop.balance.machine import Forward, Request
    from farhop.identity.redirect_token import RedirectTokenSigner
    from farhop.service.clock import Clock
    from global_lb.routing.flow import GlobalFlow


class RedirectTokens:
    """Makes them."""

    def __init__(self, signer: RedirectTokenSigner, flow: GlobalFlow, clock: Clock) -> None:
        self._signer, self._flow, self._clock = signer, flow, clock

    def resign(self, signer: RedirectTokenSigner) -> None:
        """Sign with another's keys from now on."""
        self._signer = signer

    def url(self, request: Request, decision_id: str, forward: Forward, base: str, target: bytes) -> str:
        """`base` and `target`, a request's, with a token in the query. The instance is the one at the address."""
        instances = self._flow.view.regions[forward.target].instances
        instance = next(i for i in instances if i.tier == forward.address)  # decided by this very view
        now_ms, promised_ms = self._clock.now() * 1e3, forward.promised_ttft_ms
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
            )
        )
        return redirect_token.joined(base, target, token)
