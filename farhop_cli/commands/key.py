"""`farhop key`: API keys, created, rotated, revoked and listed. Only declares the commands and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from farhop_cli.commands.wiring import verb
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, By, FleetOptions, Why

key_app = App(
    help="API keys: create, rotate, revoke and list them.",
    epilog='Example:  farhop key create acme --model llama --for 90d --why "nightly batch"',
    **PLAIN,
)  # fmt: skip
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `farhop key list` prints it.")]
Models = Annotated[
    list[str] | None, typer.Option("--model", metavar="MODEL", help="Only for this model; may be repeated.")
]
Paths = Annotated[
    list[str] | None,
    typer.Option("--path", metavar="PATH", help="Only for this path, such as /v1/embeddings; may be repeated."),
]
Within = Annotated[
    list[str] | None,
    typer.Option("--within", metavar="PLACE", help="Only within this place, such as eu; may be repeated."),
]
KeyLength = Annotated[
    str | None,
    typer.Option("--for", metavar="DURATION", help="How long it is valid, such as 12h, 90d. Default: without end."),
]


@verb(key_app, "create", 'farhop key create acme --model llama --for 90d --why "nightly batch"', writes=True)
def key_create(
    tenant: Annotated[str, typer.Argument(help="The key's tenant, as in the law.")],
    why: Why,
    model: Models = None,
    path: Paths = None,
    within: Within = None,
    length: KeyLength = None,
    after: Annotated[
        str | None,
        typer.Option(
            "--after", metavar="DURATION", help="In how long it becomes valid, such as 12h. Default: at once."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Its clients may ask why a request went where it did (x-farhop-explain).")
    ] = False,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Create a key. It is shown once, and kept as its SHA-256.

    Its requests are the tenant's, under the law and narrowed by these options. All balancers follow.
    """
    from farhop_cli.key import create

    scopes = model or [], path or [], within or []
    return create(tenant, scopes, after, length, why, by, fleet_options, explain=explain)


@verb(key_app, "rotate", 'farhop key rotate k3vQ9mZ1xW0b --grace 24h --why "every quarter"', writes=True)
def key_rotate(
    id_: KeyId,
    why: Why,
    grace: Annotated[
        str, typer.Option("--grace", metavar="DURATION", help="How long the old key stays valid.")
    ] = "24h",
    length: KeyLength = None,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Replace a key by a new one; both are valid for a while.

    Exit code 1 if there is none, if it is revoked, or if it was rotated already.
    """
    from farhop_cli.key import rotate

    return rotate(id_, grace, length, why, by, fleet_options)


@verb(key_app, "revoke", 'farhop key revoke k3vQ9mZ1xW0b --why "leaked"', writes=True)
def key_revoke(id_: KeyId, why: Why, by: By = None, *, fleet_options: FleetOptions) -> int:
    """Refuse a key from now on, everywhere.

    Requests that were let in go on. Exit code 1 if there is none, or if it is revoked already.
    """
    from farhop_cli.key import revoke

    return revoke(id_, why, by, fleet_options)


@verb(key_app, "list", "farhop key list --tenant acme")
def key_list(
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant's keys.")] = "",
    *,
    fleet_options: FleetOptions,
) -> int:
    """List the keys created: whose, for what, until when."""
    from farhop_cli.key import listed

    return listed(tenant, fleet_options)
