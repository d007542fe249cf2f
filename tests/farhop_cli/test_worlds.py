"""`farhop bench worlds`: the worst world stands first, by its number, and too many losses are exit code 1."""

from __future__ import annotations

import json

from farhop_cli import worlds
from farhop_lab.sim.stats import Interval
from farhop_lab.studies.random_worlds import Verdict


def verdict(number: int, mean: float, *, lost: bool) -> Verdict:
    good = Interval(mean, 0.01, 4)
    return Verdict(number, "chat", 0.9, "skywalker", good, None, 0.5, 0.0, lost, False, "tokyo:1xl4")


def test_the_worst_stands_first_and_decides(capsys):
    assert worlds.printed([verdict(3, 1.1, lost=False), verdict(17, 0.8, lost=True)], as_json=False) == 1
    out = capsys.readouterr().out
    assert out.index("17") < out.index("1.100")
    assert worlds.printed([verdict(3, 1.1, lost=False)], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["without_loss"] == 1.0


def test_a_window_that_is_none_is_bad_usage(cli):
    assert "--for: give 5s to" in cli.failed(cli.run("bench", "worlds", "--for", "1s"), 2)
