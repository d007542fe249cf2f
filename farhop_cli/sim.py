"""`farhop sim`: a scenario in virtual time, its routers side by side; a table, JSON, plots. Opens no socket."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from farhop_cli import show
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_lab.scenarios import load
from farhop_lab.studies import plots, pool, results_page, routers, tables
from topology.problems import TopologyError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.sim.stats import Interval
    from farhop_lab.studies.cell import Result
    from farhop_lab.studies.results_page import Table

# What the table shows: column, figure, digits, factor.
FIGURES = (
    ("requests/s", "requests_per_s", 2, 1.0),
    ("good/s", "good_per_s", 2, 1.0),
    ("good %", "good_share", 1, 100.0),
    ("TTFT p50 ms", "ttft_p50_ms", 0, 1.0),
    ("p90", "ttft_p90_ms", 0, 1.0),
    ("p99", "ttft_p99_ms", 0, 1.0),
    ("TPOT p90 ms", "tpot_p90_ms", 1, 1.0),
    ("E2E p95 s", "e2e_p95_ms", 2, 1e-3),
    ("hit %", "hit", 1, 100.0),
    ("abroad %", "spill", 1, 100.0),
    ("waiting", "waiting", 1, 1.0),
    ("busy %", "busy", 0, 100.0),
)
WARM_UP_SHARE = 0.25  # of a shortened run, at the most


@dataclass(frozen=True, slots=True)
class Options:
    """The options."""

    scenario: str
    policy: str = ""
    seeds: int | None = None
    seed: int | None = None
    for_s: float | None = None
    out: Path | None = None
    workers: int | None = None
    plots: bool = True
    as_json: bool = False


def run(options: Options) -> int:
    """Simulate and print; the exit code, 1 if something happened that must never happen."""
    scenario = shortened(found(options.scenario), options.for_s)
    names = chosen(scenario, options.policy)
    counted = range(1, (options.seeds or scenario.doc.seeds) + 1)
    seeds = list(counted) if options.seed is None else [options.seed]
    results = simulated(pool.jobs(scenario, names, seeds), options.out, options.workers, f"sim {scenario.doc.name}")
    for result in results:
        if not result.score.whole.asked:
            remedy = "simulate longer, or shorten warm_up_s"
            warn(f"{result.key.slug}: no request came while it counts, so its figures say nothing; {remedy}")
    if options.as_json:
        show.json(document(scenario, results))
    else:
        print_results(scenario, results)
    if options.out is not None and options.plots:  # after the table: the disk may be full
        files = pictures([(scenario, results)], scenario.doc.name, [table(scenario, results)], options.out)
        for path in files if not options.as_json else ():
            show.line(f"written: {path}")
    return NEGATIVE if any(result.score.violations for result in results) else 0


# -- shared with the other commands over scenarios


def pictures(
    compared: Sequence[tuple[Scenario, Sequence[Result]]], title: str, found: Sequence[Table], out: Path
) -> list[Path]:
    """Pictures beside the results, and one page of them and of the tables; without pictures if none can be drawn."""
    drawn: list[Path] = []
    try:
        for scenario, results in compared:
            drawn += plots.draw(scenario, results, out)
    except plots.PlotsError as error:
        warn(str(error))
    path = out / f"{title}.html"
    about = "Simulated; ± is the 95 % interval of the mean over seeds (Student's t)."
    try:
        text = results_page.page(title, about, found, [(one.stem, one.read_bytes()) for one in drawn])
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path}: {error.strerror or error}; give a folder that can be written to")
    return [*drawn, path]


def found(name: str) -> Scenario:
    """The scenario; ends the command with a line for each problem."""
    try:
        return load.find(name, routers.names())
    except TopologyError as error:
        *others, last = (f"{error.source}: {problem}" for problem in error.problems)
        for line in others:
            warn(line)
        fail(last)


def shortened(scenario: Scenario, for_s: float | None) -> Scenario:
    """The same for another duration, with the warm-up at most a share of it."""
    if for_s is None:
        return scenario
    return scenario.but(duration_s=for_s, warm_up_s=min(scenario.doc.warm_up_s, WARM_UP_SHARE * for_s))


def chosen(scenario: Scenario, policy: str) -> list[str]:
    """The routers given, or the scenario's."""
    names = [name.strip() for name in policy.split(",") if name.strip()] or list(scenario.doc.routers)
    known = routers.names()
    for name in names:
        if name not in known:
            fail(f"--policy: unknown router {name!r}; {did_you_mean(name, known, 'there are: ' + ', '.join(known))}")
    return list(dict.fromkeys(names))


def simulated(jobs: Sequence[pool.Job], out: Path | None, workers: int | None, what: str) -> list[Result]:
    """Run all cells, with a bar on a terminal; ends the command if one fails, or at Ctrl-C."""
    try:
        folder = pool.opened(out) if out is not None else None
        with progress(what, len(jobs)) as moved:
            return pool.run(jobs, out=folder, workers=workers, moved=moved)
    except pool.CellError as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted(out)
        raise


def interrupted(out: Path | None) -> None:
    """Say what is left of an interrupted run."""
    kept = f"what is finished is in {out}; the same command goes on from there"
    warn(f"interrupted; {kept if out is not None else 'nothing is kept without --out'}")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield lambda _done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(show.printable(what), total=total)
        yield lambda done: bar.update(task, completed=round(done, 1))


def shown(mean: Interval | None, digits: int = 1, factor: float = 1.0) -> str:
    """A mean with its interval: 12.3 ± 0.4."""
    if mean is None:
        return show.NONE
    value = f"{mean.mean * factor:,.{digits}f}"
    return value if mean.half is None else f"{value} ± {mean.half * factor:,.{digits}f}"


def table(scenario: Scenario, results: Sequence[Result]) -> Table:
    """A row for each router and load."""
    doc, by_row = scenario.doc, tables.rows(results)
    seeds = max(len(those) for those in by_row.values())
    several = len(doc.loads) > 1
    lines = []
    for (_, router, at), those in by_row.items():
        cells = [shown(tables.figure(those, name), digits, factor) for _, name, digits, factor in FIGURES]
        lines.append([router, *([f"{at:g}"] if several else []), *cells])
    title = (
        f"{doc.name}: {doc.duration_s - doc.warm_up_s:g} s after {doc.warm_up_s:g} s of warm-up, {seeds} "
        f"seed{'s' * (seeds != 1)}; good: TTFT <= {doc.objective.ttft_ms:g} ms and TPOT <= {doc.objective.tpot_ms:g} ms"
    )
    columns = ["router", *([">load"] if several else []), *(f">{column}" for column, *_ in FIGURES)]
    return title, columns, lines


def print_results(scenario: Scenario, results: Sequence[Result]) -> None:
    """The table, and violations if there were any."""
    show.table(*table(scenario, results))
    seeds = max(len(those) for those in tables.rows(results).values())
    if seeds > 1:
        show.line(f"± is the 95 % interval of the mean over {seeds} seeds (Student's t)")
    for result in results:
        if result.score.violations:
            show.line(f"{result.key.slug}: {result.score.violations} violations, first: {result.first_violations[0]}")


def document(scenario: Scenario, results: Sequence[Result]) -> dict[str, Any]:
    """The JSON document: each cell, and each row's figures with their intervals."""
    return {
        "scenario": scenario.document(),
        "rows": [
            {
                "router": router,
                "load": at,
                "seeds": len(those),
                "figures": {name: tables.figure(those, name) for name in those[0].figures()},
            }
            for (_, router, at), those in tables.rows(results).items()
        ],
        "cells": [msgspec.to_builtins(result) for result in results],
    }
