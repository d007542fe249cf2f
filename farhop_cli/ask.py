"""`farhop ask`: send one request as a client would, then show where it went and why, and its trace.

Never keeps the prompt or the key; the key goes to the entries of this world alone.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farhop_cli import admin, evidence, running, show, tables
from farhop_cli.evidence import Account, Evidence
from farhop_cli.exits import FAULT, NEGATIVE, fail, warn
from farhop_cli.running import Caller, Running
from farhop_lab.world import client, world_file
from farhop_lab.world.client import Delta, Redirected, Result, Skipped
from farhop_lab.world.world_file import WorldFileError

EMULATED_TOKENS = 24
# What emulated engines get before a question, as most real ones do: six blocks of the prefix chain, which the next
# question finds cached.
SYSTEM = (
    "You are the assistant of a demonstration of Farhop, which routes requests for language models over regions of the "
    "world and over the replicas in them. For each request it counts how far away a region is, how long the request "
    "would wait there, and how much of its prompt is cached there already; and it never sends one where the law of its "
    "tenant forbids it to be read or computed. "
) * 4
PROMPT_CHARS_MAX = 16 * 1024 * 1024


@dataclass(frozen=True)
class Options:
    """The options, as typed."""

    prompt: str
    world: Path
    origin: str | None
    tenant: str | None
    key: str | None
    model: str | None
    max_tokens: int | None
    temperature: float | None
    allow: str | None
    completion: bool
    watch: bool
    url: str | None
    as_json: bool


@dataclass(frozen=True)
class Plan:
    """What is sent, by whom and where. `running` is None for an entry outside any known world."""

    running: Running | None
    who: Caller
    entries: list[str]
    trusted: list[str]
    path: str
    body: dict[str, Any]
    allow: tuple[str, ...]

    @property
    def question(self) -> dict[str, Any]:
        """The same request for `/explain`, its tenant left open."""
        return {"body": self.body, "path": self.path, "allow": self.allow}


def run(options: Options) -> int:
    """Send it and show the answer and the decision; the exit code."""
    return asyncio.run(_run(plan(options), options))


def plan(options: Options) -> Plan:
    """Which key asks which model at which entry. Ends the command if that is unknown."""
    here = _world(options)
    allow = running.places(here.topology if here is not None else None, options.allow)
    if here is None:
        if not options.key or not options.model or not options.url:
            fail("--url without a running world needs --key and --model")
        who, model, nearest = Caller(options.tenant, running.checked_key(options.key)), options.model, []
    else:
        who = running.caller(here, options.tenant, options.key, allow)
        model = options.model or here.file.model
        nearest = [here.file.regions[name].entry for name in here.nearest(options.origin)]
    path = client.COMPLETION if options.completion else client.CHAT
    entries = [_checked(options.url)] if options.url is not None else nearest
    return Plan(here, who, entries, nearest, path, _body(options, model, emulated=_emulated(here)), allow)


def _world(options: Options) -> Running | None:
    """The running world; with `--url` it is optional."""
    if options.url is not None:
        try:
            world_file.read(options.world)
        except WorldFileError:
            return None
    return running.ruled(running.open_world(options.world))


def _emulated(here: Running | None) -> bool:
    return here is not None and here.file.emulated


def _checked(url: str) -> str:
    try:
        return client.origin(url)
    except ValueError:
        fail("--url: give an entry such as http://127.0.0.1:8100")


def _body(options: Options, model: str, *, emulated: bool) -> dict[str, Any]:
    if not model.isprintable():
        fail("--model: the name holds characters that are no text")
    prompt = _prompt(options.prompt)
    asked: dict[str, Any] = {"model": model}
    # Emulated engines do not know when to end; and a bare question would not fill a block of their cache.
    system = [{"role": "system", "content": SYSTEM}] if emulated else []
    user = [{"role": "user", "content": prompt}]
    asked |= {"prompt": prompt} if options.completion else {"messages": [*system, *user]}
    most = options.max_tokens if options.max_tokens is not None or not emulated else EMULATED_TOKENS
    if most is not None:
        asked["max_tokens"] = most
    if options.temperature is not None:
        asked["temperature"] = options.temperature
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}


def _prompt(given: str) -> str:
    try:
        prompt = sys.stdin.read(PROMPT_CHARS_MAX) if given == "-" else given
        prompt.encode()  # bytes of an argument that are not text arrive as surrogates
    except UnicodeError:
        fail("the prompt is not UTF-8; give text")
    if not prompt:
        fail("the prompt is empty; give some text, or - to read it from standard input")
    return prompt


async def _run(planned: Plan, options: Options) -> int:
    trace_id = secrets.token_hex(16)
    result, times = await _send(planned, trace_id, quiet=options.as_json)
    found = None
    if planned.running is not None and result.status:
        async with admin.AdminClient() as http:
            found = await evidence.gather(
                http, planned.running, planned.who, result, trace_id, {**planned.question}
            )  # fmt: skip
    if options.as_json:
        show.json(_document(planned, result, found, times))
    else:
        _print(planned, result, found)
        if options.watch and times:
            show.line(gaps(times))
        if found is not None:
            _print_trace(found)
    if result.error is not None:
        code = f" ({result.error.code})" if result.error.code else ""
        warn(f"{f'status {result.status}' if result.status else 'not sent'}{code}: {result.error.message}")
        return NEGATIVE if result.status else FAULT
    return 0


async def _send(planned: Plan, trace_id: str, *, quiet: bool) -> tuple[Result, list[float]]:
    """The answer, shown as it comes, and the arrival times of its pieces (ms)."""
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    if planned.allow:
        headers["x-farhop-allow"] = ",".join(planned.allow)
    times: list[float] = []
    if _emulated(planned.running) and not quiet:
        show.line(
            "(emulated engines: their text is meaningless; speeds, queues and caches are those of real engines)", "dim"
        )
    asked = client.ask(
        planned.entries, planned.who.key, planned.body,
        path=planned.path, headers=headers, trusted=planned.trusted,
    )  # fmt: skip
    async for event in asked:
        if isinstance(event, Result):
            result = event
        elif isinstance(event, Delta):
            times.append(event.at_ms)
            if not quiet:
                show.streamed(event.text)
        elif not quiet:
            _print_detour(planned, event)
    if not quiet and result.text:
        show.streamed("\n" if result.text.endswith("\n") else "\n\n")
    return result, times


def _print_detour(planned: Plan, event: Skipped | Redirected) -> None:
    name = _name(planned, event.entry)
    if isinstance(event, Skipped):
        show.line(f"{name} could not be asked: {event.why}", "yellow")
    elif event.by_token:
        show.line(f"{name} sent us on to the region itself, by a token ({event.to})", "yellow")
    else:
        show.line(f"{name} may not read this request and sent us on to {_name(planned, event.to)}", "yellow")


def _name(planned: Plan, entry: str) -> str:
    region = planned.running.region_of(entry) if planned.running is not None else None
    return f"{region} ({entry})" if region is not None else entry


# -- printing


def _print(planned: Plan, result: Result, found: Evidence | None) -> None:
    if found is not None:
        _print_global(found.global_)
        if found.regional.region is not None:
            _print_regional(found.regional)
    decision = result.headers.get("x-farhop-decision")
    if decision:
        region = result.headers.get("x-farhop-region", "no region")
        kept = result.headers.get("x-farhop-cache")
        cache = f", answer cache: {kept}" if kept else ""
        show.line(f"decision {decision}: entry {_name(planned, result.entry)}, served by {region}{cache}")
    if result.ttft_ms is None:
        return
    usage = result.usage
    tokens = ""
    if usage is not None:
        cached = show.number(usage.cached_tokens)
        tokens = f" · {usage.prompt_tokens} prompt tokens ({cached} cached) + {usage.completion_tokens} written"
    computed = usage is not None and not usage.cached_tokens and result.headers.get("x-farhop-cache") != "hit"
    if _emulated(planned.running) and computed and "messages" in planned.body:
        tokens += " · ask again, and find the system prompt before your question cached"
    promised = _promised(found)
    show.line(f"ttft {result.ttft_ms:.1f} ms{promised} · {result.total_ms:.1f} ms in all{tokens}", "bold")
    if planned.running is not None and planned.running.file.speedup != 1.0:
        show.line(f"(this world runs {planned.running.file.speedup:g} times as fast as a real one)", "dim")


def _promised(found: Evidence | None) -> str:
    record = found.global_.record if found is not None else None
    reasons = (record or {}).get("reasons") or {}
    chosen = next((c for c in reasons.get("candidates", []) if c.get("region") == reasons.get("chosen")), None)
    return f" (promised {show.number(chosen.get('ttft_ms'))})" if chosen is not None else ""


def _print_global(account: Account) -> None:
    place = account.region or "an entry outside this world"
    if account.record is not None:
        tables.global_record(account.record, place)
        return
    show.line(f"no record of the decision in {place}: {account.note}", "yellow")
    if account.explained is not None:
        tables.regions(account.explained, f"which region: as {place} would decide now")


def _print_regional(account: Account) -> None:
    assert account.region is not None
    if account.record is not None:
        tables.regional_record(account.record, account.region)
    else:
        show.line(f"no record of the pick in {account.region}: {account.note}", "yellow")


def _print_trace(found: Evidence) -> None:
    trace = found.trace
    show.line("")
    show.line(f"trace {trace.trace_id}" + (f" ({trace.note})" if trace.note else ""), "bold")
    show.cropped(trace.tree)


def gaps(times: list[float]) -> str:
    """The times between an answer's pieces, summarised. `times` are milliseconds, ascending."""
    between = sorted(after - before for before, after in itertools.pairwise(times))
    if not between:
        return "gaps between pieces: none, the answer came in one piece"
    middle, high = between[len(between) // 2], between[min(len(between) - 1, len(between) * 95 // 100)]
    return (
        f"gaps between {len(times)} pieces: median {middle:.1f} ms · p95 {high:.1f} ms · longest {between[-1]:.1f} ms"
    )


def _document(planned: Plan, result: Result, found: Evidence | None, times: list[float]) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(result)
    document |= {
        "region": result.headers.get("x-farhop-region"),
        "answer_cache": result.headers.get("x-farhop-cache"),
        "decision": result.headers.get("x-farhop-decision"),
        "tenant": planned.who.tenant,
        "piece_ms": times,
        "speedup": planned.running.file.speedup if planned.running is not None else None,
    }
    if found is not None:
        document |= {"global": found.global_, "regional": found.regional, "trace": found.trace}
    return document
