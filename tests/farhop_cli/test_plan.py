"""`farhop plan` on a small world, whole."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from farhop_cli.main import app

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
    told = CliRunner().invoke(app(), [*arguments, "--json"])
    assert told.exit_code == 0, told.output
    plan = json.loads(told.stdout)["plan"]
    alone, together = plan["alone"]["replicas"], plan["together"]["replicas"]
    assert 1 <= alone["tokyo"] <= alone["virginia"] <= 2
    assert sum(together.values()) <= sum(alone.values())
    assert plan["together"]["worst"] >= 0.8
    table = CliRunner().invoke(app(), arguments)  # from what is kept
    assert "without routing" in table.stdout
    assert "N-1" in table.stdout


def test_an_unknown_scenario_is_one_line() -> None:
    told = CliRunner().invoke(app(), ["plan", "nowhere"])
    assert told.exit_code == 2
    assert told.stderr.count("\n") == 1
