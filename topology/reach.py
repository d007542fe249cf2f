"""Finds tenants and keys in a topology file that no region may serve under their law.

It evaluates the raw document with `topology.law`, and reports nothing if a name or rule that matters already has a
problem: a consequence is not reported beside its cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topology.law import Law, narrowing
from topology.model import Place, Region, Residency, Rule, Tenant, Topology
from topology.problems import Problem, path_of, quoted
from topology.references import Loc, closure, records, texts

# What decides where regions lie. A wrong coordinate or price does not.
_MAP_FAULT = re.compile(r"(jurisdictions|countries)\b.*|regions(\[\d+\](\.(name|country|jurisdictions)\b.*)?)?")


def stranded_problems(raw: Mapping[str, Any], problems: Sequence[Problem]) -> list[Problem]:
    """Tenants and keys without a lawful region, as far as `problems` leave it knowable."""
    faulty = tuple(problem.path for problem in problems)
    if any(_MAP_FAULT.fullmatch(path) for path in faulty):
        return []
    found = []
    rules = [(path, tenant, scope, rule) for path, tenant in records(raw, "tenants") for scope, rule in _rules(tenant)]
    names = {rule: str(n) for n, rule in enumerate({rule for _, _, _, rule in rules})}
    law = Law(_sketch(raw, names))
    for path, tenant, scope, rule in rules:
        at = path_of(*path, "residency", scope)
        if any(fault.startswith(at) for fault in faulty):
            continue
        who = f"tenant {quoted(str(tenant.get('name')))}"
        if not law.verdict(names[rule], "").lawful:
            found.append(Problem(at, f"no region is lawful for {scope} of {who}", "allow a place that holds a region"))
        elif scope == "processing":
            found += _stranded_keys(law, names[rule], tenant, path, faulty)
    return found


def _stranded_keys(
    law: Law, rule: str, tenant: Mapping[str, Any], path: Loc, faulty: tuple[str, ...]
) -> Iterator[Problem]:
    for field_path, key in records(tenant, "keys", path):
        within = tuple(place for _, place in texts(key, "within"))
        at = path_of(*field_path, "within")
        known = not any(fault.startswith(at) for fault in faulty)
        if known and not law.verdict(rule, "", narrow=narrowing(within)).lawful:
            name, owner = quoted(str(key.get("name"))), quoted(str(tenant.get("name")))
            message = f"no region is lawful for key {name} of tenant {owner}"
            yield Problem(at, message, "name a place the tenant is allowed, or leave `within` out")


def _rules(tenant: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """The scopes without which nothing can be served. To record nothing or hint nothing is a policy one may have."""
    residency = tenant.get("residency")
    for scope in ("processing", "entry"):
        rule = residency.get(scope) if isinstance(residency, Mapping) else None
        if isinstance(rule, Mapping):
            allow, deny = (tuple(name for _, name in texts(rule, field)) for field in ("allow", "deny"))
            yield scope, Rule(allow, deny)


def _sketch(raw: Mapping[str, Any], names: Mapping[Rule, str]) -> Topology:
    """The map alone, with one tenant for each distinct rule."""
    parents = {item["name"]: _within(item) for _, item in records(raw, "jurisdictions")}
    countries = {item["name"]: _within(item) for _, item in records(raw, "countries")}
    regions = {}
    for _, item in records(raw, "regions"):
        name, country = item["name"], item["country"]
        own = [jurisdiction for _, jurisdiction in texts(item, "jurisdictions")]
        regions[name] = Region(name, "", country, closure(parents, [*countries[country], *own]), 0.0, 0.0)
    places = {name: Place(name, "jurisdiction") for name in parents} | {
        name: Place(name, "country") for name in countries
    }
    tenants = {name: Tenant(name, residency=Residency(rule)) for rule, name in names.items()}
    return Topology("sketch", 1, regions, tenants, places=places)


def _within(item: Mapping[str, Any]) -> list[str]:
    return [name for _, name in texts(item, "within")]
