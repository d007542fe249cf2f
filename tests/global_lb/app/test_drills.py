"""The process that runs scheduled drills: gets its keys from its environment, and ends with its balancer."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from inprocess import until
from pydantic import ValidationError

from farhop.service.process.tasks import Tasks
from global_lb.app.drills import ENDS_WITH_STDIN, DrillSchedule, DrillsConfig


class Said:
    """What was logged."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warning(self, _event: str, key: str = "", **_fields: Any) -> None:
        self.texts.append(key)


def schedule(monkeypatch: pytest.MonkeyPatch, script: str = "") -> tuple[DrillSchedule, Said]:
    monkeypatch.setenv("FARHOP_TEST_DRILL", "sk-secret")
    config = DrillsConfig.model_validate({"keys": {"acme": "env:FARHOP_TEST_DRILL"}, "out": "there"})
    found: Any = Said()
    made = DrillSchedule(config, Path("/etc/farhop/global.yaml"), Random(1), found)
    if script:
        monkeypatch.setattr(made, "command", lambda: (["-c", script], {}))
    return made, found


def test_keys_never_stand_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = schedule(monkeypatch)
    words, added = made.command()
    assert words[2:5] == ["drill", "schedule", "--watch"]
    assert words[5:] == [
        "--config",
        "/etc/farhop/global.yaml",
        "--out",
        "there",
        "--key",
        "acme=env:FARHOP_DRILL_KEY_0",
    ]
    assert added == {ENDS_WITH_STDIN: "1", "FARHOP_DRILL_KEY_0": "sk-secret"}
    assert "sk-secret" not in repr(SimpleNamespace(config=made.config))


def test_the_fleet_may_be_that_of_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_DRILL", "sk-secret")
    fields = {"keys": {"acme": "env:FARHOP_TEST_DRILL"}, "context": "prod"}
    words, _ = DrillSchedule(DrillsConfig.model_validate(fields), Path("/etc/g.yaml"), Random(1), Said()).command()  # type: ignore[arg-type]
    assert words[2:7] == ["drill", "schedule", "--watch", "--context", "prod"]
    with pytest.raises(ValidationError, match="context"):
        DrillsConfig.model_validate({**fields, "context": "--etcd"})


def test_without_keys_there_is_nothing_to_run() -> None:
    with pytest.raises(ValidationError, match="keys"):
        DrillsConfig.model_validate({"keys": {}})


async def test_a_drill_schedule_ends_with_its_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, content = schedule(monkeypatch, "import sys; sys.stdin.read()")
    tasks = Tasks()
    made.open(tasks)
    await until(lambda: made.pid is not None)
    pid = made.pid
    assert pid is not None
    await made.close()
    await tasks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert content.texts == []


async def test_a_drill_process_that_ends_by_itself_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = schedule(monkeypatch, "import sys; sys.exit(3)")
    tasks = Tasks()
    made.open(tasks)
    await until(lambda: found.texts)
    await made.close()
    await tasks.close()
    assert found.texts == ["drills by the schedule: it ended with exit code 3; it is started again"]
