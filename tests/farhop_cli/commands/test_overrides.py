"""Leased overrides have a length, others have none; bad usage reaches no etcd."""

import pytest


@pytest.mark.parametrize(
    ("noun", "for_a_while"),
    [("drain", True), ("bias", True), ("pin", True), ("route", False), ("policy", False), ("split", False)],
)
def test_expiring_override_requires_a_duration(wired, options, noun, for_a_while):
    assert ("--for" in options(wired(noun).commands["set"])) is for_a_while
    assert len(wired(noun).commands) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ("drain", "set", "tokyo"), ("bias", "set", "tokyo", "--why", "x"), ("pin", "set", "tokyo"), ("policy", "set"),
        ("route", "set", "virginia", "{policy: nearest}"), ("split", "set", "tokyo", "--model", "m"), ("undrain",),
        ("drain", "unset"),
    ],
)  # fmt: skip
def test_missing_argument_is_bad_usage(cli, arguments):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" or "--why: say why" in result.stderr
