"""One location's order: the last touched is last, run by run or node by node, as in a list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_checks import rows_in_order

from farhop.balance.prefix.chain import bytes_at
from farhop.balance.prefix.mirror import Mirror, Mirrors

# Paths of a small tree: node 213 is the child 3 of 21.
PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=7).map(
    lambda labels: [int("".join(map(str, labels[: i + 1]))) for i in range(len(labels))]
)


def two(capacity_bytes: int = 1 << 20) -> tuple[Mirrors, Mirror, Mirror]:
    store = Mirrors()
    mirrors = Mirror(0, capacity_bytes), Mirror(1, capacity_bytes)
    for mirror in mirrors:
        store.stand(mirror)
    return store, *mirrors


def order(store: Mirrors, mirror: Mirror) -> list[int]:
    return [store.forest.key[row] for row in rows_in_order(store, mirror)]


@given(st.lists(st.tuples(st.booleans(), PATHS), max_size=30), st.sampled_from([1 << 20, 256 * 9]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_order_is_that_of_the_last_touch(steps: list[tuple[bool, list[int]]], capacity_bytes: int) -> None:
    store, one, other = two(capacity_bytes)
    lists: dict[int, list[int]] = {0: [], 1: []}
    for first, path in steps:
        mirror = one if first else other
        store.insert(mirror, 0, path)
        kept = [node for node in lists[mirror.slot] if node not in path] + path[::-1]
        lists[mirror.slot] = kept[-(capacity_bytes // 256) :]
        assert {0: order(store, one), 1: order(store, other)} == lists


def test_a_path_that_lies_in_order_is_moved_whole() -> None:
    store, one, _ = two()
    store.insert(one, 0, (1, 2, 3))
    store.insert(one, 0, (4, 5))
    store.insert(one, 0, (1, 2, 3))
    assert order(store, one) == [5, 4, 3, 2, 1]
    assert one.used_bytes == bytes_at(3) + bytes_at(2)


def test_eviction_takes_the_oldest_first_and_a_node_ends_with_its_last_holder() -> None:
    store, one, other = two()
    gone: list[int] = []

    class Ear:
        def stored(self, parent: int, nodes: object) -> None: ...

        def evicted(self, node: int) -> None:
            gone.append(node)

        def cleared(self) -> None: ...

        def hidden(self) -> None: ...

    store.observer = Ear()
    store.insert(one, 0, (1, 2, 3))
    store.insert(other, 0, (1, 2))
    store.shrink(one, 2)
    assert (order(store, one), gone, store.entries) == ([1], [3], 3)
    store.shrink(other, 1)
    assert (order(store, other), gone) == ([1], [3, 2])
    assert store.prune(one, store.place(one, 1), 10) == 1
    store.insert(one, 0, (1, 2))  # node 1 has a holder, but none whose row is the node's own
    assert (order(store, one), order(store, other), gone) == ([2, 1], [1], [3, 2])


@pytest.mark.parametrize("lie", [(9, 2, 3), (1, 3), (3,), (1, 7, 2), (8, 8), (3, 2, 1)])
def test_nodes_that_contradict_known_parents_are_left_out(lie: tuple[int, ...]) -> None:
    store, one, other = two()
    store.insert(one, 0, (1, 2, 3))
    for mirror in (one, other):
        store.insert(mirror, 0, lie)
        for row in rows_in_order(store, mirror):
            above = store.forest.parent[row]
            assert not above or store.forest.place(above, mirror.slot)
    assert [store.forest.key[store.forest.parent[store.forest.find(node)]] for node in (1, 2, 3)] == [0, 1, 2]


@given(st.lists(st.tuples(st.booleans(), PATHS), min_size=1, max_size=20), st.data(), st.integers(1, 5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_node_goes_with_what_descends_from_it_bit_by_bit(
    steps: list[tuple[bool, list[int]]], data: st.DataObject, most: int
) -> None:
    store, one, other = two()
    for first, path in steps:
        store.insert(one if first else other, 0, path)
    held, others = set(order(store, one)), order(store, other)
    if not held:
        return
    top = data.draw(st.sampled_from(sorted(held)))
    doomed = {node for node in held if str(node).startswith(str(top))}
    while row := store.place(one, top):
        before = len(order(store, one))
        assert store.prune(one, row, most) == before - len(order(store, one)) <= most
        for node in rows_in_order(store, one):
            above = store.forest.parent[node]
            assert not above or store.forest.place(above, one.slot)
    assert set(order(store, one)) == held - doomed
    assert order(store, other) == others
