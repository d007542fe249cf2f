from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.sim.baselines.tree import PrefixTree

TEXTS = st.lists(st.tuples(st.text("ab", max_size=12), st.sampled_from(["x", "y", "z"])), max_size=40)


def common(a: bytes, b: bytes) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(TEXTS, st.text("ab", max_size=14))
def test_depths_are_those_of_a_comparison_with_every_text(sent: list[tuple[str, str]], asked: str) -> None:
    tree = PrefixTree()
    for at, (text, owner) in enumerate(sent):
        tree.insert(text.encode(), owner, float(at))
    query = asked.encode()
    expected = {
        owner: max((common(query, text.encode()) for text, to in sent if to == owner), default=0) for owner in "xyz"
    }
    assert tree.depths(query, ["x", "y", "z"]) == expected
    longest = max(expected.values())
    owners = [owner for owner in "zxy" if expected[owner] == longest] if longest else []
    assert tree.match(query, ["z", "x", "y"]) == (longest, owners)
    assert tree.match(query, ["y"])[0] == expected["y"]


@given(TEXTS)
def test_a_size_is_what_a_trie_of_its_own_would_have(sent: list[tuple[str, str]]) -> None:
    tree = PrefixTree()
    for at, (text, owner) in enumerate(sent):
        tree.insert(text.encode(), owner, float(at))
    for owner in "xyz":
        prefixes = {text[:n] for text, to in sent if to == owner for n in range(1, len(text) + 1)}
        assert tree.size(owner) == len(prefixes)


def test_above_the_bound_the_oldest_leaves_go_once_a_minute() -> None:
    tree = PrefixTree(chars_max=10)
    tree.insert(b"shared-one", "x", 0.0)
    tree.insert(b"shared-two", "x", 1.0)
    tree.insert(b"shared-two", "y", 1.0)
    assert tree.size("x") == 13
    tree.insert(b"shared-two", "x", 59.0)
    assert tree.size("x") == 13, "not before the minute is over"
    tree.insert(b"z", "w", 60.0)
    assert tree.size("x") == 10
    assert tree.depths(b"shared-one", ["x"]) == {"x": 7}
    assert tree.depths(b"shared-two", ["x", "y"]) == {"x": 10, "y": 10}


def test_a_whole_branch_goes_leaf_by_leaf() -> None:
    tree = PrefixTree(chars_max=3)
    for at, text in enumerate((b"aab", b"aac", b"aacd", b"b")):
        tree.insert(text, "x", float(at))
    tree.insert(b"b", "x", 60.0)
    assert tree.size("x") <= 3
    assert tree.depths(b"b", ["x"]) == {"x": 1}
    assert tree.depths(b"aacd", ["x"])["x"] <= 2
