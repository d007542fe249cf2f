"""The watchdog over an announcement: a separate process that ends it as soon as its parent is silent or gone.

Run as a script, by an interpreter that loads nothing else: `watchdog.py SILENCE_S exec COMMAND...` starts a speaker and
kills it; `watchdog.py SILENCE_S bird SOCKET FILE` empties the file that BIRD includes and has BIRD read it. Each byte
on stdin is a heartbeat and is sent back, so that the parent notices if this process hangs. If the parent is killed or
stopped, this process ends the announcement; if this one is killed, the kernel kills the speaker (PR_SET_PDEATHSIG); if
this one hangs, the parent kills it. Never starts anything twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
ASKED_S = 1.0  # how long BIRD may take for an answer
NOTHING = "# farhop anycast: nothing is announced\n"
TAKEN = ("0003", "0004", "0005", "0018")  # of `configure`: done, begun, to follow the one under way, confirmed
DONE, UNKNOWN = "0000", "9001"  # of `disable`: it is; there is no protocol of the name


def main(arguments: list[str]) -> int:
    """The exit code: that of the speaker if it ended by itself."""
    silence_s, how, *rest = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its parent does, and not before
    if how == "bird":
        _watch(float(silence_s), None)
        return withdraw_bird(*rest)
    child = _start(rest)
    _watch(float(silence_s), child)
    if child.poll() is None:
        child.kill()
    return child.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def tied() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=tied)  # noqa: S603 - ours


def _watch(silence_s: float, child: subprocess.Popen[bytes] | None) -> None:
    """Until the parent is silent for `silence_s` or gone, or the speaker has ended."""
    watched = [0] if child is None else [0, os.pidfd_open(child.pid)]
    while True:
        ready, _, _ = select.select(watched, [], [], silence_s)
        if ready != [0]:
            return
        beats = os.read(0, 4096)
        if not beats:
            return
        with contextlib.suppress(OSError):
            os.write(1, beats)


def withdraw_bird(socket_path: str, file: str) -> int:
    """Have BIRD announce nothing of ours. 0 if it answers that it does.

    Where it does not take its configuration (the file cannot be emptied, or another's has an error), the protocols that
    run are disabled: they are gone once it reads the empty file.
    """
    try:
        Path(file).write_text(NOTHING)
        emptied = True
    except OSError:
        emptied = False
    with socket.socket(socket.AF_UNIX) as way:
        way.settimeout(ASKED_S)
        way.connect(socket_path)
        _code(way)  # its greeting
        way.sendall(b"configure\n")
        if _code(way) in TAKEN and emptied:
            return 0
        done = True
        for name in (b"farhop4", b"farhop6"):
            way.sendall(b"disable %b\n" % name)
            done = _code(way) in (DONE, UNKNOWN) and done
    return 0 if done else 1


def _code(way: socket.socket) -> str:
    """The code of an answer's last line, which has a blank behind it; "" if BIRD hangs up."""
    answer = b""
    while True:
        *_, last = [b"", *answer.split(b"\n")[:-1]]
        if last[:4].isdigit() and last[4:5] == b" ":
            return last[:4].decode()
        more = way.recv(4096)
        if not more:
            return ""
        answer += more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
