"""Verdicts: worlds are judged on seeds that did not choose the rival, and every router is held to the same goals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from farhop_lab.sim.study import Share, Spread
from farhop_lab.studies import bound, random_worlds, routers, verdicts
from farhop_lab.studies.cell import run


def test_rivals_come_from_the_catalogue() -> None:
    names = verdicts.rivals()
    assert {"skywalker", "gorgo-each-long", "spill-least-load"} <= set(names)
    assert not {"omniscient", "region-local", routers.FARHOP} & set(names)


def test_the_best_is_chosen_by_good_answers_then_by_first_bytes() -> None:
    def result(router: str, good: float, p90: float) -> object:
        figures = {"good": good, "ttft_p90_ms": p90}
        return SimpleNamespace(key=SimpleNamespace(router=router), figures=lambda: figures)

    results = [result("a", 5.0, 300.0), result("b", 5.0, 200.0), result("c", 4.0, 10.0)]
    assert verdicts.best(results, ["a", "b", "c"], 2) == ["b", "a"]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="screening"):
        verdicts.chosen([], ["a"])


def test_a_world_is_judged() -> None:
    world = random_worlds.drawn(4, 1, 5.0)
    jobs = random_worlds.jobs(world, [routers.FARHOP, "spill-least-load"], [1])
    results = [run(job.document, world.scenario.folder, job.key, job.recipe) for job in jobs]
    verdict = verdicts.judged(world, results, "spill-least-load")
    assert 0.0 < verdict.of_bound <= 1.0
    assert not verdict.lost  # one seed proves nothing
    assert verdicts.summary([verdict])["worlds"] == 1
    top = bound.of(world.scenario, 1, world.factor)
    assert all(sum(result.good) <= top for result in results)


def test_an_answer_that_had_begun_is_cut_and_not_refused() -> None:
    whole = SimpleNamespace(asked=10, good=7, failed=3, ttft_ms=SimpleNamespace(p90=200.0))
    outcomes = {"upstream_died_mid_stream": 2, "no_region_serving": 1}
    result = SimpleNamespace(score=SimpleNamespace(whole=whole, outcomes=outcomes))
    found = verdicts.router_result([result])  # type: ignore[list-item]
    assert (found.failed, found.cut, found.refused) == pytest.approx((0.3, 0.2, 0.1))


def test_where_one_tenant_is_judged_only_its_requests_count() -> None:
    def result(router: str, good: int, whole: int) -> object:
        share = Share(10, 10, good, 0, 0.0, Spread(p90=300.0), Spread(), Spread())
        figures = {"good": float(whole), "ttft_p90_ms": 1.0, "tenant.prior.good": float(good)}
        score = SimpleNamespace(tenants={"prior": share}, outcomes={"upstream_died_mid_stream": 2})
        return SimpleNamespace(key=SimpleNamespace(router=router), score=score, figures=lambda: figures)

    results = [result("a", 9, 10), result("b", 8, 20)]
    assert verdicts.chosen(results, ["a", "b"]) == "b"  # type: ignore[arg-type]
    assert verdicts.best(results, ["a", "b"], 1, "prior") == ["a"]  # type: ignore[arg-type]
    found = verdicts.router_result(results[:1], "prior")  # type: ignore[arg-type]
    assert (found.good, found.failed, found.ttft_p90_ms, found.cut) == (0.9, 0.0, 300.0, 0.0)
    assert verdicts.router_result(results[:1], "nobody").good == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("alike", "refused"), [(True, 0.1), (False, 0.3)])
def test_a_prompt_that_no_engine_can_hold_is_not_refused(alike: bool, refused: float) -> None:
    """Where engines differ, another might have held it."""
    whole = SimpleNamespace(asked=10, good=7, failed=3, ttft_ms=SimpleNamespace(p90=200.0))
    result = SimpleNamespace(
        score=SimpleNamespace(whole=whole, outcomes={"request_refused_by_engine": 2, "no_region_serving": 1})
    )
    found = verdicts.router_result([result], alike=alike)  # type: ignore[list-item]
    assert (found.failed, found.refused) == (pytest.approx(0.3), pytest.approx(refused))


def test_every_router_is_held_to_the_best_of_the_others() -> None:
    def world(**all_ran: tuple[float, float]) -> verdicts.Verdict:
        results = {name: verdicts.RouterResult(good, 0.0, p90) for name, (good, p90) in all_ran.items()}
        one = next(iter(results.values()))
        return verdicts.Verdict(0, "chat", 0.9, "a", None, None, 0.5, 9.0, one, one, False, False, "", results)

    found = verdicts.goal_counts(
        [
            world(farhop=(0.90, 100.0), a=(0.895, 110.0), b=(0.5, 50.0)),  # a is level, b the soonest of few
            world(farhop=(0.80, 200.0), a=(0.90, 190.0), b=(0.90, 100.0)),  # of two that are equal, b was the better
        ]
    )
    assert {name: (one.level, one.soon) for name, one in found.items()} == {
        "farhop": (1, 1), "a": (2, 0), "b": (1, 2),
    }  # fmt: skip
    assert verdicts.goal_counts([]) == {}
