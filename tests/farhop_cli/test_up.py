"""`farhop up`: what is wrong is told before anything runs; a real one, on a terminal, leaves nothing behind."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farhop_cli import up
from farhop_cli.up import Options
from farhop_lab.world.world import ENDPOINTS, World, WorldError, WorldSettings, exports_elsewhere, telemetry

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="children are found by /proc")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where worlds that run here would put their folders."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setattr(up.tempfile, "tempdir", str(made))
    return made


@pytest.fixture
def never(monkeypatch):
    """Nothing must be run."""

    def run(*_):
        pytest.fail("a world was run")

    monkeypatch.setattr(up, "World", run)


def arguments(tmp_path, *more: str) -> tuple[str, ...]:
    return ("up", "--port", "0", "--world", str(tmp_path / "world.json"), *more)


# -- before anything runs


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--profile", "b300"), "use one of"),
        (("--topology", "atlantis"), "--topology"),
        (("--topology", "no/such.yaml"), "--topology"),
        (("--engine", "tokio=http://127.0.0.1:8000"), 'did you mean "tokyo"?'),
        (("--engine", "tokyo"), "REGION=http://host:port"),
        (("--engine", "tokyo=emulated"), "regions not named have emulated engines"),
        (("--engine", "tokyo=https://h:1"), "REGION=http://host:port"),
        (("--engine", "tokyo=http://h:99999"), "REGION=http://host:port"),
        (("--engine", "tokyo=http://"), "REGION=http://host:port"),
        (("--etcd", "127.0.0.1:1"), "--etcd: etcd at 127.0.0.1:1"),
        (("--etcd", "here"), "HOST:PORT"),
        (("--speedup", "0"), "--speedup"),
        (("--speedup", "nan"), "--speedup"),
        (("--model", " "), "--model"),
        (("--port", "65534"), "leaves no port for tokyo"),
    ],
)
def test_error_is_reported_in_one_line_and_leaves_nothing(cli, tmp_path, folder, never, more, message):
    output = cli.failed(cli.run(*arguments(tmp_path, *more)), 2)
    assert message in output
    assert output.count("\n") == 1
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "world.json").exists()


def test_a_port_taken(cli, tmp_path, folder, never):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        text = cli.failed(cli.run(*arguments(tmp_path), "--port", str(port)), 2)
    assert f"--port: {port}, for virginia" in text
    assert list(folder.iterdir()) == []


async def test_a_world_that_runs_already(cli, world, folder, never):
    text = cli.failed(await cli.in_thread("up", "--port", "0", "--world", str(world.path)), 2)
    assert f"process {os.getpid()}" in text
    assert world.path.exists()


def test_options_reach_the_world():
    options = Options(
        "three-regions", ["tokyo=http://a:1", "tokyo=http://b:2/x"], None, "l4", 3, 2.5, 0, "m", Path("no")
    )
    settings = up.checked(options)
    assert settings.engines == {"tokyo": ["http://a:1", "http://b:2/x"]}
    assert (settings.profile, settings.replicas, settings.speedup, settings.model) == ("l4", 3, 2.5, "m")
    assert (settings.entry_port, settings.etcd, settings.topology) == (0, None, "three-regions")


def test_a_world_that_does_not_come_up_is_one_line_with_its_logs(cli, tmp_path, folder, monkeypatch):
    class Broken:
        def __init__(self, _settings, place):
            self.place = place

        async def __aenter__(self):
            raise WorldError("engine tokyo/0: did not start")

        async def __aexit__(self, *_):
            pytest.fail("it was never entered")

    monkeypatch.setattr(up, "World", Broken)
    result = cli.run(*arguments(tmp_path))
    assert result.exit_code == 2
    (kept,) = folder.iterdir()
    assert f"farhop: up: engine tokyo/0: did not start; logs are in {kept}" in result.stderr


# -- a real one


class Terminal:
    """`farhop up` on a terminal of its own, and every process it ever started."""

    def __init__(self, tmp_path: Path) -> None:
        self.world, self.folder = tmp_path / "world.json", tmp_path / "tmp"
        self.folder.mkdir()
        self.children: set[int] = set()
        self.output, self.stopping = b"", False
        self._leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farhop_cli", "up", "--port", "0", "--replicas", "1"],
            stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.folder), "FARHOP_WORLD": str(self.world)},
        )  # fmt: skip
        os.close(follower)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal says that its other side is gone
            while chunk := os.read(self._leader, 65536):
                self.output += chunk

    def until(self, true: Callable[[], object], within_s: float = 60.0) -> None:
        """Poll a condition, with a bound, and keep an eye on the children."""
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, self.output.decode()
            assert self.stopping or self.process.poll() is None, self.output.decode()
            self.children |= descendants(self.process.pid)
            time.sleep(0.02)

    def interrupted(self) -> int:
        """Ctrl-C; the exit code."""
        self.stopping = True
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)

    def nothing_left(self) -> None:
        """No process, no file."""
        self.until(lambda: not any(map(alive, self.children)))
        assert list(self.folder.iterdir()) == []
        assert not self.world.exists()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5.0)
        os.close(self._leader)


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def alive(pid: int) -> bool:
    """Runs, and is not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def terminal(tmp_path):
    made = Terminal(tmp_path)
    yield made
    made.close()


@LINUX
def test_a_world_is_drained_and_undrained_live_and_leaves_nothing_behind(terminal, cli, monkeypatch):
    monkeypatch.setenv("FARHOP_WORLD", str(terminal.world))
    terminal.until(terminal.world.exists)
    drained = cli.run("drain", "set", "virginia", "--why", "new racks", "--by", "ann", "--over", "0s")
    assert drained.exit_code == 0, drained.stderr
    assert "3 of 3 balancers follow it" in drained.stdout
    asked = json.loads(cli.run("ask", "Where?", "--from", "virginia", "--max-tokens", "2", "--json").stdout)
    assert asked["region"] not in (None, "virginia")
    (word,) = {
        json.dumps({k: v for k, v in region["override"].items() if k != "left_s"})
        for one in json.loads(cli.run("status", "--json").stdout)["global"]
        for region in one["status"]["regions"]
        if region["region"] == "virginia"
    }
    assert json.loads(word).items() >= {"author": "ann", "why": "new racks"}.items()
    terminal.until(lambda: b"new racks" in terminal.output)
    lifted = cli.run("undrain", "virginia")
    assert (lifted.exit_code, lifted.stderr) == (0, "")
    assert "by ann at" in lifted.stdout
    assert "last region" in cli.run("drain", "set", "frankfurt", "--why", "x").stderr
    assert b"served/s" in terminal.output
    assert len(terminal.children) >= 1 + 3 * 3
    assert terminal.interrupted() == 0, terminal.output.decode()
    assert b"Traceback" not in terminal.output
    terminal.nothing_left()


@LINUX
def test_ctrl_c_while_it_starts_leaves_nothing_behind(terminal):
    terminal.until(lambda: len(terminal.children) >= 3)
    assert terminal.interrupted() == 0, terminal.output.decode()
    assert b"stopped before it was up" in terminal.output
    assert b"Traceback" not in terminal.output
    terminal.nothing_left()


# -- what a user set, and what ends


def test_users_telemetry_settings_are_unchanged():
    ours = telemetry({}, "http://c:1")
    assert ours["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:1"
    theirs = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://mine:4318", "OTEL_TRACES_SAMPLER": "always_off"}
    found = telemetry(theirs, "http://c:1")
    assert not found.keys() & {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER"}
    assert exports_elsewhere(theirs) == "http://mine:4318"
    assert exports_elsewhere({"OTEL_TRACES_SAMPLER": "always_on"}) == ""


@pytest.mark.parametrize("theirs", ["", "http://mine:4318"])
def test_a_world_whose_spans_go_elsewhere_names_no_collector_that_would_be_asked_for_them(
    monkeypatch, tmp_path, theirs
):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", theirs)
    world = World(WorldSettings(), tmp_path)
    world.collector.endpoint = "http://ours:1"
    assert world.describe(1).collector == ("" if theirs else "http://ours:1")
