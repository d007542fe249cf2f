"""The topology as data: places, regions, round-trip times, tenants and their rules. Built once, frozen, swapped whole.

It never reads a file, a clock or a die. It decides nothing: what the rules mean is the business of `topology.law`. Kept
here: round-trip times are symmetric; a key hash belongs to one tenant; no mapping changes once the topology is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

WORLD = "world"
"""The place every region lies in. `allow: [world]` is how a rule says "anywhere"."""

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the lattice above regions. `within` names its direct parents; a place may have several."""

    name: str
    kind: Literal["jurisdiction", "country"]
    within: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """One site with GPUs. `jurisdictions` is closed over nesting (eu brings eea along); country and world are apart.

    `entry` holds the URLs clients may use here, `hub` the etcd cluster it publishes to. Degrees are WGS 84, north and
    east positive. `usd_per_gpu_hour` is what an hour of one GPU costs here, `egress_usd_per_gb` a GB leaving it.
    """

    name: str
    city: str
    country: str
    jurisdictions: frozenset[str]
    latitude: float
    longitude: float
    entry: tuple[str, ...] = ()
    hub: str = ""
    egress_usd_per_gb: float = 0.0
    usd_per_gpu_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """The public addresses of the global balancers of one site. Several entries may share an address (anycast).

    `host` leads to this entry alone (unicast); "" where there is none. `port` is where clients connect.
    """

    name: str
    region: str
    ipv4: tuple[str, ...] = ()
    ipv6: tuple[str, ...] = ()
    host: str = ""
    port: int = 443


@dataclass(frozen=True, slots=True)
class Rule:
    """Places allowed and places denied; deny wins. An empty `allow` allows nothing: "anywhere" is said as `world`."""

    allow: tuple[str, ...]
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a tenant's work, bodies, records and prefix hints may be. None: `entry` anywhere, the rest as `processing`.

    `on_exhausted` says what to do when lawful regions exist and none serves: refuse, or wait at most `wait_max_s`.
    """

    processing: Rule
    entry: Rule | None = None
    logging: Rule | None = None
    hints: Rule | None = None
    on_exhausted: Literal["refuse", "wait"] = "refuse"
    wait_max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Key:
    """An API key, kept as the hex SHA-256 of its text. `within` narrows its tenant to places; empty: it does not.

    `explain`: its holder may be told why a request went where it did.
    """

    name: str
    sha256: str
    within: tuple[str, ...] = ()
    explain: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is served. Without `residency` nothing is lawful. A larger `priority` is served first and shed last.

    `weight` is its share inside a priority band; `share_prefixes` lets its prompts share prefix nodes with other
    tenants that say so too; `models` narrows `residency.processing` further for single models. Requests may ask for
    another priority by a tier's name, or by the milliseconds within which they want their first token: `tiers` and
    `objectives` (ms, priority) say which, and without them nothing does. `resume`: what its streams may at most
    go on by elsewhere when what serves them dies.
    """

    name: str
    keys: tuple[Key, ...] = ()
    residency: Residency | None = None
    priority: int = 0
    weight: float = 1.0
    share_prefixes: bool = False
    models: Mapping[str, Rule] = field(default_factory=dict)
    tiers: Mapping[str, int] = field(default_factory=dict)
    objectives: tuple[tuple[float, int], ...] = ()
    resume: Literal["off", "exact", "text"] = "text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", _frozen(self.models))
        object.__setattr__(self, "tiers", _frozen(self.tiers))

    def priority_of(self, names: tuple[str, ...], ttft_ms: float | None) -> int:
        """Of a request that asks for one of these tiers, or for its first token within so many ms."""
        named = next((self.tiers[name] for name in names if name in self.tiers), None)
        if named is not None:
            return named
        soon = [priority for within_ms, priority in self.objectives if ttft_ms is not None and ttft_ms <= within_ms]
        return max(soon, default=self.priority)


@dataclass(frozen=True, slots=True)
class Topology:
    """The map, and the law of one epoch. Regions, entries, tenants and places are keyed by name, `hubs` gives etcd
    endpoints by name.

    `rtt` holds milliseconds for each pair of regions, in either order; `models` the rule of a model for all tenants,
    such as where its weights may be. ValueError if a key hash occurs twice or a pair has two different times.
    """

    name: str
    epoch: int
    regions: Mapping[str, Region]
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    models: Mapping[str, Rule] = field(default_factory=dict)
    hubs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rtt: Mapping[tuple[str, str], float] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    local_rtt_ms: float = 1.0
    entries: Mapping[str, Entry] = field(default_factory=dict)
    _keys: Mapping[str, tuple[Tenant, Key]] = field(init=False, repr=False, compare=False)
    _rtt_ms: Mapping[tuple[str, str], float] = field(init=False, repr=False, compare=False)
    _ancestors: Mapping[str, frozenset[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("regions", "tenants", "models", "hubs", "rtt", "places", "entries"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        object.__setattr__(self, "_keys", _index_keys(self.tenants))
        object.__setattr__(self, "_rtt_ms", _symmetric(self.rtt, self.regions, self.local_rtt_ms))
        object.__setattr__(self, "_ancestors", {name: _ancestry(region) for name, region in self.regions.items()})

    def rtt_ms(self, a: str, b: str) -> float:
        """The round-trip time between two regions in milliseconds, the same both ways. LookupError if unknown."""
        try:
            return self._rtt_ms[a, b]
        except KeyError:
            raise LookupError(
                f"no round-trip time between {a!r} and {b!r} in topology {self.name!r}: add the pair"
            ) from None

    def key(self, sha256_hex: str) -> tuple[Tenant, Key] | None:
        """Whose key has this lower-case hex SHA-256. One dictionary lookup."""
        return self._keys.get(sha256_hex)

    def ancestors(self, region: str) -> frozenset[str]:
        """Every place the region lies in, itself, its country and the world included. Empty for an unknown region."""
        return self._ancestors.get(region, frozenset())


def _frozen(mapping: Mapping[_K, _V]) -> Mapping[_K, _V]:
    """A read-only copy, so that whoever built the mapping cannot change the topology under a running decision."""
    return MappingProxyType(dict(mapping))


def _ancestry(region: Region) -> frozenset[str]:
    return region.jurisdictions | {region.name, region.country, WORLD}


def _index_keys(tenants: Mapping[str, Tenant]) -> dict[str, tuple[Tenant, Key]]:
    index: dict[str, tuple[Tenant, Key]] = {}
    for tenant in tenants.values():
        for key in tenant.keys:
            if key.sha256 in index:
                other, twin = index[key.sha256]
                raise ValueError(
                    f"keys {other.name}/{twin.name} and {tenant.name}/{key.name} have one hash: make a new key"
                )
            index[key.sha256] = (tenant, key)
    return index


def _symmetric(
    rtt: Mapping[tuple[str, str], float], regions: Mapping[str, Region], local_rtt_ms: float
) -> dict[tuple[str, str], float]:
    matrix = {(name, name): local_rtt_ms for name in regions}
    for (a, b), ms in rtt.items():
        if rtt.get((b, a), ms) != ms:
            raise ValueError(f"two round-trip times between {a!r} and {b!r}: {ms} and {rtt[b, a]} ms; keep one")
        matrix[a, b] = matrix[b, a] = ms
    return matrix
