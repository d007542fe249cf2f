"""Output of commands: tables, lines and numbers for people, or one JSON document and nothing else.

Text from elsewhere is never interpreted as markup, and control characters never reach a terminal.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.table import Table

from farhop_cli.exits import printable as printable

PIPED_COLUMNS = 200  # a file or a pager has no width of its own; nothing is cut there
TEXT_COLUMNS = 20  # a column of text wraps, but is not made narrower than that
LABELS = 2  # columns that say what a row is about, at most
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
    """A table. Columns that begin with `>` hold numbers; rows whose index is in `dim` are dimmed.

    If it is wider than the terminal, figures' titles are wrapped; if that is not enough, it is printed in parts below
    one another, each with the first columns.
    """
    out, printed = console(), [list(map(printable, row)) for row in rows]
    if len(parts(columns, printed, out.width)) > 1:
        columns = [column.replace(" ", "\n") if column.startswith(">") else column for column in columns]
    if title:
        out.print(printable(title), style="bold", soft_wrap=True)  # a table's own title wraps at the table's edge
    for part in parts(columns, printed, out.width):
        shown = [[row[at] for at in part] for row in printed]
        out.print(built([columns[at] for at in part], shown, dim, out.width))


def parts(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Which columns stand beside one another, so that no cell is cut; each part begins with those that say what a row
    is about.
    """
    needs = [_needs(column, [row[at] for row in rows])[0] for at, column in enumerate(columns)]
    named = [at for at, column in enumerate(columns[:LABELS]) if not at or not column.startswith(">")]
    labels = named if _across([needs[at] for at in named]) <= width // 2 else named[:1]
    made, part = [], list(labels)
    for at in range(len(labels), len(columns)):
        if len(part) > len(labels) and _across([needs[one] for one in [*part, at]]) > width:
            made.append(part)
            part = list(labels)
        part.append(at)
    return [*made, part]


def _needs(column: str, cells: Sequence[str]) -> tuple[int, int]:
    """How many characters wide a column must be, and how many it would fill: a number is never wrapped, long text is
    between words.
    """
    lines = [line for text in (column.lstrip(">"), *cells) for line in text.splitlines()]
    whole = max(map(cell_len, lines), default=0)
    if column.startswith(">"):
        return whole, whole
    return min(whole, max(TEXT_COLUMNS, *(cell_len(word) for line in lines for word in line.split()), 0)), whole


def _across(widths: Sequence[int]) -> int:
    """How wide a table of such columns is, with what is between and around them."""
    return sum(widths) + 3 * len(widths) - 1


def built(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    dim: frozenset[int] = frozenset(),
    width: int | None = None,
) -> Table:
    """The same without title, not printed, in one part; what `width` has to spare goes to the first long texts."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    needs = [_needs(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    spare = None if width is None else max(0, width - _across([least for least, _ in needs]))
    for column, (least, whole) in zip(columns, needs, strict=True):
        number, given = column.startswith(">"), None
        if spare is not None:
            given = min(whole, least + spare)
            spare -= given - least
        justify: Literal["left", "right"] = "right" if number else "left"
        made.add_column(column.lstrip(">"), justify=justify, no_wrap=number, overflow="fold", width=given)
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
