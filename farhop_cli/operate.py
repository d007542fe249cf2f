"""Commands for a fleet: what operators make stand in etcd (`law`, `route`, `split`, `policy`, `bias`, `pin`, `drain`),
what balancers tell (`status`, `explain`, `bundle`), and which fleet is meant (`context`).

The wiring alone: the rooms are imported when a command runs, so that help is quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from farhop_cli.exits import fail
from farhop_cli.options import (
    FLEET,
    OUT,
    PLAIN,
    Allow,
    By,
    Drills,
    DryRun,
    From,
    Json,
    Keys,
    Length,
    Out,
    Where,
    Why,
)
from farhop_cli.options import regions as known_regions

if TYPE_CHECKING:
    from farhop_cli.setting import Noun

Region = Annotated[str, typer.Argument(help="The region.", autocompletion=known_regions)]
SomeRegion = Annotated[
    str,
    typer.Argument(metavar="[REGION]", help="Of this region alone.", show_default=False, autocompletion=known_regions),
]
OneRegion = Annotated[str, typer.Option("--region", help="Of this region alone.", autocompletion=known_regions)]
DrainedRegion = Annotated[
    str,
    typer.Argument(metavar="[REGION]", help="The region.", show_default=False, autocompletion=known_regions),
]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose requests.")]
Model = Annotated[str, typer.Option("--model", help="The requests for which model.")]
Against = Annotated[
    str,
    typer.Argument(
        metavar="[FILE]", show_default=False, help="As `get --json` prints it; or -; or a balancer's configuration."
    ),
]


def verb(
    app: typer.Typer, name: str, example: str, writes: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function, which is given `where` and returns the exit code, the command `name` of `app`.

    The options of which `where` is made are the same for all commands: they are added here, and nowhere else.
    """
    shared: dict[str, tuple[Any, Any]] = {
        **({"dry_run": (DryRun, False)} if writes else {}),
        **FLEET, "as_json": (Json, False),
    }  # fmt: skip

    def wire(work: Callable[..., int]) -> Callable[..., int]:
        def command(**given: Any) -> None:
            where = Where(**{option: given.pop(option) for option in shared})
            raise typer.Exit(work(**given, where=where))

        hints = get_type_hints(work, include_extras=True)
        own = [
            one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for one in inspect.signature(work).parameters.values()
            if one.name != "where"
        ]
        added = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for option, (hint, default) in shared.items()
        ]
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        command.__doc__ = work.__doc__
        app.command(name, epilog=f"Example:  {example}")(command)
        return work

    return wire


class Verbs(TyperGroup):
    """The commands of a noun, in one order for all."""

    def list_commands(self, _ctx: Any) -> list[str]:
        """By name, as help lists them."""
        order = ("get", "set", "unset", "diff", "history")
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))


def noun(name: str) -> Noun:
    """What the rooms know of it."""
    from farhop_cli import bias_pin, by_model, drain, limit, route

    found = (bias_pin.BIAS, bias_pin.PIN, by_model.POLICY, by_model.SPLIT, drain.NOUN, route.NOUN, limit.NOUN)
    return next(one for one in found if one.name == name)


def _group(name: str, what: str, example: str, of: str = "tokyo") -> typer.Typer:
    """The commands of a noun, with those three that read, which are alike for all."""
    made = typer.Typer(help=what, epilog=f"Example:  farhop {name} {example}", cls=Verbs, **PLAIN)

    @verb(made, "get", f"farhop {name} get {of}")
    def get(region: SomeRegion = "", *, where: Where) -> int:
        """Show what stands in etcd: who set it, why, and until when."""
        from farhop_cli import setting

        return setting.get(noun(name), region, where)

    @verb(made, "diff", f"farhop {name} diff was.json --region {of}")
    def diff(
        file: Against = "",
        region: OneRegion = "",
        *,
        where: Where,
    ) -> int:
        """Tell what would change if a file stood there instead.

        Exit code 1 if anything. Without a file: what goes before the balancers' configurations, all of which `unset`
        would take away.
        """
        from farhop_cli import setting

        return setting.diff(noun(name), region, file, where)

    @verb(made, "history", f"farhop {name} history {of}")
    def history(region: SomeRegion = "", *, where: Where) -> int:
        """List what was set and unset, when, by whom and why.

        As far back as etcd remembers: until it is compacted (`--auto-compaction-retention`). Nothing else keeps it.
        """
        from farhop_cli import setting

        return setting.history(noun(name), region, where)

    return made


# -- looking at a fleet

status_app, explain_app, bundle_app, record_app, log_level_app, console_app = (typer.Typer(**PLAIN) for _ in range(6))
top_app = typer.Typer(**PLAIN)


@verb(status_app, "status", "farhop status    or:  farhop status --region tokyo --replicas --watch")
def status(
    regions: Annotated[bool, typer.Option("--regions", help="The regions, as each global balancer sees them.")] = False,
    replicas: Annotated[bool, typer.Option("--replicas", help="Regional balancers and their replicas.")] = False,
    prefixes: Annotated[bool, typer.Option("--prefixes", help="What each region is believed to have cached.")] = False,
    law: Annotated[bool, typer.Option("--law", help="The law each balancer goes by, and what operators set.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="All of these, and hubs, routes, splits and builds.")] = False,
    region: OneRegion = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Draw it anew every 2 s, until Ctrl-C.")] = False,
    *,
    where: Where,
) -> int:
    """Sum up the fleet: what is wrong, where the load is, which law.

    In at most ten lines, and then what else is asked for. Exit code 1 if a region is down; 3 if not every balancer
    answered, and then it is said which did not and how; 2 if none did.
    """
    from farhop_cli.status import Asked, run

    return run(Asked(regions, replicas, prefixes, law, wide, region, watch), where)


@verb(console_app, "console", "farhop console    or:  farhop console --read-only --port 8900")
def console(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On 127.0.0.1; 0: any.")] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show it, and let nobody act.")] = False,
    keys: Keys = None,
    folder: Drills = None,
    out: Out = OUT,
    by: By = None,
    *,
    where: Where,
) -> int:
    """Serve a page that shows the fleet move, and tells why.

    From what each balancer says, on this machine, until Ctrl-C. The address that is printed has a token in it, good for
    this run alone.
    """
    from farhop_cli.console import run
    from farhop_cli.drill import Asked

    return run(port, Asked("", (), tuple(keys or ()), folder, out, "", by), where, read_only=read_only)


@verb(top_app, "top", "farhop top    or:  farhop top --context prod --read-only")
def top(
    read_only: Annotated[bool, typer.Option("--read-only", help="Show it, and let nobody act.")] = False,
    by: By = None,
    *,
    where: Where,
) -> int:
    """Show the fleet move in this terminal: regions, replicas, decisions, law.

    Keys: 1 to 4 choose a table, d drains the region under the cursor and u takes that back, p pauses, q quits.
    """
    try:
        from farhop_cli.top import run
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("textual"):
            raise
        fail("top needs textual: run `pip install 'farhop[top]'`")

    return run(by, where, read_only=read_only)


@verb(explain_app, "explain", "farhop explain request.json --tenant japan-only --from Paris")
def explain(
    what: Annotated[str, typer.Argument(metavar="REQUEST.json|DECISION-ID", help="A body as for /v1, or an id.")],
    origin: From = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose request it would be.")] = None,
    allow: Allow = None,
    *,
    where: Where,
) -> int:
    """Tell where a request would go, or why one went.

    Nothing is sent to an engine, and only balancers that the tenant's law lets read the request are asked. Exit code 3
    if a balancer that might know a decision could not be asked.
    """
    from farhop_cli.explain import Options, run

    return run(Options(what, where, origin, tenant, allow))


@verb(bundle_app, "bundle", "farhop bundle --out farhop-bundle.tar.gz")
def bundle(
    out: Annotated[str, typer.Option("--out", "-o", help="The file to write. Nothing is written over.")] = "",
    balancer_config: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="FILE", help="Add a balancer's configuration, without its secrets."),
    ] = None,
    decisions: Annotated[int, typer.Option("--decisions", min=0, max=200, help="Of each balancer, at most.")] = 50,
    *,
    where: Where,
) -> int:
    """Collect in one file what a bug report needs, and no secret.

    Status, metrics, law, recent decisions, versions, and configurations without their secrets.

    Secrets are withheld: no key, token or password of a configuration, and no hash of an API key. Decisions never hold
    prompts. Look at what it holds before you send it: it names hosts, regions, tenants and models. Exit code 3 if not
    every balancer answered.
    """
    from farhop_cli.bundle import run

    return run(out, balancer_config or [], decisions, where)


@verb(record_app, "record", "farhop record --for 10m --out friday.jsonl")
def record(
    out: Annotated[str, typer.Option("--out", "-o", help="The file to write. Nothing is written over.")],
    length: Length = "10m",
    region: OneRegion = "",
    *,
    where: Where,
) -> int:
    """Record a trace of what the fleet serves, for sim and plan.

    Moments, lengths, which prompts begin alike (by salted fingerprints), sessions and pauses. No text, tenant or key;
    and nothing of tenants whose law keeps records from a balancer. Exit code 1 if nothing came, 3 if not every balancer
    was heard to its end.
    """
    from farhop_cli.options import duration_s
    from farhop_cli.record import run

    return run(out, duration_s("--for", length, 1.0, 86_400.0), region, where)


@verb(log_level_app, "log-level", "farhop log-level debug --region tokyo")
def log_level(
    level: Annotated[str, typer.Argument(help="debug, info, warning, error or critical.")],
    region: OneRegion = "",
    *,
    where: Where,
) -> int:
    """Have balancers log more, or less, until they start anew.

    Needs the right to act at their admin ports. Exit code 3 if not all of them do.
    """
    from farhop_cli.log_level import run

    return run(level, region, where)


# -- what balancers wrote down

usage_app = typer.Typer(**PLAIN)


@usage_app.command("usage", epilog="Example:  farhop usage /var/lib/farhop/usage --tenant acme --by model,day")
def usage(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where balancers write (usage.dir), or a copy.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Of this tenant alone.")] = "",
    by: Annotated[str, typer.Option("--by", help="Such as tenant,model,region,day.")] = "tenant,model",
    since: Annotated[str, typer.Option("--since", help="From this day or moment on, such as 2026-11-01 (UTC).")] = "",
    until: Annotated[str, typer.Option("--until", help="Before this day or moment (UTC).")] = "",
    prices: Annotated[Path | None, typer.Option("--prices", help="The price book: what it comes to in money.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Sum up who used what, and what it came to, from usage files.

    Each record counts once, however often it was written or copied there. With --prices every record is priced by the
    epoch it was made under. Exit code 1 if there is none, 3 if some lines could not be read.
    """
    from farhop_cli.usage import Options, run

    raise typer.Exit(run(Options(folder, tenant, by, since, until, prices, as_csv, as_json)))


audit_app = typer.Typer(
    help="Whether an audit log holds, and what it proves of a decision.",
    epilog="Example:  farhop audit verify /var/lib/farhop/audit/virginia/g1",
    **PLAIN,
)
LogFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="audit.dir/REGION/INSTANCE, or a copy.")]
LogKey = Annotated[str, typer.Option("--key", help="The log's key: NAME+ID+KEY, or a file with it; else its vkey.")]


@audit_app.command("verify", epilog="Example:  farhop audit verify virginia/g1 --key log.vkey --seen last-month")
def audit_verify(
    folder: LogFolder,
    key: LogKey = "",
    seen: Annotated[
        list[Path] | None, typer.Option("--seen", metavar="PATH", help="A checkpoint that you kept; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a whole audit log anew, and tell whether it holds.

    With --seen also that nothing of what an earlier checkpoint signed was changed or removed since. Exit code 1 if it
    does not hold.
    """
    from farhop_cli.audit import verify

    raise typer.Exit(verify(folder, key, seen or [], as_json))


@audit_app.command("prove", epilog="Example:  farhop audit prove 5f2c9a0b11d3e8f7 virginia/g1 --name acme")
def audit_prove(
    decision: Annotated[str, typer.Argument(metavar="ID", help="As x-farhop-decision told the client.")],
    folder: LogFolder,
    key: LogKey = "",
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="A tenant, model or key to know again; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove under which law a request was decided, and how.

    With --json the entry, its inclusion proof and the checkpoint, for any RFC 6962 verifier. Exit code 1 if the log has
    nothing on it, or does not hold.
    """
    from farhop_cli.audit import prove

    raise typer.Exit(prove(decision, folder, key, name or [], as_json))


@audit_app.command("export", epilog="Example:  farhop audit export virginia/g1 --out audit.tar.gz")
def audit_export(
    folder: LogFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write. Nothing is written over.")],
    key: LogKey = "",
) -> None:
    """Pack a verified audit log for an auditor, without its salt."""
    from farhop_cli.audit import export

    raise typer.Exit(export(folder, out, key))


# -- contexts

context_app = typer.Typer(
    help="Which fleet the commands are for, by name.", epilog="Example:  farhop context use production", **PLAIN
)
ContextName = Annotated[str, typer.Argument(help="The context's name.")]


@context_app.command("list", epilog="Example:  farhop context list")
def context_list(as_json: Json = False) -> None:
    """List the contexts; the current one is marked."""
    from farhop_cli import context

    raise typer.Exit(context.show_all(as_json))


@context_app.command("use", epilog="Example:  farhop context use production")
def context_use(name: ContextName) -> None:
    """Make a context the current one."""
    from farhop_cli import context

    raise typer.Exit(context.use(name))


@context_app.command("show", epilog="Example:  farhop context show")
def context_show(
    name: Annotated[str, typer.Argument(metavar="[NAME]", show_default=False, help="Else the current one.")] = "",
    as_json: Json = False,
) -> None:
    """Print a context; secrets are named, never shown."""
    from farhop_cli import context

    raise typer.Exit(context.show_one(name, as_json))


@context_app.command("unset", epilog="Example:  farhop context unset staging")
def context_unset(name: ContextName) -> None:
    """Take a context away. Exit code 1 if there is none of that name."""
    from farhop_cli import context

    raise typer.Exit(context.unset(name))


@context_app.command(
    "set",
    epilog="Example:  farhop context set production --etcd etcd-1:2379 --etcd etcd-2:2379 --etcd-ca etcd-ca.pem "
    "--ca ca.pem --token file:~/.farhop-token",
)
def context_set(
    name: ContextName,
    etcd: Annotated[
        list[str] | None, typer.Option("--etcd", metavar="HOST:PORT", help="An endpoint of its etcd; may be repeated.")
    ] = None,
    hub: Annotated[
        str, typer.Option("--hub", help="They are of this hub: a fleet with several etcd clusters names each.")
    ] = "",
    etcd_ca: Annotated[Path | None, typer.Option("--etcd-ca", metavar="FILE", help="etcd's authority.")] = None,
    etcd_cert: Annotated[Path | None, typer.Option("--etcd-cert", metavar="FILE", help="Ours for etcd.")] = None,
    etcd_key: Annotated[Path | None, typer.Option("--etcd-key", metavar="FILE", help="Its key.")] = None,
    etcd_user: Annotated[str | None, typer.Option("--etcd-user", help="Who logs in at etcd.")] = None,
    etcd_password: Annotated[
        str | None, typer.Option("--etcd-password", metavar="env:NAME|file:PATH", help="Where the password stands.")
    ] = None,
    admin: Annotated[
        list[str] | None, typer.Option("--admin", metavar="URL", help="An admin port; may be repeated.")
    ] = None,
    ca: Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="Admin ports' authority.")] = None,
    cert: Annotated[Path | None, typer.Option("--cert", metavar="FILE", help="Ours for admin ports.")] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Its key.")] = None,
    token: Annotated[
        str | None, typer.Option("--token", metavar="env:NAME|file:PATH", help="Where the admin ports' token stands.")
    ] = None,
    server_name: Annotated[
        str | None,
        typer.Option("--server-name", help="What admin certificates name, such as {region}.{tier}.ex."),
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="A topology's file or name, in place of what balancers tell.")
    ] = None,
    public: Annotated[
        list[str] | None,
        typer.Option("--public", metavar="[NAME=]PATH", help="A public key whose signatures count; may be repeated."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Its etcd is reached without TLS, off this machine.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="As this file says, such as deploy/compose/context.yaml."),
    ] = None,
    make_current: Annotated[bool, typer.Option("--use", help="Make it the current one, too.")] = False,
) -> None:
    """Make a context, or change what is given of one.

    The first one becomes the current one.
    """
    from farhop_cli.context import given, put

    said = given(
        etcd=etcd, hub=hub, etcd_files=(etcd_ca, etcd_cert, etcd_key), etcd_login=(etcd_user, etcd_password),
        admin=admin, files=(ca, cert, key), token=token, server_name=server_name, topology=topology,
        public=public or [], insecure=insecure, file=file,
    )  # fmt: skip
    raise typer.Exit(put(name, said, make_current))


# -- drain

drain_app = _group(
    "drain", "Move a region's new work, or an entry's clients, elsewhere.", 'set tokyo --for 30m --why "new kernel"'
)
DrainedEntry = Annotated[str, typer.Option("--entry", metavar="NAME", help="Not a region: this entry, of clients.")]


@verb(drain_app, "set", 'farhop drain set tokyo --for 30m --why "kernel update"', writes=True)
def drain_set(
    why: Why,
    region: DrainedRegion = "",
    entry: DrainedEntry = "",
    length: Length = "1h",
    over: Annotated[str, typer.Option("--over", help="Pace: new work moves away over this time. 0s: at once.")] = "10s",
    by: By = None,
    force: Annotated[bool, typer.Option("--force", help="Also if it is the last region of some tenant.")] = False,
    move_streams: Annotated[
        bool, typer.Option("--move-streams", help="Streams under way go on elsewhere, at that pace, too.")
    ] = False,
    *,
    where: Where,
) -> int:
    """Drain a region or, with --entry, an entry. It stands under a lease and ends by itself.

    A region's new work goes elsewhere; an entry's new clients do: `farhop dns` leaves it out, and `farhop anycast`
    drains and withdraws its routes. Exit code 1 if it is refused, since a tenant would have no region left.
    """
    from farhop_cli.drain import put, put_entry

    _one_of(region, entry)
    if entry:
        if move_streams:
            fail("--move-streams: is of a region; an entry's clients stay until they leave")
        return put_entry(entry, why, by, length, over, where)
    return put(region, why, by, length, over, force, move_streams, where)


@verb(drain_app, "unset", "farhop drain unset tokyo", writes=True)
def drain_unset(region: DrainedRegion = "", entry: DrainedEntry = "", *, where: Where) -> int:
    """Take a drain back; the region comes back at a pace.

    Tells who had set it and why. Exit code 1 if it is not drained. `farhop undrain` is the same.
    """
    from farhop_cli.drain import unset, unset_entry

    _one_of(region, entry)
    return unset_entry(entry, where) if entry else unset(region, where)


def _one_of(region: str, entry: str) -> None:
    if bool(region) == bool(entry):
        fail("give either a region or --entry NAME")


undrain_app = typer.Typer(**PLAIN)
verb(undrain_app, "undrain", "farhop undrain tokyo", writes=True)(drain_unset)


# -- bias

bias_app = _group(
    "bias", "Draw requests to a region, or away from it, for a while.", 'set tokyo --ms 50 --for 2h --why "dear link"'
)


@verb(bias_app, "set", 'farhop bias set tokyo --ms 50 --for 2h --why "link is dear tonight"', writes=True)
def bias_set(
    region: Region,
    ms: Annotated[float, typer.Option("--ms", help="Milliseconds added to its scores; below 0: taken off.")],
    why: Why,
    length: Length = "1h",
    by: By = None,
    *,
    where: Where,
) -> int:
    """Make a region count as worse or better than it is.

    Ends by itself, as a drain does. It acts where scores are milliseconds (docs/reference/policies.md).
    """
    from farhop_cli.bias_pin import set_bias

    return set_bias(region, ms, why, by, length, where)


@verb(bias_app, "unset", "farhop bias unset tokyo", writes=True)
def bias_unset(region: Region, *, where: Where) -> int:
    """Take a bias back. Exit code 1 if there is none."""
    from farhop_cli.bias_pin import unset_bias

    return unset_bias(region, where)


# -- pin

pin_app = _group(
    "pin", "Send a tenant's or a model's requests to one region, for a while.",
    'set frankfurt --tenant eu-only --for 1h --why "new GPUs"', "frankfurt",
)  # fmt: skip


@verb(pin_app, "set", 'farhop pin set frankfurt --tenant eu-only --for 1h --why "new GPUs"', writes=True)
def pin_set(
    region: Region,
    why: Why,
    tenant: Tenant = "",
    model: Model = "",
    strict: Annotated[bool, typer.Option("--strict", help="Nowhere else, even if it does not serve.")] = False,
    length: Length = "1h",
    by: By = None,
    *,
    where: Where,
) -> int:
    """Pin a tenant's or a model's requests to a region.

    Ends by itself, as a drain does. While the region does not serve, requests go where they would else. Never widens
    the law.
    """
    from farhop_cli.bias_pin import set_pin

    return set_pin(region, tenant, model, strict, why, by, length, where)


@verb(pin_app, "unset", "farhop pin unset --tenant eu-only", writes=True)
def pin_unset(tenant: Tenant = "", model: Model = "", *, where: Where) -> int:
    """Take a pin back. Exit code 1 if there is none."""
    from farhop_cli.bias_pin import unset_pin

    return unset_pin(tenant, model, where)


# -- route

route_app = _group(
    "route", "How an entry chooses regions and answers, before its configuration.",
    "set virginia '{answer: redirect}' --tenant acme --why \"streams are long\"", "virginia",
)  # fmt: skip


@verb(
    route_app, "set", "farhop route set virginia '{answer: redirect}' --tenant acme --why \"long streams\"", writes=True
)
def route_set(
    region: Annotated[str, typer.Argument(help="The entry whose global balancers are to follow it.")],
    route: Annotated[str, typer.Argument(help="YAML or JSON, with fields as under `routes`.")],
    why: Why,
    tenant: Tenant = "",
    model: Annotated[str, typer.Option("--model", help="The requests for which model; of the tenant, if both.")] = "",
    by: By = None,
    *,
    where: Where,
) -> int:
    """Make an entry choose and answer by a route.

    Without --tenant and --model, for all without a route of their own. Exit code 1 if somebody else changed it
    meanwhile, or the routes cannot stand together.
    """
    from farhop_cli.route import put

    return put(region, route, tenant, model, why, by, where)


@verb(route_app, "unset", "farhop route unset virginia --tenant acme", writes=True)
def route_unset(
    region: Annotated[str, typer.Argument(help="The entry.")],
    tenant: Tenant = "",
    model: Annotated[str, typer.Option("--model", help="The requests for which model; of the tenant, if both.")] = "",
    why: Why = "back to the configuration",
    by: By = None,
    *,
    where: Where,
) -> int:
    """Go back to the configuration.

    Without --tenant and --model, for all. Exit code 1 if nothing stands there.
    """
    from farhop_cli.route import unset

    return unset(region, tenant, model, why, by, where)


# -- policy, split

policy_app = _group(
    "policy", "By which policy a region picks replicas, before its configuration.",
    'set tokyo least-load --why "comparing"',
)  # fmt: skip
OfModel = Annotated[
    str | None, typer.Option("--model", help='Of this model; "": of all without their own. Left out: all of it.')
]


@verb(policy_app, "set", 'farhop policy set tokyo least-load --why "comparing"', writes=True)
def policy_set(
    region: Annotated[str, typer.Argument(help="The region whose balancers are to follow it.")],
    policy: Annotated[str, typer.Argument(help="The policy's name.")],
    why: Why,
    model: Annotated[str, typer.Option("--model", help="For this model; else for all without their own.")] = "",
    by: By = None,
    *,
    where: Where,
) -> int:
    """Make a region pick replicas by a policy.

    Exit code 1 if somebody else changed it meanwhile.
    """
    from farhop_cli.by_model import set_policy

    return set_policy(region, policy, model, why, by, where)


split_app = _group(
    "split", "What share of a model's traffic each version gets in a region.",
    'set tokyo --model llama-70b --weights v1=95,v2=5 --why "canary of v2"',
)  # fmt: skip


@verb(
    split_app, "set", 'farhop split set tokyo --model llama-70b --weights v1=95,v2=5 --why "canary of v2"', writes=True
)
def split_set(
    region: Annotated[str, typer.Argument(help="The region whose balancers are to follow it.")],
    model: Annotated[str, typer.Option("--model", help="The model whose versions share its traffic.")],
    weights: Annotated[str, typer.Option("--weights", help="Such as v1=95,v2=5.")],
    why: Why,
    by: By = None,
    *,
    where: Where,
) -> int:
    """Split a model's traffic between its versions.

    Canary, A/B, or all at once to another. The weights change alone: rules and stickiness stay. Exit code 1 if somebody
    else changed it meanwhile.
    """
    from farhop_cli.by_model import set_split

    return set_split(region, model, weights, why, by, where)


def _unset_by_model(app: typer.Typer, name: str) -> None:
    @verb(app, "unset", f"farhop {name} unset tokyo --model llama-70b", writes=True)
    def unset(
        region: Region, model: OfModel = None, why: Why = "back to the configuration", by: By = None, *, where: Where
    ) -> int:
        """Go back to the configuration.

        For one model or all. Exit code 1 if nothing stands there.
        """
        from farhop_cli import by_model

        return by_model.unset(noun(name), region, model, why, by, where)


_unset_by_model(policy_app, "policy")
_unset_by_model(split_app, "split")


# -- limit

limit_app = _group(
    "limit", "What tenants, their keys and models may use, fleet-wide.",
    'set acme --home virginia --requests-per-minute 600 --why "the contract"', "virginia",
)  # fmt: skip
LimitedTenant = Annotated[str, typer.Argument(metavar="TENANT", help="Whose requests.")]
OfKey = Annotated[
    str, typer.Option("--key", help="Of this key alone: the id of an issued one, or its name in the law.")
]
OnModel = Annotated[str, typer.Option("--model", help="For this model alone.")]
EachUser = Annotated[bool, typer.Option("--each-user", help="Of each of its users by itself.")]
MOST = 1_000_000_000_000
RequestsMinute = Annotated[int | None, typer.Option("--requests-per-minute", min=1, max=MOST, help="Requests.")]
RequestsDay = Annotated[int | None, typer.Option("--requests-per-day", min=1, max=MOST, help="Requests.")]
InputMinute = Annotated[
    int | None, typer.Option("--input-tokens-per-minute", min=1, max=MOST, help="Tokens of prompts.")
]
InputDay = Annotated[int | None, typer.Option("--input-tokens-per-day", min=1, max=MOST, help="Of prompts.")]
OutputMinute = Annotated[
    int | None, typer.Option("--output-tokens-per-minute", min=1, max=MOST, help="Tokens of answers.")
]
OutputDay = Annotated[int | None, typer.Option("--output-tokens-per-day", min=1, max=MOST, help="Of answers.")]
TokensMinute = Annotated[int | None, typer.Option("--tokens-per-minute", min=1, max=MOST, help="Of both.")]
TokensDay = Annotated[int | None, typer.Option("--tokens-per-day", min=1, max=MOST, help="Of both.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", min=1, max=MOST, help="Requests under way at once.")]
LEAST_USD, MOST_USD = 0.000001, 1_000_000.0
UsdDay = Annotated[
    float | None, typer.Option("--usd-per-day", min=LEAST_USD, max=MOST_USD, help="Money, at the balancers' prices.")
]
UsdMonth = Annotated[
    float | None, typer.Option("--usd-per-month", min=LEAST_USD, max=MOST_USD, help="The same, in 30 days.")
]


@verb(
    limit_app, "set", 'farhop limit set acme --home virginia --tokens-per-minute 100000 --why "contract"', writes=True
)
def limit_set(
    tenant: LimitedTenant,
    why: Why,
    key: OfKey = "",
    model: OnModel = "",
    each_user: EachUser = False,
    requests_per_minute: RequestsMinute = None,
    requests_per_day: RequestsDay = None,
    input_tokens_per_minute: InputMinute = None,
    input_tokens_per_day: InputDay = None,
    output_tokens_per_minute: OutputMinute = None,
    output_tokens_per_day: OutputDay = None,
    tokens_per_minute: TokensMinute = None,
    tokens_per_day: TokensDay = None,
    concurrency: Concurrency = None,
    usd_per_day: UsdDay = None,
    usd_per_month: UsdMonth = None,
    home: Annotated[
        str, typer.Option("--home", help="The region that lends it out.", autocompletion=known_regions)
    ] = "",
    safe_share: Annotated[
        float | None,
        typer.Option("--safe-share", min=0, max=1, help="Split among the global balancers of now, for partitions."),
    ] = None,
    usage: Annotated[
        Path | None, typer.Option("--usage", help="With --dry-run: usage files; what of their last day it refuses.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option("--prices", help="The price book: for --usage, or where no balancer tells its own.")
    ] = None,
    by: By = None,
    *,
    where: Where,
) -> int:
    """Limit what a tenant may use, fleet-wide.

    Of a tenant, or of one key or one model of it; all that match a request hold. What is left out stays. Exit code 1
    if somebody else changed it meanwhile, or limits contradict one another.
    """
    from farhop_cli.limit import Against, micro_usd, set_limit

    sizes = {
        "requests_per_minute": requests_per_minute, "requests_per_day": requests_per_day,
        "input_tokens_per_minute": input_tokens_per_minute, "input_tokens_per_day": input_tokens_per_day,
        "output_tokens_per_minute": output_tokens_per_minute, "output_tokens_per_day": output_tokens_per_day,
        "tokens_per_minute": tokens_per_minute, "tokens_per_day": tokens_per_day, "concurrency": concurrency,
        "micro_usd_per_day": micro_usd("--usd-per-day", usd_per_day),
        "micro_usd_per_month": micro_usd("--usd-per-month", usd_per_month),
    }  # fmt: skip
    against = Against(usage, prices)
    return set_limit(tenant, (key, model, each_user), sizes, home, safe_share, against, why, by, where)


@verb(limit_app, "unset", "farhop limit unset acme --model llama-70b", writes=True)
def limit_unset(
    tenant: LimitedTenant,
    key: OfKey = "",
    model: OnModel = "",
    each_user: EachUser = False,
    every: Annotated[bool, typer.Option("--all", help="All of the tenant's, also of its keys and models.")] = False,
    why: Why = "not limited any more",
    by: By = None,
    *,
    where: Where,
) -> int:
    """Take a limit away.

    That of the tenant, of a key or of a model; with --all every one. Exit code 1 if none stands there.
    """
    from farhop_cli.limit import unset

    return unset(tenant, None if every else (key, model, each_user), why, by, where)


# -- law

law_app = typer.Typer(
    help="The law that all balancers go by: who is served, where their prompts, records and hints may be.",
    epilog="Example:  farhop law get > law.yaml", cls=Verbs, **PLAIN,
)  # fmt: skip
LAW_FILE = "YAML with `tenants` and, if there are rules of models, `models`; or -; or a signed law."
LawFile = Annotated[str, typer.Argument(help=LAW_FILE)]
After = Annotated[
    int | None, typer.Option("--after", help="Only if the newest law is still of this epoch: the one you changed.")
]


@verb(law_app, "get", "farhop law get > law.yaml")
def law_get(
    epoch: Annotated[
        int | None, typer.Option("--epoch", help="One that was replaced; see `farhop law history`.")
    ] = None,
    *,
    where: Where,
) -> int:
    """Print the law that stands in etcd, or the topology's.

    Change what it prints, and `farhop law set` it.
    """
    from farhop_cli.law import get

    return get(epoch, where)


@verb(law_app, "set", 'farhop law set law.yaml --why "eu-only may not use Ireland" --after 4', writes=True)
def law_set(
    file: LawFile,
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks; a signed law says its own.")] = "",
    by: By = None,
    after: After = None,
    *,
    where: Where,
) -> int:
    """Put a law in the place of the one that stands, under a new epoch.

    It is checked first, every fault at once. It is signed if FARHOP_SIGNING_KEY names a private key's file. Exit code 1
    if it has faults, or somebody else changed it meanwhile.
    """
    from farhop_cli.law import put

    return put(file, why, by, after, where)


@verb(law_app, "unset", 'farhop law unset --why "back to what the topology says"', writes=True)
def law_unset(why: Why, by: By = None, after: After = None, *, where: Where) -> int:
    """Go back to the topology's own law, under a new epoch.

    No law in force is ever undone by taking it away.
    """
    from farhop_cli.law import unset

    return unset(why, by, after, where)


@verb(law_app, "diff", "farhop law diff law.yaml    or:  farhop law diff --epoch 3")
def law_diff(
    file: Annotated[str, typer.Argument(metavar="[FILE]", show_default=False, help=LAW_FILE)] = "",
    epoch: Annotated[int | None, typer.Option("--epoch", help="Not what stands, but a law that was.")] = None,
    *,
    where: Where,
) -> int:
    """Check a law, and tell what it would change.

    Exit code 1 if it has faults, or would change anything. Without a file: what changed since --epoch, or, without
    that, what `farhop law unset` would change.
    """
    from farhop_cli.law import diff

    return diff(file, epoch, where)


@verb(law_app, "history", "farhop law history")
def law_history(where: Where) -> int:  # fmt: skip
    """List the last laws: epoch, when, by whom and why."""
    from farhop_cli.law import history

    return history(where)


@law_app.command("sign", epilog='Example:  farhop law sign law.yaml --key ops.pem --epoch 6 --why "…" > law.signed')
def law_sign(
    file: LawFile,
    key: Annotated[
        str, typer.Option("--key", envvar="FARHOP_SIGNING_KEY", help="The private key's file: [NAME=]PATH.")
    ],
    epoch: Annotated[int, typer.Option("--epoch", min=1, help="Above that of every law there was.")],
    why: Why,
    by: By = None,
) -> None:
    """Print a law with your signature; it reaches nothing.

    Somebody else can then `farhop law set` it, without your key.
    """
    from farhop_cli.law import sign

    raise typer.Exit(sign(file, key, epoch, why, by))


@verb(law_app, "verify", "farhop law verify --config global.yaml")
def law_verify(
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", show_default=False, help="A signed law; else what stands in each hub.")
    ] = "",
    public: Annotated[
        list[str] | None,
        typer.Option("--public", metavar="[NAME=]PATH", help="A public key's file; may be repeated."),
    ] = None,
    *,
    where: Where,
) -> int:
    """Tell whether a law counts, by its signature.

    By the keys of a balancer's configuration, or by these. Exit code 1 if it does not.
    """
    from farhop_cli.law import verify

    return verify(file, public or (), where)


# -- key

key_app = typer.Typer(
    help="API keys: issue, rotate, revoke and list them.",
    epilog='Example:  farhop key create acme --model llama --for 90d --why "nightly batch"',
    **PLAIN,
)  # fmt: skip
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `farhop key list` prints it.")]
Models = Annotated[
    list[str] | None, typer.Option("--model", metavar="MODEL", help="For this model alone; may be repeated.")
]
Paths = Annotated[
    list[str] | None,
    typer.Option("--path", metavar="PATH", help="For this path alone, such as /v1/embeddings; may be repeated."),
]
Within = Annotated[
    list[str] | None,
    typer.Option("--within", metavar="PLACE", help="Only within this place, such as eu; may be repeated."),
]
KeyLength = Annotated[str | None, typer.Option("--for", help="It ends after so long: 12h, 90d. Default: never.")]


@verb(key_app, "create", 'farhop key create acme --model llama --for 90d --why "nightly batch"', writes=True)
def key_create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: a tenant of the law.")],
    why: Why,
    model: Models = None,
    path: Paths = None,
    within: Within = None,
    length: KeyLength = None,
    after: Annotated[str | None, typer.Option("--after", help="It begins after so long. Default: at once.")] = None,
    by: By = None,
    *,
    where: Where,
) -> int:
    """Issue a key. It is shown once, and kept as its SHA-256.

    Whoever brings it is the tenant, within what the law gives the tenant and what is said here. All balancers follow.
    """
    from farhop_cli.key import create

    return create(tenant, (model or [], path or [], within or []), after, length, why, by, where)


@verb(key_app, "rotate", 'farhop key rotate k3vQ9mZ1xW0b --grace 24h --why "every quarter"', writes=True)
def key_rotate(
    id_: KeyId,
    why: Why,
    grace: Annotated[str, typer.Option("--grace", help="The old one is good for so long still.")] = "24h",
    length: KeyLength = None,
    by: By = None,
    *,
    where: Where,
) -> int:
    """Issue a key in another's place; both are good for a while.

    Exit code 1 if there is none, if it is revoked, or if it was rotated already.
    """
    from farhop_cli.key import rotate

    return rotate(id_, grace, length, why, by, where)


@verb(key_app, "revoke", 'farhop key revoke k3vQ9mZ1xW0b --why "leaked"', writes=True)
def key_revoke(id_: KeyId, why: Why, by: By = None, *, where: Where) -> int:
    """Refuse a key from now on, everywhere.

    Requests that were let in go on. Exit code 1 if there is none, or if it is revoked already.
    """
    from farhop_cli.key import revoke

    return revoke(id_, why, by, where)


@verb(key_app, "list", "farhop key list --tenant acme")
def key_list(
    tenant: Annotated[str, typer.Option("--tenant", help="Of this tenant alone.")] = "", *, where: Where
) -> int:
    """List the keys issued: whose, for what, until when."""
    from farhop_cli.key import listed

    return listed(tenant, where)
