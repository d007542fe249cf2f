"""Declares `farhop drill` and its options. `farhop_cli.drill` does the work; it is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.commands.wiring import verb
from farhop_cli.help_page import App
from farhop_cli.options import OUT, PLAIN, By, Drills, FleetOptions, Keys, Out

app = App(
    help="Rehearse a failure: check, inject, measure, restore, judge.",
    epilog="Example:  farhop drill run lose-a-region --set region=virginia",
    **PLAIN,
)

Name = Annotated[str, typer.Argument(help="A drill's name (shipped, in etcd, or in --folder), or its file (.yaml).")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the drill; may be repeated.")
]


@verb(app, "list", "farhop drill list --folder drills")
def list_drills(folder: Drills = None, *, fleet_options: FleetOptions) -> int:
    """List the drills there are, and their parameters."""
    from farhop_cli.drill import list_

    return list_(folder, fleet_options)


@verb(app, "check", "farhop drill check lose-a-region --set region=virginia", writes=True)
def check_drill(
    name: Name,
    sets: Sets = None,
    keys: Keys = None,
    folder: Drills = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the drill in etcd, if it is valid.")] = False,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Check whether a drill is valid, and may run now.

    Shows every error at once (exit code 2), then every safety check (exit code 1 if one fails). Touches nothing.
    """
    from farhop_cli.drill import check
    from farhop_cli.drill_fleet import DrillOptions

    return check(DrillOptions(name, tuple(sets or ()), tuple(keys or ()), folder), keep, fleet_options)


@verb(app, "run", "farhop drill run lose-a-region --set region=virginia", writes=True)
def run_drill(
    name: Name,
    sets: Sets = None,
    keys: Keys = None,
    folder: Drills = None,
    out: Out = OUT,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, kept with the change.")] = "",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Run a drill: check, inject, measure, restore, judge.

    Exit code 0 only for PASS; 1 for FAIL, ABORTED and NOT_RUN. Ctrl-C, SIGTERM and a lost terminal roll it back. With
    --dry-run it is only checked.
    """
    from farhop_cli.drill import run
    from farhop_cli.drill_fleet import DrillOptions

    return run(DrillOptions(name, tuple(sets or ()), tuple(keys or ()), folder, out, why, by), fleet_options)


@verb(app, "stop", 'farhop drill stop --all --why "incident 4711"', writes=True)
def stop_drill(
    run: Annotated[str, typer.Argument(help="A run, as `farhop drill run` named it. Default: the one that runs.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Stop what runs, and block new drills until --release.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Allow drills again.")] = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, kept with the change.")] = "asked to",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Stop a drill; with --all stop every one and block new ones.

    What was injected is restored within a second. Exit code 1 if nothing runs.
    """
    from farhop_cli.drill import stop

    return stop(run, all_, release, why, by, fleet_options)


@verb(app, "report", "farhop drill report --of lose-a-region --within 1h --verdict")
def report_drill(
    run: Annotated[str, typer.Argument(help="A run. Default: the last one.")] = "",
    of: Annotated[str, typer.Option("--of", metavar="DRILL", help="The last run of this drill.")] = "",
    within: Annotated[
        str,
        typer.Option("--within", metavar="DURATION", help="Only if it began within this time, such as 90s, 30m, 2h."),
    ] = "",
    verdict: Annotated[bool, typer.Option("--verdict", help="Print only the verdict.")] = False,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Show the result of a run. Exit code 0 only for PASS."""
    from farhop_cli.drill import print_run

    return print_run(run, of, within, verdict, fleet_options)


@verb(app, "history", "farhop drill history lose-a-region")
def drill_history(
    name: Annotated[str, typer.Argument(help="A drill. Default: all of them.")] = "", *, fleet_options: FleetOptions
) -> int:
    """List the runs that are over, the newest first."""
    from farhop_cli.drill import history

    return history(name, fleet_options)


@verb(app, "schedule", "farhop drill schedule drain-and-return --window 'tue 10:00-12:00' --every 14d", writes=True)
def schedule_drill(
    name: Annotated[str, typer.Argument(help="A drill to schedule. Default: show the schedule.")] = "",
    window: Annotated[
        list[str] | None,
        typer.Option(
            "--window", metavar="WINDOW", help="When it may run, such as 'mon-fri 09:00-17:00' (UTC); may be repeated."
        ),
    ] = None,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="The time from one run to the next, 1h to 62d.")
    ] = "14d",
    remove: Annotated[bool, typer.Option("--remove", help="Take the drill off the schedule.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Run due drills, until Ctrl-C.")] = False,
    sets: Sets = None,
    keys: Keys = None,
    folder: Drills = None,
    out: Out = OUT,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Run drills by a schedule, in windows; missed runs are reported.

    Any number of processes may watch: one run at a time, by whoever takes the lock.
    """
    from farhop_cli import drill_schedule
    from farhop_cli.drill_fleet import DrillOptions

    asked = DrillOptions(name, tuple(sets or ()), tuple(keys or ()), folder, out, "", by)
    if watch:
        return drill_schedule.watch(asked, fleet_options)
    if remove:
        return drill_schedule.unschedule(name, fleet_options)
    return drill_schedule.schedule(asked, window or (), every, fleet_options)


@verb(app, "faults", "farhop drill faults --compose farhop --context compose")
def make_faults(
    compose: Annotated[
        str, typer.Option("--compose", metavar="PROJECT", help="Make faults in this compose project, on this machine.")
    ] = "",
    kubernetes: Annotated[
        str,
        typer.Option("--kubernetes", metavar="NAMESPACE", help="Make faults in this Kubernetes namespace, by kubectl."),
    ] = "",
    kube_context: Annotated[
        str, typer.Option("--kube-context", metavar="CONTEXT", help="kubectl's context. Default: its current one.")
    ] = "",
    *,
    fleet_options: FleetOptions,
) -> int:
    """Make faults in a fleet of compose or Kubernetes, for drills.

    Until Ctrl-C, which restores what is still broken. A fault that its drill no longer renews is restored, too.
    """
    from farhop_cli.drill import faults

    return faults(compose, kubernetes, kube_context, fleet_options)


@verb(app, "export", "farhop drill export lose-a-region --to experiment.json")
def export_drill(
    name: Name,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The file to write. Default: print it.")
    ] = None,
    sets: Sets = None,
    folder: Drills = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Write a drill as an experiment for Chaos Toolkit."""
    from farhop_cli.drill import export
    from farhop_cli.drill_fleet import DrillOptions

    return export(DrillOptions(name, tuple(sets or ()), (), folder), to, fleet_options)
