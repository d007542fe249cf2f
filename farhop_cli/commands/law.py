"""`farhop law`: the law that all balancers apply. Only declares the commands and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from farhop_cli.commands.wiring import Verbs, verb
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, By, FleetOptions, Why

law_app = App(
    help="The law that all balancers follow: who is served, where their prompts, records and hints may be.",
    epilog="Example:  farhop law get > law.yaml", cls=Verbs, **PLAIN,
)  # fmt: skip
LAW_FILE = "A law as `farhop law get` prints it, or a signed one. -: standard input."
LawFile = Annotated[str, typer.Argument(help=LAW_FILE)]
After = Annotated[
    int | None,
    typer.Option("--after", metavar="EPOCH", help="Fail if the newest law is not of this epoch."),
]


@verb(law_app, "get", "farhop law get > law.yaml")
def law_get(
    epoch: Annotated[
        int | None,
        typer.Option(
            "--epoch",
            metavar="EPOCH",
            help="An earlier law, by its epoch (`farhop law history`). Default: the law now.",
        ),
    ] = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Print the law in etcd or, without one, the topology's.

    Edit what it prints, and set it with `farhop law set`.
    """
    from farhop_cli.law import get

    return get(epoch, fleet_options)


@verb(law_app, "set", 'farhop law set law.yaml --why "eu-only may not use Ireland" --after 4', writes=True)
def law_set(
    file: LawFile,
    why: Annotated[
        str, typer.Option("--why", metavar="TEXT", help="The reason, kept with the change. A signed law has its own.")
    ] = "",
    by: By = None,
    after: After = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Replace the law, under a new epoch.

    A law with faults is not set; all faults are shown at once. It is signed if FARHOP_SIGNING_KEY names a private key's
    file. Exit code 1 if it has faults, or somebody else changed the law meanwhile.
    """
    from farhop_cli.law import put

    return put(file, why, by, after, fleet_options)


@verb(law_app, "unset", 'farhop law unset --why "back to what the topology says"', writes=True)
def law_unset(why: Why, by: By = None, after: After = None, *, fleet_options: FleetOptions) -> int:
    """Go back to the topology's own law, under a new epoch.

    A law is never undone by deleting it: this sets a new one.
    """
    from farhop_cli.law import unset

    return unset(why, by, after, fleet_options)


@verb(law_app, "diff", "farhop law diff law.yaml    or:  farhop law diff --epoch 3")
def law_diff(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False, help=LAW_FILE)] = "",
    epoch: Annotated[
        int | None, typer.Option("--epoch", metavar="EPOCH", help="Compare with an earlier law, by its epoch.")
    ] = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Check a law, and show what it would change.

    Exit code 1 if it has faults, or would change anything. Without a file: what changed since --epoch, or, without
    that, what `farhop law unset` would change.
    """
    from farhop_cli.law import diff

    return diff(file, epoch, fleet_options)


@verb(law_app, "history", "farhop law history")
def law_history(fleet_options: FleetOptions) -> int:  # fmt: skip
    """List the last laws: epoch, when, by whom and why."""
    from farhop_cli.law import history

    return history(fleet_options)


@law_app.command("sign", epilog='Example:  farhop law sign law.yaml --key ops.pem --epoch 6 --why "…" > law.signed')
def law_sign(
    file: LawFile,
    key: Annotated[
        str,
        typer.Option("--key", metavar="[NAME=]FILE", envvar="FARHOP_SIGNING_KEY", help="The private key's file."),
    ],
    epoch: Annotated[
        int,
        typer.Option(
            "--epoch", metavar="EPOCH", min=1, help="The signed law's epoch, above that of every earlier law."
        ),
    ],
    why: Why,
    by: By = None,
) -> None:
    """Sign a law, and print it; nothing is set.

    Somebody else can then set it with `farhop law set`, without your key.
    """
    from farhop_cli.law import sign

    raise typer.Exit(sign(file, key, epoch, why, by))


@verb(law_app, "verify", "farhop law verify --config global.yaml")
def law_verify(
    file: Annotated[
        str, typer.Argument(metavar="FILE", show_default=False, help="A signed law. Default: what is in each hub.")
    ] = "",
    public: Annotated[
        list[str] | None,
        typer.Option("--public", metavar="[NAME=]FILE", help="A public key's file; may be repeated."),
    ] = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Check a law's signature.

    By the keys of a balancer's configuration, or those of --public. Exit code 1 if it does not count.
    """
    from farhop_cli.law import verify

    return verify(file, public or (), fleet_options)
