"""Checks that the parts of a topology file fit together: names, nesting, round-trip times, rules, keys.

It reads the raw document and tolerates any shape, so that these faults are reported together with faults of shape.
Parts with the wrong shape are skipped here: `topology.schema` reports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from topology.model import WORLD
from topology.problems import Problem, did_you_mean, path_of, quoted

Loc = tuple[str | int, ...]
"""Where a value stands in the document: keys and indices from the top."""
_SCOPES = ("processing", "entry", "logging", "hints")
_KINDS = {"jurisdictions": "jurisdiction", "countries": "country", "regions": "region"}


def reference_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Every fault between parts, in the order of the document."""
    yield from _names(raw)
    yield from _nesting(raw)
    yield from _homes(raw)
    yield from _round_trips(raw)
    yield from _law(raw)


def law_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """The faults of a law alone, in a document whose map is sound."""
    yield from _names(raw)
    yield from _law(raw)


def _law(raw: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _rules(raw)
    yield from _waits(raw)
    yield from _hashes(raw)


def records(holder: object, section: str, path: Loc = ()) -> Iterator[tuple[Loc, Mapping[str, Any]]]:
    """The mappings in a list, each with its path."""
    items = holder.get(section) if isinstance(holder, Mapping) else None
    if isinstance(items, list):
        for index, item in enumerate(items):
            if isinstance(item, Mapping):
                yield (*path, section, index), item


def texts(holder: object, field: str, path: Loc = ()) -> Iterator[tuple[Loc, str]]:
    """The texts in a list, each with its path."""
    items = holder.get(field) if isinstance(holder, Mapping) else None
    if isinstance(items, list):
        for index, item in enumerate(items):
            if isinstance(item, str):
                yield (*path, field, index), item


def entries(holder: object, field: str, path: Loc = ()) -> Iterator[tuple[Loc, str, Any]]:
    """The named values in a mapping, each with its path."""
    items = holder.get(field) if isinstance(holder, Mapping) else None
    if isinstance(items, Mapping):
        for name, value in items.items():
            if isinstance(name, str):
                yield (*path, field, name), name, value


def names(raw: Mapping[str, Any], *sections: str) -> list[str]:
    """The names declared in these sections, well-formed or not."""
    return [item["name"] for section in sections for _, item in records(raw, section) if _named(item)]


def _named(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("name"), str)


def _names(raw: Mapping[str, Any]) -> Iterator[Problem]:
    taken = {WORLD: "the place every region lies in"}
    for section, kind in _KINDS.items():
        for path, item in records(raw, section):
            if _named(item):
                yield from _taken(taken, item["name"], (*path, "name"), f"a {kind}")
    entries_named: dict[str, str] = {}
    for path, entry in records(raw, "entries"):
        if _named(entry):
            yield from _taken(entries_named, entry["name"], (*path, "name"), "an entry")
    tenants: dict[str, str] = {}
    for path, tenant in records(raw, "tenants"):
        if _named(tenant):
            yield from _taken(tenants, tenant["name"], (*path, "name"), "a tenant")
        keys: dict[str, str] = {}
        for at, key in records(tenant, "keys", path):
            if _named(key):
                yield from _taken(keys, key["name"], (*at, "name"), "a key of this tenant")


def _taken(taken: dict[str, str], name: str, path: Loc, what: str) -> Iterator[Problem]:
    if name in taken:
        message = f"{quoted(name)} is already the name of {taken[name]}"
        yield Problem(path_of(*path), message, "rename one: rules could not tell them apart")
    taken.setdefault(name, f"{what} ({path_of(*path)})")


def _nesting(raw: Mapping[str, Any]) -> Iterator[Problem]:
    jurisdictions = names(raw, "jurisdictions")
    parents: dict[str, list[str]] = {}
    for section in ("jurisdictions", "countries"):
        for path, place in records(raw, section):
            for at, parent in texts(place, "within", path):
                yield from _known(parent, jurisdictions, at, "jurisdiction", "jurisdictions")
            if section == "jurisdictions" and _named(place):
                parents.setdefault(place["name"], []).extend(parent for _, parent in texts(place, "within"))
    yield from _cycles(raw, parents)


def _cycles(raw: Mapping[str, Any], parents: Mapping[str, list[str]]) -> Iterator[Problem]:
    for path, place in records(raw, "jurisdictions"):
        name = place.get("name")
        if isinstance(name, str) and name in closure(parents, parents.get(name, [])):
            message = f"{quoted(name)} lies within itself, by {quoted(', '.join(parents[name]))}"
            yield Problem(path_of(*path, "within"), message, "remove one link of the circle")


def closure(parents: Mapping[str, list[str]], start: list[str]) -> frozenset[str]:
    """Everything reachable from `start`, itself included. Ends on circles too."""
    reached: set[str] = set()
    open_names = list(start)
    while open_names:
        name = open_names.pop()
        if name not in reached:
            reached.add(name)
            open_names.extend(parents.get(name, []))
    return frozenset(reached)


def _homes(raw: Mapping[str, Any]) -> Iterator[Problem]:
    countries, jurisdictions = names(raw, "countries"), names(raw, "jurisdictions")
    hubs = [name for _, name, _ in entries(raw, "hubs")]
    for path, region in records(raw, "regions"):
        for field, known, section in (("country", countries, "countries"), ("hub", hubs, "hubs")):
            if isinstance(region.get(field), str):
                yield from _known(region[field], known, (*path, field), field, section)
        for at, name in texts(region, "jurisdictions", path):
            yield from _known(name, jurisdictions, at, "jurisdiction", "jurisdictions")
    regions = names(raw, "regions")
    for path, entry in records(raw, "entries"):
        if isinstance(entry.get("region"), str):
            yield from _known(entry["region"], regions, (*path, "region"), "region", "regions")
        if entry.get("ipv4", []) == entry.get("ipv6", []) == []:
            message = f"entry {quoted(str(entry.get('name')))} has no address"
            yield Problem(path_of(*path), message, "give `ipv4`, `ipv6` or, best, both")


def _known(name: str, known: list[str], path: Loc, kind: str, section: str) -> Iterator[Problem]:
    if name not in known:
        remedy = did_you_mean(name, known, f"declare it under `{section}`")
        yield Problem(path_of(*path), f"unknown {kind} {quoted(name)}", remedy)


def _round_trips(raw: Mapping[str, Any]) -> Iterator[Problem]:
    regions = list(dict.fromkeys(names(raw, "regions")))
    given: dict[frozenset[str], tuple[Loc, Any]] = {}
    for outer, a, row in entries(raw, "rtt_ms"):
        yield from _known(a, regions, outer, "region", "regions")
        for path, b, ms in entries({a: row}, a, ("rtt_ms",)):
            yield from _known(b, regions, path, "region", "regions")
            if a == b:
                yield Problem(path_of(*path), "a region's round-trip time to itself", "give it as `local_rtt_ms`")
            elif frozenset((a, b)) in given and given[frozenset((a, b))][1] != ms:
                other = path_of(*given[frozenset((a, b))][0])
                yield Problem(
                    path_of(*path), f"differs from the same pair at {other}", "round-trip times are symmetric; keep one"
                )
            given.setdefault(frozenset((a, b)), (path, ms))
    for a, b in combinations(regions, 2):
        if frozenset((a, b)) not in given:
            remedy = f"add `{a}: {{{b}: <milliseconds>}}`"
            yield Problem(path_of("rtt_ms", a, b), f"no round-trip time between {quoted(a)} and {quoted(b)}", remedy)


def _rules(raw: Mapping[str, Any]) -> Iterator[Problem]:
    places = [WORLD, *names(raw, *_KINDS)]
    known = frozenset(places)
    for path, name in _places_named(raw):
        if name not in known:
            remedy = did_you_mean(name, places, "declare it as a region, country or jurisdiction")
            yield Problem(path_of(*path), f"unknown place {quoted(name)}", remedy)


def _places_named(raw: Mapping[str, Any]) -> Iterator[tuple[Loc, str]]:
    yield from _model_places(raw, ())
    for path, tenant in records(raw, "tenants"):
        for scope in _SCOPES:
            at: Loc = (*path, "residency")
            residency = tenant.get("residency")
            rule = residency.get(scope) if isinstance(residency, Mapping) else None
            yield from texts(rule, "allow", (*at, scope))
            yield from texts(rule, "deny", (*at, scope))
        for at, key in records(tenant, "keys", path):
            yield from texts(key, "within", at)
        yield from _model_places(tenant, path)


def _model_places(holder: Mapping[str, Any], path: Loc) -> Iterator[tuple[Loc, str]]:
    for at, _, rule in entries(holder, "models", path):
        yield from texts(rule, "allow", at)
        yield from texts(rule, "deny", at)


def _waits(raw: Mapping[str, Any]) -> Iterator[Problem]:
    for path, tenant in records(raw, "tenants"):
        residency = tenant.get("residency")
        if isinstance(residency, Mapping):
            waits = residency.get("on_exhausted") == "wait"
            wait_max_s = residency.get("wait_max_s", 0)
            if isinstance(wait_max_s, (int, float)) and waits != (wait_max_s > 0):
                remedy = "give `on_exhausted: wait` with `wait_max_s` above 0, or neither"
                yield Problem(path_of(*path, "residency"), "on_exhausted and wait_max_s disagree", remedy)


def _hashes(raw: Mapping[str, Any]) -> Iterator[Problem]:
    held = [
        (path, key["sha256"])
        for outer, tenant in records(raw, "tenants")
        for path, key in records(tenant, "keys", outer)
        if isinstance(key.get("sha256"), str)
    ]
    often = Counter(sha256 for _, sha256 in held)
    first: dict[str, Loc] = {}
    for path, sha256 in held:
        if often[sha256] > 1 and sha256 in first:
            message = f"the same key as {path_of(*first[sha256])}"
            yield Problem(path_of(*path, "sha256"), message, "a key speaks for one tenant: make another")
        first.setdefault(sha256, path)
