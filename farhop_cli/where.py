"""`farhop where`: which entry DNS gives a client, why, and for which network; from a server, or from its file alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from farhop.config import ConfigError, load
from farhop_cli import fleet, show
from farhop_cli.access import AdminError
from farhop_cli.exits import NEGATIVE, fail, first_of
from topology.problems import TopologyError

_TIMEOUT_S = 5.0


def run(
    client: str, tenant: str, config: Path, admin: str, token: str, offline: bool, as_json: bool,
    context: str | None = None,
) -> int:  # fmt: skip
    """Print it; the exit code. `context`: whose credentials an admin port gets; `token` takes the place of its own."""
    if offline:
        found = _by_file(client, tenant, config)
    else:
        found = _get(config, admin, token, context, "where", {"client": client, "tenant": tenant})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if any(one["place"] is not None for one in found["entries"]) else NEGATIVE


def _by_file(client: str, tenant: str, config: Path) -> dict[str, Any]:
    from entry_dns.answers import prepare
    from entry_dns.app.config import DnsConfig
    from entry_dns.app.where import where
    from entry_dns.fleet.entry_health import EntryHealth, State
    from entry_dns.links import client_networks
    from farhop.service.assembly import stores
    from topology.law import Law

    try:
        given = load(DnsConfig, config, [])
        topology = stores.topology_of(given)
        known = prepare.atlas(topology, *client_networks.read(given.networks, topology))
        healths = [EntryHealth(name, State.UP, 1.0, 0.0, 0.0) for name in topology.entries]
        by_resolver = given.networks.without_subnet == "resolver"
        return where(client, tenant, known, Law(topology), healths, given.entries_max, by_resolver=by_resolver)
    except (ConfigError, TopologyError, ValueError) as error:
        fail(first_of(error) + ("" if config.is_file() else "; --config is the DNS server's configuration"))


def latencies(config: Path, admin: str, token: str, least_ms: float, as_json: bool, context: str | None = None) -> int:
    """List each network that entries measured: geography and measurement; the exit code."""
    found = _get(config, admin, token, context, "latencies", {})["networks"]
    moved = [one for one in found if one["before"] != one["now"]]
    differ = [one for one in found if one in moved or _apart_ms(one) >= least_ms]
    if as_json:
        typer.echo(json.dumps(differ, indent=2))
        return 0
    rows = list[tuple[str, ...]]()
    for one in differ:
        nearest = one["now"] if one["before"] == one["now"] else f"{one['before'] or '?'} -> {one['now']}"
        for at, (region, ms) in enumerate(one["measured"].items()):
            by, counts = one["predicted"].get(region), one["costs"].get(region)
            cells = ["?" if by is None else f"{by:.0f}", f"{ms:.0f}", "-" if counts is None else f"{counts:.0f}"]
            first = (one["network"], nearest, one["why"]) if at == 0 else ("", "", "")
            rows.append((first[0], region, *cells, first[1], first[2]))
    if rows:
        _table(("network", "region", "geography", "measured", "counts", "nearest", "why geography stays"), rows)
    apart = f"{len(differ)} not as geography says (by {least_ms:g} ms)"
    typer.echo(f"{len(found)} networks measured, {apart}, {len(moved)} led elsewhere")
    return 0


def _apart_ms(one: dict[str, Any]) -> float:
    return max((abs(ms - one["predicted"].get(region, ms)) for region, ms in one["measured"].items()), default=0.0)


def _get(config: Path, admin: str, token: str, context: str | None, path: str, asked: dict[str, str]) -> dict[str, Any]:
    base = (admin or _admin_of(config)).rstrip("/")
    query = f"?{urllib.parse.urlencode(asked)}" if asked else ""
    if not base.startswith(("http://", "https://")):
        fail(f"--admin: {base!r} is no URL; give one such as http://127.0.0.1:8053")
    access = fleet.access_of(context)
    try:
        headers = (replace(access, token=token) if token else access).headers(base)
    except AdminError as error:
        fail(str(error))
    request = urllib.request.Request(f"{base}/{path}{query}", headers=headers)  # noqa: S310 - its scheme was looked at
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=access.tls) as answer:  # noqa: S310 - the same
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        try:
            reason = json.load(error).get("error", "")
        except ValueError:
            reason = ""
        fail(reason or f"{base} answers {error.code}; is it the admin port of a DNS server?")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        fail(f"{base} cannot be asked: {why}; start the server, name its admin port by --admin, or use --offline")


def _admin_of(config: Path) -> str:
    from entry_dns.app.config import DnsConfig

    try:
        given = load(DnsConfig, config, [])
    except ConfigError as error:
        fail(first_of(error) + ("" if config.is_file() else "; --config is the DNS server's configuration"))
    scheme = "https" if given.admin.tls is not None else "http"
    return f"{scheme}://{given.admin.reached_at(given.admin.port)}"


def _print(found: dict[str, Any]) -> None:
    whose = f"names of tenant {found['tenant']}" if found["tenant"] else "names for all clients"
    note = f"; {found['known']}" if found["known"] else ""
    answer = f"law epoch {found['law_epoch']}: the answer holds for {found['network']}{note}"
    typer.echo(show.printable(f"{found['client']}, {whose}, {answer}"))
    rows = list[tuple[str, ...]]()
    for one in found["entries"]:
        ms = "?" if one["ms"] is None else f"{one['ms'] + one['bias_ms']:g}"
        if one["ms"] is not None and one["geography_ms"] != one["ms"]:
            by = "nothing" if one["geography_ms"] is None else f"{one['geography_ms']:g}"
            ms += f" (by geography {by})"
        place = str(one["place"] or "-")
        rows.append((place, one["entry"], one["region"], ms, one["state"], f"{one['share']:.0%}", one["why"]))
    _table(("place", "entry", "region", "ms", "state", "share", "why"), rows)
    for line in without_subnet(found["without_subnet"]):
        typer.echo(show.printable(line))


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(show.printable, row))
    Console(width=160, markup=False, highlight=False, emoji=False).print(table)


def without_subnet(found: dict[str, Any]) -> list[str]:
    """The answer to a question without a client subnet, and why, in lines for people."""
    answered = ", ".join(found["entries"] or ()) or "SERVFAIL, as there is none"
    kept_back = [f"  not {entry}: {net} is confined to other places" for entry, net in found["kept_back"].items()]
    if found["by"] == "all":
        return [f"without a client subnet: {answered}, as for all clients"]
    if found["entries"] is None:
        return ["without a client subnet: as for the resolver's own address; no network is confined"]
    if found["by"] == "resolver":
        return [
            "without a client subnet: as for the resolver's own address, whatever its clients are confined to"
            " (networks.without_subnet: resolver)",
            f"  for an hour after it sent one: {answered}; what is lawful for every network",
            *kept_back,
        ]
    why = "what is lawful for every network, as a resolver gives it to all of its clients"
    return [f"without a client subnet: {answered}; {why} (networks.without_subnet: shared)", *kept_back]
