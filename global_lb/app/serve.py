"""The global tier's part of serving: the hop token that it signs, headers to clients, reports to its operator.

`farhop.service.authenticator` authenticates callers. Never picks a region: the flow does.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from farhop.balance import model_steps, outcome
from farhop.identity import hop_token
from farhop.identity.hop_token import BUDGET_MAX_MS, LIFE_MS, HopClaims, request_line
from farhop.identity.hop_token import HEADER as HOP_HEADER
from farhop.relay.http.head import EXPLAIN
from farhop.service.admin import composed
from farhop.service.request_telemetry import InstrumentedTier
from farhop.service.routing_keys import VERSION_HEADER
from farhop.store.kept import notice
from farhop.telemetry import attributes as a
from farhop.telemetry.release import release
from global_lb.app.receipt import receipt, tail

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Forward, Request
    from farhop.balance.outcome import Outcome
    from farhop.identity.hop_token import HopSigner
    from farhop.relay.active import ActiveRequest, Attempt
    from farhop.service.admin import Question
    from farhop.service.authenticator import KeyAuthenticator
    from farhop.service.clock import Clock
    from farhop.service.ingress import Ingress
    from farhop.service.lawbook import LawBook
    from farhop.service.request_telemetry import RequestContext, RequestTelemetry
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from global_lb.app.overrides import RoutingOverrides
    from global_lb.app.redirect_token import OwnTokens, RedirectTokens
    from global_lb.fleet.view import Instance, Region
    from global_lb.links.watch import Watcher
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
        self._redirect_tokens, self._mutual = redirect_tokens, mutual
        self.own_tokens: OwnTokens | None = None
        self._flow, self._signer, self._instance, self._clock = flow, signer, instance, clock

    def resign(self, signer: HopSigner, mutual: Callable[[str], bool]) -> None:
        """Sign with another's keys from now on; `mutual` is as configured now."""
        self._signer, self._mutual = signer, mutual

    def _attempt_over(self, active: ActiveRequest, attempt: Attempt, reason: Outcome) -> None:
        """See relay.Tier. A region that rejects all our tokens looks well otherwise, so it is logged."""
        self.telemetry.attempt_over(active, attempt, reason)
        if reason is outcome.HOP_REJECTED:
            self.token_rejected_at[attempt.target] = self._clock.now()
            problem = "it refuses our hop token; give both the same key (`farhop check` takes both files together)"
            self._log.error("hop token rejected", attempt.target, region_asked=attempt.target, problem=problem)

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
        if context.reserved is not None:
            extra += context.reserved.headers()
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
            a.REASONS: [*decision.notes, *(f"{s.region} {s.score:.4g} {unit}" for s in decision.field[:16])],
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
                for s in decision.field
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


class GlobalAdmin:
    """What a global balancer provides to its admin port."""

    def __init__(
        self,
        instance: str,
        *,
        flow: GlobalFlow,
        authenticator: KeyAuthenticator,
        ingress: Ingress,
        watcher: Watcher,
        overrides: RoutingOverrides,
        clock: Clock,
        laws: LawBook,
        configuration: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._instance, self._flow, self._authenticator, self._ingress = instance, flow, authenticator, ingress
        self._configuration = configuration
        self._watcher, self._overrides, self._clock, self._laws = watcher, overrides, clock, laws
        self.stopping = False
        self.kept: Callable[[], list[dict[str, Any]]] = list  # what main keeps of etcd on disk
        self.ignored: Callable[[], list[dict[str, Any]]] = list  # what in etcd does not count by our signing keys
        self.published: Callable[[], list[dict[str, Any]]] = list  # why operators find no address of ours in a hub
        self.issued: Callable[[], dict[str, Any]] = dict  # which API keys main follows
        self.limits: Callable[[], dict[str, Any]] = dict  # what tenants may use
        self.accounts: Callable[[], dict[str, Any]] = dict  # what is written down of requests
        self.token_rejected_at: dict[str, float] = {}  # see GlobalTier

    def ready(self) -> bool:
        """Some region can take work, and we are not on our way out."""
        now = self._clock.now()
        return not self.stopping and any(
            h.read(now).state in ("up", "suspect") for h in self._flow.regions.liveness.values()
        )

    def leads_somewhere(self) -> bool:
        """Whether some region that is up is lawful for any tenant: otherwise clients are better off at another
        entry."""
        now, law = self._clock.now(), self._flow.law
        up = {name for name, life in self._flow.regions.liveness.items() if life.read(now).state in ("up", "suspect")}
        return any(not up.isdisjoint(law.verdict(tenant, "").lawful) for tenant in law.topology.tenants)

    def notice(self) -> str:
        """See TierAdmin."""
        return notice(self.kept())

    def status(self) -> dict[str, Any]:
        """Regions with health and why, wire time, wait."""
        flow, now = self._flow, self._clock.now()
        names = sorted({*flow.regions.view.regions, *flow.regions.liveness} & flow.law.topology.regions.keys())
        return {
            "tier": "global",
            "region": flow.config.region,
            "instance": self._instance,
            "version": release(),
            "law_epoch": flow.law.epoch,
            "law": self._laws.status(),
            "configuration": self._configuration(),
            "kept": self.kept(),
            "published": self.published(),
            "ignored": self.ignored(),
            "keys": self.issued(),
            "limits": self.limits(),
            "accounts": self.accounts(),
            "under_way": flow.under_way,
            "trie_nodes": flow.regions.trie.nodes,
            "store_trouble": self._watcher.store_trouble,
            "hubs": [hub.status() for hub in self._watcher.hubs],
            "policies": flow.routes.policies(),
            "routes": flow.routes.accounts(now),
            "routes_author": self._overrides.author(),
            "operator_overrides": self._overrides.status(),
            "regions": [self._region(name, now) for name in names],
        }

    def _region(self, name: str, now: float) -> dict[str, Any]:
        flow = self._flow
        region, liveness = flow.regions.view.regions.get(name), flow.regions.liveness.get(name)
        health = liveness.read(now) if liveness is not None else None
        cache_hit_calibration, hits = flow.regions.cache_hit_calibration.get(name), flow.regions.hits.get(name)
        return {
            "region": name,
            "state": health.state if health is not None else "down",
            "why": health.why if health is not None else "never heard of",
            "forced": health.forced if health is not None else False,
            "share": health.share if health is not None and health.state == "draining" else None,
            "admitted_share": flow.regions.admitted_share(name, now),
            "pilot_light": flow.regions.scaling.status(name),
            "desired_replicas": flow.regions.scaling.by_region().get(name, {}),
            "override": self._watcher.drains.status(name),
            "rtt_ms": region.rtt_ms if region is not None else None,
            "token_rejected_age_s": now - self.token_rejected_at[name] if name in self.token_rejected_at else None,
            "in_flight": flow.ledger.load(name).in_flight,
            **(_queued(region) if region is not None else {}),
            "cache_hit_calibration": cache_hit_calibration.at(now) if cache_hit_calibration is not None else None,
            "prefix_nodes": flow.regions.trie.count(name) if name in flow.regions.trie else 0,
            "prefix_stream": self._watcher.prefixes.state(name),
            "prefix_behind_s": self._watcher.prefixes.behind_s(name, now),
            "predicted_hit_tokens": hits.predicted_tokens if hits is not None else 0.0,
            "actual_hit_tokens": hits.actual_tokens if hits is not None else 0.0,
            "instances": [_instance(i, now) for i in region.instances] if region is not None else [],
        }

    def compose(self, question: Question) -> Request:
        """See TierAdmin."""
        return composed(self._ingress, self._authenticator, question)

    def explain(self, request: Request) -> dict[str, Any]:
        """The region that a request would be sent to now, and why."""
        decision = self._flow.consider(request, self._clock.now(), request.lawful)
        scaling = self._flow.regions.scaling
        return {
            "model": request.model,
            "reasons": DecisionReasons(self._flow.config.region).record(decision),
            "pilot_lights": {name: scaling.status(name) for name in sorted(scaling.pilots)},
            "law": self._laws.status(),
        }

    def scaling(self) -> dict[str, dict[str, int]]:
        """See TierAdmin."""
        return self._flow.regions.scaling.by_region()

    def law(self) -> dict[str, Any]:
        """See TierAdmin."""
        return self._laws.document()

    def topology(self) -> dict[str, Any]:
        """See TierAdmin."""
        return self._laws.topology()


def _queued(region: Region) -> dict[str, int]:
    """What waits in all of its instances' queues: each has its own."""
    queues = [list(instance.models.values()) for instance in region.instances]
    return {
        "queued_requests": sum(c.queued_requests for models in queues for c in models),
        "queued_tokens": sum(max((c.queued_tokens for c in models), default=0) for models in queues),
    }


def _instance(instance: Instance, now: float) -> dict[str, Any]:
    return {
        "instance": instance.name,
        "tier": str(instance.tier),
        "draining": instance.draining,
        "report_age_s": now - instance.received_at,
        "models": {
            name: {
                "wait_ms": c.wait_ms,
                "foreign_wait_ms": c.foreign_wait_ms,
                "replicas_ready": c.replicas_ready,
                "slots_free": c.slots_free,
                "used_share": c.used_share,
                "headroom_foreign_tokens": c.headroom_foreign_tokens,
                "prefill_ms_per_token": c.prefill_ms_per_token,
                "tpot_ms": c.tpot_ms,
            }
            for name, c in instance.models.items()
        },
    }
