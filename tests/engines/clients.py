"""Clients that others wrote, pointed at both tiers: each a process from the environment that `make engines` made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest
from real import HOME, MISSING

if TYPE_CHECKING:
    from pathlib import Path

    from inprocess import Both

KEY = "sk-farhop-anywhere"
WITHIN_S = 400.0  # on a busy machine their imports take half a minute
# They connect only to the given server: no hub, no telemetry, no price lists.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1",
    "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1",
}  # fmt: skip


class Entry:
    """Where clients come. `kind`: of the engine behind."""

    def __init__(self, kind: str, both: Both) -> None:
        self.kind, self.both = kind, both
        self.url = f"http://127.0.0.1:{both.entry}"
        self.environment = {"FARHOP_URL": self.url, "FARHOP_KEY": KEY}


def program(client: str, name: str) -> Path:
    """A program of this client's. Skips the test where it is not installed."""
    folder = HOME / "clients" / client
    if not (folder / ".installed").exists():
        pytest.skip(f"{client} is {MISSING}")
    return folder / "bin" / name


async def run(entry: Entry, *command: object, folder: Path) -> str:
    """What it printed, to its end, which must be a good one."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=folder, env=kept | {"HOME": str(folder)} | QUIET | entry.environment,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WITHIN_S):
            output, _ = await process.communicate()
    finally:
        end(process)
    text = output.decode(errors="replace")
    assert process.returncode == 0, text[-6000:]
    return text


def end(process: asyncio.subprocess.Process) -> None:
    """It and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
