"""The records that another server's zone should hold for the names of a view. Pure.

Such a zone gives all networks the same answer: the one for a client of unknown network or, if networks are confined,
only what is lawful for each of them. A name without an entry that is lawful for all possible clients gets no records:
its law is never widened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from entry_dns.answers.message import AAAA, A
from entry_dns.answers.prepare import NO_ENTRY
from entry_dns.answers.responder import ADDRESSES_MAX
from entry_dns.answers.snapshot import Records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from entry_dns.answers.prepare import Table
    from entry_dns.answers.snapshot import Head

Wanted = dict[tuple[bytes, int], Records | None]


def records_of(head: Head, tables: Sequence[Table]) -> Wanted:
    """By name in wire form and record type, the records that should be there; None: none should."""
    wanted: Wanted = {}
    for name in head.names:
        for kind, at in name.tables.items():
            if kind not in (A, AAAA):
                continue
            table = tables[at]
            group = table.fallback if table.shared < 0 else table.shared
            entries = [head.entries[int(one)] for one in table.orders[group] if one != NO_ENTRY]
            each = (rdata for one in entries for rdata in (one.ipv4 if kind == A else one.ipv6))
            rdatas = tuple(dict.fromkeys(each))[:ADDRESSES_MAX]
            wanted[name.wire, kind] = Records(min(one.ttl for one in entries), rdatas) if rdatas else None
    return wanted


def changes(before: Mapping[tuple[bytes, int], Records | None], wanted: Wanted) -> Wanted:
    """The writes that turn a zone with the first content into one with the second."""
    return {key: wanted.get(key) for key in {**before, **wanted} if key not in before or before[key] != wanted.get(key)}
