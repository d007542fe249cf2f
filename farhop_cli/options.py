"""The options that many commands share, and their lengths of time. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farhop_cli.exits import fail
from farhop_lab.world import world_file
from farhop_lab.world.world_file import ENVIRONMENT

if TYPE_CHECKING:
    from farhop_cli.fleet import Fleet

WORLD_FILE = world_file.WORLD_FILE
PLAIN: dict[str, Any] = {
    "add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False, "rich_markup_mode": None,
}  # fmt: skip

World = Annotated[
    Path | None,
    typer.Option(
        "--world", metavar="FILE", envvar=ENVIRONMENT, help="File of the running world, written by `farhop up`."
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="The fleet's context (`farhop context list`). Default: FARHOP_CONTEXT, or the current one.",
    ),
]
Admin = Annotated[
    list[str] | None,
    typer.Option("--admin", metavar="URL", help="Ask this admin port instead of those found in etcd; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="A global balancer's configuration: use its etcd, law and admin port."
    ),
]
Etcd = Annotated[
    str | None,
    typer.Option(
        "--etcd",
        metavar="HOST:PORT",
        help="An etcd without TLS; with --context, instead of the context's etcd.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="PLACE", help="Where the client is: a region, a city or LAT,LON. Default: the first region."
    ),
]
Allow = Annotated[
    str | None, typer.Option("--allow", metavar="PLACES", help="Narrow the request to these places, such as eu,jp.")
]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, kept with the change.")]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key", metavar="TENANT=env:NAME|file:PATH", help="The API key of a tenant's canaries; may be repeated."
    ),
]
Drills = Annotated[Path | None, typer.Option("--folder", metavar="FOLDER", help="A folder with more drills.")]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where reports of drills are written.")]
OUT = Path(".farhop/drills")
By = Annotated[str | None, typer.Option("--by", metavar="WHO", help="Who makes the change. Default: user@host.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and show the change, and write nothing.")]
Length = Annotated[
    str, typer.Option("--for", metavar="DURATION", help="For how long, such as 90s, 30m, 2h; at most 7d.")
]


# The fleet's options, for every command that is for one.
FLEET: dict[str, tuple[Any, Any]] = {
    "context": (Context, None), "config": (Config, None), "etcd": (Etcd, None), "admin": (Admin, None),
    "world": (World, None),
}  # fmt: skip


@dataclass(frozen=True)
class FleetOptions:
    """The fleet that a command is for, and how it is to run: the options that all of them share."""

    world: Path | None = None
    config: Path | None = None
    etcd: str | None = None
    as_json: bool = False
    dry_run: bool = False
    context: str | None = None
    admin: list[str] | None = None

    def fleet(self, region: str = "") -> Fleet:
        """The fleet. Ends the command if there is none, or if its topology does not know the region."""
        from farhop_cli import fleet  # help does not need it

        found = fleet.find(self.world, self.config, self.etcd, self.context, self.admin or ())
        if region and found.topology is not None:
            fleet.known(region, found.topology.regions, f'topology "{found.topology.name}"')
        return found


def regions() -> list[str]:
    """The regions of the world that runs here, for the shell's completion."""
    try:
        return list(world_file.read(Path(os.environ.get(ENVIRONMENT) or WORLD_FILE)).regions)
    except world_file.WorldFileError:
        return []


FOREVER_S = float("inf")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


def duration_s(option: str, text: str, least_s: float = 0.0, most_s: float = FOREVER_S) -> float:
    """Seconds in `90s`, `30m`, `2h`, `1d`. Ends the command, naming the option, for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        fail(f"{option}: {text[:40]!r} is no duration; give one such as 90s, 30m or 2h")
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if not least_s <= seconds <= most_s:
        fail(f"{option}: give {duration(least_s)} {f'to {duration(most_s)}' if most_s < FOREVER_S else 'or more'}")
    return seconds


def duration(seconds: float) -> str:
    """A length of time as the options take it, in the largest unit that needs no fraction."""
    unit, size = next((u, n) for u, n in reversed(_UNITS_S.items()) if seconds % n == 0 or n == 1)
    return f"{seconds / size:g}{unit if seconds else 's'}"
