"""The standing comparison's cells: all scenarios, the fleets of a day, and what quick leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from farhop_lab.scenarios.load import find
from farhop_lab.studies.cell import Key
from farhop_lab.studies.routing import FLEETS, SCENARIOS, Plan, fleet, jobs, loss, needed, scenarios


def test_every_scenario_has_its_rivals_and_its_ceiling() -> None:
    found = {scenario.doc.name: names for scenario, names in scenarios(Plan())}
    assert set(SCENARIOS) <= set(found)
    assert all(names[0] == "farhop" for name, names in found.items() if name in SCENARIOS)
    assert "farhop-no-trie" in found["arena"]
    assert {f"diurnal-{n}" for n in FLEETS} <= set(found)
    assert "omniscient" in found["wildchat"]


def test_quick_is_the_same_for_a_shorter_time() -> None:
    (quick, names), *_ = scenarios(Plan(quick=True, only=("arena",)))
    (whole, all_names), *_ = scenarios(Plan(only=("arena",)))
    assert quick.doc.duration_s == 90.0
    assert quick.doc.warm_up_s == 30.0
    assert quick.doc.sites == whole.doc.sites
    assert set(names) < set(all_names)
    assert {job.key.seed for job in jobs(Plan(quick=True, only=("push",)))} == {1, 2}


def test_a_fleet_is_spread_evenly() -> None:
    scenario = find("diurnal", ["farhop", *find_all()])
    assert [site.replicas for site in fleet(scenario, 8).doc.sites.values()] == [3, 3, 2]
    assert [site.replicas for site in fleet(scenario, 12).doc.sites.values()] == [4, 4, 4]
    assert fleet(scenario, 8).doc.name == "diurnal-8"


def find_all() -> list[str]:
    from farhop_lab.studies import routers

    return routers.names()


def test_the_least_fleet_is_the_least_that_reaches_the_local_one() -> None:
    def cell(scenario: str, router: str, good: float) -> Any:
        return SimpleNamespace(key=Key(scenario, router, 1.0, 1), figures=lambda: {"good_per_s": good})

    results = [
        cell("diurnal", "farhop", 1.0),
        cell("diurnal-12", "region-local", 10.0),
        cell("diurnal-12", "farhop", 13.0),
        cell("diurnal-8", "farhop", 10.5),
        cell("diurnal-7", "farhop", 9.0),
    ]
    assert needed(results) == (8, {7: 0.9, 8: 1.05, 12: 1.3})
    assert needed(results[:1]) == (None, {})


def test_remaining_regions_can_carry_their_share() -> None:
    top, lost_at, back_at = loss()
    assert (round(top, 6), lost_at, back_at) == (18.0, 180, 300)
