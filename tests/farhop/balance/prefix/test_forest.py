"""Rows given and taken, nodes hung and removed, sets of holders kept once: against dictionaries."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.prefix.forest import Forest, Holders
from farhop.balance.prefix.nodes import SHARDS

NODES = st.integers(0, 2**64 - 1)


def put(forest: Forest, node: int, above: int) -> int:
    row = forest.take()
    forest.shards[node % SHARDS][node] = row
    forest.key[row], forest.child[row], forest.depth[row] = node, 0, forest.depth[above] + 1
    forest.link(row, above)
    return row


def children(forest: Forest, row: int) -> set[int]:
    found, child = set(), forest.child[row]
    while child:
        found.add(forest.key[child])
        child = forest.after[child]
    return found


@given(st.lists(st.tuples(NODES, st.integers(0, 30), st.booleans()), max_size=60))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_node_keeps_its_parent_and_children(steps: list[tuple[int, int, bool]]) -> None:
    forest = Forest()
    below: dict[int, set[int]] = {}
    rows: dict[int, int] = {}
    for node, position, goes in steps:
        if node in rows:
            continue
        above = [*rows, None][position % (len(rows) + 1)]
        rows[node] = put(forest, node, rows[above] if above is not None else 0)
        below[node] = set()
        if above is not None:
            below[above].add(node)
        leaves = [node for node in rows if not below[node]]
        if goes:
            leaf = leaves[position % len(leaves)]
            forest.remove(rows.pop(leaf))
            del below[leaf]
            for others in below.values():
                others.discard(leaf)
        assert {node: forest.find(node) for node in below} == rows
        assert {node: children(forest, row) for node, row in rows.items()} == below
        assert len(forest) == len(rows)
        assert len(set(rows.values()) | {0}) == len(rows) + 1


def test_rows_are_used_again_before_there_are_more() -> None:
    forest = Forest()
    taken = [forest.take() for _ in range(5000)]
    assert len(set(taken)) == 5000
    assert 0 not in taken
    size = len(forest.key)
    for row in taken:
        forest.give(row)
    assert {forest.take() for _ in taken} == set(taken)
    assert len(forest.key) == size


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=60))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_set_is_kept_once_and_as_long_as_a_node_has_it(steps: list[tuple[int, bool]]) -> None:
    holders, counts = Holders(), dict[int, int]()
    for mask, more in steps:
        if more:
            holders.counts[holders.id(mask)] += 1
            counts[mask] = counts.get(mask, 0) + 1
        elif mask in counts:
            holders.release(holders.id(mask))
            counts[mask] -= 1
            if not counts[mask]:
                del counts[mask]
        ids = {mask: holders.id(mask) for mask in counts}
        assert len(set(ids.values()) | {0}) == len(counts) + 1
        assert all(holders.masks[set_id] == mask for mask, set_id in ids.items())
        assert len(holders.masks) <= 6
