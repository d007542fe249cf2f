"""The regional tier's part of serving a request: its hop token, headers to engines and clients, what is recorded of it.

There are two listeners: the tier listener takes hop tokens of the global tier; the client listener, if configured,
takes API keys and evaluates the law itself (`farhop.service.authentication.authenticator`). Never picks a replica: the
flow does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity.hop_token import HEADER as HOP_HEADER
from farhop.identity.hop_token import request_line
from farhop.relay import answers
from farhop.service.authentication.authenticator import CALLERS_MAX, Caller, narrowed, recorded
from farhop.service.observability.request_telemetry import InstrumentedTier
from farhop.store.documents.report import TEXT_LIMIT
from farhop.telemetry import attributes as a
from regional_lb.app.redirect_token import RETRY_AFTER_S, TenantTerms, terms_of, vouched

if TYPE_CHECKING:
    from farhop.balance.machine import Usage
    from farhop.balance.model_facts import ModelFacts
    from farhop.identity.hop_token import HopVerifier
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.relay.formats.prompt import Preferences
    from farhop.relay.http.head import Head
    from farhop.service.observability.request_telemetry import RequestContext, RequestTelemetry
    from farhop.service.process.clock import Clock
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from regional_lb.scheduler.flow import RegionalFlow
    from regional_lb.scheduler.pick import Pick

_HOP_DETAILS = {
    outcome.HOP_MISSING: "this listener is for the global tier: a hop token is required",
    outcome.HOP_FORGED: "the hop token is not genuine",
    outcome.HOP_EXPIRED: "the hop token has expired",
    outcome.HOP_MISADDRESSED: "the hop token is addressed to another region",
    outcome.HOP_USED: "the hop token was used already",
    outcome.NO_BUFFER: "too many requests at once to remember which hop tokens were used",
}
_UNBOUND = "the hop token names no body: this listener asks for no certificate; give it tier.tls.client_ca_file"


class HopAuthenticator:
    """Callers by hop token. `newest_epoch` is the latest law that a token was signed under, 0 before the first.

    `names_body`: a token must, as no mutual TLS keeps others from sending it with another body.
    """

    def __init__(self, verifier: HopVerifier, flow: RegionalFlow, clock: Clock, *, names_body: bool) -> None:
        self._verifier, self._flow, self._clock, self._names_body = verifier, flow, clock, names_body
        self.newest_epoch = 0
        self._terms_law = flow.law
        self._terms: dict[tuple[str, str], TenantTerms] = {}  # by tenant and key, of requests that narrow nothing

    def caller(self, head: Head) -> Caller | Reply:
        """The caller for whom the global tier asks. Admission evaluates the law here again."""
        request = request_line(head.method, head.target, head.content_length)
        token = head.known.pop(HOP_HEADER, None)  # it is not needed any more
        admitted = self._verifier.admit(token, self._clock.now() * 1e3, request)
        if isinstance(admitted, Outcome):
            retry_after_s = RETRY_AFTER_S if admitted is outcome.NO_BUFFER else None
            return answers.refusal(admitted, _HOP_DETAILS[admitted], retry_after_s=retry_after_s)
        claims, body_mac = admitted
        issuer = claims.issuer
        if len(issuer) > TEXT_LIMIT or not issuer.isprintable() or not issuer.startswith(f"{claims.entry_region}/"):
            # It will be in our reports: one that cannot be read would silence the region, and nobody acknowledges what
            # another region's balancer sent.
            return answers.refusal(outcome.HOP_FORGED, _HOP_DETAILS[outcome.HOP_FORGED])
        if self._names_body and body_mac is None and not claims.body:
            return answers.refusal(outcome.HOP_FORGED, _UNBOUND)
        region, law = self._flow.config.region, self._flow.law
        self.newest_epoch = max(self.newest_epoch, claims.epoch)
        if law is not self._terms_law:
            self._terms_law, self._terms = law, {}
        tenant_key = claims.tenant, claims.key
        terms = None if claims.narrow else self._terms.get(tenant_key)
        if terms is None:
            terms = terms_of(law, claims.tenant, claims.narrow, region, claims.key)
            if not claims.narrow and len(self._terms) < CALLERS_MAX:
                self._terms[tenant_key] = terms
        if terms.why_not is not None:  # whatever the model, which is in the body: that is not read
            return answers.refusal(outcome.UNLAWFUL_UNREAD, f"region {region}: {terms.why_not}")
        return vouched(claims, terms, issuer, claims.attempt, body_mac, charged=True)

    def with_preferences(self, caller: Caller, preferences: Preferences, lines: bytes) -> Caller:  # noqa: ARG002
        """Within the residency that the body names, once more: by the map of this region."""
        return narrowed(self._flow.law, caller, preferences)

    def shut_out(self, caller: Caller) -> None:
        """See Authenticator. Where a request came in is not asked here, and admission asks for the rest anew."""

    def models(self, _caller: Caller) -> dict[str, ModelFacts]:
        """The models served here."""
        view = self._flow.replicas.view
        return {model: view.facts(model) for model in sorted(view.by_model)}

    def recorded(self, caller: Caller, model: str) -> bool:
        """Whether spans and decisions of a request for this model may be kept here."""
        region = self._flow.config.region
        return recorded(self._flow.law, caller.tenant, model, caller.narrow, region, caller.key)


class RegionalTier(InstrumentedTier):
    """The regional tier's part of what the relay writes."""

    def __init__(self, telemetry: RequestTelemetry, log: Throttled, region: str, engine_key: str | None) -> None:
        super().__init__(telemetry, log)
        self.forwarded = telemetry.forwarded
        self._region = region.encode()
        self._engine_key = f"authorization: Bearer {engine_key}\r\n".encode() if engine_key else b""

    def concluded(self, active: ActiveRequest, reason: Outcome, status: int, usage: Usage | None) -> None:
        """See relay.Tier. What a version served is counted, once."""
        context: RequestContext = active.context
        pick: Pick | None = None if context.over else active.reasons
        self.telemetry.concluded(active, reason, status, usage)
        if pick is not None and pick.version:
            self.telemetry.versioned(active, pick.version, pick.split, status)

    def upstream_headers(self, active: ActiveRequest) -> bytes:
        """The engine's own key, and the trace context."""
        context: RequestContext = active.context
        return self._engine_key + self.telemetry.upstream_context(context)

    def answer_headers(self, active: ActiveRequest) -> bytes:
        """Headers with the region, the decision, the replica (by its name; an address is not for clients) and the
        version that served."""
        forward, replica = active.forward, b""
        if forward is not None and ":" not in forward.target:
            replica = b"x-farhop-replica: " + forward.target.encode() + b"\r\n"
        if forward is not None and forward.prefill is not None and ":" not in forward.prefill.target:
            replica += b"x-farhop-prefill-replica: " + forward.prefill.target.encode() + b"\r\n"
        pick: Pick | None = active.reasons
        if pick is not None and pick.version:
            replica += b"x-farhop-version: " + pick.version.encode() + b"\r\n"
        context: RequestContext = active.context
        decision = context.decision_id.encode()
        if context.charge is not None:
            replica += context.charge.headers()
        if active.request.alias:
            replica += b"x-farhop-model: " + active.request.model.encode() + b"\r\n"
        return b"x-farhop-region: " + self._region + b"\r\nx-farhop-decision: " + decision + b"\r\n" + replica


class PickReasons:
    """Describes a Pick in spans and records."""

    def attributes(self, decision: Pick) -> dict[str, Value]:
        """The attributes of a decision's span."""
        chosen = decision.chosen
        if chosen is None:
            return {}
        pair: dict[str, Value] = {} if decision.prefill is None else {a.PREFILL_REPLICA: decision.prefill.replica}
        return pair | {
            a.REPLICA: chosen.replica,
            a.HIT_TOKENS: round(chosen.hit_tokens),
            a.POLICY: decision.policy.name,
            a.REASONS: [f"{s.replica} {s.score:.1f} {decision.policy.unit}" for s in decision.ranked[:16]],
            **({a.VERSION: decision.version, a.SPLIT: _why(decision)} if decision.version else {}),
        }

    def record(self, decision: Pick) -> dict[str, Any]:
        """The record of a decision that `explain` shows."""
        terms = decision.terms()
        return {
            "policy": decision.policy.name,
            "unit": decision.policy.unit,
            "explored": decision.explored,
            "chosen": decision.chosen.replica if decision.chosen is not None else None,
            "version": decision.version,
            "split": _why(decision),
            "prefill": decision.prefill.replica if decision.prefill is not None else None,
            "candidates": [
                {
                    "replica": s.replica,
                    "score": s.score,
                    "terms_ms": terms.get(s.replica, {}),
                    "hit_tokens": s.hit_tokens,
                    "hit_exact": s.exact,
                    "uncached_tokens": s.uncached_tokens,
                    "work_tokens": s.work_tokens,
                    "backlog_tokens": s.backlog_tokens,
                    "delay_ms": s.delay_ms,
                    "prefill_ms_per_token": s.prefill_ms_per_token,
                    "tpot_ms": s.tpot_ms,
                    "full": s.replica in decision.full,
                }
                for s in decision.ranked
            ],
            "ttft_ms": decision.ttft_ms if decision.chosen is not None else None,
            "residual_ms": decision.residual_ms,
        }

    def predicted_hit(self, decision: Pick) -> tuple[float, str]:
        """The predicted cache hit of the chosen replica, from its own reports or our estimate."""
        chosen = decision.chosen
        if chosen is None:
            return 0.0, "trie"
        # Once it has fetched what another replica computed, it holds the whole prompt.
        tokens = chosen.hit_tokens if decision.prefill is None else chosen.hit_tokens + chosen.uncached_tokens
        return tokens, "exact" if chosen.exact else "trie"

    def predicted_ttft_ms(self, decision: Pick) -> float | None:
        """The predicted time to first token, from when the request is sent to its replica (ms)."""
        return decision.ttft_ms if decision.chosen is not None else None


def _why(decision: Pick) -> str:
    """Why it has its version: "" if no split decided."""
    assigned = decision.assigned
    if assigned is None:
        return ""
    return f"{assigned.why}: {assigned.version}" + (", fallback" if decision.split == "fallback" else "")
