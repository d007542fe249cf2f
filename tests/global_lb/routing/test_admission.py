"""The law at the entry: entry, processing, hints and records, and the client's answer."""

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


def test_which_entries_may_read_which_tenants_bodies() -> None:
    assert admission.may_read("anyone", "london", LAW)
    assert admission.may_read("homely", "frankfurt", LAW)
    assert not admission.may_read("homely", "london", LAW)
    assert not admission.may_read("nowhere", "london", LAW)
    assert not admission.may_read("stranger", "london", LAW)


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
