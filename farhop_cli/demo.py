"""`farhop demo`: the lab's demo, a line per check. Its exit code is the demo's verdict, never more favourable."""

from __future__ import annotations

import asyncio

import typer

from farhop_cli.exits import NEGATIVE, fail
from farhop_lab import demo
from farhop_lab.etcd import EtcdLabError


def run() -> int:
    """Play every scene; 0 if every check held, 1 if not. Ends the command with one line where no world can run."""
    try:
        held = asyncio.run(demo.run(typer.echo))
    except (EtcdLabError, OSError) as error:
        fail(f"demo: {error}")
    return 0 if held else NEGATIVE
