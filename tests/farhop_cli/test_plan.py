"""`farhop plan` on a small world, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farhop_cli import plan
from farhop_cli.main import app
from farhop_lab.scenarios import load
from farhop_lab.studies import bound, cell, pool, routers
from farhop_lab.studies.cell import Result
from farhop_lab.studies.planning import Need, Outcome, Planned, Trial

TEXT = """
name: small
sites:
  virginia: {gpu: l4, replicas: 1}
  tokyo: {gpu: l4, replicas: 1}
work:
  - {kind: requests, figures: {prompt_tokens: 512, answer_tokens: 4, max_tokens: 4}, per_s: {virginia: 2, tokyo: 0.5}}
duration_s: 6
warm_up_s: 3
objective: {ttft_ms: 900, tpot_ms: 400, good: 0.8}
"""


def test_a_plan_is_a_table_and_json(tmp_path: Path) -> None:
    path, out = tmp_path / "small.yaml", tmp_path / "out"
    path.write_text(TEXT)
    arguments = ["plan", str(path), "--most", "2", "--out", str(out)]
    output = CliRunner().invoke(app(), [*arguments, "--json"])
    assert output.exit_code == 0, output.output
    found = json.loads(output.stdout)["plan"]
    alone, together = found["alone"]["replicas"], found["together"]["replicas"]
    assert 1 <= alone["tokyo"] <= alone["virginia"] <= 2
    assert sum(together.values()) <= sum(alone.values())
    assert found["together"]["worst"] >= 0.8
    table = CliRunner().invoke(app(), arguments)  # from what is kept
    assert "without routing" in table.stdout
    assert "N-1" in table.stdout


def test_every_fleet_is_asked_the_same(tmp_path: Path) -> None:
    scenario = load.parse(TEXT, "small.yaml", tmp_path, routers.names())
    asking = plan.Asking(scenario, 2, None, print)
    trials = [Trial((("tokyo", n), ("virginia", n)), routed=n > 1) for n in (1, 2, 3)]
    found = [[load.built(job.document, tmp_path) for job in asking.jobs(trial)] for trial in trials]
    work = [[bound.demands(one, seed, 1.0) for seed, one in enumerate(fleet)] for fleet in found]
    assert work[0] == work[1] == work[2]
    assert work[0][0] != work[0][1], "seeds differ"
    assert len({job.key.scenario for trial in trials for job in asking.jobs(trial)}) == 3


def test_another_seed_is_run_only_where_those_before_leave_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = load.parse(TEXT, "small.yaml", tmp_path, routers.names())
    ran: list[int] = []

    def run(jobs: list[pool.Job], **_: object) -> list[Result]:
        ran.append(len(jobs))
        return [cell.run(job.document, tmp_path, job.key, job.recipe, sure=job.sure) for job in jobs]

    monkeypatch.setattr(pool, "run", run)
    trials = [Trial((("tokyo", n), ("virginia", n)), routed=True) for n in (1, 2)]
    asked = [sum(found.asked.values()) for found in plan.Asking(scenario, 3, None, print)(trials)]
    assert ran[0] == 2
    assert ran == [2, 2, 2]  # some ten requests leave it open
    assert asked[0] == asked[1] > 12
    clear = Outcome({"virginia": 1.0, "tokyo": 0.2}, 1.0, {"virginia": 9, "tokyo": 60})
    assert plan.is_sure(clear, 0.8)
    assert not plan.is_sure(Outcome({"virginia": 0.9}, 1.0, {"virginia": 50}), 0.8)


def test_a_fleet_that_misses_is_not_shown_as_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scenario = load.parse(TEXT, "small.yaml", tmp_path, routers.names())
    enough, short = Need({"virginia": 1, "tokyo": 1}, 1.0, 0.8), Need({"virginia": 1, "tokyo": 1}, 1.0, 0.79)
    plan.print_plan(scenario, Planned(enough, short, enough, enough, 1))
    lines = capsys.readouterr().out.splitlines()
    assert ["misses 80%" in line for line in lines if "routing" in line and "N" in line] == [False, True, False, False]


def test_an_unknown_scenario_is_one_line() -> None:
    output = CliRunner().invoke(app(), ["plan", "nowhere"])
    assert output.exit_code == 2
    assert output.stderr.count("\n") == 1
