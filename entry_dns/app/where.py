"""Which entry a client would get, and why: a look-up of one address in the table that answers are made from.

Never changes what is answered, and reads no file.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any

import numpy as np

from entry_dns.answers import prepare
from entry_dns.answers.prepare import ASK_RESOLVER, NO_ENTRY, Atlas
from entry_dns.answers.zones import lawful_of
from entry_dns.fleet.networks import PRIVATE, UNKNOWN, scope
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from entry_dns.fleet.entry_health import EntryHealth
    from topology.law import Law


def where(
    client: str,
    tenant: str,
    known: Atlas,
    law: Law,
    healths: Sequence[EntryHealth],
    most: int,
    geography: Atlas | None = None,
    *,
    by_resolver: bool = False,
) -> dict[str, Any]:
    """The answer for a client's network and the names of a tenant's class ("": for all clients), and the answer to a
    question without a client subnet. Raises ValueError, with the remedy, for an invalid address or an unknown tenant.
    `geography`: the atlas without measurements; `by_resolver`: see snapshot.Head."""
    try:
        address = ip_address(client)
    except ValueError:
        raise ValueError(f"client: {client[:64]!r} is no address; give one such as 203.0.113.7") from None
    if tenant and tenant not in law.topology.tenants:
        raise ValueError(f"tenant: {tenant[:64]!r} is not in the law; name one that is")
    lawful = lawful_of(law, tenant)
    made = prepare.table(known, healths, lawful, most)
    family = address.version
    at = int(address) if family == 4 else int(address) >> 64
    space = made.spaces[family]
    starts = space.starts.tolist()
    index = int(space.starts.searchsorted(at, side="right")) - 1
    length = 0 if made.uniform else scope(starts, index, at, space.bits) or 1
    group, row = int(space.values[index]), known.spaces[family].at(at)
    order = [int(one) for one in made.orders[made.fallback if group == ASK_RESOLVER else group] if one != NO_ENTRY]
    geographic = known if geography is None else geography
    base = geographic.spaces[family].at(at)
    geography_ms = [_ms(geographic, base, column) for column in range(len(known.entries))]
    unknown = {UNKNOWN: "no list holds this network", PRIVATE: "private: the resolver's own address decides"}
    return {
        "client": str(address),
        "tenant": tenant,
        "law_epoch": law.epoch,
        "scope": length,
        "network": str(ip_network((address, length), strict=False)),
        "known": unknown.get(row, ""),
        "entries": _entries(known, law, lawful, healths, order, row, geography_ms, tenant),
        "without_subnet": _without_subnet(made, known, lawful, by_resolver),
    }


def _entries(
    known: Atlas,
    law: Law,
    lawful: frozenset[str],
    healths: Sequence[EntryHealth],
    order: list[int],
    row: int,
    geography_ms: Sequence[float | None],
    tenant: str,
) -> list[dict[str, Any]]:
    """All entries, those of the answer first: `order` are its columns. `row`: of the client's network;
    `geography_ms` by column, without what entries measured."""
    by_name = {one.entry: one for one in healths}
    excluded = law.verdict(tenant, "", Scope.ENTRY).excluded if tenant else {}
    entries = []
    for column, name in enumerate(known.entries):
        entry, health = law.topology.entries[name], by_name.get(name)
        why = excluded.get(entry.region, "") if name not in lawful else ""
        if not why and not known.allowed[row, column]:
            why = "the client's network is confined to other places"
        entries.append(
            {
                "entry": name,
                "region": entry.region,
                "place": order.index(column) + 1 if column in order else None,
                "ms": _ms(known, row, column),
                "geography_ms": geography_ms[column],
                "state": health.state if health is not None else "unknown",
                "share": health.share if health is not None else 1.0,
                "bias_ms": health.bias_ms if health is not None else 0.0,
                "why": why or (health.why if health is not None else ""),
                "addresses": [*entry.ipv4, *entry.ipv6],
            }
        )
    return sorted(entries, key=lambda one: (one["place"] is None, one["place"] or 0, one["entry"]))


def _ms(atlas: Atlas, row: int, column: int) -> float | None:
    """The cost from a network to an entry; None if the network's location is unknown."""
    return None if row in (UNKNOWN, PRIVATE) else round(float(atlas.costs[row, column]), 1)


def _without_subnet(made: prepare.Table, known: Atlas, lawful: frozenset[str], by_resolver: bool) -> dict[str, Any]:
    """The answer to a resolver that sends no client subnet, or one of no bits, and may give it to all of its clients.

    `by`: what decides, "all" (all clients get the same), "shared" (what is lawful for every network) or "resolver" (its
    own address). `entries`: the answer, in order, [] for SERVFAIL; by "resolver" the answer for an hour after it sent a
    subnet, None if no network is confined. `kept_back`: by lawful entry a network that is confined to other places, so
    that no answer for all networks names it.
    """
    if made.shared < 0 or made.uniform:
        return {
            "by": "all" if made.uniform else "resolver",
            "entries": _listed(made, known, 0) if made.uniform else None,
            "kept_back": {},
        }
    kept_back = {name: one for name in sorted(lawful) if (one := _confined_elsewhere(known, name)) is not None}
    return {
        "by": "resolver" if by_resolver else "shared",
        "entries": _listed(made, known, made.shared),
        "kept_back": kept_back,
    }


def _listed(made: prepare.Table, known: Atlas, group: int) -> list[str]:
    return [known.entries[int(at)] for at in made.orders[group] if at != NO_ENTRY]


def _confined_elsewhere(known: Atlas, entry: str) -> str | None:
    """A network whose clients may not be led to this entry, as an example; None if there is none."""
    kept = ~known.allowed[:, known.entries.index(entry)]
    for family, space in known.spaces.items():
        found = np.flatnonzero(kept[space.values])
        if len(found):
            index = int(found[0])
            first = int(space.starts[index])
            length = scope(space.starts.tolist(), index, first, space.bits)
            return str(ip_network((first << (0 if family == 4 else 64), length)))
    return None
