"""The verbs are wired: what is typed reaches the rooms, lengths of time in seconds."""

import pytest

from farhop_cli import plan, sim, up


def test_lengths_of_time_are_given_in_units(cli, monkeypatch):
    asked = []
    monkeypatch.setattr(sim, "run", lambda options: asked.append(options.for_s) or 0)
    monkeypatch.setattr(plan, "run", lambda options: asked.append((options.for_s, options.within_s)) or 0)
    assert cli.run("sim", "arena", "--for", "3m").exit_code == 0
    assert cli.run("sim", "arena").exit_code == 0
    assert cli.run("plan", "wildchat", "--for", "90s", "--within", "1h").exit_code == 0
    assert cli.run("plan", "wildchat").exit_code == 0
    assert asked == [180.0, None, (90.0, 3600.0), (None, 1800.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sim", "arena", "--for", "180"), "--for: '180' is no duration"),
        (("sim", "arena", "--for", "8d"), "--for: give 1s to 7d"),
        (("plan", "wildchat", "--within", "0s"), "--within: give"),
    ],
)
def test_a_length_without_a_unit_is_refused(cli, arguments, message):
    assert message in cli.failed(cli.run(*arguments), 2)


def test_the_engine_option_may_be_repeated(cli, monkeypatch):
    asked = []
    monkeypatch.setattr(up, "run", lambda options: asked.append(options.engines))
    cli.run("up", "--engine", "tokyo=http://a:1", "--engine", "paris=http://b:1")
    assert asked == [["tokyo=http://a:1", "paris=http://b:1"]]
