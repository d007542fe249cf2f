"""`farhop policy`: set for all models or for one, options refused as a balancer would."""

import pytest


def test_for_all_models_and_for_one(cli, steering):
    result = cli.run("policy", "virginia", "least-load", "--why", "x")
    assert result.exit_code == 0
    assert "every model without a policy of its own by least-load" in result.stdout
    assert "for llama by prefix" in cli.run("policy", "virginia", "prefix", "--model", "llama", "--why", "y").stdout
    assert steering.stands("pick")[0] == {"": "least-load", "llama": "prefix"}


def test_options_written_by_hand_are_shown(cli, steering):
    steering.put("pick", b'{"llama": {"name": "prefix", "load_factor": 1.5}, "qwen": 7}')
    shown = cli.run("policy", "virginia").stdout
    assert "llama: prefix load_factor 1.5" in shown
    assert "qwen: 7" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fastest", "--why", "x"), "NAME: no policy 'fastest'; known are predictive"),
        (("p2c", "--clear"), "not both"),
    ],
)
def test_what_is_no_policy(cli, steering, arguments, said):
    assert said in cli.failed(cli.run("policy", "virginia", *arguments), 2)
    assert steering.stands("pick") is None
