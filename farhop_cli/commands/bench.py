"""`farhop bench`: what Farhop costs, how well it routes, and whether it holds.

Only declares the subcommands and their options, with none that a subcommand ignores: the modules beside this folder do
the work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from farhop_cli.exits import fail
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, Json, duration_s

app = App(
    help="Measure what Farhop costs, how well it routes, and whether it holds.",
    epilog="Example:  farhop bench relay --quick --only regional,envoy",
    **PLAIN,
)

Quick = Annotated[bool, typer.Option("--quick", help="Take less time, with less precision.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, max=256, help="How many processes. Default: as many as CPUs."),
]


@app.callback()
def _extras(context: typer.Context) -> None:
    # What some of it needs beyond a balancer's own packages is said in one line. No docstring: it would be the help.
    if find_spec("httptools") is None and "--help" not in sys.argv:
        fail("bench needs httptools: run `pip install 'farhop[lab]'`")
    if threading.current_thread() is threading.main_thread():
        # Some make network namespaces and start processes: they leave none if they are told to end, or lose a terminal.
        for number in (signal.SIGTERM, signal.SIGHUP):
            context.call_on_close(partial(signal.signal, number, signal.signal(number, signal.default_int_handler)))


@app.command("decide", epilog="Example:  farhop bench decide --json")
def decide(as_json: Json = False) -> None:
    """CPU time of a decision."""
    from farhop_cli import measure

    raise typer.Exit(measure.decide(as_json))


@app.command("tenants", epilog="Example:  farhop bench tenants --json")
def tenants(as_json: Json = False) -> None:
    """CPU time of limits, a usage record and an audit entry."""
    from farhop_cli import measure

    raise typer.Exit(measure.tenants(as_json))


@app.command("dns", epilog="Example:  farhop bench dns --networks 500000")
def dns(
    networks: Annotated[
        int, typer.Option("--networks", metavar="N", min=0, max=2_000_000, help="How many client networks are known.")
    ] = 500_000,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=1, max=120, help="How long each server is under load.")
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """CPU time of a DNS answer.

    Beside a blocking echo in Python, NSD and gdnsd. Needs dnsperf. Exit code 1 where it is above 1.6 times the echo's.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.dns(networks, seconds, as_json))


@app.command("anycast", epilog="Example:  farhop bench anycast --repeats 5")
def anycast(
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, max=50, help="How often each event happens at each site.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """How long clients lose an anycast entry that dies.

    Two real sites, one with ExaBGP and one with BIRD, in network namespaces; medians, by what happened. A repeat takes
    100 seconds. Needs root and bird2; exit code 0, with a line, where they are not there.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.anycast(repeats, as_json))


@app.command("upload", epilog="Example:  farhop bench upload --repeats 5")
def upload(
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, max=50, help="How often each is measured.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Round trips of a large prompt over an ocean.

    By what its connection did before, and by what the kernel does after a rest. A repeat takes 20 seconds. Needs root;
    exit code 0, with a line, where that is not there, and 1 where a warm connection takes more than 1.3 round trips.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.upload(repeats, as_json))


@app.command("relay", epilog="Example:  farhop bench relay --quick --only regional,envoy")
def relay(
    quick: Quick = False,
    only: Annotated[
        str,
        typer.Option(
            "--only", metavar="WORDS", help="Only proxies whose names contain one of these, such as regional,envoy."
        ),
    ] = "",
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", min=1, max=20, help="Windows for each figure. Default: 3.")
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(
            "--streams", metavar="N", min=0, max=10_000, help="How many idle streams are held open. Default: 1000."
        ),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Clients speak TLS to the proxies that can.")] = False,
    as_json: Json = False,
) -> None:
    """CPU time of a relayed request and chunk, beside other proxies.

    Exit code 1 if one of them is in trouble.
    """
    from farhop_cli import measure

    raise typer.Exit(
        measure.relay(quick=quick, only=only, repeats=repeats, streams=streams, tls=tls, as_json=as_json)
    )  # fmt: skip


@app.command("picker", epilog="Example:  farhop bench picker --quick")
def picker(quick: Quick = False, as_json: Json = False) -> None:
    """CPU time of a request that Envoy has picked for.

    Beside it stands a picker that decides nothing.

    Exit code 1 beyond its bound, or if a request was answered wrongly; 0, with a line, where there is no Envoy.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.picker(quick, as_json))


@app.command("soak", epilog="Example:  farhop bench soak --requests 1000000")
def soak(
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", min=1000, max=100_000_000, help="How many requests.")
    ] = 1_000_000,
    as_json: Json = False,
) -> None:
    """Memory of the regional tier over many requests.

    Exit code 1 if one was answered wrongly.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.soak(requests, as_json))


@app.command("hostile", epilog="Example:  farhop bench hostile --quick")
def hostile(quick: Quick = False, as_json: Json = False) -> None:
    """What the worst bodies cost, beside a plain one.

    Exit code 1 beyond its bounds.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.hostile(quick, as_json))


@app.command("scrape", epilog="Example:  farhop bench scrape")
def scrape(as_json: Json = False) -> None:
    """CPU time of reading engines' metrics."""
    from farhop_cli import measure

    raise typer.Exit(measure.scrape(as_json))


@app.command("intake", epilog="Example:  farhop bench intake")
def intake(as_json: Json = False) -> None:
    """CPU time of regions' reports at a global balancer.

    Exit code 1 beyond its bound.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.intake(as_json))


@app.command("hits", epilog="Example:  farhop bench hits")
def hits(as_json: Json = False) -> None:
    """How well it is known what engines have cached."""
    from farhop_cli import measure

    raise typer.Exit(measure.hits(as_json))


@app.command("trie", epilog="Example:  farhop bench trie --quick")
def trie(quick: Quick = False, as_json: Json = False) -> None:
    """CPU time and memory of the prefix trie."""
    from farhop_cli import measure

    raise typer.Exit(measure.trie(quick, as_json))


@app.command("console", epilog="Example:  farhop bench console --seconds 30")
def console(
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="SECONDS", min=5, max=60, help="The length of each of the three windows."),
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """CPU time and bytes of the console, of its server and page.

    The server at 12 regions of 20 replicas, without and with 50 viewers; a frame of the page at 60 regions in headless
    Chromium, where that, chromedriver and selenium are installed. Exit code 1 where a bound is missed.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.console(seconds, as_json))


@app.command(
    "ttft", epilog="Example:  farhop bench ttft    or:  --engine http://127.0.0.1:8000 --tokenizer tokenizer.json"
)
def ttft(
    quick: Quick = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", metavar="N", min=5, max=10_000, help="How many rounds. Default: 60, with --quick fewer."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="URL", help="A real engine, http://host:port. Default: one that answers at once."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="With --engine: its model. Default: the first.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FILE", exists=True, dir_okay=False, help="With --engine: its tokenizer.json."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What each tier adds to the time to the first token."""
    from farhop_cli import measure
    from farhop_lab.bench import ttft as ttfts

    if engine is None:
        _only_for("the benchmark's own engine", ("--model", model), ("--tokenizer", tokenizer))
    real = ttfts.Engine(engine, model or "", tokenizer) if engine is not None else None
    most = rounds if rounds is not None else ttfts.QUICK_ROUNDS if quick else ttfts.ROUNDS
    raise typer.Exit(measure.ttft(most, real, as_json))


@app.command("sim", epilog="Example:  farhop bench sim --quick")
def sim(quick: Quick = False, as_json: Json = False) -> None:
    """Requests a second of CPU in the simulator.

    Exit code 1 if a world broke its rules.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.sim(quick, as_json))


@app.command("routing", epilog="Example:  farhop bench routing --quick --seeds 3 --out results/routing")
def routing(
    quick: Quick = False,
    only: Annotated[
        str, typer.Option("--only", metavar="SCENARIOS", help="Only these scenarios, such as arena,push.")
    ] = "",
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, max=20, help="How many seeds. Default: by scenario.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Keep results here, and continue from earlier ones.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the tables to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Farhop beside other routers, simulated on the same work.

    Exit code 1 if anything happened that must never happen.
    """
    from farhop_cli.routing import run

    raise typer.Exit(run(only, quick, seeds, out, markdown, as_json))


@app.command("worlds", epilog="Example:  farhop bench worlds --out results --markdown worlds.md    or:  --only 17")
def worlds(
    kinds: Annotated[
        Literal["usual", "special"],
        typer.Option(
            "--kinds",
            help="usual: work of common kinds and from traces. special: fifteen kinds with one difficulty each.",
        ),
    ] = "usual",
    count: Annotated[int, typer.Option("--worlds", metavar="N", min=1, max=10_000, help="How many.")] = 200,
    only: Annotated[
        int | None, typer.Option("--only", metavar="N", min=0, help="Only the world of this number.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="SEED", min=0, help="What the worlds are drawn from.")] = 1,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", metavar="N", min=4, max=40, help="How many seeds of each world; half of them choose its rival."
        ),
    ] = 8,
    length: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="The window that is measured, 5s to 10m.")
    ] = "20s",
    traces: Annotated[
        Path | None,
        typer.Option("--traces", metavar="FOLDER", exists=True, file_okay=False, help="Draw from these traces, too."),
    ] = None,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Keep results here, and continue from earlier ones.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Also write the tables into this page, between its markers if it has them.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Farhop beside the best rival in worlds drawn at random.

    Exit code 1 where it lost more than one in twenty.
    """
    from farhop_cli.worlds import run

    window_s = duration_s("--for", length, 5.0, 600.0)
    numbers = range(count) if only is None else range(only, only + 1)
    raise typer.Exit(run(kinds, numbers, seed, seeds, window_s, traces, workers, out, markdown, as_json))


@app.command("fidelity", epilog="Example:  farhop bench fidelity --quick")
def fidelity(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of a ready-made one.")] = "fidelity",
    speedup: Annotated[
        float,
        typer.Option(
            "--speedup",
            metavar="FACTOR",
            min=0.1,
            max=100.0,
            help="How many times faster than real time the live world runs.",
        ),
    ] = 1.0,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """A simulated run beside a live one.

    Exit code 1 if they differ.
    """
    from farhop_cli.fidelity import run

    raise typer.Exit(run(scenario, speedup, quick, as_json))


@app.command("chaos", epilog="Example:  farhop bench chaos --seeds 50 --out found    or:  --live --for 10m")
def chaos(
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, max=1_000_000, help="How many schedules. Default: 200.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="SEED", min=0, help="The first schedule's seed. Default: 0.")
    ] = None,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Keep the shortest failing schedules here.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Only this schedule, from a file that --out kept."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Use real processes instead of virtual time.")] = False,
    length: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="With --live: for how long faults are made, 30s to 1d. Default: 10m."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Break worlds at random, and look what is left.

    Exit code 1 if anything is left behind.
    """
    from farhop_cli import chaos as chaos_runs

    if live:
        _only_for("--live", ("--seeds", seeds), ("--workers", workers), ("--out", out), ("--replay", replay))
        for_s = duration_s("--for", length or "10m", 30.0, 86_400.0)
        raise typer.Exit(chaos_runs.live(seed or 0, for_s, as_json))
    _only_for("a run in virtual time", ("--for", length))
    if replay is not None:
        _only_for("--replay", ("--seeds", seeds), ("--seed", seed), ("--workers", workers))
        raise typer.Exit(chaos_runs.replayed(replay, out, as_json))
    raise typer.Exit(chaos_runs.hunted(200 if seeds is None else seeds, seed or 0, workers, out, as_json))


def _only_for(way: str, *given: tuple[str, object]) -> None:
    """End the command for an option that would be ignored."""
    for option, value in given:
        if value is not None:
            fail(f"{option}: it means nothing for {way}; leave it out")


@app.command("resume", epilog="Example:  farhop bench resume --interruptions 10000")
def resume(
    interruptions: Annotated[
        int, typer.Option("--interruptions", metavar="N", min=1, max=10**6, help="How many.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", metavar="SEED", min=0, help="The seed of all random choices.")] = 1,
    cost: Annotated[bool, typer.Option("--cost", help="Measure only what it costs a chunk.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Use engines that report no token ids: resume by text.")] = False,
    kills: Annotated[
        int,
        typer.Option(
            "--kill-region", min=0, max=1000, metavar="N", help="Only kill a region under 48 streams, N times."
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Interrupt streams, and compare them with whole ones.

    Real tiers before emulated engines: connections cut, processes killed. Exit code 1 if a byte was lost or doubled.
    --kill-region N: a region's balancer and engines, N times; exit code 1 if under 99 % of its streams end whole.
    --cost: CPU time of a chunk with and without what a stream must keep to go on elsewhere.
    """
    from farhop_cli import measure

    if cost:
        raise typer.Exit(measure.resume_cost(as_json))
    if kills:
        raise typer.Exit(measure.resume_kills(kills, text, as_json))
    raise typer.Exit(measure.resume(interruptions, seed, text, as_json))


@app.command("law", epilog="Example:  farhop bench law --worlds 1000")
def law(
    worlds: Annotated[int, typer.Option("--worlds", metavar="N", min=1, max=10**9, help="How many.")] = 10_000,
    first: Annotated[int, typer.Option("--first", metavar="N", min=0, help="The number of the first world.")] = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Play random laws, hubs and restarts.

    Exit code 1 if a prompt is where it may not be.
    """
    from farhop_cli import measure

    raise typer.Exit(measure.law(worlds, first, workers or os.cpu_count() or 1, as_json))
