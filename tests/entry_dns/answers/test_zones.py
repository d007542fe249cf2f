from __future__ import annotations

from dataclasses import replace

import dns.message
import dns.rdatatype
import pytest

from entry_dns.answers.responder import Responder
from entry_dns.answers.zones import NamePlan, Ttls, ZoneError, check, check_servers, lawful_of
from entry_dns.fleet.entry_health import State
from tests.entry_dns.conftest import PLAN, entry_health, served, world
from topology.law import Law
from topology.model import Entry


def test_a_class_has_the_entries_that_its_entry_scope_allows() -> None:
    law = Law(world())
    assert lawful_of(law, "") == {"virginia", "frankfurt", "tokyo"}
    assert lawful_of(law, "eu-only") == {"frankfurt"}
    assert lawful_of(law, "japan-only") == {"tokyo"}
    assert lawful_of(law, "nobody") == set()


V4 = {name: Entry(name, name, ("192.0.2.1",)) for name in ("virginia", "frankfurt", "tokyo")}


@pytest.mark.parametrize(
    ("names", "entries", "message"),
    [
        ((NamePlan("www.elsewhere.example"),), None, "www.elsewhere.example is outside of zone entry.example"),
        ((NamePlan("a.entry.example"), NamePlan("A.entry.example")), None, "is given twice"),
        ((NamePlan("a.entry.example", "nobody"),), None, "tenant nobody is not in the topology"),
        ((NamePlan("a.entry.example"),), {}, "the topology has no entries"),
        ((NamePlan("a.entry.example"),), V4, r"none of its entries has an IPv6 address; give them some, or set"),
        ((NamePlan("a.entry.example", "eu-only"),), {"tokyo": V4["tokyo"]}, "no entry is lawful for tenant eu-only"),
    ],
)
def test_a_zone_that_could_not_be_answered_for_is_named(names, entries, message: str) -> None:
    with pytest.raises(ZoneError, match=message):
        check([replace(PLAN, names=names)], Law(world(**({} if entries is None else {"entries": entries}))))


def test_a_zone_given_twice_is_refused() -> None:
    with pytest.raises(ZoneError, match=r"zone entry.example is given twice; put all of its names into one"):
        check([PLAN, replace(PLAN, names=(NamePlan("other.entry.example"),))], Law(world()))


def test_a_name_server_inside_of_its_zone_has_an_address() -> None:
    inside = replace(PLAN, servers=(("ns1.Entry.example", ()), ("ns2.elsewhere.example", ())))
    with pytest.raises(ZoneError, match=r"ns1.Entry.example: is a name server inside .* give it some under"):
        check_servers([inside])
    check_servers([replace(PLAN, servers=(("api.entry.example", ()),))])  # a name whose answers are entries has some


def test_a_zone_that_is_its_own_name_server_keeps_its_records() -> None:
    responder = served(Responder(), plan=replace(PLAN, servers=(("entry.example", ("192.0.2.53",)),)))
    for kind in ("SOA", "NS", "A"):
        reply = responder.answer(dns.message.make_query("entry.example", kind).to_wire(), "192.0.2.200")
        assert [dns.rdatatype.to_text(one.rdtype) for one in dns.message.from_wire(reply).answer] == [kind]


def test_a_name_server_with_an_address_is_no_name_whose_addresses_are_entries() -> None:
    both = replace(PLAN, servers=(("API.entry.example", ("192.0.2.53",)),))
    with pytest.raises(ZoneError, match=r"API.entry.example: is a name whose addresses are entries, .* leave it out"):
        check_servers([both])


def test_a_good_zone_and_one_that_says_that_it_has_no_ipv6() -> None:
    check([PLAN], Law(world()))
    check([replace(PLAN, names=(NamePlan("a.entry.example", families=(4,)),))], Law(world(entries=V4)))


def test_the_ttl_of_an_answer() -> None:
    ttls = Ttls(5, 30)
    assert ttls.of(entry_health("a")) == 30
    assert ttls.of(replace(entry_health("a"), stable_s=12.5)) == 13
    for state in (State.SUSPECT, State.DOWN, State.DRAINED, State.UNKNOWN):
        assert ttls.of(entry_health("a", state)) == 5
    assert ttls.of(entry_health("a", share=0.5)) == 5
    assert ttls.of(None) == 5
