"""Commands that look at a fleet: what its balancers report, and what they recorded (usage, audit).

Only declares the commands: the modules beside this folder do the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.commands.wiring import OneRegion, verb
from farhop_cli.exits import fail
from farhop_cli.help_page import App
from farhop_cli.options import OUT, PLAIN, Allow, By, Drills, FleetOptions, From, Json, Keys, Out
from farhop_cli.options import regions as known_regions

# -- looking at a fleet

status_app, explain_app, bundle_app, record_app, log_level_app, console_app = (App(**PLAIN) for _ in range(6))
top_app = App(**PLAIN)


@verb(status_app, "status", "farhop status    or:  farhop status --region tokyo --replicas --watch")
def status(
    regions: Annotated[bool, typer.Option("--regions", help="The regions, as each global balancer sees them.")] = False,
    replicas: Annotated[bool, typer.Option("--replicas", help="Regional balancers and their replicas.")] = False,
    prefixes: Annotated[bool, typer.Option("--prefixes", help="What each region is predicted to have cached.")] = False,
    law: Annotated[bool, typer.Option("--law", help="Each balancer's law, and what operators set.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="All of these; also hubs, routes, splits and builds.")] = False,
    region: OneRegion = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")] = False,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Sum up the fleet: what is wrong, where the load is, which law.

    In ten lines at most, then the tables that the options ask for. Exit code 1: a region is down; 2: no balancer
    answered; 3: some did not, and are named.
    """
    from farhop_cli.status import StatusOptions, run

    return run(StatusOptions(regions, replicas, prefixes, law, wide, region, watch), fleet_options)


@verb(console_app, "console", "farhop console    or:  farhop console --read-only --port 8900")
def console(
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="The port on 127.0.0.1. 0: any free one.")
    ] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Allow no actions.")] = False,
    keys: Keys = None,
    folder: Drills = None,
    out: Out = OUT,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Serve a web page that shows the fleet live, and why requests go where they go.

    On 127.0.0.1, until Ctrl-C. The printed address has a token that is good for this run only.
    """
    from farhop_cli.console import run
    from farhop_cli.drill_fleet import DrillOptions

    return run(port, DrillOptions("", (), tuple(keys or ()), folder, out, "", by), fleet_options, read_only=read_only)


@verb(top_app, "top", "farhop top    or:  farhop top --context prod --read-only")
def top(
    read_only: Annotated[bool, typer.Option("--read-only", help="Allow no actions.")] = False,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Show the fleet live in this terminal: regions, replicas, decisions, law.

    Keys: 1 to 4 choose a table, d drains the region under the cursor and u takes that back, p pauses, q quits.
    """
    try:
        from farhop_cli.top import run
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("textual"):
            raise
        fail("top needs textual: run `pip install 'farhop[top]'`")

    return run(by, fleet_options, read_only=read_only)


@verb(explain_app, "explain", "farhop explain request.json --tenant japan-only --from Paris")
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DECISION",
            help="A request's body, as for /v1/chat/completions, or a decision's id.",
        ),
    ],
    origin: From = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="The request's tenant.")] = None,
    allow: Allow = None,
    drained: Annotated[
        str,
        typer.Option(
            "--drained",
            metavar="REGION",
            help="If this region were drained, or had been.",
            autocompletion=known_regions,
        ),
    ] = "",
    *,
    fleet_options: FleetOptions,
) -> int:
    """Show where a request would go, or why one went where it did.

    Nothing is sent to an engine, and only balancers that the tenant's law lets read the request are asked. The places
    of a key (`within`) are not known here: give them by --allow. Exit code 3 if a balancer that might know a decision
    could not be asked.
    """
    from farhop_cli.explain import Options, run

    return run(Options(what, fleet_options, origin, tenant, allow, drained))


@verb(bundle_app, "bundle", "farhop bundle --out farhop-bundle.tar.gz")
def bundle(
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="The file to write. It must not exist.")] = "",
    balancer_config: Annotated[
        list[str] | None,
        typer.Option(
            "--add", metavar="FILE", help="Add this balancer's configuration, without its secrets; may be repeated."
        ),
    ] = None,
    decisions: Annotated[
        int,
        typer.Option("--decisions", metavar="N", min=0, max=200, help="At most N recent decisions of each balancer."),
    ] = 50,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Collect what a bug report needs into one file, without secrets.

    Status, metrics, law, recent decisions, versions and configurations. It has no prompts, no key, token or password,
    and no hash of an API key. It names hosts, regions, tenants and models: look through it before you send it. Exit
    code 3 if not every balancer answered.
    """
    from farhop_cli.bundle import run

    return run(out, balancer_config or [], decisions, fleet_options)


@verb(record_app, "record", "farhop record --for 10m --out friday.jsonl")
def record(
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="The file to write. It must not exist.")],
    length: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="For how long, such as 90s, 30m, 2h; at most 1d.")
    ] = "10m",
    region: OneRegion = "",
    *,
    fleet_options: FleetOptions,
) -> int:
    """Record a trace of what the fleet serves, for sim and plan.

    Of each request its time, its lengths, which prompts begin alike (by salted fingerprints), its session and the pause
    before it. No text, tenant or key, and no requests of tenants whose law forbids records at a balancer. Exit code 1
    if no request came, 3 if a balancer was not heard to the end.
    """
    from farhop_cli.options import duration_s
    from farhop_cli.record import run

    return run(out, duration_s("--for", length, 1.0, 86_400.0), region, fleet_options)


@verb(log_level_app, "log-level", "farhop log-level debug --region tokyo", writes=True)
def log_level(
    level: Annotated[str, typer.Argument(help="debug, info, warning, error or critical.")],
    region: OneRegion = "",
    *,
    fleet_options: FleetOptions,
) -> int:
    """Set how much balancers log, until their next start.

    Needs the right `act` at their admin ports. Exit code 3 if some balancers did not follow.
    """
    from farhop_cli.log_level import run

    return run(level, region, fleet_options)


# -- what balancers wrote down

usage_app = App(**PLAIN)


@usage_app.command("usage", epilog="Example:  farhop usage /var/lib/farhop/usage --tenant acme --by model,day")
def usage(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Usage files: a balancer's usage.dir, or a copy of several.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant's usage.")] = "",
    by: Annotated[
        str, typer.Option("--by", metavar="FIELDS", help="What to sum up by, such as tenant,model,region,day.")
    ] = "tenant,model",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="From this day or time on, such as 2026-11-01 (UTC).")
    ] = "",
    until: Annotated[str, typer.Option("--until", metavar="TIME", help="Before this day or time (UTC).")] = "",
    prices: Annotated[Path | None, typer.Option("--prices", metavar="FILE", help="A price book, for costs.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Sum up who used what, and what it cost, from usage files.

    Each record counts once, even if several files have it. With --prices every record is priced by the epoch it was
    made under. Exit code 1 if there is no record, 3 if some lines could not be read.
    """
    from farhop_cli.usage import Options, run

    raise typer.Exit(run(Options(folder, tenant, by, since, until, prices, as_csv, as_json)))


audit_app = App(
    help="Verify an audit log, and prove decisions from it.",
    epilog="Example:  farhop audit verify /var/lib/farhop/audit/virginia/g1",
    **PLAIN,
)
LogFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="An audit log: audit.dir/REGION/INSTANCE, or a copy.")
]
LogKey = Annotated[
    str,
    typer.Option(
        "--key",
        metavar="KEY|FILE",
        help="The log's public key, NAME+ID+KEY, or a file with it. Default: the log's own vkey.",
    ),
]


@audit_app.command("verify", epilog="Example:  farhop audit verify virginia/g1 --key log.vkey --seen last-month")
def audit_verify(
    folder: LogFolder,
    key: LogKey = "",
    seen: Annotated[
        list[Path] | None,
        typer.Option("--seen", metavar="FILE", help="An earlier checkpoint that you kept; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a whole audit log.

    With --seen also that nothing that an earlier checkpoint signed was changed or removed. Exit code 1 if it does not
    verify.
    """
    from farhop_cli.audit import verify

    raise typer.Exit(verify(folder, key, seen or [], as_json))


@audit_app.command("prove", epilog="Example:  farhop audit prove 5f2c9a0b11d3e8f7 virginia/g1 --name acme")
def audit_prove(
    decision: Annotated[
        str, typer.Argument(metavar="ID", help="The decision's id, as in the answer's x-farhop-decision.")
    ],
    folder: LogFolder,
    key: LogKey = "",
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="A tenant's, model's or key's name to recognize by its hash; may be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove under which law a request was decided, and how.

    With --json the entry, its inclusion proof and the checkpoint, for any RFC 6962 verifier. Exit code 1 if the log has
    no such decision, or does not verify.
    """
    from farhop_cli.audit import prove

    raise typer.Exit(prove(decision, folder, key, name or [], as_json))


@audit_app.command("export", epilog="Example:  farhop audit export virginia/g1 --out audit.tar.gz")
def audit_export(
    folder: LogFolder,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write. It must not exist.")],
    key: LogKey = "",
) -> None:
    """Pack a verified audit log for an auditor, without its salt."""
    from farhop_cli.audit import export

    raise typer.Exit(export(folder, out, key))
