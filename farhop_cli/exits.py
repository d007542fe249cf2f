"""How a command ends: 0 it went well, 1 the answer was negative, 2 usage, configuration or surroundings are at fault, 3
the answer is true as far as it goes, but not all could be asked.

A failure is one line on stderr. Never a stack trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

NEGATIVE = 1
FAULT = 2
PARTIAL = 3


def fail(text: str, code: int = FAULT) -> NoReturn:
    """Say one line on stderr and end the command."""
    warn(text)
    raise typer.Exit(code)


def warn(text: str) -> None:
    """Say one line on stderr and go on. What others answered may stand in it."""
    typer.echo(f"farhop: {printable(' '.join(text.split()))}", err=True)


def printable(text: str) -> str:
    """The text without what would drive a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def first_of(error: Exception) -> str:
    """The first of the problems that an error lists, a line each, and how many more there are."""
    first, *more = str(error).splitlines() or [""]
    return f"{first} (and {len(more)} more)" if more else first


def listed(names: Iterable[str]) -> str:
    """Names for an error."""
    shown = sorted(names)
    return ", ".join(shown[:16]) + (", ..." if len(shown) > 16 else "") if shown else "none"
