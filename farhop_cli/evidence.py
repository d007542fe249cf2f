"""What the world knows of a past request: each tier's record of the decision, and the trace over both.

Never shows as missing what the law forbade to be kept: then the clause is the answer. Waiting is bounded.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_cli import admin
from farhop_cli.access import AdminError
from farhop_cli.running import region_file

if TYPE_CHECKING:
    from farhop_cli.fleet import Balancer, Fleet
    from farhop_cli.running import Caller, Running
    from farhop_lab.world.client import Result

RECORD_S = 1.0  # a record is written just after the answer's last byte
TRACE_S = 3.0  # exporters send in batches
POLL_S = 0.05


class Account(msgspec.Struct):
    """One tier's part: its place, its record, or why there is none. `explained`: there is no record, so it was asked
    anew.
    """

    region: str | None
    record: dict[str, Any] | None = None
    note: str = ""
    barred: bool = False
    explained: dict[str, Any] | None = None


class Trace(msgspec.Struct):
    """The trace so far, as the collector has it, or why there is none."""

    trace_id: str
    tree: list[str] = []
    spans: list[dict[str, Any]] = []
    note: str = ""


class Evidence(msgspec.Struct):
    """All evidence of one request."""

    decision_id: str
    global_: Account = msgspec.field(name="global")
    regional: Account
    trace: Trace


async def gather(
    http: admin.AdminClient,
    running: Running,
    who: Caller,
    result: Result,
    trace_id: str,
    question: dict[str, Any],
) -> Evidence:
    """Ask the admin ports of the entry and the serving region, then the collector."""
    decision_id = result.headers.get("x-farhop-decision", "")
    entry, served = running.region_of(result.entry), result.headers.get("x-farhop-region")
    upper, lower = await asyncio.gather(
        _account(http, running, who, entry, "global_admin", decision_id),
        _account(http, running, who, served, "regional_admin", decision_id),
    )
    if upper.record is None and result.error is not None and decision_id and who.tenant is not None:
        await _explain(http, running, upper, {**question, "tenant": who.tenant})
    wanted = {"farhop.global"} if entry is not None and not upper.barred else set()
    if result.ok:
        wanted |= {"llm_request"} | (set() if lower.barred else {"farhop.regional"})
    return Evidence(decision_id, upper, lower, await _trace(http, running.file.collector, trace_id, wanted))


async def _account(
    http: admin.AdminClient, running: Running, who: Caller, region: str | None, port: str, decision_id: str
) -> Account:
    addresses = region_file(running, region)
    if region is None or addresses is None or not decision_id:
        return Account(region, note="it was not asked" if region is None else "it made no decision on this request")
    clause = running.record_barred(who, region)
    account = Account(region, barred=clause is not None)
    try:
        # Asked even if the law forbids a record: a record that exists all the same should be seen.
        account.record = await _record(http, getattr(addresses, port), decision_id, 0.0 if account.barred else RECORD_S)
    except AdminError as error:
        account.note = str(error)
    else:
        if account.record is None:
            account.note = f"the law lets no record be kept there: {clause}" if clause else "it kept no record"
    return account


async def _record(http: admin.AdminClient, base: str, decision_id: str, patience_s: float) -> dict[str, Any] | None:
    until = time.monotonic() + patience_s
    while True:
        found = await admin.get(http, base, f"/decisions/{decision_id}")
        if found is not None or time.monotonic() >= until:
            return found
        await asyncio.sleep(POLL_S)


async def _explain(http: admin.AdminClient, running: Running, account: Account, question: dict[str, Any]) -> None:
    """No record of a refusal is kept: the entry that refused is asked what it would decide now."""
    addresses = region_file(running, account.region)
    if addresses is None:
        return
    try:
        account.explained = (await admin.explain(http, addresses.global_admin, question)).get("reasons")
    except AdminError as error:
        account.note = f"{account.note}; {error}" if account.note else str(error)


async def _trace(http: admin.AdminClient, collector: str, trace_id: str, wanted: set[str]) -> Trace:
    """The trace once it has every span in `wanted`, or as it is at the timeout."""
    if not collector:
        return Trace(trace_id, note="this world has no collector")
    until = time.monotonic() + TRACE_S
    try:
        while True:
            found = await admin.get(http, collector, f"/traces/{trace_id}") or {}
            spans = found.get("spans", [])
            missing = sorted(wanted - {span.get("name") for span in spans})
            if not missing or time.monotonic() >= until:
                note = _absence(missing) if wanted else "no tier may record spans of this request"
                return Trace(trace_id, found.get("tree", []), spans, note)
            await asyncio.sleep(POLL_S)
    except AdminError as error:
        return Trace(trace_id, note=str(error))


def _absence(missing: list[str]) -> str:
    return f"not exported within {TRACE_S:g} s: {', '.join(missing)}" if missing else ""


async def everywhere(
    http: admin.AdminClient, fleet: Fleet, decision_id: str
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]], list[str]]:
    """A past decision's records at every global and every regional admin port, with regions; and the ports that could
    not be asked.
    """
    silent: list[str] = []

    async def ask(one: Balancer) -> tuple[str, dict[str, Any]] | None:
        try:
            found = await admin.get(http, one.at, f"/decisions/{decision_id}")
        except AdminError as error:
            silent.append(str(error))
            return None
        return (one.region, found) if found is not None else None

    upper = await asyncio.gather(*(ask(one) for one in fleet.balancers if one.tier != "regional"))
    lower = await asyncio.gather(*(ask(one) for one in fleet.of("regional")))
    return [one for one in upper if one], [one for one in lower if one], [*fleet.trouble, *silent]
