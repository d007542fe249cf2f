"""`farhop anycast`: runs an announcer, or shows what all of them announce. Only declares the commands and their
options, and prints one table."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farhop_cli.commands.wiring import verb
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, DryRun, FleetOptions

if TYPE_CHECKING:
    from entry_anycast.app.config import Bird
    from farhop.store.contract import Store
    from farhop.store.documents.announce import AnnounceReport

app = App(
    help="Announce an entry's prefixes by BGP while it is ready, and show the state.",
    epilog="Example:  farhop anycast run --config tokyo-anycast.yaml    then:  farhop anycast status",
    **PLAIN,
)
Config = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", envvar="FARHOP_CONFIG", help="Configuration file (YAML).")
]
CONFIG = Path("farhop.yaml")


@app.command("run", epilog="Example:  farhop anycast run --config tokyo-anycast.yaml")
def run(config: Config = CONFIG) -> None:
    """Announce an entry's prefixes while it is ready.

    Until SIGTERM: then drain, withdraw, and end.
    """
    from entry_anycast.app.main import run as run_announcer

    run_announcer(config)


@app.command("withdraw", epilog="Example:  farhop anycast withdraw --config tokyo-anycast.yaml")
def withdraw(config: Config = CONFIG, dry_run: DryRun = False) -> None:
    """Withdraw what a dead announcer left.

    For a service manager, after an announcer died: empties the file that BIRD includes, and has BIRD read it. ExaBGP
    ends with its announcer and needs no withdrawal. Exit code 1 if BIRD did not take it.
    """
    from entry_anycast.app.config import AnycastConfig
    from entry_anycast.speakers.watchdog import withdraw_bird
    from farhop.config import ConfigError, load
    from farhop_cli import show
    from farhop_cli.exits import NEGATIVE, fail, first_of

    try:
        bird = load(AnycastConfig, config).speaker.bird
        if dry_run:
            show.line(f"{show.DRY}{_would_withdraw(bird)}")
        elif bird is not None and withdraw_bird(bird.socket, bird.file) != 0:
            fail("bird did not take its configuration; `birdc configure check` says why", NEGATIVE)
    except ConfigError as error:
        fail(first_of(error))
    except OSError as error:
        fail(f"{bird.socket if bird is not None else ''}: {error.strerror or error}", NEGATIVE)


def _would_withdraw(bird: Bird | None) -> str:
    """Raises OSError where BIRD does not listen, or its file is there and cannot be read."""
    if bird is None:
        return "nothing is left to withdraw: its speaker is no BIRD, and ends with its announcer"
    with socket.socket(socket.AF_UNIX) as way:
        way.settimeout(1.0)
        way.connect(bird.socket)
    file = Path(bird.file)
    holds = file.read_text() if file.exists() else ""
    routes = [line.strip() for line in holds.splitlines() if line.strip().startswith("route ")]
    if not routes:
        return f"{file} announces nothing; BIRD at {bird.socket} would read it again"
    return f"{file} would be emptied, and BIRD at {bird.socket} read it: {' '.join(routes)}"


@verb(app, "status", "farhop anycast status")
def status(
    entry: Annotated[
        str, typer.Argument(metavar="ENTRY", help="Only this entry. Default: all.", show_default=False)
    ] = "",
    *,
    fleet_options: FleetOptions,
) -> int:
    """Show what announcers announce, and why.

    Beside it what they should announce. Exit code 1 if these differ for longer than a moment, or no entry is announced.
    """
    from farhop_cli import fleet, setting

    here = fleet_options.fleet()
    if entry and here.topology is not None:
        fleet.known(entry, here.topology.entries, f'topology "{here.topology.name}"', "entry")

    async def work(store: Store) -> int:
        return _print(await _reports(store, entry), fleet_options)

    return setting.with_store(here, work)


async def _reports(store: Store, entry: str) -> list[AnnounceReport]:
    from farhop_cli import fleet
    from farhop_cli.exits import warn

    found, trouble = await fleet.announcers(store)
    for why in trouble:
        warn(why)
    return [one for one in found if not entry or one.entry == entry]


def _print(reports: list[AnnounceReport], fleet_options: FleetOptions) -> int:
    import msgspec

    from farhop_cli import show, status
    from farhop_cli.exits import NEGATIVE

    good = any(one.healthy for one in reports) and not any(one.differs for one in reports)
    if fleet_options.as_json:
        show.json({"announcers": [msgspec.to_builtins(one) for one in reports]})
    elif not reports:
        show.line("nothing announces an entry: no announcer reports in etcd")
    else:
        show.table("announcers", status.ANNOUNCERS, [status.announcer(one) for one in reports])
    return 0 if good else NEGATIVE
