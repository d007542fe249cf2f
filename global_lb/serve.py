"""The global tier's headers and desk: the hop token it signs, what it writes to clients, what an operator is told.

Who may come in is `shell.keeper`'s to say. Never picks a region: that is the flow's.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from farhop.identity.hop import BUDGET_MAX_MS, LIFE_MS, HopClaims, request_line
from farhop.identity.hop import HEADER as HOP_HEADER
from farhop.shell.admin import composed
from farhop.shell.marks import VERSION_HEADER
from farhop.shell.observe import ObservedTier
from farhop.store.kept import notice
from farhop.telemetry import attributes as a

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Request
    from farhop.identity.hop import HopSigner
    from farhop.relay.relay import Journey
    from farhop.shell.admin import Question
    from farhop.shell.clock import Clock
    from farhop.shell.door import Door
    from farhop.shell.keeper import KeyKeeper
    from farhop.shell.lawbook import LawBook
    from farhop.shell.observe import Observer, Visit
    from farhop.telemetry.attributes import Value
    from farhop.telemetry.logs import Throttled
    from global_lb.detours import Detours
    from global_lb.flow import GlobalFlow
    from global_lb.passes import Passes
    from global_lb.pick import Decision
    from global_lb.steering import Steering
    from global_lb.view import Instance, Region
    from global_lb.watch import Watcher


class GlobalTier(ObservedTier):
    """What the relay writes for this tier."""

    def __init__(
        self,
        observer: Observer,
        log: Throttled,
        flow: GlobalFlow,
        signer: HopSigner,
        instance: str,
        clock: Clock,
        passes: Passes | None = None,
        mutual: Callable[[str], bool] = lambda _region: False,
    ) -> None:
        """`mutual`: whether a region and we prove to each other by TLS who we are."""
        super().__init__(observer, log)
        self._passes, self._mutual = passes, mutual
        self._flow, self._signer, self._instance, self._clock = flow, signer, instance, clock

    def forwarded(self, journey: Journey) -> None:
        """See relay.Tier. What was sent past a hot region is counted."""
        super().forwarded(journey)
        decision: Decision | None = journey.reasons
        if decision is not None and decision.chosen is not None and decision.spilled_from is not None:
            self.observer.spilled(decision.chosen.region)

    def upstream_headers(self, journey: Journey) -> bytes:
        """The hop token, stamped in the receiver's own clock, a version asked for, and the trace context.

        Each attempt, and each time it is sent again, has a token of its own: one is good for one use.
        """
        visit: Visit = journey.context
        forward, request = journey.forward, journey.request
        assert forward is not None
        now_ms, promised_ms = self._clock.now() * 1e3, forward.promised_ttft_ms
        head, body, mutual = journey.exchange.head, journey.body, self._mutual(forward.target)
        if not (mutual or visit.body_sha256):
            visit.body_sha256 = hashlib.sha256(body).digest()
        token = self._signer.sign(
            HopClaims(
                audience=forward.target,
                entry_region=self._flow.config.region,
                issuer=self._instance,
                tenant=request.tenant,
                lawful=tuple(sorted(forward.lawful or ())),
                epoch=self._flow.law.epoch,
                priority=request.priority,
                deadline_ms=max(0.0, request.deadline * 1e3 - now_ms),
                expires_ms=now_ms + self._clock_offset_ms(journey) + LIFE_MS,
                decision_id=visit.decision_id,
                promised_ttft_ms=None if promised_ms is None else min(promised_ms, BUDGET_MAX_MS),
                narrow=request.narrow,
                key=request.key,
                body=b"" if mutual else visit.body_sha256,
                waited_ms=min(forward.waited_s * 1e3, BUDGET_MAX_MS),
                attempt=f"{request.id}/{forward.attempt}",
            ),
            request_line(head.method, head.target, len(body)),
        )
        pin = b"%b: %b\r\n" % (VERSION_HEADER, request.version.encode()) if request.version else b""
        return HOP_HEADER + b": " + token + b"\r\n" + pin + self.observer.upstream_context(visit)

    def redirect_url(self, journey: Journey, base: str) -> str:
        """See relay.Tier. The instance's own, with a token for one use in it."""
        visit: Visit = journey.context
        forward = journey.forward
        assert forward is not None
        assert self._passes is not None  # the flow redirects only where main gave them
        target = journey.exchange.head.target
        return self._passes.url(journey.request, visit.decision_id, forward, base, target)

    def _clock_offset_ms(self, journey: Journey) -> float:
        """The clock of the instance that the attempt goes to, less ours."""
        forward = journey.forward
        assert forward is not None
        region = self._flow.view.regions.get(forward.target)
        instances = region.instances if region is not None else ()
        return next((i.clock_offset_ms for i in instances if i.tier == forward.address), 0.0)

    def answer_headers(self, journey: Journey) -> bytes:
        """Where it was served, and under which decision."""
        visit: Visit = journey.context
        forward = journey.forward
        region = b"x-farhop-region: " + forward.target.encode() + b"\r\n" if forward is not None else b""
        return region + b"x-farhop-decision: " + visit.decision_id.encode() + b"\r\n"


class DecisionReasons:
    """What is said of a Decision."""

    def __init__(self, entry_region: str) -> None:
        self._entry_region = entry_region

    def attributes(self, decision: Decision) -> dict[str, Value]:
        """On the span."""
        unit = decision.rule.policy.unit
        said: dict[str, Value] = {
            a.ENTRY_REGION: self._entry_region,
            a.EPOCH: decision.verdict.epoch,
            a.POLICY: decision.rule.policy.name,
            a.LAWFUL: sorted(decision.verdict.lawful),
            a.REASONS: [*decision.notes, *(f"{s.region} {s.score:.4g} {unit}" for s in decision.field[:16])],
        }
        if decision.chosen is not None:
            chosen = decision.chosen
            said |= {
                a.REGION: chosen.region,
                a.RTT_MS: chosen.rtt_ms,
                a.WAIT_MS: chosen.wait_ms,
                a.HIT_TOKENS: round(chosen.hit_tokens),
                a.PROMISED_TTFT_MS: chosen.ttft_ms,
                a.SPILL: decision.spilled_from is not None,
            }
        return said

    def record(self, decision: Decision) -> dict[str, Any]:
        """For explain."""
        terms = decision.terms()
        return {
            "policy": decision.rule.policy.name,
            "unit": decision.rule.policy.unit,
            "notes": list(decision.notes),
            "policy_epoch": decision.verdict.epoch,
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
                    "crowding_ms": s.crowding_ms,
                    "stall_ms": s.stall_ms,
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

    def predicted_hit_tokens(self, decision: Decision) -> float:
        """What the chosen region was thought to hold."""
        return decision.chosen.hit_tokens if decision.chosen is not None else 0.0

    def hit_source(self, decision: Decision) -> str:  # noqa: ARG002
        """Regions tell what they hold in nodes of the trie."""
        return "trie"

    def predicted_ttft_ms(self, decision: Decision) -> float | None:
        """The wire, the wait and the prefill there."""
        return decision.chosen.ttft_ms if decision.chosen is not None else None


class GlobalDesk:
    """What an operator is told of a global balancer."""

    def __init__(
        self,
        instance: str,
        flow: GlobalFlow,
        keeper: KeyKeeper,
        door: Door,
        watcher: Watcher,
        steering: Steering,
        detours: Detours,
        clock: Clock,
        laws: LawBook,
    ) -> None:
        self._instance, self._flow, self._keeper, self._door = instance, flow, keeper, door
        self._watcher, self._steering, self._detours = watcher, steering, detours
        self._clock, self._laws = clock, laws
        self.stopping = False
        self.kept: Callable[[], list[dict[str, Any]]] = list  # what main keeps of etcd on disk

    def ready(self) -> bool:
        """Some region can take work, and we are not on our way out."""
        now = self._clock.now()
        return not self.stopping and any(h.read(now).state in ("up", "suspect") for h in self._flow.liveness.values())

    def notice(self) -> str:
        """See Desk."""
        return notice(self.kept())

    def status(self) -> dict[str, Any]:
        """Regions with health and why, wire time, wait."""
        flow, now, detours = self._flow, self._clock.now(), self._detours.told()
        names = sorted({*flow.view.regions, *flow.liveness})
        return {
            "tier": "global",
            "region": flow.config.region,
            "instance": self._instance,
            "policy_epoch": flow.law.epoch,
            "law": self._laws.told(),
            "kept": self.kept(),
            "under_way": flow.under_way,
            "trie_nodes": flow.trie.nodes,
            "store_trouble": self._watcher.store_trouble,
            "hubs": [hub.told() for hub in self._watcher.hubs],
            "policies": flow.routes.told(),
            "routes": flow.routes.accounts(now),
            "routes_said": self._steering.signed(),
            "words": self._steering.told(),
            "regions": [{**self._region(name, now), "via": detours.get(name)} for name in names],
        }

    def _region(self, name: str, now: float) -> dict[str, Any]:
        flow = self._flow
        region, liveness = flow.view.regions.get(name), flow.liveness.get(name)
        health = liveness.read(now) if liveness is not None else None
        residence, hits = flow.residence.get(name), flow.hits.get(name)
        return {
            "region": name,
            "state": health.state if health is not None else "down",
            "why": health.why if health is not None else "never heard of",
            "forced": health.forced if health is not None else False,
            "share": health.share if health is not None and health.state == "draining" else None,
            "cold_share": flow.cold_share(name, now),
            "override": self._watcher.overrides.told(name),
            "rtt_ms": region.rtt_ms if region is not None else None,
            "in_flight": flow.ledger.load(name).in_flight,
            **(_queued(region) if region is not None else {}),
            "residence": residence.at(now) if residence is not None else None,
            "prefix_nodes": flow.trie.count(name) if name in flow.trie else 0,
            "prefix_stream": self._watcher.prefixes.state(name),
            "prefix_behind_s": self._watcher.prefixes.behind_s(name, now),
            "predicted_hit_tokens": hits.predicted_tokens if hits is not None else 0.0,
            "actual_hit_tokens": hits.actual_tokens if hits is not None else 0.0,
            "instances": [_instance(i, now) for i in region.instances] if region is not None else [],
        }

    def compose(self, question: Question) -> Request:
        """See Desk."""
        return composed(self._door, self._keeper, question)

    def explain(self, request: Request) -> dict[str, Any]:
        """Which region a request would go to now."""
        decision = self._flow.consider(request, self._clock.now())
        return {"reasons": DecisionReasons(self._flow.config.region).record(decision), "law": self._laws.told()}

    def law(self) -> dict[str, Any]:
        """See Desk."""
        return self._laws.document()


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
