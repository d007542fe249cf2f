"""The tests' own workers: what a test says is told wherever it ran, and none is lost with its worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import sys
import pytest
from tests.workers import Workers

def pytest_sessionstart(session):
    session.config.pluginmanager.register(Workers(2, files))

def files(items):
    groups = [[item for item in items if item.path == path] for path in dict.fromkeys(item.path for item in items)]
    return groups[:1], groups[1:]

@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    made = tmp_path_factory.mktemp("mine")
    yield made
    (made / "over").touch()
"""
FILES = {
    "test_a.py": """
        import os
        seen = []
        def test_one(mine): seen.append((os.getpid(), mine))
        def test_of_a_file_stay_together(mine): assert seen == [(os.getpid(), mine)]
        def test_fails(capfd):
            print("said in vain")
            assert 1 == 2
        def test_after_it(): print("not to be seen")
    """,
    "test_b.py": """
        import os, signal, pytest
        def test_before(): pass
        @pytest.mark.skip(reason="for a reason")
        def test_is_skipped(): pass
        @pytest.fixture
        def broken():
            yield
            raise RuntimeError("in teardown")
        def test_breaks_afterwards(broken): pass
        def test_kills(): os.kill(os.getpid(), signal.SIGKILL)
        def test_is_lost(): pass
    """,
    "test_c.py": "def test_last(): pass",
}


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    for name, text in {"conftest.py": CONFTEST, "pytest.ini": "[pytest]", **files}.items():
        lines = text.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        (folder / name).write_text("\n".join(line[indent:] for line in lines))
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:xdist", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_whatever_becomes_of_a_test_or_its_worker_is_told(tmp_path: Path) -> None:
    code, said = run(tmp_path, **FILES)
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "FAILED a worker - it ended with -9" in said
    ends = set(re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", said, re.M))
    assert ends == {
        ("PASSED", "test_one"), ("PASSED", "test_of_a_file_stay_together"), ("FAILED", "test_fails"),
        ("PASSED", "test_after_it"), ("PASSED", "test_before"), ("PASSED", "test_breaks_afterwards"),
        ("ERROR", "test_breaks_afterwards"), ("FAILED", "test_kills"), ("FAILED", "test_is_lost"),
        ("PASSED", "test_last"),
    }, said  # fmt: skip
    assert "6 passed" in said, said
    assert "4 failed" in said, said
    assert "1 skipped" in said, said
    assert re.search(r"^FAILED \S+::test_is_lost - not run to its end: its worker ended before$", said, re.M), said


def test_at_the_first_failure_all_workers_end(tmp_path: Path) -> None:
    waits = """
        import time
        def test_holds_on():
            try: time.sleep(60)
            except KeyboardInterrupt: pass
        def test_waits(): time.sleep(60)
    """
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it of what it starts in the background
    try:
        code, said = run(tmp_path, "-x", **{"test_a.py": "def test_fails(): assert 0", "test_b.py": waits})
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "stopping after 1 failures" in said
    assert "60" not in re.findall(r"in (\d+)\.", said)


def test_what_a_worker_finds_at_its_end_fails_the_run(tmp_path: Path) -> None:
    breaks = "import os\nus = os.getpid()\ndef pytest_unconfigure():\n    assert us == os.getpid(), 'left open'\n"
    code, said = run(tmp_path, **{"conftest.py": CONFTEST + breaks, "test_a.py": "def test_passes(): pass"})
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "left open" in said
    assert "FAILED a worker - it ended with 1" in said
