from __future__ import annotations

from functools import cache
from ipaddress import ip_address, ip_network
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entry_dns.answers import prepare
from entry_dns.answers.learned import corrected
from entry_dns.answers.prepare import ASK_RESOLVER, NO_ENTRY, UNKNOWN_LOCATION, ClientLocation, Table
from entry_dns.fleet.entry_health import State
from entry_dns.fleet.latencies import LearningConfig
from entry_dns.fleet.networks import blocks, spaces
from tests.entry_dns.conftest import CONFINED, FRANKFURT, NAMES, TOKYO, atlas, entry_health, world

EVERYBODY = frozenset(NAMES)


def listed(table: Table, network: str) -> list[str]:
    """The entries that a network's first address is answered with."""
    first = ip_network(network).network_address
    space = table.spaces[first.version]
    group = space.at(int(first) >> (64 if first.version == 6 else 0))
    order = table.orders[table.fallback if group == ASK_RESOLVER else group]
    return [NAMES[one] for one in order if one != NO_ENTRY]


def made(lawful=EVERYBODY, most=3, **healths) -> Table:
    known = atlas(world())
    return prepare.table(known, [healths.get(name, entry_health(name)) for name in NAMES], lawful, most)


def test_the_nearest_is_first_and_the_next_best_behind_it() -> None:
    assert listed(made(), TOKYO) == ["tokyo", "frankfurt", "virginia"]
    assert listed(made(), FRANKFURT) == ["frankfurt", "virginia", "tokyo"]
    assert listed(made(most=1), TOKYO) == ["tokyo"]


def test_entries_must_be_allowed_by_the_law_and_by_the_networks_confinement() -> None:
    assert listed(made(frozenset({"frankfurt"})), TOKYO) == ["frankfurt"]
    assert listed(made(), CONFINED) == ["tokyo"]
    assert listed(made(frozenset({"frankfurt"})), CONFINED) == []


def test_one_answer_for_all_has_scope_0_and_else_private_addresses_ask_the_resolver() -> None:
    known = prepare.atlas(
        world(), spaces([(ip_network(TOKYO), 2)]), [UNKNOWN_LOCATION, UNKNOWN_LOCATION, ClientLocation(35.7, 139.7)]
    )
    alone = prepare.table(known, [entry_health(name) for name in NAMES], frozenset({"frankfurt"}), 3)
    assert alone.uniform
    several = prepare.table(known, [entry_health(name) for name in NAMES], EVERYBODY, 3)
    assert not several.uniform
    assert several.spaces[4].at(int(ip_address("10.0.0.1"))) == ASK_RESOLVER


def test_an_entry_that_is_down_is_in_no_list_while_another_is_up() -> None:
    down = entry_health("tokyo", State.DOWN)
    assert listed(made(tokyo=down), TOKYO) == ["frankfurt", "virginia"]
    assert listed(made(frozenset({"tokyo"}), tokyo=down), TOKYO) == ["tokyo"]
    assert listed(made(tokyo=down), CONFINED) == ["tokyo"], "all that may are down: within the law, still"


def test_a_drained_entry_is_last() -> None:
    assert listed(made(tokyo=entry_health("tokyo", State.DRAINED, 0.0)), TOKYO) == ["frankfurt", "virginia", "tokyo"]


def test_a_bias_is_added_to_the_latency_in_milliseconds() -> None:
    assert listed(made(tokyo=entry_health("tokyo", bias_ms=500.0)), TOKYO) == ["frankfurt", "virginia", "tokyo"]
    assert listed(made(tokyo=entry_health("tokyo", bias_ms=50.0)), TOKYO)[0] == "tokyo"


def test_measured_times_correct_geography() -> None:
    slow = ClientLocation(35.7, 139.7, rtt_ms=(("tokyo", 400.0),))
    known = atlas(world(), ("203.0.113.128/25", slow))
    table = prepare.table(known, [entry_health(name) for name in NAMES], EVERYBODY, 3)
    assert listed(table, "203.0.113.128/25") == ["frankfurt", "virginia", "tokyo"]
    assert listed(table, "203.0.113.0/25")[0] == "tokyo"


@pytest.mark.parametrize("share", [0.125, 0.5, 0.875])
def test_a_share_is_drawn_network_by_network(share: float) -> None:
    known = prepare.atlas(
        world(),
        spaces([(ip_network("32.0.0.0/3"), 2)]),
        [UNKNOWN_LOCATION, UNKNOWN_LOCATION, ClientLocation(35.7, 139.7)],
    )
    table = prepare.table(known, [entry_health("tokyo", share=share), *map(entry_health, NAMES[:2])], EVERYBODY, 3)
    firsts = [listed(table, f"{a}.{b}.0.0/16")[0] for a in range(32, 64) for b in range(0, 256, 4)]
    assert firsts.count("tokyo") / len(firsts) == pytest.approx(share, abs=0.04)


def test_a_growing_share_takes_no_network_back() -> None:
    known = atlas(world())
    had: set[int] = set()
    for share in (0.25, 0.5, 0.75, 1.0):
        table = prepare.table(known, [entry_health("tokyo", share=share), *map(entry_health, NAMES[:2])], EVERYBODY, 3)
        has = {n for n in range(65536) if n % 97 == 0 and listed(table, f"{n >> 8}.{n & 255}.0.0/16")[:1] == ["tokyo"]}
        assert had <= has
        had = has


def test_every_address_of_a_block_has_its_answer() -> None:
    rng = Random(17)
    networks = []
    for _ in range(10_000):
        length = rng.choice((12, 16, 20, 22, 24, 24, 24, 28))
        networks.append(
            (ip_network((rng.getrandbits(32) >> (32 - length) << (32 - length), length)), rng.randrange(2, 40))
        )
    locations = [
        UNKNOWN_LOCATION,
        UNKNOWN_LOCATION,
        *(ClientLocation(rng.uniform(-60, 70), rng.uniform(-180, 180)) for _ in range(38)),
    ]
    known = prepare.atlas(world(), spaces(networks), locations)
    healths = [entry_health("tokyo", share=0.5), entry_health("frankfurt", State.DOWN), entry_health("virginia")]
    table = prepare.table(known, healths, EVERYBODY, 2)
    space = table.spaces[4]
    truth = known.spaces[4]
    for first, length, group in blocks(space):
        if rng.random() < 0.02 and group != ASK_RESOLVER:
            for _ in range(4):
                address = first + rng.randrange(1 << (32 - length))
                assert space.at(address) == group
                row = truth.at(address)
                order = [known.entries[one] for one in table.orders[group] if one != NO_ENTRY]
                assert "frankfurt" not in order
                near = int(np.argmin(np.where([n == "frankfurt" for n in known.entries], np.inf, known.costs[row])))
                late = order[0] != known.entries[near]
                assert not late or known.entries[near] == "tokyo", "only who takes a share gives up a client"


@cache
def both() -> tuple[prepare.Atlas, prepare.Atlas]:
    """By geography, and with a network that was measured elsewhere."""
    known = atlas(world())
    return known, corrected(known, world(), {ip_network(TOKYO): {"virginia": 8.0}}, LearningConfig())[0]


HEALTHS = st.tuples(st.sampled_from(State), st.sampled_from([0.0, 1.0]), st.floats(-300, 300))


@settings(max_examples=60)
@given(st.tuples(HEALTHS, HEALTHS, HEALTHS), st.sets(st.sampled_from(NAMES)), st.integers(1, 3))
def test_an_entry_that_is_down_is_never_answered_while_a_lawful_one_is_up(how, lawful, most: int) -> None:
    healths = [entry_health(name, *one) for name, one in zip(NAMES, how, strict=True)]
    down = {one.entry for one in healths if not one.answers}
    for known in both():
        table = prepare.table(known, healths, frozenset(lawful), most)
        everybody = [(network, lawful) for network in (TOKYO, FRANKFURT, "8.8.8.0/24")]
        for network, may in (*everybody, (CONFINED, lawful & {"tokyo"})):
            found = listed(table, network)
            assert set(found) <= may
            assert bool(found) == bool(may)
            assert not down.intersection(found) or may <= down
