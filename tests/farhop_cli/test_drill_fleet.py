"""Options of `farhop drill`: keys, which are never on a command line, and parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from farhop_cli import drill_fleet
from farhop_cli.drill_fleet import DrillOptions


@pytest.mark.parametrize("text", ["tenant", "tenant=sk-secret", "tenant=env:NOT_SET_ANYWHERE"])
def test_a_key_is_never_taken_from_the_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        drill_fleet.key_of(text)
    assert "sk-secret" not in capsys.readouterr().err


def test_key_is_read_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-a")
    (tmp_path / "b").write_text("sk-b\n")
    assert [drill_fleet.key_of("a=env:A_KEY"), drill_fleet.key_of(f"b=file:{tmp_path / 'b'}")] == [
        ("a", "sk-a"),
        ("b", "sk-b"),
    ]


def test_parameters_are_names_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert DrillOptions("d", ("a=1", "b=x=y")).values == {"a": "1", "b": "x=y"}
    with pytest.raises(typer.Exit):
        _ = DrillOptions("d", ("a",)).values
    assert "--set" in capsys.readouterr().err
