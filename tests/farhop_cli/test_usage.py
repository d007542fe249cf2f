"""`farhop usage` over files of two balancers: a table, CSV, JSON; what is wrong in one line with the remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farhop.accounts.usage import Record, lines
from farhop_cli import usage
from farhop_cli.main import app

NOON = 1_768_435_200.0 + 43_200
BOOK = """
epochs:
- {epoch: 1, since: 2026-01-01T00:00:00Z, models: {"*": {input: 1.0, cached: 0.1, output: 2.0}}}
"""


def record(name: str, at_s: float, tenant: str, model: str, prompt: int) -> Record:
    return Record(name, at_s, False, (
        tenant, "k", model, "", "tokyo", "tokyo", 200, "served", False, "engine", prompt, 0, 10, None, 0, 1, 9.0, None,
        100.0, 400, "",
    ))  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = [record("a-1", NOON, "acme", "llama", 100), record("b-1", NOON + 86_400, "acme", "qwen", 200)]
    other = [record("b-1", NOON + 86_400, "acme", "qwen", 200), record("c-1", NOON, "=cmd", "llama", 1)]
    for name, some in (("g1", made), ("g2", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_bytes(b"".join(lines(some, "farhop/fleet", None)))
    (tmp_path / "prices.yaml").write_text(BOOK)
    return tmp_path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app(), ["usage", *map(str, arguments)])


def test_json_by_day(folder: Path) -> None:
    output = json.loads(run(folder, "--tenant", "acme", "--by", "model,day", "--json").stdout)
    assert [(row["model"], row["day"], row["input_tokens"]) for row in output["rows"]] == [
        ("llama", "2026-01-15", 100), ("qwen", "2026-01-16", 200),
    ]  # fmt: skip
    assert (output["total"]["requests"], output["doubles"]) == (2, 1)
    assert "cost_usd" not in output["total"]


def test_csv_contains_no_formula_and_the_table_has_a_total(folder: Path) -> None:
    rows = run(folder, "--by", "tenant", "--csv").stdout.splitlines()
    assert rows[0].startswith("tenant,requests,failed,")
    assert rows[1].startswith("'=cmd,1,")
    shown = run(folder, "--since", "2026-01-16", "--by", "model")
    assert shown.exit_code == 0
    assert "qwen" in shown.stdout
    assert "llama" not in shown.stdout
    assert "total" in run(folder).stdout


def test_no_escape_sequence_of_a_models_name_reaches_a_terminal_by_csv(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any client chooses the name that its request asks for."""
    hostile = [record("h-1", NOON, "acme", "\x1b]0;own\x07", 1), record("h-2", NOON, "acme", "\t=cmd", 1)]
    (folder / "g1" / "2.jsonl").write_bytes(b"".join(lines(hostile, "farhop/fleet", None)))
    options = usage.Options(folder, "", "model", "", "", None, as_csv=True, as_json=False)
    usage.run(options)
    piped = capsys.readouterr().out
    assert "\n'\t=cmd,1," in piped
    assert "\n\x1b]0;own\x07,1," in piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    usage.run(options)
    assert "\n\N{REPLACEMENT CHARACTER}]0;own\N{REPLACEMENT CHARACTER},1," in capsys.readouterr().out


def test_priced_by_the_epoch_of_the_record(folder: Path) -> None:
    """These were made without a book, under epoch 0: nothing is made up for them."""
    output = json.loads(run(folder, "--prices", folder / "prices.yaml", "--json").stdout)
    assert (output["total"]["cost_usd"], output["total"]["unpriced"]) == (0.0, 3)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--by", "moon"], 2, "--by: there is no 'moon'"),
        (["--since", "soon"], 2, "--since: 'soon' is no day"),
        (["--csv", "--json"], 2, "not both"),
        (["--prices", "/nowhere"], 2, "/nowhere: cannot be read"),
        (["--tenant", "nobody"], 1, ""),
    ],
)
def test_error_is_reported_in_one_line(folder: Path, arguments: list[str], code: int, says: str) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == code
    assert says in result.stderr


def test_missing_folder_and_invalid_lines_are_reported(folder: Path) -> None:
    assert run(folder / "none").exit_code == 2
    (folder / "g1" / "2.jsonl").write_bytes(b"{}\n")
    result = run(folder)
    assert result.exit_code == 3
    assert "1 lines" in result.stderr
