"""The routers that a scenario may name, and their worlds: the shipped tiers, published ones, Farhop without a part.

A `farhop-no-...` is the shipped machine with one part removed here, in the lab; the product has no such switch. A
`farhop-regional-...` or `farhop-global-...` has that policy in that tier, with default options.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from farhop_lab.sim.baselines import world as baselines
from farhop_lab.studies.ablations import ABLATIONS, Makers, global_maker, regional_maker
from global_lb.routing import policy as global_policy
from regional_lb.scheduler import policy as regional_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop_lab.sim.sites import Reporting, Site
    from farhop_lab.sim.world import World
    from topology.model import Topology

FARHOP = baselines.FARHOP
POLICIES = {
    f"farhop-regional-{name}": Makers(
        make_regional=regional_maker(
            policies=partial(regional_policy.Policies, {"": regional_policy.PolicyConfig(name=name)})
        )
    )
    for name in regional_policy.KNOWN
} | {
    f"farhop-global-{name}": Makers(make_global=global_maker(policy=partial(make, global_policy.RouteConfig())))
    for name, make in global_policy.KNOWN.items()
}


def names() -> list[str]:
    """All names that `build` knows."""
    shipped, *published = baselines.names()
    return [shipped, *ABLATIONS, *POLICIES, *published]


def build(
    name: str,
    seed: int,
    topology: Topology,
    sites: Mapping[str, Site],
    *,
    balancers: Mapping[str, int],
    reporting: Reporting,
    stood_s: float = 0.0,
) -> World:
    """The world of this name. LookupError for an unknown one. `balancers` and `reporting` apply to Farhop alone."""
    makers = Makers() if name == FARHOP else ABLATIONS.get(name) or POLICIES.get(name)
    if makers is None:
        return baselines.build(name, seed, topology, sites, stood_s=stood_s)
    return baselines.build(
        FARHOP,
        seed,
        topology,
        sites,
        balancers=balancers,
        reporting=reporting,
        stood_s=stood_s,
        make_global=makers.make_global(topology) if makers.make_global is not None else None,
        make_regional=makers.make_regional(topology) if makers.make_regional is not None else None,
    )
