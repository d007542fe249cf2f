"""Measurements over geography: which networks are moved, which are not, and that every answer is valid for its
block.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entry_dns.answers import prepare
from entry_dns.answers.learned import corrected
from entry_dns.answers.prepare import NO_ENTRY, UNKNOWN_LOCATION, ClientLocation
from entry_dns.fleet.latencies import LearningConfig
from entry_dns.fleet.networks import PRIVATE, blocks, spaces
from tests.entry_dns.conftest import NAMES, atlas, entry_health, world

CONFIG = LearningConfig()
HERE = {"virginia": 8.0, "tokyo": 170.0}


def order(known: prepare.Atlas, client: str, most: int = 3) -> list[str]:
    table = prepare.table(known, [entry_health(name) for name in NAMES], frozenset(NAMES), most)
    address = ip_address(client)
    group = table.spaces[address.version].at(int(address) >> (64 if address.version == 6 else 0))
    return [NAMES[one] for one in table.orders[group] if one != NO_ENTRY]


def test_a_network_that_geography_has_elsewhere_is_led_where_it_is() -> None:
    known = atlas(world())
    laid, found = corrected(known, world(), {ip_network("203.0.113.0/24"): HERE, ip_network("2600::/48"): HERE}, CONFIG)
    assert order(known, "203.0.113.7")[0] == "tokyo"
    assert order(laid, "203.0.113.7") == ["virginia", "frankfurt", "tokyo"]
    assert order(laid, "2600::7")[0] == "virginia"
    assert order(laid, "198.51.100.7") == order(known, "198.51.100.7")
    assert {one.network: (one.before, one.now) for one in found} == {
        "203.0.113.0/24": ("tokyo", "virginia"),
        "2600::/48": ("", "virginia"),
    }


def test_confinement_stays_and_each_part_of_a_network_keeps_its_own() -> None:
    known = atlas(world(), ("203.0.113.64/26", ClientLocation(35.7, 139.7, within=("jp",))))
    laid, _ = corrected(known, world(), {ip_network("203.0.113.0/24"): HERE}, CONFIG)
    assert order(laid, "203.0.113.70") == ["tokyo"]
    assert order(laid, "203.0.113.7")[0] == order(laid, "203.0.113.200")[0] == "virginia"


def test_measurements_that_correct_nothing_leave_the_atlas_unchanged() -> None:
    known = atlas(world())
    laid, found = corrected(known, world(), {ip_network("203.0.113.0/24"): {"tokyo": 230.0}}, CONFIG)
    assert laid is known
    assert "alone" in found[0].why


NETWORK = st.integers(0, 2**10 - 1).map(lambda n: ip_network((n << 8 | (203 << 24), 24)))
GIVEN = st.tuples(st.integers(18, 30), st.integers(0, 2**18 - 1), st.integers(2, 6)).map(
    lambda one: (ip_network((((203 << 24) | one[1]) >> (32 - one[0]) << (32 - one[0]), one[0])), one[2])
)
LOCATIONS = [
    UNKNOWN_LOCATION,
    UNKNOWN_LOCATION,
    *(ClientLocation(lat, lon) for lat, lon in ((35, 139), (50, 8), (39, -77), (0, 0), (52, 13))),
]


@settings(max_examples=40)
@given(
    st.lists(GIVEN, max_size=12),
    st.dictionaries(NETWORK, st.dictionaries(st.sampled_from(NAMES), st.floats(1, 300), min_size=1), max_size=8),
)
def test_all_addresses_of_an_answers_scope_get_the_same_answer(given_, learned) -> None:
    topology = world()
    known = prepare.atlas(topology, spaces(given_), LOCATIONS)
    laid, found = corrected(known, topology, learned, CONFIG)
    applied = {one.network for one in found if not one.why}
    space = laid.spaces[4]
    assert np.all(np.diff(space.starts.astype(np.int64)) > 0)
    for first, length, row in blocks(space):
        last = first + (1 << (32 - length)) - 1
        for at in {first, last, (first + last) // 2}:
            assert space.at(at) == row
            before = known.spaces[4].at(at)
            if row < len(known.costs):
                assert row == before, "what was not learned is as it was"
            else:
                assert str(ip_network((at >> 8 << 8, 24))) in applied
                assert before != PRIVATE
                assert np.array_equal(laid.allowed[row], known.allowed[before])
                assert length >= 24, "no answer is told for more than was measured"
    assert laid.spaces[6] is known.spaces[6] or laid is known
