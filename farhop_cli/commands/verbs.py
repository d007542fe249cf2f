"""The verbs of the `farhop` command: one line each; the modules that they call do the work.

These are imported when their command runs, so that help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.commands.wiring import loading
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, WORLD_FILE, Allow, Context, DryRun, From, Json, World, duration_s

app = App(**PLAIN)

Config = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", envvar="FARHOP_CONFIG", help="Configuration file (YAML).")
]


RUN_S = 1.0, 604_800.0  # of a simulated run


@app.command("up", epilog="Example:  farhop up --topology three-regions --profile a100 --replicas 2 --speedup 10")
def run_up(
    topology: Annotated[
        str,
        typer.Option("--topology", "-t", metavar="FILE|NAME", help="A topology file, or a ready-made world."),
    ] = "three-regions",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="REGION=URL",
            help="Use an engine of yours in this region; may be repeated. Regions not named have emulated ones.",
        ),
    ] = None,
    etcd: Annotated[
        str | None, typer.Option("--etcd", metavar="HOST:PORT", help="Use an etcd of yours. Default: start one.")
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="GPU", help="The GPU to emulate: l4, a100 or h100.")
    ] = "a100",
    replicas: Annotated[
        int, typer.Option("--replicas", metavar="N", min=1, max=64, help="Emulated engines per region.")
    ] = 2,
    speedup: Annotated[
        float, typer.Option("--speedup", metavar="FACTOR", help="How many times faster than real GPUs and wires.")
    ] = 10.0,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help="The first region's entry; the others get the next ports. 0: any free ones.",
        ),
    ] = 8100,
    model: Annotated[str, typer.Option("--model", help="The served model's name.")] = "llama-3.1-8b",
    world: World = None,
) -> None:
    """Run a whole world here until Ctrl-C: etcd, both tiers, engines."""
    with loading():
        from farhop_cli.up import Options, run

    run(Options(topology, engine or [], etcd, profile, replicas, speedup, port, model, world or WORLD_FILE))


@app.command("demo", epilog="Example:  farhop demo")
def run_demo() -> None:
    """Start the default world, and check what Farhop does, line by line.

    Real processes, real kills; about a minute. Exit code 1 if a check does not hold.
    """
    with loading():
        from farhop_cli.demo import run

    raise typer.Exit(run())


Scenario = Annotated[
    str, typer.Argument(help="A scenario file, or a ready-made one: its topology, GPUs, demand and objective.")
]
Good = Annotated[
    float | None,
    typer.Option(
        "--good",
        metavar="SHARE",
        min=0.01,
        max=1.0,
        help="Share of answers that must be good, 0.01 to 1. Default: the scenario's.",
    ),
]
Ttft = Annotated[
    float | None,
    typer.Option(
        "--ttft", metavar="MS", min=1.0, help="Good: the first token comes within MS. Default: the scenario's."
    ),
]
Tpot = Annotated[
    float | None,
    typer.Option("--tpot", metavar="MS", min=1.0, help="Good: a token takes at most MS. Default: the scenario's."),
]
Simulated = Annotated[
    str | None,
    typer.Option("--for", metavar="DURATION", help="Simulated time, such as 3m; at most 7d. Default: the scenario's."),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        metavar="N",
        min=1,
        max=100,
        help="At most N runs of a fleet. Default: as many as it takes, at most 5.",
    ),
]
Most = Annotated[int, typer.Option("--most", metavar="N", min=1, max=1000, help="At most N replicas in a region.")]
Within = Annotated[str, typer.Option("--within", metavar="DURATION", help="Stop searching after this time.")]
Results = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Keep results here, and continue from earlier ones.")
]


@app.command("plan", epilog="Example:  farhop plan wildchat --good 0.95 --ttft 1500 --for 3m")
def run_plan(
    scenario: Scenario,
    good: Good = None,
    ttft_ms: Ttft = None,
    tpot_ms: Tpot = None,
    length: Simulated = None,
    seeds: Seeds = None,
    most: Most = 64,
    within: Within = "30m",
    out: Results = None,
    as_json: Json = False,
) -> None:
    """Plan capacity: replicas per region, N and N-1, with and without routing between regions.

    By search over simulated runs. Exit code 1 if no fleet within --most is enough, for N or for N-1; 2 if a region
    has too few requests to tell.
    """
    from farhop_cli.plan import Options, run

    for_s = duration_s("--for", length, *RUN_S) if length is not None else None
    within_s = duration_s("--within", within, 1.0)
    raise typer.Exit(run(Options(scenario, good, ttft_ms, tpot_ms, for_s, seeds, most, within_s, out, as_json)))


@app.command("global", epilog="Example:  farhop global --config virginia-global.yaml")
def run_global(config: Config) -> None:
    """Run a global balancer."""
    with loading():
        from global_lb.app.main import run

    run(config)


@app.command("regional", epilog="Example:  farhop regional --config virginia-regional.yaml")
def run_regional(config: Config) -> None:
    """Run a regional balancer."""
    with loading():
        from regional_lb.app.main import run

    run(config)


@app.command("picker", epilog="Example:  farhop picker --config virginia-regional.yaml")
def run_picker(config: Config) -> None:
    """Run a regional balancer that picks endpoints for gateways (Envoy).

    The same process as `farhop regional`; its configuration must have a `picker`.
    """
    with loading():
        from regional_lb.app.main import run

    run(config, picks=True)


@app.command("ask", epilog='Example:  farhop ask "Why is the sky blue?" --from LONDON --tenant eu-only')
def ask(
    prompt: Annotated[str, typer.Argument(help="What to ask. -: standard input.")],
    origin: From = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Ask as this tenant of the running world.")] = None,
    key: Annotated[str | None, typer.Option("--key", envvar="FARHOP_KEY", help="Ask with this API key.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model to ask. Default: the world's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="At most N tokens of answer.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", min=0, max=2, help="Sampling temperature. At 0 the answer cache may answer."
        ),
    ] = None,
    allow: Allow = None,
    completion: Annotated[bool, typer.Option("--completion", help="Use /v1/completions, not chat.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Also show the gaps between tokens.")] = False,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Ask this entry instead of the nearest.")
    ] = None,
    context: Context = None,
    world: World = None,
    as_json: Json = False,
) -> None:
    """Send a request; show its answer, decision and trace."""
    from farhop_cli.ask import Options, run
    from farhop_cli.fleet import world_of

    here = world_of(world, context)
    options = Options(prompt, here, origin, tenant, key, model, max_tokens, temperature, allow, completion, watch, url,
                      as_json)  # fmt: skip
    raise typer.Exit(run(options))


@app.command(
    "check",
    epilog="Example:  farhop check world.yaml paris-global.yaml paris-regional.yaml law.yaml",
    context_settings={"allow_extra_args": True},
)
def check(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE...", help="Topologies, laws and balancers' configurations, or a ready-made world."
        ),
    ],
    no_secrets: Annotated[
        bool,
        typer.Option(
            "--no-secrets", help="Do not fail for keys and certificates that are not on this machine; name them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check maps, laws and configurations, each and together: every error at once.

    A topology without errors is summed up: its regions, and what its law comes to for each tenant. A law, as `farhop
    law get` prints it, is checked for the maps given. A configuration is checked as the balancer does at its start,
    with the topology, certificates and secrets it names, then with the others: one map, keys and TLS that meet. Nothing
    is opened to the network.
    """
    from farhop_cli.check import run

    raise typer.Exit(run([file, *context.args], no_secrets, as_json))


@app.command("healthcheck", epilog="Example:  farhop healthcheck --config virginia-global.yaml --ready")
def healthcheck(
    url: Annotated[str | None, typer.Argument(help="Ask this URL instead, such as an engine's /health.")] = None,
    config: Config = Path("farhop.yaml"),
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it is ready, not only alive.")] = False,
) -> None:
    """Ask the balancer in this container whether it is alive, or ready.

    Exit code 1 if it is not.
    """
    from farhop_cli.healthcheck import run

    raise typer.Exit(run(url, config, ready))


@app.command("hash-key", epilog="Example:  farhop hash-key --generate")
def hash_key(
    key: Annotated[str | None, typer.Argument(help="The key. Default: read from standard input.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make a new key; print it and its hash.")] = False,
    as_json: Json = False,
) -> None:
    """Print the hash that a topology holds of an API key.

    A key given as argument stays in the shell's history: better leave it out, or make one with --generate.
    """
    from farhop_cli.hash_key import run

    raise typer.Exit(run(key, generate, as_json))


certs_app = App(
    help="Make certificates and keys for a fleet.", epilog="Example:  farhop certs init --dir certs", **PLAIN
)
Folder = Annotated[
    Path, typer.Option("--dir", metavar="FOLDER", help="The folder of the authority's files and of new ones.")
]
Domain = Annotated[
    str, typer.Option("--trust-domain", metavar="DOMAIN", help="The trust domain, as in the configurations.")
]
CERTS_FOLDER, TRUST_DOMAIN = Path("certs"), "farhop.internal"


@certs_app.command("init", epilog="Example:  farhop certs init --dir certs")
def certs_init(folder: Folder = CERTS_FOLDER, trust_domain: Domain = TRUST_DOMAIN, dry_run: DryRun = False) -> None:
    """Make an authority for the fleet: ca.pem and ca.key. Nothing is written over."""
    from farhop_cli.certs import init

    raise typer.Exit(init(folder, trust_domain, dry_run=dry_run))


@certs_app.command("issue", epilog="Example:  farhop certs issue regional paris --host 10.1.0.7")
def certs_issue(
    tier: Annotated[str, typer.Argument(help="global, regional, or operator.")],
    region: Annotated[str, typer.Argument(help="The balancer's region, or the operator's name.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="HOST", help="A further name or address in the certificate; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option("--days", metavar="DAYS", min=1, max=825, help="How long it is valid.")] = 90,
    folder: Folder = CERTS_FOLDER,
    trust_domain: Domain = TRUST_DOMAIN,
    dry_run: DryRun = False,
) -> None:
    """Issue a balancer's or an operator's certificate and its key.

    It names the balancer's tier and region, or the operator.
    """
    from farhop_cli.certs import issue

    raise typer.Exit(issue(folder, tier, region, host or [], days, trust_domain, dry_run=dry_run))


@certs_app.command("hop-key", epilog="Example:  farhop certs hop-key --root hop.root --to paris > paris-hop.key")
def certs_hop_key(
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="FILE", help="The fleet's root key. Default: make a new one."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="REGION", help="Print the key with which this region checks tokens.")
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="REGION", help="Print the key with which this region's global balancers sign tokens."
        ),
    ] = None,
    regions: Annotated[
        str,
        typer.Option(
            "--regions",
            metavar="REGIONS",
            help="With --from: the regions that it sends requests to, such as paris,tokyo.",
        ),
    ] = "",
) -> None:
    """Print a hop key.

    Without options a new root; with --root and --to or --from, the key of one region.
    """
    from farhop_cli.certs import hop_key

    raise typer.Exit(hop_key(root, to, of, [name for name in regions.split(",") if name]))
