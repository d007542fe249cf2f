"""What a law allows, by set arithmetic on its document as written: an oracle for the shipped law.

Shares no code with `topology.law`, and reads no topology: the map is written down here, twice. Deliberately plain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from topology.model import Place, Region, Topology

Document = dict[str, Any]
KnownBases = Mapping[str, Collection[str] | None]
"""The base model of each model, as declared; None: it is an adapter of unknown base."""

# The map, twice: as the shipped code has it, and as plain sets.
REGIONS = {
    "paris": ("fr", {"eu", "europe"}),
    "zurich": ("ch", {"europe"}),
    "virginia": ("us", set[str]()),
    "tokyo": ("jp", {"apac"}),
}
INSIDE = {
    "world": {"paris", "zurich", "virginia", "tokyo"},
    "eu": {"paris"},
    "europe": {"paris", "zurich"},
    "apac": {"tokyo"},
    "fr": {"paris"},
    "ch": {"zurich"},
    "us": {"virginia"},
    "jp": {"tokyo"},
    **{name: {name} for name in REGIONS},
}
MAP = Topology(
    "map",
    1,
    {
        name: Region(name, name, country, frozenset(within), 0.0, 0.0, entry=(f"http://{name}.sim:80",))
        for name, (country, within) in REGIONS.items()
    },
    rtt={(a, b): 20.0 + 30.0 * abs(i - j) for i, a in enumerate(REGIONS) for j, b in enumerate(REGIONS) if i < j},
    places={name: Place(name, "jurisdiction") for name in ("eu", "europe", "apac")},
)


def union(places: Iterable[str]) -> set[str]:
    """All regions inside any of these places; an unknown place contains none."""
    return set[str]().union(*(INSIDE.get(place, set()) for place in places))


def allows(rule: Document) -> set[str]:
    """The regions that a rule leaves: what it allows, less what it denies."""
    return union(rule["allow"]) - union(rule.get("deny", ()))


def bases(model: str, known: KnownBases) -> set[str] | None:
    """The model and all models it is based on; None if that chain ends in an unknown one."""
    found, ahead = {model}, [model]
    for one in ahead:
        more = known.get(one, ())
        if more is None:
            return None
        ahead += [base for base in more if base not in found]
        found.update(more)
    return found


def lawful(
    document: Document, scope: str, tenant: str, key: str, asked: str, model: str, known: KnownBases
) -> set[str]:
    """The regions where a document allows this with a request of the tenant, with that key, that `asked`.

    Key "" means any key.
    """
    who = next((one for one in document["tenants"] if one["name"] == tenant), None)
    if who is None:
        return set()
    held = next((one for one in who.get("keys", ()) if one["name"] == key), None)
    if held is None and key:
        return set()
    residency = who["residency"]
    if scope == "entry":
        return allows(residency["entry"]) if "entry" in residency else set(INSIDE["world"])
    regions = allows(residency.get(scope, residency["processing"]))
    rules = [who.get("models", {}), document.get("models", {})]
    bound = bases(model, known)
    if bound is None:
        return set() if any(rules) else _narrowed(regions, held, asked)
    for name in bound:
        for models in rules:
            regions &= allows(models[name]) if name in models else regions
    return _narrowed(regions, held, asked)


def _narrowed(regions: set[str], held: Document | None, asked: str) -> set[str]:
    if held is not None and held.get("within"):
        regions &= union(held["within"])
    return regions & union([asked]) if asked else regions
