"""`farhop drill` on a fleet that is pretended, with a real etcd: what it says before anything is touched, and of runs
that are over. tests/drills has it on a world that lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farhop_cli.drill_fleet import shipped


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


def test_without_a_fleet_nothing_runs(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli.run("drill", "run", "lose-a-region")
    assert result.exit_code == 2
    assert "no world runs here" in result.stderr
