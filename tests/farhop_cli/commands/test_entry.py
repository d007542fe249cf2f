from __future__ import annotations

import pytest
from typer.testing import CliRunner

from farhop_cli.commands.entry import dns_app, where_app


@pytest.mark.parametrize("more", [[], ["publish"]])
def test_a_file_that_is_not_there_is_one_line(more) -> None:
    output = CliRunner().invoke(dns_app, ["--config", "missing.yaml", *more])
    assert output.exit_code == 2
    assert "missing.yaml: cannot be read" in output.output
    assert output.output.count("\n") == 1


def test_every_command_says_what_it_is_for() -> None:
    for app, command in ((dns_app, ["check", "--help"]), (dns_app, ["publish", "--help"]), (where_app, ["--help"])):
        assert "Example" in CliRunner().invoke(app, command).output
