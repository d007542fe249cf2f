"""The oracle beside the shipped law, which it shares no code with."""

from __future__ import annotations

import pytest
from drill_documents import WORLD

from farhop_drill.oracle import Oracle
from topology import law_document
from topology.law import Law

PLACES = {name: {one.country, *one.jurisdictions} for name, one in WORLD.regions.items()}


@pytest.mark.parametrize("tenant", [*WORLD.tenants, "nobody"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "export-controlled-70b"])
def test_the_oracle_agrees_with_the_law(tenant: str, model: str) -> None:
    oracle = Oracle(PLACES, law_document.document_of(WORLD))
    assert oracle.lawful(tenant, model) == Law(WORLD).verdict(tenant, model).lawful


def test_the_oracle_allows_nothing_by_an_unknown_place_or_to_an_unknown_tenant() -> None:
    tenants = [{"name": "t", "residency": {"processing": {"allow": ["atlantis"]}}}, {"name": "bare"}]
    oracle = Oracle(PLACES, {"tenants": tenants, "models": {}})
    assert oracle.lawful("t", "m") == oracle.lawful("bare", "m") == oracle.lawful("other", "m") == frozenset()


def test_a_denial_wins() -> None:
    fields = {"name": "t", "residency": {"processing": {"allow": ["world"], "deny": ["eea"]}}}
    assert Oracle(PLACES, {"tenants": [fields]}).lawful("t", "m") == {"virginia", "tokyo"}
