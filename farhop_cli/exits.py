"""How a command ends: 0 it went well, 1 the answer was negative, 2 usage, configuration or surroundings are at fault, 3
the answer is true as far as it goes, but not all could be asked.

A failure is one line on stderr. Never a stack trace.
"""

from __future__ import annotations

from typing import NoReturn

import typer

NEGATIVE = 1
FAULT = 2
PARTIAL = 3


def fail(text: str, code: int = FAULT) -> NoReturn:
    """Say one line on stderr and end the command."""
    warn(text)
    raise typer.Exit(code)


def warn(text: str) -> None:
    """Say one line on stderr and go on."""
    typer.echo(f"farhop: {' '.join(text.split())}", err=True)
