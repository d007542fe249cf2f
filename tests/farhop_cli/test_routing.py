"""`farhop bench routing`: its tables of cells that were run, as text and as markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farhop_cli import routing as command
from farhop_cli.main import app
from farhop_lab.scenarios.load import parse
from farhop_lab.studies import pool, routing
from tests.farhop_lab.studies.test_pool import TEXT


def jobs(_plan: Any) -> list[pool.Job]:
    scenario = parse(TEXT.replace("tiny", "push"), "it", Path(), ["farhop"])
    return pool.jobs(scenario, ["farhop", "region-local"], [1])


def test_tables_markdown_and_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(routing, "jobs", jobs)
    file, out = tmp_path / "r.md", tmp_path / "out"
    arguments = ["bench", "routing", "--quick", "--only", "push", "--out", str(out), "--markdown", str(file)]
    output = CliRunner().invoke(app(), arguments)
    assert output.exit_code == 0, output.output
    assert "push, load 1" in output.stdout
    page = (out / "routing.html").read_text()
    assert "push, load 1" in page
    assert 'alt="push-goodput"' in page
    text = file.read_text()
    assert "### Goals" in text
    assert "| push | 1 | requests_per_s >= 0.98 x best | region-local |" in text
    assert "| --- |" in text
    document = json.loads(CliRunner().invoke(app(), [*arguments, "--json"]).stdout)
    assert [row["router"] for row in document["rows"]] == ["farhop", "region-local"]
    assert document["verdicts"][0]["against"] == "region-local"


def test_an_unknown_scenario_is_one_line() -> None:
    output = CliRunner().invoke(app(), ["bench", "routing", "--only", "areena"])
    assert output.exit_code == 2
    assert "areena" in output.stderr


def test_markdown_aligns_numbers() -> None:
    assert command.markdown("T", ["a", ">b"], [["x", "1"]]).splitlines()[3] == "| --- | ---: |"
