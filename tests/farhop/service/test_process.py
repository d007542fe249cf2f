"""A balancer's process: what its threads compute does not hold its loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys

PROGRAM = """
import os, signal, sys, threading
from farhop.service import process

def rounds():
    "How often the loop's thread reads and writes while another computes so much."
    computing = threading.Thread(target=lambda: sum(n & 3 for n in range(2_000_000)))
    reads, writes = os.pipe()
    computing.start()
    count = 0
    while computing.is_alive():
        os.write(writes, b".")
        os.read(reads, 1)
        count += 1
    return count

class Balancer:
    async def open(self):
        here = rounds()
        sys.setswitchinterval(0.005)  # Python's own
        print(here, rounds())
        os.kill(os.getpid(), signal.SIGTERM)
        return "open"

    async def close(self):
        pass

    def reload(self):
        pass

process.run("test", Balancer)
"""


async def test_a_thread_that_computes_lets_the_loop_read_and_write_in_between() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    here, by_default = map(int, printed.splitlines()[0].split())
    assert here > 5 * by_default
