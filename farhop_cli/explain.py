"""`farhop explain`: where a request would go now, or why a past one went where it did.

Nothing is sent to an engine. A request's body is shown only to balancers that may read it by the tenant's law.
"""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.service.admin.console import snapshot
from farhop_cli import admin, evidence, fleet, running, show, tables
from farhop_cli.access import AdminError, QuestionError
from farhop_cli.exits import FAULT, NEGATIVE, PARTIAL, fail, listed, warn
from farhop_lab.world import client
from topology.law import Law, Scope

if TYPE_CHECKING:
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions
    from topology.model import Topology

BODY_BYTES_MAX = 16 * 1024 * 1024
_DECISION = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Options:
    """The options, as typed."""

    what: str
    fleet_options: FleetOptions
    origin: str | None
    tenant: str | None
    allow: str | None
    drained: str = ""  # a region that is left out


def run(options: Options) -> int:
    """Explain it; the exit code."""
    here = options.fleet_options.fleet()
    path = Path(options.what)
    if _DECISION.fullmatch(options.what) and not path.exists():
        return asyncio.run(_past(here, options))
    if here.topology is None:
        fleet.unreachable(here, asyncio.run(here.seen("global")))
        fail(f"{here.name}: no balancer reports its topology, which `explain` needs; add the topology to the context")
    if options.drained:
        fleet.known(options.drained, here.topology.regions, f'topology "{here.topology.name}"')
    topology = running.under_law(here.topology, here.admins, here.access)
    return asyncio.run(_now(here, topology, options, _question(topology, options, _read(path))))


# -- a request that is not sent


def _read(path: Path) -> bytes:
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read(BODY_BYTES_MAX + 1)
        with path.open("rb") as file:
            return file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        why = (error.strerror or "cannot be read").lower()
        fail(f"{path}: {why}; give a request's JSON file, or a decision id (16 hex digits)")


def _question(topology: Topology, options: Options, body: bytes) -> dict[str, Any]:
    if len(body) > BODY_BYTES_MAX:
        fail(f"{options.what}: larger than {BODY_BYTES_MAX} bytes, the most that a balancer reads")
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fail(f"{options.what}: {error}; give a JSON body as for /v1/chat/completions")
    if not isinstance(document, dict) or not {"messages", "prompt"} & document.keys():
        fail(f"{options.what}: neither `messages` nor `prompt` in it; give a JSON body as for /v1/chat/completions")
    tenant = options.tenant or ("anywhere" if "anywhere" in topology.tenants else next(iter(topology.tenants), ""))
    if tenant not in topology.tenants:
        fail(f"--tenant: no tenant {tenant!r} in this fleet; it has {listed(topology.tenants)}")
    path = client.CHAT if "messages" in document else client.COMPLETION
    allow = running.places(topology, options.allow)
    left_out = {"drained": options.drained} if options.drained else {}
    return {"body": msgspec.Raw(body), "tenant": tenant, "path": path, "allow": allow, **left_out}


async def _now(here: Fleet, topology: Topology, options: Options, question: dict[str, Any]) -> int:
    async with admin.AdminClient(here.access) as http:
        entry, answer = await _at_entry(http, here, topology, options.origin, question)
        reasons, law = answer.get("reasons") or {}, answer.get("law")
        chosen = reasons.get("chosen")
        if options.drained and answer.get("drained") != options.drained:
            fail(f"{entry} runs an older build, which cannot leave out a region")
        question = _for_the_model(question, answer.get("model"))
        regional: dict[str, Any] | None = None
        for one in here.of("regional", chosen) if chosen else ():
            try:
                regional = await admin.explain(http, one.at, question)
            except AdminError as error:
                warn(str(error))
            else:
                break
    if options.fleet_options.as_json:
        show.json({
            "entry_region": entry, "chosen": chosen, "law": law, "pilot_lights": answer.get("pilot_lights"),
            "global": reasons, "regional": regional,
        })  # fmt: skip
    else:
        without = f", if {options.drained} were drained" if options.drained else ""
        tables.regions(reasons, f"which region: as {entry} would decide now for {question['tenant']}{without}")
        for line in tables.pilot_lights(answer.get("pilot_lights")):
            show.line(line, "dim")
        if isinstance(law, dict):
            show.line(tables.law(law), "dim")
        _print_pick(regional, chosen)
    if chosen is None:
        return NEGATIVE
    return PARTIAL if regional is None else 0


def _for_the_model(question: dict[str, Any], model: object) -> dict[str, Any]:
    """The question to a region: the entry forwards a request for the model that its name stands for."""
    document = msgspec.json.decode(question["body"])
    if not isinstance(model, str) or document.get("model") in (None, model):
        return question
    return {**question, "body": msgspec.Raw(msgspec.json.encode(document | {"model": model}))}


async def _at_entry(
    http: admin.AdminClient, here: Fleet, topology: Topology, origin: str | None, question: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The nearest entry that may read the request and answers, and its answer. Ends the command if there is none."""
    entry_law = Law(topology).verdict(question["tenant"], "", Scope.ENTRY)
    reason, code = "the law lets no entry of this fleet read it", NEGATIVE
    if not here.of("global"):
        fleet.unreachable(here, [])
        fail(f"{here.name}: no global balancer is known; give its admin port by --admin")
    for name in running.nearest(topology, list(dict.fromkeys(one.region for one in here.of("global"))), origin):
        clause = entry_law.why_not(name)
        if clause is not None:
            warn(f"{name} may not read this request ({clause}); asking the next entry")
            continue
        for one in here.of("global", name):
            try:
                return name, await admin.explain(http, one.at, question)
            except QuestionError as error:
                fail(str(error))
            except AdminError as error:
                warn(f"{name}: {error}")
                reason, code = "no entry that may read it could be asked", FAULT
    return fail(reason, code)


def _print_pick(regional: dict[str, Any] | None, region: object) -> None:
    if region is None:
        show.line("it would be refused: no lawful region serves it", "yellow")
    elif regional is None:
        show.line(f"{region} did not say which replica it would pick", "yellow")
    elif regional.get("unlawful"):
        show.line(f"{region} itself would refuse it: {regional['unlawful']}", "yellow")
    elif not isinstance(regional.get("reasons"), dict):
        show.line(f"{region} has no replica for this model", "yellow")
    else:
        tables.replicas(regional["reasons"], f"which replica: as {region} would pick now")


# -- a past one


async def _past(here: Fleet, options: Options) -> int:
    async with admin.AdminClient(here.access) as http:
        upper, lower, silent = await evidence.everywhere(http, here, options.what)
    for one in silent:
        warn(one)
    if not upper and not lower:
        unasked = f"; {len(silent)} balancers could not be asked" if silent else ""
        code = PARTIAL if silent else NEGATIVE
        reasons = "unknown, too long ago, or not kept (`logging` in docs/operate/law.md)"
        fail(f"no balancer knows decision {options.what}: {reasons}{unasked}", code)
    what_if = {name: snapshot.without(record, options.drained) for name, record in upper} if options.drained else {}
    if options.fleet_options.as_json:
        records = {"global": dict(upper), "regional": dict(lower), **({"what_if": what_if} if what_if else {})}
        show.json({"decision": options.what, **records, "unreachable": silent})
        return PARTIAL if silent else 0
    for name, record in upper:
        tables.global_record(record, name)
        tables.outcome(record, f"global, {name}")
        if name in what_if:
            show.line(_without(what_if[name]), "bold")
    if not upper:
        show.line("no global balancer kept a record: by law, or it is too long ago", "yellow")
    for name, record in lower:
        tables.regional_record(record, name)
        tables.outcome(record, f"regional, {name}")
    return PARTIAL if silent else 0


def _without(what_if: dict[str, Any]) -> str:
    """Where it would have gone, by the scores of that moment."""
    drained, chosen = what_if["drained"], what_if.get("chosen")
    if not what_if["moved"]:
        return f"if {drained} had been drained: to {chosen}, too"
    if chosen is None:
        return f"if {drained} had been drained: no other lawful region served it"
    ttft, was = (show.number(what_if.get(name)) for name in ("ttft_ms", "was_ttft_ms"))
    return f"if {drained} had been drained: to {chosen}, first token expected after {ttft} ms instead of {was}"
