"""Processes that this machine runs for a world: started, waited for, signalled by their own id, never left behind.

A child dies with its parent whatever kills that one (Linux: PR_SET_PDEATHSIG), and does not see the terminal's Ctrl-C:
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec as little as possible may be done.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
LINE_BYTES_MAX = 64 * 1024
_LAST_WORDS_BYTES = 4096


class ChildError(Exception):
    """A child that did not come up; the text holds what it said last."""


class Child:
    """One process: `python -m farhop_cli` with some arguments. Its ready line is the first it prints on stdout."""

    def __init__(self, name: str, arguments: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._arguments, self._environment = arguments, environment
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self, timeout_s: float = 30.0) -> str:
        """Run it and wait for its ready line, which is returned. Raises ChildError."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "farhop_cli",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
                preexec_fn=bound_to_parent(),
                limit=LINE_BYTES_MAX,
            )
        stdout = self._process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await stdout.readline()
        except TimeoutError:
            await self.kill()
            raise ChildError(f"{self.name}: not ready within {timeout_s:g} s; it said: {self._last_words()}") from None
        except BaseException:  # whoever waited was cancelled, or the line has no end: nobody will stop it but us
            await self.kill()
            raise
        if not line:
            await self.kill()  # it may have closed its stdout and live on
            raise ChildError(f"{self.name}: did not start; it said: {self._last_words()}")
        self._drain = asyncio.create_task(self._swallow(stdout))
        return line.decode(errors="replace").strip()

    async def _swallow(self, stdout: asyncio.StreamReader) -> None:
        while await stdout.read(LINE_BYTES_MAX):
            pass

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and nobody has told us yet
                self._process.send_signal(number)

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

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1][:500]
        return "nothing"


def bound_to_parent() -> Callable[[], None] | None:
    """What a new process runs first so that it dies with this one; None where the system has no such thing."""
    return partial(_die_with_parent, os.getpid()) if _PRCTL is not None else None


def _die_with_parent(parent: int) -> None:
    """Runs in the child before its program does."""
    assert _PRCTL is not None
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask to be told
        os._exit(1)
