"""The watchdog, a real process: silence, its parent's end and its own end each end the announcement."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entry_anycast.speakers import watchdog


def start(silence_s: float, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """It, and the process that it watches over."""
    found = folder / "pid"
    child = f"echo $$ > {found}.new; mv {found}.new {found}; exec sleep 60"
    process = subprocess.Popen(
        [sys.executable, "-I", watchdog.__file__, str(silence_s), "exec", "sh", "-c", child],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    until(found.exists)
    return process, int(found.read_text())


def until(true) -> None:
    end = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # as one opens it, or reads it
        return True


def test_a_child_is_killed_when_heartbeats_stop(tmp_path: Path) -> None:
    process, child = start(1.0, tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b".")
    process.stdin.flush()
    assert process.stdout.read(1) == b"."
    until(lambda: gone(child))
    process.wait(timeout=20.0)
    process.communicate()


@pytest.mark.parametrize("how", ["its parent's end", "its own"])
def test_the_guarded_child_is_killed_when_the_watchdog_or_its_parent_ends(tmp_path: Path, how: str) -> None:
    process, child = start(60.0, tmp_path)
    if how == "its own":
        process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: gone(child))
