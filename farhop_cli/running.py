"""The world that runs here, for commands that use it: its balancers, its law, the caller.

Never sends a request. Any error ends the command with one line.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from farhop.identity.api_keys import bearer, digest
from farhop_cli.access import NO_ACCESS, Access, AdminError
from farhop_cli.exits import fail, listed
from farhop_lab.world import world_file
from farhop_lab.world.world_file import RegionFile, WorldFile, WorldFileError
from topology import geo, law_document
from topology import load as topologies
from topology.law import Law, Narrow, Scope, narrowing
from topology.model import Topology
from topology.problems import TopologyError, quoted


@dataclass(frozen=True)
class Running:
    """A running world and its law."""

    file: WorldFile
    topology: Topology
    law: Law

    def region_of(self, entry: str) -> str | None:
        """The region whose entry an origin is."""
        from farhop_lab.world import client

        return next((name for name, one in self.file.regions.items() if client.origin(one.entry) == entry), None)

    def nearest(self, place: str | None) -> list[str]:
        """The running regions, nearest to a place first; without one, in the world's order."""
        return nearest(self.topology, list(self.file.regions), place)

    def record_barred(self, caller: Caller, region: str) -> str | None:
        """The clause by which a region may keep no record of the caller's requests; None if it may, or if it is
        unknown.
        """
        if caller.tenant is None:
            return None
        return self.law.verdict(caller.tenant, "", Scope.LOGGING, caller.narrow).why_not(region)


@dataclass(frozen=True)
class Caller:
    """The caller, as far as known here."""

    tenant: str | None
    key: str | None
    narrow: Narrow = ()


def nearest(topology: Topology, names: list[str], place: str | None) -> list[str]:
    """Regions, nearest to a place first; without one, in the given order."""
    if place is None:
        return names
    known = [topology.regions[name] for name in names if name in topology.regions]
    return [region.name for region in geo.by_distance(known, *_locate(topology, place))]


def _locate(topology: Topology, place: str) -> tuple[float, float]:
    region = topology.regions.get(place) or topology.regions.get(place.lower())
    if region is not None:
        return region.latitude, region.longitude
    point = geo.locate(place)
    if point is None:
        names = {name.lower(): name for name in (*geo.cities(), *topology.regions)}
        close = difflib.get_close_matches(place[:64].lower(), names, n=1, cutoff=0.6)
        remedy = f"did you mean {quoted(names[close[0]])}?" if close else "give LAT,LON, such as 51.5,-0.1"
        fail(f"--from: no region or city called {quoted(place)}; {remedy}")
    return point


def open_world(path: Path) -> Running:
    """The world described at `path`. Ends the command if there is none."""
    try:
        file = world_file.read(path)
        topology = topologies.load(file.topology)
    except WorldFileError as error:
        fail(str(error))
    except TopologyError as error:
        fail(f"the world's topology cannot be read: {error}")
    unknown = sorted(set(file.regions) - set(topology.regions))
    if unknown:
        fail(f"{path}: region {unknown[0]!r} is not in {file.topology}; run `farhop up` again")
    return Running(file, topology, Law(topology))


def ruled(running: Running) -> Running:
    """The same world under the law of its global balancers."""
    topology = under_law(running.topology, [one.global_admin for one in running.file.regions.values()])
    return running if topology is running.topology else Running(running.file, topology, Law(topology))


def under_law(topology: Topology, urls: Iterable[str], access: Access = NO_ACCESS) -> Topology:
    """The topology under the law of these global balancers: the newest that one reports. Unchanged if none does.

    The law in etcd alone would not do: it does not bind a balancer that has not received it.
    """
    newer = [
        one for one in asyncio.run(_laws(topology, urls, access)) if one is not None and one.epoch > topology.epoch
    ]
    return max(newer, key=lambda one: one.epoch, default=topology)


async def _laws(topology: Topology, urls: Iterable[str], access: Access) -> list[Topology | None]:
    from farhop_cli import admin

    async with admin.AdminClient(access) as http:

        async def ask(url: str) -> Topology | None:
            try:
                answer = await admin.get(http, url, "/law") or {}
                law = {name: answer.get(name) for name in ("models", "tenants")}
                document = law_document.encode(law, answer.get("epoch", 0), "it", "as it says", "2026-01-01T00:00:00Z")
                return law_document.read(document, topology, url).over(topology)
            except (AdminError, TopologyError):
                return None  # one that does not answer or is older has none; the next request to it reports the error

        return await asyncio.gather(*(ask(url) for url in urls))


def region_file(running: Running, name: str | None) -> RegionFile | None:
    """A region's addresses; None for one that does not run here."""
    return running.file.regions.get(name) if name is not None else None


def default_tenant(running: Running) -> str:
    """The tenant by default: the demo's unrestricted one, otherwise the first with a key."""
    tenant = "anywhere" if "anywhere" in running.file.keys else next(iter(running.file.keys), None)
    if tenant is None:
        fail("this world has no demo keys; give --tenant or --key")
    return tenant


def caller(running: Running, tenant: str | None, key: str | None, allow: tuple[str, ...]) -> Caller:
    """The caller: by key, by the tenant whose demo key is in the world file, or the default tenant."""
    if key is None:
        tenant = tenant or default_tenant(running)
        key = running.file.keys.get(tenant)
        if key is None:
            fail(f"--tenant: no key of {quoted(tenant)} is known here; there are {listed(running.file.keys)}, or --key")
    found = running.topology.key(digest(checked_key(key)))
    owner = found[0].name if found is not None else None
    if tenant is not None and owner != tenant:
        fail(f"--key is not a key of tenant {quoted(tenant)}; leave one of the two out")
    return Caller(owner, key, narrowing(found[1].within if found is not None else (), allow))


def checked_key(key: str) -> str:
    """A key that a header can carry. Ends the command, without showing it, if it is invalid."""
    if bearer(b"Bearer " + key.encode(errors="replace")) != key:
        fail("--key: this cannot be an API key; use A-Z a-z 0-9 - . _ ~ + /")
    return key


def places(topology: Topology | None, text: str | None) -> tuple[str, ...]:
    """The places of `--allow`. An unknown one is an error: it would be lawful nowhere."""
    if text is None:
        return ()
    named = tuple(place.strip() for place in text.split(","))
    if not all(place.isascii() and place.isprintable() and place for place in named):
        fail("--allow: give places separated by commas, such as eu,jp")
    known = {*topology.places, *topology.regions, "world"} if topology is not None else set(named)
    strangers = [place for place in named if place not in known]
    if strangers:
        fail(f"--allow: {quoted(strangers[0])} is no place of this fleet; it has {listed(known)}")
    return named
