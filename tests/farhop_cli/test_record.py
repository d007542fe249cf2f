"""A fleet's own trace: recorded while it serves, by the command line, and played by the simulator."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farhop_cli import record
from farhop_cli.main import app
from tests.conftest import RunningWorld


def test_times_of_a_sped_up_world_are_scaled_back() -> None:
    file = io.BytesIO()
    trace = record.Trace(file, 10.0)
    for at_s in (1000.0, 1000.5, 1002.0):
        trace.write(json.dumps({"at_s": at_s, "input_tokens": 3, "pause_s": 0.25}).encode())
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [row["at_s"] for row in rows] == [1000.0, 1005.0, 1020.0]
    assert rows[0] == {"at_s": 1000.0, "input_tokens": 3, "pause_s": 2.5}


SHARED = "a long beginning that both of them have, said again and again " * 30


def test_served_requests_are_recorded_and_replayed(running: RunningWorld, tmp_path: Path) -> None:
    out, asked = tmp_path / "live.jsonl", []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            for region in ("tokyo", "frankfurt"):
                asked.append(running.ask(region, "anywhere", f"{SHARED}{len(asked)}", max_tokens=4).ok)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        admins = [f"--admin={run.global_admin}" for run in running.world.regions.values()]
        text = CliRunner().invoke(app(), ["record", "--for", "3s", "--out", str(out), *admins, "--json"])
    finally:
        stop.set()
        thread.join(60.0)
    assert text.exit_code == 0, text.output
    facts, rows = json.loads(text.stdout), [json.loads(line) for line in out.read_text().splitlines()]
    assert 2 <= facts["requests"] == len(rows) <= len(asked)
    assert (facts["balancers"], facts["lost"], facts["unmeasured"]) == (len(admins), 0, 0)
    assert {row["region"] for row in rows} == {"tokyo", "frankfurt"}
    assert all(row["output_tokens"] == 4 and row["input_tokens"] > 100 for row in rows)
    assert len({tuple(name for name, _ in row["blocks"][:5]) for row in rows}) == 1  # one salt for all balancers
    assert "long beginning" not in out.read_text()

    again = CliRunner().invoke(app(), ["record", "--for", "2s", "--out", str(out), *admins])
    assert again.exit_code == 2
    assert "is there already, and is not written over" in again.stderr
    made = CliRunner().invoke(app(), ["sim", "import", str(out), "--out", str(tmp_path / "live2.yaml"), "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["requests"] == len(rows)


def test_a_recording_without_requests_is_not_offered_to_be_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record._print(tmp_path / "r.jsonl", record._Received(balancers=2), as_json=False) == 1
    assert "sim import" not in capsys.readouterr().out
    assert record._print(tmp_path / "r.jsonl", record._Received(balancers=2, requests=1), as_json=False) == 0
    assert "sim import" in capsys.readouterr().out


def test_a_recording_without_requests_leaves_no_file_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    asked = ["record", "--admin", "http://127.0.0.1:9", "--for", "1s", "--out", str(tmp_path / "r.jsonl")]
    for _ in range(2):
        text = CliRunner().invoke(app(), [*asked, "--json"])
        assert (text.exit_code, json.loads(text.stdout)["trace"]) == (3, None)
        assert "cannot be reached" in text.stderr
        assert list(tmp_path.iterdir()) == []
    assert "record while clients ask" not in CliRunner().invoke(app(), asked).stdout  # that was not the reason


@pytest.mark.parametrize(("length", "code"), [("1d", 0), ("25h", 2)])
def test_longest_recording_equals_the_limit_in_the_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: str, code: int
) -> None:
    monkeypatch.setattr(record, "run", lambda *_: 0)
    assert "at most 1d" in CliRunner().invoke(app(), ["record", "--help"]).stdout
    assert CliRunner().invoke(app(), ["record", "--for", length, "--out", str(tmp_path / "r")]).exit_code == code
