"""`farhop drill` on a live world: real kills, a runner that dies, the emergency stop, and the reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from farhop_cli.drill_fleet import SHIPPED
from farhop_cli.main import app
from farhop_lab.world import world_file
from farhop_lab.world.faults import Control, Faults, LocalWorld
from farhop_lab.world.world import HOST
from global_lb.app.drills import ENDS_WITH_STDIN
from tests.conftest import chaos

if TYPE_CHECKING:
    from tests.conftest import RunningWorld

ALL = frozenset(("virginia", "frankfurt", "tokyo"))
PATIENCE_S = 90.0


COMMAND_EVERY_S = 0.25  # a command takes a hundred times as long as a look


def until(true: Callable[[], object], every_s: float = 0.05) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "never so"
        time.sleep(every_s)


class Drilled:
    """The world with its control port, and the command on it."""

    def __init__(self, running: RunningWorld, folder: Path) -> None:
        self.running, self.folder, self.path = running, folder, folder / "world.json"
        self.faults, self.control = running.call(self._listen())
        url = self.control.url, self.control.token
        world_file.write(self.path, running.world.describe(os.getpid(), url))

    async def _listen(self) -> tuple[Faults, Control]:
        faults = Faults(LocalWorld(self.running.world))
        control = Control(faults)
        await control.start(HOST)
        return faults, control

    def farhop(self, *words: str) -> Result:
        return CliRunner().invoke(app(), ["drill", *words, "--world", str(self.path)])

    def run(self, name: str, *words: str) -> tuple[int, dict[str, object]]:
        result = self.farhop("run", name, "--out", str(self.folder), "--json", *words)
        return result.exit_code, json.loads(result.stdout)

    def thin(self, name: str, **more: object) -> str:
        """The shipped drill with a sixth of its canaries and a shorter look at the steady state: the path of its file.

        How many there are makes figures finer, and these are this machine's affair. `more` fields are in place of its
        own.
        """
        document = {**yaml.safe_load((SHIPPED / f"{name}.yaml").read_text()), "before_s": 1, **more}
        document["canaries"]["rate_per_s"] /= 6
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return str(path)

    def whole(self) -> None:
        """Nothing stands, all serve, and virginia serves its own."""
        until(lambda: self.faults.active == [])
        self.running.call(self.running.world.wait_until_serving(ALL, PATIENCE_S), PATIENCE_S + 10)
        until(lambda: self.running.ask("virginia", "anywhere", "home?").headers.get("x-farhop-region") == "virginia")


@pytest.fixture
def drilled(running: RunningWorld, tmp_path: Path) -> Iterator[Drilled]:
    made = Drilled(running, tmp_path)
    made.whole()
    yield made
    made.whole()
    running.call(made.control.close())


def test_after_a_region_s_loss_no_request_is_served_where_the_law_forbids_it(drilled: Drilled) -> None:
    code, output = drilled.run(drilled.thin("lose-a-region"), "--set", "soak_s=2")
    measures = output["measures"]
    assert isinstance(measures, dict)
    # How soon depends on this machine; that it was measured, and judged by the measurement, does not.
    assert output["verdict"] in ("PASS", "FAIL"), output
    assert code == (0 if output["verdict"] == "PASS" else 1)
    assert measures["residency_violations"] == 0
    assert {"rto_s", "decide_s", "failback_s", "canaries"} <= set(measures)
    folder = Path(str(output["folder"]))
    assert {path.name for path in folder.iterdir()} == {"journal.json", "report.html", "junit.xml"}
    assert json.loads((folder / "journal.json").read_text())["status"] == "completed"
    drilled.whole()
    assert str(output["run"]) in drilled.farhop("report", "--json").stdout
    assert "lose-a-region" in drilled.farhop("history", "lose-a-region").stdout


@pytest.mark.long
def test_a_killed_runner_ends_its_drill_and_the_emergency_stop_blocks_new_ones(drilled: Drilled) -> None:
    words = ["drill", "run", drilled.thin("kill-a-global-balancer"), "--set", "soak_s=50", "--world", str(drilled.path)]
    runner = subprocess.Popen(
        [sys.executable, "-m", "farhop_cli", *words, "--out", str(drilled.folder)], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: drilled.running.world.regions["virginia"].global_.pid is None)  # type: ignore[union-attr]
        assert drilled.faults.active
        code, output = drilled.run("drain-and-return")
        assert (code, output["verdict"]) == (1, "NOT_RUN")
        assert "another drill runs" in str(output["why"])
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    drilled.whole()
    assert drilled.farhop("stop", "--all", "--why", "incident").exit_code == 0
    code, output = drilled.run("drain-and-return")
    assert (code, output["verdict"]) == (1, "NOT_RUN")
    assert "lever: engaged" in str(output["why"])
    assert drilled.farhop("stop", "--release").exit_code == 0
    assert drilled.farhop("stop", "--release").exit_code == 1


def test_a_drill_whose_terminal_is_lost_rolls_back_and_is_aborted(drilled: Drilled) -> None:
    """By overrides alone; and the last lawful region of anybody is never taken."""
    code, result = drilled.run("drain-and-return", "--set", "region=tokyo")
    assert (code, result["verdict"]) == (1, "NOT_RUN")
    assert "tokyo is the last lawful region of japan-only" in str(result["why"])

    words = ["drill", "run", drilled.thin("drain-and-return"), "--set", "soak_s=60", "--world", str(drilled.path)]
    runner = subprocess.Popen(
        [sys.executable, "-m", "farhop_cli", *words, "--out", str(drilled.folder), "--json"],
        stderr=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        until(lambda: "drill drain-and-return" in CliRunner().invoke(
            app(), ["drain", "get", "--world", str(drilled.path)]
        ).stdout, COMMAND_EVERY_S)  # fmt: skip
        runner.send_signal(signal.SIGHUP)
        output, _ = runner.communicate(timeout=PATIENCE_S)
    finally:
        runner.kill()
        runner.wait()
    aborted = json.loads(output)
    assert (runner.returncode, aborted["verdict"], aborted["why"]) == (1, "ABORTED", "interrupted by SIGHUP")
    assert "no region and no entry is drained" in CliRunner().invoke(
        app(), ["drain", "get", "--world", str(drilled.path)]
    ).stdout  # fmt: skip


@pytest.mark.long
def test_no_client_notices_a_region_s_refusal_and_its_own_traffic_comes_back(drilled: Drilled) -> None:
    """By overrides alone. Its global balancers learn of it by being refused."""
    code, output = drilled.run(drilled.thin("region-refuses"), "--set", "soak_s=1.5")
    measures = output["measures"]
    assert isinstance(measures, dict)
    assert output["verdict"] in ("PASS", "FAIL"), output
    assert code == (0 if output["verdict"] == "PASS" else 1)
    assert (measures["residency_violations"], measures["requests_failed"], measures["streams_lost"]) == (0, 0, 0)
    assert measures["elsewhere_share"] > 0.0
    assert drilled.running.ask("virginia", "anywhere", "home?").headers.get("x-farhop-region") == "virginia"


@pytest.mark.chaos
def test_chaos_toolkit_runs_what_is_exported_and_reaches_the_drills_verdict(drilled: Drilled) -> None:
    command, file = chaos(), drilled.folder / "experiment.json"
    assert command is not None
    assert drilled.farhop("check", drilled.thin("law-change"), "--keep").exit_code == 0
    written = drilled.farhop("export", "law-change", "--set", "soak_s=1", "--to", str(file))
    assert written.exit_code == 0, written.stderr
    journal = drilled.folder / "journal.json"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it looks for `farhop` there
    asked = [command, "--no-version-check", "--no-log-file", "run", "--journal-path", str(journal), str(file)]
    subprocess.run(asked, cwd=drilled.folder, timeout=PATIENCE_S, check=False, env={**os.environ, "PATH": path})
    document = json.loads(journal.read_text())
    passed = drilled.farhop("report", "--of", "law-change", "--within", "1h", "--verdict").stdout.strip() == "PASS"
    assert document["status"] == "completed"
    assert document["deviated"] is not passed
    (ran,) = document["run"]
    assert ran["status"] == "succeeded"
    assert ran["output"]["status"] == (0 if passed else 1), ran
    assert [one["activity"]["name"] for one in document["rollbacks"]] == ["stop law-change"]


@pytest.mark.long
def test_of_two_schedule_watchers_one_runs_a_due_drill_and_both_end_with_their_starter(
    drilled: Drilled,
) -> None:
    name, began = "law-change", time.time()
    assert drilled.farhop("check", drilled.thin(name), "--keep").exit_code == 0
    planned = drilled.farhop("schedule", name, "--window", "mon-sun 00:00-24:00", "--every", "1h", "--set", "soak_s=1")
    assert planned.exit_code == 0, planned.stderr
    words = ["drill", "schedule", "--watch", "--world", str(drilled.path), "--out", str(drilled.folder)]
    said = [drilled.folder / f"watcher-{number}.log" for number in range(2)]
    watchers = []
    for log in said:
        with log.open("wb") as file:
            watchers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "farhop_cli", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=file, env={**os.environ, ENDS_WITH_STDIN: "1"},
                )
            )  # fmt: skip

    def runs() -> list[dict[str, Any]]:
        output = json.loads(drilled.farhop("history", name, "--json").stdout)
        return [one for one in output["runs"] if one["began_s"] >= began]

    try:
        until(lambda: [*drilled.folder.glob(f"{name}-*/journal.json")])
        until(runs, COMMAND_EVERY_S)
        assert [watcher.poll() for watcher in watchers] == [None, None], [log.read_text() for log in said]
        for watcher in watchers:
            assert watcher.stdin is not None
            watcher.stdin.close()
        assert [watcher.wait(PATIENCE_S) for watcher in watchers] == [0, 0]
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()
        assert drilled.farhop("schedule", name, "--remove").exit_code == 0
    (one,) = runs()
    assert one["verdict"] in ("PASS", "FAIL"), one
