"""`farhop split`: weights change alone, and what nobody serves is told."""

import pytest

from farhop_cli.split import parsed


def test_weights_change_and_the_rest_stays(cli, steering):
    steering.unserved = ["v3"]
    rules = '[{"tenant": "acme", "version": "v1"}]'
    steering.put("split", f'{{"llama": {{"weights": {{"v1": 1}}, "rules": {rules}, "sticky": "tenant"}}}}'.encode())
    result = cli.run("split", "virginia", "--model", "llama", "--weights", "v1=0, v2=30,v3=10", "--why", "flip")
    assert result.exit_code == 0
    assert "llama in virginia: v1 0 %, v2 75 %, v3 25 %" in result.stdout
    entry = steering.stands("split")[0]["llama"]
    assert entry["weights"] == {"v1": 0.0, "v2": 30.0, "v3": 10.0}
    assert (entry["sticky"], len(entry["rules"])) == ("tenant", 1)
    assert "llama: v1=0,v2=30,v3=10, 1 rules, sticky tenant" in cli.run("split", "virginia").stdout
    assert "no replica there has version v3" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--weights", "v1=1", "--why", "x"), "--model"),
        (("--model", "m", "--weights", "v1", "--why", "x"), "no VERSION=WEIGHT"),
        (("--model", "m", "--weights", "v1=x", "--why", "x"), "no VERSION=WEIGHT"),
        (("--model", "m", "--weights", "v1=1,v1=2", "--why", "x"), "stands twice"),
        (("--model", "m", "--weights", "v1=-1,v2=1", "--why", "x"), "--weights: weights.v1: Input should be"),
        (("--model", "m", "--weights", "v1=0", "--why", "x"), "--weights: weights: all are 0"),
        (("--model", "m", "--weights", "v 1=1", "--why", "x"), "--weights: weights.v 1"),
        (("--model", "m", "--weights", "v1=nan", "--why", "x"), "--weights: weights.v1"),
        (("--model", "m", "--weights", "v1=1", "--clear"), "not both"),
        (("--model", "m", "--weights", "v1=1"), "--why"),
    ],
)
def test_what_cannot_be_split(cli, steering, arguments, said):
    assert said in cli.failed(cli.run("split", "virginia", *arguments), 2)
    assert steering.stands("split") is None


def test_weights_are_numbers_by_version():
    assert parsed("v1=95,v2=0.5") == {"v1": 95.0, "v2": 0.5}
