"""Scheduled drills: a process beside this balancer that runs due drills if it gets the lock in etcd.

It is `farhop drill schedule --watch` on this balancer's own configuration, or on a context. Each balancer so configured
has one, and the holder of the lock runs the drill. A balancer that ends also ends its process, which rolls back its
running drill. As a separate process it takes nothing from this one's event loop. Never decides about a drill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from farhop.balance.backoff import Backoff
from farhop.config import Part, Secret

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from random import Random

    from farhop.service.process.tasks import Tasks
    from farhop.telemetry.logs import Throttled

ENDS_S = 15.0  # how long a drill that is stopped may take to restore, and to say so
AGAIN_S = (5.0, 300.0)  # before it is started again, if it ended by itself
_KEY = "FARHOP_DRILL_KEY_"
ENDS_WITH_STDIN = "FARHOP_ENDS_WITH_STDIN"  # a process with this ends when its parent is gone


class DrillsConfig(Part):
    """Run drills by the schedule. `keys`: of each tenant whose canaries are sent, its API key; `out`: the folder
    for reports; `context`: the fleet as an operator's command knows it, with the authority and the token by which other
    balancers' admin ports are asked. "": by this balancer's own configuration, which knows neither."""

    keys: Annotated[dict[str, Secret], Field(min_length=1, max_length=64)]
    out: Annotated[str, Field(min_length=1, max_length=4096)] = "drills"
    context: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = ""


class DrillSchedule:
    """See the module's docstring. `path`: this balancer's configuration."""

    def __init__(self, config: DrillsConfig, path: Path, rng: Random, log: Throttled) -> None:
        self.config, self._path, self._log = config, path, log
        self._backoff = Backoff(rng, *AGAIN_S)
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False

    def open(self, tasks: Tasks) -> None:
        """Start the process, and again whenever it ends."""
        tasks.start(self._keep(), "run drills by the schedule")

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return self._process.pid if self._process is not None else None

    def command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """The arguments, and additions to the environment: keys are never on a command line."""
        config = self.config
        fleet = ["--context", config.context] if config.context else ["--config", str(self._path)]
        arguments = ["-m", "farhop_cli", "drill", "schedule", "--watch", *fleet, "--out", config.out]
        added = {ENDS_WITH_STDIN: "1"}
        for number, (tenant, key) in enumerate(sorted(config.keys.items())):
            arguments += ["--key", f"{tenant}=env:{_KEY}{number}"]
            added[f"{_KEY}{number}"] = key.get_secret_value()
        return arguments, added

    async def _keep(self) -> None:
        while not self._ending:
            arguments, added = self.command()
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, env={**os.environ, **added}
                )
                code = await process.wait()
                why = f"it ended with exit code {code}"
            except OSError as error:
                why = str(error)
            self._process = None
            if not self._ending:
                self._log.warning("drills", f"drills by the schedule: {why}; it is started again")
                await asyncio.sleep(self._backoff.next_s())

    async def close(self) -> None:
        """Make the process roll back its drill, and end."""
        self._ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()  # as it would if we died
        try:
            async with asyncio.timeout(ENDS_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
