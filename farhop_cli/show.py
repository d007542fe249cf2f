"""Output of commands: tables, lines and numbers for people, or one JSON document and nothing else.

Text from elsewhere is never interpreted as markup, and control characters never reach a terminal.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from farhop_cli.exits import printable as printable

PIPED_COLUMNS = 200  # a file or a pager has no width of its own; nothing is cut there
NONE = "–"
DRY = "dry run, nothing is written: "


captures: list[Console] = []  # the innermost receives all output


@contextmanager
def captured() -> Iterator[Callable[[], str]]:
    """Output within it is captured; called, it returns the text as the terminal would have had it."""
    text = io.StringIO()
    captures.append(Console(file=text, force_terminal=True, width=console().width, markup=False, highlight=False))
    try:
        yield text.getvalue
    finally:
        captures.pop()


def console() -> Console:
    """The console for people. Made anew: tests and pipes change stdout."""
    if captures:
        return captures[-1]
    width = None if sys.stdout.isatty() else PIPED_COLUMNS
    return Console(markup=False, highlight=False, emoji=False, width=width)


def json(document: object) -> None:
    """The one document that a command with `--json` prints."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], dim: frozenset[int] = frozenset()) -> None:
    """A table. Columns that begin with `>` hold numbers; rows whose index is in `dim` are dimmed."""
    console().print(built(title, columns, rows, dim))


def built(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], dim: frozenset[int] = frozenset()
) -> Table:
    """The same table, not printed."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        number = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    for index, row in enumerate(rows):
        made.add_row(*map(printable, row), style="dim" if index in dim else None)
    return made


def line(text: str, style: str | None = None) -> None:
    """One line; on a terminal it may wrap, in a pipe it does not."""
    console().print(printable(text), style=style, soft_wrap=True)


def waiting(text: str) -> AbstractContextManager[object]:
    """A spinner on a terminal's stderr during long work; nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True, markup=False, highlight=False, emoji=False).status(printable(text))


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """As `waiting`, with a function that shows the present step."""
    with waiting(text) as spinner:
        yield lambda now: spinner.update(printable(f"{text}: {now}")) if isinstance(spinner, Status) else None


def cropped(lines: Iterable[str]) -> None:
    """Lines that a terminal crops instead of wrapping."""
    out = console()
    for text in lines:
        if out.is_terminal:
            out.print(printable(text), no_wrap=True, overflow="ellipsis")
        else:
            out.print(printable(text), soft_wrap=True)


def streamed(text: str) -> None:
    """A piece of an answer, at once. Piped, it is passed on unchanged."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def number(value: object, digits: int = 1) -> str:
    """A figure of a table, or a dash if there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def cell(value: object) -> str:
    """A table's cell, or a dash."""
    return str(value) if value not in (None, "") else NONE
