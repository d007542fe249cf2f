"""Worlds that differ in the router alone: `build(name, ...)` with the shipped tiers (`farhop`) or a published policy.

    world = build("skywalker", 7, flat(["paris", "tokyo"], 200.0), {"paris": gpus("l4", 4), "tokyo": gpus("l4", 4)})
    ClientPool(world, until=600.0).closed("paris", programs)
    world.run(600.0)

Invariants: engines, network, arrivals and measures are those of `sim.world`; a client in a region without a router
reaches one over the ocean, and its answer comes back over it (`sim.entry`); residency is ignored, as none of them
supports it. Baselines neither report nor obey operators: `drain` and `lose_reports` are refused, and links can only be
frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop_lab.sim.baselines import catalogue
from farhop_lab.sim.baselines.process import EnginePool, RouterProcess
from farhop_lab.sim.entry import ADDRESSES_MAX
from farhop_lab.sim.sites import Watching
from farhop_lab.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.catalogue import RouterSpec
    from farhop_lab.sim.entry import ClientEntry, EntryProcess
    from farhop_lab.sim.replicas import ReplicaProcess
    from farhop_lab.sim.sites import Site
    from topology.model import Topology

FARHOP = "farhop"


class RouterWorld(World):
    """See the module's head. `center` is the region of a central router, the first site if it is left out. ValueError
    for a region that the topology lacks or that has no engines.
    """

    def __init__(
        self,
        seed: int,
        topology: Topology,
        sites: Mapping[str, Site],
        spec: RouterSpec,
        *,
        center: str | None = None,
        watching: Watching = Watching(),  # noqa: B008 - frozen
        stood_s: float = 0.0,
        keep_journal: bool = False,
    ) -> None:
        if unknown := sorted(sites.keys() - topology.regions.keys()):
            raise ValueError(f"regions: {', '.join(unknown)} not in the topology; add them there")
        if not sites or (center is not None and center not in sites):
            raise ValueError(f"center: {center!r} is none of the sites ({', '.join(sites)}); name one that has engines")
        super().__init__(
            seed, topology, {}, balancers={}, watching=watching, stood_s=stood_s, keep_journal=keep_journal
        )
        context = self._context
        if spec.no_wire:
            for a in topology.regions:
                for b in topology.regions:
                    context.wire.set_rtt(a, b, 0.0)
        self.pools = {name: EnginePool(context, name, site) for name, site in sites.items()}
        self.routers: dict[str, RouterProcess] = {}
        for region in sites if spec.each else [center or next(iter(sites))]:
            self.routers[region] = RouterProcess(
                context,
                region,
                spec.probes,
                self.pools,
                self.routers,
                lambda at, rng: spec.router(context, at, self.pools, rng),
            )
        for router in self.routers.values():
            router.rise()

    def _addresses(self, region: str, _request: Request) -> Iterable[EntryProcess]:
        return [self.routers[name] for name in self._context.nearest(region, self.routers)[:ADDRESSES_MAX]]

    def _next_balancer(self, entry: str) -> ClientEntry:
        if entry not in self.entries:
            raise ValueError(f"entry: {entry!r} is not in the topology; add it there")
        return self.entries[entry]

    @property
    def replicas(self) -> dict[str, int]:
        """See World."""
        return {name: pool.site.replicas for name, pool in self.pools.items()}

    # -- faults

    def kill(self, region: str) -> None:
        """The region's engines die at once, and its router if it has one."""
        self.pools[region].die()
        if region in self.routers:
            self.routers[region].die()

    def revive(self, region: str) -> None:
        """They come back, empty, as new processes."""
        self.pools[region].rise()
        if region in self.routers:
            self.routers[region].rise()

    def kill_global(self, region: str, place: int = 0) -> None:
        """The router there dies at once: it is the only balancer there is. Does nothing if there is none (a central one
        is in one region).
        """
        if region in self.routers:
            self.routers[region].die()

    def start_global(self, region: str, place: int = 0) -> None:
        """It comes back as a new process that knows nothing."""
        if region in self.routers:
            self.routers[region].rise()

    kill_regional = kill_global

    def process(self, region: str, replica: str) -> ReplicaProcess:
        """See World."""
        return self.pools[region].process(replica)

    def lose_reports(self, region: str, share: float) -> None:
        """Refused: a baseline has no reports."""
        raise ValueError(f"lose_reports: {region}: a baseline router sends no reports; lose {share} of farhop's only")

    def blackhole(self, a: str, b: str) -> None:
        """Refused: a baseline's connections cannot be broken apart."""
        raise ValueError(f"blackhole: {a} to {b}: a baseline router's links can be frozen only; freeze them")

    def cut(self, a: str, b: str) -> None:
        """Refused, as `blackhole`."""
        raise ValueError(f"cut: {a} to {b}: a baseline router's links can be frozen only; freeze them")

    def drain(self, region: str, why: str = "drill", for_s: float | None = None) -> None:
        """Refused: baselines have no drains."""
        raise ValueError(f"drain: {region} ({why}, {for_s}): a baseline router knows no drains; drain farhop's only")


def names() -> list[str]:
    """All names that `build` knows."""
    return [FARHOP, *catalogue.ROUTERS]


def build(
    name: str, seed: int, topology: Topology, sites: Mapping[str, Site], *, center: str | None = None, **how: Any
) -> World:
    """The world of this name. `center` matters to central routers alone; `how` goes to the world (`watching`,
    `stood_s`, `keep_journal`; farhop's also `balancers`, `reporting`, `make_global`, `make_regional`). LookupError for
    an unknown name.
    """
    if name == FARHOP:
        return World(seed, topology, sites, **how)
    spec = catalogue.ROUTERS.get(name)
    if spec is None:
        raise LookupError(f"policy: {name!r} is none of {', '.join(names())}")
    return RouterWorld(seed, topology, sites, spec, center=center, **how)
