"""What replicas are thought to hold: by our mirrors, and by their own word."""

from __future__ import annotations

from msgspec.structs import replace
from worlds import replica, request

from farhop.balance.estimate import Estimates
from farhop.balance.machine import Address
from regional_lb.memory import Memory


def test_another_process_under_the_same_name_begins_empty_and_who_left_is_forgotten() -> None:
    memory, one = Memory(Estimates()), request("a")
    first = replica("r1")
    memory.adopt(first, None)
    memory.journal.insert("r1", one.chain, None)
    memory.adopt(first, first)
    assert memory.trie.count("r1") == len(one.chain)
    memory.adopt(replace(first, address=Address("elsewhere", 1)), first)
    assert memory.trie.count("r1") == 0
    memory.drop("r1")
    assert "r1" not in memory.trie


def test_a_mirror_is_as_large_as_its_cache() -> None:
    memory, long = Memory(Estimates()), request("a", 8192)
    small = replica("r1", kv_tokens=256)
    memory.adopt(small, None)
    memory.journal.insert("r1", long.chain, None)
    assert memory.trie.bytes_held("r1") <= 256 * 4
    memory.fit(replace(small, kv_tokens=64))
    assert memory.trie.bytes_held("r1") <= 64 * 4


def test_a_tokenizer_is_gone_by_until_it_counts_wrong_thrice_in_a_row() -> None:
    memory = Memory(Estimates())
    for told in (11, 11, 10, 11, 11):
        memory.counted("m", 10, told)
        assert memory.counts_right("m")
    memory.counted("m", 10, 11)
    assert not memory.counts_right("m")
    assert memory.miscounts == 5
