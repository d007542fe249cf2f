"""The `farhop` commands that operators speak to a running fleet with: what they say stands in etcd, for all balancers.

The wiring alone, as in `farhop_cli.main`, whose rules hold here: a room is imported when its command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_lab.world_file import ENVIRONMENT, WORLD_FILE

app = typer.Typer()
law_app = typer.Typer(
    help="The law that all balancers go by: who is served, where their prompts, records and hints may be.",
    no_args_is_help=True, rich_markup_mode=None, epilog="Example:  farhop law get > law.yaml",
)  # fmt: skip
app.add_typer(law_app, name="law")

World = Annotated[
    Path, typer.Option("--world", envvar=ENVIRONMENT, help="File of the running world, written by `farhop up`.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
FleetConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="A global balancer's configuration: its etcd, its law, its admin port."),
]
FleetEtcd = Annotated[
    str | None, typer.Option("--etcd", help="HOST:PORT of an etcd without TLS, where there is nothing else.")
]
Why = Annotated[str | None, typer.Option("--why", help="The reason, for whoever asks; needed to set something.")]
Author = Annotated[str | None, typer.Option("--author", help="Who says so. Default: user@host.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose requests.")]
Model = Annotated[str, typer.Option("--model", help="Or: the requests for which model.")]


@app.command(epilog='Example:  farhop drain tokyo --for 30m --why "kernel update"')
def drain(
    region: Annotated[str, typer.Argument(help="The region to send no new work to.")],
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks.")],
    length: Annotated[str, typer.Option("--for", help="For how long: 90s, 30m, 2h; at most 7d.")] = "1h",
    over: Annotated[str, typer.Option("--over", help="Pace: new work moves away over this time. 0s: at once.")] = "10s",
    author: Author = None,
    force: Annotated[bool, typer.Option("--force", help="Also if it is the last region of some tenant.")] = False,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Move a region's new work elsewhere, for a while.

    The word stands in etcd under a lease and ends by itself. Exit code 1 if it is refused, since a tenant would have
    no region left.
    """
    from farhop_cli.drain import Options
    from farhop_cli.drain import drain as run

    raise typer.Exit(run(Options(region, world, config, etcd, as_json, length, why, over, author, force)))


@app.command(epilog="Example:  farhop undrain tokyo")
def undrain(
    region: Annotated[str, typer.Argument(help="The region to use again.")],
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Take a drain back; the region comes back at a pace.

    Tells who had set it and why. Exit code 1 if the region is not drained.
    """
    from farhop_cli.drain import Options
    from farhop_cli.drain import undrain as run

    raise typer.Exit(run(Options(region, world, config, etcd, as_json)))


@app.command(epilog='Example:  farhop bias tokyo --ms 50 --for 2h --why "link is dear tonight"')
def bias(
    region: Annotated[str, typer.Argument(help="The region that is to count as worse or better than it is.")],
    ms: Annotated[float, typer.Option("--ms", help="Milliseconds added to its scores; below 0: taken off.")],
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks.")],
    length: Annotated[str, typer.Option("--for", help="For how long: 90s, 30m, 2h; at most 7d.")] = "1h",
    author: Author = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Draw requests to a region, or away from it, for a while.

    The word stands in etcd under a lease and ends by itself. It acts where scores are milliseconds (docs/policies.md).
    """
    from farhop_cli.steer import Options
    from farhop_cli.steer import bias as run

    raise typer.Exit(run(Options(region, world, config, etcd, as_json, ms=ms, length=length, why=why, author=author)))


@app.command(epilog="Example:  farhop unbias tokyo")
def unbias(
    region: Annotated[str, typer.Argument(help="The region that is to count as it is.")],
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Take a bias back. Exit code 1 if there is none."""
    from farhop_cli.steer import Options
    from farhop_cli.steer import unbias as run

    raise typer.Exit(run(Options(region, world, config, etcd, as_json)))


@app.command(epilog='Example:  farhop pin frankfurt --tenant eu-only --for 1h --why "trying the new GPUs"')
def pin(
    region: Annotated[str, typer.Argument(help="The region to go to, where the law allows it.")],
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks.")],
    tenant: Tenant = "",
    model: Model = "",
    strict: Annotated[bool, typer.Option("--strict", help="Nowhere else, even if it does not serve.")] = False,
    length: Annotated[str, typer.Option("--for", help="For how long: 90s, 30m, 2h; at most 7d.")] = "1h",
    author: Author = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Send a tenant's or a model's requests to one region, for a while.

    While it does not serve they go where they would else. Never widens the law. Ends by itself, as a drain does.
    """
    from farhop_cli.steer import Options
    from farhop_cli.steer import pin as run

    raise typer.Exit(
        run(Options(region, world, config, etcd, as_json, 0.0, tenant, model, strict, length, why, author))
    )


@app.command(epilog="Example:  farhop unpin --tenant eu-only")
def unpin(
    tenant: Tenant = "",
    model: Model = "",
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Take a pin back. Exit code 1 if there is none."""
    from farhop_cli.steer import Options
    from farhop_cli.steer import unpin as run

    raise typer.Exit(run(Options("", world, config, etcd, as_json, tenant=tenant, model=model)))


@app.command(epilog='Example:  farhop route virginia "{answer: redirect}" --tenant acme --why "streams are long"')
def route(
    region: Annotated[str, typer.Argument(help="The entry whose global balancers are to follow it.")],
    said: Annotated[
        str | None,
        typer.Argument(metavar="ROUTE", help="Fields as under `routes`. Left out: show what stands in etcd."),
    ] = None,
    tenant: Tenant = "",
    model: Annotated[str, typer.Option("--model", help="The requests for which model; of the tenant, if both.")] = "",
    clear: Annotated[
        bool, typer.Option("--clear", help="Back to the configuration; without --tenant and --model for all.")
    ] = False,
    why: Why = None,
    author: Author = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Change by which policy an entry chooses regions, with which modifiers, and how it answers; or show it.

    Exit code 1 if somebody else changed it meanwhile, or there is nothing to clear.
    """
    from farhop_cli.route import Options, run

    raise typer.Exit(run(Options(region, said, tenant, model, clear, why, author, world, config, etcd, as_json)))


@app.command(epilog='Example:  farhop policy tokyo least-load --why "comparing"')
def policy(
    region: Annotated[str, typer.Argument(help="The region whose balancers are to follow it.")],
    name: Annotated[str | None, typer.Argument(help="The policy. Left out: show what stands in etcd.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="For this model; else for all without their own.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Back to the configuration; without --model for all.")] = False,
    why: Why = None,
    author: Author = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Change by which policy a region picks replicas, or show what goes before its configuration.

    Exit code 1 if somebody else changed it meanwhile, or there is nothing to clear.
    """
    from farhop_cli.by_model import Options
    from farhop_cli.policy import run

    raise typer.Exit(run(Options(region, model, clear, why, author, world, config, etcd, as_json), name))


@app.command(epilog='Example:  farhop split tokyo --model llama-70b --weights v1=95,v2=5 --why "canary of v2"')
def split(
    region: Annotated[str, typer.Argument(help="The region whose balancers are to follow it.")],
    model: Annotated[str | None, typer.Option("--model", help="The model whose versions share its traffic.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Such as v1=95,v2=5. Left out: show what stands in etcd.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Back to the configuration; without --model for all.")] = False,
    why: Why = None,
    author: Author = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Split a model's traffic between its versions: canary, A/B, or all at once to another.

    Exit code 1 if somebody else changed it meanwhile, or there is nothing to clear.
    """
    from farhop_cli.by_model import Options
    from farhop_cli.split import run

    raise typer.Exit(run(Options(region, model, clear, why, author, world, config, etcd, as_json), weights))


@law_app.command("get", epilog="Example:  farhop law get > law.yaml")
def law_get(
    epoch: Annotated[
        int | None, typer.Option("--epoch", help="One that was replaced; see `farhop law history`.")
    ] = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Print the law that stands in etcd, or the topology's; change it and `farhop law set` it."""
    from farhop_cli.law import Options, get

    raise typer.Exit(get(Options(world, config, etcd, as_json, epoch=epoch)))


LawFile = Annotated[
    str, typer.Argument(help="YAML with `tenants` and, if there are rules of models, `models`; or -; or a signed law.")
]
After = Annotated[
    int | None, typer.Option("--after", help="Only if the newest law is still of this epoch: the one you changed.")
]


@law_app.command("set", epilog='Example:  farhop law set law.yaml --why "eu-only may not use Ireland" --after 4')
def law_set(
    file: LawFile,
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks; a signed law says its own.")] = "",
    author: Author = None,
    after: After = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Put a law in the place of the one that stands, under a new epoch.

    It is checked first, every fault at once. It is signed if FARHOP_SIGNING_KEY names a private key's file. Exit code 1
    if it has faults, or somebody else changed it meanwhile.
    """
    from farhop_cli.law import Options, put

    raise typer.Exit(put(Options(world, config, etcd, as_json, file, why, author, after)))


@law_app.command("unset", epilog='Example:  farhop law unset --why "back to what the topology says"')
def law_unset(
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks.")],
    author: Author = None,
    after: After = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Go back to the topology's own law, under a new epoch: no law in force is ever undone by taking it away."""
    from farhop_cli.law import Options, unset

    raise typer.Exit(unset(Options(world, config, etcd, as_json, "the topology", why, author, after)))


@law_app.command("diff", epilog="Example:  farhop law diff law.yaml")
def law_diff(
    file: LawFile,
    epoch: Annotated[int | None, typer.Option("--epoch", help="Not what stands, but a law that was.")] = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Check a law, and tell what it would change. Exit code 1 if it has faults, or would change anything."""
    from farhop_cli.law import Options, diff

    raise typer.Exit(diff(Options(world, config, etcd, as_json, file, epoch=epoch)))


@law_app.command("sign", epilog='Example:  farhop law sign law.yaml --key ops.pem --epoch 6 --why "…" > law.signed')
def law_sign(
    file: LawFile,
    key: Annotated[
        str, typer.Option("--key", envvar="FARHOP_SIGNING_KEY", help="The private key's file: [NAME=]PATH.")
    ],
    epoch: Annotated[int, typer.Option("--epoch", min=1, help="Above that of every law there was.")],
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks.")],
    author: Author = None,
) -> None:
    """Print a law with your signature, so that somebody else can `farhop law set` it. Reaches nothing."""
    from farhop_cli.law import Options
    from farhop_cli.law import sign as run

    raise typer.Exit(run(Options(WORLD_FILE, None, None, False, file, why, author, epoch=epoch, key=key)))


@law_app.command("verify", epilog="Example:  farhop law verify --config global.yaml")
def law_verify(
    file: Annotated[str, typer.Argument(help="A signed law; without one, what stands in each hub.")] = "",
    public: Annotated[
        list[str] | None, typer.Option("--public", help="A public key's file: [NAME=]PATH; may be repeated.")
    ] = None,
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Tell whether a law counts by the keys of a balancer's configuration, or by these. Exit code 1 if it does not."""
    from farhop_cli.law import Options
    from farhop_cli.law import verify as run

    options = Options(world, config, etcd, as_json, file, public=tuple(public or ()))
    raise typer.Exit(run(options))


@law_app.command("history", epilog="Example:  farhop law history")
def law_history(
    config: FleetConfig = None,
    etcd: FleetEtcd = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """List the last laws: epoch, when, by whom and why."""
    from farhop_cli.law import Options, history

    raise typer.Exit(history(Options(world, config, etcd, as_json)))
