"""Drills of `farhop console`: listed, checked, begun and watched from its page, with the code of `farhop drill`.

A run is in this process: stopping the console stops it, and it restores everything; if the console is killed, faults
and lock end by their own leases. Invariant: one run at a time, of exactly the document that was shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.service.admin.console.acts import ActError
from farhop_cli import drill as drills
from farhop_cli import drill_fleet
from farhop_drill import checks, document
from farhop_drill.document import DrillError
from farhop_drill.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.store.contract import Store
    from farhop_cli.drill_fleet import DrillFleet, DrillOptions, Found
    from farhop_drill.document import Drill
    from farhop_drill.outcome import Outcome
    from farhop_drill.runner import Runner

RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LINES_MAX = 64
VALUE_CHARS_MAX = 256
REPORTS_MAX = 1000
REPORT_BYTES_MAX = 32 * 1024 * 1024
PAST = "past.json.z"  # the console's snapshots, beside a run's report
PAST_BYTES_MAX = 256 * 1024 * 1024
CLOSE_S = 12.0  # injected faults end by themselves within half of it


class _ActiveRun:
    """A run that was begun here. `verdict` is "" while it runs."""

    def __init__(self, drill: Drill, author: str, why: str) -> None:
        self.drill, self.author, self.why = drill, author, why
        self.began_s, self._clock = time.time(), time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.runner: Runner | None = None
        self.begun = asyncio.Event()
        self.verdict = self.ended = ""
        self.blocked: list[str] = []
        self.past_recorded = False

    def progress(self, text: str) -> None:
        self.lines.append((round(time.monotonic() - self._clock, 1), text[:300]))
        del self.lines[:-LINES_MAX]

    def has(self, runner: Runner) -> None:
        self.runner = runner
        self.begun.set()

    def status(self) -> dict[str, Any]:
        runner, drill = self.runner, self.drill
        canaries = runner.outcome.canaries if runner is not None else ()
        return {
            "run": runner.outcome.run if runner is not None else "",
            "drill": drill.drill, "title": drill.title, "author": self.author, "why": self.why,
            "began_s": self.began_s, "at_s": round(time.monotonic() - self._clock, 1),
            "planned_s": drill.planned_s, "steps": len(drill.steps), "lines": self.lines,
            "phase": str(runner.run_.phase.value) if runner is not None else "pending",
            "live": dict(runner.live) if runner is not None else {},
            "canaries": len(canaries), "failed": sum(bool(one.code) for one in canaries),
            "verdict": self.verdict, "ended": self.ended, "blocked": self.blocked,
        }  # fmt: skip


class DrillControl:
    """Drills of one fleet; `asked` has the console's options for drills. See console.acts.Drills."""

    def __init__(self, here: DrillFleet, store: Store, asked: DrillOptions) -> None:
        self._here, self._store, self._asked = here, store, asked
        self._going: _ActiveRun | None = None
        self._task: asyncio.Task[None] | None = None

    async def offered(self) -> list[dict[str, Any]]:
        """See Drills."""
        found: list[dict[str, Any]] = []
        for name, one in sorted((await self._known()).items()):
            with contextlib.suppress(DrillError):  # `farhop drill list` reports one that cannot be read
                raw = await asyncio.to_thread(document.parsed, one.text, one.source)
                kind = raw.get("kind")
                if kind == "traffic" or (kind == "fault" and self._has_faults):
                    values = {key: str(value) for key, value in document.parameters(raw).items()}
                    title = str(raw.get("title"))
                    found.append(
                        {"drill": name, "title": title, "kind": kind, "parameters": values, "from": one.source}
                    )
        return found

    async def plan(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        """See Drills."""
        found, drill = await self._read(name, values)
        findings = await drills.looked(drill, self._here, self._store)
        return {
            "revision": _revision(found, values),
            "title": drill.title,
            "plan": _plan(drill),
            "checks": msgspec.to_builtins(sorted(findings, key=lambda one: one.held)),
            "may_run": not checks.blocked(findings),
        }

    async def begin(self, name: str, values: Mapping[str, str], revision: int, why: str, author: str) -> str:
        """See Drills."""
        found, drill = await self._read(name, values)
        if _revision(found, values) != revision:
            raise ActError("this drill was changed after it was shown; reload it, then repeat the action", 409)
        if self._task is not None and not self._task.done():
            raise ActError("a drill that was begun here still runs: stop it, or wait for it", 409)
        self._going = going = _ActiveRun(drill, author, why)
        sets = tuple(f"{key}={value}" for key, value in values.items())
        asked = replace(self._asked, name=name, sets=sets, why=why, by=author)
        self._task = asyncio.create_task(self._run(going, asked))
        await going.begun.wait()
        if going.runner is None:
            raise ActError(f"it could not begin, and nothing was touched: {going.ended}", 503)
        return going.runner.outcome.run

    async def _run(self, going: _ActiveRun, asked: DrillOptions) -> None:
        try:
            outcome = await drills.carried_out(going.drill, self._here, self._store, asked, going.progress, going.has)
            await drills.save_outcome(outcome, self._store, asked.out)
            _ended(going, outcome)
        except Exception as error:  # noqa: BLE001 - whatever ends it, its page says so, and the console goes on
            going.ended = str(error) or type(error).__name__
            going.verdict = going.verdict or "NOT_RUN"
        finally:
            going.begun.set()

    def going(self) -> dict[str, Any] | None:
        """See Drills."""
        return self._going.status() if self._going is not None else None

    async def reported(self) -> dict[str, bool]:
        """See Drills."""
        return await asyncio.to_thread(_reported, self._asked.out)

    async def report(self, run: str) -> bytes | None:
        """See Drills."""
        if RUN.fullmatch(run) is None:
            return None
        return await asyncio.to_thread(_bounded, self._asked.out / run / "report.html", REPORT_BYTES_MAX)

    async def keep_past(self, past: Callable[[int], bytes]) -> None:
        """See Drills."""
        going = self._going
        if going is None or going.past_recorded or not going.verdict or going.runner is None:
            return
        going.past_recorded = True
        path = self._asked.out / going.runner.outcome.run / PAST
        try:
            await asyncio.to_thread(lambda: path.write_bytes(zlib.compress(past(int(going.began_s * 1e3)))))
        except OSError as error:
            going.progress(f"its pictures could not be kept: {(error.strerror or 'cannot be written').lower()}")

    async def past(self, run: str) -> bytes | None:
        """See Drills."""
        if RUN.fullmatch(run) is None:
            return None
        found = await asyncio.to_thread(_bounded, self._asked.out / run / PAST, REPORT_BYTES_MAX)
        return await asyncio.to_thread(_whole, found) if found is not None else None

    async def close(self) -> None:
        """Stop the run, and wait until it has restored everything."""
        if self._task is None or self._task.done():
            return
        if self._going is not None and self._going.runner is not None:
            self._going.runner.stop("the console that ran it was ended")
            await asyncio.wait((self._task,), timeout=CLOSE_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    # -- documents

    @property
    def _has_faults(self) -> bool:
        return bool(self._here.control[0])

    async def _known(self) -> dict[str, Found]:
        kept = await Records(self._store).documents()
        return await asyncio.to_thread(drill_fleet.known_drills, kept, self._asked.folder)

    async def _read(self, name: str, values: Mapping[str, str]) -> tuple[Found, Drill]:
        known = await self._known()
        if name not in known:
            raise ActError(f"target: no drill {name[:64]!r} is known here; `farhop drill list` lists them")
        for key, value in values.items():
            if len(value) > VALUE_CHARS_MAX or "\n" in value:
                raise ActError(f"{key[:64]}: at most {VALUE_CHARS_MAX} characters in one line")
        found = known[name]
        try:
            drill = await asyncio.to_thread(document.read, found.text, name, self._here.names, values)
        except DrillError as error:
            raise ActError("; ".join(error.problems).replace("--set ", "")) from None
        if drill.kind == "fault" and not self._has_faults:
            raise ActError("a fault drill needs a world that `farhop up` runs on this machine; traffic drills run here")
        return found, drill


def _ended(going: _ActiveRun, outcome: Outcome) -> None:
    going.blocked = [f"{one.check}: {one.seen}" for one in outcome.findings if not one.held]
    going.verdict, going.ended = outcome.verdict.value, outcome.why


def _revision(found: Found, values: Mapping[str, str]) -> int:
    """Identifies the document and its parameters: a number that JSON and a browser represent exactly."""
    digest = hashlib.sha256(found.text + b"\0" + msgspec.json.encode(sorted(values.items()))).digest()
    return int.from_bytes(digest[:6], "big")


def _plan(drill: Drill) -> list[str]:
    lines = [
        f"It takes {drill.planned_s:g} s, at most {drill.duration_max_s:g} s, and is then put back ({drill.kind})."
    ]
    for number, step in enumerate(drill.steps, 1):
        does = ", ".join(
            one.target.replace("/", " ") + (f" {one.share:.0%}" if one.share < 1.0 else "") for one in step.inject
        )
        lines.append(f"{number}. {step.name}: {does}, for {step.soak_s:g} s")
    lines += [f"It should hold: {one}" for one in drill.hypotheses]
    lines += [f"It ends early if {one.measure} is above {one.above:g} for {one.for_s:g} s" for one in drill.aborts]
    return lines


def _reported(out: Path) -> dict[str, bool]:
    try:
        names = sorted((one.name for one in out.iterdir() if RUN.fullmatch(one.name)), reverse=True)[:REPORTS_MAX]
    except OSError:
        return {}
    return {name: (out / name / PAST).is_file() for name in names if (out / name / "report.html").is_file()}


def _bounded(path: Path, bytes_max: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            found = file.read(bytes_max + 1)
    except OSError:
        return None
    return found if len(found) <= bytes_max else None


def _whole(packed: bytes) -> bytes | None:
    """None for an invalid packed file, or one larger than is ever written."""
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(packed, PAST_BYTES_MAX)
    except zlib.error:
        return None
    return found if unpacker.eof else None
