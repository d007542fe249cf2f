"""Child processes of a world: started, awaited, signalled by their own id, never left behind.

A child dies with its parent however that one dies (Linux: PR_SET_PDEATHSIG), and does not get the terminal's Ctrl-C:
its parent stops it in order. Never touches a process it did not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from farhop_lab.world import fork_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

Process: TypeAlias = asyncio.subprocess.Process | fork_server.Process

_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec as little as possible may be done.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
LINE_BYTES_MAX = 64 * 1024
PROGRAM = "FARHOP_LAB_PROGRAM"  # another module to run as the `farhop` command (farhop_lab.histories.live)
_LOOK_S = 0.05
_END_OF_LOG_BYTES = 4096


class ChildError(Exception):
    """A child that did not start; the text has its last output."""


class Child:
    """One process: by default `python -m farhop_cli` with some arguments, without its imports (fork_server).

    `start` waits for its ready line, the first on stdout; `start_until` for a condition, for other programs.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        program: Sequence[str] = (),
    ) -> None:
        self.name, self.log = name, log
        self._program, self._arguments, self._environment = program, arguments, environment
        self._process: Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def ended(self) -> int | None:
        """Its exit code, once it has ended; below 0 the signal that ended it."""
        return self._process.returncode if self._process is not None else None

    async def start(self, timeout_s: float = 30.0) -> str:
        """Run it and wait for its ready line, which is returned. Raises ChildError."""
        try:
            async with asyncio.timeout(timeout_s):
                self._process = await self._launch(piped=True)
                stdout = self._process.stdout
                assert stdout is not None
                line = await stdout.readline()
        except TimeoutError:
            await self.kill()
            raise ChildError(f"{self.name}: not ready within {timeout_s:g} s; it said: {self._end_of_log()}") from None
        except BaseException:  # the caller was cancelled, or the line has no end: only we can stop it
            await self.kill()
            raise
        if not line:
            await self.kill()  # it may have closed its stdout and still run
            raise ChildError(f"{self.name}: did not start; it said: {self._end_of_log()}")
        self._drain = asyncio.create_task(self._swallow(stdout))
        return line.decode(errors="replace").strip()

    async def start_until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
        """Run it, all its output into its log, and call `ready` until it is true. Raises ChildError."""
        try:
            async with asyncio.timeout(timeout_s):
                self._process = process = await self._launch(piped=False)
                while not await ready() and process.returncode is None:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            await self.kill()
            raise ChildError(f"{self.name}: not ready within {timeout_s:g} s; it said: {self._end_of_log()}") from None
        except BaseException:
            await self.kill()
            raise
        if process.returncode is not None:
            raise ChildError(f"{self.name}: did not start; it said: {self._end_of_log()}")

    async def _launch(self, *, piped: bool) -> Process:
        environment = {**os.environ, **self._environment}
        module = os.environ.get(PROGRAM, "farhop_cli")
        with self.log.open("ab") as log:
            if not self._program and fork_server.available():
                out = None if piped else log.fileno()
                try:
                    return await fork_server.start(
                        module, self._arguments, environment, stdout=out, stderr=log.fileno(), limit=LINE_BYTES_MAX
                    )
                except fork_server.ForkError as error:
                    raise ChildError(f"{self.name}: did not start; {error}") from None
            return await asyncio.create_subprocess_exec(
                *(self._program or (sys.executable, "-m", module)),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if piped else log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=bound_to_parent(),
                limit=LINE_BYTES_MAX,
            )

    async def _swallow(self, stdout: asyncio.StreamReader) -> None:
        while await stdout.read(LINE_BYTES_MAX):
            pass

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs; SIGSTOP has stopped it when this returns."""
        if self._process is not None and self._process.returncode is None:
            send(self._process, number)

    async def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        await self._reap()

    async def stop(self, grace_s: float = 5.0) -> int | None:
        """SIGTERM, then SIGKILL after the grace; returns its exit code."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._reap()
        except TimeoutError:
            await self.kill()
        return self._process.returncode if self._process is not None else None

    async def _reap(self) -> None:
        if self._process is not None:
            await self._process.wait()
        if self._drain is not None:
            await asyncio.gather(self._drain, return_exceptions=True)

    def _end_of_log(self) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _END_OF_LOG_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1][:500]
        return "nothing"


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a child of ours; SIGSTOP has stopped it when this returns, or it has ended.

    `kill` only requests a stop: it takes effect once a thread of the process ran and noticed it, and on a busy machine
    the others still answer for a while.
    """
    # Suppressed: it has ended, and we do not know yet.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        process.send_signal(number)
        if number is not signal.SIGSTOP:
            return
        if isinstance(process, fork_server.Process):
            process.wait_until_stopped()
        else:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # left for its reaper


def bound_to_parent() -> Callable[[], None] | None:
    """What a new process runs first so that it dies with this one; None if the system has no such thing."""
    return partial(_die_with_parent, os.getpid()) if _PRCTL is not None else None


def _die_with_parent(parent: int) -> None:
    """Runs in the child before its program does."""
    assert _PRCTL is not None
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(1)
