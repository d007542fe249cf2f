"""Starts Python programs without their imports: a process that has done the imports once forks itself for each.

A fork runs what `python -m PROGRAM ARGUMENTS` would run: the same `__main__` and argv, its environment, folder, output
and title, a session of its own, the handlers and exit code of an interpreter. The server imports and does nothing else:
it has one thread and no event loop, and no library is initialised in it (gRPC would not survive a fork). What imports
may have read from the environment or the folder is not shared: each combination gets a server.

A program ends with its starter and with the server: it outlives neither. Linux only.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The imports of a world's processes; by name, as the lab is below the command.
PRELOADED = (
    "farhop_cli.main", "farhop_cli.commands.verbs", "farhop_cli.commands.engine", "farhop_cli.engine",
    "global_lb.app.main", "regional_lb.app.main",
    # The span exporter is imported only if there are spans, its last part when an exporter is made: half of a process's
    # start-up.
    "farhop.telemetry.trace_exporter", "farhop_lab.engine.tracing",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.exporter.http.transport._requests",
    "requests",
)  # fmt: skip
# Imports read these: OpenSSL's roots, the choice of an extension module, the interpreter's own.
_READ_BY_IMPORTS = (
    "PYTHON", "SSL_CERT_", "LD_", "MALLOC", "AIOHTTP_", "MULTIDICT_", "YARL_", "FROZENLIST_", "PROPCACHE_",
    "PROTOCOL_BUFFERS_", "COVERAGE_", "OPENBLAS_", "OMP_", "NUMPY_", "NPY_",
    "OTEL_PYTHON_", "OTEL_PROPAGATORS", "OTEL_SPAN_",
)  # fmt: skip
_MESSAGE_BYTES_MAX = 128 * 1024  # a socket's default buffer; arguments and environment together
_PR_SET_PDEATHSIG = 1
_TITLE_BYTES = 1024
_STOP_LOOK_S = 0.0005


class ForkError(Exception):
    """The server has ended, or cannot do this."""


class Ended(NamedTuple):
    """The end of a process: its exit code, or minus its signal's number; its CPU seconds, and the seconds for which it
    was ready to run and other processes had the cores.
    """

    code: int
    cpu_s: float
    run_queue_s: float


class Process:
    """A forked program, with the part of `asyncio.subprocess.Process` that the lab needs."""

    def __init__(self, pid: int, pidfd: int, ends: socket.socket, stdout: asyncio.StreamReader | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.ended: Ended | None = None
        self._pidfd, self._ends = pidfd, ends
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ends.fileno(), self._on_end)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.ended.code if self.ended is not None else None

    async def wait(self) -> int:
        """Wait until it has ended; its exit code, or minus its signal's number."""
        await self._over.wait()
        assert self.ended is not None
        return self.ended.code

    def send_signal(self, number: int) -> None:
        """Send it a signal. ProcessLookupError if it has ended; its id cannot have been reused."""
        if self.ended is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def wait_until_stopped(self) -> None:
        """After SIGSTOP: wait until every thread of it has stopped, or it has ended."""
        while any(state not in "TtXZ" for state in _states(self.pid)):
            time.sleep(_STOP_LOOK_S)

    def _on_end(self) -> None:
        """It ended; or its server did, which ends it, too."""
        received = b""
        with contextlib.suppress(ConnectionError):
            received = self._ends.recv(256)
        self.ended = Ended(*json.loads(received)) if received else Ended(-signal.SIGKILL, 0.0, 0.0)
        self._loop.remove_reader(self._ends.fileno())
        self._ends.close()
        os.close(self._pidfd)
        self._over.set()


class _ToItsEnd(asyncio.StreamReaderProtocol):
    """Fills a reader from a socket, which is closed at its end: nothing is ever written to it."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


def _states(pid: int) -> list[str]:
    """The state letter of each thread of a process; none if it is gone."""
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found


_servers: dict[tuple[object, ...], _Server] = {}
_lock = threading.Lock()


def available() -> bool:
    """Whether this system supports it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return hasattr(signal, "pidfd_send_signal")


async def start(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | None,
    stderr: int,
    limit: int,
) -> Process:
    """Run `python -m program` with exactly this environment. `stdout` None: read here, in lines of up to `limit` bytes.

    Raises ForkError. If cancelled, it leaves nothing behind.
    """
    if stdout is not None:
        return Process(*await _asked(_server(environment), program, arguments, environment, (stdout, stderr)), None)
    # No pipe: uvloop closes a file's descriptor a second time, which by then may be another thread's.
    ours, theirs = socket.socketpair()
    with theirs:  # the child has its own
        reader = asyncio.StreamReader(limit)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _ToItsEnd(reader), ours)
        try:
            ends = await _asked(_server(environment), program, arguments, environment, (theirs.fileno(), stderr))
        except BaseException:
            pipe.close()
            raise
    return Process(*ends, reader)


async def _asked(
    server: _Server, program: str, arguments: Sequence[str], environment: Mapping[str, str], outputs: tuple[int, int]
) -> tuple[int, int, socket.socket]:
    """Its process id, a pidfd of it, and the socket on which its end is reported."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setblocking(False)
        with theirs:
            server.ask([program, list(arguments), dict(environment)], (theirs.fileno(), *outputs))
        ready = asyncio.Event()
        loop.add_reader(ours.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(ours.fileno())
        received, passed, _, _ = socket.recv_fds(ours, 64, 1)
    except BaseException:
        ours.close()  # which ends what was started
        raise
    if not passed:
        ours.close()
        raise ForkError("the server that starts processes has ended")
    return int(received), passed[0], ours


def _server(environment: Mapping[str, str]) -> _Server:
    """The server for programs of such an environment: started once, and again if it was killed."""
    read = tuple(sorted((name, text) for name, text in environment.items() if name.startswith(_READ_BY_IMPORTS)))
    key = (os.getpid(), sys.executable, Path.cwd(), read)
    with _lock:
        if key not in _servers or not _servers[key].alive:
            _servers[key] = _Server(environment)
        return _servers[key]


class _Server:
    """A server's process, from its client's side. It ends with this process, and so does all that it started."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *PRELOADED, " " * _TITLE_BYTES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # else NumPy has a thread as soon as it is imported
                start_new_session=True,
            )
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def ask(self, what: list[object], descriptors: Sequence[int]) -> None:
        """Ask for a process. Raises ForkError. Does not wait for the server, which may still import."""
        message = json.dumps(what).encode()
        if len(message) > _MESSAGE_BYTES_MAX:
            raise ForkError(f"arguments and environment of {len(message)} bytes; at most {_MESSAGE_BYTES_MAX} pass")
        try:
            socket.send_fds(self._socket, [message], list(descriptors))
        except OSError as error:
            raise ForkError(f"the server that starts processes cannot be asked: {error}") from None

    def close(self) -> None:
        """Stop it and what it started."""
        self._socket.close()
        self._process.wait()


# -- what runs in the server's process


class _Asked(NamedTuple):
    """What a fork is to become."""

    program: str
    arguments: list[str]
    environment: dict[str, str]


class _Fork(NamedTuple):
    """A running process, and the socket on which to report its end."""

    pid: int
    pidfd: int
    report: socket.socket


class _Forks:
    """All running forks, and the socket for requests."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._selector = control, selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._live: dict[int, _Fork] = {}  # by both of its descriptors

    def serve(self) -> _Asked | None:
        """Fork as asked. Returns in each fork, with what it is to be; None in the server: its client has gone."""
        while True:
            for ready, _ in self._selector.select():
                if ready.fileobj is self._control:
                    message, passed, _, _ = socket.recv_fds(self._control, 2 * _MESSAGE_BYTES_MAX, 3)
                    if not message:
                        return None
                    if not self._forked(*passed):
                        return _Asked(*json.loads(message))
                elif (fork := self._live.get(ready.fd)) is None:
                    pass  # its process ended in this very round
                elif ready.fd == fork.pidfd:
                    self._end(fork)
                else:  # its starter is gone
                    signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
                    self._selector.unregister(fork.report)

    def _forked(self, report_fd: int, out: int, err: int) -> bool:
        """Whether this is still the server."""
        server, report = os.getpid(), socket.socket(fileno=report_fd)
        pid = os.fork()
        if pid == 0:
            report.close()
            self._leave()
            _stand_alone(server, out, err)
            return False
        os.close(out)
        os.close(err)
        fork = _Fork(pid, os.pidfd_open(pid), report)
        for descriptor in (fork.pidfd, report.fileno()):
            self._live[descriptor] = fork
            self._selector.register(descriptor, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            socket.send_fds(report, [str(pid).encode()], [fork.pidfd])
        return True

    def _leave(self) -> None:
        """In a fork: close what is the server's, by its owners: later they would close other descriptors of the same
        numbers.
        """
        self._selector.close()
        self._control.close()
        for fork in {one.pid: one for one in self._live.values()}.values():
            fork.report.close()
            os.close(fork.pidfd)

    def _end(self, fork: _Fork) -> None:
        """Reap it, and report."""
        os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        waited_s = run_queue_s(fork.pid)
        _, status, usage = os.wait4(fork.pid, 0)
        end = Ended(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, waited_s)
        with contextlib.suppress(OSError):
            fork.report.send(json.dumps(end).encode())
        for descriptor in (fork.pidfd, fork.report.fileno()):
            del self._live[descriptor]
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        os.close(fork.pidfd)
        fork.report.close()


def run_queue_s(pid: int) -> float:
    """For how long in all a process was ready to run while others had the cores: that is not its own delay."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _stand_alone(server: int, out: int, err: int) -> None:
    """In a fork: it dies with the server, its session and its output are its own, and nothing else is open."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server died before the request
        os._exit(1)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    # The server's own were made for a seekable file, which a pipe is not.
    sys.stdout, sys.stderr = _anew(sys.stdout, 1), _anew(sys.stderr, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _anew(stream: TextIO, descriptor: int) -> TextIO:
    assert isinstance(stream, TextIOWrapper)
    through = stream.write_through
    binary = open(descriptor, "wb", 0 if through else -1, closefd=False)  # noqa: SIM115 - while this process lives
    return TextIOWrapper(binary, stream.encoding, stream.errors, None, stream.line_buffering, through)


def _run(asked: _Asked) -> None:
    """Be `python -m program`, to its end."""
    os.environ.clear()
    os.environ.update(asked.environment)
    _entitle([sys.executable, "-m", asked.program, *asked.arguments])
    sys.argv[1:] = asked.arguments
    gc.enable()
    try:
        runpy.run_module(asked.program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(code: int) -> NoReturn:
    """What an interpreter does at its end as seen from outside: its threads, its handlers, its output. Then it exits at
    once: to free imported objects one by one would first copy each page shared with the server, and cost as much as a
    process's start.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends what it forks
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _entitle(command: Sequence[str]) -> None:
    """Appear in `ps` as this command: it is written over the server's own, which is long enough for that."""
    with contextlib.suppress(OSError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        title = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            memory.write(title.ljust(end - begin, b"\0"))


def main() -> None:
    """The server: import, then fork until its client is gone. In a fork: return what that is to be."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.environ.pop("OPENBLAS_NUM_THREADS")
    gc.disable()
    for name in sys.argv[2:-1]:
        with contextlib.suppress(Exception):  # an import error is for the program itself to report
            importlib.import_module(name)
    gc.freeze()
    asked = _Forks(control).serve()
    if asked is None:
        os._exit(0)  # which ends all its forks
    _run(asked)


if __name__ == "__main__":
    main()
