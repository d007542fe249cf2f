from __future__ import annotations

import pytest
from typer.testing import CliRunner

from farhop_cli.commands.entry import dns_app, where_app


@pytest.mark.parametrize("more", [[], ["publish"]])
def test_missing_file_is_reported_in_one_line(more) -> None:
    output = CliRunner().invoke(dns_app, ["--config", "missing.yaml", *more])
    assert output.exit_code == 2
    assert "missing.yaml: cannot be read" in output.output
    assert output.output.count("\n") == 1


def test_every_command_has_a_help_text() -> None:
    for app, command in ((dns_app, ["check", "--help"]), (dns_app, ["publish", "--help"]), (where_app, ["--help"])):
        assert "Example" in CliRunner().invoke(app, command).output
