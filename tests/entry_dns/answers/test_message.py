from __future__ import annotations

import dns.edns
import dns.message
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entry_dns.answers import message
from entry_dns.answers.message import BADVERS, FORMERR, NOTIMP, Drop, RefusedError, read, subnet


def query(name: str = "api.entry.example", kind: str = "A", **fields) -> dns.message.Message:
    return dns.message.make_query(name, kind, **fields)


def test_a_query_is_understood() -> None:
    ecs = dns.edns.ECSOption("203.0.113.0", 24)
    made = query("API.Entry.Example", "HTTPS", use_edns=0, payload=1400, want_dnssec=True, options=[ecs])
    found = read(made.to_wire())
    assert (found.name, found.type, found.class_) == (b"\x03api\x05entry\x07example\0", 65, 1)
    assert (found.edns, found.payload, found.dnssec) == (True, 1400, True)
    assert found.ecs == (1, 24, bytes((203, 0, 113)))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\0\1\x18",
        b"\0\3\x18\0" + bytes(3),  # an unknown family
        b"\0\0\0\0",
        b"\0\1\x18\x18" + bytes(3),  # a scope in a query
        b"\0\1\x18\0" + bytes(2),  # too few octets
        b"\0\1\x18\0" + bytes(4),  # too many
        b"\0\1\x14\0\1\2\x0f",  # bits beyond the prefix
        b"\0\1\x21\0" + bytes(5),  # longer than an address
        b"\0\2\x81\0" + bytes(17),
        b"\0\0\x18\0" + bytes(3),  # a family that does not exist
        b"\0\1\0\0\0",  # an octet for a network of no bits
        b"\0\2\x38\0" + bytes(6),
        b"\0\2\x38\x38" + bytes(7),
    ],
)
def test_a_client_subnet_that_rfc_7871_refuses(value: bytes) -> None:
    assert subnet(value) is None
    made = query(use_edns=0, options=[dns.edns.GenericOption(8, value)])
    with pytest.raises(RefusedError) as refused:
        read(made.to_wire())
    assert refused.value.rcode == FORMERR


@pytest.mark.parametrize("value", [b"\0\1\0\0", b"\0\2\0\0", b"\0\1\x14\0\1\2\x10", b"\0\2\x38\0" + bytes(7)])
def test_a_valid_client_subnet_is_read(value: bytes) -> None:
    assert subnet(value) == (value[1], value[2], value[4:])


@pytest.mark.parametrize(
    ("options", "good"),
    [
        ([dns.edns.GenericOption(10, bytes(8))], True),
        ([dns.edns.GenericOption(10, bytes(9))], False),
        ([dns.edns.GenericOption(10, bytes(16))], True),
        ([dns.edns.GenericOption(10, bytes(41))], False),
        ([dns.edns.GenericOption(10, bytes(8))] * 2, False),
        ([dns.edns.GenericOption(3, b"")], True),
        ([dns.edns.GenericOption(3, b"x")], False),
        ([dns.edns.GenericOption(65001, b"whatever")], True),
    ],
)
def test_malformed_edns_options_are_refused_and_others_accepted(options, good: bool) -> None:
    wire = query(use_edns=0, options=options).to_wire()
    if good:
        read(wire)
    else:
        with pytest.raises(RefusedError):
            read(wire)


def test_messages_are_dropped_or_refused_by_their_fault() -> None:
    good = query().to_wire()
    for dropped in (b"", good[:11], good[:2] + bytes((good[2] | 0x80,)) + good[3:]):
        with pytest.raises(Drop):
            read(dropped)
    for rcode, wire in (
        (NOTIMP, good[:2] + b"\x28" + good[3:]),
        (NOTIMP, good[:2] + b"\x20" + good[3:]),  # NOTIFY
        (NOTIMP, good[:2] + b"\x08" + good[3:]),  # inverse queries, which are obsolete
        (FORMERR, good[:4] + b"\0\2" + good[6:]),
        (FORMERR, good[:4] + b"\0\0" + good[6:]),  # no question, though the header announces one
        (FORMERR, good[:4] + b"\0\0" + good[6:12]),
        (FORMERR, good[:4] + b"\0\0" + good[6:11] + b"\1" + bytes((0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0))),
        (FORMERR, good[:6] + b"\0\1" + good[8:]),
        (FORMERR, good + b"x"),
        (FORMERR, good[:-1]),
        (FORMERR, good[:12] + b"\xc0\x0c" + good[-4:]),
        (BADVERS, query(use_edns=1).to_wire()),
    ):
        with pytest.raises(RefusedError) as refused:
            read(wire)
        assert refused.value.rcode == rcode


def test_two_opt_records_are_refused() -> None:
    wire = query(use_edns=0).to_wire()
    opt = wire[-11:]
    with pytest.raises(RefusedError):
        read(wire[:10] + b"\0\2" + wire[12:] + opt)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_read_dropped_or_refused(data: bytes) -> None:
    try:
        found = read(data)
    except (Drop, RefusedError):
        return
    assert 12 <= found.end <= len(data)
    assert found.payload >= message.PAYLOAD_MIN
