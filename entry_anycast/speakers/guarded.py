"""The watchdog's parent side: starts the watchdog, sends heartbeats, and kills it if it hangs (see `watchdog.py`).

Heartbeats come from the event loop, so that a blocked loop is silent. Never announces or withdraws anything itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from entry_anycast.speakers import watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SHARE = 5  # heartbeats in the time of silence: some may be late
ENDED_S = 2.0


class Guarded:
    """The process under the watchdog, from `start` on. `ended` is called once, for whatever reason it ended."""

    def __init__(self, silence_s: float, ended: Callable[[], None]) -> None:
        self._silence_s, self._ended = silence_s, ended
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._answered_at = 0.0

    @property
    def pid(self) -> int | None:
        """Of the watchdog."""
        return self._process.pid if self._process is not None else None

    async def start(self, what: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`what`: as the watchdog takes it by its arguments. Raises OSError."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(Path(watchdog.__file__)), str(self._silence_s), *what,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        self._answered_at = loop.time()
        self._tasks = [loop.create_task(one) for one in (self._beat(), self._read_answers(), self._wait(self._process))]

    async def _beat(self) -> None:
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None
        assert process.stdin is not None
        while True:
            with contextlib.suppress(OSError):
                process.stdin.write(b".")
            await asyncio.sleep(self._silence_s / _SHARE)
            # By our own clock, and asleep we would not know: only what it owes since a beat that had its time counts.
            if loop.time() - self._answered_at > 2.0 * self._silence_s:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _read_answers(self) -> None:
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None
        assert process.stdout is not None
        while await process.stdout.read(4096):
            self._answered_at = loop.time()

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._ended()

    async def end(self) -> int | None:
        """Make the watchdog end its process and itself; kill it if it does not. Returns its exit code, if any."""
        process, self._process = self._process, None
        if process is None:
            return None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(ENDED_S):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()
