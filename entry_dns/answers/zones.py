"""Zones and their names: combines configuration, law and the state of entries into the view that workers answer from.

Each name's lawful entries are those that its tenant class's *entry* scope allows; a name without a class is for all
clients. Invariant: a name has addresses of a family for every network with a lawful entry, or for none, so that one
client's NODATA is never valid for another's question. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import dns.rdata
import dns.rdataclass
import dns.rdatatype

from entry_dns.answers import prepare
from entry_dns.answers.message import AAAA, HTTPS, NS, SOA, TXT, A
from entry_dns.answers.responder import packed, wire
from entry_dns.answers.snapshot import EntryAnswer, Head, Name, Records, Zone
from entry_dns.fleet.entry_health import EntryHealth, State
from topology.law import Law, Scope

if TYPE_CHECKING:
    from entry_dns.answers.prepare import Atlas, Table
    from topology.model import Entry

NS_TTL_S = 3600


class ZoneError(ValueError):
    """Zones that contradict the map or the law. The text names the error, and the remedy."""


@dataclass(frozen=True, slots=True)
class NamePlan:
    """A name to answer for. `tenant`: the tenant whose entry scope applies, "" for all clients; `families`: of 4 and
    6.
    """

    name: str
    tenant: str = ""
    families: tuple[int, ...] = (4, 6)
    alpn: tuple[str, ...] = ()
    txt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ZonePlan:
    """A zone. `servers`: names of its name servers, with addresses if those lie inside the zone."""

    zone: str
    names: tuple[NamePlan, ...]
    servers: tuple[tuple[str, tuple[str, ...]], ...]
    contact: str
    negative_ttl: int = 30


@dataclass(frozen=True, slots=True)
class Ttls:
    """TTLs in seconds: the most while nothing is uncertain, the least while anything is."""

    least: int = 5
    most: int = 30

    def of(self, health: EntryHealth | None) -> int:
        """The TTL of an entry's addresses, in seconds: the time for which its state cannot change, within the
        bounds.
        """
        if health is None or health.state is not State.UP:
            return self.least
        return max(self.least, ceil(min(health.stable_s, self.most)))


def lawful_of(law: Law, tenant: str) -> frozenset[str]:
    """The entries to which a class's clients may be sent."""
    entries = law.topology.entries
    if not tenant:
        return frozenset(entries)
    regions = law.verdict(tenant, "", Scope.ENTRY).lawful
    return frozenset(name for name, one in entries.items() if one.region in regions)


def check(plans: Sequence[ZonePlan], law: Law) -> None:
    """Raise ZoneError for the first zone or name that could not be answered."""
    if not law.topology.entries:
        raise ZoneError("the topology has no entries; list the balancers' public addresses under `entries`")
    seen: set[bytes] = set()
    apexes: set[bytes] = set()
    for plan in plans:
        apex = wire(plan.zone)
        if apex in apexes:
            raise ZoneError(f"zone {plan.zone} is given twice; put all of its names into one")
        apexes.add(apex)
        for name in plan.names:
            at = wire(name.name)
            if not at.endswith(apex):
                raise ZoneError(f"{name.name} is outside of zone {plan.zone}; name it below that, or give it a zone")
            if at in seen:
                raise ZoneError(f"{name.name} is given twice; keep one")
            seen.add(at)
            _check_name(name, law)


def check_servers(plans: Sequence[ZonePlan]) -> None:
    """Raise ZoneError for the first name server inside its own zone that has no address, so that resolvers could not
    find it, or that has some and is a name whose addresses are entries.

    Not for zones that are published to another server.
    """
    known = {wire(name.name) for plan in plans for name in plan.names}
    for plan in plans:
        for host, addresses in plan.servers:
            if not addresses and wire(host).endswith(wire(plan.zone)) and wire(host) not in known:
                remedy = "give it some under `addresses` of the zone, or name a server outside of it"
                raise ZoneError(f"{host}: is a name server inside of its zone {plan.zone} without an address; {remedy}")
            if addresses and wire(host) in known:
                remedy = "leave it out of `addresses`, or give the name server a name of its own"
                raise ZoneError(
                    f"{host}: is a name whose addresses are entries, and a name server with others; {remedy}"
                )


def _check_name(name: NamePlan, law: Law) -> None:
    """Raise ZoneError if no client, or no client of one address family, would get an entry."""
    entries = law.topology.entries
    if name.tenant and name.tenant not in law.topology.tenants:
        raise ZoneError(f"{name.name}: tenant {name.tenant} is not in the topology; name one that is")
    lawful = lawful_of(law, name.tenant)
    if not lawful:
        who = f"tenant {name.tenant}" if name.tenant else "anybody"
        raise ZoneError(f"{name.name}: no entry is lawful for {who}; add one, or widen its entry scope")
    for family in name.families:
        if not any(_has(entries[one], family) for one in lawful):
            other = "ipv4" if family == 6 else "ipv6"
            remedy = f"give them some, or set `families: [{other}]` for this name"
            raise ZoneError(f"{name.name}: none of its entries has an IPv{family} address; {remedy}")


def _has(entry: Entry, family: int) -> bool:
    return bool(entry.ipv4 if family == 4 else entry.ipv6)


def view(
    plans: Sequence[ZonePlan],
    law: Law,
    atlas: Atlas,
    healths: Sequence[EntryHealth],
    ttls: Ttls,
    most: int,
    serial: int,
    *,
    by_resolver: bool = False,
) -> tuple[Head, list[Table]]:
    """The view: its head and its tables. Names with the same lawful entries share a table. Numpy does the heavy part:
    run it in a thread. `by_resolver`: see Head."""
    by_name = {one.entry: one for one in healths}
    entries = law.topology.entries
    led = tuple(
        EntryAnswer(
            name,
            tuple(packed(one) for one in entries[name].ipv4),
            tuple(packed(one) for one in entries[name].ipv6),
            ttls.of(by_name.get(name)),
        )
        for name in atlas.entries
    )
    rows: dict[frozenset[str], int] = {}
    tables: list[Table] = []

    def row(lawful: frozenset[str]) -> int:
        if lawful not in rows:
            rows[lawful] = len(tables)
            tables.append(prepare.table(atlas, healths, lawful, most))
        return rows[lawful]

    names: list[Name] = []
    zones: list[Zone] = []
    for at, plan in enumerate(plans):
        soa = _rdata(
            "SOA", f"{plan.servers[0][0]}. {plan.contact}. {serial % (1 << 32)} 3600 600 86400 {plan.negative_ttl}"
        )
        zones.append(Zone(wire(plan.zone), soa, plan.negative_ttl))
        made = {wire(one.name): _name(one, at, law, row) for one in plan.names}
        apex = wire(plan.zone)
        records = {
            NS: Records(NS_TTL_S, tuple(_rdata("NS", f"{host}.") for host, _ in plan.servers)),
            SOA: Records(plan.negative_ttl, ()),
        }
        before = made.get(apex, Name(apex, at))
        made[apex] = Name(apex, at, before.tables, {**before.records, **records}, before.guarded)
        for host, addresses in plan.servers:
            if addresses and wire(host).endswith(apex):
                before = made.get(wire(host), Name(wire(host), at))  # the zone's own name is one, if it is a server
                own = {**before.records, **_addresses(addresses)}
                made[wire(host)] = Name(wire(host), at, before.tables, own, before.guarded)
        names += made.values()
    return Head(tuple(zones), tuple(names), led, ready=bool(healths), by_resolver=by_resolver), tables


def _name(plan: NamePlan, zone: int, law: Law, row: Callable[[frozenset[str]], int]) -> Name:
    lawful = lawful_of(law, plan.tenant)
    entries = law.topology.entries
    tables = {
        kind: row(frozenset(name for name in lawful if _has(entries[name], family)))
        for kind, family in ((A, 4), (AAAA, 6))
        if family in plan.families
    }
    records: dict[int, Records] = {}
    guarded: dict[int, int] = {}
    if plan.alpn:
        ports = {entries[name].port for name in lawful}
        port = f" port={ports.pop()}" if len(ports) == 1 and ports != {443} else ""
        records[HTTPS] = Records(NS_TTL_S, (_rdata("HTTPS", f'1 . alpn="{",".join(plan.alpn)}"{port}'),))
        guarded[HTTPS] = row(lawful)
    if plan.txt:
        texts = tuple(_rdata("TXT", '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"') for text in plan.txt)
        records[TXT] = Records(NS_TTL_S, texts)
    return Name(wire(plan.name), zone, tables, records, guarded)


def _addresses(addresses: Sequence[str]) -> dict[int, Records]:
    found = [packed(one) for one in addresses]
    by_kind = {A: tuple(one for one in found if len(one) == 4), AAAA: tuple(one for one in found if len(one) == 16)}
    return {kind: Records(NS_TTL_S, rdatas) for kind, rdatas in by_kind.items() if rdatas}


def _rdata(kind: str, text: str) -> bytes:
    rdata = dns.rdata.from_text(dns.rdataclass.IN, dns.rdatatype.from_text(kind), text)
    made: bytes = rdata.to_digestable()
    return made
