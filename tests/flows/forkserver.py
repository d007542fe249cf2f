"""`farhop` as a process of its own, forked from one that has already imported it: the seconds that takes are paid once.

What is run must end by itself. Run as a script this is the server: a line of JSON per run in, and one out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HUNG_S = 60.0


class Ended(NamedTuple):
    """How a run ended. `took_s`: from its start, less the time in which it could have run and others had the cores."""

    code: int
    out: str
    err: str
    took_s: float


class ForkServer:
    """Runs one command after the other. To be closed."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, arguments: list[str], environment: dict[str, str]) -> Ended:
        """Run `farhop` with these arguments in this environment until it ends; it is killed after HUNG_S."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([arguments, environment]) + "\n")
        return Ended(*json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        """End the server, which runs nothing now."""
        self._server.communicate(timeout=HUNG_S)
        assert self._server.returncode == 0


def kept_waiting_s(pid: int) -> float:
    """How long a process could have run and others had the cores, in all: what this machine does is not its fault."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0  # not Linux


def ended(pid: int) -> float:
    """Wait until a child has ended, which is still to be reaped; how long it was kept waiting in its life."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return kept_waiting_s(pid)


def _run(arguments: list[str], environment: dict[str, str]) -> Ended:
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _become(arguments, environment, out.fileno(), err.fileno())
        with contextlib.suppress(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, HUNG_S)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
        waited_s = ended(pid)
        took_s = time.monotonic() - began - waited_s
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
    return Ended(code, *texts, took_s)


def _become(arguments: list[str], environment: dict[str, str], out: int, err: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["farhop", *arguments]
        try:
            main()
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        except Exception:  # noqa: BLE001 - as an interpreter would end
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    import global_lb.app.main  # noqa: F401
    import regional_lb.app.main  # noqa: F401
    from farhop_cli.main import main

    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
