"""`farhop demo`: the lab's demo, a line per check. Its exit code is the demo's verdict.

However it is stopped, it stops its world first.
"""

from __future__ import annotations

import asyncio
import signal

import typer
import uvloop

from farhop_cli.exits import NEGATIVE, fail
from farhop_lab.demo import demo
from farhop_lab.world.etcd import EtcdLabError


def run() -> int:
    """Run every part; 0 if every check held, otherwise 1. Ends the command with one line if no world can run."""
    try:
        held = uvloop.run(_play())
    except (EtcdLabError, OSError) as error:
        fail(f"demo: {error}")
    except asyncio.CancelledError:
        fail("demo: stopped before its end", NEGATIVE)
    return 0 if held else NEGATIVE


async def _play() -> bool:
    playing = asyncio.current_task()
    assert playing is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # Ctrl-C cancels by itself
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    return await demo.run(typer.echo)
