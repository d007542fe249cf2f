"""The law is set as other things are, and is signed and verified besides."""

import pytest


def test_the_law_is_signed_and_verified_besides(wired):
    assert wired("law").list_commands(None)[5:] == ["sign", "verify"]


@pytest.mark.parametrize("arguments", [("set", "law.yaml", "--author", "ann"), ("unset",), ("sign",)])
def test_missing_or_unknown_argument_is_bad_usage(cli, arguments):
    result = cli.run("law", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
