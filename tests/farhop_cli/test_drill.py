"""`farhop drill` on a fleet that is pretended, with a real etcd: what it says before anything is touched, and of runs
that are over. tests/drills has it on a world that lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from farhop_cli import drill
from farhop_cli.drill import Asked


def test_the_shipped_drills_are_listed_without_a_fleet(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("drill: own\ntitle: Mine\nkind: traffic\n")
    (tmp_path / "bad.yaml").write_text("- 1\n")
    listed = json.loads(cli.run("drill", "list", "--folder", str(tmp_path), "--json").stdout)["drills"]
    found = {one["drill"]: one for one in listed}
    assert set(drill.shipped()) | {"own", "bad"} == set(found)
    assert found["lose-a-region"]["set"] == ["region=virginia", "soak_s=8", "ttft_ms=2000"]
    assert "a drill is a mapping" in found["bad"]["title"]


def test_without_a_fleet_nothing_runs(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli.run("drill", "run", "lose-a-region")
    assert result.exit_code == 2
    assert "no world runs here" in result.stderr


@pytest.mark.parametrize("text", ["tenant", "tenant=sk-secret", "tenant=env:NOT_SET_ANYWHERE"])
def test_a_key_is_never_taken_from_the_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        drill._key(text)
    assert "sk-secret" not in capsys.readouterr().err


def test_a_key_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-a")
    (tmp_path / "b").write_text("sk-b\n")
    assert [drill._key("a=env:A_KEY"), drill._key(f"b=file:{tmp_path / 'b'}")] == [("a", "sk-a"), ("b", "sk-b")]


def test_parameters_are_names_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert Asked("d", ("a=1", "b=x=y")).values == {"a": "1", "b": "x=y"}
    with pytest.raises(typer.Exit):
        _ = Asked("d", ("a",)).values
    assert "--set" in capsys.readouterr().err
