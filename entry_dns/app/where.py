"""Where a client would be led, and why: the same table that answers are made of, asked for one address."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any

from entry_dns.answers import prepare
from entry_dns.answers.prepare import ASK_RESOLVER, NOBODY, Atlas
from entry_dns.answers.zones import lawful_of
from entry_dns.fleet.networks import PRIVATE, UNKNOWN, scope
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from entry_dns.fleet.standing import Standing
    from topology.law import Law


def where(
    client: str,
    tenant: str,
    known: Atlas,
    law: Law,
    standings: Sequence[Standing],
    most: int,
    geography: Atlas | None = None,
) -> dict[str, Any]:
    """What a client's network is answered for names of a tenant's class ("": everybody's). ValueError, with the remedy,
    for what is no address and for a tenant that nobody knows. `geography`: the atlas without what entries measured."""
    try:
        address = ip_address(client)
    except ValueError:
        raise ValueError(f"client: {client[:64]!r} is no address; give such as 203.0.113.7") from None
    if tenant and tenant not in law.topology.tenants:
        raise ValueError(f"tenant: {tenant[:64]!r} is not in the law; name one that is")
    lawful = lawful_of(law, tenant)
    made = prepare.table(known, standings, lawful, most)
    family = address.version
    at = int(address) if family == 4 else int(address) >> 64
    space = made.spaces[family]
    starts = space.starts.tolist()
    index = int(space.starts.searchsorted(at, side="right")) - 1
    told = 0 if made.uniform else scope(starts, index, at, space.bits) or 1
    told_by = known if geography is None else geography
    base = told_by.spaces[family].at(at)
    row, group = known.spaces[family].at(at), int(space.values[index])
    order = [int(one) for one in made.orders[made.fallback if group == ASK_RESOLVER else group] if one != NOBODY]
    by_name = {one.entry: one for one in standings}
    excluded = law.verdict(tenant, "", Scope.ENTRY).excluded if tenant else {}
    entries = []
    for column, name in enumerate(known.entries):
        entry, standing = law.topology.entries[name], by_name.get(name)
        why = excluded.get(entry.region, "") if name not in lawful else ""
        if not why and not known.allowed[row, column]:
            why = "the client's network is confined to other places"
        entries.append(
            {
                "entry": name,
                "region": entry.region,
                "place": order.index(column) + 1 if column in order else None,
                "ms": round(float(known.costs[row, column]), 1) if row not in (UNKNOWN, PRIVATE) else None,
                "geography_ms": round(float(told_by.costs[base, column]), 1)
                if base not in (UNKNOWN, PRIVATE)
                else None,
                "state": standing.state if standing is not None else "unknown",
                "share": standing.share if standing is not None else 1.0,
                "bias_ms": standing.bias_ms if standing is not None else 0.0,
                "why": why or (standing.why if standing is not None else ""),
                "addresses": [*entry.ipv4, *entry.ipv6],
            }
        )
    entries.sort(key=lambda one: (one["place"] is None, one["place"] or 0, one["entry"]))
    unknown = {UNKNOWN: "no list holds this network", PRIVATE: "private: the resolver's own address decides"}
    return {
        "client": str(address),
        "tenant": tenant,
        "law_epoch": law.epoch,
        "scope": told,
        "network": str(ip_network((address, told), strict=False)),
        "known": unknown.get(row, ""),
        "entries": entries,
    }
