"""`farhop bench chaos`: its output, its files, and the exit code."""

from __future__ import annotations

import json

import pytest

from farhop_lab.chaos import hunt, live, schedule, trial
from farhop_lab.chaos.live import LiveResult
from farhop_lab.chaos.properties import Finding
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.trial import Outcome
from farhop_lab.sim.faults import Fault

FAULT = Fault(9.0, 2.0, "pause", "ash", "gpu-1")
BAD = Outcome(Schedule(7, faults=(FAULT,)), (Finding("shares", "ash/gpu-1", "0 answers where 20 are fair"),), 300, 60.0)


def lines(result):
    return result.exit_code, result.stdout


@pytest.fixture
def fails(monkeypatch):
    """Every trial with a paused replica fails."""

    def run(one):
        paused = any(fault.what == "pause" for fault in one.faults)
        return Outcome(one, BAD.findings if paused else (), 10, 60.0, 0.1)

    monkeypatch.setattr(trial, "run", run)


def test_seeds_that_fail_are_shown_shrunk_and_kept(cli, fails, tmp_path) -> None:
    seeds = [seed for seed in range(60) if "pause" in {fault.what for fault in schedule.drawn(seed).faults}]
    code, out = lines(cli.run("bench", "chaos", "--seeds", "60", "--workers", "1", "--out", str(tmp_path)))
    assert code == 1
    assert f"{len(seeds)} of 60 schedules leave something behind" in out
    assert "what: pause" in out
    assert "shares: ash/gpu-1: 0 answers where 20 are fair" in out
    (path,) = tmp_path.glob("*.yaml")
    code, out = lines(cli.run("bench", "chaos", "--replay", str(path)))
    assert code == 1
    assert "1 of 1 schedules" in out


def test_json_and_all_well(cli, fails) -> None:
    calm = next(n for n in range(99) if "pause" not in {fault.what for fault in schedule.drawn(n).faults})
    code, out = lines(cli.run("bench", "chaos", "--seeds", "1", "--seed", str(calm), "--json"))
    document = json.loads(out)
    assert code == 0
    assert (document["bench"], document["seeds"], document["failed"]) == ("chaos", 1, 0)


def test_a_file_that_cannot_be_played_is_shown_in_a_line(cli, tmp_path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("seed: 1\nregions: 77\n")
    for asked, says in ((path, "regions: give 2 to 4"), (tmp_path / "none.yaml", "cannot be read")):
        err = cli.failed(cli.run("bench", "chaos", "--replay", str(asked)), 2)
        assert says in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("findings", [(), (Finding("standing", "virginia", "mode panic"),)])
def test_a_live_run_ends_with_a_verdict(cli, monkeypatch, findings) -> None:
    asked = []

    async def run(folder, seed, for_s, progress):
        progress("pause virginia-0")
        asked.append((seed, for_s))
        return LiveResult(seed, 1, 500, 3, (FAULT,), {"virginia/virginia-0": (20, 20.5)}, findings)

    monkeypatch.setattr(live, "run", run)
    code, out = lines(cli.run("bench", "chaos", "--live", "--for", "60s", "--seed", "4"))
    assert code == bool(findings)
    assert asked == [(4, 60.0)]
    assert "virginia/virginia-0" in out
    assert f"{len(findings)} findings after the quiet" in out
    code, out = lines(cli.run("bench", "chaos", "--live", "--json"))
    assert json.loads(out)["answers"] == 500


def test_failed_live_run_names_its_log_folder(cli, monkeypatch) -> None:
    async def run(*_):
        raise live.LiveError("virginia: does not come back")

    monkeypatch.setattr(live, "run", run)
    err = cli.failed(cli.run("bench", "chaos", "--live"), 2)
    assert "does not come back; logs are in" in err


def test_replayed_schedule_has_the_findings_it_was_hunted_with(fails) -> None:
    assert hunt.replayed(BAD.schedule).failures[0].findings == BAD.findings
