"""A map in parts is a map."""

from __future__ import annotations

import gc
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.prefix.nodes import NodeMap

NODES = st.integers(0, 2**64 - 1) | st.integers(0, 20)


@given(st.lists(st.tuples(st.lists(NODES, max_size=5), st.integers(0, 3), st.booleans()), max_size=30))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_node_map_behaves_like_a_dict(steps: list[tuple[list[int], int, bool]]) -> None:
    ours, theirs = NodeMap(), dict[int, int]()
    for nodes, value, goes in steps:
        if goes:
            assert [ours.pop(node) for node in nodes] == [theirs.pop(node, None) for node in nodes]
        else:
            ours.put(nodes, value)
            theirs.update(dict.fromkeys(nodes, value))
        assert ours.most >= len(ours) == len(theirs) == ours.most
        assert {node: ours.get(node) for node in (*theirs, 7)} == {**theirs, 7: theirs.get(7)}
        assert all(node in ours for node in theirs)
        assert sorted(ours) == sorted(theirs)
        copy = NodeMap.alike(ours.shards, 9)
        assert {node: copy.get(node) for node in copy} == dict.fromkeys(theirs, 9)
    assert sorted(ours.drain()) == sorted(theirs)
    assert (len(ours), list(ours)) == (0, [])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 walks every dict, whatever it holds")
def test_a_node_map_is_not_tracked_by_the_garbage_collector() -> None:
    nodes = NodeMap(range(10_000))
    assert not any(gc.is_tracked(part) for part in nodes.shards)


def test_draining_a_node_map_removes_nodes_gradually() -> None:
    nodes = NodeMap(range(2560))
    for count, _ in enumerate(nodes.drain()):
        assert 2560 - count - 10 <= len(nodes) <= 2560 - count + 10
