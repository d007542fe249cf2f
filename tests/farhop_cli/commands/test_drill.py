"""`farhop drill`: its commands are there, and hand on what was typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farhop_cli import drill, drill_schedule
from farhop_cli.commands.drill import app
from farhop_cli.drill_fleet import DrillOptions

VERBS = {"list", "check", "run", "stop", "report", "history", "schedule", "export", "faults"}


def test_every_verb_is_there() -> None:
    assert {one.name for one in app.registered_commands} == VERBS


@pytest.mark.parametrize(
    ("words", "function", "given"),
    [
        (("run", "d", "--set", "a=1", "--key", "t=env:K", "--why", "w", "--by", "me", "--out", "o"), "run",
         (DrillOptions("d", ("a=1",), ("t=env:K",), None, Path("o"), "w", "me"),)),
        (("check", "d", "--keep"), "check", (DrillOptions("d"), True)),
        (("stop", "--all", "--why", "w", "--by", "me"), "stop", ("", True, False, "w", "me")),
        (("report", "--of", "d", "--within", "1h", "--verdict"), "print_run", ("", "d", "1h", True)),
        (("history", "d"), "history", ("d",)),
        (("list", "--folder", "f"), "list_", (Path("f"),)),
        (("faults", "--compose", "p"), "faults", ("p", "", "")),
        (("faults", "--kubernetes", "n", "--kube-context", "c"), "faults", ("", "n", "c")),
        (("export", "d", "--to", "e.json"), "export", (DrillOptions("d"), Path("e.json"))),
        (("schedule", "d", "--window", "tue 10:00-12:00", "--every", "7d"), "schedule",
         (DrillOptions("d"), ["tue 10:00-12:00"], "7d")),
        (("schedule", "d", "--remove"), "unschedule", ("d",)),
        (("schedule", "--watch"), "watch", (DrillOptions(""),)),
    ],
)  # fmt: skip
def test_options_are_passed_on(cli: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], function: str,
                                     given: tuple[Any, ...]) -> None:  # fmt: skip
    seen: list[tuple[Any, ...]] = []

    def take(*arguments: Any) -> int:
        seen.append(arguments)
        return 1

    monkeypatch.setattr(drill_schedule if words[0] == "schedule" else drill, function, take)
    assert cli.run("drill", *words).exit_code == 1
    assert seen[0][:-1] == given  # then where
