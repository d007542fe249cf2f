from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.references import closure, reference_problems


def _paths(found: Any) -> list[tuple[str, str]]:
    return [(problem.path, problem.remedy) for problem in found]


@pytest.mark.parametrize("scope", ["processing", "entry", "logging", "hints"])
@pytest.mark.parametrize("field", ["allow", "deny"])
def test_an_unknown_place_in_any_rule_of_a_tenant(faults: Any, scope: str, field: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["tenants"][1]["residency"][scope] = {"allow": ["eu"], "deny": [], field: ["eu", "frankfrt"]}

    expected = (f"tenants[1].residency.{scope}.{field}[1]", 'did you mean "frankfurt"?')
    assert expected in _paths(faults(change))


def test_an_unknown_place_in_model_rules_and_keys(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["models"]["m.x"] = {"deny": ["atlantis"]}
        raw["tenants"][0]["models"] = {"m": {"allow": ["tokio"]}}
        raw["tenants"][0]["keys"][0]["within"] = ["jpp"]

    assert _paths(faults(change)) == [
        ('models["m.x"].deny[0]', "declare it as a region, country or jurisdiction"),
        ("tenants[0].keys[0].within[0]", 'did you mean "jp"?'),
        ("tenants[0].models.m.allow[0]", 'did you mean "tokyo"?'),
    ]


def test_unknown_country_jurisdiction_hub_and_parent(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["regions"][0] |= {"country": "usa", "jurisdictions": ["eeaa"], "hub": "mian"}
        raw["countries"][1]["within"] = ["euu"]
        raw["jurisdictions"][1]["within"] = ["de"]

    assert [problem.path for problem in faults(change)] == [
        "jurisdictions[1].within[0]",
        "countries[1].within[0]",
        "regions[0].country",
        "regions[0].hub",
        "regions[0].jurisdictions[0]",
    ]


def test_names_given_twice_and_across_kinds(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["countries"].append({"name": "eu"})
        raw["jurisdictions"].append({"name": "world"})
        raw["regions"].append(dict(raw["regions"][2]))
        raw["tenants"][1]["name"] = "anywhere"
        raw["tenants"][0]["keys"].append({"name": "demo", "sha256": "b" * 64})

    found = faults(change)
    assert [problem.path for problem in found] == [
        "jurisdictions[2].name",
        "countries[6].name",
        "regions[3].name",
        "tenants[0].keys[1].name",
        "tenants[1].name",
    ]
    assert "a jurisdiction (jurisdictions[1].name)" in found[1].message
    assert "rename one" in found[1].remedy


def test_jurisdictions_in_a_circle(faults: Any) -> None:
    def circle(raw: dict[str, Any]) -> None:
        raw["jurisdictions"][0]["within"] = ["eu"]

    found = faults(circle)
    assert [problem.path for problem in found] == ["jurisdictions[0].within", "jurisdictions[1].within"]
    assert '"eea" lies within itself' in found[0].message

    def loop(raw: dict[str, Any]) -> None:
        raw["jurisdictions"][0]["within"] = ["eea"]

    assert [problem.path for problem in faults(loop)] == ["jurisdictions[0].within"]


def test_round_trip_times_missing_unknown_to_itself_and_in_conflict(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["rtt_ms"] = {
            "virginia": {"frankfurt": 91, "virginia": 1, "tokio": 1},
            "frankfurt": {"virginia": 92},
            "x": {},
        }

    found = faults(change)
    assert [problem.path for problem in found] == [
        "rtt_ms.virginia.virginia",
        "rtt_ms.virginia.tokio",
        "rtt_ms.frankfurt.virginia",
        "rtt_ms.x",
        "rtt_ms.virginia.tokyo",
        "rtt_ms.frankfurt.tokyo",
    ]
    assert found[-1].remedy == "add `frankfurt: {tokyo: <milliseconds>}`"


def test_a_pair_given_both_ways_alike_is_fine(faults: Any) -> None:
    assert faults(lambda raw: raw["rtt_ms"].update(tokyo={"virginia": 166})) == []


def test_one_hash_for_two_keys_is_refused(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["tenants"][3]["keys"][0]["sha256"] = raw["tenants"][1]["keys"][0]["sha256"]

    [problem] = faults(change)
    assert problem.path == "tenants[3].keys[0].sha256"
    assert problem.message == "the same key as tenants[1].keys[0]"


@pytest.mark.parametrize(
    "change", [{"on_exhausted": "wait"}, {"wait_max_s": 3.0}, {"on_exhausted": "refuse", "wait_max_s": 1}]
)
def test_waiting_without_a_bound_or_a_bound_without_waiting(faults: Any, change: dict[str, Any]) -> None:
    [problem] = faults(lambda raw: raw["tenants"][0]["residency"].update(change))
    assert (problem.path, problem.message) == ("tenants[0].residency", "on_exhausted and wait_max_s disagree")


_SECTIONS = ["regions", "countries", "jurisdictions", "tenants", "hubs", "rtt_ms", "models"]
_FIELDS = st.sampled_from(
    [*_SECTIONS, "name", "within", "keys", "residency", "processing", "allow", "sha256", "country"]
)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["a", "b", "world"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_FIELDS | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(_SECTIONS), _ANYTHING, max_size=5))
def test_reference_checks_tolerate_any_shape_of_document(raw: dict[str, Any]) -> None:
    for problem in reference_problems(raw):
        assert problem.path
        assert "\n" not in str(problem)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.dictionaries(st.integers(0, 6).map(str), st.lists(st.integers(0, 6).map(str), max_size=3)))
def test_closure_holds_exactly_what_can_be_reached(parents: dict[str, list[str]]) -> None:
    reached = closure(parents, ["0"])
    assert "0" in reached
    assert all(parent in reached for name in reached for parent in parents.get(name, []))
    assert all(name == "0" or any(name in parents.get(other, []) for other in reached) for name in reached)
