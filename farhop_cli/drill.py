"""`farhop drill`: checks, runs, stops and reports drills, on the fleet that the command is for.

A drill that did not run, was aborted or failed says so on stderr, and only PASS is exit code 0. Never runs a document
that was not read whole and checked; never leaves anything injected behind.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from farhop.store.contract import StoreError
from farhop.telemetry.release import release
from farhop_cli import admin, law, setting, show
from farhop_cli.access import AdminError
from farhop_cli.drill_fleet import DrillFleet, facts_now, find, known_drills, model_of, oracle_of, read_document
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.options import duration_s
from farhop_drill import checks, document, experiment, page, report
from farhop_drill.checks import Facts
from farhop_drill.document import Drill, DrillError
from farhop_drill.injectors import FaultInjector, Injector, TrafficInjector
from farhop_drill.machine import DrillVerdict
from farhop_drill.outcome import Outcome
from farhop_drill.probe import Probe, ProbeResult
from farhop_drill.records import DrillLock, Order, Past, Records
from farhop_drill.runner import DrilledFleet, Runner
from farhop_drill.status_poller import StatusPoller
from farhop_lab.world import client, deployed, world_file
from farhop_lab.world.client import Delta, Result
from farhop_lab.world.faults import Control, FaultError, Faults
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farhop.store.contract import Store
    from farhop_cli.drill_fleet import DrillOptions, Found
    from farhop_cli.options import FleetOptions
    from farhop_drill.measures import Canary

SHOWN = (
    "rto_s", "detect_s", "decide_s", "shifted_90_s", "failback_s", "canaries", "requests_failed", "streams_lost",
    "residency_violations", "ttft_before_p99_ms", "ttft_during_p99_ms", "ttft_after_p99_ms",
)  # fmt: skip
_CODES_MAX = 5  # of failed requests' codes
_STYLE = {
    DrillVerdict.PASS: "green",
    DrillVerdict.FAIL: "red",
    DrillVerdict.ABORTED: "yellow",
    DrillVerdict.NOT_RUN: "yellow",
}


def list_(folder: Path | None, fleet_options: FleetOptions) -> int:
    """List the drills; the exit code. Without an etcd: those of the folder, and the shipped ones."""

    async def work(store: Store) -> int:
        kept = await Records(store).documents()
        _listed(known_drills(kept, folder), fleet_options)
        return 0

    if (
        any((fleet_options.context, fleet_options.config, fleet_options.etcd, fleet_options.admin))
        or (fleet_options.world or world_file.WORLD_FILE).exists()
    ):
        here = fleet_options.fleet()
        if here.hubs:
            return setting.with_store(here, work)
    _listed(known_drills({}, folder), fleet_options)
    return 0


def _listed(found: Mapping[str, Found], fleet_options: FleetOptions) -> None:
    rows: list[dict[str, Any]] = []
    for name, one in sorted(found.items()):
        try:
            raw = document.parsed(one.text, one.source)
        except DrillError as error:
            raw = {"title": f"cannot be read: {error.problems[0]}"}
        sets = [f"{key}={value}" for key, value in document.parameters(raw).items()]
        rows.append(
            {"drill": name, "kind": raw.get("kind"), "title": raw.get("title"), "set": sets, "from": one.source}
        )
    if fleet_options.as_json:
        show.json({"drills": rows})
        return
    columns = ("drill", "kind", "title", "--set", "from")
    lines = [[*(show.cell(row[n]) for n in ("drill", "kind", "title")), " ".join(row["set"]), row["from"]]
             for row in rows]  # fmt: skip
    show.table("drills", columns, lines)


# -- check


def _faults(here: DrillFleet, run: str, for_s: float) -> FaultInjector | None:
    return FaultInjector(*here.control, run, for_s) if here.control[0] else None


def check(asked: DrillOptions, keep: bool, fleet_options: FleetOptions) -> int:
    """Whether a drill is valid, and may run now; the exit code."""
    here = DrillFleet(asked, fleet_options)

    async def work(store: Store) -> int:
        records = Records(store)
        found = find(asked, await records.documents())
        drill = read_document(found, here, asked)
        findings = await looked(drill, here, store)
        if keep and not fleet_options.dry_run:
            await records.keep(drill.drill, found.text)
        blocked = checks.blocked(findings)
        if fleet_options.as_json:
            show.json({"drill": drill.drill, "may_run": not blocked, "checks": msgspec.to_builtins(findings)})
        else:
            _show_findings(drill, findings)
            show.line("it may run now" if not blocked else "it must not run now", "bold")
        return NEGATIVE if blocked else 0

    return setting.with_store(here.fleet, work, writes=keep and not fleet_options.dry_run)


async def looked(drill: Drill, here: DrillFleet, store: Store) -> list[checks.Finding]:
    """Every safety check at this time. Touches nothing. Raises StoreError."""
    faults = _faults(here, "check", 1.0)
    try:
        return checks.look(drill, await facts_now(here, drill, Records(store), store, faults))
    finally:
        if faults is not None:
            await faults.close()


def _show_findings(drill: Drill, findings: Sequence[checks.Finding]) -> None:
    rows = [["ok" if one.held else "NO", one.check, one.seen] for one in findings]
    show.table(f"{drill.drill}: safety checks", ("", "check", "seen"), rows)


# -- run


def run(asked: DrillOptions, fleet_options: FleetOptions) -> int:
    """Run a drill; the exit code: 0 for PASS alone."""
    if fleet_options.dry_run:
        return check(asked, False, fleet_options)
    here = DrillFleet(asked, fleet_options)

    async def work(store: Store) -> int:
        found = find(asked, await Records(store).documents())
        outcome = await carried_out(
            read_document(found, here, asked), here, store, asked, progress_to(fleet_options), stop_on_signals
        )
        return await reported(outcome, store, asked, fleet_options)

    return setting.with_store(here.fleet, work, writes=True)


def progress_to(fleet_options: FleetOptions) -> Callable[[str], None]:
    """A function that prints a run's phases as they come; nothing with --json."""
    began = time.monotonic()

    def progress(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {show.printable(text)}\n")
        sys.stderr.flush()

    return (lambda _text: None) if fleet_options.as_json else progress


async def carried_out(
    drill: Drill,
    here: DrillFleet,
    store: Store,
    asked: DrillOptions,
    progress: Callable[[str], None],
    begun: Callable[[Runner], None],
) -> Outcome:
    """Run it from the checks to the verdict. `progress` is called with each phase; `begun` gets the runner, by which it
    can be stopped, before anything is touched. StoreError if etcd cannot be read at the beginning.
    """
    records, author = Records(store), asked.by or setting.author_here()
    began = datetime.now(UTC)
    held = DrillLock(
        run=f"{drill.drill}-{began:%Y%m%dT%H%M%S}", drill=drill.drill, author=author, since_s=began.timestamp()
    )
    why = f"drill {held.run}" + (f": {asked.why}" if asked.why else "")
    faults = _faults(here, held.run, drill.duration_max_s + 60.0)
    progress(f"{drill.title} ({held.run})")
    outcome = Outcome(
        run=held.run, drill=drill.drill, title=drill.title, author=author, fleet=here.fleet.name,
        epoch_s=began.timestamp(), verdict=DrillVerdict.NOT_RUN, why="", document=drill.model_dump(mode="json"),
        values=asked.values,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        injector = faults if drill.kind == "fault" and faults is not None else _moves(here, store, author, why)
        for one in {injector, faults or injector}:
            stack.push_async_callback(one.close)
        fleet = await _drilled_fleet(drill, here, store, injector, faults, stack, salt=f"{began:%s%f}")
        runner = Runner(drill, held, records, fleet, outcome, asyncio.get_running_loop().time, progress)
        begun(runner)
        return await runner.run()


def _moves(here: DrillFleet, store: Store, author: str, why: str) -> Injector:
    """An injector that moves traffic by overrides, and raises the law's epoch."""

    async def raise_epoch() -> int:
        return await law.raised(store, here.fleet, here.topology, why, author)

    homes = {name: one.region for name, one in here.topology.entries.items()}
    return TrafficInjector(store, author, why, homes, lambda: datetime.now(UTC), raise_epoch)


async def _drilled_fleet(
    drill: Drill,
    here: DrillFleet,
    store: Store,
    injector: Injector,
    faults: FaultInjector | None,
    stack: AsyncExitStack,
    *,
    salt: str,
) -> DrilledFleet:
    """The fleet as the runner sees it: injector, checks, polled balancers, probe clients. What it opens `stack` closes.
    `salt` distinguishes this run's prompts from those of others.
    """
    http = await stack.enter_async_context(admin.AdminClient(here.fleet.access))
    connector = aiohttp.TCPConnector(limit=0, ssl=here.fleet.access.as_client())
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
    clock, balancers = asyncio.get_running_loop().time, here.fleet.of("global")
    clients, _ = here.clients(drill)
    facts = await facts_now(here, drill, Records(store), store, faults)
    model, ask = model_of(drill, here, facts.reports), _ask(session, tuple(here.entries().values()))

    def probe(received: Callable[[Canary], None]) -> Probe:
        emulated = here.world is not None and here.world.emulated
        return Probe(drill.canaries, clients, model, ask, clock, received, salt, emulated=emulated)

    async def look() -> Facts:
        return facts if not balancers else await facts_now(here, drill, Records(store), store, faults)

    egress = {name: one.egress_usd_per_gb for name, one in here.topology.regions.items()}
    oracle = await oracle_of(here, store)
    poller = StatusPoller([_asking(http, one.url) for one in balancers if one.url], clock)
    poller.begin()
    stack.push_async_callback(poller.close)
    return DrilledFleet(injector, look, poller, probe, oracle, egress)


def stop_on_signals(runner: Runner, more: Callable[[], None] = lambda: None) -> None:
    """Ctrl-C, a lost terminal and SIGTERM roll it back; then it is ABORTED. `more` is called, too: a watcher of the
    schedule ends, whether or not the run was over by then.
    """

    def stop(why: str) -> None:
        runner.stop(why)
        more()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, f"interrupted by {number.name}")


def _asking(http: admin.AdminClient, url: str) -> Callable[[], Any]:
    async def ask() -> Mapping[str, Any] | None:
        try:
            return await admin.get(http, url, "/status")
        except AdminError:
            return None

    return ask


def _ask(session: aiohttp.ClientSession, trusted: tuple[str, ...]) -> Any:
    """The probe's client is that of `farhop ask`."""

    async def ask(entries: Sequence[str], key: str, body: dict[str, Any], request_s: float) -> ProbeResult:
        first_ms: float | None = None
        asking = client.ask(entries, key, body, session=session, trusted=trusted, request_s=request_s)
        async with aclosing(asking) as events:
            async for event in events:
                if isinstance(event, Delta) and first_ms is None:
                    first_ms = event.at_ms
                elif isinstance(event, Result):
                    region = event.headers.get("x-farhop-region", "")
                    code = event.error.code or str(event.status) if event.error is not None else ""
                    return ProbeResult(status=event.status, region=region, code=code, text=event.text, ttft_ms=first_ms)
        raise AssertionError("a request has an end")

    return ask


async def reported(outcome: Outcome, store: Store, asked: DrillOptions, fleet_options: FleetOptions) -> int:
    """Keep and print a run's outcome; the exit code."""
    began = time.monotonic()
    past, folder = await save_outcome(outcome, store, asked.out)
    took_s = time.monotonic() - began
    if fleet_options.as_json:
        show.json({**msgspec.to_builtins(past), "folder": str(folder), "report_s": took_s})
    else:
        _show(past, [f"{one.check}: {one.seen}" for one in outcome.findings if not one.held])
        if failed := Counter(one.code for one in outcome.canaries if one.code).most_common(_CODES_MAX):
            show.line(f"failed requests were answered: {', '.join(f'{code} ({n})' for code, n in failed)}", "yellow")
        show.line(f"report in {took_s:.2f} s: {folder}/report.html, journal.json, junit.xml", "dim")
    if outcome.verdict is not DrillVerdict.PASS:
        warn(f"drill {outcome.drill}: {outcome.verdict}" + (f": {outcome.why}" if outcome.why else ""))
    return 0 if outcome.verdict is DrillVerdict.PASS else NEGATIVE


async def save_outcome(outcome: Outcome, store: Store, out: Path) -> tuple[Past, Path]:
    """Write the report into a folder of its own, and the result into the history. Warns if one of them cannot be
    written.
    """
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
        warn(f"--out: {folder}: {(error.strerror or 'cannot be written').lower()}; the verdict is unaffected")
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
    measured = [f"{name} {past.measures[name]:.4g}" for name in SHOWN if name in past.measures]
    if measured:
        show.line(", ".join(measured), "dim")
    show.line(
        f"{past.verdict}" + (f": {past.why}" if past.why else ""), f"bold {_STYLE.get(DrillVerdict(past.verdict), '')}"
    )


def _figure(value: float | None, unit: str) -> str:
    return show.NONE if value is None else f"{value:,.4g} {unit}"


# -- stop


def stop(run_id: str, all_: bool, release_: bool, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Stop the running drill, or all of them, or allow them again; the exit code: 1 if there was nothing to do."""
    if all_ and release_:
        fail("--all, --release: give one of them")
    here = fleet_options.fleet()
    order = Order(author=by or setting.author_here(), why=why, at_s=time.time())
    dry = show.DRY if fleet_options.dry_run else ""

    async def work(store: Store) -> int:
        records = Records(store)
        if release_:
            was = await records.emergency_stop() is not None if fleet_options.dry_run else await records.disengage()
            show.line(
                f"{dry}the emergency stop is disengaged: drills may begin"
                if was
                else "the emergency stop was not engaged"
            )
            return 0 if was else NEGATIVE
        holder = await records.holder()
        if all_:
            if not fleet_options.dry_run:
                await records.engage(order)
            until = "drills are stopped and blocked until `farhop drill stop --release`"
            show.line(f"{dry}the emergency stop is engaged: {until}")
        wanted = run_id or (holder.run if holder is not None else "")
        if holder is None or holder.run != wanted:
            show.line(f"no drill {'of that name ' if run_id else ''}runs")
            return 0 if all_ else NEGATIVE
        if not fleet_options.dry_run:
            await records.stop(wanted, order)
            await _gone(records, wanted)
        show.line(f"{dry}{wanted} is stopping, and restores what it injected")
        return 0

    return setting.with_store(here, work, writes=not fleet_options.dry_run)


async def _gone(records: Records, run_id: str) -> None:
    """Wait a moment until it has released its lock."""
    for _ in range(30):
        holder = await records.holder()
        if holder is None or holder.run != run_id:
            return
        await asyncio.sleep(0.1)


# -- past runs


def history(name: str, fleet_options: FleetOptions) -> int:
    """Finished runs, the newest first; the exit code."""
    here = fleet_options.fleet()

    async def work(store: Store) -> int:
        found = [one for one in await Records(store).history() if name in ("", one.drill)]
        if fleet_options.as_json:
            show.json({"runs": msgspec.to_builtins(found)})
            return 0
        rows = [
            [
                when(one.began_s), one.drill, one.verdict, _figure(one.measures.get("rto_s"), "s"),
                _figure(one.measures.get("failback_s"), "s"), f"{one.took_s:.0f} s", one.author, one.why,
            ]
            for one in found
        ]  # fmt: skip
        columns = ("began", "drill", "verdict", ">RTO", ">failback", ">took", "by", "why")
        show.table("drills that were run, the newest first", columns, rows)
        return 0

    return setting.with_store(here, work)


def when(epoch_s: float) -> str:
    """A time, for people."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def print_run(run_id: str, of: str, within: str, verdict_only: bool, fleet_options: FleetOptions) -> int:
    """A run's outcome, by default the last one's; the exit code: 0 for PASS alone."""
    here, within_s = fleet_options.fleet(), duration_s("--within", within) if within else float("inf")

    async def work(store: Store) -> int:
        found = [one for one in await Records(store).history() if run_id in ("", one.run) and of in ("", one.drill)]
        found = [one for one in found if time.time() - one.began_s <= within_s]
        if not found:
            warn(f"no run {run_id or of or 'at all'}{f' within {within}' if within else ''} is in the history: NOT_RUN")
            return NEGATIVE
        past = found[0]
        if fleet_options.as_json:
            show.json(msgspec.to_builtins(past))
        elif verdict_only:
            show.line(past.verdict)
        else:
            _show(past)
        return 0 if past.verdict == DrillVerdict.PASS else NEGATIVE

    return setting.with_store(here, work)


# -- export


def export(asked: DrillOptions, file: Path | None, fleet_options: FleetOptions) -> int:
    """Print a drill as a Chaos Toolkit experiment, or write it; the exit code."""
    here = DrillFleet(asked, fleet_options)

    async def work(store: Store) -> int:
        drill = read_document(find(asked, await Records(store).documents()), here, asked)
        extra = (
            f"--context {fleet_options.context}"
            if fleet_options.context
            else f"--world {fleet_options.world}"
            if fleet_options.world
            else ""
        )
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


# -- faults in a fleet on a platform


def faults(compose: str, namespace: str, kube_context: str, fleet_options: FleetOptions) -> int:
    """Inject faults in a deployed fleet for drills that run on this machine, until Ctrl-C; the exit code."""
    if bool(compose) is bool(namespace):
        fail("--compose, --kubernetes: give one of them")
    here, path = fleet_options.fleet(), deployed.FAULTS_FILE
    target = deployed.Containers(compose) if compose else deployed.Pods(namespace, kube_context)
    where = f"compose project {compose}" if compose else f"namespace {namespace}"

    async def work() -> int:
        regions = ", ".join(await target.regions())
        made = Faults(target, lambda text: warn(text))
        control, stopping = Control(made), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await control.start("127.0.0.1")
        try:
            described = deployed.FaultsFile(os.getpid(), here.name, control.url, control.token)
            await asyncio.to_thread(deployed.describe, path, described)
            show.line(
                f"drills on {here.name} may make faults in {where} ({regions}); Ctrl-C restores all, and ends this"
            )
            await stopping.wait()
        except OSError as error:
            fail(f"{path}: {error.strerror or 'cannot be written'}")
        finally:
            path.unlink(missing_ok=True)
            await made.mend_all()
            await control.close()
        return 0

    try:
        return asyncio.run(work())
    except FaultError as error:
        fail(str(error))
