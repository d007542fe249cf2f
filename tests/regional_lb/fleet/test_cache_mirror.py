"""What replicas are thought to hold: by our mirrors, and by their own word."""

from __future__ import annotations

from msgspec.structs import replace
from worlds import replica, request

from farhop.balance.estimate.estimates import Estimates
from farhop.balance.machine import Address
from regional_lb.fleet.cache_mirror import CacheMirror


def test_a_new_process_of_the_same_name_begins_empty_and_a_removed_one_is_forgotten() -> None:
    mirror, one = CacheMirror(Estimates()), request("a")
    first = replica("r1")
    mirror.adopt(first, None)
    mirror.journal.insert("r1", one.chain, None)
    mirror.adopt(first, first)
    assert mirror.trie.count("r1") == len(one.chain)
    mirror.adopt(replace(first, address=Address("elsewhere", 1)), first)
    assert mirror.trie.count("r1") == 0
    mirror.drop("r1")
    assert "r1" not in mirror.trie


def test_a_mirror_is_as_large_as_its_cache() -> None:
    mirror, long = CacheMirror(Estimates()), request("a", 8192)
    small = replica("r1", kv_tokens=256)
    mirror.adopt(small, None)
    mirror.journal.insert("r1", long.chain, None)
    assert mirror.trie.bytes_held("r1") <= 256 * 4
    mirror.fit(replace(small, kv_tokens=64))
    assert mirror.trie.bytes_held("r1") <= 64 * 4
