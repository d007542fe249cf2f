"""Opens the sources of a process's topology and documents: topology, etcd clusters, the copy on disk, the law.

The input is a checked configuration. Never decides a default: defaults are declared with the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop.config import ConfigError
from farhop.service.law.lawbook import LawBook
from farhop.store.disk_cache import DiskCachedStore, disk_cache_status
from farhop.store.hubs import store_of, stores_of
from farhop.store.sealed import Sealed, inner
from farhop.store.state import StateDir
from topology import load as topologies

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.service.config.endpoints import Etcd
    from farhop.service.config.process import Member
    from farhop.store.contract import Store
    from farhop.store.envelope import Keys
    from farhop.store.etcd_settings import EtcdSettings
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law
    from topology.model import Topology

NEAREST, NONE = "nearest", "none"  # instead of a remote hub's name


def topology_of(config: Member) -> Topology:
    """The topology named: a file, or a ready-made one. Raises TopologyError or ConfigError."""
    name = config.topology
    path = Path(name) if name.endswith((".yaml", ".yml")) else topologies.shipped(name)
    topology = topologies.load(path)
    if config.region not in topology.regions:
        known = ", ".join(sorted(topology.regions))
        raise ConfigError("region", [f"{config.region!r} is not in topology {topology.name!r}; it has {known}"])
    return topology


def hubs(config: Member, topology: Topology) -> dict[str, EtcdSettings]:
    """The etcd clusters to use, by name: the one configured, else every hub of the topology. Raises ConfigError."""
    own = topology.regions[config.region].hub
    if config.etcd.endpoints:
        if config.hubs:
            raise ConfigError("etcd.endpoints", ["they are one cluster, and `hubs` are several; leave one of them out"])
        return {own: _hub(own, config.etcd, ())}
    for name in sorted(set(config.hubs) - set(topology.hubs)):
        known = ", ".join(sorted(topology.hubs)) or "none"
        raise ConfigError(f"hubs.{name}", [f"topology {topology.name!r} has no hub of this name; it has {known}"])
    parts = {name: (config.hubs.get(name, config.etcd), topology.hubs[name]) for name in sorted(topology.hubs)}
    found = {
        name: _hub(name, part, endpoints) for name, (part, endpoints) in parts.items() if part.endpoints or endpoints
    }
    if own not in found:
        raise ConfigError("etcd.endpoints", [f"none given, and hub {own!r} of the topology has none; add some"])
    return found


def home_hubs(config: Member, topology: Topology, remote: str) -> dict[str, EtcdSettings]:
    """Of those, the hub of this region and one more: the one named, or NEAREST by round-trip time, or NONE.

    A hub is as far as the nearest region that calls it its own. Raises ConfigError.
    """
    own, known = topology.regions[config.region].hub, hubs(config, topology)
    if remote == NEAREST:
        others = sorted((_away_ms(name, config.region, topology), name) for name in known if name != own)
        remote = others[0][1] if others else NONE
    elif remote not in (NONE, *known):
        raise ConfigError("remote_hub", [f"no hub {remote!r} with endpoints; there is {', '.join(sorted(known))}"])
    return {name: known[name] for name in sorted({own, remote} & set(known))}


def state(config: Member, tier: str) -> StateDir | None:
    """Where this process keeps what a restart must know; None: nowhere. Raises ConfigError."""
    if config.state_dir is None:
        return None
    try:
        return StateDir(Path(config.state_dir), config.fleet, f"{tier}.{config.region}.{config.instance}")
    except ValueError as error:
        raise ConfigError("state_dir", [str(error)]) from None


def keep(config: Member, tier: str, rng: Random, log: Throttled) -> Callable[[str, Store], Store]:
    """For `store_of`: a wrapper that keeps each hub's documents on disk, if the configuration has a directory for
    it.
    """
    state_dir = state(config, tier)

    def warn(problem: str) -> None:
        log.error("state directory", problem, problem=problem)

    return lambda hub, one: one if state_dir is None else DiskCachedStore(one, hub, state_dir, rng, warn)


def sealed(
    given: Store | Mapping[str, EtcdSettings],
    keys: Keys,
    refused: Callable[[str], None],
    rng: Random,
    keep: Callable[[str, Store], Store] = lambda _name, one: one,
) -> Store:
    """The store of these hubs, or the one given, whose readers see what counts by these keys. What is kept on disk is
    as it was written: it is judged again when it is read."""
    if isinstance(given, Mapping):
        return store_of(given, rng, lambda name, one: Sealed(keep(name, one), keys, refused))
    return Sealed(given, keys, refused)


def disk_caches(store: Store, hub: str) -> list[dict[str, Any]]:
    """The state of the documents that a store keeps on disk; `hub`: the name of a single hub."""
    return disk_cache_status(inner(one) for one in stores_of(store, hub).values())


def ignored(store: Store, hub: str) -> list[dict[str, Any]]:
    """By hub: how many documents there do not count by our signing keys, and up to eight of them with the reason."""
    sealed_hubs = {name: one for name, one in stores_of(store, hub).items() if isinstance(one, Sealed) and one.ignored}
    return [
        {"hub": name, "documents": len(one.ignored), "such_as": dict(islice(sorted(one.ignored.items()), 8))}
        for name, one in sealed_hubs.items()
    ]


def observe(metrics: TierMetrics, store: Store, hub: str) -> None:
    """Expose how many documents are ignored, those that were there when the process started, too."""

    def count() -> float:
        return float(sum(one["documents"] for one in ignored(store, hub)))

    metrics.gauge("ignored_documents", "Documents in etcd that do not count by the signing keys.", count)


def law_book(
    config: Member,
    tier: str,
    store: Store,
    law: Law,
    adopt: Callable[[Law], None],
    metrics: TierMetrics,
    log: Throttled,
    rng: Random,
) -> LawBook:
    """The law as this process follows it: in each hub by itself, signature and all. Raises ConfigError."""
    hub = law.topology.regions[config.region].hub
    stores = {name: inner(one) for name, one in stores_of(store, hub).items()}
    keys, state_dir = config.signing.made(), state(config, tier)
    return LawBook(stores, law, adopt, metrics.report_refused, log, keys=keys, state=state_dir, rng=rng)


def _away_ms(hub: str, region: str, topology: Topology) -> float:
    near = (topology.rtt_ms(region, other) for other, known in topology.regions.items() if known.hub == hub)
    return min(near, default=inf)


def _hub(name: str, given: Etcd, endpoints: tuple[str, ...]) -> EtcdSettings:
    try:
        return given.settings(endpoints)
    except ValueError as error:
        raise ConfigError(f"hub {name!r} of the topology", [str(error)]) from None
