"""`farhop bias` and `pin` against a real etcd: what is written, refused and printed."""

import json

import pytest

from farhop.store.contract import STEER_PREFIX
from farhop.store.documents import overrides as documents


def stored(stands):
    """All that stands there, by key."""
    return {key: documents.decode_routing(value) for key, value in stands.all(STEER_PREFIX).items()}


def test_a_bias_is_written_under_a_lease(cli, stands):
    result = cli.run("bias", "set", "tokyo", "--ms", "-50", "--for", "30m", "--why", "new link", "--by", "ann@ops")
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("tokyo: counts as 50 ms better", "by ann@ops", "farhop bias unset tokyo", "3 of 3"):
        assert text in result.stdout
    (one,) = stored(stands).values()
    assert (one.region, one.ms, one.for_s) == ("tokyo", -50.0, 1800.0)


def test_a_pin_is_for_a_tenant_or_a_model(cli, stands):
    result = cli.run("pin", "set", "frankfurt", "--tenant", "eu-only", "--why", "gpu test", "--by", "ann")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "tenant eu-only: to frankfurt, while it serves" in result.stdout
    assert "farhop pin unset --tenant eu-only" in result.stdout
    output = json.loads(cli.run("pin", "set", "tokyo", "--model", "a/b", "--strict", "--why", "x", "--json").stdout)
    assert (output["set"][0]["model"], output["set"][0]["value"]) == ("a/b", {"region": "tokyo", "strict": True})
    assert (
        'no region serves "a/b" now; there is m'
        in cli.run("pin", "set", "tokyo", "--model", "a/b", "--strict", "--why", "x").stderr
    )
    assert {(one.tenant, one.model, one.strict) for one in stored(stands).values()} == {
        ("eu-only", "", False), ("", "a/b", True),
    }  # fmt: skip
    assert "tenant" not in cli.run("pin", "get", "tokyo").stdout
    assert "gpu test" in cli.run("pin", "unset", "--tenant", "eu-only").stdout
    assert "and nowhere else" in cli.run("pin", "unset", "--model", "a/b").stdout
    assert stored(stands) == {}
    assert "model a/b: no pin is set" in cli.failed(cli.run("pin", "unset", "--model", "a/b"), 1)


def test_a_pin_that_the_law_passes_over_is_refused(cli, stands):
    for more in ((), ("--dry-run",)):
        refusal = cli.failed(cli.run("pin", "set", "tokyo", "--tenant", "eu-only", "--why", "x", *more), 1)
        assert "tokyo is not lawful for eu-only" in refusal
    assert stored(stands) == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bias", "set", "tokyo", "--ms", "70000", "--why", "x"), "--ms: 70000.0 is outside"),
        (("bias", "set", "tokyo", "--ms", "nan", "--why", "x"), "--ms"),
        (("bias", "set", "tokyo", "--ms", "1", "--why", "x", "--for", "8d"), "--for: give 1s to 7d"),
        (("pin", "set", "tokyo", "--why", "x"), "give either --tenant or --model"),
        (("pin", "set", "tokyo", "--why", "x", "--tenant", "a", "--model", "b"), "give either --tenant or --model"),
        (("pin", "set", "tokyo", "--why", "x", "--tenant", "nobody"), "is no tenant of topology"),
        (("pin", "unset"), "give either --tenant or --model"),
    ],
)
def test_error_is_reported_in_one_line_with_exit_code_2(cli, stands, arguments, text):
    output = cli.failed(cli.run(*arguments), 2)
    assert output.count("\n") == 1
    assert text in output
    assert stored(stands) == {}
