from __future__ import annotations

from typing import Any


def _paths(found: Any) -> list[str]:
    return [problem.path for problem in found]


def test_a_tenant_without_lawful_regions(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["tenants"][0]["residency"]["processing"] = {"allow": ["fr", "cn"]}
        raw["tenants"][2]["residency"]["processing"]["deny"] = ["tokyo"]

    found = faults(change)
    assert _paths(found) == ["tenants[0].residency.processing", "tenants[2].residency.processing"]
    assert found[0].message == 'no region is lawful for processing of tenant "anywhere"'


def test_a_tenant_no_balancer_may_read(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["tenants"][0]["residency"]["entry"] = {"allow": ["world"], "deny": ["us", "eu", "jp"]}

    assert _paths(faults(change)) == ["tenants[0].residency.entry"]


def test_recording_and_hinting_nowhere_is_a_policy_one_may_have(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        for scope in ("logging", "hints"):
            raw["tenants"][0]["residency"][scope] = {"allow": ["world"], "deny": ["world"]}

    assert faults(change) == []


def test_a_key_outside_its_tenant(faults: Any) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["tenants"][1]["keys"][0]["within"] = ["jp", "us"]
        raw["tenants"][0]["keys"][0]["within"] = ["jp"]

    [problem] = faults(change)
    assert problem.path == "tenants[1].keys[0].within"
    assert problem.message == 'no region is lawful for key "demo" of tenant "eu-only"'


def test_it_is_reported_beside_unrelated_faults_and_not_beside_its_cause(faults: Any) -> None:
    def unrelated(raw: dict[str, Any]) -> None:
        raw["tenants"][0]["residency"]["processing"] = {"allow": ["cn"]}
        raw["regions"][0]["latitude"] = 100
        raw["tenants"][1]["weight"] = 0

    assert _paths(faults(unrelated)) == ["regions[0].latitude", "tenants[1].weight", "tenants[0].residency.processing"]

    def cause(raw: dict[str, Any]) -> None:
        raw["tenants"][1]["residency"]["processing"] = {"allow": ["euu"]}

    assert _paths(faults(cause)) == ["tenants[1].residency.processing.allow[0]"]

    def map_fault(raw: dict[str, Any]) -> None:
        raw["regions"][1]["country"] = "dee"

    assert _paths(faults(map_fault)) == ["regions[1].country"]
