"""The `farhop` command: one line per subcommand's wiring; what they do lives in the rooms they call.

Errors are one line on stderr and a non-zero exit: 2 for bad usage, configuration or surroundings, 1 for an answer that
is negative (refused, down, a check that failed). Rooms are imported when their command runs, so that help is quick.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farhop_lab.world_file import ENVIRONMENT, WORLD_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(
    help="Farhop: routes LLM requests to the right region and the right replica, lawfully.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (YAML).")]
World = Annotated[
    Path, typer.Option("--world", envvar=ENVIRONMENT, help="File of the running world, written by `farhop up`.")
]
From = Annotated[
    str | None,
    typer.Option("--from", help="Where the client is: a region, a city or LAT,LON. Default: the first region."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
FleetConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="A global balancer's configuration: its etcd, its law, its admin port."),
]
FleetEtcd = Annotated[str | None, typer.Option("--etcd", help="HOST:PORT of an etcd, where there is nothing else.")]
Why = Annotated[str | None, typer.Option("--why", help="The reason, for whoever asks; needed to set something.")]
Author = Annotated[str | None, typer.Option("--author", help="Who says so. Default: user@host.")]
Allow = Annotated[str | None, typer.Option("--allow", help="Narrow the request to these places, such as eu,jp.")]


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """For the rooms of a process that runs on: to load them makes no garbage, and to look for some takes a tenth."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@app.command("up", epilog="Example:  farhop up --topology three-regions --profile a100 --replicas 2 --speedup 10")
def run_up(
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="A topology file, or the name of a ready-made world.")
    ] = "three-regions",
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="`emulated`, or REGION=URL of an engine of yours; repeat for several."),
    ] = None,
    etcd: Annotated[str | None, typer.Option("--etcd", help="HOST:PORT of an etcd of yours; else one is run.")] = None,
    profile: Annotated[str, typer.Option("--profile", help="The GPU to emulate: l4, a100 or h100.")] = "a100",
    replicas: Annotated[int, typer.Option("--replicas", min=1, max=64, help="Emulated engines per region.")] = 2,
    speedup: Annotated[float, typer.Option("--speedup", help="How many times faster than real GPUs and wires.")] = 10.0,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The first region's entry; the others follow. 0: any.")
    ] = 8100,
    model: Annotated[str, typer.Option("--model", help="Name of the model served.")] = "llama-3.1-8b",
    world: World = WORLD_FILE,
) -> None:
    """Run a whole world here until Ctrl-C: etcd, both tiers, engines."""
    with _loading():
        from farhop_cli.up import Options, run

    run(Options(topology, engine or [], etcd, profile, replicas, speedup, port, model, world))


@app.command("demo", epilog="Example:  farhop demo")
def run_demo() -> None:
    """Boot the default world and check, a line each, what Farhop is for.

    Real processes, real kills; about a minute. Exit code 1 if a check does not hold.
    """
    with _loading():
        from farhop_cli.demo import run

    raise typer.Exit(run())


@app.command("bench", epilog="Example:  farhop bench relay --quick --only regional,envoy")
def run_bench(
    what: Annotated[str, typer.Argument(help="What to measure: decide, relay, soak, scrape, hits or trie.")] = "decide",
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="relay, trie: roughly, within a minute.")] = False,
    only: Annotated[str, typer.Option("--only", help="relay: only proxies whose names hold one of these words.")] = "",
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, max=20, help="relay: windows per figure; default 3.")
    ] = None,
    streams: Annotated[
        int | None, typer.Option("--streams", min=0, max=10_000, help="relay: idle streams held open; default 1000.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", min=1000, max=100_000_000, help="soak: how many requests.")
    ] = 1_000_000,
    tls: Annotated[bool, typer.Option("--tls", help="relay: clients speak TLS to the proxies that can.")] = False,
) -> None:
    """Measure CPU time: of a decision, of a relayed request beside other proxies; and memory over many requests."""
    from farhop_cli.bench import Options, run

    raise typer.Exit(run(what, Options(as_json, quick, only, repeats, streams, requests, tls)))


@app.command("global", epilog="Example:  farhop global --config virginia-global.yaml")
def run_global(config: Config) -> None:
    """Run a global balancer."""
    with _loading():
        from global_lb.main import run

    run(config)


@app.command("regional", epilog="Example:  farhop regional --config virginia-regional.yaml")
def run_regional(config: Config) -> None:
    """Run a regional balancer."""
    with _loading():
        from regional_lb.main import run

    run(config)


@app.command("engine", epilog="Example:  farhop engine --profile l4 --port 8001 --replicas 2 --speedup 10")
def run_engine(
    port: Annotated[list[int] | None, typer.Option("--port", help="Port; repeat for several. 0: any free one.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="The GPU to emulate: l4, a100 or h100.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", help="How many, on consecutive ports.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model served.")] = None,
    speedup: Annotated[float | None, typer.Option("--speedup", help="How many times faster than the GPU.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of what the engine writes.")] = None,
    kv_blocks: Annotated[int | None, typer.Option("--kv-blocks", help="KV cache in blocks of 16 tokens.")] = None,
    mean_output_tokens: Annotated[float | None, typer.Option(help="Mean length of unbounded answers.")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="A LoRA adapter; may be repeated.")] = None,
    max_loras: Annotated[int | None, typer.Option(help="How many adapters fit a batch.")] = None,
    lora_load_ms: Annotated[float | None, typer.Option(help="What loading an adapter takes.")] = None,
    dcgm_port: Annotated[int | None, typer.Option(help="Serve a DCGM exporter's page of these GPUs here.")] = None,
    kv_events_port: Annotated[int | None, typer.Option(help="Publish KV events over ZMQ here.")] = None,
    kv_replay_port: Annotated[int | None, typer.Option(help="Say KV events again here.")] = None,
    kv_events_schema: Annotated[str | None, typer.Option(help="How events are worded: map, or array (old).")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Read prompts by this tokenizer.json.")] = None,
    write_tokenizer: Annotated[Path | None, typer.Option(help="Write one, and a template, into a folder; end.")] = None,
) -> None:
    """Run emulated engines: OpenAI-like servers with a GPU's timing and no GPU.

    `POST /lab/fault {"kind": "stuck", "for_s": 30}` breaks one (oom, fast-500, slow, stuck, dead-green, xid), DELETE
    mends it.
    """
    if write_tokenizer is not None:
        from farhop_lab.engine.tokenizer_file import write

        raise typer.Exit(write(write_tokenizer))
    with _loading():
        from farhop_cli.engine import run

    run({
        "ports": port or [8001], "host": host, "profile": profile, "replicas": replicas, "model": model,
        "speedup": speedup, "seed": seed, "kv_blocks": kv_blocks, "mean_output_tokens": mean_output_tokens,
        "dcgm_port": dcgm_port, "adapters": adapter, "max_loras": max_loras, "lora_load_ms": lora_load_ms,
        "kv_events_port": kv_events_port, "kv_replay_port": kv_replay_port, "kv_events_schema": kv_events_schema,
        "tokenizer": tokenizer,
    })  # fmt: skip


@app.command(epilog='Example:  farhop ask "Why is the sky blue?" --from LONDON --tenant eu-only')
def ask(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    origin: From = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Ask as this tenant of the running world.")] = None,
    key: Annotated[str | None, typer.Option("--key", envvar="FARHOP_KEY", help="Ask with this API key.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Default: the world's.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    allow: Allow = None,
    completion: Annotated[bool, typer.Option("--completion", help="Use /v1/completions, not chat.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Sum up the gaps between tokens.")] = False,
    url: Annotated[str | None, typer.Option("--url", help="Ask this entry, not the nearest.")] = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Send a request; show its answer, decision and trace."""
    from farhop_cli.ask import Options, run

    options = Options(prompt, world, origin, tenant, key, model, max_tokens, allow, completion, watch, url, as_json)
    raise typer.Exit(run(options))


@app.command(epilog="Example:  farhop explain request.json --tenant japan-only --from Paris")
def explain(
    what: Annotated[str, typer.Argument(metavar="REQUEST.json|DECISION-ID", help="A body as for /v1, or an id.")],
    origin: From = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose request it would be.")] = None,
    allow: Allow = None,
    world: World = WORLD_FILE,
    as_json: Json = False,
) -> None:
    """Tell where a request would go, or why one went.

    Nothing is sent to an engine, and only balancers that the tenant's law lets read the request are asked.
    """
    from farhop_cli.explain import Options, run

    raise typer.Exit(run(Options(what, world, origin, tenant, allow, as_json)))


@app.command(epilog="Example:  farhop status --json")
def status(world: World = WORLD_FILE, as_json: Json = False) -> None:
    """Show regions, replicas and queues.

    Each global balancer tells what it sees. Exit code 1 if any region is down.
    """
    from farhop_cli.status import run

    raise typer.Exit(run(world, as_json))


@app.command(epilog='Example:  farhop drain tokyo --for 30m --why "kernel update"')
def drain(
    region: Annotated[str, typer.Argument(help="The region to send no new work to.")],
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever asks.")],
    length: Annotated[str, typer.Option("--for", help="For how long: 90s, 30m, 2h; at most 7d.")] = "1h",
    over: Annotated[str, typer.Option("--over", help="Pace: new work moves away over this time. 0s: at once.")] = "10s",
    author: Annotated[str | None, typer.Option("--author", help="Who says so. Default: user@host.")] = None,
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


@app.command(epilog="Example:  farhop check three-regions")
def check(
    topology: Annotated[str, typer.Argument(help="A topology file, or the name of a ready-made world.")],
    as_json: Json = False,
) -> None:
    """Check a topology: every error at once.

    A topology without errors is summed up: its regions, and what its law comes to for each tenant.
    """
    from farhop_cli.check import run

    raise typer.Exit(run(topology, as_json))


@app.command("hash-key", epilog="Example:  farhop hash-key --generate")
def hash_key(
    key: Annotated[str | None, typer.Argument(help="The key. Left out, it is read from standard input.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make a new key; print it and its hash.")] = False,
    as_json: Json = False,
) -> None:
    """Print the hash that a topology holds of an API key.

    A key given as argument stays in the shell's history: better leave it out, or make one with --generate.
    """
    from farhop_cli.hash_key import run

    raise typer.Exit(run(key, generate, as_json))


def main() -> None:
    """The entry point."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
