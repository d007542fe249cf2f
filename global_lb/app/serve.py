"""The global tier's part of serving a request: the hop token that it signs, headers to clients, what is recorded of it.

`farhop.service.authentication.authenticator` authenticates callers. Never picks a region: the flow does.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from farhop.balance import model_steps, outcome
from farhop.identity import hop_token
from farhop.identity.hop_token import BUDGET_MAX_MS, LIFE_MS, HopClaims, request_line
from farhop.identity.hop_token import HEADER as HOP_HEADER
from farhop.relay.http.head import EXPLAIN
from farhop.relay.upstream.attempt import AttemptRun
from farhop.service.admission.routing_keys import VERSION_HEADER
from farhop.service.observability.request_telemetry import InstrumentedTier
from farhop.telemetry import attributes as a
from global_lb.app.receipt import receipt, tail

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Forward
    from farhop.balance.outcome import Outcome
    from farhop.identity.hop_token import HopSigner
    from farhop.relay.active import ActiveRequest, Attempt
    from farhop.service.observability.request_telemetry import RequestContext, RequestTelemetry
    from farhop.service.process.clock import Clock
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from global_lb.app.redirect_token import OwnTokens, RedirectTokens
    from global_lb.fleet.view import Instance
    from global_lb.routing.flow import GlobalFlow
    from global_lb.routing.pick import Decision


class GlobalTier(InstrumentedTier):
    """The global tier's part of what the relay writes."""

    def __init__(
        self,
        telemetry: RequestTelemetry,
        log: Throttled,
        *,
        flow: GlobalFlow,
        signer: HopSigner,
        instance: str,
        clock: Clock,
        redirect_tokens: RedirectTokens | None = None,
        mutual: Callable[[str], bool] = lambda _region: False,
    ) -> None:
        """`mutual`: whether a region and we authenticate each other by TLS."""
        super().__init__(telemetry, log)
        self.concluded, self.attempt_over = telemetry.concluded, self._attempt_over
        self.token_rejected_at: dict[str, float] = {}  # by region: when one last refused what we signed
        self.other_answered_at: dict[str, float] = {}  # by region: when another than it last answered at its address
        self._redirect_tokens, self._mutual = redirect_tokens, mutual
        self.own_tokens: OwnTokens | None = None
        self._flow, self._signer, self._instance, self._clock = flow, signer, instance, clock

    def resign(self, signer: HopSigner, mutual: Callable[[str], bool]) -> None:
        """Sign with another's keys from now on; `mutual` is as configured now."""
        self._signer, self._mutual = signer, mutual

    def _attempt_over(self, active: ActiveRequest, attempt: Attempt, reason: Outcome) -> None:
        """See relay.Tier. A region that rejects all our tokens looks well otherwise, as does one whose address another
        has: so it is logged."""
        self.telemetry.attempt_over(active, attempt, reason)
        if reason is outcome.HOP_REJECTED:
            self.token_rejected_at[attempt.target] = self._clock.now()
            problem = "it refuses our hop token; give both the same key (`farhop check` takes both files together)"
            self._log.error("hop token rejected", attempt.target, region_asked=attempt.target, problem=problem)
        elif reason is outcome.NO_ENGINE_THERE and isinstance(attempt, AttemptRun) and not attempt.is_refused:
            self.other_answered_at[attempt.target] = self._clock.now()
            forward = active.forward
            address = "" if forward is None else str(forward.address)
            problem = (
                f"something else answers at its tier address {address}: an answer does not name the region in "
                "`x-farhop-region`; see what listens there, or which proxy before it answers itself or drops the header"
            )
            self._log.error(
                "another answers for a region", attempt.target, region_asked=attempt.target, problem=problem
            )

    def forwarded(self, active: ActiveRequest) -> None:
        """See relay.Tier. What was sent past a hot region is counted."""
        self.telemetry.forwarded(active)
        decision: Decision | None = active.reasons
        if decision is not None and decision.chosen is not None and decision.spilled_from is not None:
            self.telemetry.spilled(decision.chosen.region)

    def upstream_headers(self, active: ActiveRequest) -> bytes:
        """The hop token, stamped in the receiver's own clock, a version asked for, and the trace context.

        Each attempt, and each time it is sent again, has a token of its own: one is good for one use.
        """
        context: RequestContext = active.context
        forward, request, law = active.forward, active.request, self._flow.law
        assert forward is not None
        narrow = request.narrow
        if request.alias in law.bound_models:  # the region does not know the name, and the rule may be a later law's
            narrow = model_steps.narrowed_by_name(request, law)
        now_ms, promised_ms = self._clock.now() * 1e3, forward.promised_ttft_ms
        head, body, mutual = active.exchange.head, active.body, self._mutual(forward.target)
        instance = self._instance_of(forward)
        with_body = not mutual and instance is not None and instance.hop_version >= hop_token.READ
        if active.target:
            context.body_sha256 = b""  # of what its client sent; a continuation is another
        if not (mutual or with_body or context.body_sha256):
            context.body_sha256 = hashlib.sha256(body).digest()
        token = self._signer.sign(
            HopClaims(
                audience=forward.target,
                entry_region=self._flow.config.region,
                issuer=self._instance,
                tenant=request.tenant,
                lawful=tuple(sorted(forward.lawful or ())),
                epoch=law.epoch,
                priority=request.priority,
                deadline_ms=max(0.0, request.deadline * 1e3 - now_ms),
                expires_ms=now_ms + (0.0 if instance is None else instance.clock_offset_ms) + LIFE_MS,
                decision_id=context.decision_id,
                promised_ttft_ms=None if promised_ms is None else min(promised_ms, BUDGET_MAX_MS),
                narrow=narrow,
                key=request.key,
                body=b"" if mutual or with_body else context.body_sha256,
                waited_ms=min(forward.waited_s * 1e3, BUDGET_MAX_MS),
                attempt=f"{request.id}/{forward.attempt}",
                ttft_ms=None if forward.first_token_by is None else max(0.0, forward.first_token_by * 1e3 - now_ms),
            ),
            request_line(head.method, active.target or head.target, len(body)),
            body if with_body else None,
        )
        version = request.version.encode()
        if active.target and active.progress is not None:
            version = version or active.progress.version  # what began it goes on with it
        pin = b"%b: %b\r\n" % (VERSION_HEADER, version) if version else b""
        return HOP_HEADER + b": " + token + b"\r\n" + pin + self.telemetry.upstream_context(context)

    def redirect_url(self, active: ActiveRequest, base: str) -> str:
        """See relay.Tier. The instance's own, with a token for one use in it."""
        context: RequestContext = active.context
        forward, target = active.forward, active.exchange.head.target
        if forward is None:
            assert self.own_tokens is not None  # the flow knows of a name of ours only where main gave them
            return self.own_tokens.url(
                active.request, context.decision_id, self._flow.law.epoch, base, target, context.caller
            )
        assert self._redirect_tokens is not None  # the flow redirects only where main gave them
        return self._redirect_tokens.url(active.request, context.decision_id, forward, base, target, context.caller)

    def _instance_of(self, forward: Forward) -> Instance | None:
        """The instance that an attempt goes to, as it reports itself; behind a shared gateway, the one with the oldest
        build.
        """
        region, found = self._flow.regions.view.regions.get(forward.target), None
        for instance in region.instances if region is not None else ():
            if instance.tier == forward.address and (found is None or instance.hop_version < found.hop_version):
                found = instance
        return found

    def answer_headers(self, active: ActiveRequest) -> bytes:
        """Where it was served, under which decision, and why, for a client that asks and may know."""
        context: RequestContext = active.context
        forward = active.forward
        region = b"x-farhop-region: " + forward.target.encode() + b"\r\n" if forward is not None else b""
        head, extra = active.exchange.head, b""
        if EXPLAIN in head.known:
            extra = receipt(head, active.request, context.caller, active.reasons, self._flow.law.topology)
        if context.charge is not None:
            extra += context.charge.headers()
        given = context.given
        if given is not None:
            if forward is None and given.region:
                region = b"x-farhop-region: " + given.region.encode() + b"\r\n"
            region += b"x-farhop-cache: " + given.header.encode() + b"\r\n"
        if active.request.alias:
            region += b"x-farhop-model: " + active.request.model.encode() + b"\r\n"
        return region + b"x-farhop-decision: " + context.decision_id.encode() + b"\r\n" + extra

    def answer_tail(self, active: ActiveRequest) -> bytes:
        """How it went, behind a stream, for a client that asks and may know."""
        context: RequestContext = active.context
        elapsed_ms = (active.began_at - context.arrived_at) * 1e3
        law, attempts = self._flow.law, context.attempts
        return tail(active.exchange.head, active.request, context.caller, law.topology, attempts, elapsed_ms)


class DecisionReasons:
    """Describes a Decision in spans and records."""

    def __init__(self, entry_region: str) -> None:
        self._entry_region = entry_region

    def attributes(self, decision: Decision) -> dict[str, Value]:
        """The attributes of a decision's span."""
        unit = decision.route.policy.unit
        attributes: dict[str, Value] = {
            a.ENTRY_REGION: self._entry_region,
            a.EPOCH: decision.verdict.epoch,
            a.POLICY: decision.route.policy.name,
            a.LAWFUL: sorted(decision.verdict.lawful),
            a.REASONS: [*decision.notes, *(f"{s.region} {s.score:.4g} {unit}" for s in decision.ranked[:16])],
        }
        if decision.chosen is not None:
            chosen = decision.chosen
            attributes |= {
                a.REGION: chosen.region,
                a.RTT_MS: chosen.rtt_ms,
                a.WAIT_MS: chosen.wait_ms,
                a.HIT_TOKENS: round(chosen.hit_tokens),
                a.PROMISED_TTFT_MS: chosen.ttft_ms,
                a.SPILL: decision.spilled_from is not None,
            }
        return attributes

    def record(self, decision: Decision) -> dict[str, Any]:
        """The record of a decision that `explain` shows."""
        terms = decision.terms()
        return {
            "policy": decision.route.policy.name,
            "unit": decision.route.policy.unit,
            "notes": list(decision.notes),
            "law_epoch": decision.verdict.epoch,
            "entry_region": self._entry_region,
            "spilled_from": decision.spilled_from,
            "ties": dict(decision.ties),
            "chosen": decision.chosen.region if decision.chosen is not None else None,
            "candidates": [
                {
                    "region": s.region,
                    "score": s.score,
                    "terms_ms": terms.get(s.region, {}),
                    "ttft_ms": s.ttft_ms,
                    "rtt_ms": s.rtt_ms,
                    "upload_ms": s.upload_ms,
                    "wait_ms": s.wait_ms,
                    "hit_tokens": s.hit_tokens,
                    "uncached_tokens": s.uncached_tokens,
                    "prefill_ms": s.prefill_ms,
                    "tpot_ms": s.tpot_ms,
                    "decode_ms": s.decode_ms,
                    "interference_ms": s.interference_ms,
                    "stall_ms": s.stall_ms,
                    "behind_ms": s.behind_ms,
                    "residual_ms": s.residual_ms,
                    "slots_free": s.slots_free,
                    "headroom": s.headroom,
                    "penalty_ms": s.penalty_ms,
                    "hot": s.hot,
                    "bias_ms": s.bias_ms,
                    "usd": s.usd,
                }
                for s in decision.ranked
            ],
            "not_serving": dict(decision.absent),
            "unlawful": dict(decision.verdict.excluded),
        }

    def predicted_hit(self, decision: Decision) -> tuple[float, str]:
        """The predicted cache hit of the chosen region. Regions report their caches as nodes of the trie."""
        return (decision.chosen.hit_tokens if decision.chosen is not None else 0.0), "trie"

    def predicted_ttft_ms(self, decision: Decision) -> float | None:
        """The wire, the wait and the prefill there, and what first tokens took longer than that of late."""
        return decision.chosen.ttft_ms if decision.chosen is not None else None
