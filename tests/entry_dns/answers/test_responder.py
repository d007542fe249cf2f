"""Answers, looked at by dnspython: what a resolver would read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from ipaddress import ip_network
from random import Random
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entry_dns.answers import prepare
from entry_dns.answers.cookies import Cookies
from entry_dns.answers.prepare import UNKNOWN_LOCATION, ClientLocation
from entry_dns.answers.responder import ASKERS_MAX, COUNTERS, SPAN_MAX, TAILS_MAX, Responder, wire
from entry_dns.answers.snapshot import decode, encode
from entry_dns.answers.zones import NamePlan, Ttls, view
from entry_dns.fleet.entry_health import State
from entry_dns.fleet.networks import of_arrays
from tests.entry_dns.conftest import NAMES, PLAN, TOKYO, atlas, entry_health, served, unconfined, world
from topology.law import Law

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
    reply = responder.answer(query.to_wire(), CLIENT, udp=udp)
    assert reply is not None
    answer = dns.message.from_wire(reply)
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


def test_without_a_lawful_entry_the_answer_is_servfail_with_a_reason_and_a_scope(responder) -> None:
    for kind in ("A", "AAAA", "HTTPS"):
        answer = ask(responder, "eu.entry.example", kind, subnet="198.18.5.0/24")
        assert answer.rcode() == dns.rcode.SERVFAIL
        assert not answer.answer
        assert not answer.authority
        assert told_scope(answer) == 15
        assert [int(one.code) for one in answer.options if isinstance(one, dns.edns.EDEOption)] == [18]


def test_a_query_without_a_subnet_gets_none_and_is_answered_by_the_sender_s_address() -> None:
    for by_resolver, known in ((False, unconfined()), (True, None)):
        responder = served(Responder(), known=known, by_resolver=by_resolver)
        answer = ask(responder)
        assert told_scope(answer) is None
        query = dns.message.make_query("api.entry.example", "A").to_wire()
        tokyo = dns.message.from_wire(responder.answer(query, "203.0.113.77"))
        assert addresses(tokyo)[0] == "192.0.2.3"
        assert addresses(dns.message.from_wire(responder.answer(query, "::ffff:203.0.113.77")))[0] == "192.0.2.3"
        assert addresses(dns.message.from_wire(responder.answer(query, "127.0.0.1"))), "nothing is known of him"


def test_where_networks_are_confined_an_answer_for_all_clients_of_a_resolver_is_what_all_may_get(responder) -> None:
    for edns in (True, False):
        assert addresses(ask(responder, edns=edns)) == ["192.0.2.3"], "one network is confined to Japan"
    assert addresses(ask(responder, kind="AAAA")) == ["2001:db8::3"]
    frankfurt = responder.answer(dns.message.make_query("api.entry.example", "A").to_wire(), "198.51.100.7")
    assert addresses(dns.message.from_wire(frankfurt)) == ["192.0.2.3"], "wherever he is: his very first question"
    for nothing in ("0.0.0.0/0", "::/0"):
        answer = ask(responder, subnet=nothing)
        assert (told_scope(answer), addresses(answer)) == (0, ["192.0.2.3"])
    assert ask(responder, "eu.entry.example").rcode() == dns.rcode.SERVFAIL, "Japan has nothing in the EU"
    assert addresses(ask(responder, subnet="198.51.100.0/24"))[0] == "192.0.2.2", "who tells a network gets its own"
    china = atlas(world(), ("198.19.0.0/16", ClientLocation(39.9, 116.4, within=("cn",))))
    answer = ask(served(Responder(), known=china))
    assert answer.rcode() == dns.rcode.SERVFAIL, "there is nothing that all may be told"
    assert [int(one.code) for one in answer.options] == [18]
    assert len(addresses(ask(served(Responder(), known=unconfined())))) == 3, "nobody is confined: nothing is kept back"


def test_a_subnet_of_length_0_has_scope_0_and_a_private_one_is_answered_by_the_resolver() -> None:
    for by_resolver, known in ((False, unconfined()), (True, None)):
        responder = served(Responder(), known=known, by_resolver=by_resolver)
        assert told_scope(ask(responder, subnet="0.0.0.0/0")) == 0
        private = ask(responder, subnet="10.1.2.0/24")
        assert told_scope(private) == 8
        assert private.answer == ask(served(Responder(), known=known, by_resolver=by_resolver)).answer


def test_a_resolver_that_sends_subnets_gets_the_answer_lawful_for_all_when_it_sends_none() -> None:
    responder = served(Responder(), by_resolver=True)
    assert addresses(ask(responder))[0] == "192.0.2.1", "he may be anywhere, and so may his clients"
    ask(responder, subnet=f"{CLIENT}/24")
    for edns in (True, False):
        assert addresses(ask(responder, edns=edns)) == ["192.0.2.3"], "one network is confined to Japan"
    query = dns.message.make_query("api.entry.example", "A").to_wire()
    assert len(addresses(dns.message.from_wire(responder.answer(query, "192.0.2.201")))) == 3, "another does not"
    responder.tick(responder.now + 3601.0)
    assert len(addresses(ask(responder))) == 3


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


def test_negative_answers_have_the_soa_and_are_valid_for_all_networks(responder) -> None:
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


def test_a_name_of_another_zone_is_refused(responder) -> None:
    for name, kind in (("example", "A"), ("www.example.org", "A"), ("entry.example", "AXFR"), ("xentry.example", "A")):
        assert ask(responder, name, kind).rcode() == dns.rcode.REFUSED
    chaos = dns.message.make_query("version.bind", "TXT", "CH")
    assert dns.message.from_wire(responder.answer(chaos.to_wire(), CLIENT)).rcode() == dns.rcode.REFUSED


def test_any_is_minimal(responder) -> None:
    answer = ask(responder, kind="ANY")
    assert [(rrset.rdtype, rrset.ttl) for rrset in answer.answer] == [(dns.rdatatype.HINFO, 3600)]


def test_the_question_is_echoed_with_the_case_of_its_letters(responder) -> None:
    answer = responder.answer(dns.message.make_query("aPi.EnTRy.eXample", "A").to_wire(), CLIENT)
    assert answer is not None
    assert b"\x03aPi\x05EnTRy\x07eXample" in answer
    assert dns.message.from_wire(answer).answer


def test_an_unknown_edns_version_is_badvers_and_a_query_without_edns_gets_none(responder) -> None:
    query = dns.message.make_query("api.entry.example", "A", use_edns=1)
    answer = dns.message.from_wire(responder.answer(query.to_wire(), CLIENT))
    assert (answer.rcode(), answer.edns) == (dns.rcode.BADVERS, 0)
    assert ask(responder, edns=False).edns == -1


def cookie_alone(cookie: bytes, flags: bytes = b"\1\0") -> bytes:
    """A query without a question (RFC 7873, 5.4)."""
    option = b"\0\x0a" + len(cookie).to_bytes(2, "big") + cookie
    opt = b"\0\0\x29\x04\xd0\0\0\0\0" + len(option).to_bytes(2, "big") + option
    return b"\x12\x34" + flags + b"\0\0\0\0\0\0\0\1" + opt


def test_a_query_for_a_cookie_alone_is_answered() -> None:
    cookies = Cookies([bytes(16)])
    responder = served(Responder(cookies, rate=1))
    responder.tick(1.8e9)
    reply = responder.answer(cookie_alone(b"clientco"), CLIENT)
    answer = dns.message.from_wire(reply)
    assert (answer.id, answer.rcode(), answer.question, answer.answer) == (0x1234, dns.rcode.NOERROR, [], [])
    assert answer.flags & (dns.flags.QR | dns.flags.RD) == dns.flags.QR | dns.flags.RD
    (cookie,) = answer.options
    whole = bytes(cookie.client) + bytes(cookie.server)
    assert cookies.verify(whole, bytes((192, 0, 2, 200)), int(responder.now)) == (whole, True)
    assert responder.answer(cookie_alone(b"clientco"), CLIENT) is None, "who proves nothing counts"
    for _ in range(3):
        assert responder.answer(cookie_alone(whole), CLIENT) == reply, "who proves his address does not"
    assert responder.answer(cookie_alone(b"clientco"), CLIENT, udp=False) is not None
    responder.tick(responder.now + 1.0)
    stale = dns.message.from_wire(responder.answer(cookie_alone(whole[:-1] + b"x"), CLIENT))
    assert (stale.rcode(), len(stale.options)) == (dns.rcode.NOERROR, 1), "he is told a good one"
    responder.tick(responder.now + 1.0)
    for without in (served(Responder()), responder):
        nothing = cookie_alone(b"clientco") if without is not responder else b"\x12\x34\1" + bytes(9)
        assert dns.message.from_wire(without.answer(nothing, CLIENT)).rcode() == dns.rcode.FORMERR


def test_queries_not_implemented_or_of_other_zones_are_refused_by_rfc_and_in_no_more_bytes_than_came(responder) -> None:
    query = dns.message.make_query("api.entry.example", "A", use_edns=0).to_wire()
    for opcode in range(1, 16):  # NOTIFY, UPDATE and all others; none is carried out
        reply = responder.answer(query[:2] + bytes((opcode << 3,)) + query[3:], CLIENT)
        assert (reply[2] >> 3 & 15, reply[3] & 15, len(reply)) == (opcode, dns.rcode.NOTIMP, 12)
    for kind in ("AXFR", "IXFR"):
        for udp in (True, False):
            answer = ask(responder, "entry.example", kind, udp=udp)
            assert (answer.rcode(), answer.answer, answer.authority) == (dns.rcode.REFUSED, [], [])
    for class_ in ("CH", "HS", "NONE", "ANY"):
        reply = responder.answer(dns.message.make_query("api.entry.example", "A", class_).to_wire(), CLIENT)
        answer = dns.message.from_wire(reply)
        assert (answer.rcode(), answer.answer) == (dns.rcode.REFUSED, [])
    for version in (1, 255):
        for cookie in (b"", b"\0\x0a\0\x08clientco"):
            opt = b"\0\0\x29\x04\xd0\0" + bytes((version, 0, 0, 0, len(cookie))) + cookie
            answer = dns.message.from_wire(responder.answer(query[:-11] + opt, CLIENT))
            assert (answer.rcode(), answer.edns, answer.answer) == (dns.rcode.BADVERS, 0, [])


def test_an_ipv4_address_written_as_one_of_ipv6_says_nothing_of_where_its_client_is() -> None:
    responder = served(Responder(), known=unconfined())
    for written in ("::ffff:203.0.113.9/128", "::203.0.113.9/128"):
        answer = ask(responder, subnet=written)
        assert (addresses(answer), told_scope(answer)) == (addresses(ask(responder)), 64)


def test_nsid_is_sent_if_the_query_asks_for_it() -> None:
    responder = served(Responder(nsid=b"tokyo-dns-1"))
    answer = ask(responder, options=[dns.edns.GenericOption(3, b"")])
    assert [bytes(one.nsid) for one in answer.options if one.otype == dns.edns.NSID] == [b"tokyo-dns-1"]
    assert not ask(responder).options


def test_a_valid_cookie_or_tcp_is_exempt_from_the_rate_limit() -> None:
    responder = served(Responder(Cookies([bytes(16)]), rate=3, slip=2))
    first = ask(responder, options=[dns.edns.GenericOption(10, b"clientco")])
    cookie = next(one for one in first.options if one.otype == dns.edns.COOKIE)
    whole = bytes(cookie.client) + bytes(cookie.server)
    assert len(whole) == 24
    plain = dns.message.make_query("api.entry.example", "A").to_wire()
    found = [responder.answer(plain, CLIENT) for _ in range(10)]
    assert sum(one is not None and len(one) > len(plain) for one in found) == 2
    slipped = [dns.message.from_wire(one) for one in found if one is not None and len(one) <= len(plain)]
    assert slipped
    assert all(one.flags & dns.flags.TC and not one.answer for one in slipped)
    assert any(one is None for one in found)
    proven = ask(responder, options=[dns.edns.GenericOption(10, whole)])
    assert addresses(proven), "who proves his address is not limited"
    assert addresses(ask(responder, udp=False)), "nor who comes by TCP"
    responder.tick(responder.now + 1.0)
    assert addresses(ask(responder)), "nor in the next second"
    assert dict(zip(COUNTERS, responder.counts, strict=True))["cookie_proven"] >= 1


def test_an_answer_that_does_not_fit_is_truncated_and_comes_by_tcp() -> None:
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
    responder = served(Responder(), healths=None)
    head = responder.head
    assert head.ready
    empty = served(Responder())
    empty.adopt(type(head)(head.zones, head.names, head.entries, (), ready=False), ())
    answer = ask(empty, subnet="203.0.113.9/32")
    assert answer.rcode() == dns.rcode.SERVFAIL
    assert [int(one.code) for one in answer.options if isinstance(one, dns.edns.EDEOption)] == [14]


def test_answers_with_a_suspect_or_draining_entry_have_the_least_ttl() -> None:
    doubtful = [entry_health("virginia"), entry_health("frankfurt"), entry_health("tokyo", State.SUSPECT)]
    assert ask(served(Responder(), healths=doubtful), subnet="203.0.113.9/32").answer[0].ttl == 5
    draining = [entry_health("virginia"), entry_health("frankfurt"), entry_health("tokyo", State.DRAINED, 0.0)]
    answer = ask(served(Responder(), healths=draining), subnet="203.0.113.9/32")
    assert addresses(answer)[-1] == "192.0.2.3"
    assert answer.answer[0].ttl == 5


# The subnet in the question, the scope in the answer, the first address.
@pytest.mark.parametrize(
    ("subnet", "scope", "first"),
    [
        ("203.0.113.0/24", 24, "192.0.2.3"),
        ("203.0.113.0/25", 24, "192.0.2.3"),
        ("203.0.113.1/32", 24, "192.0.2.3"),
        ("203.0.112.0/22", 24, "192.0.2.1"),  # less was given than is needed: its first address, and how much is needed
        ("203.0.112.0/24", 24, "192.0.2.1"),
        ("203.0.114.0/24", 23, "192.0.2.1"),
        ("198.51.100.0/24", 24, "192.0.2.2"),
        ("0.0.0.0/0", 0, "192.0.2.3"),  # for all of a resolver's clients: the answer that each of them may get
        ("::/0", 0, "192.0.2.3"),
        ("192.0.0.0/8", 9, "192.0.2.1"),
        ("2001:db8:aaaa::/48", 48, "192.0.2.3"),
        ("2001:db8:aaaa:bbbb::/64", 48, "192.0.2.3"),
        ("2001:db8:aaab::/48", 48, "192.0.2.1"),
        ("fd00::/8", 7, "192.0.2.1"),
    ],
)
def test_the_scope_answered_for_client_subnets(responder, subnet: str, scope: int, first: str) -> None:
    answer = ask(responder, subnet=subnet)
    assert (told_scope(answer), addresses(answer)[0]) == (scope, first)


# The subnet in the question, what it contains beside networks that nobody confines, the answer to both names.
@pytest.mark.parametrize(
    ("subnet", "open_name", "eu_name"),
    [
        ("198.16.0.0/14", ["192.0.2.3"], None),  # the upper half is confined to Japan, which has nothing in the EU
        ("198.16.0.0/15", ["192.0.2.1", "192.0.2.2", "192.0.2.3"], ["192.0.2.2"]),
        ("198.0.0.0/8", ["192.0.2.3"], None),
        ("203.0.112.0/22", ["192.0.2.1", "192.0.2.2", "192.0.2.3"], ["192.0.2.2"]),  # nobody there is confined
        ("2001:db8:bb00::/40", ["2001:db8::3"], None),
    ],
)
def test_a_resolver_that_sends_less_than_is_needed_gets_only_what_all_of_that_subnet_may_get(
    subnet: str, open_name: list[str], eu_name: list[str] | None
) -> None:
    """It gives the answer to the whole subnet that it sent, whatever longer scope it is told (RFC 7871, 7.3.1)."""
    known = atlas(world(), ("2001:db8:bbbb::/48", ClientLocation(50.1, 8.7, within=("jp",))))
    responder = served(Responder(), known=known)
    kind = "AAAA" if ":" in subnet else "A"
    for _ in range(2):  # the second by the fast path
        assert addresses(ask(responder, kind=kind, subnet=subnet)) == open_name
        answer = ask(responder, "eu.entry.example", kind, subnet=subnet)
        assert addresses(answer) == (eu_name or [])
        assert answer.rcode() == (dns.rcode.NOERROR if eu_name else dns.rcode.SERVFAIL)


def test_a_subnet_of_more_networks_than_are_looked_at_gets_what_is_lawful_for_all() -> None:
    many = [
        (f"100.{n >> 8}.{n & 255}.0/24", ClientLocation(*((35.7, 139.7) if n % 2 else (50.1, 8.7))))
        for n in range(2 * SPAN_MAX)
    ]
    responder = served(Responder(), known=atlas(world(), *many))
    assert addresses(ask(responder, subnet="100.0.0.0/8")) == ["192.0.2.3"]
    assert len(addresses(ask(responder, subnet="100.0.0.0/20"))) == 3


def test_answers_are_equal_within_every_scope_given(responder) -> None:
    rng, seen = Random(3), {}
    for _ in range(1200):
        address = rng.choice((0xCB007100, 0xC6336400, 0xC6120000, 0, 0x0A000000)) + rng.getrandbits(
            rng.choice((8, 10, 17))
        )
        text = ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))
        answer = ask(responder, "eu.entry.example" if address & 1 else "api.entry.example", subnet=f"{text}/32")
        scope = told_scope(answer)
        assert scope is not None
        key = address & 1, scope, address >> (32 - scope)
        found = answer.rcode(), tuple(addresses(answer))
        assert seen.setdefault(key, found) == found
    for which, scope, block in seen:
        for shorter in range(scope):
            assert (which, shorter, block >> (scope - shorter)) not in seen, "scopes do not overlap"


@cache
def of_networks(count: int) -> tuple[memoryview, frozenset[int]]:
    """A view of so many networks, of which some are confined, and where they begin."""
    rng, numbers = Random(5), np.random.default_rng(5)
    lengths = numbers.choice([12, 16, 18, 20, 22, 24, 24, 24, 28], count)
    shift = (32 - lengths).astype(np.uint64)
    first = numbers.integers(1 << 24, 223 << 24, count).astype(np.uint64) >> shift << shift
    none = np.empty(0, dtype=np.uint64)
    laid = {
        4: of_arrays(4, first, lengths.astype(np.int64), numbers.integers(2, 60, count).astype(np.uint32)),
        6: of_arrays(6, none, none.astype(np.int64), none.astype(np.uint32)),
    }
    locations = [UNKNOWN_LOCATION, UNKNOWN_LOCATION]
    for n in range(58):
        within = (("jp",), ("eu",), ("cn",), (), (), ())[n % 6]
        locations.append(ClientLocation(rng.uniform(-60, 70), rng.uniform(-180, 180), within=within))
    healths = [entry_health("tokyo", share=0.5), entry_health("frankfurt"), entry_health("virginia")]
    known = prepare.atlas(world(), laid, locations)
    made = encode(*view([PLAN], Law(world()), known, healths, Ttls(5, 30), 3, 1))
    return memoryview(made), frozenset(first[:1000].tolist())


def test_of_a_hundred_thousand_networks_answers_are_equal_within_every_scope_given() -> None:
    data, firsts = of_networks(100_000)
    responder, rng = Responder(), Random(6)
    responder.adopt(*decode(data))
    told_of: dict[tuple[int, int], bytes] = {}
    query = dns.message.make_query("api.entry.example", "A", use_edns=0, options=[ecs("0.0.0.0/32")], id=1).to_wire()

    def answered(address: int) -> tuple[int, bytes]:
        answer = responder.answer(query[:-4] + address.to_bytes(4, "big"), CLIENT)
        assert answer is not None
        at = answer.index(b"\0\x08\0\x08\0\x01\x20") + 7
        return answer[at], answer[:at] + answer[at + 5 :]

    for first in sorted(firsts):
        address = min(first + rng.choice((0, 0, 1, 200, 5000, -1)), (1 << 32) - 1)
        scope, found = answered(address)
        block = address >> (32 - scope) << (32 - scope)
        for other in (
            block,
            block + (1 << (32 - scope)) - 1,
            block + rng.getrandbits(32 - scope) if scope < 32 else block,
        ):
            assert answered(other) == (scope, found), f"{address:x}/{scope} {other:x}"
        told_of[scope, block >> (32 - scope)] = found
    assert len(told_of) > 800
    assert len(set(told_of.values())) > 5
    for scope, block in told_of:
        assert not any((shorter, block >> (scope - shorter)) in told_of for shorter in range(scope)), "they overlap"


def test_adopting_a_view_costs_the_same_for_any_number_of_networks() -> None:
    """So no worker pauses for them: it reads the head, and leaves networks where they are."""
    costs = []
    for count in (100, 100, 100_000):  # from Python 3.12 on, bytecodes traced for the first time are not seen
        data, responder = of_networks(count)[0], Responder()
        costs.append(worked(lambda data=data, responder=responder: responder.adopt(*decode(data))))
    assert costs[1] == costs[2]


def test_adopting_a_view_with_unchanged_names_costs_the_same_for_any_number_of_them() -> None:
    costs = []
    for count in (3, 3, 300):  # the first, too, for Python's sake
        plan = replace(PLAN, names=tuple(NamePlan(f"n{n}.entry.example") for n in range(count)))
        responder, other = served(Responder(), plan=plan), [entry_health(name) for name in reversed(NAMES)]
        made = memoryview(encode(*view([plan], Law(world()), atlas(world()), other, Ttls(5, 30), 3, 2)))
        costs.append(worked(lambda responder=responder, made=made: responder.adopt(*decode(made))))
        assert addresses(ask(responder, "n2.entry.example", subnet=TOKYO))[0] == "192.0.2.3"
    assert costs[1] == costs[2]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_a_malformed_query_gets_no_more_bytes_than_it_sent(data: st.DataObject) -> None:
    query = dns.message.make_query(
        "api.entry.example", "A", use_edns=0, options=[ecs("203.0.113.0/24"), dns.edns.GenericOption(10, bytes(8))]
    ).to_wire()
    mutated = bytearray(query)
    for _ in range(data.draw(st.integers(0, 6))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    mutated = mutated[: data.draw(st.integers(0, len(mutated)))] + data.draw(st.binary(max_size=8))
    answer = RESPONDER.answer(bytes(mutated), CLIENT)
    if answer is not None and answer[3] & 15 in (dns.rcode.FORMERR, dns.rcode.NOTIMP):
        assert len(answer) <= len(mutated)
        assert answer[:2] == mutated[:2]


RESPONDER = served(Responder(Cookies([bytes(16)]), nsid=b"x"))


NOW = 1_800_000_000
HOSTS = ("192.0.2.200", "192.0.2.201", "203.0.113.77")
COOKIES = Cookies([bytes(16)])
MISLEADING = b"\0\x08\0\7\0\1\x18\0abc"  # as a client subnet, inside of another option
WHOLE = {host: COOKIES.verify(b"clientco", bytes(map(int, host.split("."))), NOW)[0] for host in HOSTS}


def mixed(rng: Random) -> bytes:
    """A good question as resolvers ask them: names, flags, options in any order, and somebody's cookie."""
    options: list[dns.edns.Option] = []
    if rng.random() < 0.5:
        length = rng.choice((0, 15, 24, 32))
        address = rng.choice((0xCB007100, 0xC6336400, 0xC6120000, 0x0A000000)) + rng.getrandbits(10)
        options.append(ecs(str(ip_network((address >> (32 - length) << (32 - length) if length else 0, length)))))
    elif rng.random() < 0.5:
        options.append(ecs(f"2001:db8:aaa{rng.choice('ab')}::/{rng.choice((48, 56))}"))
    if rng.random() < 0.5:
        known = WHOLE[rng.choice(HOSTS)]
        options.append(dns.edns.GenericOption(10, rng.choice((known, known, known[:8], known[:8] + MISLEADING))))
    if rng.random() < 0.1:
        options.append(rng.choice((dns.edns.GenericOption(3, b""), dns.edns.GenericOption(4711, MISLEADING))))
    rng.shuffle(options)
    query = dns.message.make_query(
        rng.choice(("api.entry.example", "Eu.eNTry.example", "v4.entry.example", "entry.example", "no.entry.example")),
        rng.choice(("A", "A", "AAAA", "HTTPS", "TXT", "SOA")), use_edns=0 if options or rng.random() < 0.7 else False,
        options=options or None, want_dnssec=rng.random() < 0.2, id=rng.getrandbits(16),
    )  # fmt: skip
    query.flags = rng.choice((0, dns.flags.RD | dns.flags.AD))
    return query.to_wire()


def test_the_fast_path_and_the_full_parser_give_the_same_answer() -> None:
    """Whatever came before: what is known of some bytes is true of them alone. Malformed ones are among them."""
    rng = Random(11)
    short, strict = (served(Responder(COOKIES, nsid=b"x")) for _ in range(2))
    for _ in range(2500):
        data = bytearray(mixed(rng))
        if rng.random() < 0.2:
            data[rng.randrange(2, len(data))] = rng.choice((0, 1, 8, 24, 255))
            data = data[: rng.choice((len(data), len(data), len(data) - 1, len(data) - 4))]
        host = rng.choice(HOSTS)
        strict.tails.clear()  # it has seen no client
        assert short.answer(bytes(data), host) == strict.answer(bytes(data), host), (data.hex(), host)
    counts = dict(zip(COUNTERS, short.counts, strict=True))
    assert counts["queries"] - counts["odd"] > 330, "the short way was tried, too"


def test_bytes_like_a_client_subnet_inside_another_option_are_not_read_as_one(responder) -> None:
    for _ in range(3):
        answer = ask(responder, options=[dns.edns.GenericOption(4711, MISLEADING)], subnet="203.0.113.0/24")
        assert (addresses(answer)[0], told_scope(answer)) == ("192.0.2.3", 24)


def test_bits_beyond_the_prefix_are_refused_however_well_known_the_rest(responder) -> None:
    for subnet in ("198.18.0.0/15", "2001:db8:aaa0::/44"):
        query = dns.message.make_query("api.entry.example", "A", use_edns=0, options=[ecs(subnet)]).to_wire()
        for _ in range(2):
            assert dns.message.from_wire(responder.answer(query, CLIENT)).answer
        answer = responder.answer(query[:-1] + bytes((query[-1] | 1,)), CLIENT)
        assert dns.message.from_wire(answer).rcode() == dns.rcode.FORMERR


def test_a_sender_with_a_valid_cookie_has_no_rate_limit_and_takes_the_fast_path() -> None:
    responder = served(Responder(Cookies([bytes(16)]), rate=3, slip=2))
    first = ask(responder, options=[dns.edns.GenericOption(10, b"clientco")])
    cookie = next(one for one in first.options if one.otype == dns.edns.COOKIE)
    whole = dns.edns.GenericOption(10, bytes(cookie.client) + bytes(cookie.server))
    for _ in range(50):
        assert addresses(ask(responder, options=[whole], subnet="203.0.113.0/24"))
    counts = dict(zip(COUNTERS, responder.counts, strict=True))
    assert (counts["limited"], counts["odd"]) == (0, 2)
    assert addresses(ask(responder)), "nor does he use up what his network has"


def test_a_cookie_of_another_address_proves_nothing() -> None:
    responder = served(Responder(Cookies([bytes(16)]), rate=3, slip=0))
    first = ask(responder, options=[dns.edns.GenericOption(10, b"clientco")])
    cookie = next(one for one in first.options if one.otype == dns.edns.COOKIE)
    whole = dns.edns.GenericOption(10, bytes(cookie.client) + bytes(cookie.server))
    assert ask(responder, options=[whole])
    query = dns.message.make_query("api.entry.example", "A", use_edns=0, options=[whole]).to_wire()
    found = [responder.answer(query, "198.51.100.9") for _ in range(9)]
    assert sum(one is not None for one in found) == 3, "he is limited as anybody who proves nothing"


def test_the_memory_of_senders_is_bounded_under_a_flood() -> None:
    responder = served(Responder(Cookies([bytes(16)])))
    for number in range(ASKERS_MAX + 1000):
        host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        options = b"\0\x0a\0\x08" + number.to_bytes(8, "big")
        data = PLAIN[:10] + b"\0\1" + PLAIN[12:] + b"\0\0\x29" + (512 + number & 0xFFFF).to_bytes(2, "big") + bytes(4)
        if number & 1:
            responder.answer(data + len(options).to_bytes(2, "big") + options, host)
        else:
            responder.answer(data + b"\0\0", host)
    assert 0 < len(responder.askers) <= 1000
    assert 0 < len(responder.tails) < TAILS_MAX


PLAIN = dns.message.make_query("api.entry.example", "A").to_wire()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="bytecodes are those of Python 3.11")
def test_an_ordinary_question_takes_no_more_calls_and_bytecodes_than_before() -> None:
    responder = served(Responder(Cookies([bytes(16)]), rate=65_535))
    first = ask(responder, options=[dns.edns.GenericOption(10, b"clientco")])
    cookie = next(one for one in first.options if one.otype == dns.edns.COOKIE)
    options = [ecs("203.0.113.0/24"), dns.edns.GenericOption(10, bytes(cookie.client) + bytes(cookie.server))]
    query = dns.message.make_query("api.entry.example", "A", use_edns=0, options=options).to_wire()
    plain = dns.message.make_query("api.entry.example", "A", use_edns=0).to_wire()
    assert [counted(responder, one) for one in (query, plain)] == [
        (1, pytest.approx(330, abs=6)),
        (2, pytest.approx(214, abs=6)),
    ]


def counted(responder: Responder, query: bytes) -> tuple[int, int]:
    """Frames and bytecodes of an answer, once its like was answered before."""
    assert responder.answer(query, CLIENT)
    return worked(partial(responder.answer, query, CLIENT))


def worked(work: Callable[[], object]) -> tuple[int, int]:
    """Frames and bytecodes of some work."""
    frames = bytecodes = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal frames, bytecodes
        frames, bytecodes = frames + (event == "call"), bytecodes + (event == "opcode")
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return frames, bytecodes


def test_a_name_that_is_not_there_costs_no_more_with_many_that_are() -> None:
    """Resolvers pass on floods of names made up: each is looked up, none is compared with all others."""
    few = served(Responder())
    many = served(
        Responder(), plan=replace(PLAN, names=(*PLAN.names, *(NamePlan(f"n{n}.entry.example") for n in range(300))))
    )
    query = dns.message.make_query("made.up.entry.example", "A").to_wire()
    assert counted(few, query) == counted(many, query)


def test_led_counts_the_first_entry_of_each_answer(responder) -> None:
    ask(responder, subnet="203.0.113.9/32")
    assert responder.led[NAMES.index("tokyo")] == 1


def test_a_name_in_wire_form() -> None:
    assert wire("Api.Example.") == b"\x03api\x07example\0"
    assert wire("") == b"\0"
    for bad in ("a" * 64, "a..b", ".".join(["a" * 60] * 5)):
        with pytest.raises(ValueError, match="is no name"):
            wire(bad)
