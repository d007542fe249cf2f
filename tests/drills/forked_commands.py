"""The `farhop` command for a shell, without its imports: each is a fork of one process that has done them.

A page of the documents gives some twenty commands; their imports would be most of what it costs to follow it. What runs
is what would run otherwise: the arguments, environment, folder, mask and standard streams are those of the stub that
the shell finds as `farhop`; it passes signals on, and ends with the command's exit code. Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from farhop_lab.world import fork_server

if TYPE_CHECKING:
    from collections.abc import Iterator

PRELOADED = (
    *fork_server.PRELOADED,
    "farhop.store.hubs", "farhop_cli.certs", "farhop_cli.check", "farhop_cli.commands.look", "farhop_cli.commands.law",
    "farhop_cli.commands.overrides", "farhop_cli.drain", "farhop_cli.hash_key", "farhop_cli.law", "farhop_cli.status",
    "global_lb.app.config",
)  # fmt: skip
_MESSAGE_BYTES_MAX = 128 * 1024
_PR_SET_PDEATHSIG = 1
_STUB = """#!{python} -IS
import os, signal, socket, sys
from json import dumps
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
os.umask(mask := os.umask(0))
asked = dumps([sys.argv[1:], dict(os.environ), os.getcwd(), mask]).encode()
socket.send_fds(server, [asked], [0, 1, 2])
pid = int(server.recv(16))
for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
    signal.signal(number, lambda number, _: os.kill(pid, number))
os._exit(int(server.recv(16)) & 0xFF)
"""


@contextmanager
def commands(folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """A folder for PATH in which `farhop` is. What still runs at the end is killed."""
    path, place = folder / "forks", folder / "forked"
    place.mkdir()
    (place / "farhop").write_text(_STUB.format(python=sys.executable, path=str(path)))
    (place / "farhop").chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # else NumPy has a thread as soon as it is imported
            start_new_session=True,
        )
    try:
        yield place
    finally:
        server.kill()  # and with it all its forks
        server.wait()


# -- what runs in the server's process


def _serve(listening: socket.socket) -> None:
    """Fork for each that connects, and tell it its process id, then its exit code. Returns in each fork."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for ready, _ in selector.select():
            if ready.fileobj is not listening:
                pid, stub = ready.data
                selector.unregister(ready.fd)
                os.close(ready.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _told(stub, code if code >= 0 else 128 - code)  # by a signal, as a shell has it
                stub.close()
                continue
            stub, _ = listening.accept()
            message, streams, _, _ = socket.recv_fds(stub, _MESSAGE_BYTES_MAX, 3)
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                # By their owners: later they would close other descriptors of the same numbers.
                for one in (stub, *(key.data[1] if key.data else key.fileobj for key in selector.get_map().values())):
                    one.close()
                selector.close()
                _stand_in(server, streams, *json.loads(message))
                return
            for one in streams:
                os.close(one)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, stub))
            _told(stub, pid)


def _told(stub: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # it was killed; what it stood for ends with this process
        stub.send(str(number).encode())


def _stand_in(server: int, streams: list[int], arguments: list[str], environ: Any, folder: str, mask: int) -> None:
    """In a fork: have everything that the stub has, and end with the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    for number, one in enumerate(streams):
        os.dup2(one, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.umask(mask)
    sys.argv = ["farhop", *arguments]


def _end(code: int) -> NoReturn:
    """As an interpreter ends, except that nothing is freed: that would copy each page shared with the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """The server, and in a fork the command."""
    os.environ.pop("OPENBLAS_NUM_THREADS")
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    from farhop_cli.main import main as farhop

    try:
        farhop()
    except SystemExit as end:
        _end(int(end.code or 0))
    _end(0)


if __name__ == "__main__":
    main()
