"""Each safety check by itself: what holds on a fleet at rest, and what stops a drill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from drill_documents import WORLD, made

from farhop.store.documents.report import ModelReport, RegionReport
from farhop_drill import checks
from farhop_drill.checks import Facts
from topology.model import Entry


def report(region: str, slots: int = 100, busy: int = 10, queued: int = 0) -> RegionReport:
    model = ModelReport(
        "m", 2, 2, slots, slots - busy, 1000, 1000, 0.0, 0.1, 1.0, 4.0, in_flight=busy, queued_requests=queued
    )
    return RegionReport(
        region=region, instance="i", incarnation=1, seq=1, clock_ms=0.0, tier_address="127.0.0.1:1",
        control_address="127.0.0.1:2", models=(model,),
    )  # fmt: skip


def status(**changed: Any) -> dict[str, Any]:
    regions = [
        {"region": name, "state": "up", "why": "", "override": None, "instances": [{"report_age_s": 0.1}]}
        for name in WORLD.regions
    ]
    return {"region": "virginia", "regions": regions, "store_trouble": None, "operator_overrides": []} | changed


REST = Facts(
    topology=WORLD,
    statuses=[status()],
    reports=[report(name) for name in WORLD.regions],
    epoch_s=0.0,
    injects=frozenset({"traffic"}),
)


def failing(drill: Any = None, **changed: Any) -> dict[str, str]:
    findings = checks.look(drill or made(), msgspec.structs.replace(REST, **changed))
    blocked = checks.blocked(findings)
    found = {one.check: one.seen for one in findings if not one.held}
    assert len(blocked) == len(found)
    return found


def test_a_fleet_at_rest_may_be_drilled() -> None:
    assert failing() == {}


def test_an_engaged_lever_another_drill_and_a_closed_window_block_a_drill() -> None:
    found = failing(made(windows=["mon 09:00-10:00"]), emergency_stop="by ops: incident", holder="r-1 by ops")
    assert set(found) == {"lever", "alone", "window"}
    assert "by ops: incident" in found["lever"]


def test_faults_need_a_world_of_their_own_and_none_that_still_stands() -> None:
    fault = made(
        kind="fault",
        steps=[{"name": "x", "soak_s": 1, "inject": [{"do": "kill-engines", "region": "virginia"}]}],
    )
    assert "farhop up" in failing(fault)["injector"]
    both = frozenset({"traffic", "fault"})
    assert failing(fault, injects=both) == {}
    assert failing(fault, injects=both, impossible="not made in pods") == {"injector": "not made in pods"}
    assert "still injected" in failing(fault, injects=both, injecting=["r.kill"])["injector"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"statuses": []},
        {"silent": ["global tokyo"]},
        {"trouble": ["etcd: hub a: gone"]},
        {"statuses": [status(store_trouble="etcd is silent")]},
        {"statuses": [status(operator_overrides=[{"action": "bias", "region": "tokyo", "author": "x"}])]},
        {"statuses": [status(regions=[{"region": "tokyo", "state": "suspect", "why": "no recent report"}])]},
        {"statuses": [status(regions=[{"region": "tokyo", "state": "up", "override": {"action": "drain"}}])]},
    ],
)
def test_an_incident_stops_it(wrong: dict[str, Any]) -> None:
    assert "incident" in failing(**wrong)


@pytest.mark.parametrize("age_s", [3.1, float("nan")])
def test_a_stale_report_stops_it(age_s: float) -> None:
    regions = [{"region": "tokyo", "state": "up", "instances": [{"report_age_s": age_s}]}]
    assert set(failing(statuses=[status(regions=regions)])) == {"reports"}
    assert "reports" in failing(reports=[])


def test_a_drill_never_takes_a_tenant_s_last_lawful_region() -> None:
    tokyo = made(
        blast_radius={"regions": ["tokyo"]},
        steps=[{"name": "x", "soak_s": 1, "inject": [{"do": "drain", "region": "tokyo"}]}],
    )
    assert "japan-only" in failing(tokyo)["last-site"]
    part = made(
        blast_radius={"regions": ["tokyo"]},
        steps=[{"name": "x", "soak_s": 1, "inject": [{"do": "drain", "region": "tokyo", "share": 0.5}]}],
    )
    assert "last-site" not in failing(part)  # a tenant without another region is still served there
    left = [report("virginia")]
    assert "anywhere" in failing(reports=left)["last-site"]  # frankfurt and tokyo serve nothing


def test_a_drill_never_takes_a_tenants_last_lawful_entry() -> None:
    entry = Entry("tokyo-1", "tokyo")
    world = replace(WORLD, entries={"tokyo-1": entry})
    lost = made(
        blast_radius={"regions": ["virginia"]},
        steps=[{"name": "x", "soak_s": 1, "inject": [{"do": "drain-entry", "entry": "virginia"}]}],
    ).model_copy(deep=True)
    injection = lost.steps[0].inject[0].model_copy(update={"entry": "tokyo-1"})
    step = lost.steps[0].model_copy(update={"inject": [injection]})
    assert "japan-only" in failing(lost.model_copy(update={"steps": [step]}), topology=world)["last-entry"]


@pytest.mark.parametrize(
    ("busy", "queued", "held"), [(10, 0, True), (56, 0, True), (57, 0, False), (50, 7, False), (100, 0, False)]
)
def test_the_remaining_regions_of_each_law_zone_must_hold_the_load(busy: int, queued: int, held: bool) -> None:
    """Three regions of 100 slots; without one, 3 x 57 / 200 = 0.855 is more than 0.85."""
    found = failing(reports=[report(name, busy=busy, queued=queued) for name in WORLD.regions])
    assert ("n-1" not in found) is held


def test_a_part_of_a_region_loses_a_part_of_its_slots() -> None:
    steps = [{"name": "x", "soak_s": 1, "inject": [{"do": "drain", "region": "virginia", "share": 0.25}]}]
    full = [report(name, busy=75) for name in WORLD.regions]  # 225 of 275: 0.82
    assert "n-1" not in failing(made(steps=steps), reports=full)
    assert "n-1" in failing(reports=full)


def test_a_missing_tenant_key_blocks_a_drill() -> None:
    assert "no key of tenant x" in failing(missing=["no key of tenant x"])["probe"]


def test_a_drill_of_a_pilot_light_does_not_begin_unless_it_sleeps() -> None:
    drill = made(hypotheses=[{"measure": "pilot_light_s", "at_most": 5}])

    def piloted(state: str, region: str = "tokyo") -> dict[str, Any]:
        found = status()
        for one in found["regions"]:
            one["pilot_light"] = {"state": state} if one["region"] == region else None
        return found

    assert failing(drill, statuses=[piloted("asleep"), piloted("asleep")]) == {}
    assert "tokyo is awake" in failing(drill, statuses=[piloted("asleep"), piloted("waking")])["pilot light"]
    assert "give `pilot_light`" in failing(drill)["pilot light"]
    hit = made().blast_radius.regions[0]
    assert "give `pilot_light`" in failing(drill, statuses=[piloted("asleep", hit)])["pilot light"], "it is hit itself"
