from __future__ import annotations

from entry_dns.answers.publishing import changes, records_of
from entry_dns.answers.responder import packed, wire
from entry_dns.answers.snapshot import Records
from entry_dns.answers.zones import Ttls, view
from entry_dns.fleet.entry_health import State
from tests.entry_dns.conftest import NAMES, PLAN, atlas, entry_health, unconfined, world
from topology.law import Law

API, EU = wire("api.entry.example"), wire("eu.entry.example")


def wanted(known=None, **healths):
    listed = [healths.get(name, entry_health(name)) for name in NAMES]
    return records_of(*view([PLAN], Law(world()), known or unconfined(), listed, Ttls(5, 30), 3, 1))


def test_all_clients_get_what_is_lawful_for_the_name() -> None:
    records = wanted()
    assert records[EU, 1] == Records(30, (packed("192.0.2.2"),))
    assert set(records[API, 28].rdatas) == {packed(f"2001:db8::{n}") for n in (1, 2, 3)}
    assert (wire("v4.entry.example"), 28) not in records


def test_an_entry_that_is_down_is_removed_and_a_name_is_never_widened() -> None:
    records = wanted(frankfurt=entry_health("frankfurt", State.DOWN))
    assert packed("192.0.2.2") not in records[API, 1].rdatas
    assert records[EU, 1].rdatas == (packed("192.0.2.2"),), "all that may are down: within the law, still"


def test_where_networks_are_confined_only_what_each_may_get_is_published() -> None:
    records = wanted(atlas(world()))  # one network may be led to Tokyo alone
    assert records[API, 1].rdatas == (packed("192.0.2.3"),)
    assert records[EU, 1] is None, "the name is for Frankfurt, and that network is not"


def test_only_changed_records_are_written() -> None:
    before, after = wanted(), wanted(tokyo=entry_health("tokyo", State.DOWN))
    assert changes(before, before) == {}
    assert {name for name, _ in changes(before, after)} == {API, wire("v4.entry.example")}
    assert changes({**before, (wire("x"), 1): Records(1, ())}, before) == {(wire("x"), 1): None}
