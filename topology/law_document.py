"""The law as a separate document, which replaces a topology's law while its map stays: read, applied, written.

JSON, as in etcd. A document is refused whole, with every fault at once, or trusted whole. It is read against one map,
and refused if it names a place that the map lacks. Never decides which of two laws is in force.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pydantic import ValidationError

from topology.load import rules_of, tenants_of
from topology.model import Key, Residency, Rule, Tenant, Topology
from topology.problems import Problem, TopologyError, path_of
from topology.reach import stranded_problems
from topology.references import law_problems
from topology.schema import LawDoc, problems_of

DOCUMENT_LIMIT_BYTES = 1024 * 1024  # what a key of etcd holds: some 4,000 tenants
PROBLEMS_MAX = 100


@dataclass(frozen=True, slots=True)
class LawDocument:
    """A law read: what `over` puts in the place of a topology's own. `at` is the author's clock, for people alone."""

    epoch: int
    author: str
    why: str
    at: str
    tenants: Mapping[str, Tenant]
    models: Mapping[str, Rule]

    def over(self, topology: Topology) -> Topology:
        """The same map under this law."""
        return replace(topology, epoch=self.epoch, tenants=self.tenants, models=self.models)


def read(document: bytes, topology: Topology, source: str) -> LawDocument:
    """The law in a JSON document, for the map of this topology. TopologyError holds (at most 100) problems at once."""
    raw, doubles = _decoded(document, source)
    law = {"models": raw.get("models"), "tenants": raw.get("tenants")}
    problems = list(doubles)
    try:
        doc = LawDoc.model_validate(raw)
    except ValidationError as error:
        doc = None
        problems += problems_of(error, LawDoc)[:PROBLEMS_MAX]
    whole = {**_map_of(topology), **law}
    problems += islice(law_problems(whole), PROBLEMS_MAX)
    problems += stranded_problems(whole, problems)
    if doc is None or problems:
        raise TopologyError(source, problems[:PROBLEMS_MAX])
    return LawDocument(doc.epoch, doc.author, doc.why, doc.at, tenants_of(doc.tenants), rules_of(doc.models))


def _decoded(document: bytes, source: str) -> tuple[dict[str, Any], list[Problem]]:
    if len(document) > DOCUMENT_LIMIT_BYTES:
        fault = Problem("", f"{len(document)} bytes, at most {DOCUMENT_LIMIT_BYTES}", "drop tenants, or shorten rules")
        raise TopologyError(source, [fault])
    doubles: list[Problem] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:  # JSON would silently keep the last
                doubles.append(Problem(path_of(name), "given twice in one mapping", "keep one"))
            made[name] = value
        return made

    try:
        raw = json.loads(document, object_pairs_hook=mapping)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, json.JSONDecodeError) else "bytes that are no text, or nested too deeply"
        raise TopologyError(source, [Problem("", f"not JSON: {why}", "write it with `farhop law set`")]) from None
    if not isinstance(raw, dict):
        fault = Problem("", "a law is a mapping, with `tenants` in it", "write it with `farhop law set`")
        raise TopologyError(source, [fault])
    return raw, doubles[:PROBLEMS_MAX]


def _map_of(topology: Topology) -> dict[str, Any]:
    """The map as a topology's document has it, as far as rules refer to it."""
    regions = topology.regions.values()
    known: dict[str, dict[str, list[str]]] = {
        "jurisdiction": {name: [] for region in regions for name in sorted(region.jurisdictions)},
        "country": {region.country: [] for region in regions},
    }
    for place in topology.places.values():
        known[place.kind][place.name] = list(place.within)
    return {
        "jurisdictions": [{"name": name, "within": within} for name, within in known["jurisdiction"].items()],
        "countries": [{"name": name, "within": within} for name, within in known["country"].items()],
        "regions": [
            {"name": one.name, "country": one.country, "jurisdictions": sorted(one.jurisdictions)} for one in regions
        ],
    }


def map_of(topology: Topology) -> dict[str, Any]:
    """The map as a topology's document, whole: what `topology.load` makes of it with `tenants` is that topology again.

    A region's jurisdictions are those that it lies in by itself or by another, so none needs to be nested.
    """
    regions = [
        {
            **fields,
            "city": one.city,
            "latitude": one.latitude,
            "longitude": one.longitude,
            **({"entry": list(one.entry)} if one.entry else {}),
            "hub": one.hub,
            "egress_usd_per_gb": one.egress_usd_per_gb,
            "usd_per_gpu_hour": one.usd_per_gpu_hour,
        }
        for fields, one in zip(_map_of(topology)["regions"], topology.regions.values(), strict=True)
    ]
    rtt: dict[str, dict[str, float]] = {}
    for (a, b), ms in topology.rtt.items():
        rtt.setdefault(a, {})[b] = ms
    hubs = {name: list(endpoints) for name, endpoints in topology.hubs.items()}
    named = {"name": topology.name, "epoch": topology.epoch, "hubs": hubs, "local_rtt_ms": topology.local_rtt_ms}
    entries = [
        {
            "name": one.name,
            "region": one.region,
            "ipv4": list(one.ipv4),
            "ipv6": list(one.ipv6),
            "host": one.host,
            "port": one.port,
        }
        for one in topology.entries.values()
    ]
    listed = {"entries": entries} if entries else {}
    return {**named, **_map_of(topology), "regions": regions, **listed, "rtt_ms": rtt}


def document_of(topology: Topology) -> dict[str, Any]:
    """The law of a topology as a document: `models` and `tenants`, and of those what differs from the defaults."""
    return {
        "models": {name: _rule(rule) for name, rule in topology.models.items()},
        "tenants": [_tenant(tenant) for tenant in topology.tenants.values()],
    }


def _tenant(tenant: Tenant) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tenant.name}
    if tenant.keys:
        fields["keys"] = [_key(key) for key in tenant.keys]
    if tenant.residency is not None:
        fields["residency"] = _residency(tenant.residency)
    plain = Tenant(tenant.name)
    for field in ("priority", "weight", "share_prefixes", "resume"):
        if getattr(tenant, field) != getattr(plain, field):
            fields[field] = getattr(tenant, field)
    if tenant.tiers:
        fields["tiers"] = dict(tenant.tiers)
    if tenant.objectives:
        fields["objectives"] = [{"ttft_ms": ms, "priority": priority} for ms, priority in tenant.objectives]
    if tenant.models:
        fields["models"] = {name: _rule(rule) for name, rule in tenant.models.items()}
    return fields


def _key(key: Key) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": key.name, "sha256": key.sha256}
    return fields | ({"within": list(key.within)} if key.within else {}) | ({"explain": True} if key.explain else {})


def _residency(residency: Residency) -> dict[str, Any]:
    fields: dict[str, Any] = {"processing": _rule(residency.processing)}
    for scope in ("entry", "logging", "hints"):
        rule: Rule | None = getattr(residency, scope)
        if rule is not None:
            fields[scope] = _rule(rule)
    if residency.on_exhausted == "wait":
        fields |= {"on_exhausted": "wait", "wait_max_s": residency.wait_max_s}
    return fields


def _rule(rule: Rule) -> dict[str, Any]:
    return {"allow": list(rule.allow), **({"deny": list(rule.deny)} if rule.deny else {})}


def encode(law: Mapping[str, Any], epoch: int, author: str, why: str, at: str) -> bytes:
    """A law (`tenants`, and maybe `models`) as its document. What it says is not checked: `read` does that."""
    return json.dumps({**law, "epoch": epoch, "author": author, "why": why, "at": at}, default=str).encode()


def changed(before: Topology, after: Topology) -> dict[str, list[str]]:
    """The tenants that one law has and the other has not or differently: `added`, `removed`, `changed`, sorted."""
    old, new = before.tenants, after.tenants
    return {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
        "models": sorted(m for m in {*before.models, *after.models} if before.models.get(m) != after.models.get(m)),
    }
