"""`POST /v1/route`: the decision alone, as JSON, for proxies that carry requests themselves (docs/operate).

Nothing is sent and nothing reserved, since a caller that only asks could otherwise make a region look busy. Never
reveals an address inside the fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance import machine, outcome
from farhop.identity.redirect_token import LIFE_MS
from farhop.relay import answers
from farhop.relay.formats import paths
from global_lb.routing import admission

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from farhop.relay.answers import Reply
    from farhop.relay.http.head import Head
    from farhop.service.observability.request_telemetry import RequestContext, RequestTelemetry
    from farhop.service.process.clock import Clock
    from global_lb.app.redirect_token import RedirectTokens
    from global_lb.fleet.table import Scored
    from global_lb.routing.flow import GlobalFlow
    from global_lb.routing.pick import Decision

TOKEN_HEADER = b"x-farhop-token"
RUNNERS_UP_MAX = 64
RETRY_AFTER_S = 2.0
_NO_STORE = b"cache-control: no-store\r\n"


class Advisor:
    """See farhop.service.admission.ingress.Advisor."""

    def __init__(
        self, flow: GlobalFlow, telemetry: RequestTelemetry, redirect_tokens: RedirectTokens, clock: Clock
    ) -> None:
        self._flow, self._telemetry, self._redirect_tokens, self._clock = flow, telemetry, redirect_tokens, clock

    def advise(self, request: Request, context: RequestContext, head: Head) -> Reply:
        """Where it would go now: 200, or the error that the request itself would meet."""
        flow = self._flow
        if not flow.routes.of(request.tenant, request.model).config.advise:
            return answers.refusal(outcome.PATH_NOT_ALLOWED, "decisions are not told for this tenant or model")
        decision = flow.consider(request, self._clock.now(), request.lawful)
        if decision.chosen is None:
            return self._nowhere(request, decision)
        self._telemetry.advised(context, request, decision)
        target = head.target[len(paths.ROUTE) :]
        target = target if target.startswith(b"/") else head.path + target
        wanted = head.get(TOKEN_HEADER) is not None
        url = self._url(request, context, decision, target, with_token=wanted)
        body = {
            "decision": context.decision_id,
            "region": decision.chosen.region,
            "url": url,
            **({"model": request.model} if request.alias else {}),
            "expires_in_ms": LIFE_MS if wanted and url is not None else None,
            **_reasons(decision),
        }
        region, decided = decision.chosen.region.encode(), context.decision_id.encode()
        extra = b"x-farhop-region: %b\r\nx-farhop-decision: %b\r\n%b" % (region, decided, _NO_STORE)
        return answers.Reply(200, msgspec.json.encode(body), outcome.ADVISED, extra)

    def _nowhere(self, request: Request, decision: Decision) -> Reply:
        verdict = decision.verdict
        if not verdict.lawful:
            return answers.refusal(outcome.UNLAWFUL, admission.summary(verdict, verdict.lawful))
        offered = self._flow.regions.view.models(frozenset(self._flow.regions.view.regions))
        if offered and request.model not in offered:
            detail = f"the model `{request.model[:128]}` does not exist or no region serves it"
            return answers.refusal(outcome.UNKNOWN_MODEL, detail)
        why = admission.refused_by({}, decision.absent)
        return answers.refusal(outcome.NO_REGION, why, retry_after_s=RETRY_AFTER_S)

    def _url(
        self, request: Request, context: RequestContext, decision: Decision, target: bytes, *, with_token: bool
    ) -> str | None:
        """The region's URL for clients; None if it admits none of this tenant's."""
        chosen, flow = decision.chosen, self._flow
        assert chosen is not None
        if request.alias:
            return None  # regions do not know the name that is in its body
        instance = flow.regions.best_instance(chosen.region, request.model)
        if instance is None or not flow.redirects.open_to(request.tenant, instance, flow.law):
            return None
        base = instance.client_url
        if not with_token:
            return base + target.decode("latin-1")
        lawful = decision.verdict.lawful
        forward = machine.Forward(request.id, 1, chosen.region, instance.tier, chosen.bare_ttft_ms, lawful)
        return self._redirect_tokens.url(request, context.decision_id, forward, base, target, context.caller)


def _reasons(decision: Decision) -> dict[str, Any]:
    chosen = decision.chosen
    assert chosen is not None
    others = [one for one in decision.ranked if one.region != chosen.region]
    return {
        "policy": decision.route.policy.name,
        "unit": decision.route.policy.unit,
        "law_epoch": decision.verdict.epoch,
        "notes": list(decision.notes),
        "spilled_from": decision.spilled_from,
        "chosen": _offer(chosen),
        "runners_up": [_offer(one) for one in others[:RUNNERS_UP_MAX]],
        "not_serving": admission.not_serving(decision.absent),
        "unlawful": dict(decision.verdict.excluded),
    }


def _offer(one: Scored) -> dict[str, Any]:
    return {
        "region": one.region,
        "score": one.score,
        "ttft_ms": one.ttft_ms,
        "rtt_ms": one.rtt_ms,
        "upload_ms": one.upload_ms,
        "wait_ms": one.wait_ms,
        "prefill_ms": one.prefill_ms,
        "hit_tokens": one.hit_tokens,
        "tpot_ms": one.tpot_ms,
        "penalty_ms": one.penalty_ms,
        "hot": one.hot,
        "usd": one.usd,
    }
