"""Rows, figures over seeds, and ratios of pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farhop_lab.studies import tables
from farhop_lab.studies.cell import Key


def result(router: str, seed: int, **figures: float) -> Any:
    return SimpleNamespace(key=Key("s", router, 1.0, seed), figures=lambda: figures)


def test_rows_are_by_scenario_router_and_load_with_seeds_in_order() -> None:
    rows = tables.rows([result("b", 2), result("a", 1), result("b", 1)])
    assert list(rows) == [("s", "b", 1.0), ("s", "a", 1.0)]
    assert [r.key.seed for r in rows["s", "b", 1.0]] == [1, 2]


def test_a_figure_is_over_those_that_have_it() -> None:
    found = tables.figure([result("a", 1, x=1.0), result("a", 2, x=3.0), result("a", 3)], "x")
    assert found is not None
    assert (found.mean, found.n) == (2.0, 2)
    assert tables.figure([result("a", 1)], "x") is None


def test_ratios_are_seed_by_seed() -> None:
    ours = [result("a", 1, x=2.0), result("a", 2, x=30.0), result("a", 4, x=1.0)]
    theirs = [result("b", 2, x=10.0), result("b", 1, x=1.0), result("b", 3, x=5.0), result("b", 4, x=0.0)]
    found = tables.ratio(ours, theirs, "x")
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(2.5), 2)
    assert tables.ratio(ours, [], "x") is None
