"""What a global balancer shows its operators: its regions, their health and why, and where a request would go.

Reads only: it asks the state machine and what feeds it, and changes neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.service.admin.balancer_admin import BalancerAdmin
from global_lb.app.serve import DecisionReasons

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.balance.machine import Request
    from farhop.service.admin.balancer_admin import ProcessStatus
    from farhop.service.admission.ingress import Ingress
    from farhop.service.authentication.authenticator import KeyAuthenticator
    from farhop.service.law.lawbook import LawBook
    from farhop.service.process.clock import Clock
    from global_lb.app.overrides import RoutingOverrides
    from global_lb.fleet.view import Instance, Region
    from global_lb.links.watch import RegionWatcher
    from global_lb.routing.flow import GlobalFlow


LEFT_OUT = "left out, as if it were drained"


class GlobalAdmin(BalancerAdmin):
    """What a global balancer provides to its admin port."""

    tier = "global"

    def __init__(
        self,
        instance: str,
        *,
        flow: GlobalFlow,
        authenticator: KeyAuthenticator,
        ingress: Ingress,
        watcher: RegionWatcher,
        overrides: RoutingOverrides,
        clock: Clock,
        laws: LawBook,
        process: ProcessStatus,
        token_rejected_at: Mapping[str, float],
        other_answered_at: Mapping[str, float],
        published: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """`token_rejected_at`, `other_answered_at`: see GlobalTier; `published`: by hub, why operators find no address
        of ours there."""
        super().__init__(
            flow.config.region, instance, flow,
            authenticator=authenticator, ingress=ingress, laws=laws, process=process,
        )  # fmt: skip
        self._flow, self._watcher, self._overrides, self._clock = flow, watcher, overrides, clock
        self._token_rejected_at, self._other_answered_at = token_rejected_at, other_answered_at
        self._published = published

    def ready(self) -> bool:
        """Some region can take work, and we are not on our way out."""
        return not self.stopping and bool(self._regions_up())

    def leads_somewhere(self) -> bool:
        """Whether some region that is up is lawful for any tenant: otherwise clients are better off at another
        entry."""
        up, law = self._regions_up(), self._flow.law
        return any(not up.isdisjoint(law.verdict(tenant, "").lawful) for tenant in law.topology.tenants)

    def _regions_up(self) -> set[str]:
        now, known = self._clock.now(), self._flow.regions.liveness.items()
        return {name for name, liveness in known if liveness.read(now).state in ("up", "suspect")}

    def tier_status(self) -> dict[str, Any]:
        """Regions with health and why, round-trip time, wait."""
        flow, now = self._flow, self._clock.now()
        names = sorted({*flow.regions.view.regions, *flow.regions.liveness} & flow.law.topology.regions.keys())
        return {
            "published": self._published(),
            "trie_nodes": flow.regions.trie.nodes,
            "store_trouble": self._watcher.store_trouble,
            "hubs": [hub.status() for hub in self._watcher.hubs],
            "policies": flow.routes.policies(),
            "routes": flow.routes.accounts(now),
            "routes_author": self._overrides.author(),
            "operator_overrides": self._overrides.status(),
            "regions": [self._region_status(name, now) for name in names],
        }

    def _region_status(self, name: str, now: float) -> dict[str, Any]:
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
            "token_rejected_age_s": _age_s(self._token_rejected_at, name, now),
            "other_answered_age_s": _age_s(self._other_answered_at, name, now),
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

    def explain(self, request: Request, drained: str = "") -> dict[str, Any]:
        """The region that a request would be sent to now, and why; `drained`: if this one were drained."""
        left_out = frozenset((drained,)) if drained else frozenset[str]()
        decision = self._flow.consider(request, self._clock.now(), request.lawful, left_out)
        scaling = self._flow.regions.scaling
        reasons = DecisionReasons(self._region).record(decision)
        if drained in (absent := reasons["not_serving"]):
            reasons["not_serving"] = {**absent, drained: LEFT_OUT}
        return {
            "model": request.model,
            "reasons": reasons,
            "drained": drained,
            "pilot_lights": {name: scaling.status(name) for name in sorted(scaling.pilots)},
            "law": self._laws.status(),
        }

    def scaling(self) -> dict[str, dict[str, int]]:
        """See TierAdmin."""
        return self._flow.regions.scaling.by_region()


def _age_s(at: Mapping[str, float], name: str, now: float) -> float | None:
    return now - at[name] if name in at else None


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
