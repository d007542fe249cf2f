"""`farhop drill` on a fleet that is pretended, with a real etcd: what it says before anything is touched, and of runs
that are over. tests/drills has it on a world that lives."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from farhop_cli import drill
from farhop_cli.drill_fleet import DrillOptions, shipped
from farhop_cli.options import FleetOptions
from farhop_drill.machine import DrillVerdict
from farhop_drill.measures import Canary
from farhop_drill.outcome import Outcome
from farhop_lab.memory_store import MemoryStore


def test_the_shipped_drills_are_listed_without_a_fleet(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("drill: own\ntitle: Mine\nkind: traffic\n")
    (tmp_path / "bad.yaml").write_text("- 1\n")
    listed = json.loads(cli.run("drill", "list", "--folder", str(tmp_path), "--json").stdout)["drills"]
    found = {one["drill"]: one for one in listed}
    assert set(shipped()) | {"own", "bad"} == set(found)
    assert found["lose-a-region"]["set"] == ["region=virginia", "soak_s=8", "ttft_ms=2000"]
    assert "a drill is a mapping" in found["bad"]["title"]


async def test_run_shows_the_answers_of_failed_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = ["", *["rate_limit_exceeded"] * 3, "connect_failed"]
    canaries = [
        Canary(entry="e", tenant="t", model="m", began_s=1.0, first_s=None, ended_s=2.0, code=code) for code in codes
    ]
    outcome = Outcome(
        run="r", drill="d", title="D", author="a", fleet="f", epoch_s=1.6e9, verdict=DrillVerdict.FAIL, why="",
        document=drill.document.read(shipped()["lose-a-region"].text, "shipped").model_dump(mode="json"),
        canaries=canaries,
    )  # fmt: skip
    store = MemoryStore(Random(1))
    await store.open()
    assert await drill.reported(outcome, store, DrillOptions("d", out=tmp_path), FleetOptions()) == 1
    assert "failed requests were answered: rate_limit_exceeded (3), connect_failed (1)" in capsys.readouterr().out
    await store.close()


def test_nothing_runs_without_a_fleet(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli.run("drill", "run", "lose-a-region")
    assert result.exit_code == 2
    assert "no world runs here" in result.stderr
