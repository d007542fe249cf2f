"""`farhop context`: which fleet the commands are for, by name. The wiring alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.options import PLAIN, DryRun, Json

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
def context_use(name: ContextName, dry_run: DryRun = False) -> None:
    """Make a context the current one."""
    from farhop_cli import context

    raise typer.Exit(context.use(name, dry_run=dry_run))


@context_app.command("show", epilog="Example:  farhop context show")
def context_show(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Else the current one.")] = "",
    as_json: Json = False,
) -> None:
    """Print a context; secrets are named, never shown."""
    from farhop_cli import context

    raise typer.Exit(context.show_one(name, as_json))


@context_app.command("unset", epilog="Example:  farhop context unset staging")
def context_unset(name: ContextName, dry_run: DryRun = False) -> None:
    """Take a context away. Exit code 1 if there is none of that name."""
    from farhop_cli import context

    raise typer.Exit(context.unset(name, dry_run=dry_run))


@context_app.command(
    "set",
    epilog="Example:  farhop context set production --etcd etcd-1:2379 --etcd etcd-2:2379 --etcd-ca etcd-ca.pem "
    "--ca ca.pem --token file:~/.farhop-token",
)
def context_set(
    name: ContextName,
    etcd: Annotated[
        list[str] | None,
        typer.Option("--etcd", metavar="HOST:PORT", help="An endpoint of the fleet's etcd; may be repeated."),
    ] = None,
    hub: Annotated[
        str, typer.Option("--hub", help="The hub these endpoints belong to, if the fleet has several.")
    ] = "",
    etcd_ca: Annotated[
        Path | None, typer.Option("--etcd-ca", metavar="FILE", help="The authority (CA) of etcd's certificate.")
    ] = None,
    etcd_cert: Annotated[
        Path | None, typer.Option("--etcd-cert", metavar="FILE", help="Your certificate for etcd.")
    ] = None,
    etcd_key: Annotated[Path | None, typer.Option("--etcd-key", metavar="FILE", help="Its key.")] = None,
    etcd_user: Annotated[str | None, typer.Option("--etcd-user", help="The user name for etcd.")] = None,
    etcd_password: Annotated[
        str | None, typer.Option("--etcd-password", metavar="env:NAME|file:PATH", help="Where the password is.")
    ] = None,
    admin: Annotated[
        list[str] | None, typer.Option("--admin", metavar="URL", help="An admin port; may be repeated.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="The authority (CA) of the admin ports' certificates.")
    ] = None,
    cert: Annotated[
        Path | None, typer.Option("--cert", metavar="FILE", help="Your certificate for admin ports.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Its key.")] = None,
    token: Annotated[
        str | None, typer.Option("--token", metavar="env:NAME|file:PATH", help="Where the admin ports' token is.")
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
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow an etcd on another machine without TLS.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="FILE", help="Take the context from this file, such as deploy/compose/context.yaml."
        ),
    ] = None,
    make_current: Annotated[bool, typer.Option("--use", help="Make it the current one, too.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Make a context, or change what is given of one.

    The first one becomes the current one.
    """
    from farhop_cli.context import given, put

    settings = given(
        etcd=etcd, hub=hub, etcd_files=(etcd_ca, etcd_cert, etcd_key), etcd_login=(etcd_user, etcd_password),
        admin=admin, files=(ca, cert, key), token=token, server_name=server_name, topology=topology,
        public=public or [], insecure=insecure, file=file,
    )  # fmt: skip
    raise typer.Exit(put(name, settings, make_current, dry_run=dry_run))
