"""A limit is a positive number of something named; what is none reaches no etcd."""

import pytest


@pytest.mark.parametrize(
    "arguments", [("acme",), ("acme", "--requests-per-minute", "0", "--why", "x"), ("acme", "--usd-per-day", "nan")]
)
def test_limit_without_a_value_is_bad_usage(cli, arguments):
    result = cli.run("limit", "set", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
