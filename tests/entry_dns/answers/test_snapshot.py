from __future__ import annotations

from entry_dns.answers import prepare
from entry_dns.answers.snapshot import EntryAnswer, Head, Name, Records, Zone, decode, encode
from tests.entry_dns.conftest import NAMES, atlas, entry_health, world


def test_a_view_is_decoded_as_it_was_encoded() -> None:
    tables = [
        prepare.table(atlas(world()), [entry_health(name) for name in NAMES], frozenset(lawful), 3)
        for lawful in (NAMES, ("frankfurt",))
    ]
    zone = Zone(b"\x07example\0", b"soa", 30)
    name = Name(b"\x03api\x07example\0", 0, {1: 0, 28: 1}, {16: Records(60, (b"\x01x",))}, {65: 0})
    head = Head((zone,), (name,), tuple(EntryAnswer(one, (bytes(4),), (), 30) for one in NAMES))
    document, lookups = decode(memoryview(encode(head, tables)))
    assert (document.zones, document.names, document.entries, document.ready) == (
        head.zones,
        head.names,
        head.entries,
        True,
    )
    for table, lookup in zip(tables, lookups, strict=True):
        for family in (4, 6):
            assert list(lookup.starts[family]) == table.spaces[family].starts.tolist()
            assert list(lookup.groups[family]) == table.spaces[family].values.tolist()
        assert list(lookup.orders) == table.orders.reshape(-1).tolist()
        assert (lookup.width, lookup.uniform) == (table.orders.shape[1], table.uniform)


def test_a_view_without_entries_says_that_it_is_not_ready() -> None:
    assert decode(memoryview(encode(Head((), (), (), ready=False), [])))[0].ready is False
