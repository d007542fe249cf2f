"""Answers, looked at by dnspython: what a resolver would read."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from random import Random

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entry_dns.answers import prepare
from entry_dns.answers.cookies import Cookies
from entry_dns.answers.prepare import NOWHERE, Place
from entry_dns.answers.responder import COUNTERS, Responder, wire
from entry_dns.answers.zones import NamePlan
from entry_dns.fleet.networks import spaces
from entry_dns.fleet.standing import State
from tests.entry_dns.conftest import NAMES, PLAN, atlas, served, standing, world

CLIENT = "192.0.2.200"
SUBNETS = ("203.0.113.9/32", "198.51.100.0/24", "8.8.8.0/24", "10.1.2.0/24", "198.18.5.0/24", "2001:db8:aaaa::/56")


def ecs(subnet: str, scope: int = 0) -> dns.edns.ECSOption:
    address, _, length = subnet.partition("/")
    return dns.edns.ECSOption(address, int(length), scope)


def ask(responder: Responder, name: str = "api.entry.example", kind: str = "A", subnet: str = "", **fields):
    options = [*fields.pop("options", ()), *([ecs(subnet)] if subnet else [])]
    udp = fields.pop("udp", True)
    edns = fields.pop("edns", True)
    query = dns.message.make_query(name, kind, use_edns=0 if edns else False, options=options or None, **fields)
    told = responder.answer(query.to_wire(), CLIENT, udp=udp)
    assert told is not None
    answer = dns.message.from_wire(told)
    assert query.is_response(answer)
    return answer


def addresses(answer: dns.message.Message) -> list[str]:
    return [one.address for rrset in answer.answer for one in rrset]


def told_scope(answer: dns.message.Message) -> int | None:
    return next((one.scopelen for one in answer.options if isinstance(one, dns.edns.ECSOption)), None)


def test_a_client_in_tokyo_is_led_to_tokyo_first_and_an_eu_only_name_to_frankfurt_alone(responder) -> None:
    answer = ask(responder, subnet="203.0.113.9/32")
    assert addresses(answer) == ["192.0.2.3", "192.0.2.2", "192.0.2.1"]
    assert (answer.answer[0].ttl, told_scope(answer)) == (30, 24)
    assert answer.flags & dns.flags.AA
    assert addresses(ask(responder, "eu.entry.example", subnet="203.0.113.9/32")) == ["192.0.2.2"]
    assert addresses(ask(responder, kind="AAAA", subnet="2001:db8:aaaa:1::/64"))[0] == "2001:db8::3"


def test_where_the_law_leaves_nobody_it_is_servfail_with_a_reason_and_a_scope(responder) -> None:
    for kind in ("A", "AAAA", "HTTPS"):
        answer = ask(responder, "eu.entry.example", kind, subnet="198.18.5.0/24")
        assert answer.rcode() == dns.rcode.SERVFAIL
        assert not answer.answer
        assert not answer.authority
        assert told_scope(answer) == 15
        assert [int(one.code) for one in answer.options if isinstance(one, dns.edns.EDEOption)] == [18]


def test_who_tells_no_subnet_is_told_none_and_is_answered_by_his_own_address() -> None:
    responder = served(Responder())
    answer = ask(responder)
    assert told_scope(answer) is None
    query = dns.message.make_query("api.entry.example", "A").to_wire()
    tokyo = dns.message.from_wire(responder.answer(query, "203.0.113.77"))
    assert addresses(tokyo)[0] == "192.0.2.3"
    assert addresses(dns.message.from_wire(responder.answer(query, "::ffff:203.0.113.77")))[0] == "192.0.2.3"
    assert addresses(dns.message.from_wire(responder.answer(query, "127.0.0.1"))), "nothing is known of a private one"


def test_source_0_and_private_addresses(responder) -> None:
    assert told_scope(ask(responder, subnet="0.0.0.0/0")) == 0
    private = ask(responder, subnet="10.1.2.0/24")
    assert told_scope(private) == 8
    assert private.answer == ask(served(Responder())).answer


def test_who_tells_subnets_and_then_does_not_asks_for_all_his_clients_and_is_told_what_all_may_know() -> None:
    responder = served(Responder())
    assert addresses(ask(responder))[0] == "192.0.2.1", "he may be anywhere, and so may his clients"
    ask(responder, subnet=f"{CLIENT}/24")
    for edns in (True, False):
        assert addresses(ask(responder, edns=edns)) == ["192.0.2.3"], "one network is confined to Japan"
    assert addresses(ask(responder, kind="AAAA")) == ["2001:db8::3"]
    query = dns.message.make_query("api.entry.example", "A").to_wire()
    assert len(addresses(dns.message.from_wire(responder.answer(query, "192.0.2.201")))) == 3, "another does not"
    responder.tick(responder.now + 3601.0)
    assert len(addresses(ask(responder))) == 3
    china = atlas(world(), ("198.19.0.0/16", Place(39.9, 116.4, within=("cn",))))
    nobody = served(Responder(), known=china)
    ask(nobody, subnet="203.0.113.9/32")
    assert ask(nobody).rcode() == dns.rcode.SERVFAIL, "there is nothing that all may be told"
    plain = world()
    places = [NOWHERE, NOWHERE, Place(35.7, 139.7)]
    free = served(Responder(), known=prepare.atlas(plain, spaces([(ip_network("203.0.113.0/24"), 2)]), places))
    ask(free, subnet="203.0.113.9/32")
    assert len(addresses(ask(free))) == 3, "nobody is confined: nothing is kept back"


def test_a_name_that_is_the_same_for_all_has_scope_0_and_others_never() -> None:
    plain = served(Responder())
    assert {told_scope(ask(plain, subnet=one)) for one in SUBNETS} >= {24, 15}
    assert 0 not in {told_scope(ask(plain, "eu.entry.example", subnet=one)) for one in SUBNETS}, "one is confined"
    assert told_scope(ask(plain, "ns1.entry.example", subnet=SUBNETS[0])) == 0


def test_https_soa_ns_txt_and_glue(responder) -> None:
    https = ask(responder, kind="HTTPS").answer[0][0]
    assert https.to_text() == '1 . alpn="http/1.1"'
    assert ask(responder, kind="TXT").answer[0][0].to_text() == '"farhop"'
    assert ask(responder, "entry.example", "SOA").answer[0][0].mname.to_text() == "ns1.entry.example."
    assert len(ask(responder, "entry.example", "NS").answer[0]) == 2
    assert addresses(ask(responder, "ns1.entry.example")) == ["192.0.2.53"]


def test_negatives_say_who_says_so_and_hold_for_all(responder) -> None:
    for name, kind, rcode in (
        ("api.entry.example", "MX", dns.rcode.NOERROR),
        ("v4.entry.example", "AAAA", dns.rcode.NOERROR),
        ("nobody.entry.example", "A", dns.rcode.NXDOMAIN),
        ("x.api.entry.example", "A", dns.rcode.NXDOMAIN),
    ):
        answer = ask(responder, name, kind, subnet="203.0.113.9/32")
        assert answer.rcode() == rcode
        assert [rrset.rdtype for rrset in answer.authority] == [dns.rdatatype.SOA]
        assert answer.authority[0].name.to_text() == "entry.example."
        assert answer.authority[0].ttl == answer.authority[0][0].minimum == 30
        assert told_scope(answer) == 0


def test_what_is_not_ours_is_refused(responder) -> None:
    for name, kind in (("example", "A"), ("www.example.org", "A"), ("entry.example", "AXFR"), ("xentry.example", "A")):
        assert ask(responder, name, kind).rcode() == dns.rcode.REFUSED
    chaos = dns.message.make_query("version.bind", "TXT", "CH")
    assert dns.message.from_wire(responder.answer(chaos.to_wire(), CLIENT)).rcode() == dns.rcode.REFUSED


def test_any_is_minimal(responder) -> None:
    answer = ask(responder, kind="ANY")
    assert [(rrset.rdtype, rrset.ttl) for rrset in answer.answer] == [(dns.rdatatype.HINFO, 3600)]


def test_the_question_comes_back_as_it_was_spelled(responder) -> None:
    told = responder.answer(dns.message.make_query("aPi.EnTRy.eXample", "A").to_wire(), CLIENT)
    assert told is not None
    assert b"\x03aPi\x05EnTRy\x07eXample" in told
    assert dns.message.from_wire(told).answer


def test_badvers_and_without_edns(responder) -> None:
    query = dns.message.make_query("api.entry.example", "A", use_edns=1)
    answer = dns.message.from_wire(responder.answer(query.to_wire(), CLIENT))
    assert (answer.rcode(), answer.edns) == (dns.rcode.BADVERS, 0)
    assert ask(responder, edns=False).edns == -1


def test_nsid_is_told_to_who_asks() -> None:
    responder = served(Responder(nsid=b"tokyo-dns-1"))
    answer = ask(responder, options=[dns.edns.GenericOption(3, b"")])
    assert [bytes(one.nsid) for one in answer.options if one.otype == dns.edns.NSID] == [b"tokyo-dns-1"]
    assert not ask(responder).options


def test_cookies_and_what_they_are_good_for() -> None:
    responder = served(Responder(Cookies([bytes(16)]), rate=3, slip=2))
    first = ask(responder, options=[dns.edns.GenericOption(10, b"clientco")])
    cookie = next(one for one in first.options if one.otype == dns.edns.COOKIE)
    whole = bytes(cookie.client) + bytes(cookie.server)
    assert len(whole) == 24
    plain = dns.message.make_query("api.entry.example", "A").to_wire()
    told = [responder.answer(plain, CLIENT) for _ in range(10)]
    assert sum(one is not None and len(one) > len(plain) for one in told) == 2
    slipped = [dns.message.from_wire(one) for one in told if one is not None and len(one) <= len(plain)]
    assert slipped
    assert all(one.flags & dns.flags.TC and not one.answer for one in slipped)
    assert any(one is None for one in told)
    proven = ask(responder, options=[dns.edns.GenericOption(10, whole)])
    assert addresses(proven), "who proves his address is not limited"
    assert addresses(ask(responder, udp=False)), "nor who comes by TCP"
    responder.tick(responder.now + 1.0)
    assert addresses(ask(responder)), "nor in the next second"
    assert dict(zip(COUNTERS, responder.counts, strict=True))["cookie_proven"] >= 1


def test_what_does_not_fit_is_truncated_and_comes_by_tcp() -> None:
    texts = tuple(letter * 250 for letter in "abcdef")
    plan = replace(PLAN, names=(NamePlan("api.entry.example", txt=texts),))
    responder = served(Responder(), plan=plan)
    for edns in (False, True):
        cut = ask(responder, kind="TXT", edns=edns, payload=4096 if edns else None)
        assert cut.flags & dns.flags.TC
        assert not cut.answer
        assert cut.edns == (0 if edns else -1)
    whole = ask(responder, kind="TXT", udp=False)
    assert len(whole.answer[0]) == len(texts)
    assert not whole.flags & dns.flags.TC


def test_before_anything_is_known_of_entries_it_is_servfail() -> None:
    responder = served(Responder(), standings=None)
    head = responder._head
    assert head.ready
    empty = served(Responder())
    empty.adopt(type(head)(head.zones, head.names, head.entries, (), ready=False), ())
    answer = ask(empty, subnet="203.0.113.9/32")
    assert answer.rcode() == dns.rcode.SERVFAIL
    assert [int(one.code) for one in answer.options if isinstance(one, dns.edns.EDEOption)] == [14]


def test_a_dying_entry_is_kept_for_the_least_time() -> None:
    doubtful = [standing("virginia"), standing("frankfurt"), standing("tokyo", State.SUSPECT)]
    assert ask(served(Responder(), standings=doubtful), subnet="203.0.113.9/32").answer[0].ttl == 5
    draining = [standing("virginia"), standing("frankfurt"), standing("tokyo", State.DRAINED, 0.0)]
    answer = ask(served(Responder(), standings=draining), subnet="203.0.113.9/32")
    assert addresses(answer)[-1] == "192.0.2.3"
    assert answer.answer[0].ttl == 5


# Subnet asked for, scope told, first address.
@pytest.mark.parametrize(
    ("subnet", "scope", "first"),
    [
        ("203.0.113.0/24", 24, "192.0.2.3"),
        ("203.0.113.0/25", 24, "192.0.2.3"),
        ("203.0.113.1/32", 24, "192.0.2.3"),
        ("203.0.112.0/22", 24, "192.0.2.1"),  # less than is needed was told: its first address, and how much is needed
        ("203.0.112.0/24", 24, "192.0.2.1"),
        ("203.0.114.0/24", 23, "192.0.2.1"),
        ("198.51.100.0/24", 24, "192.0.2.2"),
        ("0.0.0.0/0", 0, "192.0.2.1"),
        ("::/0", 0, "192.0.2.1"),
        ("192.0.0.0/8", 9, "192.0.2.1"),
        ("2001:db8:aaaa::/48", 48, "192.0.2.3"),
        ("2001:db8:aaaa:bbbb::/64", 48, "192.0.2.3"),
        ("2001:db8:aaab::/48", 48, "192.0.2.1"),
        ("fd00::/8", 7, "192.0.2.1"),
    ],
)
def test_what_is_told_of_client_subnets(responder, subnet: str, scope: int, first: str) -> None:
    answer = ask(responder, subnet=subnet)
    assert (told_scope(answer), addresses(answer)[0]) == (scope, first)


def test_answers_are_equal_within_every_scope_told(responder) -> None:
    rng, seen = Random(3), {}
    for _ in range(3000):
        address = rng.choice((0xCB007100, 0xC6336400, 0xC6120000, 0, 0x0A000000)) + rng.getrandbits(
            rng.choice((8, 10, 17))
        )
        text = ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))
        answer = ask(responder, "eu.entry.example" if address & 1 else "api.entry.example", subnet=f"{text}/32")
        scope = told_scope(answer)
        assert scope is not None
        key = address & 1, scope, address >> (32 - scope)
        said = answer.rcode(), tuple(addresses(answer))
        assert seen.setdefault(key, said) == said
    for which, scope, block in seen:
        for shorter in range(scope):
            assert (which, shorter, block >> (scope - shorter)) not in seen, "scopes do not overlap"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_what_is_malformed_gets_no_more_than_it_sent(data: st.DataObject) -> None:
    query = dns.message.make_query(
        "api.entry.example", "A", use_edns=0, options=[ecs("203.0.113.0/24"), dns.edns.GenericOption(10, bytes(8))]
    ).to_wire()
    mutated = bytearray(query)
    for _ in range(data.draw(st.integers(0, 6))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    mutated = mutated[: data.draw(st.integers(0, len(mutated)))] + data.draw(st.binary(max_size=8))
    told = RESPONDER.answer(bytes(mutated), CLIENT)
    if told is not None and told[3] & 15 in (dns.rcode.FORMERR, dns.rcode.NOTIMP):
        assert len(told) <= len(mutated)
        assert told[:2] == mutated[:2]


RESPONDER = served(Responder(Cookies([bytes(16)]), nsid=b"x"))


def test_the_short_way_and_the_strict_one_say_the_same(responder) -> None:
    for name in ("api.entry.example", "eu.entry.example", "entry.example"):
        for kind in ("A", "AAAA", "HTTPS", "TXT", "SOA", "NS"):
            for subnet in ("", *SUBNETS):
                query = dns.message.make_query(
                    name, kind, use_edns=0, options=[ecs(subnet)] if subnet else None, id=7
                ).to_wire()
                assert responder.answer(query, CLIENT) == responder._odd(query, responder_address(), True)


def responder_address() -> bytes:
    return bytes(map(int, CLIENT.split(".")))


def test_led_counts_who_was_first(responder) -> None:
    ask(responder, subnet="203.0.113.9/32")
    assert responder.led[NAMES.index("tokyo")] == 1


def test_a_name_in_wire_form() -> None:
    assert wire("Api.Example.") == b"\x03api\x07example\0"
    assert wire("") == b"\0"
    for bad in ("a" * 64, "a..b", ".".join(["a" * 60] * 5)):
        with pytest.raises(ValueError, match="is no name"):
            wire(bad)
