"""The journal: replayed on any snapshot it gives what its reader may know, and never more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from farhop.balance.prefix.journal import Cleared, Evicted, Journal, Stored
from farhop.balance.prefix.trie import PrefixTrie

REGIONS = ("fra", "lon", "tyo")
AUDIENCES: dict[str, frozenset[str] | None] = {
    "all": None,
    "eu": frozenset({"fra"}),
    "west": frozenset({"fra", "lon"}),
    "none": frozenset(),
}


def nodes_of(path: tuple[int, ...]) -> tuple[int, ...]:
    node, nodes = 7, []
    for label in path:
        node = xxh3_64_intdigest(bytes([label]), node)
        nodes.append(node)
    return tuple(nodes)


def journal(*locations: str, capacity: int = 4096, **bounds: int) -> Journal:
    trie = PrefixTrie()
    for name in locations or ("a", "b"):
        trie.add(name, capacity)
    return Journal(trie, **bounds)


class Reader:
    """A global balancer in one region, which applies what it is told and insists that parents are known."""

    def __init__(self, source: Journal, region: str) -> None:
        self.source, self.region = source, region
        self.known: dict[int, int] = {}
        self.received: set[int] = set()
        self.seq = -1
        self.snapshots = 0

    def store(self, path: Stored) -> None:
        above = path.parent
        assert above == 0 or above in self.known
        for node in path.nodes:
            self.known[node] = above
            above = node
        self.received.update(path.nodes)

    def evict(self, top: int) -> None:
        self.received.add(top)
        if self.known.pop(top, None) is not None:
            for child in [node for node, above in self.known.items() if above == top]:
                self.evict(child)

    def catch_up(self, disturb: Any = None) -> None:
        if not self.source.reaches(self.seq):
            self.snapshots += 1
            self.seq = self.source.seq
            arriving = Reader(self.source, self.region)
            for slice_ in self.source.snapshot(self.region, 2):
                for path in slice_:
                    arriving.store(path)
                if disturb is not None:
                    disturb()
            self.known = arriving.known
            self.received |= arriving.received
        while self.source.reaches(self.seq) and self.seq < self.source.seq:
            self.seq, changes, count = self.source.read(self.seq, self.region, 3)
            assert count == sum(1 if isinstance(c, Cleared) else len(c.nodes) for c in changes)
            for change in changes:
                if isinstance(change, Stored):
                    self.store(change)
                elif isinstance(change, Evicted):
                    for node in change.nodes:
                        self.evict(node)
                else:
                    self.known.clear()


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.sampled_from("ab"), PATHS, st.sampled_from(sorted(AUDIENCES))),
        st.tuples(st.just("clear"), st.sampled_from("ab")),
        st.tuples(st.just("hold"), st.sampled_from("ab"), st.sampled_from([0, 1000, 3500, 4096])),
        st.tuples(st.just("read"), st.sampled_from(REGIONS)),
        st.tuples(st.just("epoch"), st.integers(2, 4)),
        st.tuples(st.just("lose"), st.sampled_from(REGIONS)),
        st.tuples(st.just("rest")),
    ),
    max_size=40,
)


class Truth:
    """Who may know of which node: whoever an inserter of it allows, since the node was last held by nobody."""

    def __init__(self, source: Journal) -> None:
        self.source = source
        self.may: dict[int, set[str]] = {}

    def step(self, step: Any) -> None:
        trie = self.source.trie
        if step[0] == "insert":
            _, name, path, audience = step
            allowed = AUDIENCES[audience]
            self.source.insert(name, nodes_of(path), allowed)
            for node in nodes_of(path):
                if trie.is_held(node):
                    self.may.setdefault(node, set()).update(REGIONS if allowed is None else allowed)
        elif step[0] == "clear":
            trie.clear(step[1])
        elif step[0] == "hold":
            trie.hold(step[1], step[2])
        elif step[0] == "epoch":
            if step[1] != self.source.epoch:
                self.may.clear()
            self.source.under(step[1])
        elif step[0] == "rest":
            self.source.stop_listening()
        self.may = {node: regions for node, regions in self.may.items() if trie.is_held(node)}

    def known_to(self, region: str) -> set[int]:
        return {node for node, regions in self.may.items() if region in regions}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(STEPS, STEPS, st.sampled_from([3, 8, 1000]))
def test_every_reader_knows_what_it_may_and_nothing_else(steps: Any, amid: Any, nodes_max: int) -> None:
    source = journal(nodes_max=nodes_max, capacity=1500)
    source.under(1)
    truth = Truth(source)
    readers = {region: Reader(source, region) for region in REGIONS}
    ever: dict[str, set[int]] = {region: set() for region in REGIONS}
    disturbances = iter(amid)

    def act(step: Any) -> None:
        truth.step(step)
        for region in REGIONS:
            ever[region] |= truth.known_to(region)

    def disturb() -> None:
        step = next(disturbances, None)
        if step is not None and step[0] not in ("read", "lose", "rest", "epoch"):
            act(step)

    for step in [*steps, *(("read", region) for region in REGIONS)]:
        if step[0] == "read":
            source.listen()
            reader = readers[step[1]]
            for _ in range(20):  # a reader that is too far behind starts again
                reader.catch_up(disturb)
                if source.reaches(reader.seq):
                    break
            assert set(reader.known) == truth.known_to(step[1])
        elif step[0] == "lose":
            readers[step[1]].seq = -1
        else:
            act(step)
    for region, reader in readers.items():
        assert reader.received <= ever[region]
    assert set(source.restricted) <= set(source.trie.all_nodes())
    assert source.n_nodes <= nodes_max
    assert len(source.entries) == source.seq - source.floor


def test_the_trie_has_no_observer_without_listeners_and_restrictions() -> None:
    source = journal()
    source.insert("a", nodes_of((1, 2)), None)
    assert (source.trie.observer, source.seq) == (None, 0)
    source.listen()
    source.insert("a", nodes_of((1, 2, 3)), None)
    assert source.trie.observer is source
    source.stop_listening()
    source.insert("a", nodes_of((4,)), None)
    assert source.trie.observer is None


def test_changes_made_without_a_listener_are_a_gap() -> None:
    source = journal()
    source.listen()
    at = source.seq
    source.stop_listening()
    source.listen()
    assert not source.reaches(at)
    assert source.reaches(source.seq)


def test_only_the_first_and_the_last_replica_of_a_node_are_reported() -> None:
    source = journal()
    source.listen()
    at = source.seq
    for name in ("a", "b"):
        source.insert(name, nodes_of((1, 2)), None)
    source.trie.clear("a")
    seq, changes, _ = source.read(at, "fra", 100)
    assert changes == [Stored(0, nodes_of((1, 2)))]
    source.trie.hold("b", 4096 - 256)
    assert source.read(seq, "fra", 100)[1] == [Evicted((nodes_of((1, 2))[1],))]
    source.trie.clear("b")
    assert source.read(seq, "fra", 100)[1][-1] == Cleared()


def test_evictions_are_gathered_until_they_are_read() -> None:
    source = journal("a")
    source.listen()
    source.insert("a", nodes_of((1, 2, 3, 1)), None)
    at = source.seq
    source.trie.hold("a", 4096 - 512)
    assert source.seq == at + 1
    at, changes, _ = source.read(at, "fra", 100)
    source.trie.hold("a", 4096 - 256)
    assert changes == [Evicted(nodes_of((1, 2, 3, 1))[:1:-1])]
    assert source.read(at, "fra", 100)[1] == [Evicted(nodes_of((1, 2))[1:])]


def test_a_node_of_two_tenants_is_sent_where_either_tenant_s_law_allows_it() -> None:
    source = journal("a")
    source.listen()
    at = source.seq
    source.insert("a", nodes_of((1, 2)), AUDIENCES["eu"])
    assert [source.read(at, region, 99)[1] for region in ("lon", "tyo")] == [[], []]
    source.insert("a", nodes_of((1,)), None)
    assert source.read(at, "tyo", 99)[1] == [Stored(0, nodes_of((1,)))]
    source.trie.hold("a", 4096 - 256)
    assert source.read(at, "tyo", 99)[1] == [Stored(0, nodes_of((1,)))]  # nor that it went
    assert source.read(at, "fra", 99)[1][-1] == Evicted(nodes_of((1, 2))[1:])


def test_nodes_added_without_the_journal_are_not_sent() -> None:
    source = journal("a")
    source.listen()
    at = source.seq
    source.trie.insert("a", nodes_of((1, 2)))
    assert source.read(at, "fra", 99)[1] == []
    assert not any(source.snapshot("fra", 99))


def test_a_node_whose_restriction_cannot_be_kept_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop.balance.prefix.journal.RESTRICTED_MAX", 3)
    source = journal("a")
    source.insert("a", nodes_of((1, 2)), AUDIENCES["eu"])
    source.insert("a", nodes_of((3, 4)), AUDIENCES["eu"])
    assert set(source.trie.all_nodes()) == set(nodes_of((1, 2)))


def test_the_journal_is_bounded_in_entries() -> None:
    source = journal("a", capacity=1 << 20, entries_max=10)
    source.listen()
    at = source.seq
    for n in range(30):
        source.insert("a", nodes_of((n,)), None)
    assert len(source.entries) == 10
    assert not source.reaches(at)
    assert source.reaches(source.seq - 10)


def test_a_law_that_only_widens_takes_back_nothing_and_one_that_does_not_all() -> None:
    source = journal()
    source.listen()
    source.under(1)
    source.insert("a", nodes_of((1, 2)), frozenset({"fra"}))
    at = source.seq
    source.under(2, widened=True)
    source.under(2)
    assert source.seq == at
    assert [path.nodes for slice_ in source.snapshot("fra", 100) for path in slice_] == [nodes_of((1, 2))]
    assert not [path for slice_ in source.snapshot("lon", 100) for path in slice_]
    source.under(3)
    assert source.seq == at + 1
    assert not source.reaches(at - 1)  # a reader that skipped this law starts again, without what another law allowed
    assert not [path for slice_ in source.snapshot("fra", 100) for path in slice_]
