from __future__ import annotations

from ipaddress import IPv4Network, ip_address, ip_network

from hypothesis import given, settings
from hypothesis import strategies as st

from entry_dns.fleet.networks import BITS, PRIVATE, PRIVATE_NETWORKS, UNKNOWN, Space, blocks, scope, spaces

cidrs = st.tuples(st.integers(0, (1 << 32) - 1), st.integers(1, 32)).map(
    lambda one: IPv4Network((one[0] >> (32 - one[1]) << (32 - one[1]), one[1]))
)


def scope_of(space: Space, address: str) -> str:
    at = int(ip_address(address))
    starts = space.starts.tolist()
    index = int(space.starts.searchsorted(at, side="right")) - 1
    return str(ip_network((address, scope(starts, index, at, space.bits)), strict=False))


def test_networks_around_a_hole_are_deaggregated_by_rfc_7871() -> None:
    space = spaces([(ip_network("1.2.0.0/20"), 7), (ip_network("1.2.3.0/24"), 8)])[4]
    inside = [
        (str(ip_network((at, length))), value)
        for at, length, value in blocks(space)
        if ip_network((at, length)).subnet_of(ip_network("1.2.0.0/20"))
    ]
    assert inside == [
        ("1.2.0.0/23", 7), ("1.2.2.0/24", 7), ("1.2.3.0/24", 8), ("1.2.4.0/22", 7), ("1.2.8.0/21", 7),
    ]  # fmt: skip
    assert scope_of(space, "1.2.9.9") == "1.2.8.0/21"
    assert scope_of(space, "1.2.3.9") == "1.2.3.0/24"


def test_a_private_address_gets_the_private_block() -> None:
    space = spaces([(ip_network("11.0.0.0/8"), 7)])[4]
    assert scope_of(space, "10.9.8.7") == "10.0.0.0/8"
    assert scope_of(space, "192.168.1.1") == "192.168.0.0/16"
    assert space.at(int(ip_address("172.20.0.1"))) == PRIVATE
    assert space.at(int(ip_address("9.9.9.9"))) == UNKNOWN
    taken = spaces([(ip_network("10.1.0.0/16"), 7)])[4]
    assert taken.at(int(ip_address("10.1.2.3"))) == 7
    assert taken.at(int(ip_address("10.2.2.3"))) == PRIVATE


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(cidrs, st.integers(2, 5)), max_size=40), st.lists(st.integers(0, (1 << 32) - 1), max_size=20))
def test_blocks_cover_the_space_are_apart_and_say_what_the_narrowest_network_says(networks, addresses) -> None:
    space = spaces(networks)[4]
    at = 0
    for first, length, value in blocks(space):
        assert first == at, "they follow each other without a gap"
        assert first % (1 << (32 - length)) == 0, "each is a prefix"
        assert space.at(first) == space.at(first + (1 << (32 - length)) - 1) == value
        at = first + (1 << (32 - length))
    assert at == 1 << 32
    last = {**{one: PRIVATE for one in PRIVATE_NETWORKS if one.version == 4}, **dict(networks)}
    for address in addresses:
        holding = [network for network in last if ip_address(address) in network]
        if holding:
            assert space.at(address) == last[max(holding, key=lambda network: network.prefixlen)]


def test_only_the_first_64_bits_of_an_ipv6_address_locate_it() -> None:
    space = spaces([(ip_network("2001:db8:1::/48"), 7), (ip_network("2001:db8:2::/80"), 8)])[6]
    assert BITS[6] == 64
    assert space.at(int(ip_address("2001:db8:1:ffff::1")) >> 64) == 7
    assert space.at(int(ip_address("2001:db8:2::1")) >> 64) == 8


def test_splitting_blocks_to_a_grain_changes_no_value() -> None:
    space = spaces([(ip_network("1.16.0.0/12"), 7)])[4]
    fine = space.grained(16)
    assert len(fine.starts) >= 1 << 16
    for address in (0, 1 << 24, 0x01100000, 0x011FFFFF, 0x01200000, (1 << 32) - 1):
        assert fine.at(address) == space.at(address)
