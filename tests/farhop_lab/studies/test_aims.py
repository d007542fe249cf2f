"""Verdicts: what is compared with whom, when it is met, and how a region's loss is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farhop_lab.scenarios.load import shipped_names
from farhop_lab.sim.stats import Interval
from farhop_lab.studies.aims import AIMS, Aim, judged, recovery, verdict
from farhop_lab.studies.cell import Key


def result(scenario: str, router: str, seed: int, load: float = 1.0, **figures: float) -> Any:
    return SimpleNamespace(key=Key(scenario, router, load, seed), figures=lambda: figures)


@pytest.mark.parametrize(
    ("mean", "half", "words"),
    [(1.2, 0.05, "met"), (1.12, 0.05, "open, met"), (1.08, 0.05, "open, missed"), (1.0, 0.05, "missed")],
)
def test_a_verdict_is_sure_where_the_whole_interval_is(mean: float, half: float, words: str) -> None:
    assert verdict(Aim("s", "r", "x", least=1.1), Interval(mean, half, 3)) == words


def test_an_aim_is_open_with_one_seed_and_has_nothing_to_compare_without_any() -> None:
    assert verdict(Aim("s", "r", "x", most=1.0), Interval(0.5, None, 1)) == "open, met"
    assert verdict(Aim("s", "r", "x", most=1.0), None) == "nothing to compare"


def test_the_best_rival_is_the_best_at_that_figure_and_is_not_farhop() -> None:
    def cell(router: str, per_s: float, p90: float) -> Any:
        return result("push", router, 1, requests_per_s=per_s, ttft_p90_ms=p90)

    results = [
        cell("farhop", 10.0, 100.0),
        cell("farhop-no-trie", 99.0, 1.0),
        cell("omniscient", 99.0, 1.0),
        cell("skywalker", 11.0, 300.0),
        cell("local-sglang", 9.0, 90.0),
    ]
    by_figure = {verdict.asked.split()[0]: verdict for verdict in judged(results)}
    assert by_figure["requests_per_s"].against == "skywalker"
    assert by_figure["requests_per_s"].verdict == "open, missed"
    assert by_figure["ttft_p90_ms"].against == "local-sglang"
    assert by_figure["ttft_p90_ms"].ratio is not None
    assert by_figure["ttft_p90_ms"].ratio.mean == pytest.approx(100 / 90)


def test_gorgo_is_met_at_every_load_by_its_best_variant() -> None:
    results = [
        result("gorgo", router, 1, load, ttft_p95_ms=p95, e2e_p95_ms=1.0)
        for load in (0.2, 1.2)
        for router, p95 in (("farhop", 101.0), ("gorgo", 100.0), ("gorgo-each", 200.0))
    ]
    fields = {(v.load, v.asked.split()[0]): v.verdict for v in judged(results)}
    assert fields[0.2, "ttft_p95_ms"] == "open, met"  # 1.02 is allowed at light load
    assert fields[1.2, "ttft_p95_ms"] == "open, missed"


def test_aims_name_scenarios_there_are() -> None:
    assert {aim.scenario for aim in AIMS} <= set(shipped_names())
    assert not judged([])


def seconds(seed: int, good: list[int]) -> Any:
    return SimpleNamespace(key=Key("loss", "farhop", 1.0, seed), good=good)


def test_recovery_is_the_first_stretch_that_stays_at_the_ceiling_and_swings_show() -> None:
    calm = recovery(seconds(1, [20] * 10 + [2, 5] + [10] * 38), 10.0, 10, 50)
    assert calm.recovered_s == 1  # 5 s from the second second on are (5 + 4 * 10) / 5 = 9 of 10
    assert calm.steady
    late = recovery(seconds(1, [20] * 10 + [20] * 6 + [0] * 10 + [10] * 24), 10.0, 10, 50)
    assert late.recovered_s == 16  # the first ones to end had begun before
    swinging = recovery(seconds(1, [20] * 10 + [10] * 20 + [2] * 20), 10.0, 10, 50)
    assert swinging.recovered_s == 0
    assert not swinging.steady
    assert recovery(seconds(1, [20] * 10 + [3] * 40), 10.0, 10, 50).recovered_s is None
