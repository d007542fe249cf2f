"""The index of exact blocks against a naive model of engines' caches, and its answers to what makes no sense."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.fleet.blocks import LOOKED_AT, BlockIndex, Path
from regional_lb.fleet.kv_events import Cleared, Linked, Lost, Removed, Stored, canonical_keys

SIZE = 4


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def prompt(text: str, **more: str) -> Path:
    """One block per letter, and one more token."""
    return Path(ids(*(ord(c) for c in text for _ in range(SIZE)), 0), **more)


def stored(text: str, first: int = 0, copy: str = "", **more: object) -> Stored:
    """Blocks of a text from letter number `first` on, named by the engine as the text up to there."""
    names = [(copy + text[: end + 1]).encode() for end in range(first, len(text))]
    tokens = ids(*(ord(c) for c in text[first:] for _ in range(SIZE)))
    return Stored(names, (copy + text[:first]).encode() if first else None, tokens, SIZE, **more)  # type: ignore[arg-type]


def removed(*texts: str) -> Removed:
    return Removed([text.encode() for text in texts])


def index(*replicas: str, ranks: int = 1, kv_tokens: int = 4000) -> BlockIndex:
    """These replicas, empty and linked, by their own word."""
    made = BlockIndex()
    for name in replicas:
        made.add(name, ranks)
        made.resize(name, kv_tokens)
        for rank in range(ranks):
            made.apply(name, rank, Cleared())
            made.apply(name, rank, Linked(up=True))
    return made


def exact(blocks: BlockIndex, text: str, **more: str) -> dict[str, float]:
    return blocks.known(prompt(text, **more)).exact


def test_stored_blocks_are_found_to_their_depth() -> None:
    blocks = index("r1", "r2")
    blocks.apply("r1", 0, stored("abcd"))
    blocks.apply("r2", 0, stored("ab"))
    blocks.apply("r2", 0, stored("abx", first=2))
    assert exact(blocks, "abcde") == {"r1": 16.0, "r2": 8.0}
    assert exact(blocks, "abx") == {"r1": 8.0, "r2": 12.0}
    assert exact(blocks, "zzz") == {"r1": 0.0, "r2": 0.0}
    assert (len(blocks), blocks.nodes) == (7, 5)


def test_the_last_token_is_always_computed() -> None:
    blocks = index("r1")
    blocks.apply("r1", 0, stored("abc"))
    assert blocks.known(Path(ids(*(ord(c) for c in "abc" for _ in range(SIZE))))).exact == {"r1": 8.0}
    assert blocks.known(Path(ids(1))).exact == {"r1": 0.0}


def test_adapters_and_salts_keep_apart() -> None:
    blocks = index("r1")
    blocks.apply("r1", 0, stored("ab", adapter="sql"))
    blocks.apply("r1", 0, stored("cd", extras=(canonical_keys(["pepper"]), b"")))
    assert exact(blocks, "ab") == exact(blocks, "cd") == {"r1": 0.0}
    assert exact(blocks, "ab", adapter="sql") == {"r1": 8.0}
    assert exact(blocks, "cd", cache_salt="pepper") == {"r1": 8.0}
    assert exact(blocks, "ab", adapter="sql", cache_salt="pepper") == {"r1": 0.0}


def test_a_block_stored_several_times_stays_until_every_copy_is_removed() -> None:
    blocks = index("r1")
    for _ in range(3):
        blocks.apply("r1", 0, stored("ab"))
    blocks.apply("r1", 0, stored("ab", copy="other name "))
    for _ in range(3):
        blocks.apply("r1", 0, removed("a", "ab"))
        assert exact(blocks, "ab") == {"r1": 8.0}
    blocks.apply("r1", 0, removed("other name a", "other name ab"))
    assert exact(blocks, "ab") == {"r1": 0.0}
    assert (len(blocks), blocks.nodes) == (0, 0)


def test_a_missing_block_ends_the_cached_prefix() -> None:
    blocks = index("r1")
    blocks.apply("r1", 0, stored("abcd"))
    blocks.apply("r1", 0, removed("ab"))
    assert exact(blocks, "abcd") == {"r1": 4.0}
    blocks.apply("r1", 0, stored("ab", first=1))
    assert exact(blocks, "abcd") == {"r1": 16.0}


def test_only_complete_events_are_exact() -> None:
    blocks = BlockIndex()
    blocks.add("r1", 1)
    blocks.apply("r1", 0, stored("ab"))
    assert blocks.known(prompt("ab")) == ({}, {})  # no link
    blocks.apply("r1", 0, Linked(up=True))
    assert blocks.known(prompt("ab")) == ({}, {"r1": 8.0})
    blocks.apply("r1", 0, Cleared())
    blocks.apply("r1", 0, stored("abc"))
    assert blocks.known(prompt("ab")) == ({"r1": 8.0}, {})
    blocks.apply("r1", 0, Linked(up=False))
    assert blocks.known(prompt("ab")) == ({}, {})  # it may or may not be there still
    assert blocks.held_tokens("r1") is None
    blocks.apply("r1", 0, Linked(up=True))
    assert blocks.held_tokens("r1") == 12.0
    blocks.apply("r1", 0, Lost(all=False))
    assert blocks.known(prompt("ab")) == ({}, {"r1": 8.0})
    blocks.apply("r1", 0, Lost())
    assert blocks.known(prompt("ab")) == ({}, {})


def test_a_replica_that_reported_as_many_blocks_as_it_holds_has_reported_all() -> None:
    blocks = BlockIndex()
    blocks.add("r1", 1)
    blocks.apply("r1", 0, Linked(up=True))
    blocks.apply("r1", 0, stored("abcdefghi"))
    assert blocks.exact == 0  # the size of the cache is not known yet
    blocks.resize("r1", 40)  # ten blocks
    blocks.resize("nobody", 40)
    blocks.apply("r1", 0, stored("a"))
    assert blocks.exact == 0
    blocks.apply("r1", 0, stored("abcdefghij", first=9))
    assert exact(blocks, "abcdefghij") == {"r1": 40.0}


def test_cached_tokens_are_averaged_over_the_ranks() -> None:
    blocks = index("r1", ranks=2)
    blocks.apply("r1", 1, stored("abcd"))
    assert exact(blocks, "abcd") == {"r1": 8.0}
    blocks.apply("r1", 0, stored("ab"))
    assert exact(blocks, "abcd") == {"r1": 12.0}
    blocks.apply("r1", 0, Lost())
    assert blocks.known(prompt("abcd")) == ({}, {"r1": 8.0})


def test_impossible_kv_events_are_counted() -> None:
    blocks = index("r1", kv_tokens=40)
    blocks.apply("r1", 0, stored("abc", first=2))
    blocks.apply("r1", 0, removed("nobody"))
    blocks.apply("r1", 0, stored("a"))
    blocks.apply("r1", 0, Stored([b"x"], None, bytes(32), 8))
    assert blocks.ignored == {"parent": 1, "block": 1, "block_size": 1}
    blocks.apply("r9", 0, stored("a"))
    blocks.apply("r1", 5, stored("a"))
    assert len(blocks) == 1
    blocks.apply("r1", 0, Cleared())
    blocks.resize("r1", 40)
    many = range(2000)  # in a cache of ten: some removals must have been lost
    blocks.apply("r1", 0, Stored([*many], None, ids(*(n for n in many for _ in range(SIZE))), SIZE))
    assert (len(blocks), blocks.nodes, blocks.exact) == (0, 0, 0)
    assert blocks.ignored["full"] > 0


def test_all_replicas_share_one_bound_of_blocks() -> None:
    blocks = BlockIndex(blocks_max=3)
    blocks.add("r1", 1)
    blocks.apply("r1", 0, stored("abcd"))
    assert (len(blocks), blocks.ignored["full"]) == (0, 1)


def test_an_engine_that_reports_without_end_is_forgotten_and_no_other() -> None:
    blocks = BlockIndex(blocks_max=24)
    for name in ("honest", "other", "endless"):
        blocks.add(name, 1)
        blocks.apply(name, 0, Linked(up=True))
        blocks.apply(name, 0, Cleared())
    blocks.apply("honest", 0, stored("abcd"))
    blocks.apply("other", 0, stored("abxy"))
    for first in "01":
        blocks.apply("endless", 0, stored(f"{first}2345678"))
    blocks.apply("honest", 0, stored("abcdefgh", first=4))
    assert blocks.known(prompt("abcdefgh")) == ({"honest": 8.0 * SIZE, "other": 2.0 * SIZE}, {})
    assert len(blocks) == 8 + 4
    assert blocks.events_state("endless") == "partial"
    assert blocks.ignored == {"full": 16}


@pytest.mark.parametrize(("blocks_held", "exactly"), [(LOOKED_AT + 50, False), (LOOKED_AT - 1, True)])
def test_of_very_many_blocks_the_first_are_looked_up(blocks_held: int, exactly: bool) -> None:
    """An engine may have blocks of a single token, and one that is hostile may say so."""
    blocks, tokens = BlockIndex(), struct.pack(f"<{LOOKED_AT + 100}I", *range(LOOKED_AT + 100))
    for name in ("r1", "r2"):
        blocks.add(name, 1)
        blocks.apply(name, 0, Linked(up=True))
        blocks.apply(name, 0, Cleared())
    blocks.apply("r1", 0, Stored(range(blocks_held), None, tokens[: 4 * blocks_held], 1))
    path = Path(tokens)
    known = ({"r1": float(blocks_held), "r2": 0.0}, {}) if exactly else ({"r2": 0.0}, {"r1": float(LOOKED_AT)})
    assert blocks.known(path) == known
    assert blocks.ends_within(path) == exactly
    assert len(path.nodes(1, 0)) <= LOOKED_AT


def test_events_of_other_layer_groups_are_ignored() -> None:
    blocks = index("r1")
    blocks.apply("r1", 0, stored("ab", group=0))
    blocks.apply("r1", 0, stored("abcd", group=1))
    blocks.apply("r1", 0, Removed([b"ab"], group=1))
    assert exact(blocks, "abcd") == {"r1": 8.0}
    blocks.apply("r1", 0, Removed([b"ab"], group=0))
    assert exact(blocks, "abcd") == {"r1": 4.0}


def test_a_dropped_replica_leaves_no_blocks_and_its_slot_is_reused() -> None:
    blocks = index("r1", "r2")
    blocks.apply("r1", 0, stored("ab"))
    blocks.drop("r1")
    blocks.drop("r1")
    assert (len(blocks), blocks.nodes, exact(blocks, "ab")) == (0, 0, {"r2": 0.0})
    blocks.add("r3", 1)
    blocks.apply("r3", 0, stored("abc"))
    blocks.apply("r3", 0, Linked(up=True))
    assert blocks.known(prompt("abc")) == ({"r2": 0.0}, {"r3": 12.0})
    with pytest.raises(ValueError, match="r3"):
        blocks.add("r3", 1)


_words = st.text("ab", min_size=1, max_size=5)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "copy", "remove", "clear", "lose", "cut", "link", "drop"]),
        st.sampled_from(["r1", "r2"]),
        _words,
        st.integers(0, 4),
    ),
    max_size=40,
)


class _Naive:
    """One cache: copies of each block, by all its text."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.complete = self.up = True

    def depth(self, text: str) -> int:
        for n in range(1, len(text) + 1):
            if not self.held[text[:n]]:
                return n - 1
        return len(text)


@given(_steps, st.lists(_words, min_size=1, max_size=4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_index_knows_what_a_naive_model_knows(steps, asked) -> None:
    blocks, naive = index("r1", "r2"), {"r1": _Naive(), "r2": _Naive()}
    for what, name, word, n in steps:
        model = naive[name]
        if what in ("store", "copy"):
            first = model.depth(word) if what == "store" else min(n, model.depth(word))
            if first < len(word):
                blocks.apply(name, 0, stored(word, first))
                model.held.update(word[: end + 1] for end in range(first, len(word)))
        elif what == "remove":
            blocks.apply(name, 0, removed(word))
            model.held[word] -= model.held[word] > 0
        elif what in ("clear", "lose"):
            blocks.apply(name, 0, Cleared() if what == "clear" else Lost())
            model.held.clear()
            model.complete = what == "clear"
        elif what in ("cut", "link"):
            blocks.apply(name, 0, Linked(up=what == "link"))
            model.up = what == "link"
        else:
            blocks.drop(name)
            blocks.add(name, 1)
            naive[name] = model = _Naive()
            model.complete = model.up = False
    for text in asked:
        known = blocks.known(prompt(text))
        depths = {name: model.depth(text) * float(SIZE) for name, model in naive.items()}
        assert known.exact == {n: depths[n] for n, model in naive.items() if model.up and model.complete}
        partly = {n: depths[n] for n, model in naive.items() if model.up and not model.complete}
        assert known.least == {n: tokens for n, tokens in partly.items() if tokens}
    kinds = [{text for text, copies in model.held.items() if copies} for model in naive.values()]
    assert len(blocks) == sum(map(len, kinds))
    assert blocks.nodes == len(set().union(*kinds))
