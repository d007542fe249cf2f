"""`farhop bench worlds`: the worst world stands first, too many losses are exit code 1, and a page gets its tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import typer

from farhop_cli import worlds
from farhop_lab.sim.stats import Interval
from farhop_lab.studies.verdicts import RouterResult, Verdict

if TYPE_CHECKING:
    from pathlib import Path


def verdict(number: int, mean: float, *, lost: bool, failed: float = 0.0) -> Verdict:
    p90 = Interval(mean / 2.0, 0.01, 5)
    good, ours, theirs = (
        Interval(mean, 0.01, 5),
        RouterResult(0.9, failed, 200.0, failed),
        RouterResult(0.8, 0.25, 400.0),
    )
    all_ran = {"farhop": ours, "skywalker": theirs, "gorgo": RouterResult(0.85, 0.0, 300.0)}
    return Verdict(
        number, "chat", 0.9, "skywalker", good, p90, 0.5, 100.0, ours, theirs, lost, lost, "tokyo:1xl4", all_ran,
        Interval(0.7, 0.02, 5),
    )  # fmt: skip


def test_the_worst_world_comes_first_and_decides(capsys):
    assert worlds.printed([verdict(3, 1.1, lost=False), verdict(17, 0.8, lost=True)], as_json=False) == 1
    out = capsys.readouterr().out
    assert out.index("17") < out.index("1.100")
    assert worlds.printed([verdict(3, 1.1, lost=False)], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["without_loss"] == 1.0
    assert [one["rival"] for one in found["rivals"]] == ["gorgo", "skywalker"]
    assert found["standings"]["gorgo"] == {"router": "gorgo", "level": 0, "soon": 0}  # beside Farhop, the best other


def test_page_shows_goals_met_and_marks_only_certain_ones() -> None:
    page = worlds.report([verdict(3, 1.1, lost=False), verdict(4, 1.005, lost=False, failed=0.1)], "seed 1")
    lines = page.splitlines()
    assert "| worlds without a loss | 95% | 2 of 2 | met |" in lines
    assert "| good answers over the best single rival's (gorgo), first seed | 1.03 | 1.059 | met |" in lines
    assert any(line.endswith("| 0 | 1 | missed |") for line in lines)
    assert any(line.startswith("| TTFT p90 over each") and "| 0.526 (" in line for line in lines)  # of 0.55 and 0.5025
    assert "**1.100 ± 0.010**" in page
    assert "| 1.005 ± 0.010 |" in page
    assert "| farhop | 90.0 |  |  | 2 | 2 |" in lines
    assert any(line.startswith("| gorgo | 85.0 |") and line.endswith("| 0 | 0 |") for line in lines)
    assert "| **0.700 ± 0.020** | 0.0 / 25.0 |" in page


def test_page_marks_faster_rivals_with_more_failures() -> None:
    page = worlds.report([verdict(3, 0.8, lost=True), verdict(4, 0.8, lost=True, failed=0.245)], "seed 1")
    assert any(line.startswith("| of the others") and "| 1 of 2 |" in line for line in page.splitlines())


def test_tables_are_written_between_their_marker_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    for of in ("seed 1", "seed 2"):
        worlds.write_verdicts(page, "usual", [verdict(3, 1.1, lost=False)], of)
    assert page.read_text().count("### Goals") == 1
    page.write_text(f"# Before\n{page.read_text()}after\n")
    worlds.write_verdicts(page, "usual", [verdict(3, 1.1, lost=False)], "seed 3")
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("after\n")
    assert "seed 3" in text
    assert "seed 2" not in text
    page.write_text("# Somebody's page\n")
    with pytest.raises(typer.Exit):
        worlds.parts_of(page, "usual")
    assert "it lacks the lines" in capsys.readouterr().err


def test_one_page_has_the_tables_of_both_families(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    worlds.write_verdicts(page, "usual", [verdict(3, 1.1, lost=False)], "seed 1")
    page.write_text(
        f"{page.read_text()}\n<!-- farhop bench worlds --kinds special: begin -->\n"
        "<!-- farhop bench worlds --kinds special: end -->\nafter\n"
    )
    worlds.write_verdicts(page, "special", [verdict(4, 1.1, lost=False)], "seed 2")
    worlds.write_verdicts(page, "usual", [verdict(3, 1.1, lost=False)], "seed 3")
    text = page.read_text()
    assert [text.count(heading) for heading in ("### Goals\n", "### Goals, special kinds\n", "seed 1 of")] == [1, 1, 0]
    assert text.index("seed 3 of") < text.index("seed 2 of") < text.index("after\n")


def test_special_kinds_are_drawn_from_no_traces(cli, tmp_path: Path) -> None:
    wrong = cli.run("bench", "worlds", "--kinds", "special", "--traces", str(tmp_path))
    assert "special kinds are not drawn from traces" in cli.failed(wrong, 2)


def test_a_window_that_is_none_is_bad_usage(cli):
    assert "--for: give 5s to" in cli.failed(cli.run("bench", "worlds", "--for", "1s"), 2)
