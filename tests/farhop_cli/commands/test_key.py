"""Keys are issued, rotated, revoked and listed; every change says why."""

import pytest


def test_key_has_these_verbs(wired):
    assert set(wired("key").commands) == {"create", "rotate", "revoke", "list"}


@pytest.mark.parametrize("arguments", [("create", "acme"), ("rotate", "k3vQ9mZ1xW0b"), ("revoke", "k3vQ9mZ1xW0b")])
def test_a_change_says_why(cli, arguments):
    result = cli.run("key", *arguments)
    assert (result.exit_code, "--why" in result.stderr) == (2, True)
