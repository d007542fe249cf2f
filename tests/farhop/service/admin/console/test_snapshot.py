"""Snapshots and pictures: what is missing is left out, what is old is marked, the worst report is shown."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.service.admin.console import snapshot as snapshots
from farhop.service.admin.console.delta import apply, diff
from farhop.service.admin.console.snapshot import CUT_OFF_MS, LastSnapshot
from topology.law import Law
from topology.load import load, shipped

STATES = ("down", "draining", "suspect", "up", "unknown")  # worst first

NOW = 1_800_000_000_000
LAW = Law(load(shipped("three-regions")))
REGIONS = ("virginia", "frankfurt", "tokyo")


def upper(region: str, states: dict[str, str], **more: Any) -> dict[str, Any]:
    fields = {name: {"state": state, "why": f"seen from {region}"} for name, state in states.items()}
    return {"tier": "global", "region": region, "epoch": 1, "regions": fields, **more}


def lower(region: str, in_flight: int, slots: int = 8) -> dict[str, Any]:
    rows = {"a": {"state": "up", "in_flight": in_flight, "slots": slots}}
    return {"tier": "regional", "region": region, "epoch": 1, "replicas": rows, "queued": 3}


HEARD = st.dictionaries(
    st.sampled_from([f"global {name}" for name in REGIONS]),
    st.tuples(
        st.sampled_from(REGIONS),
        st.dictionaries(st.sampled_from(REGIONS), st.sampled_from(STATES)),
        st.integers(0, 9000),
    ),
)


@settings(max_examples=100)
@given(HEARD)
def test_the_worst_that_is_reported_is_shown_and_nothing_that_is_not(by_balancer: dict[str, Any]) -> None:
    fields = {name: LastSnapshot(upper(at, states), NOW - age) for name, (at, states, age) in by_balancer.items()}
    made = snapshots.whole(snapshots.picture(fields, LAW, NOW))
    assert set(made["regions"]) == set(REGIONS)
    for region, row in made["regions"].items():
        found = [states[region] for _, states, age in by_balancer.values() if age <= CUT_OFF_MS and region in states]
        assert row["state"] == min(found, key=STATES.index, default="unknown")
        assert "busy" not in row  # no regional balancer reports it: unknown, which is not 0
    for name, (_, _, age) in by_balancer.items():
        assert (made["balancers"][name]["fresh"] == "cut off") == (age > CUT_OFF_MS)
    assert apply({}, diff({}, msgspec.json.decode(msgspec.json.encode(made)))) == made  # it is JSON, and has no null


def test_a_disconnected_balancer_keeps_its_last_snapshot_with_its_time_and_no_load() -> None:
    fields = {
        "global virginia": LastSnapshot(upper("virginia", {"tokyo": "down"}, arcs={"tokyo": {"ok": 2.0}}), NOW),
        "regional tokyo": LastSnapshot(lower("tokyo", 5), NOW - CUT_OFF_MS - 1, "refused"),
        "global tokyo": LastSnapshot(
            upper("tokyo", {"tokyo": "up"}, arcs={"tokyo": {"ok": 9.0}}), NOW - CUT_OFF_MS - 1
        ),
        "regional frankfurt": LastSnapshot(None, 0, "refused", "regional", "frankfurt"),
        "regional virginia": LastSnapshot(lower("virginia", 2), NOW - 100),
    }
    made = snapshots.whole(snapshots.picture(fields, LAW, NOW))
    tokyo, virginia = made["regions"]["tokyo"], made["regions"]["virginia"]
    assert (tokyo["state"], tokyo["cut_off"], tokyo["slots"]) == ("down", ["global tokyo", "regional tokyo"], 8)
    assert not {"busy", "used", "queued"} & tokyo.keys()
    assert (virginia["busy"], virginia["used"], virginia["queued"]) == (2, 0.25, 3)
    assert made["arcs"] == {"virginia>tokyo": {"ok": 2}}
    assert made["balancers"]["regional frankfurt"] == {
        "tier": "regional", "region": "frankfurt", "fresh": "cut off", "error": "refused"
    }  # fmt: skip
    assert made["regions"]["frankfurt"]["cut_off"] == ["regional frankfurt"]
    found = [(one["subject"], one["what"]) for one in made["wrong"]]
    assert ("tokyo", "down: seen from virginia") in found[:4]
    assert ("regional tokyo", "cut off: refused") in found[:4]


def test_what_is_wrong_is_shown_worst_first_and_where_balancers_differ_how_many() -> None:
    drained = upper("paris", {"tokyo": "suspect", "frankfurt": "draining"})
    drained["regions"]["frankfurt"]["drain"] = {"author": "ann", "why": "racks"}
    fields = {
        "global virginia": LastSnapshot(upper("virginia", {"tokyo": "up"}), NOW),
        "global paris": LastSnapshot({**drained, "epoch": 2}, NOW),
        "regional virginia": LastSnapshot(lower("virginia", 8), NOW),
    }
    assert [
        (one["subject"], one["what"]) for one in snapshots.whole(snapshots.picture(fields, None, NOW))["wrong"]
    ] == [
        ("tokyo", "suspect: seen from paris (as 1 of 2 global balancers see it)"),
        ("law", "balancers use different epochs: 1, 2"),
        ("virginia", "100% of its slots are used, 3 wait"),
        ("frankfurt", "draining, by ann: racks"),
    ]


def test_a_balancer_that_refuses_is_late_at_once() -> None:
    snapshot = upper("tokyo", {})
    assert snapshots.freshness(LastSnapshot(snapshot, NOW - 10, "refused"), NOW) == "late"
    assert snapshots.freshness(LastSnapshot(snapshot, NOW - 10), NOW) == "fresh"


def test_a_decision_is_shown_once_by_the_balancer_that_knows_its_entry() -> None:
    one = {"at": 5, "tenant": "t", "to": "tokyo"}
    fields = {
        "regional tokyo": LastSnapshot(
            {**lower("tokyo", 0), "decisions": {"d": {**one, "to": "a"}, "e": {**one, "at": 6}}}, NOW
        ),
        "global paris": LastSnapshot(upper("paris", {}, decisions={"d": one}), NOW),
    }
    made = snapshots.whole(snapshots.picture(fields, None, NOW))["decisions"]
    assert list(made) == ["e", "d"]
    assert (made["d"]["from"], made["d"]["to"]) == ("paris", "tokyo")
    assert (made["e"].get("from"), made["e"]["to"]) == (None, "tokyo")


def test_a_picture_of_many_regions_is_made_a_few_at_a_time() -> None:
    names = [f"r{n}" for n in range(61)]
    fields = {f"regional {name}": LastSnapshot(lower(name, 1), NOW) for name in names}
    steps, made = snapshots.picture(fields, None, NOW), 0
    for _ in steps:
        made += 1
    assert made >= 61 // snapshots.REGIONS_AT_ONCE + 61 // snapshots.ROWS_AT_ONCE
    assert list(snapshots.whole(snapshots.picture(fields, None, NOW))["regions"]) == sorted(names)


def of_status(status: dict[str, Any], decisions: list[dict[str, Any]]) -> tuple[snapshots.Snapshot, int]:
    """The snapshot, and how often others had their turn meanwhile."""
    steps, turns = snapshots.of_status(status, NOW, decisions, {}), 0
    while True:
        try:
            next(steps)
            turns += 1
        except StopIteration as end:
            return end.value, turns


def test_a_snapshot_of_many_replicas_is_made_a_few_at_a_time() -> None:
    rows = [{"replica": f"r{n}", "state": "up"} for n in range(2 * snapshots.ROWS_AT_ONCE + 1)]
    snapshot, turns = of_status({"tier": "regional", "region": "tokyo", "replicas": [*rows, "no row"]}, [])
    assert (len(snapshot["replicas"]), turns) == (len(rows), 2)


def test_a_snapshot_of_a_status_has_no_prompt_no_null_and_bounded_text() -> None:
    decision = {
        "decision": "d",
        "tenant": "x" * 5000,
        "attempts": [{"target": "tokyo", "outcome": "served"}],
        "reasons": None,
    }
    status = {
        "tier": "regional", "region": "tokyo", "queue": [{"priority": 1, "tenant": "t", "requests": 2}],
        "replicas": [{"replica": "a", "state": "up", "tpot_ms": float("nan"), "until_s": 1.2, "in_flight": 0}],
    }  # fmt: skip
    snapshot, _ = of_status(status, [decision])
    assert snapshot["replicas"] == {"a": {"state": "up", "in_flight": 0, "until_s": 2}}
    assert snapshot["queue"] == {"1 t": 2}
    assert len(snapshot["decisions"]["d"]["tenant"]) == snapshots.TEXT_MAX
    assert b"null" not in msgspec.json.encode(snapshot)


def test_a_decision_is_shown_as_if_a_region_had_been_drained() -> None:
    candidates = [
        {"region": "tokyo", "score": 10.0, "ttft_ms": 9.0},
        {"region": "virginia", "score": 30.0, "ttft_ms": 29.0},
        {"region": "frankfurt", "score": 20.0, "ttft_ms": 19.0, "hot": True},
    ]
    record = {"reasons": {"chosen": "tokyo", "candidates": candidates}}
    found = snapshots.without(record, "tokyo")
    assert (found["moved"], found["chosen"], found["ttft_ms"], found["was_ttft_ms"]) == (True, "virginia", 29, 9)
    assert snapshots.without(record, "virginia")["chosen"] == "tokyo"
    alone = snapshots.without({"reasons": {"chosen": "tokyo", "candidates": candidates[:1]}}, "tokyo")
    assert alone["moved"]
    assert "chosen" not in alone


def test_what_a_balancer_decides_without_a_region() -> None:
    def decided(chosen: str | None, *regions: str) -> dict[str, Any]:
        candidates = [{"region": name, "score": 1.0, "ttft_ms": 10.0 + n} for n, name in enumerate(regions)]
        return {"reasons": {"chosen": chosen, "candidates": candidates}}

    first = decided("tokyo", "tokyo", "virginia", "frankfurt")
    found = snapshots.compared(first, decided("frankfurt", "virginia", "frankfurt"), "tokyo")
    assert (found["moved"], found["chosen"], found["ttft_ms"], found["was_ttft_ms"]) == (True, "frankfurt", 11, 10)
    assert snapshots.compared(first, decided("tokyo", "tokyo", "frankfurt"), "virginia")["chosen"] == "tokyo"
    assert "chosen" not in snapshots.compared(first, decided(None), "tokyo")
