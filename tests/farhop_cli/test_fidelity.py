"""`farhop bench fidelity`: the table, the verdict in the exit code, and one line for what cannot be run live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farhop_cli.main import app
from farhop_lab.studies import cell, fidelity
from tests.farhop_lab.studies.test_fidelity import TEXT

_RUN, _FOUND = cell.run, dict[cell.Key, cell.Result]()


def simulated(document: Any, folder: Path, key: cell.Key, recipe: Any) -> cell.Result:
    """One cell for all: what is shown of it is at issue here."""
    return _FOUND.get(key) or _FOUND.setdefault(key, _RUN(document, folder, key, recipe))


@pytest.mark.parametrize(("ttft_ms", "code"), [(60.0, 0), (6000.0, 1)])
def test_simulated_and_live_figures_are_shown_and_large_differences_flagged(
    ttft_ms: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def live(*_args: Any) -> tuple[list[fidelity.MeasuredAnswer], int]:
        return [fidelity.MeasuredAnswer(ttft_ms, 100, 30)], 2

    monkeypatch.setattr(fidelity, "live", live)  # a world of processes is for tests/farhop_lab/studies
    monkeypatch.setattr(cell, "run", simulated)
    monkeypatch.setattr(fidelity, "WITHIN", 1.0 if code == 0 else 0.15)
    path = tmp_path / "live.yaml"
    path.write_text(TEXT)
    text = CliRunner().invoke(app(), ["bench", "fidelity", str(path)])
    assert text.exit_code == code, text.output
    assert "ttft_p90_ms" in text.stdout
    assert "2 failed" in " ".join(text.stdout.split())
    document = json.loads(CliRunner().invoke(app(), ["bench", "fidelity", str(path), "--json"]).stdout)
    assert document["rows"][0]["live"] == ttft_ms


def test_scenario_that_cannot_run_live_is_reported_in_one_line() -> None:
    output = CliRunner().invoke(app(), ["bench", "fidelity", "arena"])
    assert output.exit_code == 2
    assert "same replicas in every region" in output.stderr
    assert output.stderr.count("\n") == 1
