"""What a regional balancer shows its operators: its replicas with health and why, the queue, where a request would go.

Reads only: it asks the state machine and what feeds it, and changes neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.balance import model_steps
from farhop.service.admin.balancer_admin import BalancerAdmin
from regional_lb.app.serve import PickReasons

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop.balance.machine import Request
    from farhop.service.admin.balancer_admin import ProcessStatus
    from farhop.service.admission.ingress import Ingress
    from farhop.service.authentication.authenticator import KeyAuthenticator
    from farhop.service.law.lawbook import LawBook
    from farhop.service.process.clock import Clock
    from regional_lb.app.model_names import ModelNames
    from regional_lb.app.overrides import Overrides
    from regional_lb.app.refusals import RefusalBook
    from regional_lb.mesh.peers import Peers
    from regional_lb.scheduler.flow import RegionalFlow

QUEUES_SHOWN_MAX = 64  # lines of band and tenant, the longest first


class RegionalAdmin(BalancerAdmin):
    """What a regional balancer provides to its admin port."""

    tier = "regional"

    def __init__(
        self,
        instance: str,
        *,
        flow: RegionalFlow,
        authenticator: KeyAuthenticator,
        ingress: Ingress,
        clock: Clock,
        overrides: Sequence[Overrides | RefusalBook | ModelNames],
        peers: Peers | None,
        laws: LawBook,
        process: ProcessStatus,
        problems: Callable[[str], list[str]],
        origins: Callable[[], dict[str, Any]],
        newest_epoch: Callable[[], int],
    ) -> None:
        """`problems`: what is wrong with a replica; `origins`: where replicas come from, and what was left out;
        `newest_epoch`: of the laws that hop tokens named."""
        super().__init__(
            flow.config.region, instance, flow,
            authenticator=authenticator, ingress=ingress, laws=laws, process=process,
        )  # fmt: skip
        self._flow, self._clock, self._overrides, self._peers = flow, clock, overrides, peers
        self._problems, self._origins, self._newest_epoch = problems, origins, newest_epoch

    def ready(self) -> bool:
        """Whether some replica can take requests, the peers have sent their state, and this process is not shutting
        down.
        """
        now = self._clock.now()
        flow = self._flow
        if self.stopping or (self._peers is not None and not self._peers.warm):
            return False
        return any(len(flow.eligibility.serving_table(model, now)) for model in flow.replicas.view.by_model)

    def tier_status(self) -> dict[str, Any]:
        """Replicas with health and load, and the queue."""
        flow, now = self._flow, self._clock.now()
        return {
            "law": {**self._laws.status(), "newest_named": self._newest_epoch()},
            "policies": flow.policies.status(),
            "splits": flow.splits.status(flow.replicas.view.by_variant),
            "overrides": {one.what: one.status() for one in self._overrides},
            "queued_requests": len(flow.queue),
            "queued_tokens": flow.queue.tokens,
            "queue": [
                {"priority": band, "tenant": tenant, "requests": n}
                for (band, tenant), n in flow.queue.by_tenant().most_common(QUEUES_SHOWN_MAX)
            ],
            "trie_nodes": flow.replicas.trie.nodes,
            "predicted_hit_tokens": flow.learning.predicted_tokens,
            "actual_hit_tokens": flow.learning.actual_tokens,
            "scaling": flow.scaling.status(),
            "modes": {model: flow.replicas.mode(model, now) for model in sorted(flow.replicas.view.by_model)},
            "ejections": dict(flow.replicas.health_tracker.ejections),
            "peers": self._peers.status() if self._peers is not None else [],
            "replicas": [self._replica_status(name, now) for name in sorted(flow.replicas.view.replicas)],
            **self._origins(),
        }

    def _replica_status(self, name: str, now: float) -> dict[str, Any]:
        flow = self._flow
        replica, health, load = (
            flow.replicas.view.replicas[name],
            flow.replicas.health_tracker.read(name, now),
            flow.replicas.ledger.load(name),
        )
        sample, speed, shares = replica.sample, flow.replicas.speeds[name], flow.replicas.shares
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
            "share": flow.replicas.health_tracker.offered(name, now),
            "failing_share": flow.replicas.health_tracker.outliers.failing(name),
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
            "reports_cached_tokens": flow.replicas.unreported_hits.reported(name),
            "sample_age_s": now - sample.at if sample is not None else None,
            "prefill_ms_per_token": speed.prefill_ms_per_token,
            "tpot_ms": speed.tpot_at(total.in_flight + 1.0),
            "speed_uncertainty": speed.uncertainty,
            "speed_sample_age_s": now - speed.sampled_at if speed.sampled_at is not None else None,
            "slow": flow.replicas.speeds.slow(name, total.in_flight, now),
            "adapters_loaded": list(flow.replicas.adapters.loaded(name)),
            "kv_events": flow.replicas.blocks.events_state(name),
        }

    def explain(self, request: Request, drained: str = "") -> dict[str, Any]:  # noqa: ARG002 - it is in one region
        """The replica that a request would be sent to now, and why."""
        flow, region = self._flow, self._region
        why = flow.law.request_verdict(request).why_not(region)
        served = request.model in flow.replicas.view.by_model
        need = flow.selector.need_of(request)
        choice = flow.selector.consider(request, need, self._clock.now()) if served else None
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
        return {self._region: self._flow.scaling.desired()}
