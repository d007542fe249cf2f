"""Runs cells in parallel, a process each, and writes each result to disk at once.

Invariants: a result is in its file whole or not at all; a result in the folder that was made by the same code from the
same scenario is not computed again; when this ends, however it does, no process of it is left. A cell depends on
nothing but its scenario, router, load and seed, so neither order nor number of processes changes any result.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
from functools import cache
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

import farhop
import farhop_lab
import global_lb
import regional_lb
import topology
from farhop_lab.studies import cell
from farhop_lab.studies.cell import Key, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkServerProcess

    from farhop_lab.scenarios.load import Scenario

_CODE = (topology, farhop, regional_lb, global_lb, farhop_lab)


class CellError(Exception):
    """A cell that could not be run, or results that cannot be written; the text is one line."""


class Job(msgspec.Struct, frozen=True):
    """A cell to run, with what another process needs for it. `sure`: see cell.run."""

    key: Key
    document: dict[str, Any]
    folder: str
    recipe: str
    sure: bool = False


def recipe(scenario: Scenario) -> str:
    """Identifies what a result was made of: scenario, topology, traces and code. Equal recipes and keys give equal
    results.
    """
    made = xxhash.xxh3_64()
    document = scenario.document()
    for name in ("routers", "seeds", "loads", "about"):
        document.pop(name)
    made.update(msgspec.json.encode(document, order="deterministic"))
    made.update(scenario.topology_path.read_bytes())
    for work in scenario.doc.work:
        if work.path:
            made.update((scenario.folder / work.path).read_bytes())
    made.update(_code())
    return made.hexdigest()


@cache  # 20 ms, and 200 worlds are 200 scenarios; this process runs the code that it imported, whatever follows on disk
def _code() -> bytes:
    """The digest of all code that a result depends on."""
    made = xxhash.xxh3_128()
    for package in _CODE:
        assert package.__file__ is not None
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            made.update(path.read_bytes())
    return made.digest()


def jobs(scenario: Scenario, routers: Sequence[str], seeds: Sequence[int], *, sure: bool = False) -> list[Job]:
    """Every cell of a scenario: by seed first, so that an interrupted run has all routers of its finished seeds."""
    doc, made = scenario.doc, recipe(scenario)
    document = scenario.document()
    return [
        Job(Key(doc.name, router, load, seed), document, str(scenario.folder), made, sure)
        for seed in seeds
        for load in doc.loads
        for router in routers
    ]


# -- on disk


def load(job: Job, out: Path | None) -> Result | None:
    """The result of an earlier run; None if there is none, or it has another recipe or cannot be read."""
    if out is None:
        return None
    try:
        result = msgspec.json.decode((out / f"{job.key.slug}.json").read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError):
        return None  # missing, or not ours: it is run and overwritten
    return result if result.recipe == job.recipe and result.key == job.key else None


def save(result: Result, out: Path) -> None:
    """Write it, whole or not at all. Raises CellError."""
    path = out / f"{result.key.slug}.json"
    half = path.with_suffix(".half")
    try:
        half.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
        half.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            half.unlink()
        raise CellError(f"{path}: {error.strerror or error}; give a folder that can be written to") from None


def opened(out: Path) -> Path:
    """The folder, created if missing. Raises CellError, also if it cannot be written to: not after an hour's run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CellError(f"{out}: {error.strerror or error}; give another folder") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise CellError(f"{out}: {os.strerror(errno.EACCES)}; give a folder that can be written to")
    return out


# -- in processes


def run(
    wanted: Sequence[Job],
    *,
    out: Path | None = None,
    workers: int | None = None,
    done: Callable[[Result], None] | None = None,
    moved: Callable[[float], None] | None = None,
) -> list[Result]:
    """Run them all; results in their order. `done` is called with each result; `moved` with how many cells' worth is
    done. CellError for the first that fails; finished ones stay on disk.
    """
    results: dict[Key, Result] = {}
    waiting: list[Job] = []
    for job in wanted:
        found = load(job, out)
        if found is None:
            waiting.append(job)
        else:
            results[job.key] = found
            if done is not None:
                done(found)

    def finished(result: Result) -> None:
        results[result.key] = result
        if out is not None:
            save(result, out)
        if done is not None:
            done(result)

    if not waiting:  # the imports of the process that forks would be most of what this takes
        return [results[job.key] for job in wanted]
    have = len(results)
    crew = _Crew(workers or os.cpu_count() or 1)
    try:
        crew.work(waiting, finished, lambda share: moved(have + share) if moved is not None else None)
    finally:
        crew.end()
    return [results[job.key] for job in wanted]


class _Crew:
    """At most this many processes at once, one for each cell."""

    def __init__(self, workers: int) -> None:
        self._workers = max(1, workers)
        # Fork from a process with all imports done: they would take longer than many a cell does.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", cell.__name__])
        # Ctrl-C is for this process. It would end the tracker during its imports, with a stack trace: it ignores it
        # only later.
        resource_tracker.ensure_running()  # which it starts, too, and which unblocks SIGINT again
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        self._busy: dict[connection.Connection, tuple[Job, ForkServerProcess]] = {}
        self._shares: dict[Key, float] = {}

    def work(self, waiting: list[Job], finished: Callable[[Result], None], moved: Callable[[float], None]) -> None:
        queue = list(reversed(waiting))
        while queue or self._busy:
            while queue and len(self._busy) < self._workers:
                self._begin(queue.pop())
            for ready in connection.wait(list(self._busy)):
                assert isinstance(ready, connection.Connection)
                self._receive(ready, finished)
            moved(sum(self._shares.values()))

    def _begin(self, job: Job) -> None:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=work_apart, args=(there, msgspec.msgpack.encode(job)), daemon=True)
        process.start()
        there.close()
        self._busy[here] = (job, process)

    def _receive(self, here: connection.Connection, finished: Callable[[Result], None]) -> None:
        job, process = self._busy[here]
        try:
            kind, content = here.recv()
        except EOFError:
            process.join()
            raise CellError(
                f"{job.key.slug}: its process ended with code {process.exitcode}; is memory short?"
            ) from None
        if kind == "share":
            self._shares[job.key] = content
            return
        del self._busy[here]
        here.close()
        process.join()
        if kind == "error":
            raise CellError(f"{job.key.slug}: {content}")
        self._shares[job.key] = 1.0
        finished(msgspec.msgpack.decode(content, type=Result))

    def end(self) -> None:
        for here, (_, process) in self._busy.items():
            process.terminate()
            process.join()
            here.close()
        self._busy.clear()


def work_apart(there: connection.Connection, content: bytes) -> None:
    """A cell's process. Ctrl-C is for its parent, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what it was forked with: `cell.rare_collections` would look through all of it first
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: there is no process left to inform
        _tell(there, msgspec.msgpack.decode(content, type=Job))
    there.close()


def _tell(there: connection.Connection, job: Job) -> None:
    try:
        result = cell.run(
            job.document,
            Path(job.folder),
            job.key,
            job.recipe,
            lambda share: there.send(("share", share)),
            sure=job.sure,
        )
    except Exception as error:  # noqa: BLE001 - sent to the parent, which reports it in one line
        there.send(("error", f"{type(error).__name__}: {error}"))
    else:
        there.send(("result", msgspec.msgpack.encode(result)))
