"""`farhop up`: a whole world on this machine until Ctrl-C, described in a file so that the other commands find it.

Errors that can be known beforehand are reported in one line before anything runs. Invariant: however it ends, every
process it started has ended, and its file is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import typer
import uvloop

import farhop_lab  # noqa: F401  (what it says to gRPC must come before gRPC)
from farhop.store.contract import StoreError
from farhop.store.etcd import EtcdStore
from farhop_cli import context, fleet, live
from farhop_cli.exits import fail
from farhop_cli.tables import show_world
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.world import etcd as lab_etcd
from farhop_lab.world import world_file
from farhop_lab.world.etcd import EtcdLabError
from farhop_lab.world.faults import Control, Faults, LocalWorld
from farhop_lab.world.world import HOST, World, WorldError, WorldSettings, exports_elsewhere
from farhop_lab.world.world_file import WorldFileError
from topology import load as topologies
from topology.problems import TopologyError, quoted

SPEEDUP_MAX = 1000.0
WATCH_S = 0.5


@dataclass(frozen=True)
class Options:
    """The options, as typed."""

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
    """Run the world until it is stopped. Ends the command with one line if it cannot start."""
    settings = checked(options)
    folder = Path(tempfile.mkdtemp(prefix="farhop-up-"))
    try:
        uvloop.run(_run(settings, folder, options.world))
    except (WorldError, TopologyError, EtcdLabError, OSError) as error:
        logs = "" if str(folder) in str(error) else f"; logs are in {folder}"
        fail(f"up: {error}{logs}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


# -- before anything runs


def checked(options: Options) -> WorldSettings:
    """The world to run. Ends the command, naming the option, if it could not start or would conflict with another."""
    if options.profile not in PROFILES:
        fail(f"--profile: {quoted(options.profile)} is unknown; use one of {', '.join(PROFILES)}")
    if not (math.isfinite(options.speedup) and 0.0 < options.speedup <= SPEEDUP_MAX):
        fail(f"--speedup: give a number above 0, at most {SPEEDUP_MAX:g}")
    if not options.model.strip() or not options.model.isprintable():
        fail("--model: give the name of a model")
    engines = engines_of(options.engines)
    regions = _regions(options.topology)
    for region in engines:
        fleet.known(region, regions, f"topology {quoted(options.topology)}")
    _alone(options.world)
    _ports_free(options.port, regions)
    _etcd_there(options.etcd)
    return WorldSettings(
        topology=options.topology,
        model=options.model,
        profile=options.profile,
        replicas=options.replicas,
        speedup=options.speedup,
        engines=engines,
        etcd=options.etcd,
        entry_port=options.port,
    )


def engines_of(given: list[str]) -> dict[str, list[str]]:
    """`--engine` values, REGION=URL, as URLs by region; the regions not named get emulated ones."""
    engines: dict[str, list[str]] = {}
    for value in given:
        region, _, url = value.partition("=")
        if not region or not _is_base(url):
            fail(f"--engine: {quoted(value)} must be REGION=http://host:port; regions not named have emulated engines")
        engines.setdefault(region, []).append(url)
    return engines


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme == "http" and bool(parts.hostname) and port != 0 and url.isprintable() and " " not in url


def _regions(name: str) -> list[str]:
    try:
        return list(
            topologies.load(Path(name) if name.endswith((".yaml", ".yml")) else topologies.shipped(name)).regions
        )
    except TopologyError as error:
        fail(f"--topology: {error}")


def _alone(described: Path) -> None:
    try:
        running = world_file.read(described)
    except WorldFileError:
        return  # none, or one whose process is gone
    fail(f"a world runs already (process {running.pid}, {described}); end it, or give another --world")


def _ports_free(first: int, regions: list[str]) -> None:
    """The entries' ports, from the first on. A port that is taken later is reported by its process."""
    for port, region in enumerate(regions, first) if first else ():
        if port > 65535:
            fail(f"--port: {first} leaves no port for {region}; give a lower one")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                fail(f"--port: {port}, for {region}, cannot be used: {error.strerror}; give another, or 0 for any")


def _etcd_there(endpoint: str | None) -> None:
    if endpoint is None:
        try:
            lab_etcd.find_binary()
        except EtcdLabError as error:
            fail(f"up: {error}")
        return

    async def knock() -> None:
        store = EtcdStore(fleet.settings(endpoint), Random())
        try:
            await store.open()
        finally:
            await store.close()

    try:
        asyncio.run(knock())
    except StoreError as error:
        fail(f"--etcd: {error}")


# -- the world


async def _run(settings: WorldSettings, folder: Path, described: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.Event()
    world = asyncio.create_task(_serve(settings, folder, described, stop, serving))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((world, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not world.done() and not serving.is_set():
        world.cancel()  # stopped while still starting: what is up is stopped in order
    try:
        await world
    except asyncio.CancelledError:
        typer.echo("stopped before it was up", err=True)


async def _serve(
    settings: WorldSettings, folder: Path, described: Path, stop: asyncio.Event, serving: asyncio.Event
) -> None:
    typer.echo("starting etcd, engines and balancers ...", err=True)
    async with World(settings, folder) as world:
        serving.set()
        control = Control(Faults(LocalWorld(world), lambda text: typer.echo(text, err=True)))
        await control.start(HOST)
        description = world.describe(os.getpid(), (control.url, control.token))
        await asyncio.to_thread(world_file.write, described, description)
        named, current = await asyncio.to_thread(_named, described)
        try:
            show_world(description)
            if named != current:
                remedy = f"farhop context use {named}, or --context {named}"
                typer.echo(f"commands are for context {current}; for this world: {remedy}", err=True)
            if elsewhere := exports_elsewhere(os.environ):
                typer.echo(f"spans go to {elsewhere}, as OTEL_* says: `farhop ask` shows no traces here.", err=True)
            typer.echo("Ctrl-C ends it, and leaves nothing behind.", err=True)
            watching = asyncio.create_task(_watch(world, stop))
            try:
                await live.follow(description, stop)
            finally:
                watching.cancel()
            typer.echo("stopping ...", err=True)
        finally:
            await control.close()
            await asyncio.to_thread(described.unlink, missing_ok=True)
            with contextlib.suppress(typer.Exit):  # which it printed
                await asyncio.to_thread(context.world_ended, named, described)


def _named(described: Path) -> tuple[str, str]:
    """The world's context, and the current one. A world runs without one: if the file cannot be written, that is a
    warning.
    """
    try:
        return context.world_began(described)
    except typer.Exit:
        return "", ""


async def _watch(world: World, stop: asyncio.Event) -> None:
    """Report a process of the world that ends unasked."""
    reported: set[str] = set()
    while not stop.is_set():
        ended = world.ended()
        for name, how in ended.items():
            if name not in reported:
                typer.echo(f"{name} {how}", err=True)
        reported = set(ended)  # a restarted process may end again
        await asyncio.sleep(WATCH_S)
