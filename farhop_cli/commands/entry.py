"""Commands of the entry by DNS: the server, publishing to a provider's zone, and what a client or a resolver would see.

Only declares the commands and their options: other modules are imported when a command runs, so that help is quick.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, Json

Config = Annotated[
    Path,
    typer.Option(
        "--config", "-c", metavar="FILE", envvar="FARHOP_CONFIG", help="Configuration file of the DNS server (YAML)."
    ),
]
CONFIG = Path("farhop.yaml")
ServerConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="The DNS server's configuration. Default: that of `farhop dns`."
    ),
]
ServerAdmin = Annotated[
    str, typer.Option("--admin", metavar="URL", help="The DNS server's admin port. Default: the configuration's.")
]
ServerToken = Annotated[
    str,
    typer.Option(
        "--token", metavar="TOKEN", envvar="FARHOP_TOKEN", help="The admin port's token. Default: the context's."
    ),
]
ServerContext = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Whose token and certificates the admin port gets. Default: FARHOP_CONTEXT, or the current context.",
    ),
]

dns_app = App(
    help="Answer DNS questions for entries, and publish or check the answers.",
    epilog="Example:  farhop dns --config tokyo-dns.yaml",
    invoke_without_command=True,
    **{**PLAIN, "no_args_is_help": False},  # without arguments it runs, by $FARHOP_CONFIG
)
where_app = App(**PLAIN)


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
        list[str] | None, typer.Option("--name", metavar="NAME", help="Also ask for this name; may be repeated.")
    ] = None,
    resolver: Annotated[
        str,
        typer.Option(
            "--resolver", metavar="HOST[:PORT]", help="A resolver that knows the delegation. Default: the system's."
        ),
    ] = "",
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server", metavar="HOST[:PORT]", help="Ask this server instead of the delegated ones; may be repeated."
        ),
    ] = None,
    client: Annotated[
        str, typer.Option("--client", metavar="NETWORK", help="A client network to ask for, such as 203.0.113.0/24.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check what resolvers see of a zone.

    Asks the delegation, each server and each family. Exit code 1 if anything is wrong.
    """
    from farhop_cli.dns_check import run

    raise typer.Exit(run(zone, name or [], resolver, server or [], client, as_json))


@dns_app.command("publish", epilog="Example:  farhop dns publish --config tokyo-dns.yaml --once")
def publish(
    context: typer.Context,
    config: ServerConfig = None,
    once: Annotated[bool, typer.Option("--once", help="Write the records once, and end.")] = False,
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
    config: ServerConfig = None,
    admin: ServerAdmin = "",
    token: ServerToken = "",
    name: ServerContext = None,
    least_ms: Annotated[
        float,
        typer.Option(
            "--least-ms", metavar="MS", help="Show networks that differ by at least MS, or lead to another entry."
        ),
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Show where geography and entries' measurements disagree.

    For each client network that entries measured: what either says, what counts, and where it leads.
    """
    from farhop_cli.where import latencies as run

    raise typer.Exit(run(config or context.obj, admin, token, least_ms, as_json, name))


@where_app.command("where", epilog="Example:  farhop where 203.0.113.7 --tenant eu-only --config tokyo-dns.yaml")
def where(
    client: Annotated[str, typer.Argument(help="The client's address.")],
    tenant: Annotated[
        str, typer.Option("--tenant", help="Ask for the names of this tenant. Default: the names for all clients.")
    ] = "",
    config: Config = CONFIG,
    admin: ServerAdmin = "",
    token: ServerToken = "",
    name: ServerContext = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Go by the configuration alone, as if every entry were up.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which entry DNS gives a client, why, and for which network.

    Exit code 1 if the law leaves it none.
    """
    from farhop_cli.where import run

    raise typer.Exit(run(client, tenant, config, admin, token, offline, as_json, name))
