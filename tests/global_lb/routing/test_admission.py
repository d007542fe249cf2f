"""The law where requests come in: entry, processing, hints and records, and what the client is told."""

from __future__ import annotations

import pytest
from worlds import REGIONS, law, request

from global_lb.routing import admission
from topology.model import Residency, Rule, Topology

ANYWHERE = Rule(allow=("world",))
LAW = law(
    homely=Residency(ANYWHERE, entry=Rule(allow=("DE", "JP"))),
    nowhere=Residency(ANYWHERE, entry=Rule(allow=("mars",))),
    secretive=Residency(ANYWHERE, logging=Rule(allow=("DE",)), hints=Rule(allow=("JP",))),
)
WORLD = Topology("test", 1, REGIONS)


def test_entry() -> None:
    assert admission.entry("anyone", "london", LAW, WORLD) is None
    assert admission.entry("homely", "frankfurt", LAW, WORLD) is None
    refused = admission.entry("homely", "london", LAW, WORLD)
    assert refused is not None
    assert refused.elsewhere == "https://frankfurt.example"
    assert "entry allows only DE, JP" in refused.why
    shut = admission.entry("nowhere", "london", LAW, WORLD)
    assert shut is not None
    assert shut.elsewhere is None
    stranger = admission.entry("stranger", "london", LAW, WORLD)
    assert stranger is not None
    assert stranger.elsewhere is None


def test_processing_is_narrowed_by_key_and_wish() -> None:
    assert LAW.request_verdict(request("a")).lawful == set(REGIONS)
    assert LAW.request_verdict(request("a", key="home")).lawful == {"london"}
    assert LAW.request_verdict(request("a", narrow=(("eu", "uk"), ("uk", "apac")))).lawful == {"london"}


@pytest.mark.parametrize(("region", "hints"), [("tokyo", True), ("frankfurt", False)])
def test_hints_have_a_law_of_their_own(region: str, hints: bool) -> None:
    one = request("a", tenant="secretive")
    assert admission.hints_allowed(one, region, LAW) is hints


def test_the_summary_names_each_clause_once() -> None:
    verdict = LAW.request_verdict(request("a", tenant="german"))
    found = admission.summary(verdict, frozenset({"tokyo"}))
    assert found.startswith("no region may lawfully process this request (")
    assert "london, tokyo: tenant german: processing allows only DE" in found
    assert "frankfurt: not lawful when the request came" in found
