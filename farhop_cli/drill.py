"""`farhop drill`: checks, runs, stops and tells of drills, on the fleet that the command is for.

Loud: a drill that did not run, was aborted or failed says so on stderr, and only PASS is exit code 0. Never runs what
was not read whole and checked; never leaves anything injected behind.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

import farhop_drill
from farhop.store.contract import LAW_KEY, REGION_PREFIX, StoreError
from farhop.store.documents import report as reports
from farhop.store.documents.document import DocumentError
from farhop.store.envelope import bare
from farhop.telemetry.release import release
from farhop_cli import admin, fleet, law, setting, show
from farhop_cli.admin import AdminError
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.options import OUT, duration, duration_s
from farhop_drill import checks, document, experiment, page, report, windows
from farhop_drill.checks import Facts
from farhop_drill.document import Drill, DrillError, Names
from farhop_drill.eyes import Eyes
from farhop_drill.injectors import FaultInjector, InjectError, Injector, TrafficInjector
from farhop_drill.machine import DrillVerdict
from farhop_drill.oracle import Oracle
from farhop_drill.outcome import Outcome
from farhop_drill.probe import Answer, Client, Probe
from farhop_drill.records import Held, Order, Past, Records
from farhop_drill.runner import Runner
from farhop_drill.windows import Planned, WindowError
from farhop_lab.world import client, world_file
from farhop_lab.world.client import Delta, Result
from farhop_lab.world.world_file import WorldFile, WorldFileError
from topology import policy
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import Where
    from farhop_drill.measures import Canary
    from topology.model import Topology

SHIPPED = Path(farhop_drill.__file__).parent / "shipped"
WATCH_S = 20.0
SHOWN = (
    "rto_s", "detect_s", "decide_s", "shifted_90_s", "failback_s", "canaries", "requests_failed", "streams_lost",
    "residency_violations", "ttft_before_p99_ms", "ttft_during_p99_ms", "ttft_after_p99_ms",
)  # fmt: skip
SECRET_BYTES_MAX = 4096
_STYLE = {
    DrillVerdict.PASS: "green",
    DrillVerdict.FAIL: "red",
    DrillVerdict.ABORTED: "yellow",
    DrillVerdict.NOT_RUN: "yellow",
}


@dataclass(frozen=True)
class Asked:
    """What was asked for, as typed."""

    name: str
    sets: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    folder: Path | None = None
    out: Path = OUT
    why: str = ""
    by: str | None = None

    @property
    def values(self) -> dict[str, str]:
        """Parameters, by name. Ends the command for what is none."""
        found = {}
        for text in self.sets:
            name, equals, value = text.partition("=")
            if not equals or not name:
                fail(f"--set: {quoted(text)} must be NAME=VALUE")
            found[name] = value
        return found


@dataclass(frozen=True)
class Found:
    """A drill's document, and where it was found."""

    name: str
    where: str
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
    return {path.stem: Found(path.stem, str(path), _text(path)) for path in paths}


def _text(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(document.DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        fail(f"{quoted(str(path))}: {(error.strerror or 'cannot be read').lower()}")


def _named(asked: Asked, kept: Mapping[str, bytes]) -> Found:
    """By a file's path; else of the folder, of etcd, or shipped. Ends the command where there is none."""
    if asked.name.endswith((".yaml", ".yml", ".json")):
        return Found(Path(asked.name).stem, asked.name, _text(Path(asked.name)))
    known = known_drills(kept, asked.folder)
    if asked.name not in known:
        fleet.known(asked.name, known, "those known here", "drill")
    return known[asked.name]


def known_drills(kept: Mapping[str, bytes], folder: Path | None) -> dict[str, Found]:
    """The shipped ones, over them those of etcd (`kept`), over both a folder's. Ends the command if it is none."""
    return shipped() | {name: Found(name, "etcd", text) for name, text in kept.items()} | _of_folder(folder)


def list_(folder: Path | None, where: Where) -> int:
    """List the drills there are; the exit code. Without an etcd: those of the folder, and the shipped ones."""

    async def work(store: Store) -> int:
        kept = await Records(store).documents()
        _listed(known_drills(kept, folder), where)
        return 0

    if any((where.context, where.config, where.etcd, where.admin)) or (where.world or world_file.WORLD_FILE).exists():
        here = where.fleet()
        if here.hubs:
            return setting.with_store(here, work)
    _listed(known_drills({}, folder), where)
    return 0


def _listed(found: Mapping[str, Found], where: Where) -> None:
    rows: list[dict[str, Any]] = []
    for name, one in sorted(found.items()):
        try:
            raw = document.parsed(one.text, one.where)
        except DrillError as error:
            raw = {"title": f"cannot be read: {error.problems[0]}"}
        sets = [f"{key}={value}" for key, value in document.parameters(raw).items()]
        rows.append({"drill": name, "kind": raw.get("kind"), "title": raw.get("title"), "set": sets, "from": one.where})
    if where.as_json:
        show.json({"drills": rows})
        return
    columns = ("drill", "kind", "title", "--set", "from")
    lines = [[*(show.word(row[n]) for n in ("drill", "kind", "title")), " ".join(row["set"]), row["from"]]
             for row in rows]  # fmt: skip
    show.table("drills", columns, lines)


# -- a fleet, as a drill needs it


class Here:
    """The fleet, its map, its clients' keys and its world, if it is one that runs here."""

    def __init__(self, asked: Asked, where: Where, fleet: Fleet | None = None) -> None:
        self.fleet: Fleet = where.fleet() if fleet is None else fleet
        if self.fleet.topology is None:
            fail("nobody tells which regions and tenants there are; give --config, or a context with a topology")
        if not self.fleet.hubs:
            fail(
                f"{self.fleet.name} names no etcd, where drills are locked and told; give --etcd, or a context with one"
            )
        self.topology: Topology = self.fleet.topology
        self.world = _world(self.fleet, where)
        self.keys = dict(self.world.keys if self.world is not None else {}) | dict(map(_key, asked.keys))
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
        """A client of each entry and tenant, its entries from the nearest on; and what is missing for that."""
        entries, wanted = self.entries(), drill.canaries
        tenants = wanted.tenants or sorted(self.keys)
        untold = [f"no key of tenant {name}; give --key {name}=env:NAME" for name in tenants if name not in self.keys]
        untold += [] if tenants else ["no key of any tenant; give --key TENANT=env:NAME"]
        firsts = [name for name in wanted.entries or sorted(entries) if name in entries]
        untold += [] if firsts else ["no region has an entry in the topology"]
        groups: list[list[Client]] = []
        for first in firsts:
            near = [first, *_by_distance(self.topology, first, entries)]
            urls = tuple(entries[name] for name in near)
            groups.append([Client(first, tenant, self.keys[tenant], urls) for tenant in tenants if tenant in self.keys])
        # Who is hit is looked at more closely: between any two of the others.
        hit = [one for group in groups for one in group if one.entry in drill.blast_radius.regions]
        others = [group for group in groups if group and group[0].entry not in drill.blast_radius.regions]
        return [one for group in others for one in (*hit, *group)] or hit, untold


def _by_distance(topology: Topology, first: str, names: Iterable[str]) -> list[str]:
    """The others, the nearest first."""
    return sorted((name for name in names if name != first), key=lambda name: _rtt_ms(topology, first, name))


def _rtt_ms(topology: Topology, a: str, b: str) -> float:
    return topology.rtt.get((a, b), topology.rtt.get((b, a), float("inf")))


def _world(here: Fleet, where: Where) -> WorldFile | None:
    """The world that runs here, if the fleet is that."""
    try:
        found = world_file.read(fleet.world_of(where.world, where.context))
    except WorldFileError:
        return None
    endpoints = {endpoint for one in here.hubs.values() for endpoint in one.endpoints}
    return found if {found.etcd, *found.hubs.values()} & endpoints else None


def _key(text: str) -> tuple[str, str]:
    """A tenant and its API key, which never stands on the command line itself."""
    tenant, _, place = text.partition("=")
    kind, _, name = place.partition(":")
    if kind == "env" and name in os.environ:
        return tenant, os.environ[name].strip()
    if kind != "file":
        fail(f"--key: {quoted(text.partition('=')[0])}: give TENANT=env:NAME (set), or TENANT=file:PATH")
    return tenant, _text(Path(name))[:SECRET_BYTES_MAX].decode(errors="replace").strip()


async def _facts(here: Here, drill: Drill, records: Records, store: Store, faults: FaultInjector | None) -> Facts:
    seen = await here.fleet.seen("global")
    listed, trouble = [], list(here.fleet.trouble)
    for entry in await store.list(REGION_PREFIX):
        try:
            listed.append(reports.decode(bare(entry.value)))
        except (DocumentError, ValueError):
            trouble.append(f"{entry.key} cannot be read")
    lever, holder = await records.lever(), await records.holder()
    injects, injecting = {"traffic"}, list[str]()
    if faults is not None:
        try:
            injecting = await faults.standing()
            injects.add("fault")
        except InjectError as error:
            trouble.append(str(error))
    under = await law.in_force(store, here.topology)
    _, untold = here.clients(drill)
    if not _model(drill, here, listed):
        untold.append("no region reports a model; give `canaries.model`")
    return Facts(
        topology=under or here.topology,
        statuses=[one.status for one in seen if one.status is not None],
        reports=listed,
        epoch_s=time.time(),
        silent=[str(one.balancer) for one in seen if one.status is None],
        trouble=trouble,
        lever=str(lever) if lever is not None else "",
        holder=str(holder) if holder is not None else "",
        injects=frozenset(injects),
        injecting=injecting,
        untold=untold,
    )


def _model(drill: Drill, here: Here, listed: Sequence[reports.RegionReport]) -> str:
    if drill.canaries.model:
        return drill.canaries.model
    if here.world is not None:
        return here.world.model
    return min((model.model for one in listed for model in one.models if model.replicas_ready), default="")


async def _oracle(here: Here, store: Store) -> Oracle:
    """By the law's document as it stands: that of etcd if it is the later one, else the topology's own."""
    entry, said = await store.get(LAW_KEY), policy.document_of(here.topology)
    if entry is not None:
        stands = msgspec.json.decode(bare(entry.value), type=dict[str, Any])
        if int(stands.get("epoch") or 0) > here.topology.epoch:
            said = stands
    places = {name: {one.country, *one.jurisdictions} for name, one in here.topology.regions.items()}
    return Oracle(places, said)


# -- check


def _read(found: Found, here: Here, asked: Asked) -> Drill:
    try:
        return document.read(
            found.text, found.where if found.where != "shipped" else found.name, here.names, asked.values
        )
    except DrillError as error:
        for one in error.problems[:-1]:
            warn(f"{error.source}: {one}")
        fail(f"{error.source}: {error.problems[-1]}; nothing was touched")


def _faults(here: Here, run: str, for_s: float) -> FaultInjector | None:
    world = here.world
    return (
        FaultInjector(world.control, world.control_token, run, for_s) if world is not None and world.control else None
    )


def check(asked: Asked, keep: bool, where: Where) -> int:
    """Whether a drill is sound, and may be run now; the exit code."""
    here = Here(asked, where)

    async def work(store: Store) -> int:
        records = Records(store)
        found = _named(asked, await records.documents())
        drill = _read(found, here, asked)
        findings = await looked(drill, here, store)
        if keep and not where.dry_run:
            await records.keep(drill.drill, found.text)
        blocked = checks.blocked(findings)
        if where.as_json:
            show.json({"drill": drill.drill, "may_run": not blocked, "checks": msgspec.to_builtins(findings)})
        else:
            _show_findings(drill, findings)
            show.line("it may run now" if not blocked else "it must not run now", "bold")
        return NEGATIVE if blocked else 0

    return setting.with_store(here.fleet, work)


async def looked(drill: Drill, here: Here, store: Store) -> list[checks.Finding]:
    """Every safety check, as things are now. Touches nothing. Raises StoreError."""
    faults = _faults(here, "check", 1.0)
    try:
        return checks.look(drill, await _facts(here, drill, Records(store), store, faults))
    finally:
        if faults is not None:
            await faults.close()


def _show_findings(drill: Drill, findings: Sequence[checks.Finding]) -> None:
    rows = [["ok" if one.held else "NO", one.check, one.seen] for one in findings]
    show.table(f"{drill.drill}: safety checks", ("", "check", "seen"), rows)


# -- run


def run(asked: Asked, where: Where) -> int:
    """Run a drill; the exit code: 0 for PASS alone."""
    if where.dry_run:
        return check(asked, False, where)
    here = Here(asked, where)

    async def work(store: Store) -> int:
        found = _named(asked, await Records(store).documents())
        outcome = await carried_out(_read(found, here, asked), here, store, asked, _saying(where), _on_signals)
        return await _reported(outcome, store, asked, where)

    return setting.with_store(here.fleet, work)


def _saying(where: Where) -> Callable[[str], None]:
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {show.printable(text)}\n")
        sys.stderr.flush()

    return (lambda _text: None) if where.as_json else say


async def carried_out(
    drill: Drill,
    here: Here,
    store: Store,
    asked: Asked,
    say: Callable[[str], None],
    begun: Callable[[Runner], None],
) -> Outcome:
    """Run it from the checks to the verdict. `say` hears each phase; `begun` is given the runner, by which it can be
    stopped, before anything is touched. Raises StoreError where etcd cannot be read to begin with."""
    records, author = Records(store), asked.by or setting.author_here()
    began = datetime.now(UTC)
    held = Held(run=f"{drill.drill}-{began:%Y%m%dT%H%M%S}", drill=drill.drill, author=author, since_s=began.timestamp())
    why = f"drill {held.run}" + (f": {asked.why}" if asked.why else "")
    faults = _faults(here, held.run, drill.duration_max_s + 60.0)
    say(f"{drill.title} ({held.run})")
    outcome = Outcome(
        run=held.run, drill=drill.drill, title=drill.title, author=author, fleet=here.fleet.name,
        epoch_s=began.timestamp(), verdict=DrillVerdict.NOT_RUN, why="", document=drill.model_dump(mode="json"),
        values=asked.values,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(admin.session(here.fleet.access))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        clock = asyncio.get_running_loop().time
        balancers = here.fleet.of("global")
        eyes = Eyes([_asking(http, one.url) for one in balancers if one.url], clock)
        homes = {name: one.region for name, one in here.topology.entries.items()}

        async def raise_epoch() -> int:
            return await law.raised(store, here.fleet, here.topology, why, author)

        injector: Injector = TrafficInjector(store, author, why, homes, lambda: datetime.now(UTC), raise_epoch)
        if drill.kind == "fault" and faults is not None:
            injector = faults
        for one in {injector, faults or injector}:
            stack.push_async_callback(one.close)
        clients, _ = here.clients(drill)
        facts = await _facts(here, drill, records, store, faults)
        model = _model(drill, here, facts.reports)
        ask, salt = _ask(session, tuple(here.entries().values())), f"{began:%s%f}"

        def probe(heard: Callable[[Canary], None]) -> Probe:
            emulated = here.world is not None and here.world.emulated
            return Probe(drill.canaries, clients, model, ask, clock, heard, salt, emulated=emulated)

        async def look() -> Facts:
            return facts if not balancers else await _facts(here, drill, records, store, faults)

        egress = {name: one.egress_usd_per_gb for name, one in here.topology.regions.items()}
        oracle = await _oracle(here, store)
        eyes.begin()
        stack.push_async_callback(eyes.close)
        runner = Runner(drill, held, records, injector, look, eyes, probe, oracle, egress, clock, say, outcome)
        begun(runner)
        return await runner.run()


def _on_signals(runner: Runner) -> None:
    """Ctrl-C, a terminal that is gone and an orderly end of the session: rolled back, then ABORTED."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, runner.stop, f"interrupted by {number.name}")


def _asking(http: admin.Session, url: str) -> Callable[[], Any]:
    async def ask() -> Mapping[str, Any] | None:
        try:
            return await admin.get(http, url, "/status")
        except AdminError:
            return None

    return ask


def _ask(session: aiohttp.ClientSession, trusted: tuple[str, ...]) -> Any:
    """The probe's client is the one that `farhop ask` uses."""

    async def ask(entries: Sequence[str], key: str, body: dict[str, Any], request_s: float) -> Answer:
        first_ms: float | None = None
        asking = client.ask(entries, key, body, session=session, trusted=trusted, request_s=request_s)
        async with aclosing(asking) as events:
            async for event in events:
                if isinstance(event, Delta) and first_ms is None:
                    first_ms = event.at_ms
                elif isinstance(event, Result):
                    region = event.headers.get("x-farhop-region", "")
                    code = event.error.code or str(event.status) if event.error is not None else ""
                    return Answer(status=event.status, region=region, code=code, text=event.text, ttft_ms=first_ms)
        raise AssertionError("a request has an end")

    return ask


async def _reported(outcome: Outcome, store: Store, asked: Asked, where: Where) -> int:
    began = time.monotonic()
    past, folder = await kept(outcome, store, asked.out)
    took_s = time.monotonic() - began
    if where.as_json:
        show.json({**msgspec.to_builtins(past), "folder": str(folder), "report_s": took_s})
    else:
        _show(past, [f"{one.check}: {one.seen}" for one in outcome.findings if not one.held])
        show.line(f"report in {took_s:.2f} s: {folder}/report.html, journal.json, junit.xml", "dim")
    if outcome.verdict is not DrillVerdict.PASS:
        warn(f"drill {outcome.drill}: {outcome.verdict}" + (f": {outcome.why}" if outcome.why else ""))
    return 0 if outcome.verdict is DrillVerdict.PASS else NEGATIVE


async def kept(outcome: Outcome, store: Store, out: Path) -> tuple[Past, Path]:
    """Write the report into a folder of its own, and the result into the history; both. Warns of what could not be."""
    folder = out / outcome.run
    journal = report.journal(outcome, release(), platform.node())
    texts = {
        "journal.json": msgspec.json.format(msgspec.json.encode(journal), indent=1),
        "report.html": page.page(outcome).encode(),
        "junit.xml": report.junit(outcome).encode(),
    }
    try:
        await asyncio.to_thread(_written, folder, texts)
    except OSError as error:
        warn(f"--out: {folder}: {(error.strerror or 'cannot be written').lower()}; the verdict stands")
    past = Past(
        run=outcome.run, drill=outcome.drill, title=outcome.title, author=outcome.author, began_s=outcome.epoch_s,
        took_s=outcome.took_s, verdict=outcome.verdict, why=outcome.why, measures=outcome.measures,
        hypotheses=msgspec.to_builtins(outcome.judged), values=outcome.values,
    )  # fmt: skip
    try:
        await Records(store).remember(past)
    except StoreError as error:
        warn(f"the history in etcd could not be written: {error}")
    return past, folder


def _written(folder: Path, texts: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text)


def _show(past: Past, blocked: Sequence[str] = ()) -> None:
    rows = [
        [one["verdict"], one["hypothesis"], _figure(one["value"], one["unit"])]
        for one in past.hypotheses
    ]  # fmt: skip
    show.table(f"{past.title} ({past.run})", ("verdict", "hypothesis", ">measured"), rows)
    for text in blocked:
        show.line(f"blocked by {text}", "yellow")
    said = [f"{name} {past.measures[name]:.4g}" for name in SHOWN if name in past.measures]
    if said:
        show.line(", ".join(said), "dim")
    show.line(
        f"{past.verdict}" + (f": {past.why}" if past.why else ""), f"bold {_STYLE.get(DrillVerdict(past.verdict), '')}"
    )


def _figure(value: float | None, unit: str) -> str:
    return show.NONE if value is None else f"{value:,.4g} {unit}"


# -- stop


def stop(run_id: str, all_: bool, release_: bool, why: str, by: str | None, where: Where) -> int:
    """Stop the drill that runs, all of them, or let them begin again; the exit code: 1 if there was nothing to do."""
    if all_ and release_:
        fail("--all, --release: give one of them")
    here = where.fleet()
    order = Order(author=by or setting.author_here(), why=why, at_s=time.time())

    async def work(store: Store) -> int:
        records = Records(store)
        if release_:
            was = where.dry_run or await records.disengage()
            show.line("the lever is disengaged: drills may begin" if was else "the lever was not engaged")
            return 0 if was else NEGATIVE
        holder = await records.holder()
        if all_:
            if not where.dry_run:
                await records.engage(order)
            show.line("the lever is engaged: what runs is stopped, and none begins until `farhop drill stop --release`")
        wanted = run_id or (holder.run if holder is not None else "")
        if holder is None or holder.run != wanted:
            show.line(f"no drill {'of that name ' if run_id else ''}runs")
            return 0 if all_ else NEGATIVE
        if not where.dry_run:
            await records.stop(wanted, order)
            await _gone(records, wanted)
        show.line(f"{wanted} was told to stop, and restores")
        return 0

    return setting.with_store(here, work)


async def _gone(records: Records, run_id: str) -> None:
    """Until it gave its lock back, for a moment."""
    for _ in range(30):
        holder = await records.holder()
        if holder is None or holder.run != run_id:
            return
        await asyncio.sleep(0.1)


# -- what was


def history(name: str, where: Where) -> int:
    """Runs that are over, the newest first; the exit code."""
    here = where.fleet()

    async def work(store: Store) -> int:
        found = [one for one in await Records(store).history() if name in ("", one.drill)]
        if where.as_json:
            show.json({"runs": msgspec.to_builtins(found)})
            return 0
        rows = [
            [
                _when(one.began_s), one.drill, one.verdict, _figure(one.measures.get("rto_s"), "s"),
                _figure(one.measures.get("failback_s"), "s"), f"{one.took_s:.0f} s", one.author, one.why,
            ]
            for one in found
        ]  # fmt: skip
        columns = ("began", "drill", "verdict", ">RTO", ">failback", ">took", "by", "why")
        show.table("drills that were run, the newest first", columns, rows)
        return 0

    return setting.with_store(here, work)


def _when(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def print_run(run_id: str, of: str, within: str, verdict_only: bool, where: Where) -> int:
    """What a run came to, by default the last one; the exit code: 0 for PASS alone."""
    here, within_s = where.fleet(), duration_s("--within", within) if within else float("inf")

    async def work(store: Store) -> int:
        found = [one for one in await Records(store).history() if run_id in ("", one.run) and of in ("", one.drill)]
        found = [one for one in found if time.time() - one.began_s <= within_s]
        if not found:
            warn(f"no run {run_id or of or 'at all'}{f' within {within}' if within else ''} is in the history: NOT_RUN")
            return NEGATIVE
        past = found[0]
        if where.as_json:
            show.json(msgspec.to_builtins(past))
        elif verdict_only:
            show.line(past.verdict)
        else:
            _show(past)
        return 0 if past.verdict == DrillVerdict.PASS else NEGATIVE

    return setting.with_store(here, work)


# -- export


def export(asked: Asked, file: Path | None, where: Where) -> int:
    """Print a drill as a Chaos Toolkit experiment, or write it; the exit code."""
    here = Here(asked, where)

    async def work(store: Store) -> int:
        drill = _read(_named(asked, await Records(store).documents()), here, asked)
        extra = f"--context {where.context}" if where.context else f"--world {where.world}" if where.world else ""
        made = experiment.experiment(drill.model_dump(mode="json"), asked.values, extra)
        if file is None:
            show.json(made)
            return 0
        try:
            await asyncio.to_thread(file.write_bytes, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
        except OSError as error:
            fail(f"--to: {quoted(str(file))}: {(error.strerror or 'cannot be written').lower()}")
        show.line(f"{file}: run it with `chaos run {file}`")
        return 0

    return setting.with_store(here.fleet, work)


# -- schedule


def schedule(asked: Asked, given: Sequence[str], every: str, remove: bool, watch: bool, where: Where) -> int:
    """Show the schedule, change it, or run what is due until Ctrl-C; the exit code."""
    if watch:
        return _watch(asked, where)
    here = Here(asked, where) if asked.name and not remove else None

    async def work(store: Store) -> int:
        records = Records(store)
        if remove:
            was = where.dry_run or await records.unplan(asked.name)
            show.line(f"{asked.name} is off the schedule" if was else f"{asked.name} was not on the schedule")
            return 0 if was else NEGATIVE
        if here is not None:
            await _plan(records, here, asked, given, every, where)
        await _show_schedule(records, where)
        return 0

    return setting.with_store(here.fleet if here is not None else where.fleet(), work)


async def _plan(records: Records, here: Here, asked: Asked, given: Sequence[str], every: str, where: Where) -> None:
    drill = _read(_named(asked, await records.documents()), here, asked)
    if not given:
        fail("--window: give at least one, such as 'tue 10:00-12:00' (UTC)")
    try:
        for text in given:
            windows.window_of(text)
    except WindowError as error:
        fail(f"--window: {error}")
    planned = Planned(
        drill=asked.name, windows=tuple(given), every_s=duration_s("--every", every, 3600.0, 62 * 86_400.0),
        since_s=time.time(), values=asked.values, author=asked.by or setting.author_here(),
    )  # fmt: skip
    if not where.dry_run:
        await records.plan(planned)
    show.line(f"{drill.drill} is on the schedule; `farhop drill schedule --watch` runs what is due")


async def _show_schedule(records: Records, where: Where) -> None:
    planned, past = await records.schedules(), await records.history()
    rows: list[dict[str, Any]] = []
    for one in planned:
        last = _last(past, one.drill)
        due = windows.due(one, last, time.time())
        rows.append({
            "drill": one.drill, "windows": list(one.windows), "every_s": one.every_s, "last_s": last,
            "due": due.now, "missed": list(due.missed), "author": one.author,
        })  # fmt: skip
    if where.as_json:
        show.json({"schedule": rows})
        return
    columns = ("drill", "windows (UTC)", "every", "last", "due", "missed")
    show.table("schedule", columns, [
        [row["drill"], ", ".join(row["windows"]), duration(row["every_s"]),
         _when(row["last_s"]) if row["last_s"] is not None else show.NONE, "now" if row["due"] else "",
         ", ".join(map(_when, row["missed"]))]
        for row in rows
    ])  # fmt: skip


def _last(past: Sequence[Past], drill: str) -> float | None:
    return max((one.began_s for one in past if one.drill == drill), default=None)


def _watch(asked: Asked, where: Where) -> int:
    """Run what is due. Of several that watch, one takes the lock; the others find it held, or the run done."""
    here = Here(asked, where)

    async def work(store: Store) -> int:
        stopping = asyncio.Event()
        show.line("watching the schedule; Ctrl-C ends it")
        while True:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a run takes them, and gives them back
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
            try:
                await _run_due(store, here, asked, where)
            except StoreError as error:
                warn(f"etcd: {error}")
            try:
                async with asyncio.timeout(WATCH_S):
                    await stopping.wait()
                    return 0
            except TimeoutError:
                continue

    return setting.with_store(here.fleet, work)


async def _run_due(store: Store, here: Here, asked: Asked, where: Where) -> None:
    records = Records(store)
    past = await records.history()
    for planned in await records.schedules():
        due = windows.due(planned, _last(past, planned.drill), time.time())
        for begins in due.missed:
            warn(f"{planned.drill}: the run of {_when(begins)} was missed: nobody ran it while its window was open")
            await records.remember(Past(
                run=f"{planned.drill}-missed-{begins}", drill=planned.drill, title=planned.drill,
                author=planned.author, began_s=float(begins), took_s=0.0, verdict=DrillVerdict.NOT_RUN,
                why="missed: nobody ran it while its window was open", measures={},
            ))  # fmt: skip
        if due.now and await records.holder() is None:
            sets = tuple(f"{name}={value}" for name, value in planned.values.items())
            one = replace(asked, name=planned.drill, sets=sets, why="by the schedule")
            drill = _read(_named(one, await records.documents()), here, one)
            outcome = await carried_out(drill, here, store, one, _saying(where), _on_signals)
            await _reported(outcome, store, one, where)
