"""Where the law lets a request be served, by set arithmetic on the law's document: the answers are checked by it.

Shares no code with `topology.law`, so that a bug there is seen here. Pure. Never more lenient than the document: a
tenant, a place or a region that it does not know is allowed nothing. Models' bases are not considered: canaries name
their model as the law does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class Oracle:
    """`places` are the places that each region lies in, itself and its country among them; `law` has the document's
    `tenants` and `models`."""

    def __init__(self, places: Mapping[str, Collection[str]], law: Mapping[str, Any]) -> None:
        self._places = {name: {*inside, name, "world"} for name, inside in places.items()}
        self._tenants = {one["name"]: one for one in law.get("tenants") or () if isinstance(one, dict)}
        self._models = law.get("models") or {}

    def lawful(self, tenant: str, model: str) -> frozenset[str]:
        """The regions that may compute what this tenant asks of this model."""
        who = self._tenants.get(tenant)
        if who is None:
            return frozenset()
        residency = who.get("residency") or {}
        if "processing" not in residency:
            return frozenset()
        rules = [residency["processing"]]
        rules += [rules_of[model] for rules_of in (who.get("models") or {}, self._models) if model in rules_of]
        return frozenset(name for name in self._places if all(self._allows(rule, name) for rule in rules))

    def _allows(self, rule: Mapping[str, Any], region: str) -> bool:
        inside = self._places[region]
        allow = rule.get("allow")
        return bool(inside & set(["world"] if allow is None else allow)) and not inside & set(rule.get("deny") or ())
