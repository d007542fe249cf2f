"""`farhop context`: which fleet the commands are for, by name. Only declares the commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, DryRun, Json

context_app = App(
    help="Contexts: which fleet the commands are for.", epilog="Example:  farhop context use production", **PLAIN
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
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, help="The context's name. Default: the current one.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Print a context; secrets are named, never shown."""
    from farhop_cli import context

    raise typer.Exit(context.show_one(name, as_json))


@context_app.command("unset", epilog="Example:  farhop context unset staging")
def context_unset(name: ContextName, dry_run: DryRun = False) -> None:
    """Remove a context. Exit code 1 if there is none of that name."""
    from farhop_cli import context

    raise typer.Exit(context.unset(name, dry_run=dry_run))


# How etcd is reached.
Etcd = Annotated[
    list[str] | None,
    typer.Option("--etcd", metavar="HOST:PORT", help="An endpoint of the fleet's etcd; may be repeated."),
]
Hub = Annotated[str, typer.Option("--hub", metavar="HUB", help="The hub of these endpoints, if the fleet has several.")]
EtcdCa = Annotated[
    Path | None, typer.Option("--etcd-ca", metavar="FILE", help="The authority (CA) of etcd's certificate.")
]
EtcdCert = Annotated[Path | None, typer.Option("--etcd-cert", metavar="FILE", help="Your certificate for etcd.")]
EtcdKey = Annotated[Path | None, typer.Option("--etcd-key", metavar="FILE", help="The certificate's private key.")]
EtcdUser = Annotated[str | None, typer.Option("--etcd-user", metavar="USER", help="The user name for etcd.")]
EtcdPassword = Annotated[
    str | None,
    typer.Option("--etcd-password", metavar="env:NAME|file:PATH", help="Where the password for etcd is."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow an etcd on another machine without TLS.")]

# How admin ports are reached.
Admin = Annotated[list[str] | None, typer.Option("--admin", metavar="URL", help="An admin port; may be repeated.")]
Ca = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", help="The authority (CA) of the admin ports' certificates.")
]
Cert = Annotated[Path | None, typer.Option("--cert", metavar="FILE", help="Your certificate for admin ports.")]
Key = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="The certificate's private key.")]
Token = Annotated[
    str | None, typer.Option("--token", metavar="env:NAME|file:PATH", help="Where the admin ports' token is.")
]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--server-name", metavar="NAME", help="The name in admin ports' certificates, such as {region}.{tier}.ex."
    ),
]

# What is true of the fleet.
Topology = Annotated[
    str | None,
    typer.Option(
        "--topology", metavar="FILE|NAME", help="A topology's file or name. Default: the one that balancers have."
    ),
]
Public = Annotated[
    list[str] | None,
    typer.Option("--public", metavar="[NAME=]FILE", help="A public key whose signatures count; may be repeated."),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file", metavar="FILE", help="Read the context from this file, such as deploy/compose/context.yaml."
    ),
]


@context_app.command(
    "set",
    epilog="Example:  farhop context set production --etcd etcd-1:2379 --etcd etcd-2:2379 --etcd-ca etcd-ca.pem "
    "--ca ca.pem --token file:~/.farhop-token",
)
def context_set(
    name: ContextName,
    etcd: Etcd = None,
    hub: Hub = "",
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    etcd_user: EtcdUser = None,
    etcd_password: EtcdPassword = None,
    admin: Admin = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token: Token = None,
    server_name: ServerName = None,
    topology: Topology = None,
    public: Public = None,
    insecure: Insecure = False,
    file: File = None,
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
