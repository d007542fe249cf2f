"""The regional tier's part of serving: authentication, headers, and reports to the operator.

There are two listeners: the tier listener takes hop tokens of the global tier; the client listener, if configured,
takes API keys and evaluates the law itself (`farhop.service.authenticator`). Never picks a replica: the flow does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.balance import model_steps, outcome
from farhop.balance.outcome import Outcome
from farhop.identity.hop_token import HEADER as HOP_HEADER
from farhop.identity.hop_token import request_line
from farhop.relay import answers
from farhop.service.admin import composed
from farhop.service.authenticator import CALLERS_MAX, Caller, narrowed, recorded
from farhop.service.lawbook import LawBook
from farhop.service.request_telemetry import InstrumentedTier
from farhop.store.documents.report import TEXT_LIMIT
from farhop.store.kept import notice
from farhop.telemetry import attributes as a
from farhop.telemetry.release import release
from regional_lb.app.redirect_token import RETRY_AFTER_S, TenantTerms, terms_of, vouched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.machine import Request, Usage
    from farhop.balance.model_facts import ModelFacts
    from farhop.identity.hop_token import HopVerifier
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.relay.formats.prompt import Preferences
    from farhop.relay.http.head import Head
    from farhop.service.admin import Question
    from farhop.service.authenticator import KeyAuthenticator
    from farhop.service.clock import Clock
    from farhop.service.ingress import Ingress
    from farhop.service.request_telemetry import RequestContext, RequestTelemetry
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from regional_lb.app.model_names import ModelNames
    from regional_lb.app.overrides import Overrides
    from regional_lb.app.refusals import RefusalBook
    from regional_lb.mesh.peers import Peers
    from regional_lb.scheduler.flow import RegionalFlow
    from regional_lb.scheduler.pick import Pick

QUEUES_SHOWN_MAX = 64  # lines of band and tenant, the longest first
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
        self._under = flow.law
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
        if claims.epoch < law.epoch:
            # Whatever the model, which is in the body: the body need not be read to refuse it.
            why = law.verdict(claims.tenant, "", narrow=claims.narrow, key=claims.key).why_not(region)
            if why is not None:
                return answers.refusal(outcome.UNLAWFUL_UNREAD, f"region {region}: {why}")
        if law is not self._under:
            self._under, self._terms = law, {}
        who = claims.tenant, claims.key
        stands = None if claims.narrow else self._terms.get(who)
        if stands is None:
            stands = terms_of(law, claims.tenant, claims.narrow, region, claims.key)
            if not claims.narrow and len(self._terms) < CALLERS_MAX:
                self._terms[who] = stands
        return vouched(claims, stands, issuer, claims.attempt, body_mac, charged=True)

    def with_preferences(self, caller: Caller, preferences: Preferences, lines: bytes) -> Caller:  # noqa: ARG002
        """Within the residency that the body names, once more: by the map of this region."""
        return narrowed(self._flow.law, caller, preferences)

    def shut_out(self, caller: Caller) -> None:
        """See Authenticator. Where a request came in is not asked here, and admission asks for the rest anew."""

    def models(self, _caller: Caller) -> dict[str, ModelFacts]:
        """The models served here."""
        view = self._flow.fleet.view
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
        if context.reserved is not None:
            replica += context.reserved.headers()
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
            a.REASONS: [f"{s.replica} {s.score:.1f} {decision.policy.unit}" for s in decision.field[:16]],
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
                for s in decision.field
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


class RegionalAdmin:
    """What a regional balancer provides to its admin port. `overrides` and `peers` are shown in its status."""

    def __init__(
        self,
        instance: str,
        *,
        flow: RegionalFlow,
        authenticator: KeyAuthenticator,
        ingress: Ingress,
        clock: Clock,
        overrides: Sequence[Overrides | RefusalBook | ModelNames] = (),
        peers: Peers | None = None,
        laws: LawBook | None = None,
        configuration: Callable[[], dict[str, Any]] = dict,
        problems: Callable[[str], list[str]] = lambda _name: [],
    ) -> None:
        self._problems = problems
        self._instance, self._flow, self._authenticator, self._ingress, self._clock = (
            instance,
            flow,
            authenticator,
            ingress,
            clock,
        )
        self._overrides, self._peers = overrides, peers
        self._configuration = configuration
        self._laws = laws if laws is not None else LawBook({}, flow.law, lambda _: None, lambda _: None)
        self.stopping = False
        self.kept: Callable[[], list[dict[str, Any]]] = list  # what main keeps of etcd on disk
        self.ignored: Callable[[], list[dict[str, Any]]] = list  # what in etcd does not count by our signing keys
        self.issued: Callable[[], dict[str, Any]] = dict  # which API keys main follows
        self.limits: Callable[[], dict[str, Any]] = dict  # what tenants may use
        self.accounts: Callable[[], dict[str, Any]] = dict  # what is written down of requests
        # Where replicas come from, and what was left out; main says it, since the flow does not know.
        self.origins: Callable[[], dict[str, Any]] = dict
        self.newest_epoch: Callable[[], int] = int  # of the laws that hop tokens named

    def ready(self) -> bool:
        """Whether some replica can take requests, the peers have sent their state, and this process is not shutting
        down.
        """
        now = self._clock.now()
        flow = self._flow
        if self.stopping or (self._peers is not None and not self._peers.warm):
            return False
        return any(len(flow.wait_estimate.able(model, now)) for model in flow.fleet.view.by_model)

    def notice(self) -> str:
        """See TierAdmin."""
        return notice(self.kept())

    def status(self) -> dict[str, Any]:
        """Replicas with health and load, and the queue."""
        flow, now = self._flow, self._clock.now()
        return {
            "tier": "regional",
            "region": flow.config.region,
            "instance": self._instance,
            "version": release(),
            "law_epoch": flow.law.epoch,
            "law": {**self._laws.status(), "newest_named": self.newest_epoch()},
            "configuration": self._configuration(),
            "policies": flow.policies.status(),
            "splits": flow.splits.status(flow.fleet.view.by_variant),
            "overrides": {one.what: one.status() for one in self._overrides},
            "kept": self.kept(),
            "ignored": self.ignored(),
            "keys": self.issued(),
            "limits": self.limits(),
            "accounts": self.accounts(),
            "under_way": flow.under_way,
            "queued_requests": len(flow.queue),
            "queued_tokens": flow.queue.tokens,
            "queue": [
                {"priority": band, "tenant": tenant, "requests": n}
                for (band, tenant), n in flow.queue.by_tenant().most_common(QUEUES_SHOWN_MAX)
            ],
            "trie_nodes": flow.fleet.trie.nodes,
            "predicted_hit_tokens": flow.learning.predicted_tokens,
            "actual_hit_tokens": flow.learning.actual_tokens,
            "scaling": flow.scaling.status(),
            "modes": {model: flow.fleet.mode(model, now) for model in sorted(flow.fleet.view.by_model)},
            "ejections": dict(flow.fleet.standing.ejections),
            "peers": self._peers.status() if self._peers is not None else [],
            "replicas": [self._replica(name, now) for name in sorted(flow.fleet.view.replicas)],
            **self.origins(),
        }

    def _replica(self, name: str, now: float) -> dict[str, Any]:
        flow = self._flow
        replica, health, load = (
            flow.fleet.view.replicas[name],
            flow.fleet.standing.read(name, now),
            flow.fleet.ledger.load(name),
        )
        sample, speed, shares = replica.sample, flow.fleet.speeds[name], flow.fleet.shares
        total = load if shares is None else shares.with_others(name, load)
        return {
            "replica": name,
            "address": str(replica.address),
            "models": sorted(replica.models),
            "version": replica.version,
            "models_missing": sorted(replica.missing),
            "role": replica.role,
            "state": health.state,
            "why": health.why,
            "problems": self._problems(name),
            "until_s": health.until - now if health.until is not None else None,
            "share": flow.fleet.standing.offered(name, now),
            "failing_share": flow.fleet.standing.outliers.failing(name),
            "owned": shares is None or shares.owns(name),
            "in_flight": load.in_flight,
            "in_flight_elsewhere": total.in_flight - load.in_flight,
            "slots": replica.slots,
            "prefill_tokens": load.prefill_tokens,
            "kv_tokens": load.kv_tokens,
            "kv_tokens_total": replica.kv_tokens,
            "engine_waiting": sample.waiting if sample is not None else None,
            "engine_running": sample.running if sample is not None else None,
            "engine_kv_usage": sample.kv_usage if sample is not None else None,
            "engine_hit_share": sample.hit_share if sample is not None else None,
            "reports_cached_tokens": flow.fleet.unreported_hits.reported(name),
            "sample_age_s": now - sample.at if sample is not None else None,
            "prefill_ms_per_token": speed.prefill_ms_per_token,
            "tpot_ms": speed.tpot_at(total.in_flight + 1.0),
            "speed_uncertainty": speed.uncertainty,
            "speed_sample_age_s": now - speed.sampled_at if speed.sampled_at is not None else None,
            "slow": flow.fleet.speeds.slow(name, total.in_flight, now),
            "adapters_loaded": list(flow.fleet.adapters.loaded(name)),
            "kv_events": flow.fleet.blocks.events_state(name),
        }

    def compose(self, question: Question) -> Request:
        """See TierAdmin."""
        return composed(self._ingress, self._authenticator, question)

    def explain(self, request: Request) -> dict[str, Any]:
        """The replica that a request would be sent to now, and why."""
        flow = self._flow
        region = flow.config.region
        why = flow.law.request_verdict(request).why_not(region)
        served = request.model in flow.fleet.view.by_model
        need = flow.wait_estimate.need_of(request)
        choice = flow.wait_estimate.consider(request, need, self._clock.now()) if served else None
        return {
            "region": region,
            "model": request.model,
            "notes": [model_steps.alias_note(request)] if request.alias else [],
            "unlawful": why,
            "reasons": PickReasons().record(choice) if choice is not None else None,
            "law": self._laws.status(),
        }

    def scaling(self) -> dict[str, dict[str, int]]:
        """See TierAdmin."""
        return {self._flow.config.region: self._flow.scaling.desired()}

    def law(self) -> dict[str, Any]:
        """See TierAdmin."""
        return self._laws.document()

    def topology(self) -> dict[str, Any]:
        """See TierAdmin."""
        return self._laws.topology()
