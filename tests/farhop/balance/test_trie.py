"""The trie against a naive model: per location a set of paths, of which the least recently used leaf goes first."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from farhop.balance.chain import bytes_at, chain, depth_at
from farhop.balance.trie import LOCATIONS_MAX, PrefixTrie

Path = tuple[int, ...]
NAMES = ("a", "b", "c")
# A shared stem of 14 blocks takes some paths over the step from blocks of 256 B to blocks of 1 KiB (depth 17).
PATHS = st.builds(
    lambda stem, rest: (0,) * stem + tuple(rest), st.sampled_from([0, 14]), st.lists(st.integers(0, 2), max_size=6)
)
CAPACITIES = st.sampled_from([0, 255, 256, 1024, 4096, 6000, 9000, 50_000])


def nodes_of(path: Path) -> tuple[int, ...]:
    node, nodes = 7, []
    for label in path:
        node = xxh3_64_intdigest(bytes([label]), node)
        nodes.append(node)
    return tuple(nodes)


class Naive:
    """One location: every path held, with the tick of its last touch."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.pinned_bytes, self.tick = capacity_bytes, 0, 0
        self.paths: dict[Path, int] = {}

    @property
    def limit(self) -> int:
        return max(self.capacity_bytes - self.pinned_bytes, 0)

    def used(self) -> int:
        return sum(bytes_at(len(path)) - bytes_at(len(path) - 1) for path in self.paths)

    def insert(self, path: Path) -> None:
        self.tick += 1
        for depth in range(1, min(len(path), depth_at(self.limit)) + 1):  # what can never fit pushes nothing out
            self.paths[path[:depth]] = self.tick
        self.evict()

    def evict(self) -> None:
        while self.used() > self.limit:
            parents = {path[:-1] for path in self.paths}
            leaves = [path for path in self.paths if path not in parents]
            del self.paths[min(leaves, key=self.paths.__getitem__)]

    def depth(self, path: Path) -> int:
        return next((d for d in range(len(path), 0, -1) if path[:d] in self.paths), 0)

    def correct(self, path: Path, depth: int) -> None:
        if self.depth(path) < depth:
            self.insert(path[:depth])
        elif self.depth(path) > depth:
            top = path[: depth + 1]
            self.paths = {p: tick for p, tick in self.paths.items() if p[: depth + 1] != top}


class TrieMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.trie = PrefixTrie()
        self.naive: dict[str, Naive] = {}

    @initialize(capacity=CAPACITIES)
    def begin(self, capacity: int) -> None:
        self.add("a", 6000)
        self.add("b", capacity)

    @rule(name=st.sampled_from(NAMES), capacity=CAPACITIES)
    def add(self, name: str, capacity: int) -> None:
        if name in self.naive:
            with pytest.raises(ValueError, match=name):
                self.trie.add(name, capacity)
        else:
            self.trie.add(name, capacity)
            self.naive[name] = Naive(capacity)

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive)))
        self.trie.drop(name)
        del self.naive[name]
        assert name not in self.trie
        with pytest.raises(KeyError):
            self.trie.bytes_held(name)

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive)))
        self.trie.clear(name)
        self.naive[name].paths.clear()

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), n_bytes=CAPACITIES, pins=st.booleans())
    def resize(self, data: st.DataObject, n_bytes: int, pins: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive)))
        naive = self.naive[name]
        if pins:
            self.trie.hold(name, n_bytes)
            naive.pinned_bytes = n_bytes
        else:
            self.trie.set_capacity(name, n_bytes)
            naive.capacity_bytes = n_bytes
        naive.evict()

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), paths=st.lists(PATHS, min_size=1, max_size=4))
    def insert(self, data: st.DataObject, paths: list[Path]) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive)))
        for path in paths:
            self.trie.insert(name, nodes_of(path))
            self.naive[name].insert(path)

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), path=PATHS)
    def correct(self, data: st.DataObject, path: Path) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive)))
        depth = data.draw(st.integers(0, len(path)))
        self.trie.correct(name, nodes_of(path), depth)
        self.naive[name].correct(path, depth)

    @rule(path=PATHS)
    def match(self, path: Path) -> None:
        depths = {name: naive.depth(path) for name, naive in self.naive.items()}
        assert self.trie.match(nodes_of(path)) == {name: depth for name, depth in depths.items() if depth}
        assert {name: self.trie.match_one(name, nodes_of(path)) for name in self.naive} == depths

    @invariant()
    def mirrors_equal_the_model_and_keep_their_bounds(self) -> None:
        held: set[Path] = set()
        for name, naive in self.naive.items():
            assert self.trie.bytes_held(name) == naive.used() <= naive.limit
            assert set(self.trie._mirrors[name].lru) == {nodes_of(path)[-1] for path in naive.paths}
            assert all(path[:-1] in naive.paths for path in naive.paths if len(path) > 1)  # ancestor closure
            held |= set(naive.paths)
        assert self.trie.locations == tuple(self.naive)
        assert self.trie.nodes == len(held)
        assert self.trie.entries == sum(len(naive.paths) for naive in self.naive.values())
        assert len(self.trie._branches) == sum(len(path) > 1 for path in held)


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)

CHAINS = st.lists(st.integers(0, 6), max_size=8).map(tuple)


def assert_sound(trie: PrefixTrie) -> None:
    """What must hold even for chains that lie about their ancestors."""
    for mirror in trie._mirrors.values():
        assert mirror.used_bytes == sum(mirror.lru.values()) <= mirror.limit_bytes
        assert set(mirror.lru) == {node for node, mask in trie._nodes.items() if mask & mirror.bit}
    assert 0 not in trie._nodes.values()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "correct", "clear", "hold"]),
            st.sampled_from(NAMES),
            CHAINS,
            st.integers(0, 8),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_chains_made_to_collide_break_nothing(calls: list[tuple[str, str, Path, int]]) -> None:
    trie = PrefixTrie()
    for name in NAMES:
        trie.add(name, 1300)
    for call, name, lie, depth in calls:
        if call == "insert":
            trie.insert(name, lie)
        elif call == "correct":
            trie.correct(name, lie, min(depth, len(lie)))
        elif call == "hold":
            trie.hold(name, depth * 100)
        else:
            trie.clear(name)
        assert_sound(trie)
        assert all(0 < found <= len(lie) for found in trie.match(lie).values())
    for name in NAMES:
        trie.drop(name)
    assert (trie.nodes, trie.entries, len(trie._branches)) == (0, 0, 0)
    assert not trie._branches._only
    assert not trie._branches._many


@given(st.lists(st.integers(0, 44), min_size=1, max_size=70), st.integers(0, 44))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_one_search_finds_the_depth_of_many_locations(depths: list[int], asked: int) -> None:
    trie = PrefixTrie()
    path = tuple(range(100, 144))
    for i, depth in enumerate(depths):
        trie.add(f"r{i}", 1 << 20)
        trie.insert(f"r{i}", path[:depth])
    expected = {f"r{i}": min(depth, asked) for i, depth in enumerate(depths) if min(depth, asked)}
    assert trie.match(path[:asked]) == expected
    assert trie.match(path[:asked]) == expected  # and again from what the first search remembered


def test_the_bits_of_dropped_locations_are_reused_under_their_new_names() -> None:
    trie = PrefixTrie()
    for name in ("a", "b"):
        trie.add(name, 4096)
        trie.insert(name, (1, 2))
    assert trie.match((1, 2)) == {"a": 2, "b": 2}
    for turn in range(200):
        trie.drop(f"x{turn - 1}" if turn else "a")
        trie.add(f"x{turn}", 4096)
        assert trie.match((1, 2)) == {"b": 2}
        trie.insert(f"x{turn}", (1, 2))
        assert trie.match((1, 2)) == {"b": 2, f"x{turn}": 2}
    assert max(trie._names) == 2


def test_real_chains_of_two_chats_meet_in_their_system_prompt() -> None:
    trie = PrefixTrie()
    trie.add("fra", 1 << 20)
    system = bytes(range(256)) * 6
    trie.insert("fra", chain(system + b"what is a whale? " * 40, seed=1))
    assert trie.match(chain(system + b"what is a shark? " * 40, seed=1)) == {"fra": 6}
    assert trie.match(chain(system + b"what is a whale? " * 40, seed=2)) == {}


def test_a_path_longer_than_the_cache_keeps_its_beginning() -> None:
    trie = PrefixTrie()
    trie.add("fra", 1000)
    trie.insert("fra", (1, 2, 3, 4, 5))
    assert trie.match((1, 2, 3, 4, 5)) == {"fra": 3}
    trie.hold("fra", 500)
    assert trie.match((1, 2, 3, 4, 5)) == {"fra": 1}
    trie.hold("fra", 0)
    assert trie.match((1, 2, 3, 4, 5)) == {"fra": 1}


def test_correcting_takes_off_path_descendants_along() -> None:
    trie = PrefixTrie()
    trie.add("fra", 1 << 20)
    trie.add("iad", 1 << 20)
    for path in ((1, 2, 3), (1, 2, 4, 5), (1, 6)):
        trie.insert("fra", path)
        trie.insert("iad", path)
    trie.correct("fra", (1, 2, 3), 1)
    assert [trie.match_one("fra", path) for path in ((1, 2, 3), (1, 2, 4, 5), (1, 6))] == [1, 1, 2]
    assert [trie.match_one("iad", path) for path in ((1, 2, 3), (1, 2, 4, 5), (1, 6))] == [3, 4, 2]
    trie.correct("fra", (1, 2, 4, 5), 4)
    assert trie.match_one("fra", (1, 2, 4, 5)) == 4


def test_memory_is_no_load_on_the_collector() -> None:
    trie = PrefixTrie()
    trie.add("fra", 1 << 30)
    trie.insert("fra", tuple(range(1, 1001)))
    for table in (trie._nodes, trie._branches._parent, trie._branches._only):
        assert len(table) >= 999
        assert not gc.is_tracked(table)


def test_bad_calls_name_what_is_wrong() -> None:
    trie = PrefixTrie()
    for bad in (lambda: trie.add("fra", -1), lambda: trie.set_capacity("fra", -1), lambda: trie.hold("fra", -1)):
        with pytest.raises(ValueError, match="_bytes must be 0 or more"):
            bad()
    assert "fra" not in trie
    trie.add("fra", 0)
    with pytest.raises(ValueError, match="depth"):
        trie.correct("fra", (1,), 2)
    with pytest.raises(KeyError):
        trie.insert("nowhere", (1,))


def test_the_number_of_locations_is_bounded() -> None:
    trie = PrefixTrie()
    for i in range(LOCATIONS_MAX):
        trie.add(str(i), 0)
    with pytest.raises(ValueError, match="locations"):
        trie.add("one more", 0)


def test_where_a_path_goes_on() -> None:
    trie = PrefixTrie()
    for name in ("a", "b"):
        trie.add(name, 100_000)
    short, left, right = nodes_of((1, 2)), nodes_of((1, 2, 3)), nodes_of((1, 2, 4))
    trie.insert("a", short)
    assert (trie.goes_on(short[0]), trie.goes_on(short[1]), trie.goes_on(99)) == (True, False, False)
    trie.insert("b", left)  # whoever holds it
    trie.insert("a", right)
    assert trie.goes_on(short[1])
    trie.evict("b", left[2])
    assert trie.goes_on(short[1])
    trie.evict("a", right[2])
    assert not trie.goes_on(short[1])
