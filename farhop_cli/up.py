"""`farhop up`: a whole world on this machine until Ctrl-C, described in a file so that the other commands find it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import typer

from farhop_cli.exits import fail
from farhop_cli.tables import show_world
from farhop_lab import world_file
from farhop_lab.engine.profiles import PROFILES
from farhop_lab.etcd import EtcdLabError
from farhop_lab.world import World, WorldError, WorldSettings
from topology.problems import TopologyError


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed."""

    topology: str
    engines: list[str]
    etcd: str | None
    profile: str
    replicas: int
    speedup: float
    port: int
    model: str
    world: Path


def run(options: Options) -> None:
    """Run the world asked for until told to stop."""
    engines, _ = engines_of(options.engines)
    up(
        WorldSettings(
            topology=options.topology,
            model=options.model,
            profile=options.profile,
            replicas=options.replicas,
            speedup=options.speedup,
            engines=engines,
            etcd=options.etcd,
            entry_port=options.port,
        ),
        options.world,
    )


def up(settings: WorldSettings, described: Path) -> None:
    """Run the world. Ends the command with one line if it cannot come up."""
    if settings.profile not in PROFILES:
        fail(f"--profile: {settings.profile!r} is unknown; use one of {', '.join(PROFILES)}")
    folder = Path(tempfile.mkdtemp(prefix="farhop-up-"))
    try:
        asyncio.run(_run(settings, folder, described))
    except (WorldError, TopologyError, EtcdLabError, OSError) as error:
        fail(f"up: {error}; logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(settings: WorldSettings, folder: Path, described: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(_serve(settings, folder, described, stop))
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting not in done:
        # Asked to stop while still starting: unwind what is up, in order.
        if not described.exists():
            starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    else:
        stopping.cancel()
        starting.result()


async def _serve(settings: WorldSettings, folder: Path, described: Path, stop: asyncio.Event) -> None:
    typer.echo("starting etcd, engines and balancers ...", err=True)
    async with World(settings, folder) as world:
        told = world.describe(os.getpid())
        world_file.write(described, told)
        try:
            show_world(told)
            typer.echo("Ctrl-C ends it, and leaves nothing behind.", err=True)
            await stop.wait()
            typer.echo("stopping ...", err=True)
        finally:
            described.unlink(missing_ok=True)


def engines_of(given: list[str]) -> tuple[dict[str, list[str]], bool]:
    """`--engine` values, `emulated` or REGION=URL, as URLs by region, and whether emulated ones are wanted."""
    engines: dict[str, list[str]] = {}
    for value in given:
        if value == "emulated":
            continue
        region, _, url = value.partition("=")
        if not region or not url.startswith("http://"):
            fail(f"--engine: {value!r} must be `emulated` or REGION=http://host:port")
        engines.setdefault(region, []).append(url)
    return engines, not engines or "emulated" in given
