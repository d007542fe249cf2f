"""One cell: the same seed gives the same, what is not served is counted, faults happen when they are planned."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from farhop.balance.health.reading import State
from farhop_lab.scenarios.load import Scenario, find, parse, shipped_names
from farhop_lab.scenarios.schema import LASTING
from farhop_lab.studies import cell, routers
from farhop_lab.studies.cell import GARBAGE, Key, Result, prepared, rare_collections, run
from global_lb.routing.flow import GlobalFlow

TEXT = """
name: small
sites:
  virginia: {gpu: l4, replicas: 1}
  tokyo: {gpu: l4, replicas: 1}
work:
  - {kind: chat, figures: {max_tokens: 50}, clients: {virginia: 3, tokyo: 2}}
duration_s: 16
warm_up_s: 4
objective: {ttft_ms: 2000, tpot_ms: 150}
"""


def small(extra: str = "", router: str = "farhop") -> Scenario:
    return parse(TEXT + extra, "it", Path(), [router])


def result(scenario: Scenario, router: str = "farhop", seed: int = 1) -> Result:
    return run(scenario.document(), scenario.folder, Key("small", router, 1.0, seed), "r")


@pytest.mark.parametrize("router", ["farhop", "skywalker", "farhop-no-trie"])
def test_same_cell_gives_the_same_result(router: str) -> None:
    first, second = result(small(), router), result(small(), router)
    assert msgspec.structs.replace(first, wall_s=0.0) == msgspec.structs.replace(second, wall_s=0.0)
    assert result(small(), router, seed=2).figures() != first.figures()


def test_figures_are_of_the_window() -> None:
    found = result(small())
    figures = found.figures()
    assert figures["asked"] == figures["served"] > 5
    assert 0.0 < figures["hit"] < 1.0
    assert figures["requests_per_s"] > 0.3
    assert found.ttft_quantiles == sorted(found.ttft_quantiles)
    assert found.ttft_quantiles[89] == pytest.approx(figures["ttft_p90_ms"], abs=0.001)
    assert sum(found.flows.values()) == figures["served"]
    assert len(found.good) == 16
    # Two L4: virginia's hour costs 2.50 there, tokyo's 3.30, and a little goes over the wire.
    assert figures["usd_per_hour"] == pytest.approx(5.80, abs=0.1)
    assert found.score.violations == 0
    assert set(found.curves) == {"virginia", "tokyo"}


def test_a_kill_is_seen_and_counted() -> None:
    calm = result(small())
    text = "faults: [{at_s: 8, what: kill, region: tokyo}, {at_s: 8, what: kill, region: virginia}]\n"
    lost = result(small(text))
    assert lost.figures()["failed"] > calm.figures()["failed"]
    assert sum(lost.good[10:]) == 0 < sum(calm.good[10:])


@pytest.mark.parametrize("name", shipped_names())
def test_when_clients_come_every_balancer_of_every_ready_made_scenario_is_ready(name: str) -> None:
    scenario = find(name, routers.names())
    world, _ = prepared(scenario, Key(name, "farhop", scenario.doc.loads[0], 1))
    world.run(-0.001)
    assert not world.measures.open
    for balancers in world.balancers.values():
        for balancer in balancers:
            flow, now = balancer.flow, balancer.relay.clock()
            assert isinstance(flow, GlobalFlow)
            assert {region: one.read(now).state for region, one in flow.regions.liveness.items()} == dict.fromkeys(
                scenario.doc.sites, State.UP
            )


@pytest.mark.parametrize("router", ["farhop", "skywalker", "central-least-load", "omniscient"])
def test_the_first_requests_are_not_refused(router: str) -> None:
    figures = result(small().but(warm_up_s=0.0), router).figures()
    assert (figures["failed"], figures["asked"]) == (0, figures["served"])


def test_immediate_failures_are_counted() -> None:
    text = "faults: [{at_s: 0, what: kill, region: tokyo}, {at_s: 0, what: kill, region: virginia}]\n"
    figures = result(small(text).but(warm_up_s=0.0)).figures()
    assert figures["failed"] == figures["asked"] > 20
    assert figures["served"] == 0


def test_wires_that_jitter_take_longer() -> None:
    lawful = "topology: three-regions\n"
    still = result(small(lawful), "central-round-robin")
    shaken = result(small("wire: {jitter: 1.0, drift: 0.2, drift_every_s: 3}\n"), "central-round-robin")
    assert shaken.figures()["ttft_mean_ms"] > still.figures()["ttft_mean_ms"]


def test_progress_is_reported() -> None:
    scenario, found = small(), list[float]()
    run(scenario.document(), scenario.folder, Key("small", "farhop", 1.0, 1), "r", found.append)
    assert found == sorted(found)
    assert found[-1] == 1.0


def test_balancers_are_in_regions_with_clients_and_where_the_file_says() -> None:
    scenario = small("balancers: {tokyo: 2}\n").but(
        work=[small().doc.work[0].model_copy(update={"clients": {"frankfurt": 1}})]
    )
    world, _ = prepared(scenario, Key("small", "farhop", 1.0, 1))
    assert {region: len(those) for region, those in world.balancers.items()} == {
        "virginia": 1,
        "tokyo": 2,
        "frankfurt": 1,
    }


def test_faults_of_every_kind_can_be_planned() -> None:
    what = ["kill", "revive", "drain", "undrain", "lose_reports"]
    lines = "".join(f"  - {{at_s: {i + 6}, what: {name}, region: tokyo}}\n" for i, name in enumerate(what))
    links = "".join(
        f"  - {{at_s: {at}, what: {name}, region: tokyo, to: virginia}}\n"
        for at, name in ((12, "freeze"), (14, "heal"))
    )
    found = result(small(f"faults:\n{lines}{links}"))
    assert found.score.violations == 0
    assert found.figures()["served"] > 0


@pytest.mark.parametrize("what", ["restart-global", "restart-regional"])
def test_router_is_restarted_in_its_region(what: str) -> None:
    fault = f"faults: [{{at_s: 6, what: {what}, region: virginia, for_s: 4}}]\n"
    each, central = result(small(fault), "gorgo-each"), result(small(fault.replace("virginia", "tokyo")), "gorgo")
    assert each.figures()["failed"] > 0.0
    assert each.figures()["served"] > 0.0
    assert central.figures()["failed"] == 0.0  # there is none in tokyo


def test_lasting_faults_are_repaired_and_leave_nothing() -> None:
    of_replica = ("oom", "fast-500", "slow", "stuck", "dead-green", "xid", "pause", "restart", "refuse")
    assert (*of_replica, "restart-regional", "restart-global", "blackhole", "cut") == LASTING
    lines = [f"{{what: {what}, replica: gpu-0, factor: 3" for what in of_replica]
    lines += ["{what: restart-regional", "{what: restart-global"]
    lines += [f"{{what: {what}, to: virginia" for what in ("blackhole", "cut")]
    text = "".join(f"  - {line}, at_s: {4 + 0.8 * i:g}, for_s: 0.5, region: tokyo}}\n" for i, line in enumerate(lines))
    found = result(small(f"faults:\n{text}"))
    assert found.score.violations == 0
    assert found.figures()["served"] > 0


OPEN = """
name: open
sites:
  virginia: {gpu: l4, replicas: 2}
work:
  - {kind: requests, figures: {prompt_tokens: 512, answer_tokens: 4, max_tokens: 4}, per_s: {virginia: PER_S}}
duration_s: 100
warm_up_s: 4
objective: {ttft_ms: TTFT, tpot_ms: 400, good: 0.5}
"""


def until(per_s: int, ttft_ms: int, extra: str = "", *, sure: bool = True) -> tuple[float, int]:
    """Up to when it was looked at, and how many requests that cost, warm-up included."""
    text = OPEN.replace("PER_S", str(per_s)).replace("TTFT", str(ttft_ms)) + extra
    scenario = parse(text, "it", Path(), ["farhop"])
    found = run(scenario.document(), scenario.folder, Key("open", "farhop", 1.0, 1), "r", sure=sure)
    return found.window.until, found.program_counts.asked


def test_a_run_ends_when_it_is_sure_whether_enough_is_good() -> None:
    whole_s, whole = until(2, 5_000, sure=False)
    assert whole_s == 100.0
    hopeless_s, hopeless = until(2, 1)
    assert hopeless_s < 25.0
    assert hopeless < whole / 4
    well_s, well = until(2, 5_000)
    assert 50.0 <= well_s < 65.0
    assert well < 0.7 * whole


@pytest.mark.parametrize(
    "extra",
    ["days:\n  virginia: {utc_hours: 0, swing: 4}\n", "faults:\n  - {at_s: 50, what: kill, region: virginia}\n"],
    ids=["days", "faults"],
)
def test_run_goes_to_its_end_if_its_parts_differ(extra: str) -> None:
    assert until(2, 1, extra)[0] == 100.0


@pytest.mark.parametrize("before", [0, 7])
def test_only_objects_frozen_by_the_caller_stay_frozen(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    done: list[str] = []
    monkeypatch.setattr(cell, "_found_frozen", False)
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(before) or before)
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("thawed"))
    threshold = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == GARBAGE
        assert done == ["frozen"] * (before == 0)
    assert gc.get_threshold() == threshold
    assert done == ["frozen", "thawed"] * (before == 0)
    with rare_collections():
        pass
    assert done == ["frozen", "thawed"] * (before == 0) * 2
    assert counted == ([7] if before else [0, 0])  # the hits are known then: counting takes 40 ms


def test_no_run_keeps_the_garbage_of_the_one_before() -> None:
    code = """
import gc, weakref
from farhop_lab.studies.cell import rare_collections

class World: pass

gc.disable()
with rare_collections():
    world = World()
    world.own, gone = world, weakref.ref(world)
del world
with rare_collections():
    print(gone() is None)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True\n"
