"""A fleet as a drill needs it: drill documents, map and names, clients and their keys, the present state.

Never takes a key from the command line itself, and never changes the fleet.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import farhop_drill
from farhop.store.contract import LAW_KEY, REFUSE_PREFIX, REGION_PREFIX
from farhop.store.documents import report as reports
from farhop.store.documents.document import DocumentError
from farhop.store.envelope import bare
from farhop_cli import fleet, law
from farhop_cli.exits import fail, warn
from farhop_cli.options import OUT
from farhop_drill import document
from farhop_drill.checks import Facts
from farhop_drill.document import Drill, DrillError, Names
from farhop_drill.injectors import FaultInjector, InjectError
from farhop_drill.oracle import Oracle
from farhop_drill.probe import Client
from farhop_drill.records import Records
from farhop_lab.world import deployed, world_file
from farhop_lab.world.world_file import WorldFile, WorldFileError
from topology import law_document
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions
    from topology.model import Topology

SHIPPED = Path(farhop_drill.__file__).parent / "shipped"
SECRET_BYTES_MAX = 4096


@dataclass(frozen=True)
class DrillOptions:
    """The options, as typed."""

    name: str
    sets: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    folder: Path | None = None
    out: Path = OUT
    why: str = ""
    by: str | None = None

    @property
    def values(self) -> dict[str, str]:
        """Parameters, by name. Ends the command for an invalid one."""
        found = {}
        for text in self.sets:
            name, equals, value = text.partition("=")
            if not equals or not name:
                fail(f"--set: {quoted(text)} must be NAME=VALUE")
            found[name] = value
        return found


@dataclass(frozen=True)
class Found:
    """A drill's document, and its source."""

    name: str
    source: str
    text: bytes


# -- documents


def shipped() -> dict[str, Found]:
    """The drills that come with Farhop."""
    return {path.stem: Found(path.stem, "shipped", path.read_bytes()) for path in sorted(SHIPPED.glob("*.yaml"))}


def _of_folder(folder: Path | None) -> dict[str, Found]:
    if folder is None:
        return {}
    if not folder.is_dir():
        fail(f"--folder: {quoted(str(folder))} is no folder")
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".yaml", ".yml", ".json")]
    return {path.stem: Found(path.stem, str(path), file_text(path)) for path in paths}


def file_text(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(document.DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        fail(f"{quoted(str(path))}: {(error.strerror or 'cannot be read').lower()}")


def find(asked: DrillOptions, kept: Mapping[str, bytes]) -> Found:
    """By a file's path; otherwise from the folder, from etcd, or shipped. Ends the command if there is none."""
    if asked.name.endswith((".yaml", ".yml", ".json")):
        return Found(Path(asked.name).stem, asked.name, file_text(Path(asked.name)))
    known = known_drills(kept, asked.folder)
    if asked.name not in known:
        fleet.known(asked.name, known, "those known here", "drill")
    return known[asked.name]


def known_drills(kept: Mapping[str, bytes], folder: Path | None) -> dict[str, Found]:
    """The shipped ones, overridden by those of etcd (`kept`), then by a folder's. Ends the command if the folder does
    not exist.
    """
    return shipped() | {name: Found(name, "etcd", text) for name, text in kept.items()} | _of_folder(folder)


# -- the fleet


class DrillFleet:
    """The fleet, its map, its clients' keys and its world, if it is one that runs here."""

    def __init__(self, asked: DrillOptions, fleet_options: FleetOptions, fleet: Fleet | None = None) -> None:
        self.fleet: Fleet = fleet_options.fleet() if fleet is None else fleet
        if self.fleet.topology is None:
            fail("the regions and tenants are unknown; give --config, or a context with a topology")
        if not self.fleet.hubs:
            fail(
                f"{self.fleet.name} names no etcd, which drills need for their lock; give --etcd, or a context with one"
            )
        self.topology: Topology = self.fleet.topology
        self.world = _world(self.fleet, fleet_options)
        self.control = _control(self.fleet, self.world)  # the address for faults, and its token; "": none
        self.keys = dict(self.world.keys if self.world is not None else {}) | dict(map(key_of, asked.keys))
        named = frozenset({*self.fleet.hubs, *self.topology.hubs})
        self.names = Names(
            frozenset(self.topology.regions), frozenset(self.topology.tenants), frozenset(self.topology.entries), named
        )

    def entries(self) -> dict[str, str]:
        """The first entry of each region that has one."""
        if self.world is not None:
            return {name: one.entry for name, one in self.world.regions.items()}
        return {name: one.entry[0] for name, one in self.topology.regions.items() if one.entry}

    def clients(self, drill: Drill) -> tuple[list[Client], list[str]]:
        """A client for each entry and tenant, with its entries from the nearest on; and what is missing for that."""
        entries, wanted = self.entries(), drill.canaries
        tenants = wanted.tenants or sorted(self.keys)
        missing = [f"no key of tenant {name}; give --key {name}=env:NAME" for name in tenants if name not in self.keys]
        missing += [] if tenants else ["no key of any tenant; give --key TENANT=env:NAME"]
        firsts = [name for name in wanted.entries or sorted(entries) if name in entries]
        missing += [] if firsts else ["no region has an entry in the topology"]
        groups: list[list[Client]] = []
        for first in firsts:
            near = [first, *_by_distance(self.topology, first, entries)]
            urls = tuple(entries[name] for name in near)
            groups.append([Client(first, tenant, self.keys[tenant], urls) for tenant in tenants if tenant in self.keys])
        # An affected entry is measured more closely: its second client is between any two of the others.
        hit = [one for group in groups for one in group if one.entry in drill.blast_radius.regions]
        others = [group for group in groups if group and group[0].entry not in drill.blast_radius.regions]
        return [one for group in others for one in (*hit, *group)] or hit, missing


def _by_distance(topology: Topology, first: str, names: Iterable[str]) -> list[str]:
    """The other names, the nearest first."""
    return sorted((name for name in names if name != first), key=lambda name: _rtt_ms(topology, first, name))


def _rtt_ms(topology: Topology, a: str, b: str) -> float:
    return topology.rtt.get((a, b), topology.rtt.get((b, a), float("inf")))


def _world(here: Fleet, fleet_options: FleetOptions) -> WorldFile | None:
    """The world that runs here, if the fleet is that one."""
    try:
        found = world_file.read(fleet.world_of(fleet_options.world, fleet_options.context))
    except WorldFileError:
        return None
    endpoints = {endpoint for one in here.hubs.values() for endpoint in one.endpoints}
    return found if {found.etcd, *found.hubs.values()} & endpoints else None


def _control(here: Fleet, world: WorldFile | None) -> tuple[str, str]:
    """Of the world that runs here, or of the process that injects faults in this deployed fleet (`farhop drill
    faults`).
    """
    if world is not None:
        return world.control, world.control_token
    faults = deployed.described(deployed.FAULTS_FILE, here.name)
    return ("", "") if faults is None else (faults.control, faults.token)


def key_of(text: str) -> tuple[str, str]:
    """A tenant and its API key, which is never on the command line itself."""
    tenant, _, place = text.partition("=")
    kind, _, name = place.partition(":")
    if kind == "env" and name in os.environ:
        return tenant, os.environ[name].strip()
    if kind != "file":
        fail(f"--key: {quoted(text.partition('=')[0])}: give TENANT=env:NAME (set), or TENANT=file:PATH")
    return tenant, file_text(Path(name))[:SECRET_BYTES_MAX].decode(errors="replace").strip()


async def facts_now(
    here: DrillFleet, drill: Drill, records: Records, store: Store, faults: FaultInjector | None
) -> Facts:
    """The facts for the safety checks. Raises StoreError."""
    seen = await here.fleet.seen("global")
    listed, trouble = [], list(here.fleet.trouble)
    for entry in await store.list(REGION_PREFIX):
        try:
            listed.append(reports.decode(bare(entry.value)))
        except (DocumentError, ValueError):
            trouble.append(f"{entry.key} cannot be read")
    trouble += [f"{entry.key}: a region refuses new work" for entry in await store.list(REFUSE_PREFIX)]
    stop, holder = await records.emergency_stop(), await records.holder()
    injects, injecting, impossible = {"traffic"}, list[str](), ""
    if faults is not None:
        try:
            injecting = await faults.active_faults()
            injects.add("fault")
        except InjectError as error:
            trouble.append(str(error))
        if drill.kind == "fault" and "fault" in injects and not injecting:
            try:
                await faults.possible(drill.steps)
            except InjectError as error:
                impossible = str(error)
    under = await law.in_force(store, here.topology)
    _, missing = here.clients(drill)
    if not model_of(drill, here, listed):
        missing.append("no region reports a model; give `canaries.model`")
    return Facts(
        topology=under or here.topology,
        statuses=[one.status for one in seen if one.status is not None],
        reports=listed,
        epoch_s=time.time(),
        silent=[str(one.balancer) for one in seen if one.status is None],
        trouble=trouble,
        emergency_stop=str(stop) if stop is not None else "",
        holder=str(holder) if holder is not None else "",
        injects=frozenset(injects),
        injecting=injecting,
        impossible=impossible,
        missing=missing,
    )


def model_of(drill: Drill, here: DrillFleet, listed: Sequence[reports.RegionReport]) -> str:
    """The model that canaries ask for; "" if no balancer reports one."""
    if drill.canaries.model:
        return drill.canaries.model
    if here.world is not None:
        return here.world.model
    return min((model.model for one in listed for model in one.models if model.replicas_ready), default="")


async def oracle_of(here: DrillFleet, store: Store) -> Oracle:
    """By the document of the present law: that of etcd if it is the later one, otherwise the topology's own."""
    entry, document = await store.get(LAW_KEY), law_document.document_of(here.topology)
    if entry is not None:
        stands = msgspec.json.decode(bare(entry.value), type=dict[str, Any])
        if int(stands.get("epoch") or 0) > here.topology.epoch:
            document = stands
    places = {name: {one.country, *one.jurisdictions} for name, one in here.topology.regions.items()}
    return Oracle(places, document)


def read_document(found: Found, here: DrillFleet, asked: DrillOptions) -> Drill:
    """The drill, valid in this fleet. Ends the command with every error if it is not."""
    try:
        return document.read(
            found.text, found.source if found.source != "shipped" else found.name, here.names, asked.values
        )
    except DrillError as error:
        for one in error.problems[:-1]:
            warn(f"{error.source}: {one}")
        fail(f"{error.source}: {error.problems[-1]}; nothing was touched")
