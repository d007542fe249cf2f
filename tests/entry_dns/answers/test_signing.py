"""Signatures, looked at by dnspython's validator."""

from __future__ import annotations

from collections.abc import Callable

import dns.dnssec
import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from entry_dns.answers.cookies import Cookies
from entry_dns.answers.responder import Responder, wire
from entry_dns.answers.signing import AGAIN_S, BACK_S, KeyFileError, ZoneKey, ZoneKeys, delegation, key_tag
from entry_dns.answers.snapshot import decode, encode
from entry_dns.answers.zones import NamePlan, Ttls, ZonePlan, view
from tests.entry_dns.conftest import PLAN, atlas, entry_health, served, world
from topology.law import Law

NOW = 1_800_000_000.0


def pem(key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


KEY = ZoneKey(pem(ec.generate_private_key(ec.SECP256R1())))
ZONE = dns.name.from_text("entry.example")


def ask(responder: Responder, name: str, kind: str) -> dns.message.Message:
    query = dns.message.make_query(name, kind, want_dnssec=True)
    answer = responder.answer(query.to_wire(), "192.0.2.200")
    assert answer is not None
    return dns.message.from_wire(answer)


@pytest.fixture
def signed() -> Responder:
    return served(Responder(keys={wire("entry.example"): ZoneKeys([KEY])}))


def checked(responder: Responder, sets: list[dns.rrset.RRset]) -> list[str]:
    """The types of the sets, each of which has a good signature."""
    anchor = ask(responder, "entry.example", "DNSKEY").answer[0]
    assert dns.dnssec.key_id(anchor[0]) == KEY.tag == key_tag(KEY.dnskey)
    signatures = {(one.name, one.covers): one for one in sets if one.rdtype == dns.rdatatype.RRSIG}
    plain = [one for one in sets if one.rdtype != dns.rdatatype.RRSIG]
    for one in plain:
        dns.dnssec.validate(one, signatures[one.name, one.rdtype], {ZONE: anchor}, now=NOW)
    return [dns.rdatatype.to_text(one.rdtype) for one in plain]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("api.entry.example", "A"), ("api.entry.example", "AAAA"), ("api.entry.example", "HTTPS"),
        ("api.entry.example", "TXT"), ("entry.example", "SOA"), ("entry.example", "NS"), ("entry.example", "DNSKEY"),
        ("ns1.entry.example", "A"),
    ],
)  # fmt: skip
def test_every_answer_is_signed_if_the_query_asks_for_it(signed, name: str, kind: str) -> None:
    assert checked(signed, ask(signed, name, kind).answer) == [kind]
    plain = dns.message.make_query(name, kind)
    answer = dns.message.from_wire(signed.answer(plain.to_wire(), "192.0.2.200"))
    assert [one.rdtype for one in answer.answer] == [dns.rdatatype.from_text(kind)]


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("nobody.entry.example", {"RRSIG", "NSEC", "TYPE128"}),
        ("api.entry.example", {"A", "AAAA", "TXT", "HTTPS", "RRSIG", "NSEC"}),
    ],
)
def test_a_denial_covers_one_name_alone(signed, name: str, types: set[str]) -> None:
    answer = ask(signed, name, "MX")
    assert not answer.answer
    assert sorted(checked(signed, answer.authority)) == ["NSEC", "SOA"]
    denial = next(one for one in answer.authority if one.rdtype == dns.rdatatype.NSEC)
    assert denial.name.to_text() == f"{name}."
    assert denial[0].next.to_text() == f"\\000.{name}."
    assert set(denial[0].to_text().split()[1:]) - {"NXNAME"} == types - {"TYPE128"} or "NXNAME" in denial[0].to_text()


@pytest.mark.parametrize("name", ["api.entry.example", "entry.example", "nobody.entry.example"])
def test_the_records_that_every_name_of_a_signed_zone_has_are_given_and_never_denied(signed, name: str) -> None:
    """A denial of NSEC or RRSIG would contradict itself: the NSEC record in it lists both."""
    answer = ask(signed, name, "NSEC")
    assert (checked(signed, answer.answer), answer.authority) == (["NSEC"], [])
    assert {"NSEC", "RRSIG"} <= set(answer.answer[0][0].to_text().split())
    (signatures,) = ask(signed, name, "RRSIG").answer
    assert signatures.rdtype == dns.rdatatype.RRSIG
    assert signatures[0].type_covered == dns.rdatatype.NSEC


def test_without_dnssec_a_name_s_nsec_record_comes_only_where_asked_for(signed) -> None:
    def plain(name: str) -> dns.message.Message:
        return dns.message.from_wire(signed.answer(dns.message.make_query(name, "NSEC").to_wire(), "192.0.2.200"))

    assert [one.rdtype for one in plain("api.entry.example").answer] == [dns.rdatatype.NSEC]
    nobody = plain("nobody.entry.example")
    assert (nobody.rcode(), nobody.answer) == (dns.rcode.NXDOMAIN, [])


def test_the_minimal_answer_to_a_question_for_everything_is_signed(signed) -> None:
    assert checked(signed, ask(signed, "api.entry.example", "ANY").answer) == ["HINFO"]  # RFC 8482, 4.2


@pytest.mark.parametrize("name", ["api.entry.example", "nobody.entry.example"])
def test_the_mark_of_a_denial_is_no_question(signed, name: str) -> None:
    answer = ask(signed, name, "TYPE128")  # RFC 9824, 3.5
    assert (answer.rcode(), answer.answer, answer.authority) == (dns.rcode.FORMERR, [], [])


@pytest.mark.parametrize("child_signed", [True, False])
def test_of_a_zone_within_another_the_outer_one_says_whether_it_is_signed(child_signed: bool) -> None:
    """Validators ask the outer zone for the DS records (RFC 4035, 3.1.4.1): the inner one cannot speak for itself."""
    inner = ZonePlan(
        "eu.entry.example", (NamePlan("api.eu.entry.example"),), (("ns.elsewhere.example", ()),), "h.example"
    )
    topology, inner_key = world(), ZoneKey(pem(ec.generate_private_key(ec.SECP256R1())))
    keys = {wire("entry.example"): ZoneKeys([KEY])}
    if child_signed:
        keys[wire("eu.entry.example")] = ZoneKeys([inner_key])
    responder = Responder(keys=keys)
    healths = [entry_health(name) for name in topology.entries]
    made = view([PLAN, inner], Law(topology), atlas(topology), healths, Ttls(5, 30), 3, 1)
    responder.adopt(*decode(memoryview(encode(*made))))
    responder.tick(NOW)
    answer = ask(responder, "eu.entry.example", "DS")
    if child_signed:
        assert checked(responder, answer.answer) == ["DS"]
        assert answer.answer[0][0].to_digestable() == delegation(wire("eu.entry.example"), inner_key.dnskey)
    else:
        assert sorted(checked(responder, answer.authority)) == ["NSEC", "SOA"]
        denial = next(one for one in answer.authority if one.rdtype == dns.rdatatype.NSEC)
        assert set(denial[0].to_text().split()[1:]) == {"NS", "RRSIG", "NSEC"}
    assert dns.rdatatype.SOA in [one.rdtype for one in ask(responder, "entry.example", "DS").authority]


def test_signatures_are_kept_and_renewed_in_time(signed) -> None:
    first = ask(signed, "api.entry.example", "A").answer[1][0].signature
    assert ask(signed, "api.entry.example", "A").answer[1][0].signature == first
    signed.tick(NOW + AGAIN_S + 1)
    again = ask(signed, "api.entry.example", "A").answer[1][0]
    assert again.signature != first
    assert again.inception < NOW + AGAIN_S < again.expiration


@pytest.mark.parametrize("back_s", [0, 10, BACK_S - 1, BACK_S, BACK_S + 1, 90 * AGAIN_S])
def test_signatures_have_begun_even_after_the_clock_was_set_back(signed, back_s: int) -> None:
    assert ask(signed, "api.entry.example", "A").answer[1][0].inception <= NOW
    signed.tick(NOW - back_s)
    for name, kind in (("api.entry.example", "A"), ("nobody.entry.example", "MX"), ("entry.example", "DNSKEY")):
        answer = ask(signed, name, kind)
        signatures = [
            one for rrset in (*answer.answer, *answer.authority) if rrset.rdtype == dns.rdatatype.RRSIG for one in rrset
        ]
        assert signatures
        assert all(one.inception <= NOW - back_s < one.expiration for one in signatures)


LONGEST = ("!" * 49, *["!" * 62] * 3)  # with the zone 255 bytes, the most that a name has


@pytest.mark.parametrize(
    "labels",
    [
        LONGEST, (LONGEST[0][1:], *LONGEST[1:]), (LONGEST[0][2:], *LONGEST[1:]), ("!" * 48 + "@", *LONGEST[1:]),
        ("\\255" * 49, *LONGEST[1:]), ("!" * 47 + "\\255" * 2, *LONGEST[1:]),
        ("\\255" * 48, "\\255" * 63, "a" * 62, "a" * 61),
        ("\\255" * 49, *["\\255" * 62] * 3), ("\\255" * 47, *["\\255" * 63] * 3), ("\\255" * 46, *["\\255" * 63] * 3),
        ("a",), ("*",), ("\\000", "eu"),
    ],
)  # fmt: skip
def test_a_denial_of_the_longest_names_covers_no_other_name_either(signed, labels: tuple[str, ...]) -> None:
    """A record whose next name is its own denies all other names of the zone (RFC 4034, 4.1.1; RFC 8198)."""
    name = dns.name.from_text(".".join(labels), ZONE)
    answer = ask(signed, name.to_text(), "A")
    denial = next(one for one in answer.authority if one.rdtype == dns.rdatatype.NSEC)
    assert denial.name == name
    assert denial[0].next == name.successor(ZONE) != name
    assert checked(signed, answer.authority)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda: b"nonsense", "no private key in PEM"),
        (lambda: pem(rsa.generate_private_key(65537, 2048)), "not an ECDSA key on P-256"),
        (lambda: pem(ec.generate_private_key(ec.SECP384R1())), "not an ECDSA key on P-256"),
    ],
)
def test_a_key_that_cannot_sign_is_refused(key: Callable[[], bytes], message: str) -> None:
    with pytest.raises(KeyFileError, match=message):
        ZoneKey(key())


def test_who_asks_for_ever_other_names_with_a_valid_cookie_is_sent_to_tcp_before_the_server_only_signs() -> None:
    """A valid cookie freed of all limits: 10,000 made-up names a second took all of a process, 0.1 ms each."""
    responder = served(Responder(Cookies([bytes(16)]), rate=3, slip=1, keys={wire("entry.example"): ZoneKeys([KEY])}))
    first = dns.message.make_query("entry.example", "SOA", options=[dns.edns.GenericOption(10, b"clientco")])
    (cookie,) = dns.message.from_wire(responder.answer(first.to_wire(), "192.0.2.200")).options
    whole = [dns.edns.GenericOption(10, bytes(cookie.client) + bytes(cookie.server))]

    def asked(name: str, kind: str = "A", *, udp: bool = True, host: str = "192.0.2.200") -> dns.message.Message:
        query = dns.message.make_query(name, kind, want_dnssec=True, options=whole)
        return dns.message.from_wire(responder.answer(query.to_wire(), host, udp))

    kinds = ("A", "NSEC", "RRSIG", "ANY", "DS", "TXT")
    denied = [asked(f"x{n}.entry.example", kind) for n in range(4) for kind in kinds]
    assert sum(not one.flags & dns.flags.TC for one in denied) == 3
    assert all(one.authority or one.answer or one.flags & dns.flags.TC for one in denied)
    for _ in range(3):
        assert asked("api.entry.example").answer, "what there is was signed once, and is told"
    assert asked("x.entry.example", udp=False).authority, "as is all by TCP"
    plain = dns.message.make_query("y.entry.example", "A", use_edns=0, options=whole)
    assert dns.message.from_wire(responder.answer(plain.to_wire(), "192.0.2.200")).authority, "and what is not signed"
    responder.tick(responder.now + 1.0)
    assert asked("z.entry.example").authority
    responder.tick(responder.now + 1.0)
    for n in range(9):
        spoofed = dns.message.make_query(f"s{n}.entry.example", "A", want_dnssec=True)
        responder.answer(spoofed.to_wire(), "192.0.2.66")
        asked(f"t{n}.entry.example", udp=False)
    assert [bool(asked(f"u{n}.entry.example").authority) for n in range(4)] == [True, True, True, False]
