"""`farhop explain`: where a request would go now, or why one of the past went where it did.

Nothing is sent to an engine. A request's body is shown only to balancers that the tenant's law lets read it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_cli import admin, evidence, running, show, tables
from farhop_cli.admin import AdminError, QuestionError
from farhop_cli.exits import FAULT, NEGATIVE, fail, warn
from farhop_cli.running import Running
from farhop_lab.world import client
from topology.law import Scope

if TYPE_CHECKING:
    import aiohttp

BODY_BYTES_MAX = 16 * 1024 * 1024
_DECISION = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed."""

    what: str
    world: Path
    origin: str | None
    tenant: str | None
    allow: str | None
    as_json: bool


def run(options: Options) -> int:
    """Explain it; the exit code."""
    here = running.ruled(running.open_world(options.world))
    path = Path(options.what)
    if _DECISION.fullmatch(options.what) and not path.exists():
        return asyncio.run(_past(here, options))
    return asyncio.run(_now(here, options, _question(here, options, _read(path))))


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


def _question(here: Running, options: Options, body: bytes) -> dict[str, Any]:
    if len(body) > BODY_BYTES_MAX:
        fail(f"{options.what}: larger than {BODY_BYTES_MAX} bytes, which no balancer reads")
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fail(f"{options.what}: {error}; give a JSON body as for /v1/chat/completions")
    if not isinstance(document, dict) or not {"messages", "prompt"} & document.keys():
        fail(f"{options.what}: neither `messages` nor `prompt` in it; give a JSON body as for /v1/chat/completions")
    tenant = options.tenant or running.default_tenant(here)
    if tenant not in here.topology.tenants:
        fail(f"--tenant: no tenant {tenant!r} in this world; it has {running.listed(here.topology.tenants)}")
    path = client.CHAT if "messages" in document else client.COMPLETION
    allow = running.places(here, options.allow)
    return {"body": msgspec.Raw(body), "tenant": tenant, "path": path, "allow": allow}


async def _now(here: Running, options: Options, question: dict[str, Any]) -> int:
    async with admin.session() as http:
        entry, answer = await _at_entry(http, here, options.origin, question)
        reasons, law = answer.get("reasons") or {}, answer.get("law")
        chosen = reasons.get("chosen")
        regional: dict[str, Any] | None = None
        addresses = running.region_file(here, chosen)
        if addresses is not None:
            try:
                regional = await admin.explain(http, addresses.regional_admin, question)
            except AdminError as error:
                warn(str(error))
    if options.as_json:
        show.json({"entry_region": entry, "chosen": chosen, "law": law, "global": reasons, "regional": regional})
    else:
        tables.regions(reasons, f"which region: as {entry} would decide now for {question['tenant']}")
        if isinstance(law, dict):
            show.line(tables.law(law), "dim")
        _tell_pick(regional, chosen)
    return 0 if chosen is not None else NEGATIVE


async def _at_entry(
    http: aiohttp.ClientSession, here: Running, origin: str | None, question: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The nearest entry that may read the request and answers, and what it says. Ends the command else."""
    entry_law = here.law.verdict(question["tenant"], "", Scope.ENTRY)
    reason, code = "the law lets no entry of this world read it", NEGATIVE
    for name in here.nearest(origin):
        clause = entry_law.why_not(name)
        if clause is not None:
            warn(f"{name} may not read this request ({clause}); asking the next entry")
            continue
        try:
            answer = await admin.explain(http, here.file.regions[name].global_admin, question)
        except QuestionError as error:
            fail(str(error))
        except AdminError as error:
            warn(f"{name}: {error}")
            reason, code = "no entry that may read it could be asked", FAULT
            continue
        return name, answer
    return fail(reason, code)


def _tell_pick(regional: dict[str, Any] | None, region: object) -> None:
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


# -- one of the past


async def _past(here: Running, options: Options) -> int:
    async with admin.session() as http:
        upper, lower, silent = await evidence.everywhere(http, here, options.what)
    for one in silent:
        warn(one)
    if not upper and not lower:
        unasked = f"; {len(silent)} balancers could not be asked" if silent else ""
        fail(f"no balancer knows decision {options.what}: unknown, too long ago, or never kept{unasked}", NEGATIVE)
    if options.as_json:
        show.json({"decision": options.what, "global": dict(upper), "regional": dict(lower), "unreachable": silent})
        return 0
    for name, record in upper:
        tables.global_record(record, name)
        tables.outcome(record, f"global, {name}")
    if not upper:
        show.line("no global balancer kept a record: by law, or it is too long ago", "yellow")
    for name, record in lower:
        tables.regional_record(record, name)
        tables.outcome(record, f"regional, {name}")
    return 0
