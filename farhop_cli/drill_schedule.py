"""`farhop drill schedule`: shows planned, due and missed runs, and runs due ones in the process with the lock.

Never makes up for a closed window: a missed run is reported, and kept in the history as NOT_RUN.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from farhop.store.contract import StoreError
from farhop_cli import drill, setting, show
from farhop_cli.drill_fleet import DrillFleet, find, read_document
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.options import duration, duration_s
from farhop_drill import windows
from farhop_drill.machine import DrillVerdict
from farhop_drill.records import Past, Records
from farhop_drill.windows import Planned, WindowError
from global_lb.app.drills import ENDS_WITH_STDIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import Store
    from farhop_cli.drill_fleet import DrillOptions
    from farhop_cli.options import FleetOptions
    from farhop_drill.outcome import Outcome
    from farhop_drill.runner import Runner

WATCH_S = 20.0
MISSED = "missed: it was not run while its window was open"
AGREED_S = 3.0  # the longest time until a run's result is in the history, where all watchers see it


def schedule(asked: DrillOptions, given: Sequence[str], every: str, fleet_options: FleetOptions) -> int:
    """Put a drill on the schedule if one is named, and show the schedule; the exit code."""
    here = DrillFleet(asked, fleet_options) if asked.name else None

    async def work(store: Store) -> int:
        records = Records(store)
        if here is not None:
            await _plan(records, here, asked, given, every, fleet_options)
        await _show_schedule(records, fleet_options)
        return 0

    fleet = fleet_options.fleet() if here is None else here.fleet
    return setting.with_store(fleet, work, writes=here is not None and not fleet_options.dry_run)


def unschedule(name: str, fleet_options: FleetOptions) -> int:
    """Take a drill off the schedule; the exit code, 1 if it was not on it."""

    async def work(store: Store) -> int:
        records = Records(store)
        if fleet_options.dry_run:
            was = any(one.drill == name for one in await records.schedules())
        else:
            was = await records.unplan(name)
        dry = show.DRY if fleet_options.dry_run else ""
        show.line(f"{dry}{name} is off the schedule" if was else f"{name} was not on the schedule")
        return 0 if was else NEGATIVE

    return setting.with_store(fleet_options.fleet(), work, writes=bool(name) and not fleet_options.dry_run)


async def _plan(
    records: Records,
    here: DrillFleet,
    asked: DrillOptions,
    given: Sequence[str],
    every: str,
    fleet_options: FleetOptions,
) -> None:
    found = read_document(find(asked, await records.documents()), here, asked)
    if not given:
        fail("--window: give at least one, such as 'tue 10:00-12:00' (UTC)")
    try:
        for text in given:
            windows.window_of(text)
    except WindowError as error:
        fail(f"--window: {error}")
    planned = Planned(
        drill=asked.name, windows=tuple(given), every_s=duration_s("--every", every, 3600.0, 62 * 86_400.0),
        since_s=time.time(), values=asked.values, author=asked.by or setting.author_here(),
    )  # fmt: skip
    if not fleet_options.dry_run:
        await records.plan(planned)
    dry = show.DRY if fleet_options.dry_run else ""
    show.line(f"{dry}{found.drill} is on the schedule; `farhop drill schedule --watch` runs due drills")


async def _show_schedule(records: Records, fleet_options: FleetOptions) -> None:
    planned, past = await records.schedules(), await records.history()
    rows: list[dict[str, Any]] = []
    for one in planned:
        last = _last(past, one.drill)
        due = windows.due(one, last, time.time())
        rows.append({
            "drill": one.drill, "windows": list(one.windows), "every_s": one.every_s, "last_s": last,
            "due": due.now, "missed": list(due.missed), "author": one.author,
        })  # fmt: skip
    if fleet_options.as_json:
        show.json({"schedule": rows})
        return
    columns = ("drill", "windows (UTC)", "every", "last", "due", "missed")
    show.table("schedule", columns, [
        [row["drill"], ", ".join(row["windows"]), duration(row["every_s"]),
         drill.when(row["last_s"]) if row["last_s"] is not None else show.NONE, "now" if row["due"] else "",
         ", ".join(map(drill.when, row["missed"]))]
        for row in rows
    ])  # fmt: skip


def _last(past: Sequence[Past], drill: str) -> float | None:
    return max((one.began_s for one in past if one.drill == drill), default=None)


def watch(asked: DrillOptions, fleet_options: FleetOptions) -> int:
    """Run what is due. Of several watchers one takes the lock; the others find it held, or the run done."""
    here = DrillFleet(asked, fleet_options)

    async def work(store: Store) -> int:
        stopping = asyncio.Event()
        show.line("watching the schedule; Ctrl-C ends it")
        if ENDS_WITH_STDIN in os.environ:
            _end_with_stdin()
        while True:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a run installs these, and restores them
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
            try:
                await _run_due(store, here, asked, fleet_options, stopping)
            except StoreError as error:
                warn(f"etcd: {error}")
            try:
                async with asyncio.timeout(WATCH_S):
                    await stopping.wait()
                    return 0
            except TimeoutError:
                continue

    return setting.with_store(here.fleet, work, writes=True)


def _end_with_stdin() -> None:
    """The starter is gone: end as if signalled, so that a run is rolled back."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(0, read)


async def _run_due(
    store: Store, here: DrillFleet, asked: DrillOptions, fleet_options: FleetOptions, stopping: asyncio.Event
) -> None:
    records = Records(store)

    def begun(runner: Runner) -> None:
        drill.stop_on_signals(runner, stopping.set)

    past = await records.history()
    for planned in await records.schedules():
        due = windows.due(planned, _last(past, planned.drill), time.time())
        for begins in due.missed:
            warn(f"{planned.drill}: the run of {drill.when(begins)} was {MISSED}")
            await records.remember(_not_run(planned, begins, MISSED))
        if not due.now or await records.holder() is not None:
            continue
        await asyncio.sleep(AGREED_S)  # another watcher may just have run it
        last = _last(await records.history(), planned.drill)
        if not windows.due(planned, last, time.time()).now or await records.holder() is not None:
            continue
        sets = tuple(f"{name}={value}" for name, value in planned.values.items())
        one = replace(asked, name=planned.drill, sets=sets, why="by the schedule")
        try:
            due_now = read_document(find(one, await records.documents()), here, one)
        except typer.Exit:  # it has printed why
            await records.remember(
                _not_run(planned, time.time(), "it cannot be read any more: see `farhop drill check`")
            )
            continue
        try:
            outcome = await drill.carried_out(due_now, here, store, one, drill.progress_to(fleet_options), begun)
        except typer.Exit:  # it has printed why; the next look tries again
            continue
        if not _lost_the_race(outcome):
            await drill.reported(outcome, store, one, fleet_options)


def _lost_the_race(outcome: Outcome) -> bool:
    """Whether it did not run because another watcher took the lock first."""
    return outcome.verdict is DrillVerdict.NOT_RUN and outcome.why.startswith("alone:")


def _not_run(planned: Planned, began_s: float, why: str) -> Past:
    return Past(
        run=f"{planned.drill}-missed-{int(began_s)}", drill=planned.drill, title=planned.drill, author=planned.author,
        began_s=began_s, took_s=0.0, verdict=DrillVerdict.NOT_RUN, why=why, measures={},
    )  # fmt: skip
