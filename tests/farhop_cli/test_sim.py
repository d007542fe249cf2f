"""`farhop sim` as a person meets it: the table, the JSON, the folder, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farhop_cli.main import app
from farhop_lab.studies import pool
from tests.farhop_lab.studies.test_pool import TEXT


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT)
    return str(path)


def test_routers_side_by_side_and_kept(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = CliRunner().invoke(
        app(), ["sim", scenario, "--policy", "farhop,region-local", "--seeds", "2", "--out", str(out)]
    )
    assert text.exit_code == 0, text.output
    assert "region-local" in text.stdout
    assert "±" in text.stdout
    assert len(list(out.glob("*.json"))) == 4
    asked = ["sim", scenario, "--policy", "farhop,region-local", "--seeds", "2", "--out", str(out), "--no-plots"]
    again = CliRunner().invoke(app(), [*asked, "--json"])
    document = json.loads(again.stdout)
    assert [row["router"] for row in document["rows"]] == ["farhop", "region-local"]
    assert document["rows"][0]["figures"]["requests_per_s"]["n"] == 2
    assert len(document["cells"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no ready-made scenario of that name"),
        (["arena", "--policy", "skywaker"], 'did you mean "skywalker"?'),
        (["arena", "--for", "1s", "--out", "/dev/null/x"], "give another folder"),
    ],
)
def test_error_is_reported_in_one_line_with_exit_code_2(arguments: list[str], words: str) -> None:
    output = CliRunner().invoke(app(), ["sim", *arguments])
    assert output.exit_code == 2
    assert words in output.stderr
    assert output.stderr.count("\n") == 1


def test_the_table_is_shown_even_if_the_page_cannot_be_written(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "tiny.html").mkdir(parents=True)
    text = CliRunner().invoke(app(), ["sim", scenario, "--policy", "region-local", "--seeds", "1", "--out", str(out)])
    assert text.exit_code == 2
    assert "requests/s" in text.stdout
    assert text.stderr.endswith("tiny.html: Is a directory; give a folder that can be written to\n")


@pytest.mark.long
def test_page_is_utf_8_whatever_the_locale(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "farhop_cli", "sim", scenario, "--policy", "farhop", "--seeds", "1", "--out", out]
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(command, env=plain, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    (page,) = out.glob("*.html")
    assert "±" in page.read_text(encoding="utf-8")


def test_every_problem_of_a_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(TEXT.replace("l4", "l5").replace("duration_s: 4", "duration_s: 1"))
    text = CliRunner().invoke(app(), ["sim", str(path)])
    assert text.exit_code == 2
    assert "unknown GPU" in text.stderr
    assert "warm_up_s" in text.stderr


def test_sim_without_a_request_reports_it(tmp_path: Path) -> None:
    path = tmp_path / "idle.yaml"
    path.write_text(TEXT.replace("work:", "work:\n  - {kind: requests, per_s: {virginia: 0}}\nx:").split("x:")[0])
    text = CliRunner().invoke(app(), ["sim", str(path), "--policy", "farhop", "--seeds", "1"])
    assert text.exit_code == 0, text.output
    assert "no request came while it counts, so its figures say nothing" in text.stderr


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log"])
def test_sim_of_a_log_names_the_import_command(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"at_s": 1}\n' if name != "log.csv" else "timestamp,input_tokens\n1,2\n")
    text = CliRunner().invoke(app(), ["sim", str(path)])
    assert text.exit_code == 2
    assert f"farhop sim import {path} --out mine.yaml" in text.stderr


@pytest.mark.parametrize("command", [["sim"], ["plan"], ["bench", "worlds"]])
@pytest.mark.parametrize("kept", [True, False])
def test_interrupted_run_lists_finished_results(
    monkeypatch: pytest.MonkeyPatch, scenario: str, tmp_path: Path, command: list[str], kept: bool
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "run", interrupted)
    given = [*command, *([scenario] if command != ["bench", "worlds"] else []), *(["--out", str(tmp_path)] * kept)]
    text = CliRunner().invoke(app(), given)
    assert text.exit_code == 130
    left = f"what is finished is in {tmp_path}; the same command goes on from there"
    assert text.stderr == f"farhop: interrupted; {left if kept else 'nothing is kept without --out'}\n"
