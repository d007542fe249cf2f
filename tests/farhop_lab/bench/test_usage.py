"""What a tree of processes uses, against what its members say of themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from farhop_lab.bench import usage

# A process with a child; both burn about 0.15 s of CPU, say how much, and stay.
BURNS = """
import os, sys, time
child = os.fork()
while time.process_time() < 0.15:
    pass
os.write(1, str(time.process_time()).encode() + bytes((10,)))  # in one: two share the pipe
sys.stdin.read()
"""


def test_a_tree_is_its_root_and_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BURNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        own = [float(root.stdout.readline()) for _ in range(2)]
        pids = usage.tree([root.pid])
        assert pids[0] == root.pid
        assert len(pids) == 2
        assert root.pid in usage.tree([os.getpid()])
        # They have reported it, and have done next to nothing since; a process's own clock begins with the process.
        assert sum(own) <= usage.cpu_s(pids) < sum(own) + 0.1
        assert 1_000_000 < usage.rss_bytes([root.pid]) < usage.rss_bytes(pids)
        root.stdin.close()
    time.sleep(0)
    assert usage.tree([root.pid]) == []


def test_an_ended_process_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert usage.cpu_s([gone.pid]) == 0.0
    assert usage.rss_bytes([gone.pid]) == 0
    assert usage.available()


def test_cpu_time_is_this_process_s_own() -> None:
    before, ours = usage.cpu_s([os.getpid()]), time.process_time()
    sum(range(300_000))
    spent, found = time.process_time() - ours, usage.cpu_s([os.getpid()]) - before
    assert spent <= found < spent + 0.05
