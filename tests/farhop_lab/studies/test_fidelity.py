"""Live beside simulated: what can be run live, how the two are compared, and a short run of real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from farhop_lab.scenarios.load import Scenario, find, parse
from farhop_lab.studies import routers
from farhop_lab.studies.fidelity import (
    Compared,
    FidelityError,
    MeasuredAnswer,
    compared,
    live,
    promise_errors,
    settings,
)

TEXT = """
name: live
sites:
  virginia: {gpu: h100, replicas: 1}
  frankfurt: {gpu: h100, replicas: 1}
  tokyo: {gpu: h100, replicas: 1}
work:
  - {kind: chat, figures: {max_tokens: 8}, clients: {virginia: 1, tokyo: 1}}
duration_s: 12
warm_up_s: 2
"""


def scenario() -> Scenario:
    return parse(TEXT, "it", Path(), ["farhop"])


def test_only_what_a_live_world_can_be_is_run_live() -> None:
    known = settings(scenario(), 4.0)
    assert (known.profile, known.replicas, known.speedup) == ("h100", 1, 4.0)
    for name in ("arena", "push", "loss"):
        with pytest.raises(FidelityError, match=name):
            settings(find(name, routers.names()), 1.0)
    text = TEXT.replace("clients: {virginia: 1, tokyo: 1}", "per_s: {virginia: 1}")
    with pytest.raises(FidelityError, match="closed loops"):
        settings(parse(text, "it", Path(), ["farhop"]), 1.0)


def test_figures_are_compared_as_shares_and_ratios_as_differences() -> None:
    assert Compared("ttft_p50_ms", 100.0, 114.0).apart == pytest.approx(0.14)
    assert Compared("ttft_p50_ms", 100.0, 114.0).holds
    assert not Compared("ttft_p50_ms", 100.0, 84.0).holds
    assert Compared("hit", 0.5, 0.6).apart == pytest.approx(0.1)
    seen = [MeasuredAnswer(float(ms), 100, 30) for ms in range(1, 101)]
    figures = {"ttft_p50_ms": 50.0, "ttft_p90_ms": 99.0, "hit": 0.3}
    rows = compared(seen, 0, SimpleNamespace(figures=lambda: figures))  # type: ignore[arg-type]
    assert [(row.live, row.simulated) for row in rows] == [(50.0, 50.0), (90.0, 99.0), (0.3, 0.3)]
    with pytest.raises(FidelityError, match="nothing was answered"):
        compared([], 3, SimpleNamespace(figures=lambda: figures))  # type: ignore[arg-type]


def test_promises_are_held_against_what_came_tier_by_tier() -> None:
    # Off by 1, 2, ... 100 % of the client's measurement; the regional tier kept no record of some.
    seen = [
        MeasuredAnswer(
            200.0, 100, 30, {"global": (200.0 + 2.0 * n, 200.0)} | ({"regional": (90.0, 100.0)} if n % 2 else {})
        )
        for n in range(1, 101)
    ]
    above, below = promise_errors(seen)
    assert (above.tier, above.answers, above.seen_p50_ms) == ("global", 100, 200.0)
    assert (above.off_p50, above.off_p90) == pytest.approx((0.5, 0.9))
    assert not above.holds
    assert (below.tier, below.answers, below.off_p50) == ("regional", 50, pytest.approx(0.1))
    assert below.holds
    assert promise_errors([MeasuredAnswer(200.0, 100, 30)]) == []


@pytest.mark.long
def test_real_processes_answer_the_scenarios_programs(tmp_path: Path) -> None:
    seen, failed = asyncio.run(live(scenario(), 4.0, 1, tmp_path))
    assert failed == 0
    assert len(seen) >= 5
    assert all(one.prompt_tokens > one.cached_tokens >= 0 for one in seen)
    assert any(one.cached_tokens for one in seen)
    assert [row.tier for row in promise_errors(seen)] == ["global", "regional"]
