"""What operators say is wired: the commands are the command line's own, and bad usage reaches no etcd."""

import pytest
import typer

from farhop_cli import main, operate

COMMANDS = sorted(typer.main.get_command(operate.app).commands)  # type: ignore[attr-defined]


def test_what_operators_say_are_commands_of_the_one_command_line():
    assert COMMANDS == ["bias", "drain", "law", "pin", "policy", "route", "split", "unbias", "undrain", "unpin"]
    assert set(COMMANDS) < set(typer.main.get_command(main.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments", [("drain", "tokyo"), ("bias", "tokyo", "--why", "x"), ("pin", "tokyo"), ("policy",), ("undrain",)]
)
def test_what_is_left_out_is_bad_usage(cli, arguments):
    result = cli.run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Missing" in result.stderr
