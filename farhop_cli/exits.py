"""Exit codes and errors of commands: 0 success, 1 a negative answer, 2 wrong usage, configuration or environment.

Also 3: a partial answer, as not all balancers could be asked. An error is one line on stderr. Never a stack trace.
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
    """Print one line on stderr and end the command."""
    warn(text)
    raise typer.Exit(code)


def warn(text: str) -> None:
    """Print one line on stderr and continue. It may contain others' answers."""
    typer.echo(f"farhop: {printable(' '.join(text.split()))}", err=True)


def printable(text: str) -> str:
    """The text without control characters for a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def first_of(error: Exception) -> str:
    """The first problem of an error with several lines, and how many more there are."""
    first, *more = str(error).splitlines() or [""]
    return f"{first} (and {len(more)} more)" if more else first


def listed(names: Iterable[str]) -> str:
    """Names for an error text."""
    shown = sorted(names)
    return ", ".join(shown[:16]) + (", ..." if len(shown) > 16 else "") if shown else "none"
