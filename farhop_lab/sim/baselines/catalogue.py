"""The routers by name: where they are, what they may send to, and by which rules.

`central-*`: one router, all engines. `spill-*`: one in each region that keeps requests at home while it can. `local-*`:
one in each region with its own engines only. Figures and names only; never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import msgspec

from farhop_lab.sim.baselines import gorgo, omniscient, skywalker
from farhop_lab.sim.baselines.aibrix import PrefixCache
from farhop_lab.sim.baselines.dynamo import KvRouter
from farhop_lab.sim.baselines.gorgo_tuner import OnlineTuner
from farhop_lab.sim.baselines.preble import E2
from farhop_lab.sim.baselines.process import ProbeConfig
from farhop_lab.sim.baselines.production_stack import KvAware, PrefixAware
from farhop_lab.sim.baselines.ring import Chwbl, ConsistentHash
from farhop_lab.sim.baselines.router import Router, RouterState, Target
from farhop_lab.sim.baselines.rules import (
    AllEngines,
    CacheAware,
    LeastLoad,
    LlmD,
    NearestFirst,
    RoundRobin,
    Saturation,
    WholePool,
    all_pending,
    utilised,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop_lab.sim.baselines.process import EnginePool
    from farhop_lab.sim.baselines.router import Eligibility, Picker
    from farhop_lab.sim.context import SimContext

    Pools = Mapping[str, EnginePool]


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of router. `each`: one in every region that has engines, otherwise a single one. `reach`: its own
    region's engines, all, or its own and the routers of the other regions. `no_wire`: no network delay.
    """

    eligibility: Callable[[Picker], Eligibility]
    picker: Callable[[Pools, Random], Picker]
    each: bool = True
    reach: Literal["home", "all", "peers"] = "all"
    probes: ProbeConfig = ProbeConfig()
    pause_s: float = 0.0
    smoothing: float = 1.0
    no_wire: bool = False

    def router(self, context: SimContext, region: str, pools: Pools, rng: Random) -> Router:
        """Its machine in a region."""
        targets = [
            Target(name, pool.name, pool.site.replica.prefill_ms_per_token)
            for pool in pools.values()
            if self.reach == "all" or pool.name == region
            for name in pool.engines
        ]
        if self.reach == "peers":
            targets += [
                Target(pool.name, pool.name, pool.site.replica.prefill_ms_per_token, balancer=True)
                for pool in pools.values()
                if pool.name != region
            ]
        rtt_ms = {name: context.topology.rtt_ms(region, name) for name in pools}
        state = RouterState(region, targets, rtt_ms)
        picker = self.picker(pools, rng)
        return Router(state, self.eligibility(picker), picker, pause_s=self.pause_s, smoothing=self.smoothing)


SP_P = ProbeConfig(probe_s=skywalker.PROBE_S)
EPP = ProbeConfig(probe_s=0.05)  # how often llm-d's endpoint picker reads metrics
PINGS = ProbeConfig(rtt_s=gorgo.RTT_EVERY_S)


def _of(make: Callable[[], Picker]) -> Callable[[Pools, Random], Picker]:
    return lambda _pools, _rng: make()


PICKERS: dict[str, Callable[[Pools, Random], Picker]] = {
    "round-robin": _of(RoundRobin),
    "least-load": _of(LeastLoad),
    "consistent-hash": _of(ConsistentHash),
    "sglang": _of(CacheAware),
    "chwbl": _of(Chwbl),
    "aibrix": lambda _pools, rng: PrefixCache(rng),
    "dynamo": KvRouter,
    "kvaware": lambda pools, _rng: KvAware(pools),
    "preble": lambda pools, _rng: E2(pools),
    "prefixaware": lambda _pools, rng: PrefixAware(rng),
}


def _all(picker: Picker) -> Eligibility:
    """All engines at once, except for a picker with a queue of its own."""
    return WholePool(picker.busy) if isinstance(picker, KvRouter) else AllEngines()


def _spill(_picker: Picker) -> Eligibility:
    return NearestFirst(all_pending)


def _blind(_pools: Pools, _rng: Random) -> Picker:
    return CacheAware(threshold=skywalker.THRESHOLD, absolute=32, relative=1.0001)


def _gorgo(weights: gorgo.Weights, *, each: bool, calibrated: bool = False, tuned: bool = False) -> RouterSpec:
    def picker(_pools: Pools, rng: Random) -> Picker:
        tuner = OnlineTuner({"rtt": weights.rtt, "queue": weights.queue}, rng) if tuned else None
        return gorgo.Central(weights, calibrated=calibrated, tuner=tuner)

    return RouterSpec(each=each, eligibility=_all, picker=picker, probes=PINGS, smoothing=gorgo.RTT_SMOOTHING)


ROUTERS: dict[str, RouterSpec] = {
    "region-local": RouterSpec(reach="home", eligibility=_all, picker=_of(LeastLoad)),
    **{f"central-{name}": RouterSpec(each=False, eligibility=_all, picker=make) for name, make in PICKERS.items()},
    **{f"local-{name}": RouterSpec(reach="home", eligibility=_all, picker=make) for name, make in PICKERS.items()},
    **{f"spill-{name}": RouterSpec(eligibility=_spill, picker=make, probes=SP_P) for name, make in PICKERS.items()},
    "waterfall": RouterSpec(eligibility=lambda _picker: NearestFirst(utilised), picker=_of(LeastLoad)),
    "skywalker": RouterSpec(
        reach="peers",
        eligibility=lambda _picker: skywalker.SelectivePushing(),
        picker=_of(skywalker.LongestPrefix),
        probes=SP_P,
        pause_s=skywalker.PAUSE_S,
    ),
    # Without the pause of its prototype's queue processor.
    "skywalker-unpaced": RouterSpec(
        reach="peers",
        eligibility=lambda _picker: skywalker.SelectivePushing(),
        picker=_of(skywalker.LongestPrefix),
        probes=SP_P,
    ),
    "skywalker-ch": RouterSpec(
        reach="peers",
        eligibility=lambda _picker: skywalker.SelectivePushing(),
        picker=_of(ConsistentHash),
        probes=SP_P,
        pause_s=skywalker.PAUSE_S,
    ),
    # The paper's ablation: blind pushing, by the SGLang rule it builds on with the constants it gives that.
    "skywalker-blind": RouterSpec(
        reach="home", eligibility=_all, picker=_blind, probes=SP_P, pause_s=skywalker.PAUSE_S
    ),
    "gorgo": _gorgo(gorgo.WILDCHAT, each=False),
    "gorgo-long": _gorgo(gorgo.LONG_CONTEXT, each=False),
    "gorgo-each": _gorgo(gorgo.WILDCHAT, each=True),
    "gorgo-each-long": _gorgo(gorgo.LONG_CONTEXT, each=True),
    "gorgo-each-tuned": _gorgo(gorgo.WILDCHAT, each=True, tuned=True),
    "gorgo-each-calibrated": _gorgo(gorgo.UNTUNED, each=True, calibrated=True),
    "gorgo-distributed": RouterSpec(
        reach="peers",
        eligibility=lambda _picker: gorgo.HomeAndPeers(),
        picker=_of(gorgo.Distributed),
        probes=PINGS,
        smoothing=gorgo.RTT_SMOOTHING,
    ),
    "central-llm-d": RouterSpec(
        each=False, eligibility=lambda _picker: WholePool(Saturation()), picker=_of(LlmD), probes=EPP
    ),
    "local-llm-d": RouterSpec(
        reach="home", eligibility=lambda _picker: WholePool(Saturation()), picker=_of(LlmD), probes=EPP
    ),
    "spill-llm-d": RouterSpec(
        eligibility=lambda _picker: NearestFirst(Saturation(), hold=True), picker=_of(LlmD), probes=EPP
    ),
    "omniscient": RouterSpec(
        each=False,
        eligibility=lambda picker: cast("omniscient.Oracle", picker),
        picker=lambda pools, _rng: omniscient.Oracle(pools),
        probes=ProbeConfig(probe_s=omniscient.PROBE_S, oracle=True),
        no_wire=True,
    ),
}
"""By name. `gorgo-each` is its central score in every region, `gorgo-distributed` its own first version."""
