"""`farhop sim`: a scenario by default, and its other commands by name."""

from __future__ import annotations

from typer.testing import CliRunner

from farhop_cli.main import app


def test_a_scenario_is_run_with_or_without_the_verb() -> None:
    for arguments in (["sim", "nowhere"], ["sim", "run", "nowhere"], ["sim", "--seeds", "2", "nowhere"]):
        output = CliRunner().invoke(app(), arguments)
        assert output.exit_code == 2
        assert "no ready-made scenario of that name" in output.stderr


def test_help_shows_both() -> None:
    output = CliRunner().invoke(app(), ["sim", "--help"])
    assert "import" in output.stdout
    assert "farhop sim arena" in output.stdout
