"""Farhop without one of its parts: the shipped machines with that part removed, to measure what it earns.

- `without trie`: no prefix counts as cached.
- `without unacknowledged load`: a report counts as it is, whatever was sent since.
- `without late binding`: a request goes to the best replica even if that has no room, and waits in its engine.
- `without tpot`: only the first token counts, in both tiers.
- `without tie draw`: the least score takes all.
- `without bringing home`: a request follows a prefix cached abroad for as long as it is cached.

For experiments alone: the product cannot be configured so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance.estimate.unacknowledged import UnacknowledgedLoad
from farhop.balance.health.region import LivenessConfig
from farhop.balance.machine import RequestArrived
from farhop_lab.sim.sites import Watching
from global_lb.fleet.table import TOKEN
from global_lb.routing import flow as global_flow
from global_lb.routing.flow import FlowConfig
from global_lb.routing.policy import Predictive as GlobalPredictive
from regional_lb.scheduler import flow as regional_flow
from regional_lb.scheduler.policy import Policies
from regional_lb.scheduler.policy.predictive import Predictive as RegionalPredictive
from regional_lb.scheduler.selector import ReplicaSelector

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from typing import Any

    from farhop.balance.machine import Command, Event
    from global_lb.fleet.table import Candidates, Column
    from global_lb.routing.pick import Decision
    from global_lb.routing.policy import Policy as GlobalPolicy
    from global_lb.routing.request_state import RequestState
    from regional_lb.fleet.table import Table
    from regional_lb.scheduler.pick import Pick
    from regional_lb.scheduler.policy import Need, Policy
    from topology.law import Law, Verdict
    from topology.model import Topology

    MakeGlobal = Callable[[str, Law, Random], global_flow.GlobalFlow]
    MakeRegional = Callable[[str, Law, Random], regional_flow.RegionalFlow]


def _blind(event: Event) -> Event:
    if isinstance(event, RequestArrived):
        return RequestArrived(msgspec.structs.replace(event.request, chain=()))
    return event


class TrielessGlobal(global_flow.GlobalFlow):
    """Sees no cached prefixes."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """See GlobalFlow."""
        return super().handle(_blind(event), now)


class TrielessRegional(regional_flow.RegionalFlow):
    """Sees no cached prefixes."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """See RegionalFlow."""
        return super().handle(_blind(event), now)


class NoUnacknowledgedLoad(global_flow.GlobalFlow):
    """Forgets what it has sent, so that reports alone count."""

    def _dispatch(
        self, state: RequestState, now: float, verdict: Verdict | None = None, decision: Decision | None = None
    ) -> list[Command]:
        before = state.attempt
        commands = super()._dispatch(state, now, verdict, decision)
        attempt = state.attempt
        if attempt is not None and attempt is not before:
            n_bytes = state.request.prompt_bytes
            attempt.load.came_back(n_bytes)
            attempt.load = UnacknowledgedLoad()
            attempt.load.sent(n_bytes)
        return commands


class _Eager(ReplicaSelector):
    def consider(self, *args: Any, **named: Any) -> Pick | None:
        choice = super().consider(*args, **named)
        if choice is not None and choice.chosen is None:
            choice.chosen = choice.ranked[0]
        return choice


class EarlyBinding(regional_flow.RegionalFlow):
    """No request waits here while any replica is healthy."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.selector = _Eager(self.replicas, self.eligibility, self.policies, self.splits, self.deferred, self._rng)

    def _holds(self, replica: str, tokens: float) -> bool:  # noqa: ARG002
        return True


class FirstTokenGlobal(GlobalPredictive):
    """The predictive score without its `tpot` term."""

    def score(self, candidates: Candidates) -> Column:
        """See Policy."""
        score_ms: Column = (
            candidates.predicted_ms() - candidates.beta * candidates.output_tokens * candidates.block[TOKEN]
        )
        return score_ms

    def shift(self, candidates: Candidates) -> float:  # noqa: ARG002
        """See Policy."""
        return 0.0


class FirstTokenRegional(RegionalPredictive):
    """The same for replicas."""

    def score(self, need: Need, table: Table, uncached_tokens: Column, backlog_tokens: Column, now: float) -> Column:  # noqa: ARG002
        """See Policy."""
        score_ms: Column = (backlog_tokens + uncached_tokens) * table.prefill_ms_per_token
        return score_ms


class FirstTokenPolicies(Policies):
    """The same policy for every model."""

    def __init__(self) -> None:
        super().__init__()
        self._first = FirstTokenRegional()

    def of(self, model: str) -> Policy:  # noqa: ARG002
        """See Policies."""
        return self._first


class NoTieDraw(GlobalPredictive):
    """The predictive score without near ties."""

    ties = 0.0
    uncertain_waits = False


class NoBringingHome(GlobalPredictive):
    """The predictive score that never brings a prefix home."""

    replicates_prefixes = False


class Makers(msgspec.Struct, frozen=True):
    """How a world builds its machines; None: as shipped."""

    make_global: Callable[[Topology], MakeGlobal] | None = None
    make_regional: Callable[[Topology], MakeRegional] | None = None


def global_maker(
    kind: type[global_flow.GlobalFlow] = global_flow.GlobalFlow, policy: Callable[[], GlobalPolicy] | None = None
) -> Callable[[Topology], MakeGlobal]:
    """As World builds its own; tenants that wait while no region serves do so here, too."""

    def of(topology: Topology) -> MakeGlobal:
        def patience_s(tenant: str) -> float:
            known = topology.tenants.get(tenant)
            residency = known.residency if known is not None else None
            return residency.wait_max_s if residency is not None and residency.on_exhausted == "wait" else 0.0

        def make(region: str, law: Law, rng: Random) -> global_flow.GlobalFlow:
            config = FlowConfig(region, liveness=LivenessConfig(report_age_s=Watching().report_age_s))
            flow = kind(config, law, rng, patience_s)
            if policy is not None:
                flow.routes.of("", "").policy = policy()
            return flow

        return make

    return of


def regional_maker(
    kind: type[regional_flow.RegionalFlow] = regional_flow.RegionalFlow,
    policies: Callable[[], Policies] = Policies,
) -> Callable[[Topology], MakeRegional]:
    def of(topology: Topology) -> MakeRegional:
        def weight_of(tenant: str) -> float:
            known = topology.tenants.get(tenant)
            return known.weight if known is not None else 1.0

        def make(region: str, law: Law, rng: Random) -> regional_flow.RegionalFlow:
            return kind(regional_flow.FlowConfig(region), law, rng, weight_of, policies())

        return make

    return of


ABLATIONS: dict[str, Makers] = {
    "farhop-no-trie": Makers(global_maker(TrielessGlobal), regional_maker(TrielessRegional)),
    "farhop-no-unacknowledged-load": Makers(make_global=global_maker(NoUnacknowledgedLoad)),
    "farhop-no-late-binding": Makers(make_regional=regional_maker(EarlyBinding)),
    "farhop-no-tpot": Makers(global_maker(policy=FirstTokenGlobal), regional_maker(policies=FirstTokenPolicies)),
    "farhop-no-tie-draw": Makers(make_global=global_maker(policy=NoTieDraw)),
    "farhop-no-bringing-home": Makers(make_global=global_maker(policy=NoBringingHome)),
}
