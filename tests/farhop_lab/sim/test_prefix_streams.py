"""Prefix streams in virtual time: who knows what of whose caches, and when, whatever breaks in between."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.sim.balancer import BalancerProcess
from farhop_lab.sim.sites import Site, flat, station
from farhop_lab.sim.world import World
from farhop_lab.studies.ablations import ABLATIONS
from global_lb.links import prefix_streams
from global_lb.routing.flow import GlobalFlow
from topology.model import Rule

REGIONS = ("paris", "tokyo")
SETTLED_S = 15.0  # a broken call is noticed after 4 s, unconfirmed prefixes are removed within 10


def site(kv_tokens: int = 10**9) -> Site:
    made = station(8, 0.5, replicas=2)
    return msgspec.structs.replace(made, replica=msgspec.structs.replace(made.replica, kv_tokens=kv_tokens))


def world(seed: int = 7, kv_tokens: int = 10**9, rtt_ms: float = 200.0, **more: Any) -> World:
    one = site(kv_tokens)
    return World(seed, flat(REGIONS, rtt_ms, more.pop("tenants", None)), {"paris": one, "tokyo": one}, **more)


def law(epoch: int, *allow: str) -> bytes:
    tenants = [{"name": "t", "residency": {"processing": {"allow": list(allow)}}}]
    return json.dumps(
        {"epoch": epoch, "author": "a", "why": "w", "at": "2026-05-01T12:00:00Z", "tenants": tenants}
    ).encode()


def balancer(made: World, region: str) -> BalancerProcess:
    return made.balancers[region][0]


def known(made: World, here: str, of: str) -> set[int]:
    flow = balancer(made, here).flow
    assert isinstance(flow, GlobalFlow)
    return (
        {node for node in flow.regions.trie.all_nodes() if flow.regions.trie.holds(of, node)}
        if of in flow.regions.trie
        else set()
    )


def held(made: World, region: str) -> set[int]:
    trie = made.regions[region].flow.replicas.trie
    return {node for node in trie.all_nodes() if trie.is_held(node)}


def test_a_message_to_all_subscribers_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []

    def read(message: Any) -> Any:
        reads.append(message)
        return prefix_streams.read(message)

    monkeypatch.setattr("farhop_lab.sim.prefix_streams.read", read)
    made = world()
    made.run(5.0)
    reads.clear()
    made.arrive("paris", "t")
    made.run(5.5)
    assert known(made, "paris", "paris") == known(made, "tokyo", "paris") == held(made, "paris") != set()
    assert 1 <= len(reads) <= 2  # requests that began, and requests that were answered


def state(made: World, here: str, of: str) -> str:
    found = balancer(made, here).prefixes
    assert found is not None
    return found.state(of)


def test_prefixes_reach_other_balancers_after_half_a_round_trip() -> None:
    made = world()
    made.run(5.0)
    made.arrive("paris", "t", 4096)
    made.run(5.03)
    there = held(made, "paris")
    assert len(there) > 5
    assert not known(made, "tokyo", "paris")
    made.run(5.03 + 0.05 + 0.1 + 0.01)
    assert known(made, "tokyo", "paris") == there
    assert made.measures.violations == 0


def test_frozen_link_falls_behind_and_continues_from_its_position() -> None:
    made = world()
    made.at(5.0, made.freeze, "paris", "tokyo")
    made.at(6.0, made.arrive, "paris", "t", 4096)
    made.run(8.0)
    assert state(made, "tokyo", "paris") == "connected", "nobody can tell yet"
    made.run(12.0)
    assert state(made, "tokyo", "paris") == "behind"
    subscription = balancer(made, "tokyo").links.subscriptions["paris"]
    calls, messages = subscription.calls, subscription.messages
    made.run(30.0)
    assert subscription.calls == calls
    assert not known(made, "tokyo", "paris")
    made.heal("paris", "tokyo")
    made.run(33.0)
    assert state(made, "tokyo", "paris") == "connected"
    assert known(made, "tokyo", "paris") == held(made, "paris") != set()
    assert subscription.calls == calls + 1
    assert subscription.messages <= messages + 2, "no snapshot: that it goes on, and what it missed"


def test_a_region_that_returns_empty_counts_as_empty() -> None:
    made = world()
    made.at(5.0, made.arrive, "paris", "t", 4096)
    made.at(10.0, made.kill, "paris")
    made.at(20.0, made.revive, "paris")
    made.run(9.0)
    assert known(made, "tokyo", "paris")
    made.run(15.0)
    assert state(made, "tokyo", "paris") == "behind"
    assert known(made, "tokyo", "paris"), "it may come back with its caches"
    assert not made.regions["paris"].calls
    made.run(23.0)
    assert state(made, "tokyo", "paris") == "connected"
    assert not known(made, "tokyo", "paris")


def test_a_subscriber_behind_the_journal_gets_a_snapshot() -> None:
    made = world()
    made.run(5.0)
    made.regions["paris"].flow.replicas.journal.entries_max = 8
    subscription = balancer(made, "tokyo").links.subscriptions["paris"]
    snapshots = made.regions["paris"].reporter.prefixes.snapshots
    made.freeze("paris", "tokyo")
    for n in range(40):
        made.at(5.5 + n / 10, made.arrive, "paris", "t", 1024)
    made.run(20.0)
    made.heal("paris", "tokyo")
    made.run(25.0)
    assert subscription.calls == 2
    assert made.regions["paris"].reporter.prefixes.snapshots > snapshots
    assert known(made, "tokyo", "paris") == held(made, "paris")


def test_under_a_narrower_law_everything_allowed_is_sent_again() -> None:
    made = world()
    made.at(5.0, made.arrive, "paris", "t", 2048)
    made.run(8.0)
    assert known(made, "tokyo", "paris")
    made.publish_law(law(4, "paris"))
    made.run(8.5)
    assert state(made, "tokyo", "paris") == "behind"
    made.run(12.0)
    assert state(made, "tokyo", "paris") == "connected"
    assert not known(made, "tokyo", "paris")
    made.arrive("paris", "t", 2048)
    made.run(15.0)
    assert known(made, "paris", "paris")
    assert not known(made, "tokyo", "paris")


def test_prefixes_are_not_sent_where_the_law_forbids_it() -> None:
    made = world(tenants={"t": Rule(("world",)), "local": Rule(("paris",))})
    made.at(5.0, lambda: made.arrive("paris", "t", 2048))
    made.run(8.0)
    free = held(made, "paris")
    made.arrive("paris", "local", 2048)
    made.run(12.0)
    assert len(held(made, "paris")) > len(free)
    assert known(made, "tokyo", "paris") == free
    assert known(made, "paris", "paris") == held(made, "paris")


def test_no_balancer_knows_prefixes_without_a_trie() -> None:
    makers = ABLATIONS["farhop-no-trie"]
    assert makers.make_global is not None
    assert makers.make_regional is not None
    topology = flat(REGIONS, 200.0)
    made = world(make_global=makers.make_global(topology), make_regional=makers.make_regional(topology))
    made.stream(5.0, lambda: made.arrive("paris", "t", prefix="the same"), since=2.0, until=20.0)
    made.run(30.0)
    assert all(record.served for record in made.measures.records)
    assert state(made, "tokyo", "paris") == "connected"
    assert not any(known(made, a, b) or held(made, b) for a in REGIONS for b in REGIONS)


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "revive", "freeze", "heal"]),
        st.sampled_from(REGIONS),
        st.floats(2, 20),
    ),
    max_size=8,
)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 1000), FAULTS, st.sampled_from([2000, 10**9]))
def test_after_all_faults_every_balancer_knows_each_region_s_prefixes(
    seed: int, faults: list[tuple[str, str, float]], kv_tokens: int
) -> None:
    made = world(seed, kv_tokens)
    acts: dict[str, Any] = {
        "kill": made.kill,
        "revive": made.revive,
        "freeze": lambda region: made.freeze(region, REGIONS[region == "paris"]),
        "heal": lambda region: made.heal(region, REGIONS[region == "paris"]),
    }
    for what, region, at in faults:
        made.at(at, acts[what], region)
    turn = made.rng("who")
    made.stream(4.0, lambda: made.arrive(turn.choice(REGIONS), "t", turn.choice((512, 4096))), since=1.0, until=24.0)
    for region in REGIONS:
        for what in ("heal", "revive"):
            made.at(25.0, acts[what], region)
    made.run(25.0 + SETTLED_S)
    for here in REGIONS:
        for of in REGIONS:
            assert state(made, here, of) == "connected"
            assert known(made, here, of) == held(made, of)
    assert made.measures.violations == 0
