"""Which routers there are: for each name where they stand, what they may send to, and by which rules.

`central-*`: one router, all engines. `spill-*`: one in each region that keeps requests at home while it can. `local-*`:
one in each region with its own engines only. Figures and names only; never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from farhop_lab.sim.baselines import gorgo, omniscient, skywalker
from farhop_lab.sim.baselines.process import Watch
from farhop_lab.sim.baselines.ring import Chwbl, ConsistentHash
from farhop_lab.sim.baselines.router import Router
from farhop_lab.sim.baselines.scopes import Everybody, NearestFirst, WholePool, all_pending, utilised
from farhop_lab.sim.baselines.tastes import CacheAware, LeastLoad, LlmD, RoundRobin, Saturation
from farhop_lab.sim.baselines.words import Board, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop_lab.sim.baselines.process import EngineRoom
    from farhop_lab.sim.baselines.router import Scope, Taste
    from farhop_lab.sim.stage import Stage

    Rooms = Mapping[str, EngineRoom]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of router. `each`: one in every region that has engines, else a single one. `reach`: its own region's
    engines, all, or its own and the routers of the other regions. `no_wire`: nothing takes time to travel."""

    scope: Callable[[Rooms], Scope]
    taste: Callable[[Rooms], Taste]
    each: bool = True
    reach: Literal["home", "all", "peers"] = "all"
    watch: Watch = Watch()
    pace_s: float = 0.0
    smoothing: float = 1.0
    no_wire: bool = False

    def router(self, stage: Stage, region: str, rooms: Rooms) -> Router:
        """Its machine in a region."""
        targets = [
            Target(name, room.name, room.site.replica.prefill_ms_per_token)
            for room in rooms.values()
            if self.reach == "all" or room.name == region
            for name in room.engines
        ]
        if self.reach == "peers":
            targets += [
                Target(room.name, room.name, room.site.replica.prefill_ms_per_token, balancer=True)
                for room in rooms.values()
                if room.name != region
            ]
        rtt_ms = {name: stage.topology.rtt_ms(region, name) for name in rooms}
        board = Board(region, targets, rtt_ms)
        return Router(board, self.scope(rooms), self.taste(rooms), pace_s=self.pace_s, smoothing=self.smoothing)


SP_P = Watch(probe_s=skywalker.PROBE_S)
EPP = Watch(probe_s=0.05)  # how often llm-d's endpoint picker reads metrics
PINGS = Watch(rtt_s=gorgo.RTT_EVERY_S)

TASTES: dict[str, Callable[[], Taste]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "consistent-hash": ConsistentHash,
    "sglang": CacheAware,
    "chwbl": Chwbl,
}


def _everybody(_rooms: Rooms) -> Scope:
    return Everybody()


def _spill(_rooms: Rooms) -> Scope:
    return NearestFirst(all_pending)


def _of(make: Callable[[], Taste]) -> Callable[[Rooms], Taste]:
    return lambda _rooms: make()


def _blind(_rooms: Rooms) -> Taste:
    return CacheAware(threshold=skywalker.THRESHOLD, absolute=32, relative=1.0001)


def _gorgo(weights: gorgo.Weights, *, each: bool) -> Plan:
    return Plan(
        each=each,
        scope=_everybody,
        taste=lambda _rooms: gorgo.Central(weights),
        watch=PINGS,
        smoothing=gorgo.RTT_SMOOTHING,
    )


PLANS: dict[str, Plan] = {
    "region-local": Plan(reach="home", scope=_everybody, taste=_of(LeastLoad)),
    **{f"central-{name}": Plan(each=False, scope=_everybody, taste=_of(make)) for name, make in TASTES.items()},
    **{f"local-{name}": Plan(reach="home", scope=_everybody, taste=_of(make)) for name, make in TASTES.items()},
    **{f"spill-{name}": Plan(scope=_spill, taste=_of(make), watch=SP_P) for name, make in TASTES.items()},
    "waterfall": Plan(scope=lambda _rooms: NearestFirst(utilised), taste=_of(LeastLoad)),
    "skywalker": Plan(
        reach="peers",
        scope=lambda _rooms: skywalker.SelectivePushing(),
        taste=_of(skywalker.LongestPrefix),
        watch=SP_P,
        pace_s=skywalker.PACE_S,
    ),
    "skywalker-ch": Plan(
        reach="peers",
        scope=lambda _rooms: skywalker.SelectivePushing(),
        taste=_of(ConsistentHash),
        watch=SP_P,
        pace_s=skywalker.PACE_S,
    ),
    # The paper's ablation: blind pushing, by the SGLang rule it builds on with the constants it gives that.
    "skywalker-blind": Plan(reach="home", scope=_everybody, taste=_blind, watch=SP_P, pace_s=skywalker.PACE_S),
    "gorgo": _gorgo(gorgo.WILDCHAT, each=False),
    "gorgo-long": _gorgo(gorgo.LONG_CONTEXT, each=False),
    "gorgo-each": _gorgo(gorgo.WILDCHAT, each=True),
    "gorgo-each-long": _gorgo(gorgo.LONG_CONTEXT, each=True),
    "gorgo-distributed": Plan(
        reach="peers",
        scope=lambda _rooms: gorgo.HomeAndPeers(),
        taste=_of(gorgo.Distributed),
        watch=PINGS,
        smoothing=gorgo.RTT_SMOOTHING,
    ),
    "central-llm-d": Plan(each=False, scope=lambda _rooms: WholePool(Saturation()), taste=_of(LlmD), watch=EPP),
    "local-llm-d": Plan(reach="home", scope=lambda _rooms: WholePool(Saturation()), taste=_of(LlmD), watch=EPP),
    "spill-llm-d": Plan(scope=lambda _rooms: NearestFirst(Saturation(), hold=True), taste=_of(LlmD), watch=EPP),
    "omniscient": Plan(
        each=False,
        scope=omniscient.Oracle,
        taste=omniscient.Oracle,
        watch=Watch(probe_s=omniscient.PROBE_S, oracle=True),
        no_wire=True,
    ),
}
"""By name. `gorgo-each` is its central score in every region, `gorgo-distributed` its own first version."""
