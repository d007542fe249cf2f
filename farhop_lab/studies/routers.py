"""Which routers a scenario may name, and their worlds: the shipped tiers, the published ones, Farhop without a part.

A `farhop-no-...` is the shipped machine with one thing taken from it here, in the lab; the product has no such switch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.baselines import world as baselines
from farhop_lab.studies.ablations import ABLATIONS, Makers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop_lab.sim.sites import Reporting, Site
    from farhop_lab.sim.world import World
    from topology.model import Topology

FARHOP = baselines.FARHOP


def names() -> list[str]:
    """All that `build` knows."""
    shipped, *published = baselines.names()
    return [shipped, *ABLATIONS, *published]


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
    """The world of this name. LookupError for an unknown one. `balancers` and `reporting` are Farhop's alone."""
    if name != FARHOP and name not in ABLATIONS:
        return baselines.build(name, seed, topology, sites, stood_s=stood_s)
    makers = ABLATIONS.get(name, Makers())
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
