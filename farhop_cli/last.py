"""Whether a region is the last that somebody has: which tenants would be left without one for a model it serves.

Judged by what global balancers see and by the law, key by key. Never asks anybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topology.law import Law

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from topology.model import Tenant, Topology


def bereft(topology: Topology, statuses: Iterable[Mapping[str, Any]], region: str) -> list[str]:
    """Whose requests for what no other region could serve, in the eyes of any of these balancers; sorted."""
    law = Law(topology)
    left: set[str] = set()
    for status in statuses:
        for model, regions in serving(status).items():
            if region in regions:
                others = frozenset(name for name, sure in regions.items() if sure and name != region)
                for tenant in topology.tenants.values():
                    left.update(_left(law, tenant, model, region, others))
    return sorted(left)


def _left(law: Law, tenant: Tenant, model: str, region: str, others: frozenset[str]) -> Iterator[str]:
    for key in ("", *(one.name for one in tenant.keys if one.within)):
        lawful = law.verdict(tenant.name, model, key=key).lawful
        if region in lawful and not lawful & others:
            yield f"{tenant.name} ({model}{f', key {key}' if key else ''})"


def serving(status: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """By model the regions that serve it, and whether surely: one that is suspect is nobody's refuge."""
    found: dict[str, dict[str, bool]] = {}
    for one in _dicts(status.get("regions")):
        if one.get("state") not in ("up", "suspect"):
            continue
        for instance in _dicts(one.get("instances")):
            models = instance.get("models")
            if instance.get("draining") or not isinstance(models, dict):
                continue
            for model, offer in models.items():
                if isinstance(offer, dict) and offer.get("replicas_ready"):
                    found.setdefault(model, {})[str(one.get("region"))] = one["state"] == "up"
    return found


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
