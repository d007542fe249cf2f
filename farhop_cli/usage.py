"""`farhop usage`: sums over usage files, as a table, CSV or JSON. Reads files and nothing else."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from farhop.accounts import segments
from farhop.accounts.prices import price_book
from farhop.accounts.usage import DIMENSIONS, Reading, Sums, value_of
from farhop.config import ConfigError
from farhop_cli import show
from farhop_cli.exits import NEGATIVE, PARTIAL, fail, first_of, warn

_COUNTS = ("requests", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens",
           "regenerated_tokens")  # fmt: skip
_MONEY = ("cost_usd", "gpu_usd", "cache_saved_usd", "answers_saved_usd", "routed_usd")


@dataclass(frozen=True)
class Options:
    """As the command has them."""

    folder: Path
    tenant: str
    by: str
    since: str
    until: str
    prices: Path | None
    as_csv: bool
    as_json: bool


def run(options: Options) -> int:
    """Sum up and print; the exit code."""
    by = [one.strip() for one in options.by.split(",") if one.strip()]
    if unknown := [one for one in by if one not in DIMENSIONS]:
        fail(f"--by: there is no {unknown[0]!r}; give some of {', '.join(DIMENSIONS)}")
    if options.as_csv and options.as_json:
        fail("give --csv or --json, not both")
    since, until = _moment("--since", options.since), _moment("--until", options.until)
    if not options.folder.is_dir():
        fail(f"{options.folder}: is no folder; give the folder that balancers have as usage.dir, or a copy of it")
    try:
        prices = price_book(options.prices) if options.prices is not None else None
    except ConfigError as error:
        fail(first_of(error))
    reading, sums = Reading(), dict[tuple[str, ...], Sums]()
    for event in reading.events(line for _, line in segments.read(options.folder)):
        if (options.tenant and event.data.tenant != options.tenant) or not _within(event.time, since, until):
            continue
        of = tuple(value_of(event, dimension) for dimension in by)
        sums.setdefault(of, Sums()).add(event.data, prices)
    total = _total(sums)
    rows = sorted(sums.items())
    if options.as_json:
        found = [dict(zip(by, of, strict=True)) | _figures(one, prices is not None) for of, one in rows]
        show.json({"by": by, "rows": found, "total": _figures(total, prices is not None),
                   "doubles": reading.doubles, "unreadable": reading.unreadable})  # fmt: skip
    elif options.as_csv:
        page = io.StringIO()
        written = csv.writer(page, lineterminator="\n")
        written.writerow([*by, *_figures(total, prices is not None)])
        written.writerows([*map(_cell, of), *_figures(one, prices is not None).values()] for of, one in rows)
        show.streamed(page.getvalue())
    else:
        _table(by, rows, total, priced=prices is not None)
    if reading.unreadable:
        warn(f"{reading.unreadable} lines are no usage records and were left out")
        return PARTIAL
    return 0 if sums else NEGATIVE


def _cell(text: str) -> str:
    """As a spreadsheet shows it: text that begins like a formula is not one."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _moment(option: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        fail(f"{option}: {text!r} is no day or moment; give one such as 2026-11-01 or 2026-11-01T12:00:00Z")
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _within(time: str, since: datetime | None, until: datetime | None) -> bool:
    if since is None and until is None:
        return True
    at = datetime.fromisoformat(time)
    return (since is None or at >= since) and (until is None or at < until)


def _total(sums: dict[tuple[str, ...], Sums]) -> Sums:
    total = Sums()
    for one in sums.values():
        for name in Sums.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def _figures(sums: Sums, priced: bool) -> dict[str, float]:
    figures = msgspec.structs.asdict(sums)
    return {name: value for name, value in figures.items() if priced or (name not in _MONEY and name != "unpriced")}


def _table(by: list[str], rows: list[tuple[tuple[str, ...], Sums]], total: Sums, *, priced: bool) -> None:
    columns = (*by, *(f">{name.removesuffix('_tokens').replace('_', ' ')}" for name in _COUNTS), ">GPU s")
    if priced:
        columns = (*columns, ">cost $", ">GPU $", ">cache saved $", ">answers saved $", ">routing saved $")
    printed = [[*of, *_shown(one, priced)] for of, one in rows]
    if len(rows) > 1:
        printed.append([*(["total"] + [""] * (len(by) - 1) if by else []), *_shown(total, priced)])
    show.table("usage, tokens" if not priced else "usage, tokens and USD", columns, printed)
    if total.given_again:
        again = f"{total.given_again} requests got answers that were made for others"
        show.line(f"{again}: {show.number(total.saved_tokens)} tokens that no engine computed")
    if total.unmeasured:
        show.line(f"{total.unmeasured} requests were answered, and their number of tokens is unknown")
    if total.unpriced:
        show.line(f"{total.unpriced} requests have tokens and no price in the book: their cost is not in the sums")


def _shown(sums: Sums, priced: bool) -> list[str]:
    counts = [show.number(getattr(sums, name)) for name in _COUNTS]
    money = [show.number(getattr(sums, name), 4) for name in _MONEY] if priced else []
    return [*counts, show.number(sums.gpu_s, 2), *money]
