"""Worlds drawn at random: by number the same for ever, of every kind, and judged on seeds that did not choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from farhop_lab.scenarios.load import built
from farhop_lab.studies import bound, random_worlds, routers
from farhop_lab.studies.cell import run
from farhop_lab.workloads.load import TraceError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_number_is_a_world() -> None:
    first, again, other = (random_worlds.drawn(n, 1, 5.0) for n in (6, 6, 24))
    assert first.scenario.document() == again.scenario.document()
    assert first.factor == again.factor
    assert first.scenario.document() != other.scenario.document()
    assert first.kind == other.kind
    assert 0.3 <= first.load <= 1.1
    assert first.factor > 0.0


def test_worlds_have_confined_tenants_and_balancers_that_restart() -> None:
    world = random_worlds.drawn(51, 1, 5.0)
    document = world.scenario.doc
    assert {work.tenant: set(work.per_s) for work in document.work[1:]} == {
        "eu-only": {"frankfurt"},
        "japan-only": {"tokyo"},
    }
    in_the_middle_s = random_worlds.WARM_UP_S + 2.5
    assert [(fault.what, fault.at_s) for fault in document.faults] == [("restart-regional", in_the_middle_s)]


def test_worlds_are_drawn_from_the_traces_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace in it; give a folder"):
        random_worlds.traces(tmp_path)
    rows = (f"2023-11-16 18:15:{second:02}.0,{300 + second},{20 + second}" for second in range(60))
    (tmp_path / "azure_minute.csv").write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    (trace,) = random_worlds.traces(tmp_path)
    assert (trace.kind, trace.seconds) == ("azure", 59.0)
    kinds = len(random_worlds.KINDS)
    world = random_worlds.drawn(kinds, 1, 5.0, [trace])
    assert world.kind == "azure_minute"
    assert world.scenario.doc.work[0].since_s <= 0.8 * 59.0
    assert random_worlds.drawn(kinds + 5, 1, 5.0, [trace]).kind == random_worlds.KINDS[4]


def test_a_world_of_the_lightest_work_is_a_scenario_that_can_be_run() -> None:
    scenario = random_worlds.drawn(6, 1, 5.0).scenario.but(loads=[random_worlds.FACTOR_MAX])
    assert built(scenario.document(), scenario.folder).doc.loads == [random_worlds.FACTOR_MAX]


def test_rivals_come_from_the_catalogue() -> None:
    names = random_worlds.rivals()
    assert {"skywalker", "gorgo-each-long", "spill-least-load"} <= set(names)
    assert not {"omniscient", "region-local", routers.FARHOP} & set(names)


def test_the_best_is_chosen_by_good_answers_then_by_first_bytes() -> None:
    def result(router: str, good: float, p90: float) -> object:
        figures = {"good": good, "ttft_p90_ms": p90}
        return SimpleNamespace(key=SimpleNamespace(router=router), figures=lambda: figures)

    results = [result("a", 5.0, 300.0), result("b", 5.0, 200.0), result("c", 4.0, 10.0)]
    assert random_worlds.best(results, ["a", "b", "c"], 2) == ["b", "a"]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="screening"):
        random_worlds.chosen([], ["a"])


def test_a_world_is_judged() -> None:
    world = random_worlds.drawn(4, 1, 5.0)
    jobs = random_worlds.jobs(world, [routers.FARHOP, "spill-least-load"], [1])
    results = [run(job.document, world.scenario.folder, job.key, job.recipe) for job in jobs]
    verdict = random_worlds.judged(world, results, "spill-least-load")
    assert 0.0 < verdict.of_bound <= 1.0
    assert not verdict.lost  # one seed proves nothing
    assert random_worlds.summary([verdict])["worlds"] == 1
    top = bound.of(world.scenario, 1, world.factor)
    assert all(sum(result.good) <= top for result in results)


def test_an_answer_that_had_begun_is_cut_and_not_refused() -> None:
    whole = SimpleNamespace(asked=10, good=7, failed=3, ttft_ms=SimpleNamespace(p90=200.0))
    outcomes = {"upstream_died_mid_stream": 2, "no_region_serving": 1}
    result = SimpleNamespace(score=SimpleNamespace(whole=whole, outcomes=outcomes))
    found = random_worlds.router_result([result])  # type: ignore[list-item]
    assert (found.failed, found.cut, found.refused) == pytest.approx((0.3, 0.2, 0.1))


@pytest.mark.parametrize(("alike", "refused"), [(True, 0.1), (False, 0.3)])
def test_a_prompt_that_no_engine_can_hold_is_not_refused(alike: bool, refused: float) -> None:
    """Where engines differ, another might have held it."""
    whole = SimpleNamespace(asked=10, good=7, failed=3, ttft_ms=SimpleNamespace(p90=200.0))
    result = SimpleNamespace(
        score=SimpleNamespace(whole=whole, outcomes={"request_refused_by_engine": 2, "no_region_serving": 1})
    )
    found = random_worlds.router_result([result], alike=alike)  # type: ignore[list-item]
    assert (found.failed, found.refused) == (pytest.approx(0.3), pytest.approx(refused))


def test_every_router_is_held_to_the_best_of_the_others() -> None:
    def world(**all_ran: tuple[float, float]) -> random_worlds.Verdict:
        results = {name: random_worlds.RouterResult(good, 0.0, p90) for name, (good, p90) in all_ran.items()}
        one = next(iter(results.values()))
        return random_worlds.Verdict(0, "chat", 0.9, "a", None, None, 0.5, 9.0, one, one, False, False, "", results)

    found = random_worlds.standings(
        [
            world(farhop=(0.90, 100.0), a=(0.895, 110.0), b=(0.5, 50.0)),  # a is level, b the soonest of few
            world(farhop=(0.80, 200.0), a=(0.90, 190.0), b=(0.90, 100.0)),  # of two that are equal, b was the better
        ]
    )
    assert {name: (one.level, one.soon) for name, one in found.items()} == {
        "farhop": (1, 1), "a": (2, 0), "b": (1, 2),
    }  # fmt: skip
    assert random_worlds.standings([]) == {}
