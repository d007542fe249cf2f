"""`farhop plan` on a small world, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farhop_cli import plan
from farhop_cli.main import app
from farhop_lab.scenarios import load
from farhop_lab.sim.stats import share_interval
from farhop_lab.studies import bound, cell, pool, routers
from farhop_lab.studies.cell import Result
from farhop_lab.studies.planning import Need, Outcome, Planned, Trial

TEXT = """
name: small
sites:
  virginia: {gpu: l4, replicas: 1}
  tokyo: {gpu: l4, replicas: 1}
work:
  - {kind: requests, figures: {prompt_tokens: 64, answer_tokens: 4, max_tokens: 4}, per_s: {virginia: 12, tokyo: 6}}
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
    table = CliRunner().invoke(app(), arguments)  # from the kept results
    assert "without routing" in table.stdout
    assert "N-1" in table.stdout


def test_all_fleet_sizes_get_the_same_requests(tmp_path: Path) -> None:
    scenario = load.parse(TEXT, "small.yaml", tmp_path, routers.names())
    asking = plan.TrialRunner(scenario, 2, None, print)
    trials = [Trial((("tokyo", n), ("virginia", n)), routed=n > 1) for n in (1, 2, 3)]
    found = [[load.built(job.document, tmp_path) for job in asking.jobs(trial)] for trial in trials]
    work = [[bound.demands(one, seed, 1.0) for seed, one in enumerate(fleet)] for fleet in found]
    assert work[0] == work[1] == work[2]
    assert work[0][0] != work[0][1], "seeds differ"
    assert len({job.key.scenario for trial in trials for job in asking.jobs(trial)}) == 3


def test_further_seed_is_run_only_if_the_result_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load.parse(TEXT, "small.yaml", tmp_path, routers.names())
    ran: list[int] = []

    def run(jobs: list[pool.Job], **_: object) -> list[Result]:
        ran.append(len(jobs))
        return [cell.run(job.document, tmp_path, job.key, job.recipe, sure=job.sure) for job in jobs]

    monkeypatch.setattr(pool, "run", run)
    trials = [Trial((("tokyo", n), ("virginia", n)), routed=True) for n in (1, 2)]
    asked = [sum(found.asked.values()) for found in plan.TrialRunner(scenario, 3, None, print)(trials)]
    assert ran == [1, 1, 2, 0]  # the first shows the demand; two runs of each fleet are enough to be sure
    assert asked[0] == asked[1] > 100
    clear = Outcome({"virginia": 1.0, "tokyo": 0.2}, 1.0, {"virginia": 9, "tokyo": 60})
    assert plan.is_sure(clear, 0.8)
    assert not plan.is_sure(Outcome({"virginia": 0.9}, 1.0, {"virginia": 50}), 0.8)


def test_a_fleet_that_misses_is_not_shown_as_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scenario = load.parse(TEXT, "small.yaml", tmp_path, routers.names())
    enough, short = Need({"virginia": 1, "tokyo": 1}, 1.0, 0.8), Need({"virginia": 1, "tokyo": 1}, 1.0, 0.79)
    plan.print_plan(scenario, Planned(enough, short, enough, enough, 1))
    lines = capsys.readouterr().out.splitlines()
    assert ["misses 80%" in line for line in lines if "routing" in line and "N" in line] == [False, True, False, False]


@pytest.mark.parametrize(("good", "most_doubt"), [(0.8, 0.2), (0.95, 0.05), (0.99, 0.01), (1.0, 0.01)])
def test_number_of_requests_resolves_the_allowed_share_of_bad_ones(good: float, most_doubt: float) -> None:
    need = plan.needed(good)
    low, high = share_interval(good * need, need)
    assert (high - low) / 2.0 <= most_doubt + 1e-9
    low, high = share_interval(good * (need - 1), need - 1)
    assert (high - low) / 2.0 > most_doubt


def test_more_runs_compensate_few_requests_unless_their_number_is_given(tmp_path: Path) -> None:
    seldom = TEXT.replace("tokyo: 6", "tokyo: 3")  # 9 in a run, and 27 are needed
    scenario = load.parse(seldom, "small.yaml", tmp_path, routers.names())
    fleet = Trial((("tokyo", 1), ("virginia", 1)), routed=True)
    (found,) = plan.TrialRunner(scenario, None, None, print)([fleet])
    assert found.asked["tokyo"] >= plan.needed(0.8)
    with pytest.raises(plan.TooFewRequestsError, match=r"tokyo has .* --for 1m or --seeds"):
        plan.TrialRunner(scenario, 1, None, print)([fleet])


def test_with_too_few_requests_nothing_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    output = CliRunner().invoke(app(), ["plan", str(path), "--most", "2", "--good", "0.99"])
    assert output.exit_code == 2
    assert output.stderr.count("\n") == 1
    assert "tokyo has" in output.stderr
    assert f"{plan.needed(0.99)} requests would do" in output.stderr


def test_a_trace_asks_the_same_in_every_run_so_that_runs_do_not_make_up_for_it(tmp_path: Path) -> None:
    rows = [{"timestamp": 3000 * (n // 20), "input_length": 64, "output_length": 4, "hash_ids": [n]} for n in range(60)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = "{context_tokens: 512, max_tokens: 4}"
    work = f"  - {{kind: mooncake, path: few.jsonl, regions: [virginia, tokyo], place: uniform, figures: {figures}}}"
    text = TEXT.replace(TEXT.splitlines()[6], work).replace("0.8}", "0.95}")
    scenario = load.parse(text, "small.yaml", tmp_path, routers.names())
    with pytest.raises(plan.TooFewRequestsError, match="if the trace goes on"):
        plan.TrialRunner(scenario, 100, None, print)([Trial((("tokyo", 1), ("virginia", 1)), routed=True)])


def test_an_unknown_scenario_is_one_line() -> None:
    output = CliRunner().invoke(app(), ["plan", "nowhere"])
    assert output.exit_code == 2
    assert output.stderr.count("\n") == 1


def test_a_plan_that_does_not_outlive_a_region_is_none(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT.replace("{virginia: 12, tokyo: 6}", "{virginia: 20, tokyo: 20}"))
    output = CliRunner().invoke(app(), ["plan", str(path), "--most", "1", "--json"])
    found = json.loads(output.stdout)["plan"]
    assert found["together"]["replicas"] == {"virginia": 1, "tokyo": 1}
    assert found["together_spare"]["replicas"] is None
    assert output.exit_code == 1, output.output


def test_plan_of_an_impossible_objective_shows_what_the_largest_fleet_reaches(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    output = CliRunner().invoke(app(), ["plan", str(path), "--most", "1", "--ttft", "1", "--json"])
    assert output.exit_code == 1, output.output
    found = json.loads(output.stdout)["plan"]
    assert found["alone"]["why"] == "1 replicas are not enough in virginia (0% good), tokyo (0% good)"
    assert found["together"]["why"] == "1 replicas in every region are not enough (0% good in the worst)"


def test_plan_without_requests_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT.replace("virginia: 12, tokyo: 6", "virginia: 0"))
    output = CliRunner().invoke(app(), ["plan", str(path)])
    assert output.exit_code == 2
    assert output.stderr.startswith("farhop: no request came in the 3 s that count; give a longer --for")
