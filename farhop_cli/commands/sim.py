"""Commands of the simulator: `farhop sim SCENARIO`, and the import of a log as a scenario.

Only declares the commands and their options: other modules are imported when a command runs, so that help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, Json, duration_s

RUN_S = 1.0, 604_800.0  # of a simulated run


class RunsByDefault(TyperGroup):
    """A word that is no subcommand is a scenario: `farhop sim arena` is `farhop sim run arena`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = App(
    help="Simulate a scenario in virtual time, one router beside another.",
    epilog="Example:  farhop sim arena --policy farhop,skywalker --seeds 3\n\n"
    "`farhop sim SCENARIO` is `farhop sim run SCENARIO`, which has the options.",
    cls=RunsByDefault,
    **PLAIN,
)


@app.command("run", epilog="Example:  farhop sim run arena --policy farhop,skywalker --seeds 3 --out results/arena")
def run(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of a ready-made one.")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="ROUTERS", help="Routers to compare, such as farhop,skywalker. Default: the scenario's."
        ),
    ] = "",
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", metavar="N", min=1, max=1000, help="How many seeds. Default: the scenario's."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="SEED", min=0, help="Only this seed.")] = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="Simulated time, such as 10m; at most 7d. Default: the scenario's."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Keep results here, and continue from earlier ones.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=256, help="How many processes. Default: as many as CPUs."),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="With --out: write pictures, too.")] = True,
    as_json: Json = False,
) -> None:
    """Simulate a scenario in virtual time, one router beside another.

    The routers named `farhop` are the shipped machines. Exit code 1 if anything happened that must never happen.
    """
    from farhop_cli import sim

    for_s = duration_s("--for", length, *RUN_S) if length is not None else None
    raise typer.Exit(sim.run(sim.Options(scenario, policy, seeds, seed, for_s, out, workers, plots, as_json)))


@app.command("import", epilog="Example:  farhop sim import requests.jsonl --regions tokyo,virginia --out mine.yaml")
def import_log(
    log: Annotated[Path, typer.Argument(help="A request log: JSON lines, one array, or CSV; plain or gzipped.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The scenario to write; its trace goes beside it.")
    ],
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME=PATH", help="Where a field is, such as at_s=meta.when; may be repeated."),
    ] = None,
    regions: Annotated[
        str,
        typer.Option(
            "--regions",
            metavar="REGIONS",
            help="The regions that have replicas; requests that name no region come in there. Default: the topology's.",
        ),
    ] = "",
    topology: Annotated[
        str, typer.Option("--topology", "-t", metavar="FILE|NAME", help="A topology file or a ready-made world.")
    ] = ("three-regions"),
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens", metavar="N", min=1, max=1_000_000, help="Tokens of each block that hash_ids names."
        ),
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out lines that cannot be read, and count them.")] = False,
    as_json: Json = False,
) -> None:
    """Make a scenario of a request log of your own.

    It needs times and lengths in tokens; it also takes sessions, regions and how long answers took, if they are there.
    Fields are looked for by the names that OpenAI, gateways, SDKs and OpenTelemetry use. Texts are neither needed nor
    kept.
    """
    from farhop_cli import sim_import

    fields = tuple(field or ())
    options = sim_import.Options(log, out, fields, regions, topology, skip, as_json, block_tokens or 0)
    raise typer.Exit(sim_import.run(options))
