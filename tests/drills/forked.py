"""A `farhop` for a shell's PATH that is forked by a process which has imported it: a guide of thirty commands would
else import for most of its time. What it is given, says and ends with are the command's own; that the installed command
starts by itself is for tests/farhop_cli/test_main.py."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from farhop_lab.world import fork_server

# In the shell's process group, as the command would be: signals it takes are handed on, and where it is killed the
# server sees the socket close and kills the command.
_COMMAND = """#!{python} -ISs
import json, os, signal, socket, sys
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.umask(mask := os.umask(0))
environment = {{**os.environ, "GUIDE_UMASK": str(mask), "GUIDE_FOLDER": os.getcwd()}}
asked = json.dumps(["in_folder", sys.argv[1:], environment]).encode()
socket.send_fds(socket.socket(fileno={server}), [asked], [theirs.fileno(), 1, 2])
theirs.close()
_, (process,), _, _ = socket.recv_fds(ours, 64, 1)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda which, _frame: signal.pidfd_send_signal(process, which))
code = json.loads(ours.recv(256))[0]
sys.exit(code if code >= 0 else 128 - code)
"""
_IN_FOLDER = """import os
os.umask(int(os.environ.pop("GUIDE_UMASK")))
os.chdir(os.environ.pop("GUIDE_FOLDER"))
from farhop_cli.main import main
main()
"""


@contextmanager
def command(folder: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Write it into the folder, as `farhop`; the descriptor that the shell must inherit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (folder / "in_folder.py").write_text(_IN_FOLDER)
    (folder / "farhop").write_text(_COMMAND.format(python=sys.executable, server=ours.fileno()))
    (folder / "farhop").chmod(0o755)
    names = [*fork_server.PRELOADED, *(f"farhop_cli.commands.{one}" for one in ("law", "look", "overrides"))]
    with ours, theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", fork_server.__name__, str(theirs.fileno()), *names, " " * 1024],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            yield ours.fileno()
        finally:
            server.kill()  # and with it all that it forked
            server.wait()
