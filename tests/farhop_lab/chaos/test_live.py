"""The live run's parts that need no processes: what is drawn, and the verdict on what balancers and engines say."""

from __future__ import annotations

from typing import Any

import pytest

from farhop_lab.chaos import live
from farhop_lab.chaos.live import Answered
from farhop_lab.chaos.schedule import AT_ONCE
from farhop_lab.sim.faults import LINK_KINDS
from farhop_lab.world.client import Failure, Result

REGIONS = ["virginia", "tokyo"]


def test_drawn_faults_begin_within_the_run_and_are_reproducible() -> None:
    faults = live.drawn(3, 600.0, REGIONS)
    assert faults == live.drawn(3, 600.0, REGIONS)
    assert len(faults) > 50
    assert {fault.what for fault in faults} == {*live.REPLICA_KINDS, *live.REGION_KINDS, *live.WORLD_KINDS}
    for fault in faults:
        assert live.WARM_S <= fault.at_s <= 600.0
        assert sum(one.at_s <= fault.at_s < one.until_s for one in faults) <= AT_ONCE
        assert (fault.to != "") == (fault.what in LINK_KINDS)
        assert fault.to != (fault.region or None)
        if fault.replica:
            assert fault.replica in {f"{fault.region}-0", f"{fault.region}-1"}


def replica(name: str, **value: Any) -> dict[str, Any]:
    fields = {"replica": name, "state": "up", "why": "proven", "prefill_ms_per_token": 0.08, "tpot_ms": 28.0}
    return fields | {"in_flight": 0, "prefill_tokens": 0, "kv_tokens": 0} | value


def regional(name: str, **value: Any) -> dict[str, Any]:
    first = replica(f"{name}-0", **value)
    books = {"under_way": 0, "queued_requests": 0, "queued_tokens": 0, "modes": {"m": "normal"}}
    return {"replicas": [first, replica(f"{name}-1")]} | books


def global_(**value: Any) -> dict[str, Any]:
    def one(name: str) -> dict[str, Any]:
        return {"region": name, "state": "up", "why": "", "admitted_share": 1.0, "in_flight": 0, "rtt_ms": 100.0}

    return {"regions": [one("virginia") | value, one("tokyo")]}


def verdict(**changes: Any) -> list[str]:
    fields = {"regional": {n: regional(n) for n in REGIONS}, "global_": {n: global_() for n in REGIONS}}
    counts = {name: {f"{name}-0": 50, f"{name}-1": 50} for name in REGIONS}
    fields |= {"counts": counts, "answers": [Answered(0.0, name, "served") for name in REGIONS] * 100} | changes
    shares, findings = live.judged(**fields)  # type: ignore[arg-type]
    assert set(shares) == {f"{name}/{name}-{n}" for name in REGIONS for n in (0, 1)}
    rest = live.at_rest(fields["regional"], fields["global_"], lambda _a, _b: 100.0)
    return [f"{one.property}: {one.subject}" for one in (*findings, *rest)]


def test_a_world_that_is_well_gives_no_findings() -> None:
    assert verdict() == []


@pytest.mark.parametrize(
    ("expected", "finding"),
    [
        ({"state": "down", "why": "slower than its peers"}, "standing: tokyo/tokyo-0"),
        ({"tpot_ms": 90.0}, "estimates: tokyo/tokyo-0"),
        ({"prefill_ms_per_token": 0.05}, "estimates: tokyo/tokyo-0"),
        ({"in_flight": 1, "kv_tokens": 90}, "ledgers: tokyo"),
    ],
)
def test_regions_view_of_a_replica_is_judged(expected: dict[str, Any], finding: str) -> None:
    assert finding in verdict(regional={"virginia": regional("virginia"), "tokyo": regional("tokyo", **expected)})


@pytest.mark.parametrize(
    ("expected", "finding"),
    [
        ({"state": "suspect", "why": "channel broken"}, "standing: tokyo of virginia"),
        ({"admitted_share": 0.5}, "standing: tokyo of virginia"),
        ({"in_flight": 2}, "ledgers: tokyo of virginia"),
        ({"rtt_ms": 300.0}, "estimates: tokyo of virginia"),
        ({"rtt_ms": None}, "estimates: tokyo of virginia"),
    ],
)
def test_balancers_view_of_a_region_is_judged(expected: dict[str, Any], finding: str) -> None:
    assert verdict(global_={"virginia": global_(), "tokyo": global_(**expected)}) == [finding]


def test_shares_and_failures_are_judged() -> None:
    counts = {"virginia": {"virginia-0": 100, "virginia-1": 0}, "tokyo": {"tokyo-0": 50, "tokyo-1": 50}}
    assert verdict(counts=counts) == ["shares: virginia/virginia-0", "shares: virginia/virginia-1"]
    answers = [Answered(0.0, name, "served") for name in REGIONS] * 100 + [Answered(1.0, "tokyo", "no_region")]
    assert verdict(answers=answers) == ["answers: tokyo"]


def test_answers_of_engines_and_clients_are_compared() -> None:
    page = (
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 3.0\n'
        'vllm:request_success_total{finished_reason="length",model_name="m"} 4.0\n'
        'vllm:request_success_total{finished_reason="abort",model_name="m"} 9.0\n'
        "vllm:request_success_created 1.0\n"
    )
    assert live.answers_given(page) == 7
    whole = Result(200, {}, "text", None, None, 1.0, 2.0, "e", False)
    assert live.answered(5.0, "tokyo", whole) == Answered(5.0, "tokyo", "served")
    broken = Result(503, {}, "", None, Failure("why", "no_region"), None, 2.0, "e", False)
    assert live.answered(5.0, "tokyo", broken).ended == "no_region"
