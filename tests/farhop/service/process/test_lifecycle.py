"""A balancer's process: what its threads compute does not hold its loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys

PROGRAM = """
import os, signal, sys
from farhop.service.process import lifecycle

class Daemon:
    async def open(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return f"{sys.getswitchinterval():g}"

    async def close(self):
        pass

    def reload(self):
        pass

lifecycle.run("test", Daemon)
"""


async def test_a_thread_that_computes_gives_way_within_a_tenth_of_a_millisecond() -> None:
    """By what Python is told: how soon a thread wakes then is the machine's affair, and no test's."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    (line,) = [line for line in printed.decode().splitlines() if line.startswith("test: ")]
    assert float(line.split()[-1]) <= 0.0001


async def test_a_stopped_process_logs_that_it_stops_and_that_it_has() -> None:
    """Else a log that ends says neither that somebody stopped the process nor that it was killed."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    *_, stopping, stopped = printed.decode().splitlines()
    assert "stopping" in stopping
    assert "SIGTERM" in stopping
    assert "stopped" in stopped
