"""The use of a tree of processes: CPU time and memory, read from the kernel. Linux only. Never sends a signal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def available() -> bool:
    """Whether this system reports other processes' use as Linux does."""
    return (_PROC / "self" / "stat").exists()


def tree(roots: Iterable[int]) -> list[int]:
    """These processes and all running descendants."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                # Its name is in parentheses and may contain anything: after the last one come state and parent.
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    pending = [pid for pid in roots if (_PROC / str(pid)).exists()]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += children.get(pid, ())
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of these processes, all threads, in seconds.

    By each process's CPU clock (clock_getcpuclockid(3)): utime + stime of /proc/PID/stat in ns, not in ticks of 10 ms.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # 2: CPUCLOCK_SCHED
    return total


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes; shared pages count for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    return total
