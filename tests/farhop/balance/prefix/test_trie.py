"""The trie against a naive model: per location a set of paths, of which the least recently used leaf goes first."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trie_checks import assert_sound, held_by
from xxhash import xxh3_64_intdigest

from farhop.balance.prefix.chain import bytes_at, chain, depth_at
from farhop.balance.prefix.mirror import TURN_NODES
from farhop.balance.prefix.trie import LOCATIONS_MAX, PrefixTrie, slots_of

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
        for depth in range(1, min(len(path), depth_at(self.limit)) + 1):  # content that can never fit evicts nothing
            self.paths[path[:depth]] = self.tick
        self.evict()

    def evict(self) -> None:
        while self.used() > self.limit:
            parents = {path[:-1] for path in self.paths}
            leaves = [path for path in self.paths if path not in parents]
            del self.paths[min(leaves, key=self.paths.__getitem__)]

    def depth(self, path: Path) -> int:
        return next((d for d in range(len(path), 0, -1) if path[:d] in self.paths), 0)

    def confine(self, path: Path, depth: int) -> int:
        held, top = self.depth(path), path[: depth + 1]
        if held > depth:
            kept = {p: tick for p, tick in self.paths.items() if p[: depth + 1] != top or p == path[: len(p)]}
            self.paths = kept
        return held


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
    def confine(self, data: st.DataObject, path: Path) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive)))
        depth = data.draw(st.integers(0, len(path)))
        assert self.trie.confine(name, nodes_of(path), depth) == self.naive[name].confine(path, depth)

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
            assert set(held_by(self.trie, name)) == {nodes_of(path)[-1] for path in naive.paths}
            assert all(path[:-1] in naive.paths for path in naive.paths if len(path) > 1)  # ancestor closure
            held |= set(naive.paths)
        assert self.trie.locations == tuple(self.naive)
        assert self.trie.nodes == len(held)
        assert self.trie.entries == sum(len(naive.paths) for naive in self.naive.values())
        assert_sound(self.trie)


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)

CHAINS = st.lists(st.integers(0, 6), max_size=8).map(tuple)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "confine", "clear", "hold"]),
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
        elif call == "confine":
            trie.confine(name, lie, min(depth, len(lie)))
        elif call == "hold":
            trie.hold(name, depth * 100)
        else:
            trie.clear(name)
        assert_sound(trie)
        assert all(0 < found <= len(lie) for found in trie.match(lie).values())
    for name in NAMES:
        trie.drop(name)
    assert (trie.nodes, trie.entries) == (0, 0)
    assert_sound(trie)


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
    assert trie.match(path[:asked]) == expected  # and again from the results that the first search remembered


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
    assert max(trie.names) == 1


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


def test_confining_a_location_to_a_path_keeps_the_path_and_drops_its_siblings() -> None:
    trie = PrefixTrie()
    trie.add("fra", 1 << 20)
    trie.add("iad", 1 << 20)
    for path in ((1, 2, 3), (1, 2, 4, 5), (1, 6)):
        trie.insert("fra", path)
        trie.insert("iad", path)
    trie.insert("fra", (1, 2, 3, 7))
    assert trie.confine("fra", (1, 2, 3), 1) == 3
    assert [trie.match_one("fra", path) for path in ((1, 2, 3, 7), (1, 2, 4, 5), (1, 6))] == [3, 2, 2]
    assert [trie.match_one("iad", path) for path in ((1, 2, 3), (1, 2, 4, 5), (1, 6))] == [3, 4, 2]
    assert trie.confine("fra", (1, 2, 4, 5), 4) == 2
    assert [trie.match_one("fra", path) for path in ((1, 2, 3), (1, 2, 4, 5))] == [3, 2]
    assert_sound(trie)


def random_chains(nodes: int, locations: int, depth: int = 44, stem: int = 12) -> list[tuple[str, tuple[int, ...]]]:
    rng = Random(5)
    stems = [tuple(rng.getrandbits(64) for _ in range(stem)) for _ in range(8)]
    return [
        (f"r{n % locations}", rng.choice(stems) + tuple(rng.getrandbits(64) for _ in range(depth - stem)))
        for n in range(nodes // (depth - stem))
    ]


def seen_by_the_collector(root: object) -> int:
    """How many objects the collector walks on `root`'s account. Not `gc.get_objects`: other threads' are in that."""
    seen, todo, shared = {id(root)}, [root], (type, FunctionType, ModuleType)
    while todo:
        for found in gc.get_referents(todo.pop()):
            if gc.is_tracked(found) and id(found) not in seen and not isinstance(found, shared):
                seen.add(id(found))
                todo.append(found)
    return len(seen)


def test_a_node_is_nothing_to_the_collector() -> None:
    trie = PrefixTrie()
    for name in ("a", "b"):
        trie.add(name, 1 << 30)
    trie.insert("a", (1, 2))
    trie.insert("b", (1, 2))
    gc.collect()
    before = seen_by_the_collector(trie)
    for name, path in random_chains(20_000, 1):
        for holder in ("a", "b") if name == "r0" else ():
            trie.insert(holder, path)
    gc.collect()
    assert trie.entries > 40_000
    assert seen_by_the_collector(trie) - before < 20


@pytest.mark.parametrize("holders", [1, 3])
def test_memory_is_bounded_per_node_and_location(holders: int) -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        trie = PrefixTrie()
        for n in range(60):
            trie.add(f"r{n}", 1 << 30)
        rng = Random(6)
        for n in range(50_000 // 32 // holders):
            path = tuple(rng.getrandbits(64) for _ in range(32))
            for i in range(holders):
                trie.insert(f"r{(n + 7 * i) % 60}", path)
        del path
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert trie.entries > 49_000
    assert used / trie.entries <= 200


def observed(trie: PrefixTrie) -> list[Any]:
    """What its observer is told from now on."""
    seen: list[Any] = []

    class Ear:
        def stored(self, parent: int, nodes: Sequence[int]) -> None:
            seen.append(("stored", parent, tuple(nodes)))

        def evicted(self, node: int) -> None:
            seen.append(node)

        def cleared(self) -> None:
            seen.append("cleared")

        def hidden(self) -> None:
            seen.append("hidden")

    trie.observer = Ear()
    return seen


def filled(nodes: int, locations: int) -> PrefixTrie:
    trie = PrefixTrie()
    for n in range(locations):
        trie.add(f"r{n}", 1 << 30)
    for name, path in random_chains(nodes, locations):
        trie.insert(name, path)
    return trie


def test_a_large_location_is_cleared_at_once_and_swept_bit_by_bit() -> None:
    trie = filled(8000, 2)
    path = trie.path(held_by(trie, "r0")[-44])  # the last to be swept
    stem, own = path[:12], path[12:]
    other = trie.count("r1")
    found = observed(trie)
    trie.hold("r0", 1000)
    trie.clear("r0")
    assert trie.match(path) == {"r1": 12}
    assert (trie.count("r0"), trie.bytes_held("r0"), trie.match_one("r0", path)) == (0, 0, 0)
    assert trie.locations == ("r0", "r1")
    assert_sound(trie)
    trie.insert("r0", path[:20])  # before the sweep has reached it
    assert trie.match(path) == {"r0": 20, "r1": 12}
    before = trie.entries
    trie.sweep(100)
    assert trie.entries == before - 100
    assert_sound(trie)
    while trie.to_sweep:
        trie.sweep()
    assert_sound(trie)
    assert trie.entries == 20 + other
    assert not {*stem, *own[:8]} & set(found)
    assert set(own[8:]) < set(found)
    assert trie.match(path) == {"r0": 20, "r1": 12}


def test_inserting_sweeps_what_was_cleared_faster_than_it_adds() -> None:
    trie = filled(8000, 2)
    trie.drop("r0")
    with pytest.raises(KeyError):
        trie.count("r0")
    trie.add("r0", 1 << 30)
    for _, path in random_chains(4000, 1):
        entries = trie.entries
        left = sum(mirror.nodes for mirror in trie.to_sweep)
        trie.insert("r0", path)
        assert trie.entries <= entries - min(left, 256 + 44) + 44
    assert not trie.to_sweep
    assert_sound(trie)


def test_many_large_clears_without_an_insert_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop.balance.prefix.trie.TURN_NODES", 40)
    monkeypatch.setattr("farhop.balance.prefix.trie._CLEARED_MAX", 2)
    trie = filled(4000, 6)
    for n in range(5):
        trie.clear(f"r{n}")
        assert len(trie.to_sweep) <= 2
        assert_sound(trie)
    assert trie.match((1,)) == {}


def test_the_only_holder_of_all_nodes_is_cleared_with_one_event() -> None:
    trie = filled(8000, 1)
    trie.add("r1", 1 << 20)
    found = observed(trie)
    trie.clear("r0")
    assert (found, trie.nodes, trie.entries) == (["cleared"], 0, 0)
    assert_sound(trie)
    trie.insert("r1", (1, 2))
    trie.insert("r0", (1, 2, 3))
    assert trie.match((1, 2, 3)) == {"r0": 3, "r1": 2}
    assert found[1:] == [("stored", 0, (1, 2)), ("stored", 2, (3,))]
    for _ in range(600):
        trie.sweep()
    assert not trie.tombstones
    assert_sound(trie)


def test_a_cut_of_capacity_lets_go_of_so_many_at_once() -> None:
    trie = filled(8000, 1)
    count = trie.count("r0")
    trie.set_capacity("r0", 4096)
    assert trie.count("r0") == count - TURN_NODES
    for _ in range(8):
        trie.set_capacity("r0", 4096)
    assert 0 < trie.bytes_held("r0") <= 4096
    assert_sound(trie)


def test_extending_from_a_node_equals_inserting_the_whole_path() -> None:
    one, two = PrefixTrie(), PrefixTrie()
    for trie in (one, two):
        trie.add("a", 60_000)
        trie.add("b", 60_000)
    for name, path in (("a", (1, 2, 3)), ("b", (1, 2, 3, 4)), ("a", (1, 2, 3, 4, 5)), ("a", (1, 2, 6))):
        one.insert(name, path)
        cut = min(two.match_one(name, path), len(path) - 1)
        assert two.extend(name, path[cut - 1] if cut else 0, path[cut:])
        assert held_by(one, name) == held_by(two, name)
    assert not two.extend("b", 6, (7,))
    assert not two.extend("b", 99, (7,))
    assert_sound(two)


def test_all_nodes_goes_on_while_the_trie_changes() -> None:
    trie = filled(4000, 2)
    kept = set(held_by(trie, "r1"))
    seen: list[int] = []
    for count, node in enumerate(trie.all_nodes()):
        seen.append(node)
        if count == 100:
            trie.clear("r0")
        if count % 50 == 0:
            trie.insert("r1", (count + 1, count + 2))
    assert len(seen) == len(set(seen))
    assert kept <= set(seen)


@given(st.sets(st.integers(0, 12_000), max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_bit_mask_is_converted_back_to_its_slots(slots: set[int]) -> None:
    assert slots_of(sum(1 << slot for slot in slots)) == sorted(slots)


def test_wrong_arguments_are_refused_by_name() -> None:
    trie = PrefixTrie()
    for bad in (lambda: trie.add("fra", -1), lambda: trie.set_capacity("fra", -1), lambda: trie.hold("fra", -1)):
        with pytest.raises(ValueError, match="_bytes must be 0 or more"):
            bad()
    assert "fra" not in trie
    trie.add("fra", 0)
    with pytest.raises(ValueError, match="depth"):
        trie.confine("fra", (1,), 2)
    with pytest.raises(KeyError):
        trie.insert("nowhere", (1,))


def test_the_number_of_locations_is_bounded() -> None:
    trie = PrefixTrie()
    for i in range(LOCATIONS_MAX):
        trie.add(str(i), 0)
    with pytest.raises(ValueError, match="locations"):
        trie.add("one more", 0)


def test_the_continuations_of_a_path_are_found() -> None:
    trie = PrefixTrie()
    for name in ("a", "b"):
        trie.add(name, 100_000)
    short, left, right = nodes_of((1, 2)), nodes_of((1, 2, 3)), nodes_of((1, 2, 4))
    trie.insert("a", short)
    assert (trie.has_children(short[0]), trie.has_children(short[1]), trie.has_children(99)) == (True, False, False)
    trie.insert("b", left)  # whichever replica holds it
    trie.insert("a", right)
    assert trie.has_children(short[1])
    trie.evict("b", left[2])
    assert trie.has_children(short[1])
    trie.evict("a", right[2])
    assert not trie.has_children(short[1])


def test_the_used_share_of_a_mirror() -> None:
    trie = PrefixTrie()
    trie.add("a", 4096)
    trie.add("none", 0)
    assert (trie.filled("a"), trie.filled("none")) == (0.0, 1.0)
    trie.insert("a", chain(b"x" * 1024, 7))
    assert trie.filled("a") == trie.bytes_held("a") / 4096 > 0.0
