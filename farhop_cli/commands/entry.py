"""Commands of the entry by DNS: the server, publishing to a provider's zone, and what a client or a resolver would see.

The wiring alone: the rooms are imported when a command runs, so that help is quick.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.options import PLAIN, Json

Config = Annotated[
    Path, typer.Option("--config", "-c", envvar="FARHOP_CONFIG", help="Configuration file of the DNS server (YAML).")
]
CONFIG = Path("farhop.yaml")

dns_app = typer.Typer(
    help="Answer DNS questions for entries, and publish or check such answers.",
    epilog="Example:  farhop dns --config tokyo-dns.yaml",
    invoke_without_command=True,
    **{**PLAIN, "no_args_is_help": False},  # without arguments it runs, by $FARHOP_CONFIG
)
where_app = typer.Typer(**PLAIN)


@dns_app.callback()
def dns(context: typer.Context, config: Config = CONFIG) -> None:
    """Run an authoritative DNS server for entries, unless a command follows."""
    context.obj = config
    if context.invoked_subcommand is None:
        gc.disable()
        from entry_dns.app.main import run

        gc.enable()
        run(config)


@dns_app.command("check", epilog="Example:  farhop dns check entry.example.com --resolver 9.9.9.9")
def check(
    zone: Annotated[str, typer.Argument(help="The zone that is delegated to `farhop dns`.")],
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="Ask for this name too; may be repeated.")
    ] = None,
    resolver: Annotated[str, typer.Option("--resolver", help="HOST[:PORT] that knows the delegation.")] = "",
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="HOST[:PORT]", help="Ask this instead of the delegated; may be repeated."),
    ] = None,
    client: Annotated[str, typer.Option("--client", help="A client network to ask for, such as 203.0.113.0/24.")] = "",
    as_json: Json = False,
) -> None:
    """Tell what a resolver would see of a zone.

    Asks the delegation, each server and each family. Exit code 1 if anything is wrong.
    """
    from farhop_cli.dns_check import run

    raise typer.Exit(run(zone, name or [], resolver, server or [], client, as_json))


@dns_app.command("publish", epilog="Example:  farhop dns publish --config tokyo-dns.yaml --once")
def publish(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="As of `farhop dns`.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Write what holds now, and end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")] = False,
) -> None:
    """Keep entries' records in another server's zone.

    By dynamic updates (RFC 2136), signed with TSIG.
    """
    from entry_dns.app.publish import run

    raise typer.Exit(run(config or context.obj, once=once, dry_run=dry_run))


@dns_app.command("latencies", epilog="Example:  farhop dns latencies --config tokyo-dns.yaml --least-ms 20")
def latencies(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="As of `farhop dns`.")] = None,
    admin: Annotated[str, typer.Option("--admin", help="URL of the server's admin port, if not the file's.")] = "",
    token: Annotated[str, typer.Option("--token", envvar="FARHOP_TOKEN", help="For the admin port.")] = "",
    least_ms: Annotated[
        float, typer.Option("--least-ms", help="Show those that differ by so much, or lead elsewhere.")
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Tell where geography and entries' measurements disagree.

    For each client network that entries measured: what either says, what counts, and where it leads.
    """
    from farhop_cli.where import latencies as run

    raise typer.Exit(run(config or context.obj, admin, token, least_ms, as_json))


@where_app.command("where", epilog="Example:  farhop where 203.0.113.7 --tenant eu-only --config tokyo-dns.yaml")
def where(
    client: Annotated[str, typer.Argument(help="The client's address.")],
    tenant: Annotated[str, typer.Option("--tenant", help="For names of this tenant's class.")] = "",
    config: Config = CONFIG,
    admin: Annotated[str, typer.Option("--admin", help="URL of the server's admin port, if not the file's.")] = "",
    token: Annotated[str, typer.Option("--token", envvar="FARHOP_TOKEN", help="For the admin port.")] = "",
    offline: Annotated[bool, typer.Option("--offline", help="By the file alone, as if every entry were up.")] = False,
    as_json: Json = False,
) -> None:
    """Tell which entry DNS gives a client, why, and for which network.

    Exit code 1 if the law leaves it none.
    """
    from farhop_cli.where import run

    raise typer.Exit(run(client, tenant, config, admin, token, offline, as_json))
