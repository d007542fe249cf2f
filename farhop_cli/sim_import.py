"""`farhop sim import`: turns a user's request log into a trace and a scenario that plays it.

Reads the log, writes two new files, and overwrites nothing. Never keeps a text: only times, lengths, sessions and
regions. A published trace that a scenario plays as it stands is not copied: the scenario names it.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from farhop_cli import show
from farhop_cli.exits import fail, warn
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.sim.sites import MODEL
from farhop_lab.workloads import load, own_logs
from farhop_lab.workloads.traces import MOONCAKE_BUCKET_MS
from topology import load as topologies
from topology.problems import TopologyError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.workloads.traces import LogRow
    from topology.model import Topology

COMPLAINTS_SHOWN = 3
NAME_CHARS, _NOT_OF_A_NAME = 63, re.compile(r"[^a-z0-9._-]+")
REPLICAS = 2
GPUS = ("a100", "h100")  # the first one that has room for the longest request
LENGTH_S_MAX, WARM_UP_SHARE = 604_800.0, 0.1
LAST_S = 1.0  # no client sends at a scenario's very end: the last request of a log, too, comes before


@dataclass(frozen=True, slots=True)
class Options:
    """The options."""

    log: Path
    out: Path
    fields: tuple[str, ...]
    regions: str
    topology: str
    skip: bool
    as_json: bool
    block_tokens: int = 0


def run(options: Options) -> int:
    """Write trace and scenario, print a summary of the log; the exit code."""
    trace = options.out.with_suffix(".jsonl")
    if options.out.suffix not in (".yaml", ".yml"):
        fail(f"--out: {options.out} is no scenario's name; let it end in .yaml")
    for path, what in ((options.out, f"{options.out}"), (trace, f"its trace goes to {trace}, which")):
        if path.exists():
            fail(f"--out: {what} is there already, and is not written over; give another name")
    topology = _topology(options)
    known = _regions(options, topology)
    read = _read(options, trace)
    for complaint in read.left_out[:COMPLAINTS_SHOWN]:
        warn(f"left out: {complaint}")
    rows = read.rows
    named = sorted({row.region for row in rows if row.region})
    for name in named:
        ignored = "" if read.as_it_is else ", or ignore regions by --field region=-"
        _known(f"{options.log}: it names", name, list(topology.regions), f"; give yours by --topology{ignored}")
    recorded = len(named) > 0 and all(row.region for row in rows)
    facts = _facts(rows) | {
        "left_out": len(read.left_out), "trace": read.work["path"] if read.as_it_is else str(trace),
        "scenario": str(options.out),
    }  # fmt: skip
    try:
        if not read.as_it_is:
            trace.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        scenario = _scenario(options, topology, read, named if recorded else known, recorded, {*known, *named})
        options.out.write_text(scenario, encoding="utf-8")
    except OSError as error:
        for path in (trace, options.out):  # no half of one, which the same command would find in its way
            with suppress(OSError):
                path.unlink()
        fail(f"--out: {error.filename or options.out.parent}: {error.strerror}; give a place that can be written to")
    for note in _notes(read):
        warn(note)
    if options.as_json:
        show.json(facts)
        return 0
    columns = (" ", ">")
    show.table(f"{options.log}", columns, [(name.replace("_", " "), _shown(value)) for name, value in facts.items()])
    show.line(f"Say in {options.out} which GPUs you have, then: farhop sim {shlex.quote(str(options.out))}")
    return 0


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read. `work`: the kind of trace that the scenario plays, its path and its loop."""

    rows: Sequence[LogRow]
    left_out: Sequence[str]
    work: dict[str, str]

    @property
    def as_it_is(self) -> bool:
        """Whether the scenario plays the file that was read."""
        return self.work["kind"] != "log"

    @property
    def is_closed(self) -> bool:
        """Whether sessions are played, each turn after the answer before it."""
        return self.work["kind"] == "sessions" or self.work.get("loop") == "closed"


def _read(options: Options, trace: Path) -> _Read:
    fields = _fields(options.fields)
    try:
        found = None if fields or options.block_tokens else load.published(options.log)
        if found is not None:
            kind, rows = found
            return _Read(rows, (), {"kind": kind, "path": str(options.log.resolve())})
        rows, left_out = load.own_log(options.log, fields, skip=options.skip, block_tokens=options.block_tokens)
    except load.TraceError as error:
        fail(str(error))
    loop = {"loop": "closed"} if any(row.session for row in rows) else {}
    return _Read(rows, left_out, {"kind": "log", "path": trace.name} | loop)


def _fields(given: Sequence[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for one in given:
        name, _, path = one.partition("=")
        if name not in own_logs.NAMES:
            fail(f"--field: {did_you_mean(name, own_logs.NAMES, 'there are: ' + ', '.join(own_logs.NAMES))}")
        if not path:
            fail(f"--field: {one!r} names no path; give one such as {name}=usage.{name}")
        fields[name] = path
    return fields


def _topology(options: Options) -> Topology:
    try:
        return topologies.load(options.topology if _is_file(options) else topologies.shipped(options.topology))
    except TopologyError as error:
        fail(f"--topology: {error.source}: {error.problems[0]}")


def _is_file(options: Options) -> bool:
    return options.topology.endswith((".yaml", ".yml"))


def _regions(options: Options, topology: Topology) -> list[str]:
    """The regions of replicas, and of requests that name none."""
    known = list(topology.regions)
    chosen = [name.strip() for name in options.regions.split(",") if name.strip()] or known
    for name in chosen:
        _known("--regions:", name, known)
    return chosen


def _known(option: str, region: str, known: Sequence[str], more: str = "") -> None:
    if region not in known:
        remedy = did_you_mean(region, known, f"the topology has: {', '.join(known)}")
        fail(f"{option} unknown region {region[:63]!r}; {remedy}{more}")


def _facts(rows: Sequence[LogRow]) -> dict[str, Any]:
    """The summary of a log. Tokens are per request."""
    span_s = _span_s(rows)
    inputs, outputs = sorted(row.input_tokens for row in rows), sorted(row.output_tokens for row in rows)
    return {
        "requests": len(rows),
        "sessions": len({row.session for row in rows if row.session}),
        "span_s": round(span_s, 3),
        "requests_per_s": round(len(rows) / span_s, 3) if span_s else None,
        "input_tokens_mean": round(fmean(inputs), 1),
        "input_tokens_median": median(inputs),
        "input_tokens_max": inputs[-1],
        "output_tokens_mean": round(fmean(outputs), 1),
        "output_tokens_median": median(outputs),
        "output_tokens_max": outputs[-1],
    }


def _notes(read: _Read) -> list[str]:
    """What the log lacks, and what that means for a plan."""
    notes, rows = [], read.rows
    room = max(PROFILES[name].context_tokens for name in GPUS)
    if cut := sum(row.input_tokens + row.output_tokens > room for row in rows):
        ends = "a session ends before such a one; only its first, and what is of no session, is cut to that"
        then = ends if read.is_closed else "they are cut to that"
        notes.append(f"{cut} of {len(rows)} requests are longer than {room} tokens: {then}")
    if empty := sum(not (row.input_tokens and row.output_tokens) for row in rows):
        notes.append(f"{empty} of {len(rows)} requests have a prompt or an answer of 0 tokens, which counts as 1")
    named = sum(bool(row.region) for row in rows)
    if 0 < named < len(rows):
        notes.append(f"{len(rows) - named} of {len(rows)} requests name no region, so all of them are placed evenly")
    if (span_s := _span_s(rows)) > LENGTH_S_MAX:
        notes.append(
            f"the log spans {span_s:.0f} s, and the scenario plays its first {LENGTH_S_MAX:.0f}; for others give its "
            "work `since_s`"
        )
    later, shorter = _later_turns(rows)
    if not read.as_it_is and shorter > later / 2:
        notes.append(
            f"{shorter} of {later} later turns are shorter than the conversation before them, so their context begins "
            "anew; if a turn's tokens are only what it adds, say so by --field new_tokens=PATH"
        )
    if not (read.as_it_is or any(row.session or row.blocks for row in rows)):
        notes.append(
            "the log has no sessions and no blocks: every prompt counts as new, so a plan will be too large if prompts "
            "begin alike; say where sessions are by --field session=PATH, or record with `farhop record`"
        )
    return notes


def _later_turns(rows: Sequence[LogRow]) -> tuple[int, int]:
    """How many turns follow another of their session, and how many of them are shorter than all that was said."""
    held: dict[str, int] = {}
    later = shorter = 0
    for row in rows:
        if row.session:
            if row.session in held:
                later, shorter = later + 1, shorter + (row.input_tokens < held[row.session])
            held[row.session] = row.input_tokens + row.output_tokens
    return later, shorter


def _span_s(rows: Sequence[LogRow]) -> float:
    return rows[-1].at_s - rows[0].at_s


def _scenario(
    options: Options, topology: Topology, read: _Read, regions: Sequence[str], recorded: bool, sites: set[str]
) -> str:
    """`regions`: where requests come in; `sites`: where replicas are."""
    rows = read.rows
    last_s = MOONCAKE_BUCKET_MS / 1e3 if read.work["kind"] == "mooncake" else LAST_S
    span_s = min(LENGTH_S_MAX, _span_s(rows) + last_s)
    work: dict[str, Any] = {**read.work, "regions": list(regions)}
    work |= {"place": "recorded"} if recorded else {}
    work |= {} if "anywhere" in topology.tenants else {"tenant": next(iter(topology.tenants))}
    longest = max(row.input_tokens + row.output_tokens for row in rows)
    gpu = next((name for name in GPUS if longest <= PROFILES[name].context_tokens), GPUS[-1])
    room = PROFILES[gpu].context_tokens
    answer_tokens = max(1, max(row.output_tokens for row in rows))
    # No more than needed, so that any GPU with room for the longest request can be used. Longer requests are cut.
    context_tokens = min(room, max(longest, answer_tokens + 1))
    work["figures"] = {"context_tokens": context_tokens, "max_tokens": min(answer_tokens, room // 2)}
    document = {
        "name": _NOT_OF_A_NAME.sub("-", options.out.stem.lower()).strip("._-")[:NAME_CHARS].rstrip("._-") or "imported",
        "about": f"Made of {options.log.name[:200]}: {len(rows)} requests.",
        "topology": str(Path(options.topology).resolve()) if _is_file(options) else options.topology,
        "sites": {name: {"gpu": gpu, "replicas": REPLICAS} for name in topology.regions if name in sites},
        "work": [work],
        "duration_s": round(span_s, 3),
        "warm_up_s": round(min(span_s, _span_s(rows)) * WARM_UP_SHARE, 3),  # 0 if all came at once
        "routers": ["farhop", "spill-least-load", "region-local"],
        "seeds": 3,
    }
    return f"# Replicas and GPUs are a starting point: give yours. The model stands for {MODEL}.\n" + yaml.safe_dump(
        document, sort_keys=False
    )


def _shown(value: object) -> str:
    return show.NONE if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
