"""The paged cache against its invariants, under any order of use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farhop_lab.engine.core.kv import BlockTable, PagedCache

CAPACITY = 8


def _chain(word: str) -> list[int]:
    """Names of the blocks of `word`, one a letter: a name covers all letters before it."""
    return [int.from_bytes(word[: end + 1].encode()) for end in range(len(word))]


def _hold(cache: PagedCache, word: str) -> BlockTable:
    """A sequence that reuses what it can of `word` and computes the rest."""
    table, chain = BlockTable(), _chain(word)
    depth = cache.match(chain)
    cache.share(table, chain[:depth])
    assert cache.grow(table, len(chain) - depth)
    cache.fill(table, chain[depth:])
    return table


def test_a_released_prefix_is_found_again_and_shared() -> None:
    cache = PagedCache(CAPACITY)
    cache.release(_hold(cache, "abcd"))
    assert (cache.referenced, cache.cached, cache.usage) == (0, 4, 0)
    first, second = _hold(cache, "abcx"), _hold(cache, "abcx")
    assert cache.referenced == 4  # three shared, one new, all held twice
    cache.release(first)
    assert cache.referenced == 4
    cache.release(second)
    assert (cache.referenced, cache.cached) == (0, 5)


def test_oldest_leaves_are_evicted_first() -> None:
    cache = PagedCache(CAPACITY)
    cache.release(_hold(cache, "abcd"))
    cache.release(_hold(cache, "wxyz"))
    table = BlockTable()
    assert cache.grow(table, 3)
    assert cache.match(_chain("abcd")) == 1
    assert cache.match(_chain("wxyz")) == 4
    assert cache.evictions == 3


def test_held_chain_reports_its_merely_cached_blocks() -> None:
    cache = PagedCache(CAPACITY)
    first = _hold(cache, "abcx")
    cache.release(_hold(cache, "abcdef"))
    assert [cache.unreferenced(_chain("abcdef")[:depth]) for depth in range(7)] == [0, 0, 0, 0, 1, 2, 3]
    cache.release(first)
    assert [cache.unreferenced(_chain("abcdef")[:depth]) for depth in range(7)] == [0, 1, 2, 3, 4, 5, 6]


def test_referenced_blocks_are_never_evicted() -> None:
    cache = PagedCache(CAPACITY)
    _hold(cache, "abcdef")
    table = BlockTable()
    assert not cache.grow(table, 3)
    assert table.blocks == 0
    assert cache.grow(table, 2)
    assert cache.usage == 1


def test_two_sequences_that_compute_the_same_blocks_share_them() -> None:
    cache = PagedCache(CAPACITY)
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        assert cache.grow(table, 2)
    assert cache.referenced == 4
    for table in tables:
        for name in _chain("ab"):
            cache.fill(table, [name])
    assert cache.referenced == 2
    assert cache.available == CAPACITY - 2


def test_a_cache_needs_a_block() -> None:
    with pytest.raises(ValueError, match="kv_blocks"):
        PagedCache(0)


class AnyOrder(RuleBasedStateMachine):
    """Sequences over a small alphabet come, grow and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(CAPACITY)
        self.held: list[tuple[BlockTable, str]] = []

    @rule(word=st.text("ab", min_size=1, max_size=5), computed=st.integers(0, 5))
    def arrive(self, word: str, computed: int) -> None:
        table, chain = BlockTable(), _chain(word)
        depth = self.cache.match(chain)
        self.cache.share(table, chain[:depth])
        available = self.cache.available
        granted = self.cache.grow(table, len(chain) - depth)
        assert granted == (len(chain) - depth <= available)
        if granted:
            self.cache.fill(table, chain[depth : depth + computed])
        self.held.append((table, word))

    @rule(at=st.integers(0, 9))
    def go_on(self, at: int) -> None:
        if self.held:
            table, word = self.held[at % len(self.held)]
            if table.private:
                self.cache.fill(table, _chain(word)[table.named : table.named + 1])

    @rule(at=st.integers(0, 9))
    def leave(self, at: int) -> None:
        if self.held:
            table, _ = self.held.pop(at % len(self.held))
            self.cache.release(table)
            self.cache.release(table)  # harmless
            assert table.blocks == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()
        names = {name for table, _ in self.held for name in table.full}
        assert self.cache.referenced == len(names) + sum(table.private for table, _ in self.held)
        if not self.held:
            assert self.cache.available == CAPACITY

    @invariant()
    def a_held_block_has_its_parent(self) -> None:
        for word in ("aaaaa", "ababa", "abbab", "bbbbb", "baabb"):
            chain = _chain(word)
            depth = self.cache.match(chain)
            assert all(self.cache.match([name]) == 0 for name in chain[depth:])


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
